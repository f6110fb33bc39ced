"""A tree becomes one vector, and the vector the tree again: up by one loop, down by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, joined, offsets_of, tokens

WORDS = 30
COLUMNS = ("parent", "slot", "left", "right", "leaf", "said")


class Fold(nn.Module):
    """Two children become their parent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(2 * width, 3 * width)

    def forward(self, pair: Tensor) -> Tensor:
        new, left, right = self.map(pair.flatten(1)).chunk(3, 1)
        left, right = torch.sigmoid(left), torch.sigmoid(right)
        return torch.tanh(new) + left * pair[:, 0] + right * pair[:, 1]


class Unfold(nn.Module):
    """A parent becomes two children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, h: Tensor) -> Tensor:
        two = torch.tanh(self.outer(nn.functional.leaky_relu(self.inner(h), 0.1)))
        return two.unflatten(1, (2, -1)) + h[:, None]


def misjudged(score: Tensor, leaf: Tensor) -> Tensor:
    """How wrong it is about what is a leaf."""
    return nn.functional.binary_cross_entropy_with_logits(
        score[:, 0], leaf.to(score.dtype), reduction="none"
    )


@final
class Codes(AbstractProgram):
    name = "codes"
    told = "a tree up to one vector, and down again"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.words, self.fold, self.unfold = nn.Embedding(WORDS, width), Fold(width), Unfold(width)
        self.narrow = nn.Sequential(
            nn.Linear(width, width // 2), nn.ELU(), nn.Linear(width // 2, width)
        )
        self.leaf, self.word = nn.Linear(width, 1), nn.Linear(width, WORDS)

    def generate(self, n: int, seed: int) -> list[Item]:
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            leaves = int(random.integers(2, 10))
            size, free = 2 * leaves - 1, list(range(leaves))
            item = {name: np.full(size, -1) for name in COLUMNS}
            item["slot"][:], item["leaf"][:] = 0, np.arange(size) < leaves
            item["said"][:] = np.where(item["leaf"], random.integers(0, WORDS, size), 0)
            for v in range(leaves, size):
                k = int(random.integers(len(free) - 1))
                left, right = free[k], free.pop(k + 1)
                item["parent"][[left, right]], item["slot"][right] = v, 1
                item["left"][v], item["right"][v], free[k] = left, right, v
            items.append(item)
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["leaf"].size + int(item["leaf"].sum()) for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=COLUMNS)
        up, down = graph.loop(name="up"), graph.loop(name="down")
        up.join(graph.input("word").through(self.words, name="embed"))
        inner, root = up.where(lambda m: m.parent >= 0)
        pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
        up.join(pairs.through(self.fold, name="fold"))
        down.join(root.through(self.narrow, name="narrow"))
        down.through(self.leaf, name="is it one").loss(misjudged, target="leaf", label="leaf")
        leaf, branch = down.where(lambda m: m.leaf == 1)
        leaf.through(self.word, name="say").loss(gt.cross_entropy, target="said", label="word")
        two = branch.through(self.unfold, name="unfold").ungroup(index="side")
        down.join(two.move(vertex=lambda m: np.where(m.side == 0, m.left, m.right)))
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        leaves = int(item["leaf"].sum())
        word = torch.from_numpy(item["said"][:leaves]), np.arange(leaves)
        return gt.Instance({"word": word}, {name: item[name] for name in COLUMNS})

    def plain(self, item: Item) -> Tensor:
        leaves, left, right = int(item["leaf"].sum()), item["left"], item["right"]
        h = [self.words(tokens(item["said"][v])) for v in range(leaves)]
        for v in range(leaves, left.size):
            h.append(self.fold(torch.stack([h[left[v]], h[right[v]]], 1)))
        back, losses = {left.size - 1: self.narrow(h[-1])}, []
        for v in range(left.size - 1, -1, -1):
            x = back.pop(v)
            losses.append(misjudged(self.leaf(x), tokens(item["leaf"][v])).sum())
            if v < leaves:
                losses.append(nn.functional.cross_entropy(self.word(x), tokens(item["said"][v])))
            else:
                back[left[v]], back[right[v]] = self.unfold(x).unbind(1)
        return torch.stack(losses).sum()

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Up by heights, down by depths; a readout of each level."""
        sizes = np.array([item["leaf"].size for item in items])
        shift = offsets_of(sizes).repeat(sizes)
        left, right = (joined(items, name) + shift for name in ("left", "right"))
        leaf, said, height = joined(items, "leaf"), joined(items, "said"), heights_of(items)
        place = np.zeros(leaf.size, np.int64)
        levels: list[Tensor] = []
        done = 0
        for level in range(height.max() + 1):
            at = np.flatnonzero(height == level)
            if level:
                members = tokens(place[np.stack([left[at], right[at]], 1).ravel()])
                pairs = torch.cat(levels).index_select(0, members).unflatten(0, (-1, 2))
                levels.append(self.fold(pairs))
            else:
                levels.append(self.words(tokens(said[at])))
            place[at] = done + np.arange(at.size)
            done += at.size
        at = np.flatnonzero(joined(items, "parent") < 0)
        h, loss = self.narrow(torch.cat(levels).index_select(0, tokens(place[at]))), []
        while at.size:
            loss.append(misjudged(self.leaf(h), tokens(leaf[at])).sum())
            ends, goes = np.flatnonzero(leaf[at]), np.flatnonzero(1 - leaf[at])
            if ends.size:
                scores, of = self.word(h.index_select(0, tokens(ends))), tokens(said[at[ends]])
                loss.append(nn.functional.cross_entropy(scores, of, reduction="sum"))
            at = np.stack([left[at[goes]], right[at[goes]]], 1).ravel()
            if at.size:
                h = self.unfold(h.index_select(0, tokens(goes))).flatten(0, 1)
        return torch.stack(loss).sum()


def heights_of(items: Sequence[Item]) -> NDArray[np.int64]:
    """How far above its lowest leaf each vertex is; children come before their parents."""
    found = []
    for item in items:
        height = np.zeros(item["leaf"].size, np.int64)
        for v in np.flatnonzero(item["leaf"] == 0):
            height[v] = 1 + max(height[item["left"][v]], height[item["right"][v]])
        found.append(height)
    return np.concatenate(found)
