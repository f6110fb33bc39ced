"""Message passing along typed edges with a cell of one's own; large graphs take more steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

ELEMENTS, BONDS, CLASSES = 8, 3, 4


class Propagate(nn.Module):
    """What comes along the edges, by type, and a gate between it and the state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.send = nn.Linear(width, BONDS * width)
        self.gate, self.new = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def along(self, h: Tensor, source: Tensor, target: Tensor, bond: Tensor) -> Tensor:
        """New states, one a row of h."""
        sent = self.send(h).view(-1, self.width).index_select(0, source * BONDS + bond)
        heard = torch.zeros_like(h).index_add(0, target, sent)
        both = torch.cat([h, heard], 1)
        gate = torch.sigmoid(self.gate(both))
        return gate * h + (1 - gate) * torch.tanh(self.new(both))

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        edges = inside.edges
        return self.along(h, edges["source"], edges["target"], edges["bond"])


class Pool(nn.Module):
    """Scores of a graph: sums over its vertices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vertex = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def summed(self, h: Tensor, owner: Tensor, n: int) -> Tensor:
        """One row for each of n graphs."""
        return h.new_zeros(n, CLASSES).index_add(0, owner, self.vertex(h))

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        return self.summed(h, inside.segment, len(inside.lengths))


@final
class Messages(AbstractProgram):
    name = "messages"
    told = "typed edges, own cell, 3 to 6 steps"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.embed, self.pool = nn.Embedding(ELEMENTS, width), Pool(width)
        self.propagate = Propagate(width)

    def generate(self, n: int, seed: int) -> list[Item]:
        random = np.random.default_rng(seed)
        items = []
        for _ in range(n):
            size = int(random.integers(10, 31))
            v = np.arange(1, size)
            a, b = v, v - random.integers(1, np.minimum(v, 4) + 1)
            more = random.integers(0, size, (size // 3, 2))
            a, b = np.r_[a, more[:, 0]], np.r_[b, more[:, 1]]
            element, bond = random.integers(0, ELEMENTS, size), random.integers(0, BONDS, a.size)
            alike = ((element[a] + element[b]) % BONDS == bond).sum() / a.size
            items.append(
                {
                    "element": element,
                    "source": np.r_[a, b],
                    "target": np.r_[b, a],
                    "bond": np.r_[bond, bond],
                    "steps": int(np.clip(size // 5, 3, 6)),
                    "label": int(np.searchsorted([0.2, 0.33, 0.45], alike)),
                }
            )
        return items

    def graph(self) -> gt.Graph:
        graph = gt.Graph(edge=("bond",), value=("steps", "label"))
        rounds = graph.loop(name="rounds")
        vertices = graph.input("element", bundle=True, step=0)
        rounds.join(vertices.through(self.embed, name="embed"))
        passed = rounds.through(self.propagate, name="propagate", inside=True)
        done, more = passed.where(lambda m: m.step + 1 >= m.steps)
        rounds.join(more.move(step=lambda m: m.step + 1))
        scores = done.through(self.pool, name="pool", inside=True, pool=True)
        scores.loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return gt.Instance(
            {"element": torch.from_numpy(item["element"])},
            edge={name: item[name] for name in ("source", "target", "bond")},
            value={"steps": item["steps"], "label": item["label"]},
        )

    def plain(self, item: Item) -> Tensor:
        h = self.embed(torch.from_numpy(item["element"]))
        edges = [torch.from_numpy(item[name]) for name in ("source", "target", "bond")]
        for _ in range(item["steps"]):
            h = self.propagate.along(h, *edges)
        scores = self.pool.summed(h, torch.zeros(len(h), dtype=torch.int64), 1)
        return nn.functional.cross_entropy(scores, tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """One graph of all, those with the most steps first: what goes on are the first rows."""
        items = sorted(items, key=lambda item: -item["steps"])
        steps = np.array([item["steps"] for item in items])
        sizes = np.array([item["element"].size for item in items])
        counts = np.array([item["bond"].size for item in items])
        shift = offsets_of(sizes).repeat(counts)
        h = self.embed(tokens(joined(items, "element")))
        source, target = (tokens(joined(items, name) + shift) for name in ("source", "target"))
        bond, done = tokens(joined(items, "bond")), []
        for step in range(int(steps[0])):
            going = int((steps > step).sum())
            rows, edges = int(sizes[:going].sum()), int(counts[:going].sum())
            if rows < len(h):
                done.append(h[rows:])
            h = self.propagate.along(h[:rows], source[:edges], target[:edges], bond[:edges])
        done.append(h)
        owner = torch.from_numpy(np.arange(sizes.size).repeat(sizes))
        scores = self.pool.summed(torch.cat(done[::-1]), owner, sizes.size)
        label = tokens(np.array([item["label"] for item in items]))
        return nn.functional.cross_entropy(scores, label, reduction="sum")
