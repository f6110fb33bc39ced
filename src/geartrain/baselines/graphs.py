"""A gated graph network in plain PyTorch, over block-diagonal batches.

    graphs of a minibatch, one below the other        h ─► W_t h_u ─► add at the target ─► GRU ─► h'
    edges (source, type) ─► target, offset to the     └──────────────── steps ◄─────────────────┘
    minibatch: one adjacency with a block per graph

Two ways to make the messages, equal in gradients:

    dense     W of all types applied to every vertex, one matrix product; edges pick what they need
    sparse    W of a type applied only to the vertices that some edge of this type leaves

The network is that of Li et al. 2016, arXiv:1511.05493.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

Method = Literal["dense", "sparse"]

BUMPS: Final = 16  # that an edge's length is spread over
REACH: Final = (0.8, 2.0)  # their first and last centre


@final
@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A minibatch of g graphs, v vertices and e edges.

    Args:
        start: float32 ``(v, features)``, what vertices begin with.
        source: int64 ``(e,)``, among the v vertices.
        target: int64 ``(e,)``, among the v vertices.
        type: int64 ``(e,)``.
        length: float32 ``(e,)``, or None.
        segment: int64 ``(v,)``, the graph of each vertex.
        first: int64 ``(g,)``, the first vertex of each graph.
    """

    start: Tensor
    source: Tensor
    target: Tensor
    type: Tensor
    length: Tensor | None
    segment: Tensor
    first: Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class Graphs:
    """G graphs of V vertices and E edges in columns, cut into blocks without a loop over graphs.

    Args:
        start: float32 ``(V, features)``.
        offsets: int64 ``(G + 1,)``, first vertex of each graph.
        edge_offsets: int64 ``(G + 1,)``, first edge of each graph.
        source: int64 ``(E,)``, vertex within the graph, from 0.
        target: int64 ``(E,)``, vertex within the graph.
        type: int64 ``(E,)``.
        length: float32 ``(E,)``, or None.
    """

    start: Tensor
    offsets: NDArray[np.int64]
    edge_offsets: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    type: NDArray[np.int64]
    length: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def block(self, chosen: NDArray[np.int64]) -> Block:
        """Collate the graphs of these numbers, in this order."""
        vertices, sizes = _rows(self.offsets, chosen)
        edges, edge_counts = _rows(self.edge_offsets, chosen)
        first = np.cumsum(sizes) - sizes
        shift = np.repeat(first, edge_counts)
        return Block(
            start=self.start.index_select(0, torch.from_numpy(vertices)),
            source=torch.from_numpy(self.source[edges] + shift),
            target=torch.from_numpy(self.target[edges] + shift),
            type=torch.from_numpy(self.type[edges]),
            length=None if self.length is None else torch.from_numpy(self.length[edges]),
            segment=torch.from_numpy(np.repeat(np.arange(len(chosen)), sizes)),
            first=torch.from_numpy(first),
        )


def _rows(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows that the chosen ranges cover, one range after the other, and their sizes."""
    begin = offsets[chosen]
    sizes = offsets[chosen + 1] - begin
    end = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(begin - (end - sizes), sizes), sizes


@final
class GatedGraphNet(nn.Module):
    """Vertex states after some steps, with PyTorch's own initial values.

        a_v = Σ over edges (u, v) of type t of  s(d) (W_t h_u + b_t)          h'_v = GRU(a_v, h_v)

    s is 1 or, where edges have lengths d, 2 σ(V φ(d) + c) for bumps φ spread evenly over ``REACH``;
    it is the same in all steps.

    Args:
        hidden: Width of a state; what vertices begin with is filled up with zeros.
        types: Number of edge types.
        steps: How often messages pass.
        lengths: Whether edges have lengths.
    """

    def __init__(self, hidden: int, types: int, steps: int, *, lengths: bool = False) -> None:
        super().__init__()
        self.hidden, self.types, self.steps = hidden, types, steps
        self.message = nn.Linear(hidden, types * hidden)
        self.update = nn.GRUCell(hidden, hidden)
        self.scale = nn.Linear(BUMPS, hidden) if lengths else None

    def forward(self, block: Block, method: Method = "sparse") -> Tensor:
        """Return states ``(v, hidden)``."""
        h = F.pad(block.start, (0, self.hidden - block.start.shape[1]))
        scale = self._scales(block.length)
        made = self._plan_sparse(block) if method == "sparse" else self._plan_dense(block)
        for _ in range(self.steps):
            sent = made(h)
            if scale is not None:
                sent = sent * scale
            heard = torch.zeros_like(h).index_add(0, block.target, sent)
            h = self.update(heard, h)
        return h

    def _plan_dense(self, block: Block) -> Messages:
        return _Dense(self.message, self.hidden, block.source * self.types + block.type)

    def _plan_sparse(self, block: Block) -> Messages:
        vertices = len(block.start)
        pairs, at = (block.type * vertices + block.source).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        counts = torch.bincount(pairs // max(vertices, 1), minlength=self.types).tolist()
        return _Sparse(self.message, self.hidden, pairs % max(vertices, 1), counts, at)

    def _scales(self, length: Tensor | None) -> Tensor | None:
        if self.scale is None or length is None:
            return None
        centres = torch.linspace(*REACH, BUMPS, dtype=length.dtype)
        bumps = torch.exp(-(((length[:, None] - centres) / (centres[1] - centres[0])) ** 2))
        return cast(Tensor, 2 * self.scale(bumps).sigmoid())


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Dense:
    """Messages along the edges: ``at`` picks one of (vertex, type) for each."""

    linear: nn.Linear
    hidden: int
    at: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        return cast(Tensor, self.linear(h)).view(-1, self.hidden).index_select(0, self.at)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Sparse:
    """The same; only the (type, vertex) that occur are made, ``counts`` of each type."""

    linear: nn.Linear
    hidden: int
    vertex: Tensor
    counts: list[int]
    at: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        weights = self.linear.weight.view(-1, self.hidden, self.hidden).unbind()
        biases = self.linear.bias.view(-1, self.hidden).unbind()
        groups = h.index_select(0, self.vertex).split(self.counts)  # type: ignore[no-untyped-call]
        made = [F.linear(x, w, b) for x, w, b in zip(groups, weights, biases, strict=True)]
        return torch.cat(made).index_select(0, self.at)


Messages = _Dense | _Sparse


@final
class GatedSum(nn.Module):
    """A graph's value: Σ sigmoid(gate [h, start]) · value(h) over its vertices.

    Args:
        hidden: Width of h.
        features: Width of what vertices begin with; 0: the gate does not see it.
        out: Width of the value.
    """

    def __init__(self, hidden: int, features: int = 0, out: int = 1) -> None:
        super().__init__()
        self.features = features
        self.gate = nn.Linear(hidden + features, out)
        self.value = nn.Linear(hidden, out)

    def forward(self, h: Tensor, block: Block) -> Tensor:
        """Return ``(g, out)``."""
        seen = torch.cat((h, block.start[:, : self.features]), 1) if self.features else h
        shares = self.gate(seen).sigmoid() * self.value(h)
        total = shares.new_zeros(len(block.first), shares.shape[1])
        return cast(Tensor, total.index_add(0, block.segment, shares))
