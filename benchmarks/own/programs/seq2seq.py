"""Sequence to sequence with attention: bundles of encoder states that go round the decoder's loop.

The decoder's state travels beside the memory, on every row of its bundle, as all tensors of a
bundle have equally many rows.
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


class Decoder(nn.Module):
    """One step: attend to the memory, then a recurrent cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.ask = nn.Embedding(WORDS + 1, width), nn.Linear(width, width)
        self.new, self.gate = nn.Linear(3 * width, width), nn.Linear(3 * width, width)

    def step(self, heard: Tensor, h: Tensor, word: Tensor) -> Tensor:
        """A new state of what attention has found, the state and the word before: rows."""
        all_ = torch.cat([heard, h, self.words(word)], 1)
        gate = torch.sigmoid(self.gate(all_))
        return gate * h + (1 - gate) * torch.tanh(self.new(all_))

    def forward(
        self, memory: Tensor, h: Tensor, before: Tensor, step: Tensor, inside: gt.Inside
    ) -> tuple[Tensor, Tensor]:
        first = inside.lengths.cumsum(0) - inside.lengths
        state, at = h.index_select(0, first), inside.segment
        score = (memory * self.ask(state).index_select(0, at)).sum(1) / memory.shape[1] ** 0.5
        top = score.new_full((len(first),), -torch.inf).index_reduce(0, at, score.detach(), "amax")
        share = torch.exp(score - top.index_select(0, at))
        total = share.new_zeros(len(first)).index_add(0, at, share)
        heard = torch.zeros_like(state).index_add(0, at, memory * share[:, None])
        word = before.index_select(0, first + step.index_select(0, first))
        state = self.step(heard / total[:, None], state, word)
        return memory, state.index_select(0, at)


class Begin(nn.Module):
    """The decoder's first state, of the last one of the encoder, on every row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, memory: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
        last = memory.index_select(0, inside.lengths.cumsum(0) - 1)
        return memory, torch.tanh(self.linear(last)).index_select(0, inside.segment)


class Readout(nn.Module):
    """Scores of the words, a row of each bundle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, WORDS)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        first = inside.lengths.cumsum(0) - inside.lengths
        return self.linear(h.index_select(0, first))


@final
class SequenceToSequence(AbstractProgram):
    name = "seq2seq"
    told = "attention over an encoder's states"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.wide = width = width or self.width
        self.encoder, self.begin = Encoder(width), Begin(width)
        self.decoder, self.readout = Decoder(width), Readout(width)

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
        memory = encoded.group(by="instance", size=lambda m: m.size, order="vertex", how="bundle")
        steps = graph.loop(name="steps")
        begun = memory.through(self.begin, name="begin", inside=True)
        steps.join(begun.move(vertex=0, step=0))
        decoded = steps.through(self.decoder, name="decoder", read=("before", "step"), inside=True)
        scores = decoded.through(self.readout, name="readout", take=1, inside=True, pool=True)
        scores.loss(gt.cross_entropy, target="out")
        again, end = decoded.where(lambda m: m.step + 1 < m.size)
        steps.join(again.move(vertex=lambda m: m.vertex + 1, step=lambda m: m.step + 1))
        end.stop()
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return gt.Instance({"start": (torch.zeros(1, self.wide, dtype=dtype), [0])}, dict(item))

    def plain(self, item: Item) -> Tensor:
        h, states = torch.zeros(1, self.wide, dtype=self.dtype), []
        for word in item["word"]:
            h = self.encoder(h, tokens(word))
            states.append(h)
        memory, decoder = torch.cat(states), self.decoder
        h, scores = torch.tanh(self.begin.linear(h)), []
        for before in item["before"]:
            share = (memory @ decoder.ask(h)[0] / self.wide**0.5).softmax(0)
            h = decoder.step((share @ memory)[None], h, tokens(before))
            scores.append(self.readout.linear(h))
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
        past = torch.arange(steps) >= torch.from_numpy(lengths)[:, None]
        mask = torch.zeros(past.shape, dtype=self.dtype).masked_fill(past, -torch.inf)
        decoder, made = self.decoder, []
        h = torch.tanh(self.begin.linear(torch.cat(last[::-1])))
        for t, n in enumerate(going):
            h, seen = h[:n], memory[:n]
            score = torch.bmm(seen, decoder.ask(h)[:, :, None])[:, :, 0] / self.wide**0.5
            share = (score + mask[:n]).softmax(1)
            heard = torch.bmm(share[:, None], seen)[:, 0]
            h = decoder.step(heard, h, columns["before"][t, :n])
            made.append(h)
        out = torch.cat([columns["out"][t, :n] for t, n in enumerate(going)])
        scores = self.readout.linear(torch.cat(made))
        return nn.functional.cross_entropy(scores, out, reduction="sum")
