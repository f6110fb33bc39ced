"""Two nested loops: words are read letter by letter, the sentence word by word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

LETTERS, CLASSES = 26, 6


class Cell(nn.Module):
    """A recurrent cell of one's own: gates of what it has, and a part that forgets slowly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seen = nn.Linear(width, 3 * width)
        self.had = nn.Linear(width, 3 * width, bias=False)

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        """A new state of the state and what is read, rows both."""
        gate, reset, new = self.seen(x).chunk(3, 1)
        gate_h, reset_h, new_h = self.had(h).chunk(3, 1)
        gate = torch.sigmoid(gate + gate_h)
        new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        return 0.9 * gate * h + (1 - gate) * new


class Letters(Cell):
    """The cell, with the letter of its vertex."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.letters = nn.Embedding(LETTERS, width)

    def forward(self, h: Tensor, letter: Tensor) -> Tensor:
        return self.step(h, self.letters(letter))


class Words(Cell):
    """The cell, with the state of a word."""

    def forward(self, h: Tensor, word: Tensor) -> Tensor:
        return self.step(h, word)


@final
class Hierarchy(AbstractProgram):
    name = "hierarchy"
    told = "letters in words in sentences, nested loops"

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.wide = width = width or self.width
        self.letters, self.words = Letters(width), Words(width)
        self.readout = nn.Linear(width, CLASSES)

    def generate(self, n: int, seed: int) -> list[Item]:
        random = np.random.default_rng(seed)
        items = []
        for _ in range(n):
            lengths = random.integers(2, 9, random.integers(4, 13))
            letter = random.integers(0, LETTERS, lengths.sum())
            first = offsets_of(lengths)
            items.append(
                {
                    "letter": letter,
                    "lengths": lengths,
                    "first": first,
                    "word": np.arange(lengths.size).repeat(lengths),
                    "label": int(letter[first].sum() % 7 % CLASSES),
                }
            )
        return items

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("letter", "word_of", "last"), value=("words", "label"))
        inner = graph.loop(name="inner")
        inner.join(graph.input("empty"))
        read = inner.through(self.letters, name="letters", read="letter")
        words, more = read.where(lambda m: m.last == 1)
        inner.join(more.move(vertex=lambda m: m.vertex + 1))
        outer = graph.loop(name="outer")
        outer.join(graph.input("sentence", word=0))
        both = graph.concat(
            outer, words.move(word=lambda m: m.word_of), on=("instance", "word"), how="tuple"
        )
        after = both.through(self.words, name="words")
        going, done = after.where(lambda m: m.word + 1 < m.words)
        outer.join(going.move(word=lambda m: m.word + 1))
        done.through(self.readout, name="readout").loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        count, last = item["lengths"].size, np.zeros(item["letter"].size, np.int64)
        last[item["first"] + item["lengths"] - 1] = 1
        return gt.Instance(
            {
                "empty": (torch.zeros(count, self.wide, dtype=dtype), item["first"]),
                "sentence": (torch.zeros(1, self.wide, dtype=dtype), [0]),
            },
            {"letter": item["letter"], "word_of": item["word"], "last": last},
            value={"words": count, "label": item["label"]},
        )

    def plain(self, item: Item) -> Tensor:
        state = torch.zeros(1, self.wide, dtype=self.dtype)
        letters = torch.from_numpy(item["letter"])
        for word in letters.split(item["lengths"].tolist()):
            h = torch.zeros(1, self.wide, dtype=self.dtype)
            for letter in word.split(1):
                h = self.letters(h, letter)
            state = self.words(state, h)
        return nn.functional.cross_entropy(self.readout(state), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """All words of the batch by their length, then sentences by theirs, the longest first."""
        lengths = joined(items, "lengths")
        order = np.argsort(-lengths, kind="stable")
        first = offsets_of(lengths)[order]
        letter, h = joined(items, "letter"), torch.zeros(order.size, self.wide, dtype=self.dtype)
        done = []
        for t in range(int(lengths.max())):
            n = int((lengths > t).sum())
            if n < len(h):
                done.append(h[n:])
            h = self.letters(h[:n], tokens(letter[first[:n] + t]))
        done.append(h)
        counts = np.array([item["lengths"].size for item in items])
        longest = np.argsort(-counts, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        start, going = offsets_of(counts)[longest], [
            int((counts > t).sum()) for t in range(int(counts.max()))
        ]  # fmt: skip
        by_turn = np.concatenate([place[start[:n] + t] for t, n in enumerate(going)])
        turns = torch.cat(done[::-1]).index_select(0, tokens(by_turn)).split(going)
        h, done = torch.zeros(counts.size, self.wide, dtype=self.dtype), []
        for n, read in zip(going, turns, strict=True):
            if n < len(h):
                done.append(h[n:])
            h = self.words(h[:n], read)
        done.append(h)
        label = tokens(np.array([items[i]["label"] for i in longest.tolist()]))
        scores = self.readout(torch.cat(done[::-1]))
        return nn.functional.cross_entropy(scores, label, reduction="sum")
