"""Graphs with a state of the whole, which all vertices read, and which says when it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

ATOMS, KINDS, TYPES, CLASSES, MOST, ENOUGH = 12, 5, 4, 5, 8, 0.55


class Start(nn.Module):
    """What the whole is by its kind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.kind = nn.Parameter(0.3 * torch.randn(width)), nn.Embedding(KINDS, width)

    def forward(self, kind: Tensor) -> Tensor:
        return torch.tanh(self.own + self.kind(kind))


class Edge(nn.Module):
    """What goes along an edge."""

    def __init__(self, width: int, whole: int) -> None:
        super().__init__()
        self.types = nn.Embedding(TYPES, 16)
        self.inner, self.outer = nn.Linear(width + whole + 16, 64), nn.Linear(64, width)

    def forward(self, h: Tensor, whole: Tensor, type: Tensor) -> Tensor:
        both = torch.cat([h, whole, self.types(type)], 1)
        return self.outer(nn.functional.silu(self.inner(both)))


class Vertex(nn.Module):
    """A gated cell, with norms on what its gates are made of."""

    def __init__(self, width: int, whole: int) -> None:
        super().__init__()
        self.heard, self.own = nn.Linear(width + whole, 3 * width), nn.Linear(width, 3 * width)
        self.norms = nn.ModuleList(nn.LayerNorm(3 * width) for _ in range(2))

    def forward(self, heard: Tensor, h: Tensor, whole: Tensor) -> Tensor:
        r1, z1, n1 = self.norms[0](self.heard(torch.cat([heard, whole], 1))).chunk(3, 1)
        r2, z2, n2 = self.norms[1](self.own(h)).chunk(3, 1)
        update = torch.sigmoid(z1 + z2)
        return (1 - update) * torch.tanh(n1 + torch.sigmoid(r1 + r2) * n2) + update * h


class Whole(nn.Module):
    """The state of the whole, and whether it is enough."""

    def __init__(self, width: int, whole: int) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(width + whole, whole), nn.Linear(width + whole, whole)
        self.norm, self.halt = nn.LayerNorm(whole), nn.Linear(whole, 1)

    def forward(self, mean: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([mean, before], 1)
        gate = torch.sigmoid(self.gate(both))
        new = self.norm(gate * before + (1 - gate) * torch.tanh(self.new(both)))
        enough = torch.sigmoid(3 * self.halt(new))
        return (1 - enough) * new + enough * torch.tanh(new), enough


def stops(enough: Tensor, step: NDArray[np.int64]) -> Tensor:
    """Which graphs are done."""
    return (enough.detach()[:, 0] > ENOUGH) | torch.from_numpy(step >= MOST - 1)


@final
class Overseen(AbstractProgram):
    name = "overseen"
    told = "graphs with a state of the whole, which says when to stop"
    width = 48
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        whole = max(1, 2 * width // 3)
        self.embed, self.start = nn.Embedding(ATOMS, width), Start(whole)
        self.edge, self.vertex = Edge(width, whole), Vertex(width, whole)
        self.whole, self.readout = Whole(width, whole), nn.Linear(whole, CLASSES)

    def generate(self, n: int, seed: int) -> list[Item]:
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            size = int(random.integers(4, 14))
            v, more = np.arange(size), random.integers(0, size, (2, random.integers(0, 2 * size)))
            atom, kind = random.integers(0, ATOMS, size), int(random.integers(0, KINDS))
            items.append(
                {
                    "atom": atom,
                    "kind": kind,
                    "source": np.r_[v, more[0]],
                    "target": np.r_[(v + 1) % size, more[1]],
                    "type": random.integers(0, TYPES, size + more.shape[1]),
                    "label": int(atom.max() + kind) % CLASSES,
                }
            )
        return items

    def graph(self) -> gt.Graph:
        graph = gt.Graph(edge=("type",), value=("label",))
        vertices, wholes = graph.loop(name="vertices"), graph.loop(name="wholes")
        vertices.join(graph.input("atom", step=0).through(self.embed, name="embed"))
        wholes.join(graph.input("kind", step=0).through(self.start, name="start"))
        told = wholes.flatmap("vertex", count=lambda m: m.size)
        both = graph.concat(vertices, told, on=("vertex", "step"), how="tuple")
        sent = both.flatmap("edge").through(self.edge, read="type", name="edge")
        sent = sent.move(vertex=lambda m: m.target)
        heard = sent.group(by=("vertex", "step"), size="in_degree", how="sum", name="heard")
        met = graph.concat(heard, both, on=("vertex", "step"), how="tuple")
        new = met.through(self.vertex, name="vertex")
        mean = new.group(by="step", size=lambda m: m.size, how="mean", name="mean")
        met = graph.concat(mean, wholes, on="step", how="tuple")
        whole = met.through(self.whole, name="whole")
        done, more = whole.where(lambda m: stops(m.payload[1], m.step))
        more = more.through(lambda whole, enough: whole, name="the whole goes on")
        wholes.join(more.move(step=lambda m: m.step + 1))
        scores = done.through(self.readout, take=0, name="readout")
        scores.loss(gt.cross_entropy, target="label")
        verdict = whole.through(lambda whole, enough: enough, name="verdict")
        verdict = verdict.flatmap("vertex", count=lambda m: m.size)
        judged = graph.concat(new, verdict, on=("vertex", "step"), how="tuple")
        ended, again = judged.where(lambda m: stops(m.payload[1], m.step))
        ended.stop()
        again = again.through(lambda h, enough: h, name="vertices go on")
        vertices.join(again.move(step=lambda m: m.step + 1))
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        kind = tokens(item["kind"]), [0]
        return gt.Instance(
            {"atom": torch.from_numpy(item["atom"]), "kind": kind},
            edge={name: item[name] for name in ("source", "target", "type")},
            value={"label": item["label"]},
        )

    def plain(self, item: Item) -> Tensor:
        h, whole = self.embed(tokens(item["atom"])), self.start(tokens(item["kind"]))
        source, target, kind = (tokens(item[name]) for name in ("source", "target", "type"))
        for _ in range(MOST):
            sent = self.edge(h[source], whole.expand(len(source), -1), kind)
            heard = torch.zeros_like(h).index_add(0, target, sent)
            h = self.vertex(heard, h, whole.expand(len(h), -1))
            whole, enough = self.whole(h.mean(0, keepdim=True), whole)
            if enough.item() > ENOUGH:
                break
        return nn.functional.cross_entropy(self.readout(whole), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """One graph of all; those that are done are cut out of it."""
        sizes = np.array([item["atom"].size for item in items])
        shift = offsets_of(sizes).repeat([item["source"].size for item in items])
        source, target = (joined(items, name) + shift for name in ("source", "target"))
        kind, label = joined(items, "type"), np.array([item["label"] for item in items])
        h, owner = self.embed(tokens(joined(items, "atom"))), np.arange(sizes.size).repeat(sizes)
        whole = self.start(tokens(np.array([item["kind"] for item in items])))
        answers, labels = [], []
        for step in range(MOST):
            at, here, there = tokens(owner), tokens(source), tokens(target)
            seen = whole.index_select(0, at)
            sent = self.edge(h.index_select(0, here), seen.index_select(0, here), tokens(kind))
            heard = torch.zeros_like(h).index_add(0, there, sent)
            h = self.vertex(heard, h, seen)
            summed = h.new_zeros(sizes.size, h.shape[1]).index_add(0, at, h)
            whole, enough = self.whole(summed / tokens(sizes)[:, None], whole)
            done = stops(enough, np.full(sizes.size, step)).numpy()
            if not done.any():
                continue
            answers.append(whole.index_select(0, tokens(np.flatnonzero(done))))
            labels.append(label[done])
            if done.all():
                break
            stay, number = ~done[owner], (~done).cumsum() - 1
            place, edges = stay.cumsum() - 1, stay[source]
            h = h.index_select(0, tokens(np.flatnonzero(stay)))
            source, target, kind = place[source[edges]], place[target[edges]], kind[edges]
            owner, sizes, label = number[owner[stay]], sizes[~done], label[~done]
            whole = whole.index_select(0, tokens(np.flatnonzero(~done)))
        scores, of = self.readout(torch.cat(answers)), tokens(np.concatenate(labels))
        return nn.functional.cross_entropy(scores, of, reduction="sum")
