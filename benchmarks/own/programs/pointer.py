"""A pointer network that sorts a set, Vinyals et al. 2015, arXiv:1506.03134: each step of a loop
scores all of what is held, by a module of one's own.

Scores of sets of different sizes are no rows of one shape, so the step gives the loss of the right
member, and a state that has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs.program import AbstractProgram, Item, tokens


class Encode(nn.Module):
    """Keys and values of each point."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.inner(x))
        return self.keys(x), self.values(x)


class Pool(nn.Module):
    """The first state: the mean of the set."""

    def forward(self, keys: Tensor, values: Tensor, inside: gt.Inside) -> Tensor:
        total = values.new_zeros(len(inside.lengths), values.shape[1])
        return total.index_add(0, inside.segment, values) / inside.lengths[:, None]


class Point(nn.Module):
    """One step: the loss of the right member, and a state that has read it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.score = nn.Linear(width, width), nn.Linear(width, 1, bias=False)
        self.gate, self.new = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(
        self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        score = self.score(torch.tanh(keys + self.query(h)[:, None]))[..., 0]
        share = score.masked_fill(~mask, -1e9).log_softmax(1)
        where = right[:, None, None].expand(-1, 1, values.shape[2])
        both = torch.cat([h, values.gather(1, where)[:, 0]], 1)
        gate = torch.sigmoid(self.gate(both))
        h = gate * h + (1 - gate) * torch.tanh(self.new(both))
        return h, -share.gather(1, right[:, None])


def told(missed: Tensor) -> Tensor:
    """The loss is the row itself."""
    return missed[:, 0]


@final
class Pointer(AbstractProgram):
    name = "pointer"
    told = "points at the members of a set in order"
    width = 64

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.encode, self.pool, self.point = Encode(width), Pool(), Point(width)

    def generate(self, n: int, seed: int) -> list[Item]:
        random, items = np.random.default_rng(seed), []
        for _ in range(n):
            x = random.uniform(-1, 1, (random.integers(3, 16), 2)).astype(np.float32)
            items.append({"x": x, "right": np.argsort(x[:, 0] + x[:, 1] ** 2)})
        return items

    def losses(self, items: Sequence[Item]) -> int:
        return sum(item["right"].size for item in items)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(vertex=("right",))
        held = graph.input("x", bundle=True).through(self.encode, name="encode").hold(name="set")
        steps = graph.loop(name="steps")
        steps.join(held.through(self.pool, name="pool", inside=True, pool=True))
        new = steps.attend(held, self.point, name="point", read="right")
        new.through(nn.Identity(), take=1, name="missed").loss(told)
        state = new.through(nn.Identity(), take=0, name="state")
        more, done = state.where(lambda m: m.vertex + 1 < m.size)
        steps.join(more.move(vertex=lambda m: m.vertex + 1))
        done.stop()
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return gt.Instance({"x": torch.from_numpy(item["x"]).to(dtype)}, {"right": item["right"]})

    def plain(self, item: Item) -> Tensor:
        keys, values = self.encode(torch.from_numpy(item["x"]).to(self.dtype))
        h, mask = values.mean(0, keepdim=True), torch.ones(1, len(keys), dtype=torch.bool)
        missed = []
        for right in item["right"]:
            h, each = self.point(h, keys[None], values[None], mask, tokens(right))
            missed.append(each)
        return torch.cat(missed).sum()

    def hand(self, items: Sequence[Item]) -> Tensor:
        """The largest first, so that what goes on is always the first rows; sets are padded."""
        items = sorted(items, key=lambda item: -item["right"].size)
        sizes = np.array([item["right"].size for item in items])
        most = int(sizes[0])
        x = np.zeros((sizes.size, most, 2), np.float32)
        right = np.zeros((sizes.size, most), np.int64)
        for k, item in enumerate(items):
            x[k, : sizes[k]], right[k, : sizes[k]] = item["x"], item["right"]
        mask, order = torch.from_numpy(np.arange(most) < sizes[:, None]), torch.from_numpy(right)
        keys, values = self.encode(torch.from_numpy(x).to(self.dtype))
        h = (values * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        missed = []
        for t in range(most):
            n = int((sizes > t).sum())
            h, each = self.point(h[:n], keys[:n], values[:n], mask[:n], order[:n, t])
            missed.append(each)
        return torch.cat(missed).sum()
