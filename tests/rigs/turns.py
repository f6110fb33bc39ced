"""A cell that rows go round in a loop, each as often as its instance says, and a readout behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt

WIDTH, CLASSES = 4, 3


def model(cell: type[nn.Module] | None = None, seed: int = 3) -> nn.ModuleDict:
    """Its parts in float64, always the same.

    Args:
        cell: Makes the cell; None: a map and a tanh.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    start = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if cell is None else cell()
    parts = {"start": start, "cell": middle, "readout": nn.Linear(WIDTH, CLASSES)}
    return nn.ModuleDict(parts).double()


def graph_of(
    parts: nn.ModuleDict, run: Literal["auto", "steps"] = "auto", **of_cell: Any
) -> gt.Graph:
    """The graph.

    Args:
        parts: Of ``model``.
        run: As of ``Graph``.
        of_cell: Besides, of the cell's ``through``.
    """
    graph = gt.Graph(value=("label", "turns"), run=run)
    states = graph.loop(name="states")
    states.join(graph.input("x", step=0).through(parts["start"], name="start"))
    stepped = states.through(parts["cell"], name="cell", **of_cell)
    done, more = stepped.where(lambda m: m.step + 1 >= m.turns)
    states.join(more.move(step=lambda m: m.step + 1))
    done.through(parts["readout"], name="readout").loss(gt.cross_entropy, target="label")
    return graph


def data(n: int) -> list[gt.Instance]:
    """So many instances of one to four turns, always the same."""
    draw = np.random.default_rng(0)
    return [
        gt.Instance(
            {"x": torch.from_numpy(draw.standard_normal((1, WIDTH)))},
            value={"label": int(draw.integers(CLASSES)), "turns": int(draw.integers(1, 5))},
        )
        for _ in range(n)
    ]


def loss_of(parts: nn.ModuleDict, some: Sequence[gt.Instance], *, reads: bool = False) -> Tensor:
    """The sum of the losses of some instances, one after the other, by plain PyTorch.

    Args:
        parts: Of ``model``.
        some: Instances.
        reads: Whether the cell is given the label too.
    """
    total = torch.zeros((), dtype=torch.float64)
    for one in some:
        h, label = parts["start"](one.inputs["x"]), torch.tensor([int(one.value["label"])])
        for _ in range(int(one.value["turns"])):
            h = parts["cell"](h, label) if reads else parts["cell"](h)
        total = total + nn.functional.cross_entropy(parts["readout"](h), label)
    return total
