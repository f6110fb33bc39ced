"""A tagger: a chain of one's own cells from either side, and a tag for each word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

WORDS, TAGS = 100, 7


class Cell(nn.Module):
    """Forgets by a gate, with a skip of the word; the state is two rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.gates = nn.Linear(2 * width, 3 * width)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(word)
        forget, new, out = self.gates(torch.cat([h, x], 1)).chunk(3, 1)
        forget = torch.sigmoid(forget)
        c = forget * c + (1 - forget) * torch.tanh(new)
        out = torch.sigmoid(out)
        return out * torch.tanh(c) + (1 - out) * x, c


class Tag(nn.Module):
    """Scores of what both have seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * width, width), nn.Linear(width, TAGS)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner(torch.cat([left, right], 1))))


@final
class Tagger(AbstractProgram):
    name = "tagger"
    told = "cells from both sides, a tag a word"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.wide = width = width or self.width
        self.left, self.right, self.tag = Cell(width), Cell(width), Tag(width)

    def generate(self, n: int, seed: int) -> list[Item]:
        """A tag depends on a word and on both beside it."""
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            word = random.integers(0, WORDS, random.integers(4, 31))
            beside = np.r_[0, word[:-1]] % 3 - np.r_[word[1:], 0] % 2
            items.append({"word": word, "tag": (word + beside) % TAGS})
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["tag"].size for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("word", "tag"))
        rightward, leftward = graph.loop(name="rightward"), graph.loop(name="leftward")
        rightward.join(graph.input("first").through(self._begin, name="first state"))
        leftward.join(graph.input("last").through(self._begin, name="last state"))
        left = rightward.through(self.left, name="left", read="word")
        more, end = left.where(lambda m: m.vertex + 1 < m.size)
        rightward.join(more.move(vertex=lambda m: m.vertex + 1))
        end.stop()
        right = leftward.through(self.right, name="right", read="word")
        more, end = right.where(lambda m: m.vertex > 0)
        leftward.join(more.move(vertex=lambda m: m.vertex - 1))
        end.stop()
        both = graph.concat(left, right, on=("instance", "vertex"), how="tuple")
        scores = both.through(self.tag, name="tag", take=(0, 2))
        scores.loss(gt.cross_entropy, target="tag")
        return graph

    @staticmethod
    def _begin(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        zero = torch.zeros(1, self.wide, dtype=dtype)
        ends = {"first": (zero, [0]), "last": (zero, [item["word"].size - 1])}
        return gt.Instance(ends, {"word": item["word"], "tag": item["tag"]})

    def plain(self, item: Item) -> Tensor:
        words = tokens(item["word"]).split(1)
        zero = torch.zeros(1, self.wide, dtype=self.dtype)
        state, left = (zero, zero), []
        for word in words:
            state = self.left(*state, word)
            left.append(state[0])
        state, right = (zero, zero), []
        for word in reversed(words):
            state = self.right(*state, word)
            right.append(state[0])
        scores = self.tag(torch.cat(left), torch.cat(right[::-1]))
        return nn.functional.cross_entropy(scores, tokens(item["tag"]), reduction="sum")

    def hand(self, items: Sequence[Item]) -> Tensor:
        """The longest first, from both ends; what both found is put side by side once."""
        items = sorted(items, key=lambda item: -item["word"].size)
        sizes = np.array([item["word"].size for item in items])
        word, first = joined(items, "word"), offsets_of(sizes)
        going = [int((sizes > t).sum()) for t in range(int(sizes[0]))]
        found = []
        for cell, begin, way in ((self.left, first, 1), (self.right, first + sizes - 1, -1)):
            zero = torch.zeros(sizes.size, self.wide, dtype=self.dtype)
            state, states = (zero, zero), []
            at = np.concatenate([begin[:n] + way * t for t, n in enumerate(going)])
            each = torch.from_numpy(word[at]).split(going)
            for n, read in zip(going, each, strict=True):
                state = cell(state[0][:n], state[1][:n], read)
                states.append(state[0])
            found.append(torch.cat(states).index_select(0, torch.from_numpy(np.argsort(at))))
        tag = tokens(joined(items, "tag"))
        return nn.functional.cross_entropy(self.tag(*found), tag, reduction="sum")
