"""Refinement with early exits: a network of blocks that share weights, left when it is sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, tokens

FEATURES, CLASSES, MOST, SURE = 32, 6, 16, 0.35


class Block(nn.Module):
    """Refine the guess, with the input at hand; a residual of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.seen = nn.Linear(width, 2 * width), nn.Linear(FEATURES, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = nn.functional.gelu(self.inner(self.norm(h)) + self.seen(x))
        return h + self.outer(inner), x


class Judge(nn.Module):
    """What it would answer now, beside what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return h, x, self.linear(h)


def sure(scores: Tensor) -> Tensor:
    """Whether the best answer stands out."""
    return scores.detach().softmax(1).amax(1) > SURE


class First(nn.Module):
    """Nothing but the input is known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.3 * torch.tanh(self.linear(x)), x


@final
class Exits(AbstractProgram):
    name = "exits"
    told = "refinement until it is sure, at most 16"
    width = 128
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.first, self.block, self.judge = First(width), Block(width), Judge(width)

    def generate(self, n: int, seed: int) -> list[Item]:
        random, fixed = np.random.default_rng(seed), np.random.default_rng(0)
        x = random.standard_normal((n, FEATURES)).astype(np.float32)
        centre = fixed.standard_normal((2, CLASSES, FEATURES))
        label = (x @ centre[0].T * np.tanh(x @ centre[1].T)).argmax(1)
        return [{"x": x[i : i + 1], "label": int(label[i])} for i in range(n)]

    def graph(self) -> gt.Graph:
        graph = gt.Graph(value=("label",))
        again = graph.loop(name="again")
        again.join(graph.input("x", step=0).through(self.first, name="first"))
        judged = again.through(self.block, name="block").through(self.judge, name="judge")
        done, more = judged.where(
            lambda m: sure(m.payload[2]) | torch.from_numpy(m.step + 1 >= MOST)
        )
        again.join(
            more.through(lambda h, x, scores: (h, x), name="on").move(step=lambda m: m.step + 1)
        )
        answer = done.through(lambda h, x, scores: scores, name="answer")
        answer.loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        x = torch.from_numpy(item["x"]).to(dtype)
        return gt.Instance({"x": x}, value={"label": item["label"]})

    def plain(self, item: Item) -> Tensor:
        h, x = self.first(torch.from_numpy(item["x"]).to(self.dtype))
        for _ in range(MOST):
            h, x, scores = self.judge(*self.block(h, x))
            if sure(scores).item():
                break
        return nn.functional.cross_entropy(scores, tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Rows that are sure are taken out."""
        x = torch.from_numpy(np.concatenate([item["x"] for item in items])).to(self.dtype)
        label = tokens(np.array([item["label"] for item in items]))
        (h, x), answers, labels = self.first(x), [], []
        for step in range(MOST):
            h, x, scores = self.judge(*self.block(h, x))
            stop = sure(scores) if step + 1 < MOST else torch.ones_like(label).bool()
            if not stop.any():
                continue
            here, rest = stop.nonzero()[:, 0], (~stop).nonzero()[:, 0]
            answers.append(scores.index_select(0, here))
            labels.append(label.index_select(0, here))
            if not len(rest):
                break
            h, x, label = (column.index_select(0, rest) for column in (h, x, label))
        scores = torch.cat(answers)
        return nn.functional.cross_entropy(scores, torch.cat(labels), reduction="sum")
