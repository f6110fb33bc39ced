"""A recurrent cell that decides when to stop, with hard routing to four experts at every step.

Each step adds its share to what has been collected, and ends when the shares come to one: adaptive
computation time, Graves 2016, arXiv:1603.08983. The expert of a step is the best of a router, whose
probability scales what the expert says, so that the router learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, tokens

EXPERTS, CLASSES, MOST, FULL = 4, 8, 20, 0.99


class Router(nn.Module):
    """The state, and what the experts are worth to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, EXPERTS)

    def forward(
        self, h: Tensor, spent: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return h, spent, out, self.linear(h).softmax(1)


class Expert(nn.Module):
    """What one of them adds to the state."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, h: Tensor, spent: Tensor, out: Tensor, worth: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        added = self.outer(torch.relu(self.inner(h)))
        return h + worth[:, self.number : self.number + 1] * added, spent, out


class Step(nn.Module):
    """The cell: a new state, and its share in what is collected."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(width, width), nn.Linear(width, width)
        self.halt = nn.Linear(width, 1)
        nn.init.constant_(self.halt.bias, -2.0)
        nn.init.normal_(self.halt.weight, std=0.3)

    def forward(self, h: Tensor, spent: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = torch.sigmoid(self.gate(h))
        h = gate * h + (1 - gate) * torch.tanh(self.new(h))
        share = torch.minimum(torch.sigmoid(self.halt(h)), 1 - spent)
        return h, spent + share, out + share * h


class Start(nn.Module):
    """A first state of the features, with nothing spent and nothing collected."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.linear(x))
        return h, torch.zeros_like(h[:, :1]), torch.zeros_like(h)


@final
class Halting(AbstractProgram):
    name = "halting"
    told = "halting recurrent cell, 4 experts"
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.start, self.router, self.step = Start(width), Router(width), Step(width)
        self.experts = nn.ModuleList(Expert(width, k) for k in range(EXPERTS))
        self.readout = nn.Linear(width, CLASSES)

    def generate(self, n: int, seed: int) -> list[Item]:
        random, fixed = np.random.default_rng(seed), np.random.default_rng(0)
        x = random.standard_normal((n, 16)).astype(np.float32)
        centre = fixed.standard_normal((CLASSES, 16))
        label = (x @ centre.T).argmax(1)
        return [{"x": x[i : i + 1], "label": int(label[i])} for i in range(n)]

    def graph(self) -> gt.Graph:
        graph = gt.Graph(value=("label",))
        states = graph.loop(name="states")
        states.join(graph.input("x", step=0).through(self.start, name="start"))
        routed = states.through(self.router, name="router").route(
            lambda m: m.payload[3].argmax(1), EXPERTS
        )
        said = [
            stream.through(expert, name=f"expert {k}")
            for k, (stream, expert) in enumerate(zip(routed, self.experts, strict=True))
        ]
        stepped = graph.merge(*said).through(self.step, name="step")
        done, more = stepped.where(
            lambda m: (m.payload[1][:, 0] > FULL).cpu() | torch.from_numpy(m.step + 1 >= MOST)
        )
        states.join(more.move(step=lambda m: m.step + 1))
        scores = done.through(self.readout, name="readout", take=2)
        scores.loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        x = torch.from_numpy(item["x"]).to(dtype)
        return gt.Instance({"x": x}, value={"label": item["label"]})

    def plain(self, item: Item) -> Tensor:
        state = self.start(torch.from_numpy(item["x"]).to(self.dtype))
        for _ in range(MOST):
            routed = self.router(*state)
            state = self.step(*self.experts[int(routed[3].argmax())](*routed))
            if state[1].item() > FULL:
                break
        return nn.functional.cross_entropy(self.readout(state[2]), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Rows that have stopped are taken out; experts get theirs by index."""
        x = torch.from_numpy(np.concatenate([item["x"] for item in items])).to(self.dtype)
        label = tokens(np.array([item["label"] for item in items]))
        state, done, labels = self.start(x), [], []
        for step in range(MOST):
            routed = self.router(*state)
            choice = routed[3].argmax(1)
            order = choice.argsort()
            sizes = torch.bincount(choice, minlength=EXPERTS).tolist()
            cut = [x.index_select(0, order).split(sizes) for x in routed]
            said = [
                expert(*(pieces[k] for pieces in cut))
                for k, expert in enumerate(self.experts)
                if sizes[k]
            ]
            state = self.step(*(torch.cat(x) for x in zip(*said, strict=True)))
            label = label.index_select(0, order)
            stop = (state[1][:, 0] > FULL) if step + 1 < MOST else torch.ones_like(label).bool()
            if stop.any():
                here, rest = stop.nonzero()[:, 0], (~stop).nonzero()[:, 0]
                done.append(state[2].index_select(0, here))
                labels.append(label.index_select(0, here))
                state = tuple(x.index_select(0, rest) for x in state)
                label = label.index_select(0, rest)
                if not len(label):
                    break
        scores = self.readout(torch.cat(done))
        return nn.functional.cross_entropy(scores, torch.cat(labels), reduction="sum")
