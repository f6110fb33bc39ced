"""Two layers of eight experts, each token with the best of a gate, and no loop.

An expert is a residual block scaled by its probability, as in the switch transformer: Fedus et al.
2021, arXiv:2101.03961. The tokens of an instance are added up and classified.
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

LAYERS, EXPERTS, CLASSES, FEATURES = 2, 8, 4, 16


class Gate(nn.Module):
    """The token, and what the experts are worth to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, EXPERTS)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.linear(h).softmax(-1)


class Expert(nn.Module):
    """What one of them adds to the token."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number, self.norm = number, nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor, worth: Tensor) -> Tensor:
        added = self.outer(nn.functional.gelu(self.inner(self.norm(h))))
        return h + worth[:, self.number : self.number + 1] * added


@final
class Moe(AbstractProgram):
    name = "moe"
    told = "two layers of 8 experts, no loop"
    looks = True

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        width = width or self.width
        self.first, self.readout = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.gates = nn.ModuleList(Gate(width) for _ in range(LAYERS))
        self.experts = nn.ModuleList(
            nn.ModuleList(Expert(width, k) for k in range(EXPERTS)) for _ in range(LAYERS)
        )

    def _layers(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        pairs = zip(self.gates, self.experts, strict=True)
        return [(gate, list(experts.children())) for gate, experts in pairs]

    def generate(self, n: int, seed: int) -> list[Item]:
        return labelled_sets(n, seed, 12, FEATURES, CLASSES)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(value=("label", "tokens"))
        h = graph.input("x").through(self.first, name="first")
        for layer, (gate, experts) in enumerate(self._layers()):
            gated = h.through(gate, name=f"gate {layer}")
            ways = gated.route(lambda m: m.payload[1].argmax(1), EXPERTS)
            said = [
                way.through(expert, name=f"expert {layer}.{k}")
                for k, (way, expert) in enumerate(zip(ways, experts, strict=True))
            ]
            h = graph.merge(*said)
        summed = h.group(by="instance", size=lambda m: m.tokens, how="sum")
        scores = summed.through(self.readout, name="readout")
        scores.loss(gt.cross_entropy, target="label")
        return graph

    def instance(self, item: Item, dtype: torch.dtype = torch.float32) -> gt.Instance:
        return instance_of_set(item, dtype)

    def plain(self, item: Item) -> Tensor:
        found = []
        for x in torch.from_numpy(item["x"]).to(self.dtype).split(1):  # type: ignore[no-untyped-call]
            h = self.first(x)
            for gate, experts in self._layers():
                h, worth = gate(h)
                h = experts[int(worth.argmax())](h, worth)
            found.append(h)
        scores = self.readout(torch.cat(found).sum(0, keepdim=True))
        return nn.functional.cross_entropy(scores, tokens(item["label"]))

    def hand(self, items: Sequence[Item]) -> Tensor:
        """Tokens of all instances side by side; experts get theirs by index."""
        h = self.first(torch.from_numpy(joined(items, "x")).to(self.dtype))
        for gate, experts in self._layers():
            h, worth = gate(h)
            choice = worth.argmax(1)
            order = choice.argsort()
            sizes = torch.bincount(choice, minlength=EXPERTS).tolist()
            pieces = zip(experts, h[order].split(sizes), worth[order].split(sizes), strict=True)
            said = torch.cat([expert(x, w) for expert, x, w in pieces if len(x)])
            h = torch.empty_like(said).index_copy(0, order, said)
        owner = torch.arange(len(items)).repeat_interleave(
            torch.tensor([len(item["x"]) for item in items])
        )
        summed = h.new_zeros(len(items), h.shape[1]).index_add(0, owner, h)
        labels = tokens(np.array([item["label"] for item in items]))
        return nn.functional.cross_entropy(self.readout(summed), labels, reduction="sum")
