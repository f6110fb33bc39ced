"""Module networks: each instance has a layout of its own, a tree of modules that look at an image.

What a module finds is a vector; those that look attend to the regions of the image, which are held.
Andreas et al. 2016, arXiv:1511.02799.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import (
    AbstractProgram,
    Item,
    Levels,
    binary_tree,
    heights,
    joined,
    offsets_of,
    tokens,
)

WORDS, ANSWERS, FEATURES = 30, 5, 8


class Regions(nn.Module):
    """Keys and values of what is seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.both = nn.Linear(FEATURES, width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.both(torch.relu(self.inner(x))).chunk(2, 1)
        return keys, values


def look(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """What a query finds."""
    score = (keys * query[:, None]).sum(2).masked_fill(~mask, -1e9)
    return (score.softmax(1)[..., None] * values).sum(1)


class Find(nn.Module):
    """Where the image is like a word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)

    def forward(
        self, begun: Tensor, keys: Tensor, values: Tensor, mask: Tensor, word: Tensor
    ) -> Tensor:
        return begun + look(self.words(word), keys, values, mask)


class Relate(nn.Module):
    """What is in that relation to what was found."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.query = nn.Embedding(WORDS, width), nn.Linear(2 * width, width)

    def forward(
        self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor, word: Tensor
    ) -> Tensor:
        query = torch.tanh(self.query(torch.cat([h, self.words(word)], 1)))
        return torch.tanh(h + look(query, keys, values, mask))


class Both(nn.Module):
    """Two findings as one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, pair: Tensor) -> Tensor:
        both = pair.flatten(1)
        gate = torch.sigmoid(self.gate(both))
        return gate * torch.tanh(self.inner(both)) + (1 - gate) * pair.amax(1)


class Either(nn.Module):
    """Two findings as one, otherwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, pair: Tensor) -> Tensor:
        return torch.tanh(self.inner(pair[:, 0] * pair[:, 1])) + pair.mean(1)


class Start(nn.Module):
    """Nothing is found yet: one row of zeros for each image."""

    def forward(self, keys: Tensor, values: Tensor, inside: gt.Inside) -> Tensor:
        return torch.zeros_like(values[: len(inside.lengths)])


FIND, RELATE, BOTH, EITHER = range(4)


@final
class Layouts(AbstractProgram):
    name = "layouts"
    told = "module networks, a layout each, an image held"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.regions, self.start = Regions(width), Start()
        self.find, self.relate = Find(width), Relate(width)
        self.both, self.either = Both(width), Either(width)
        self.answer = nn.Linear(width, ANSWERS)

    def generate(self, n: int, seed: int) -> list[Item]:
        random = np.random.default_rng(seed)
        return [self._item(random) for _ in range(n)]

    def _item(self, random: np.random.Generator) -> Item:
        """A binary tree of both and either over finds, with relations on some of its edges."""
        finds = int(random.integers(1, 6))
        parent, slot = binary_tree(random, finds)
        n = parent.size
        above = np.flatnonzero(random.random(n) < 0.4)
        total = n + above.size
        has = np.zeros(n, bool)
        has[above] = True
        place, over, number = np.arange(n), np.full(n, -1), finds
        for v in np.argsort(heights(parent), kind="stable"):
            if v >= finds:
                place[v], number = number, number + 1
            if has[v]:
                over[v], number = number, number + 1
        op, up, side = np.full(total, FIND), np.full(total, -1), np.zeros(total, np.int64)
        op[place[finds:]] = random.integers(BOTH, EITHER + 1, n - finds)
        top = np.where(has, over, place)
        op[over[has]] = RELATE
        up[place[has]] = over[has]
        inner = parent >= 0
        up[top[inner]], side[top[inner]] = place[parent[inner]], slot[inner]
        word = random.integers(0, WORDS, total)
        x = random.standard_normal((random.integers(4, 13), FEATURES)).astype(np.float32)
        return {
            "x": x,
            "parent": up,
            "slot": side,
            "op": op,
            "word": word,
            "level": heights(up),
            "finds": finds,
            "label": int((word.sum() + (x[:, 0] > 0).sum()) % ANSWERS),
        }

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("parent", "slot", "op", "word"), value=("finds", "label"))
        seen = graph.input("x", bundle=True).through(self.regions, name="regions")
        held = seen.hold(name="image")
        begun = held.through(self.start, name="start", inside=True, pool=True)
        each = begun.flatmap("vertex", count=lambda m: m.finds)
        nodes = graph.loop(name="nodes")
        nodes.join(each.attend(held, self.find, name="find", read="word"))
        inner, root = nodes.where(lambda m: m.parent >= 0)
        up = inner.move(below=lambda m: m.slot, vertex=lambda m: m.parent)
        one, two = up.where(lambda m: m.op == RELATE)
        nodes.join(one.attend(held, self.relate, name="relate", read="word"))
        pairs = two.group(by="vertex", size=2, order="below")
        both, either = pairs.where(lambda m: m.op == BOTH)
        nodes.join(both.through(self.both, name="both"), either.through(self.either, name="either"))
        root.through(self.answer, name="answer").loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return gt.Instance(
            {"x": torch.from_numpy(item["x"]).to(dtype)},
            {name: item[name] for name in ("parent", "slot", "op", "word")},
            value={"finds": item["finds"], "label": item["label"]},
        )

    def plain(self, item: Item) -> Tensor:
        keys, values = (x[None] for x in self.regions(torch.from_numpy(item["x"]).to(self.dtype)))
        mask = torch.ones(keys.shape[:2], dtype=torch.bool)
        below: dict[int, list[Tensor]] = {}
        for v, op in enumerate(item["op"].tolist()):
            word = tokens(item["word"][v])
            if op == FIND:
                h = self.find(torch.zeros_like(keys[:, 0]), keys, values, mask, word)
            elif op == RELATE:
                h = self.relate(below[v][0], keys, values, mask, word)
            else:
                h = (self.both if op == BOTH else self.either)(torch.stack(below[v], 1))
            pair = below.setdefault(int(item["parent"][v]), [h, h])
            pair[item["slot"][v]] = h
        return nn.functional.cross_entropy(self.answer(h), tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Level by level, and in each by type; images are padded."""
        levels, op = Levels(items), joined(items, "op")
        slot, word = joined(items, "slot"), joined(items, "word")
        count = np.array([len(item["x"]) for item in items])
        keys, values = self.regions(torch.from_numpy(joined(items, "x")).to(self.dtype))
        where = np.arange(count.max()) + offsets_of(count)[:, None]
        there = np.arange(count.max()) < count[:, None]
        at = torch.from_numpy(np.where(there, where, 0))
        mask = torch.from_numpy(there)
        keys, values = keys[at], values[at]
        rows = levels.rows(0)
        some = tokens(levels.item[rows])
        seen = (x.index_select(0, some) for x in (keys, values, mask))
        zero = torch.zeros(rows.size, keys.shape[2], dtype=self.dtype)
        levels.send(0, self.find(zero, *seen, tokens(word[rows])))
        for k in range(1, levels.count):
            rows, coming = levels.rows(k), levels.coming(k)
            (states,) = levels.receive(k)
            member = np.zeros((rows.size, 2), np.int64)
            member[levels.at(levels.parent[coming]), slot[coming]] = np.arange(coming.size)
            made, where = [], []
            for kind, module in ((RELATE, self.relate), (BOTH, self.both), (EITHER, self.either)):
                here = np.flatnonzero(op[rows] == kind)
                if not here.size:
                    continue
                if kind == RELATE:
                    h = states.index_select(0, tokens(member[here, 0]))
                    some = tokens(levels.item[rows[here]])
                    seen = (x.index_select(0, some) for x in (keys, values, mask))
                    made.append(module(h, *seen, tokens(word[rows[here]])))
                else:
                    chosen = states.index_select(0, tokens(member[here].ravel()))
                    made.append(module(chosen.view(here.size, 2, -1)))
                where.append(here)
            back = np.argsort(np.concatenate(where))
            levels.send(k, torch.cat(made).index_select(0, tokens(back)))
        label = np.array([item["label"] for item in items])[levels.item]
        (roots,) = levels.receive(levels.count)
        label = tokens(label[levels.coming(levels.count)])
        return nn.functional.cross_entropy(self.answer(roots), label, reduction="sum")
