"""Sequence to sequence with attention: an encoder's states are held, and each step of a decoder's
loop reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, tokens

WORDS = 40


class Encoder(nn.Module):
    """A recurrent cell of one's own, with the token of its vertex."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.new, self.gate = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor, word: Tensor) -> Tensor:
        both = torch.cat([h, self.words(word)], 1)
        gate = torch.sigmoid(self.gate(both))
        return gate * h + (1 - gate) * torch.tanh(self.new(both))


class Keys(nn.Module):
    """What the states are asked by, and the states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, memory: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
        return self.linear(memory), memory


class Begin(nn.Module):
    """The decoder's first state, of the last one of the encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, keys: Tensor, memory: Tensor, inside: gt.Inside) -> Tensor:
        return torch.tanh(self.linear(memory.index_select(0, inside.lengths.cumsum(0) - 1)))


class Decoder(nn.Module):
    """One step: a new state of what attention has found, the state and the word before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, width)
        self.new, self.gate = nn.Linear(3 * width, width), nn.Linear(3 * width, width)

    def forward(self, heard: Tensor, h: Tensor, word: Tensor) -> Tensor:
        all_ = torch.cat([heard, h, self.words(word)], 1)
        gate = torch.sigmoid(self.gate(all_))
        return gate * h + (1 - gate) * torch.tanh(self.new(all_))


@final
class SequenceToSequence(AbstractProgram):
    name = "seq2seq"
    told = "attention over an encoder's states"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.wide = width = width or self.width
        self.encoder, self.keys, self.begin = Encoder(width), Keys(width), Begin(width)
        self.decoder, self.readout = Decoder(width), nn.Linear(width, WORDS)

    def generate(self, n: int, seed: int) -> list[Item]:
        """The sequence backwards, in another alphabet; the word before is given."""
        random, alphabet = np.random.default_rng(seed), np.random.default_rng(0).permutation(WORDS)
        items = []
        for _ in range(n):
            word = random.integers(0, WORDS, random.integers(10, 31))
            out = alphabet[word[::-1]]
            items.append({"word": word, "out": out, "before": np.r_[WORDS, out[:-1]]})
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["out"].size for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("word", "before", "out"))
        states = graph.loop(name="states")
        states.join(graph.input("start"))
        encoded = states.through(self.encoder, name="encoder", read="word")
        more, ended = encoded.where(lambda m: m.vertex + 1 < m.size)
        ended.stop()
        states.join(more.move(vertex=lambda m: m.vertex + 1))
        bundles = encoded.group(by="instance", size=lambda m: m.size, order="vertex", how="bundle")
        held = bundles.through(self.keys, name="keys", inside=True).hold(name="memory")
        steps = graph.loop(name="steps")
        begun = held.through(self.begin, name="begin", inside=True, pool=True)
        steps.join(begun.move(vertex=0))
        read = steps.attend(held, gt.nn.DotAttention(), name="attention")
        decoded = read.through(self.decoder, name="decoder", read="before")
        decoded.through(self.readout, name="readout").loss(gt.cross_entropy, target="out")
        again, end = decoded.where(lambda m: m.vertex + 1 < m.size)
        steps.join(again.move(vertex=lambda m: m.vertex + 1))
        end.stop()
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return gt.Instance({"start": (torch.zeros(1, self.wide, dtype=dtype), [0])}, dict(item))

    def plain(self, item: Item) -> Tensor:
        h, states = torch.zeros(1, self.wide, dtype=self.dtype), []
        for word in item["word"]:
            h = self.encoder(h, tokens(word))
            states.append(h)
        memory = torch.cat(states)
        keys = self.keys.linear(memory)
        h, scores = torch.tanh(self.begin.linear(h)), []
        for before in item["before"]:
            share = (keys @ h[0] / self.wide**0.5).softmax(0)
            h = self.decoder((share @ memory)[None], h, tokens(before))
            scores.append(self.readout(h))
        out = tokens(item["out"])
        return nn.functional.cross_entropy(torch.cat(scores), out, reduction="sum")

    def hand(self, items: Sequence[Item]) -> Tensor:
        """The longest first, so that what goes on is always the first rows; memory is padded."""
        items = sorted(items, key=lambda item: -item["word"].size)
        lengths = np.array([item["word"].size for item in items])
        steps = int(lengths[0])
        going = [int((lengths > t).sum()) for t in range(steps)]
        columns = {}
        for name in ("word", "before", "out"):
            padded = np.zeros((steps, lengths.size), np.int64)
            for i, item in enumerate(items):
                padded[: lengths[i], i] = item[name]
            columns[name] = torch.from_numpy(padded)
        h, states, last = torch.zeros(lengths.size, self.wide, dtype=self.dtype), [], []
        for t, n in enumerate(going):
            if n < len(h):
                last.append(h[n:])
            h = self.encoder(h[:n], columns["word"][t, :n])
            states.append(nn.functional.pad(h, (0, 0, 0, lengths.size - n)))
        last.append(h)
        memory = torch.stack(states, 1)
        keys = self.keys.linear(memory)
        past = torch.arange(steps) >= torch.from_numpy(lengths)[:, None]
        mask = torch.zeros(past.shape, dtype=self.dtype).masked_fill(past, -torch.inf)
        made = []
        h = torch.tanh(self.begin.linear(torch.cat(last[::-1])))
        for t, n in enumerate(going):
            h, seen = h[:n], memory[:n]
            score = torch.bmm(keys[:n], h[:, :, None])[:, :, 0] / self.wide**0.5
            share = (score + mask[:n]).softmax(1)
            heard = torch.bmm(share[:, None], seen)[:, 0]
            h = self.decoder(heard, h, columns["before"][t, :n])
            made.append(h)
        out = torch.cat([columns["out"][t, :n] for t, n in enumerate(going)])
        scores = self.readout(torch.cat(made))
        return nn.functional.cross_entropy(scores, out, reduction="sum")
