"""A tree whose vertices attend to their children, however many, beside a word of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.childsum import CLASSES, WORDS, tree_of, word_trees
from benchmarks.own.programs.program import AbstractProgram, Item, Levels, joined, tokens


class Leaf(nn.Module):
    """What a vertex without children sends up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(WORDS, width), nn.Linear(width, width)

    def forward(self, word: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.words(word)))


class Attend(nn.Module):
    """The mean of each bundle, weighed by a softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.weigh = nn.Linear(width, 1, bias=False)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        n, to = len(inside.lengths), inside.segment
        weight = torch.exp(5 * torch.tanh(self.weigh(torch.tanh(self.key(h)))))
        total = weight.new_zeros(n, 1).index_add(0, to, weight)
        value = h.new_zeros(n, h.shape[1]).index_add(0, to, weight * self.value(h))
        return value / total


class Cell(nn.Module):
    """From what came from below, and the word of the vertex."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.gates = nn.Embedding(WORDS, width), nn.Linear(2 * width, 2 * width)

    def forward(self, below: Tensor, word: Tensor) -> Tensor:
        gate, new = self.gates(torch.cat([below, self.words(word)], 1)).chunk(2, 1)
        gate = torch.sigmoid(gate)
        return gate * below + (1 - gate) * torch.tanh(new)


@final
class Attentive(AbstractProgram):
    name = "attentive"
    told = "children as a bundle that their parent attends to"

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.leaf, self.attend, self.cell = Leaf(width), Attend(width), Cell(width)
        self.readout = nn.Linear(width, CLASSES)

    def generate(self, n: int, seed: int) -> list[Item]:
        return word_trees(n, seed)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("parent", "siblings", "token"), value=("label",))
        nodes = graph.loop(name="nodes")
        nodes.join(graph.input("word").through(self.leaf, name="leaf"))
        inner, root = nodes.where(lambda m: m.parent >= 0)
        met = inner.group(by={"vertex": lambda m: m.parent}, size="siblings", how="bundle")
        below = met.through(self.attend, name="attend", inside=True, pool=True)
        nodes.join(below.through(self.cell, name="cell", read="token"))
        root.through(self.readout, name="readout").loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return tree_of(item)

    def plain(self, item: Item) -> Tensor:
        children: list[list[Tensor]] = [[] for _ in item["parent"]]
        for v, (p, word) in enumerate(zip(item["parent"], item["word"], strict=True)):
            if children[v]:
                below = self._attended(torch.cat(children[v]), np.zeros(len(children[v]), int), 1)
                state = self.cell(below, tokens(word))
            else:
                state = self.leaf(tokens(word))
            if p >= 0:
                children[p].append(state)
        return nn.functional.cross_entropy(self.readout(state), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Level by level, from the leaves."""
        levels, word = Levels(items), joined(items, "word")
        levels.send(0, self.leaf(tokens(word[levels.rows(0)])))
        for k in range(1, levels.count):
            rows = levels.rows(k)
            to = levels.at(levels.parent[levels.coming(k)])
            below = self._attended(*levels.receive(k), to, rows.size)
            levels.send(k, self.cell(below, tokens(word[rows])))
        label = np.array([item["label"] for item in items])[levels.item]
        (h,) = levels.receive(levels.count)
        label = tokens(label[levels.coming(levels.count)])
        return nn.functional.cross_entropy(self.readout(h), label, reduction="sum")

    def _attended(self, h: Tensor, to: np.ndarray, n: int) -> Tensor:
        lengths = torch.from_numpy(np.bincount(to, minlength=n))
        found: Tensor = self.attend(h, gt.Inside(lengths, tokens(to), {}))
        return found
