"""A greedy decoder that may copy: it reads the word that it has said, and says words of its own or
of the source (a mixture of both, as in See et al. 2017, arXiv:1704.04368).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, tokens

WORDS, END = 60, 0


class Encoder(nn.Module):
    """A recurrent cell with the word of its vertex."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.x, self.h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, h: Tensor, word: Tensor) -> Tensor:
        a, b = self.x(self.words(word)).chunk(3, 1), self.h(h).chunk(3, 1)
        r, z = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
        return (1 - z) * torch.tanh(a[2] + r * b[2]) + z * h


class Decode(nn.Module):
    """The word said before into the state; then a mixture of words made and words copied."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.cell = nn.GRUCell(width, width)
        self.query = nn.Linear(width, width)
        self.gate, self.out = nn.Linear(2 * width, 1), nn.Linear(2 * width, WORDS)

    def forward(
        self, h: Tensor, said: Tensor, states: Tensor, words: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        h = self.cell(self.words(said), h)
        scores = (states @ self.query(h)[:, :, None])[..., 0].masked_fill(~mask, -1e9)
        share = torch.softmax(scores, 1)
        context = (share[:, None] @ states)[:, 0]
        both = torch.cat([h, context], 1)
        gate = torch.sigmoid(self.gate(both))
        made = gate * torch.softmax(self.out(both), 1)
        return h, made.scatter_add(1, words, (1 - gate) * share)


class First(nn.Module):
    """The last state of the encoder is the first of the decoder."""

    def forward(self, states: Tensor, words: Tensor, inside: gt.Inside) -> Tensor:
        return states[inside.lengths.cumsum(0) - 1]


def missed(share: Tensor, target: Tensor) -> Tensor:
    """What the share of the right word is short of."""
    return -torch.log(share.gather(1, target[:, None])[:, 0] + 1e-8)


@final
class Copier(AbstractProgram):
    name = "copier"
    told = "a greedy decoder that copies words of its source"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.wide = width = width or self.width
        self.encoder, self.decode, self.first = Encoder(width), Decode(width), First()

    def generate(self, n: int, seed: int) -> list[Item]:
        """Of the source the words of the first half of the alphabet, and the end."""
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            word = random.integers(1, WORDS, random.integers(6, 21))
            items.append({"word": word, "out": np.r_[word[word < WORDS // 2][:9], END]})
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["out"].size for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("word", "out"), value=("words", "outs"))
        reading = graph.loop(name="reading")
        reading.join(graph.input("start"))
        read = reading.through(self.encoder, read="word", name="encoder")
        more, ended = read.where(lambda m: m.vertex + 1 < m.words)
        ended.stop()
        reading.join(more.move(vertex=lambda m: m.vertex + 1))
        worded = read.through(lambda h, word: (h, word), read="word", name="worded")
        held = worded.group(by="instance", size="words", order="vertex", how="bundle").hold()
        steps = graph.loop(name="steps")
        first = held.through(self.first, inside=True, pool=True, name="first").move(vertex=0)
        steps.join(first.through(lambda h: (h, torch.zeros_like(h[:, 0]).long()), name="begin"))
        said = steps.attend(held, self.decode, name="decode")
        said.through(lambda h, share: share, name="share").loss(missed, target="out")
        again, end = said.where(lambda m: m.vertex + 1 < m.outs)
        again = again.through(lambda h, share: (h, share.argmax(1)), name="say")
        steps.join(again.move(vertex=lambda m: m.vertex + 1))
        end.stop()
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        n, m = item["word"].size, item["out"].size
        both = np.zeros((2, max(n, m)), np.int64)
        both[0, :n], both[1, :m] = item["word"], item["out"]
        return gt.Instance(
            {"start": (torch.zeros(1, self.wide, dtype=dtype), [0])},
            {"word": both[0], "out": both[1]},
            value={"words": n, "outs": m},
        )

    def plain(self, item: Item) -> Tensor:
        h, states = torch.zeros(1, self.wide, dtype=self.dtype), []
        for word in tokens(item["word"]).split(1):
            h = self.encoder(h, word)
            states.append(h)
        memory, words = torch.stack(states, 1), tokens(item["word"])[None]
        mask = torch.ones_like(words).bool()
        said, made = torch.tensor([END]), []
        for _ in item["out"]:
            h, share = self.decode(h, said, memory, words, mask)
            said = share.argmax(1)
            made.append(share)
        return missed(torch.cat(made), tokens(item["out"])).sum()

    def hand(self, items: Sequence[Item]) -> Tensor:
        """The longest source first, then the longest target; memory is padded."""
        items = sorted(items, key=lambda item: -item["word"].size)
        n = np.array([item["word"].size for item in items])
        word = np.zeros((len(items), n[0]), np.int64)
        for i, item in enumerate(items):
            word[i, : n[i]] = item["word"]
        words = torch.from_numpy(word)
        h, states, last = torch.zeros(len(items), self.wide, dtype=self.dtype), [], []
        for t in range(n[0]):
            k = int((n > t).sum())
            if k < len(h):
                last.append(h[k:])
            h = self.encoder(h[:k], words[:k, t])
            states.append(nn.functional.pad(h, (0, 0, 0, len(items) - k)))
        last.append(h)
        memory, h = torch.stack(states, 1), torch.cat(last[::-1])
        mask = torch.arange(n[0]) < torch.from_numpy(n)[:, None]
        outs = np.array([item["out"].size for item in items])
        order = np.argsort(-outs, kind="stable")
        at = torch.from_numpy(order)
        h, memory, words, mask = (x.index_select(0, at) for x in (h, memory, words, mask))
        target = np.zeros((len(items), outs.max()), np.int64)
        for i, item in enumerate(items):
            target[i, : outs[i]] = item["out"]
        out, outs = torch.from_numpy(target[order]), outs[order]
        said, made, wanted = torch.full((len(items),), END), [], []
        for t in range(outs[0]):
            k = int((outs > t).sum())
            h, share = self.decode(h[:k], said[:k], memory[:k], words[:k], mask[:k])
            said = share.argmax(1)
            made.append(share)
            wanted.append(out[:k, t])
        return missed(torch.cat(made), torch.cat(wanted)).sum()
