"""A binary tree whose composition has two layers, a gate and a skip: many small operations."""

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
    binary_tree,
    heights,
    joined,
    tokens,
)

WORDS, CLASSES = 200, 5


class Compose(nn.Module):
    """Two children ``(n, 2, width)`` to their parent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.gate, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, pair: Tensor) -> Tensor:
        both = pair.flatten(1)
        new = self.outer(nn.functional.gelu(self.inner(both)))
        gate = torch.sigmoid(self.gate(both))
        return torch.tanh(self.norm(gate * new + (1 - gate) * pair.mean(1)))


@final
class Skip(AbstractProgram):
    name = "skip"
    told = "binary tree, two layers and a skip"

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.leaf, self.compose = nn.Embedding(WORDS, width), Compose(width)
        self.readout = nn.Linear(width, CLASSES)

    def generate(self, n: int, seed: int) -> list[Item]:
        """Every vertex is named by the sum of what its words stand for."""
        random = np.random.default_rng(seed)
        items = []
        for _ in range(n):
            leaves = int(random.integers(6, 21))
            parent, slot = binary_tree(random, leaves)
            word = random.integers(0, WORDS, leaves)
            total = np.zeros(parent.size, np.int64)
            total[:leaves] = word % CLASSES - 2
            for v in range(parent.size - 1):
                total[parent[v]] += total[v]
            label = np.clip(total + 2, 0, CLASSES - 1)
            items.append(
                {
                    "parent": parent,
                    "slot": slot,
                    "word": word,
                    "label": label,
                    "level": heights(parent),
                }
            )
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["label"].size for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("parent", "slot", "label"))
        nodes = graph.loop(name="nodes")
        nodes.join(graph.input("word").through(self.leaf, name="leaf"))
        nodes.through(self.readout, name="readout").loss(gt.cross_entropy, target="label")
        inner, root = nodes.where(lambda m: m.parent >= 0)
        pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
        nodes.join(pairs.through(self.compose, name="compose"))
        root.stop()
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        word = tokens(item["word"])
        return gt.Instance(
            {"word": (word, np.arange(len(word)))},
            {name: item[name] for name in ("parent", "slot", "label")},
        )

    def plain(self, item: Item) -> Tensor:
        leaves = item["word"].size
        pairs: dict[int, list[Tensor]] = {}
        states = []
        for v, p in enumerate(item["parent"].tolist()):
            if v < leaves:
                h = self.leaf(tokens(item["word"][v]))
            else:
                h = self.compose(torch.stack(pairs.pop(v), 1))
            states.append(h)
            if p >= 0:
                pair = pairs.setdefault(p, [h, h])
                pair[item["slot"][v]] = h
        scores = self.readout(torch.cat(states))
        return nn.functional.cross_entropy(scores, tokens(item["label"]), reduction="sum")

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Level by level, from the leaves; one readout of all."""
        levels, slot = Levels(items), joined(items, "slot")
        sizes, leaves = (
            np.array([item[name].size for item in items]) for name in ("parent", "word")
        )
        shift = np.concatenate([[0], (sizes - leaves).cumsum()[:-1]]).repeat(sizes)
        rows, word = levels.rows(0), joined(items, "word")
        states = [self.leaf(tokens(word[rows - shift[rows]]))]
        order = [rows]
        levels.send(0, states[0])
        for k in range(1, levels.count):
            coming = levels.coming(k)
            by_slot = np.argsort(2 * levels.at(levels.parent[coming]) + slot[coming])
            (below,) = levels.receive(k)
            pair = below.index_select(0, tokens(by_slot)).view(-1, 2, below.shape[1])
            states.append(self.compose(pair))
            order.append(levels.rows(k))
            levels.send(k, states[-1])
        label = tokens(joined(items, "label")[np.concatenate(order)])
        scores = self.readout(torch.cat(states))
        return nn.functional.cross_entropy(scores, label, reduction="sum")
