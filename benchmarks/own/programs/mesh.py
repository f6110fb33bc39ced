"""Graphs whose edges have states, and read what leads back; as many steps as each says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

ELEMENTS = 5


class Bond(nn.Module):
    """What an edge begins with, by its length."""

    def __init__(self, width: int, edge: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width + 1, edge), nn.Linear(edge, edge)

    def forward(self, h: Tensor, length: Tensor) -> Tensor:
        both = torch.cat([h, length[:, None].to(h.dtype)], 1)
        return self.outer(nn.functional.silu(self.inner(both)))


class Update(nn.Module):
    """A state, and what two layers make of it and of others."""

    def __init__(self, width: int, others: int, inner: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width + others, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, state: Tensor, *others: Tensor) -> Tensor:
        both = self.inner(torch.cat([state, *others], 1))
        return state + self.norm(self.outer(nn.functional.silu(both)))


@final
class Mesh(AbstractProgram):
    name = "mesh"
    told = "edges with states of their own, real lengths, 2 to 5 steps"
    width = 48

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        edge = max(2, width // 2)
        self.element, self.bond = nn.Embedding(ELEMENTS, width), Bond(width, edge)
        self.edge, self.vertex = Update(edge, 2 * width, width), Update(width, edge, width)
        self.readout = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def generate(self, n: int, seed: int) -> list[Item]:
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            size = int(random.integers(4, 12))
            v = np.arange(size)
            chord = v[random.random(size) < 0.3] if size > 5 else v[:0]
            one, other = np.r_[v, chord], np.r_[(v + 1) % size, (chord + 2) % size]
            k = one.size
            length = random.uniform(0.5, 2, k).astype(np.float32)
            element = random.integers(0, ELEMENTS, size)
            items.append(
                {
                    "element": element,
                    "source": np.r_[one, other],
                    "target": np.r_[other, one],
                    "back": np.r_[k : 2 * k, :k],
                    "length": np.r_[length, length],
                    "steps": int(random.integers(2, 6)),
                    "energy": np.float32((length * np.abs(element[one] - element[other])).mean()),
                }
            )
        return items

    def graph(self) -> gt.Graph:
        graph = gt.Graph(edge=("back", "length"), value=("steps", "energy"))
        vertices, edges = graph.loop(name="vertices"), graph.loop(name="edges")
        first = graph.input("element", step=0).through(self.element, name="embed")
        vertices.join(first)
        edges.join(first.flatmap("edge").through(self.bond, read="length", name="bond"))
        going, done = vertices.where(lambda m: m.step < m.steps)
        live, ended = edges.where(lambda m: m.step < m.steps)
        ended.stop()
        sent = going.flatmap("edge")
        back = sent.move(edge=lambda m: m.back)
        three = graph.concat(live, sent, back, on=("edge", "step"), how="tuple")
        new = three.through(self.edge, name="edge")
        edges.join(new.move(step=lambda m: m.step + 1))
        come = new.move(vertex=lambda m: m.target)
        heard = come.group(by=("vertex", "step"), size="in_degree", how="sum", name="heard")
        both = graph.concat(going, heard, on=("vertex", "step"), how="tuple")
        after = both.through(self.vertex, name="vertex")
        vertices.join(after.move(step=lambda m: m.step + 1))
        whole = done.group(by="instance", size=lambda m: m.size, how="mean", name="mean")
        whole.through(self.readout, name="readout").loss(nn.functional.mse_loss, target="energy")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return gt.Instance(
            {"element": torch.from_numpy(item["element"])},
            edge={name: item[name] for name in ("source", "target", "back", "length")},
            value={name: item[name] for name in ("steps", "energy")},
        )

    def plain(self, item: Item) -> Tensor:
        h = self.element(tokens(item["element"]))
        source, target, back = (tokens(item[name]) for name in ("source", "target", "back"))
        e = self.bond(h[source], torch.from_numpy(item["length"]))
        for _ in range(item["steps"]):
            sent = h[source]
            e = self.edge(e, sent, sent[back])
            h = self.vertex(h, e.new_zeros(len(h), e.shape[1]).index_add(0, target, e))
        energy = torch.tensor(item["energy"], dtype=h.dtype)
        return (self.readout(h.mean(0))[0] - energy) ** 2

    def hand(self, items: Sequence[Item]) -> Tensor:
        """One graph of all, those with most steps first; who is done is cut off its end."""
        items = sorted(items, key=lambda item: -item["steps"])
        steps = np.array([item["steps"] for item in items])
        sizes = np.array([item["element"].size for item in items])
        edges = np.array([item["source"].size for item in items])
        shift = offsets_of(sizes).repeat(edges)
        source, target = (tokens(joined(items, name) + shift) for name in ("source", "target"))
        h = self.element(tokens(joined(items, "element")))
        length = torch.from_numpy(joined(items, "length"))
        e, ended = self.bond(h.index_select(0, source), length), []
        for step in range(steps[0] + 1):
            going = int((steps > step).sum())
            n, k = int(sizes[:going].sum()), int(edges[:going].sum())
            ended.append(h[n:])
            if not n:
                break
            h, e, source, target = h[:n], e[:k], source[:k], target[:k]
            e = self.edge(e, h.index_select(0, source), h.index_select(0, target))
            h = self.vertex(h, e.new_zeros(n, e.shape[1]).index_add(0, target, e))
        every, owner = torch.cat(ended[::-1]), tokens(np.arange(sizes.size).repeat(sizes))
        total = every.new_zeros(sizes.size, every.shape[1]).index_add(0, owner, every)
        energy = torch.from_numpy(np.array([item["energy"] for item in items])).to(h.dtype)
        scores = self.readout(total / tokens(sizes)[:, None])[:, 0]
        return nn.functional.mse_loss(scores, energy, reduction="sum")
