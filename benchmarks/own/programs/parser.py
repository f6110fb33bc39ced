"""A parser with a stack: at every step it decides by what it sees whether to shift or to reduce.

The stack is part of the row, its top first. A tracker reads the two upper entries and the next
word, and its scores choose, as far as there is a choice: Bowman et al. 2016, arXiv:1603.06021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

WORDS, CLASSES, DEEP = 80, 6, 5

Numbers: TypeAlias = Any
State: TypeAlias = tuple[Tensor, ...]


def must_shift(depth: Numbers, at: Numbers, words: Numbers) -> Numbers:
    """There is nothing to reduce."""
    return (depth < 2) & (at < words)


def may_shift(depth: Numbers, at: Numbers, words: Numbers) -> Numbers:
    """There is a word, and room for it."""
    return (depth < DEEP) & (at < words)


class Track(nn.Module):
    """The tracker's state, and how much it is for reducing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.inner, self.gate = nn.Linear(4 * width, width), nn.Linear(4 * width, width)
        self.choose = nn.Linear(width, 1)

    def forward(self, stack: Tensor, h: Tensor, word: Tensor) -> State:
        seen = torch.cat([stack[:, 0], stack[:, 1], self.words(word), h], 1)
        gate = torch.sigmoid(self.gate(seen))
        h = gate * h + (1 - gate) * torch.tanh(self.inner(seen))
        return stack, h, torch.sigmoid(self.choose(h))


class Shift(nn.Module):
    """The next word goes on top, as much as the tracker is for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(WORDS, width), nn.Linear(2 * width, width)

    def forward(
        self, stack: Tensor, h: Tensor, want: Tensor, word: Tensor
    ) -> tuple[Tensor, Tensor]:
        new = torch.tanh(self.linear(torch.cat([self.words(word), h], 1))) * (1.5 - want)
        return torch.cat([new[:, None], stack[:, :-1]], 1), h


class Reduce(nn.Module):
    """The two upper ones become one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(3 * width, width), nn.Linear(3 * width, width)

    def forward(self, stack: Tensor, h: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
        right, left = stack[:, 0], stack[:, 1]
        all_ = torch.cat([left, right, h], 1)
        gate = torch.sigmoid(self.gate(all_))
        new = gate * left + (1 - gate) * right + torch.tanh(self.inner(all_)) * (0.5 + want)
        return torch.cat([new[:, None], stack[:, 2:], torch.zeros_like(new)[:, None]], 1), h


class Read(nn.Module):
    """Scores of the one that is left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, stack: Tensor, h: Tensor) -> Tensor:
        return self.linear(stack[:, 0])


class Begin(nn.Module):
    """An empty stack."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, None].expand(-1, DEEP, -1), x


@final
class Parser(AbstractProgram):
    name = "parser"
    told = "shift or reduce, as a tracker decides"
    width = 48
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.wide = width = width or self.width
        self.begin, self.track = Begin(), Track(width)
        self.shift, self.reduce, self.read = Shift(width), Reduce(width), Read(width)
        nn.init.normal_(self.track.choose.weight, std=2.0)

    def generate(self, n: int, seed: int) -> list[Item]:
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            word = random.integers(0, WORDS, random.integers(3, 13))
            items.append({"word": word, "label": int(np.bincount(word % CLASSES).argmax())})
        return items

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("word",), value=("label", "words"))
        turns = graph.loop(name="turns")
        empty = graph.input("start", depth=0).through(self.begin, name="begin")
        turns.join(empty)
        tracked = turns.through(self.track, name="track", read="word")
        shift, reduce = tracked.where(
            lambda m: (
                must_shift(m.depth, m.vertex, m.words)
                | (may_shift(m.depth, m.vertex, m.words) & (m.payload[2][:, 0].numpy() < 0.5))
            )
        )
        shifted = shift.through(self.shift, name="shift", read="word").move(
            vertex=lambda m: np.minimum(m.vertex + 1, m.size - 1), depth=lambda m: m.depth + 1
        )
        reduced = reduce.through(self.reduce, name="reduce").move(depth=lambda m: m.depth - 1)
        done, more = graph.merge(shifted, reduced).where(
            lambda m: (m.vertex == m.words) & (m.depth == 1)
        )
        turns.join(more)
        done.through(self.read, name="read").loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        start = (torch.zeros(1, self.wide, dtype=dtype), [0])
        value = {"label": item["label"], "words": item["word"].size}
        return gt.Instance({"start": start}, {"word": np.r_[item["word"], 0]}, value=value)

    def plain(self, item: Item) -> Tensor:
        word = tokens(np.r_[item["word"], 0]).split(1)
        state = self.begin(torch.zeros(1, self.wide, dtype=self.dtype))
        at, depth, words = 0, 0, item["word"].size
        while at < words or depth > 1:
            tracked = self.track(*state, word[at])
            may = may_shift(depth, at, words) and tracked[2].item() < 0.5
            if must_shift(depth, at, words) or may:
                state, at, depth = self.shift(*tracked, word[at]), at + 1, depth + 1
            else:
                state, depth = self.reduce(*tracked), depth - 1
        return nn.functional.cross_entropy(self.read(*state), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """All at the same step; shifts and reductions by index; who is done is taken out."""
        sizes = np.array([item["word"].size for item in items])
        word, first = joined(items, "word"), offsets_of(sizes)
        word = np.r_[word, 0]
        label = np.array([item["label"] for item in items])
        state = self.begin(torch.zeros(sizes.size, self.wide, dtype=self.dtype))
        at, depth = np.zeros_like(sizes), np.zeros_like(sizes)
        done, labels = [], []
        while sizes.size:
            here = np.where(at < sizes, word[np.minimum(first + at, word.size - 1)], 0)
            read = torch.from_numpy(here)
            tracked = self.track(*state, read)
            want = tracked[2].detach()[:, 0].numpy()
            shifts = must_shift(depth, at, sizes) | (may_shift(depth, at, sizes) & (want < 0.5))
            yes, no = np.flatnonzero(shifts), np.flatnonzero(~shifts)
            made = []
            for rows, module, more in ((yes, self.shift, True), (no, self.reduce, False)):
                if rows.size:
                    some = torch.from_numpy(rows)
                    picked = [x.index_select(0, some) for x in tracked]
                    made.append(module(*picked, *([read.index_select(0, some)] * more)))
            state = tuple(torch.cat(x) for x in zip(*made, strict=True))
            order = np.concatenate([yes, no])
            at, depth = (at + shifts)[order], (depth + np.where(shifts, 1, -1))[order]
            sizes, first, label = sizes[order], first[order], label[order]
            stop = (at == sizes) & (depth == 1)
            if stop.any():
                ended, rest = np.flatnonzero(stop), np.flatnonzero(~stop)
                done.append([x.index_select(0, torch.from_numpy(ended)) for x in state])
                labels.append(label[ended])
                state = tuple(x.index_select(0, torch.from_numpy(rest)) for x in state)
                at, depth, sizes = at[rest], depth[rest], sizes[rest]
                first, label = first[rest], label[rest]
        scores = self.read(*(torch.cat(x) for x in zip(*done, strict=True)))
        return nn.functional.cross_entropy(scores, tokens(np.concatenate(labels)), reduction="sum")
