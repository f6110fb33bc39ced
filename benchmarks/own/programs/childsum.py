"""A child-sum cell of one's own, with any number of children, a token at every vertex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import (
    AbstractProgram,
    Item,
    Levels,
    heights,
    joined,
    parents_at_random,
    tokens,
)

WORDS, CLASSES = 200, 5


class Leaf(nn.Module):
    """What a vertex without children sends up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.gates = nn.Embedding(WORDS, width), nn.Linear(width, 3 * width)

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.gates(self.words(word)).chunk(3, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class Cell(nn.Module):
    """From the sums over the children, and the word of the vertex."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.below, self.here = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o, u = (self.below(h) + self.here(self.words(word))).chunk(4, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * c
        return torch.sigmoid(o) * torch.tanh(c), c


def word_trees(n: int, seed: int) -> list[Item]:
    """Trees of any arity with a word at every vertex, and a label each."""
    random = np.random.default_rng(seed)
    items = []
    for _ in range(n):
        parent = parents_at_random(random, int(random.integers(10, 41)), 6)
        word = random.integers(0, WORDS, parent.size)
        children = np.bincount(parent[:-1], minlength=parent.size)
        items.append(
            {
                "parent": parent,
                "word": word,
                "siblings": np.where(parent < 0, 1, children[parent]),
                "leaves": np.flatnonzero(children == 0),
                "level": heights(parent),
                "label": int(np.bincount(word % CLASSES, minlength=CLASSES).argmax()),
            }
        )
    return items


def tree_of(item: Item) -> gt.Instance:
    """What a graph is fed for one of them: words enter at the leaves."""
    leaves = item["leaves"]
    return gt.Instance(
        {"word": (tokens(item["word"][leaves]), leaves)},
        {"parent": item["parent"], "siblings": item["siblings"], "token": item["word"]},
        value={"label": item["label"]},
    )


@final
class ChildSum(AbstractProgram):
    name = "childsum"
    told = "child-sum cell, trees of any arity"

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.leaf, self.cell = Leaf(width), Cell(width)
        self.readout = nn.Linear(width, CLASSES)

    def generate(self, n: int, seed: int) -> list[Item]:
        return word_trees(n, seed)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("parent", "siblings", "token"), value=("label",))
        nodes = graph.loop(name="nodes")
        nodes.join(graph.input("word").through(self.leaf, name="leaf"))
        inner, root = nodes.where(lambda m: m.parent >= 0)
        summed = inner.group(by={"vertex": lambda m: m.parent}, size="siblings", how="sum")
        nodes.join(summed.through(self.cell, name="cell", read="token"))
        root.through(self.readout, name="readout", take=0).loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return tree_of(item)

    def plain(self, item: Item) -> Tensor:
        children: list[list[tuple[Tensor, Tensor]]] = [[] for _ in item["parent"]]
        for v, (p, word) in enumerate(zip(item["parent"], item["word"], strict=True)):
            if children[v]:
                h, c = (torch.stack(s).sum(0) for s in zip(*children[v], strict=True))
                state = self.cell(h, c, tokens(word))
            else:
                state = self.leaf(tokens(word))
            if p >= 0:
                children[p].append(state)
        return nn.functional.cross_entropy(self.readout(state[0]), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Level by level, from the leaves."""
        levels, word = Levels(items), joined(items, "word")
        levels.send(0, *self.leaf(tokens(word[levels.rows(0)])))
        for k in range(1, levels.count):
            rows = levels.rows(k)
            to = tokens(levels.at(levels.parent[levels.coming(k)]))
            sums = (x.new_zeros(rows.size, x.shape[1]).index_add_(0, to, x)
                    for x in levels.receive(k))  # fmt: skip
            levels.send(k, *self.cell(*sums, tokens(word[rows])))
        label = np.array([item["label"] for item in items])[levels.item]
        h, _ = levels.receive(levels.count)
        label = tokens(label[levels.coming(levels.count)])
        return nn.functional.cross_entropy(self.readout(h), label, reduction="sum")
