"""A reader that jumps: after every third word a policy says how far to go on, or that it is enough.

As in Yu et al. 2017, arXiv:1704.06877, but that the choice is the likeliest one, not a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

WORDS, CLASSES, MOST, EVERY = 100, 4, 5, 3


class Begin(nn.Module):
    """Nothing has been read."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.zeros_like(h)


class Cell(nn.Module):
    """A cell with two states, its gates cut from one map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.own = nn.Linear(width, 4 * width)
        self.before = nn.Linear(width, 4 * width, bias=False)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.own(self.embed(word)) + self.before(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Policy(nn.Module):
    """How far to jump, 0 for not at all; the state is weighed by how sure that is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * width, width), nn.Linear(width, MOST + 1)
        nn.init.normal_(self.outer.weight)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = torch.relu(self.inner(torch.cat([h, c], 1)))
        shares = torch.softmax(self.outer(inner), 1)
        return h * (0.5 + shares.amax(1, keepdim=True)), c, shares


@final
class Reader(AbstractProgram):
    name = "reader"
    told = "jumps over words, or stops, as a policy says"
    width = 64
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = self.size = width or self.width
        self.begin, self.cell, self.policy = Begin(), Cell(width), Policy(width)
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def generate(self, n: int, seed: int) -> list[Item]:
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            word = random.integers(0, WORDS, random.integers(6, 41))
            label = int(word[:3].sum() if random.random() < 0.3 else word[0]) % CLASSES
            items.append({"word": word, "label": label})
        return items

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("word",), value=("label",))
        turns = graph.loop(name="turns")
        turns.join(graph.input("state", read=0).through(self.begin, name="begin"))
        after = turns.through(self.cell, read="word", name="cell").move(read=lambda m: m.read + 1)
        ended, more = after.where(lambda m: m.vertex + 1 >= m.size)
        decide, on = more.where(lambda m: m.read == EVERY)
        turns.join(on.move(vertex=lambda m: m.vertex + 1))
        decided = decide.through(self.policy, name="policy")
        decided = decided.move(jump=lambda m: m.payload[2].argmax(1).numpy())
        enough, going = decided.where(lambda m: (m.jump == 0) | (m.vertex + m.jump >= m.size))
        going = going.through(lambda h, c, shares: (h, c), name="going")
        turns.join(going.move(vertex=lambda m: m.vertex + m.jump, read=0))
        ends = ended.through(lambda h, c: h, name="the last word")
        stops = enough.through(lambda h, c, shares: h, name="enough")
        scores = graph.merge(ends, stops).through(self.readout, name="readout")
        scores.loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        begin = torch.zeros(1, self.size, dtype=dtype), [0]
        return gt.Instance({"state": begin}, {"word": item["word"]}, value={"label": item["label"]})

    def plain(self, item: Item) -> Tensor:
        (h, c), word = self.begin(torch.zeros(1, self.size, dtype=self.dtype)), item["word"]
        at, read = 0, 0
        while True:
            h, c = self.cell(h, c, tokens(word[at]))
            read += 1
            if at + 1 >= word.size:
                break
            if read < EVERY:
                at += 1
                continue
            h, c, shares = self.policy(h, c)
            jump, read = int(shares.argmax()), 0
            if jump == 0 or at + jump >= word.size:
                break
            at += jump
        return nn.functional.cross_entropy(self.readout(h), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """All read in step, as each jumps after so many words; those that end are taken out."""
        size, word = np.array([item["word"].size for item in items]), joined(items, "word")
        first, at = offsets_of(size), np.zeros_like(size)
        label = np.array([item["label"] for item in items])
        h, c = self.begin(torch.zeros(len(items), self.size, dtype=self.dtype))
        answers, labels, read = [], [], 0

        while size.size:
            h, c = self.cell(h, c, tokens(word[first + at]))
            read += 1
            done = at + 1 >= size
            for last in (False, True):
                if done.any():
                    answers.append(h.index_select(0, tokens(np.flatnonzero(done))))
                    labels.append(label[done])
                    rest = tokens(np.flatnonzero(~done))
                    h, c = h.index_select(0, rest), c.index_select(0, rest)
                    size, first, at, label = (x[~done] for x in (size, first, at, label))
                if last or not size.size:
                    break
                if read < EVERY:
                    at = at + 1
                    break
                h, c, shares = self.policy(h, c)
                jump, read = shares.detach().argmax(1).numpy(), 0
                at = at + jump
                done = (jump == 0) | (at >= size)
        scores, of = self.readout(torch.cat(answers)), tokens(np.concatenate(labels))
        return nn.functional.cross_entropy(scores, of, reduction="sum")
