"""Graph attention over typed edges: each vertex weighs what comes along its edges by a softmax.

Source: Velickovic et al. 2018, arXiv:1710.10903.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

KINDS, BONDS, CLASSES, ROUNDS = 10, 3, 4, 4


class Send(nn.Module):
    """What goes along an edge, and how much it weighs, to be divided by the weight of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bonds, self.value = nn.Embedding(BONDS, width), nn.Linear(width, width)
        self.weigh = nn.Linear(width, 1)

    def forward(self, h: Tensor, bond: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.tanh(self.value(h) + self.bonds(bond))
        weight = torch.exp(5 * torch.tanh(self.weigh(value)))
        return weight * value, weight


class Update(nn.Module):
    """A new state of the mean that has come and the old state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, heard: Tensor, weight: Tensor, h: Tensor) -> Tensor:
        both = torch.cat([heard / weight, h], 1)
        gate = torch.sigmoid(self.gate(both))
        return gate * h + (1 - gate) * torch.tanh(self.new(both))


@final
class Edges(AbstractProgram):
    name = "edges"
    told = "attention over a vertex's edges, row by row"
    width = 48

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.embed, self.readout = nn.Embedding(KINDS, width), nn.Linear(width, CLASSES)
        self.send, self.update = Send(width), Update(width)

    def generate(self, n: int, seed: int) -> list[Item]:
        random = np.random.default_rng(seed)
        items = []
        for _ in range(n):
            size = int(random.integers(6, 17))
            v = np.arange(1, size)
            a, b = v, random.integers(0, v)
            bond = random.integers(0, BONDS, a.size)
            kind, loops = random.integers(0, KINDS, size), np.arange(size)
            source, target = np.r_[a, b, loops], np.r_[b, a, loops]
            bond = np.r_[bond, bond, np.zeros(size, np.int64)]
            heard = np.zeros(size, np.int64)
            np.add.at(heard, target, kind[source] * (bond + 1))
            told = {"kind": kind, "label": heard % CLASSES}
            items.append({**told, "source": source, "target": target, "bond": bond})
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["label"].size for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("label",), edge=("bond",))
        rounds = graph.loop(name="rounds")
        rounds.join(graph.input("kind", step=0).through(self.embed, name="embed"))
        going, done = rounds.where(lambda m: m.step < ROUNDS)
        sent = going.flatmap("edge").through(self.send, name="send", read="bond")
        come = sent.move(vertex=lambda m: m.target)
        heard = come.group(by=("vertex", "step"), size="in_degree", how="sum")
        both = graph.concat(heard, going, on=("vertex", "step"), how="tuple")
        new = both.through(self.update, name="update")
        rounds.join(new.move(step=lambda m: m.step + 1))
        done.through(self.readout, name="readout").loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        edge = {name: item[name] for name in ("source", "target", "bond")}
        return gt.Instance({"kind": tokens(item["kind"])}, {"label": item["label"]}, edge)

    def plain(self, item: Item) -> Tensor:
        h = list(self.embed(tokens(item["kind"])).split(1))
        edges = list(zip(item["source"], item["target"], item["bond"], strict=True))
        for _ in range(ROUNDS):
            heard, weight = [0.0] * len(h), [0.0] * len(h)
            for source, target, bond in edges:
                value, weighs = self.send(h[source], tokens(bond))
                heard[target], weight[target] = heard[target] + value, weight[target] + weighs
            h = [self.update(*each) for each in zip(heard, weight, h, strict=True)]
        scores = self.readout(torch.cat(h))
        return nn.functional.cross_entropy(scores, tokens(item["label"]), reduction="sum")

    def hand(self, items: Sequence[Item]) -> Tensor:
        """One graph of all."""
        sizes = np.array([item["kind"].size for item in items])
        counts = np.array([item["bond"].size for item in items])
        shift = offsets_of(sizes).repeat(counts)
        source, target = (tokens(joined(items, n) + shift) for n in ("source", "target"))
        bond, h = tokens(joined(items, "bond")), self.embed(tokens(joined(items, "kind")))
        for _ in range(ROUNDS):
            value, weight = self.send(h.index_select(0, source), bond)
            heard = torch.zeros_like(h).index_add(0, target, value)
            total = h.new_zeros(len(h), 1).index_add(0, target, weight)
            h = self.update(heard, total, h)
        label = tokens(joined(items, "label"))
        return nn.functional.cross_entropy(self.readout(h), label, reduction="sum")
