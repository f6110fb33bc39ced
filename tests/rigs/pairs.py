"""Trees of two leaves and a root, on a graph of two parts: for tests of ways to share weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import geartrain as gt


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
