"""Loops in which many rows read one: along edges, and from parents to children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph, Stream
from tests.rigs.called import WIDTH, Last, Start, linear, squared

ROUNDS, BONDS = 3, 4


class Send(nn.Module):
    """A sum of a product and of a table's rows; two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bonds, self.value = nn.Embedding(BONDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weigh = nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor, c: Tensor, bond: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.tanh(self.value(h) + self.bonds(bond))
        weight = torch.exp(torch.tanh(self.weigh(value)))
        return weight * value, weight * c[:, :1]


class Beside(nn.Module):
    """Both states and a table's rows side by side before a weight; the second one goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.bonds, self.map = nn.Embedding(BONDS, WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor, bond: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.map(torch.cat([h, self.bonds(bond), c], 1)))
        return y, (y + c)[:, :1]


class Same(nn.Module):
    """Nothing but what is read is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor, bond: Tensor) -> tuple[Tensor, Tensor]:
        y = self.map(h)
        return torch.tanh(y), y[:, :1] * c[:, :1]


class Cut(nn.Module):
    """A weight's columns, by the user's own hand."""

    def __init__(self) -> None:
        super().__init__()
        self.bonds, self.map = nn.Embedding(BONDS, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor, bond: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self.map.weight, self.map.bias
        of_h = nn.functional.linear(h, weight[:, :WIDTH], bias)
        y = torch.sigmoid(of_h + self.bonds(bond) @ weight[:, WIDTH:].t())
        return y, c[:, 1:2]


class Hear(nn.Module):
    """A new state."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, heard: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.map(torch.cat([heard, weight], 1)))
        return y + 0.5 * h, c * y


SENDS: dict[str, Callable[[], nn.Module]] = {
    "a product and a table": Send,
    "side by side": Beside,
    "nothing else": Same,
    "columns of a weight": Cut,
}


def along_edges(make: Callable[[], nn.Module], run: str, *, apart: bool = False) -> Graph:
    """A few rounds of messages along edges, and from each vertex to itself."""
    graph = Graph(edge=("bond",))
    own: dict[str, Any] = {"keep": "activations"}
    rounds = graph.loop(name="rounds", run=run)  # type: ignore[arg-type]
    rounds.join(graph.input("x", step=0).through(Start().double(), name="first", **own))
    going, done = rounds.where(lambda m: m.step < ROUNDS)
    sent = going.flatmap("edge").through(make().double(), name="send", read="bond", **own)
    come = sent.move(vertex=lambda m: m.target)
    heard = come.group(by=("vertex", "step"), size="in_degree", how="sum")
    both = graph.concat(heard, going, on=("vertex", "step"), how="tuple")
    new = both.through(Hear().double(), name="hear", **own)
    rounds.join(new.move(step=lambda m: m.step + 1))
    _judge(done, apart=apart)
    return graph


def graphs() -> list[Instance]:
    """Some, of one to nine vertices."""
    rng = np.random.default_rng(7)
    found = []
    for size in (4, 1, 9, 6, 2):
        v = np.arange(1, size)
        other = rng.integers(0, v) if size > 1 else v
        ends = np.r_[v, other, np.arange(size)], np.r_[other, v, np.arange(size)]
        columns = {
            "source": ends[0],
            "target": ends[1],
            "bond": rng.integers(0, BONDS, ends[0].size),
        }
        x = torch.from_numpy(rng.standard_normal((size, WIDTH)))
        found.append(Instance({"x": x}, edge=columns))
    return found


def different_rows(data: list[Instance]) -> int:
    """Rows that edges leave from, in all rounds."""
    return ROUNDS * sum(np.unique(each.edge["source"]).size for each in data)


class Born(nn.Module):
    """A child of its parent's state."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.map = nn.Embedding(3, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor, child: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.map(torch.cat([h, self.places(child)], 1)))
        return y, y * c


def grown(run: str, *, apart: bool = False) -> Graph:
    """A tree from its root to its leaves."""
    graph = Graph(vertex=("first", "arity"))
    own: dict[str, Any] = {"keep": "activations"}
    nodes = graph.loop(name="nodes", run=run)  # type: ignore[arg-type]
    nodes.join(graph.input("x").through(Start().double(), name="first", **own))
    born = nodes.flatmap("child", count=lambda m: m.arity)
    made = born.through(Born().double(), name="born", read="child", **own)
    nodes.join(made.move(vertex=lambda m: m.first + m.child))
    _judge(nodes, apart=apart)
    return graph


def trees() -> list[Instance]:
    """Some, of one to thirteen vertices, each with three children or none."""
    rng = np.random.default_rng(3)
    found = []
    for size in (7, 1, 13, 4):
        inner = (size - 1) // 3
        arity = np.where(np.arange(size) < inner, 3, 0)
        columns = {"first": 1 + 3 * np.arange(size), "arity": arity}
        found.append(Instance({"x": torch.from_numpy(rng.standard_normal((1, WIDTH)))}, columns))
    return found


def _judge(done: Stream, *, apart: bool) -> None:
    if apart:  # so that several turns are in flight
        done.through(Last().double(), name="last", keep="graph").loss(squared)
    else:
        done.through(linear(), take=0, name="readout").loss(squared)
