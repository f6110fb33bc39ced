"""Mixture of depths: in each of six layers a router says of a token whether it takes the block.

As in Raposo et al. 2024, arXiv:2404.02258, but that each token decides for itself.
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
    instance_of_set,
    joined,
    labelled_sets,
    tokens,
)

LAYERS, CLASSES, FEATURES = 6, 5, 16


class Router(nn.Module):
    """The token, and how much it wants the block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.sigmoid(self.linear(h))


class Block(nn.Module):
    """What it adds to a token, by how much that wanted it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor, wanted: Tensor) -> Tensor:
        return h + wanted * self.outer(nn.functional.gelu(self.inner(self.norm(h))))


@final
class Depths(AbstractProgram):
    name = "depths"
    told = "six layers, each token past those that it can do without"
    width = 64
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.embed = nn.Linear(FEATURES, width)
        self.routers = nn.ModuleList(Router(width) for _ in range(LAYERS))
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.readout = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def generate(self, n: int, seed: int) -> list[Item]:
        return labelled_sets(n, seed, 20, FEATURES, CLASSES)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(value=("label", "tokens"))
        h = graph.input("x").through(self.embed, name="embed")
        for k, (router, block) in enumerate(zip(self.routers, self.blocks, strict=True)):
            routed = h.through(router, name=f"router {k}")
            inside, past = routed.where(lambda m: m.payload[1][:, 0] > 0.5)
            done = inside.through(block, name=f"block {k}")
            h = graph.merge(done, past.through(lambda h, wanted: h, name=f"past {k}"))
        mean = h.group(by="instance", size=lambda m: m.tokens, how="mean")
        scores = mean.through(self.readout, name="readout")
        scores.loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return instance_of_set(item, dtype)

    def plain(self, item: Item) -> Tensor:
        found = []
        for h in self.embed(torch.from_numpy(item["x"]).to(self.dtype)).split(1):
            for router, block in zip(self.routers, self.blocks, strict=True):
                h, wanted = router(h)
                if wanted.item() > 0.5:
                    h = block(h, wanted)
            found.append(h)
        scores = self.readout(torch.cat(found).mean(0, keepdim=True))
        return nn.functional.cross_entropy(scores, tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Tokens of all instances side by side; blocks get theirs by index."""
        h = self.embed(torch.from_numpy(joined(items, "x")).to(self.dtype))
        for router, block in zip(self.routers, self.blocks, strict=True):
            h, wanted = router(h)
            inside = (wanted[:, 0] > 0.5).nonzero()[:, 0]
            if len(inside):
                said = block(h.index_select(0, inside), wanted.index_select(0, inside))
                h = h.index_copy(0, inside, said)
        sizes = torch.tensor([len(item["x"]) for item in items])
        owner = torch.arange(len(items)).repeat_interleave(sizes)
        summed = h.new_zeros(len(items), h.shape[1]).index_add(0, owner, h)
        scores = self.readout(summed / sizes[:, None])
        labels = tokens(np.array([item["label"] for item in items]))
        return nn.functional.cross_entropy(scores, labels, reduction="sum")
