"""A reader that thinks over each word as long as it likes, and pays for it.

Adaptive computation time, Graves 2016, arXiv:1603.08983: what is left for the last thought is its
share of the mean state, and with how many there were it is the price, a loss of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

WORDS, CLASSES, MOST, LEFT, RATE, FULL = 50, 6, 6, 0.05, 0.02, 1 - 1e-6
State: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class Think(nn.Module):
    """One more thought on a word; its share, or what is left, of the mean state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(WORDS, width), nn.Embedding(2, width)
        self.cell, self.halt = nn.GRUCell(width, width), nn.Linear(width, 1)
        nn.init.normal_(self.halt.weight, std=0.5)

    def forward(
        self, s: Tensor, mean: Tensor, spent: Tensor, cost: Tensor, word: Tensor, thought: Tensor
    ) -> State:
        s = self.cell(self.words(word) + self.first((thought == 0).long()), s)
        p = torch.sigmoid(self.halt(s))
        ends = (spent + p >= 1 - LEFT) | (thought[:, None] == MOST - 1)
        share = torch.where(ends, 1 - spent, p)
        cost = cost + torch.where(ends, 1 - spent + thought[:, None] + 1, torch.zeros_like(p))
        return s, mean + share * s, spent + share, cost


class Begin(nn.Module):
    """Nothing is thought, and nothing to be paid."""

    def forward(self, s: Tensor) -> State:
        return s, torch.zeros_like(s), torch.zeros_like(s[:, :1]), torch.zeros_like(s[:, :1])


class Next(nn.Module):
    """The mean state is where the next word begins."""

    def forward(self, s: Tensor, mean: Tensor, spent: Tensor, cost: Tensor) -> State:
        return mean, torch.zeros_like(mean), torch.zeros_like(spent), cost


def price(cost: Tensor) -> Tensor:
    """Of thoughts."""
    return RATE * cost[:, 0]


@final
class Ponder(AbstractProgram):
    name = "ponder"
    told = "thinks over each word as long as it likes, two losses"
    width = 64
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.wide = width = width or self.width
        self.begin, self.think, self.next = Begin(), Think(width), Next()
        self.readout = nn.Linear(width, CLASSES)

    def generate(self, n: int, seed: int) -> list[Item]:
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            word = random.integers(0, WORDS, random.integers(3, 12))
            items.append({"word": word, "label": int(word.sum() % CLASSES)})
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return 2 * len(items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("word",), value=("label",))
        thoughts = graph.loop(name="thoughts")
        thoughts.join(graph.input("s", thought=0).through(self.begin, name="begin"))
        after = thoughts.through(self.think, read=("word", "thought"), name="think")
        full, more = after.where(
            lambda m: (m.payload[2][:, 0].numpy() >= FULL) | (m.thought == MOST - 1)
        )
        thoughts.join(more.move(thought=lambda m: m.thought + 1))
        on = full.through(self.next, name="next")
        done, read = on.where(lambda m: m.vertex + 1 >= m.size)
        thoughts.join(read.move(vertex=lambda m: m.vertex + 1, thought=0))
        done.through(lambda s, mean, spent, cost: cost, name="cost").loss(price)
        done.through(self.readout, take=0, name="readout").loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        s = (torch.zeros(1, self.wide, dtype=dtype), [0])
        return gt.Instance({"s": s}, {"word": item["word"]}, value={"label": item["label"]})

    def plain(self, item: Item) -> Tensor:
        state = self.begin(torch.zeros(1, self.wide, dtype=self.dtype))
        thoughts = torch.arange(MOST).split(1)
        for word in tokens(item["word"]).split(1):
            for thought in thoughts:
                state = self.think(*state, word, thought)
                if state[2].item() >= FULL:
                    break
            state = self.next(*state)
        loss = nn.functional.cross_entropy(self.readout(state[0]), tokens(item["label"]))
        return loss + price(state[3]).sum()

    def hand(self, items: Sequence[Item]) -> Tensor:
        """All think at once, each on a word of its own; who has read all is taken out."""
        n, word = np.array([item["word"].size for item in items]), joined(items, "word")
        first, label = offsets_of(n), np.array([item["label"] for item in items])
        at, thought = np.zeros_like(n), np.zeros_like(n)
        state = self.begin(torch.zeros(len(items), self.wide, dtype=self.dtype))
        done, labels = [], []
        while n.size:
            state = self.think(*state, tokens(word[first + at]), tokens(thought))
            full = (state[2].detach()[:, 0].numpy() >= FULL) | (thought == MOST - 1)
            thought = np.where(full, 0, thought + 1)
            if not full.any():
                continue
            mask, on = torch.from_numpy(full)[:, None], self.next(*state)
            state = tuple(torch.where(mask, a, b) for a, b in zip(on, state, strict=True))
            at = at + full
            ended = at >= n
            if ended.any():
                out, rest = tokens(np.flatnonzero(ended)), tokens(np.flatnonzero(~ended))
                done.append((state[0].index_select(0, out), state[3].index_select(0, out)))
                labels.append(label[ended])
                state = tuple(x.index_select(0, rest) for x in state)
                n, first, label, at, thought = (x[~ended] for x in (n, first, label, at, thought))
        s, cost = (torch.cat(x) for x in zip(*done, strict=True))
        scores, of = self.readout(s), tokens(np.concatenate(labels))
        return nn.functional.cross_entropy(scores, of, reduction="sum") + price(cost).sum()
