"""Trees of two leaves and a root, on a graph of two parts: for tests of ways to share weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.instrument import Worked
from geartrain.runtime.base import AbstractRuntime
from geartrain.train.results import Fit
from tests.rigs.passes import processes


def graph_of_pairs() -> gt.Graph:
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("parent", "slot"))
    first = nn.Linear(3, 3, dtype=torch.float64)
    nodes = graph.loop(run="steps")
    nodes.join(graph.input("x").through(first, name="first"))
    inner, root = nodes.where(lambda m: m.parent >= 0)
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
    nodes.join(pairs.through(lambda x: x.sum(1).tanh(), name="sum"))
    root.through(nn.Linear(3, 1, dtype=torch.float64), name="last").loss(square)
    return graph


def square(y: Tensor) -> Tensor:
    return (y[:, 0] - 1) ** 2


def pairs(n: int) -> list[gt.Instance]:
    torch.manual_seed(1)
    return [
        gt.Instance(
            {"x": torch.randn(2, 3, dtype=torch.float64)}, {"parent": [2, 2, -1], "slot": [0, 1, 0]}
        )
        for _ in range(n)
    ]


@final
class WorkSeen(gt.AbstractInstrument):
    """What has been done in each pass."""

    def __init__(self) -> None:
        self.passes: list[Worked] = []

    def on_worked(self, event: Worked) -> None:
        self.passes.append(event)


def pass_of_two(
    n: int,
    max_active: int,
    runtime: Callable[[int], AbstractRuntime] = processes,
    **schedule: int,
) -> tuple[Fit, Worked]:
    """A pass of n trees by two worker processes, each with so many of its own in flight."""
    seen = WorkSeen()
    session = gt.Session(
        graph_of_pairs(),
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=gt.Flush()),
        runtime=runtime(2),
        sharing=gt.SharedWeights(in_flight="each"),
        max_active=max_active,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0), **schedule),
        instruments=[seen],
    )
    fit = session.fit(pairs(n), epochs=1)
    (event,) = seen.passes
    return fit, event
