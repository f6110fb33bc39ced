"""A tree grows from a vector: each vertex makes the states of its children, and is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

FEATURES, KINDS, MOST = 12, 6, 3


class Child(nn.Module):
    """The state of a child: of its parent's, by what kind the parent is and which child it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kinds, self.places = nn.Embedding(KINDS, width), nn.Embedding(MOST, width)
        self.inner, self.gate = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor, kind: Tensor, child: Tensor) -> Tensor:
        both = torch.cat([h, self.kinds(kind) + self.places(child)], 1)
        gate = torch.sigmoid(self.gate(both))
        return gate * h + (1 - gate) * torch.tanh(self.inner(both))


class Name(nn.Module):
    """Which kind a vertex is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)
        self.outer = nn.Linear(width, KINDS)

    def forward(self, h: Tensor) -> Tensor:
        return self.outer(nn.functional.gelu(self.inner(self.norm(h))))


@final
class Grower(AbstractProgram):
    name = "grower"
    told = "a tree grown from its root, a loss a vertex"
    width = 96

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.root = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh())
        self.child, self.kind = Child(width), Name(width)

    def generate(self, n: int, seed: int) -> list[Item]:
        """Level by level, the children of a vertex side by side, two or three or none."""
        random = np.random.default_rng(seed)
        return [self._tree(random) for _ in range(n)]

    def _tree(self, random: np.random.Generator) -> Item:
        x = random.standard_normal(FEATURES).astype(np.float32)
        parent, place, kind = [-1], [0], [int(x[:KINDS].argmax())]
        first, arity = [], []
        v, most = 0, int(random.integers(9, 32))
        while v < len(parent):
            first.append(len(parent))
            arity.append(int(random.integers(2, MOST + 1)) if len(parent) < most else 0)
            for k in range(arity[-1]):
                parent.append(v)
                place.append(k)
                kind.append((kind[v] + k + int(x[KINDS + k] > 0)) % KINDS)
            v += 1
        told = {"parent": parent, "place": place, "kind": kind, "first": first, "arity": arity}
        return {"x": x[None], **{name: np.array(column) for name, column in told.items()}}

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["kind"].size for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("kind", "first", "arity"))
        nodes = graph.loop(name="nodes")
        nodes.join(graph.input("x").through(self.root, name="root"))
        nodes.through(self.kind, name="name").loss(gt.cross_entropy, target="kind")
        born = nodes.flatmap("child", count=lambda m: m.arity)
        made = born.through(self.child, name="child", read=("kind", "child"))
        nodes.join(made.move(vertex=lambda m: m.first + m.child))
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        x = torch.from_numpy(item["x"]).to(dtype)
        return gt.Instance({"x": (x, [0])}, {n: item[n] for n in ("kind", "first", "arity")})

    def plain(self, item: Item) -> Tensor:
        states = [self.root(torch.from_numpy(item["x"]).to(self.dtype))]
        for v in range(1, item["kind"].size):
            above = int(item["parent"][v])
            state = self.child(states[above], tokens(item["kind"][above]), tokens(item["place"][v]))
            states.append(state)
        scores = self.kind(torch.cat(states))
        return nn.functional.cross_entropy(scores, tokens(item["kind"]), reduction="sum")

    def hand(self, items: Sequence[Item]) -> Tensor:
        """All vertices of a depth at once; names of all at the end."""
        sizes = np.array([item["kind"].size for item in items])
        start = offsets_of(sizes)
        parent, kind, place = (joined(items, n) for n in ("parent", "kind", "place"))
        above = np.where(parent < 0, -1, parent + start.repeat(sizes))
        x = torch.from_numpy(joined(items, "x")).to(self.dtype)
        states, order, row = [self.root(x)], [start], np.zeros(kind.size, np.int64)
        row[start] = np.arange(start.size)
        while True:
            here = np.zeros(kind.size, bool)
            here[order[-1]] = True
            next_ = np.flatnonzero((above >= 0) & here[above])
            if not next_.size:
                break
            up = above[next_]
            h = states[-1].index_select(0, tokens(row[up]))
            states.append(self.child(h, tokens(kind[up]), tokens(place[next_])))
            order.append(next_)
            row[next_] = np.arange(next_.size)
        scores = self.kind(torch.cat(states))
        wanted = tokens(kind[np.concatenate(order)])
        return nn.functional.cross_entropy(scores, wanted, reduction="sum")
