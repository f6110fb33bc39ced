"""A gated graph network in plain PyTorch, over block-diagonal batches.

    graphs of a minibatch, one below the other        h ─► W_t h_u ─► add at the target ─► GRU ─► h'
    edges (source, type) ─► target, offset to the     └──────────────── steps ◄─────────────────┘
    minibatch: one adjacency with a block per graph

Three ways to make and add up the messages, equal in gradients:

    dense     W of all types applied to every vertex, one matrix product; edges pick what they need
    sparse    W of a type applied only to the vertices that some edge of this type leaves
    matrix    dense, and what a vertex hears is one product with the adjacency matrix: for graphs
              of a handful of vertices, one at a time

``geartrain_baselines.pyg`` has the same network with the message passing of PyTorch Geometric. A
``Form`` is a network, a way to collate and how many graphs run together.

The network is that of Li et al. 2016, arXiv:1511.05493.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, Protocol, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

Method = Literal["dense", "sparse", "matrix"]

PYG: Final = "torch_geometric"

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
        adjacency: ``(v, v * types)``, how many edges of a type lead from a vertex to a vertex; for
            ``matrix`` alone.
    """

    start: Tensor
    source: Tensor
    target: Tensor
    type: Tensor
    length: Tensor | None
    segment: Tensor
    first: Tensor
    adjacency: Tensor | None = None


class Collates(Protocol):
    """Graphs that can be asked for a block of some of them."""

    def __len__(self) -> int: ...

    def block(self, chosen: NDArray[np.int64]) -> Block:
        """The graphs of these numbers, in this order."""


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


@final
class Singles:
    """Graphs collated once and for all, each alone, with its adjacency matrix.

    Args:
        graphs: All of them.
        types: Number of edge types.
    """

    def __init__(self, graphs: Graphs, types: int) -> None:
        self._blocks = [
            _with_adjacency(graphs.block(np.array([number])), types)
            for number in range(len(graphs))
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    def block(self, chosen: NDArray[np.int64]) -> Block:
        """The one graph of this number."""
        (number,) = chosen
        return self._blocks[int(number)]


def _with_adjacency(block: Block, types: int) -> Block:
    vertices = len(block.start)
    places = block.target, block.source * types + block.type
    edges = block.start.new_ones(len(block.target))
    matrix = block.start.new_zeros(vertices, vertices * types)
    return replace(block, adjacency=matrix.index_put_(places, edges, accumulate=True))


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
        method: How messages are made; ``matrix`` becomes ``dense`` where there are lengths or a
            block has no adjacency matrix.
    """

    def __init__(
        self,
        hidden: int,
        types: int,
        steps: int,
        *,
        lengths: bool = False,
        method: Method = "sparse",
    ) -> None:
        super().__init__()
        self.hidden, self.types, self.steps, self.method = hidden, types, steps, method
        self.message = nn.Linear(hidden, types * hidden)
        self.update = nn.GRUCell(hidden, hidden)
        self.scale = nn.Linear(BUMPS, hidden) if lengths else None

    def forward(self, block: Block) -> Tensor:
        """Return states ``(v, hidden)``."""
        h = first_states(block, self.hidden)
        hear = self._plan(block)
        for _ in range(self.steps):
            h = self.update(hear(h), h)
        return h

    def _plan(self, block: Block) -> Callable[[Tensor], Tensor]:
        """What all vertices hear in a step, as a function of their states."""
        if self.method == "matrix" and self.scale is None and block.adjacency is not None:
            return partial(self._hear_matrix, block.adjacency)
        plan = plan_sparse if self.method == "sparse" else plan_dense
        scale = None if self.scale is None else edge_scales(self.scale, block.length)
        return partial(_hear, plan(self.message, block), scale, block.target)

    def _hear_matrix(self, adjacency: Tensor, h: Tensor) -> Tensor:
        return adjacency @ cast(Tensor, self.message(h)).view(-1, self.hidden)


def first_states(block: Block, hidden: int) -> Tensor:
    """What vertices begin with, filled up with zeros: ``(v, hidden)``."""
    return F.pad(block.start, (0, hidden - block.start.shape[1]))


def edge_scales(scale: nn.Linear, length: Tensor | None) -> Tensor | None:
    """A factor for each edge and column, ``(e, hidden)``, of lengths ``(e,)``."""
    if length is None:
        return None
    centres = torch.linspace(*REACH, BUMPS, dtype=length.dtype)
    bumps = torch.exp(-(((length[:, None] - centres) / (centres[1] - centres[0])) ** 2))
    return cast(Tensor, 2 * scale(bumps).sigmoid())


def _hear(messages: Messages, scale: Tensor | None, target: Tensor, h: Tensor) -> Tensor:
    sent = messages.make(h).index_select(0, messages.at)
    if scale is not None:
        sent = sent * scale
    return torch.zeros_like(h).index_add(0, target, sent)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The messages of a block's senders.

    Args:
        make: ``(v, hidden)`` to ``(senders, hidden)``; a sender is a vertex and a type.
        at: int64 ``(e,)``, the sender whose message an edge carries.
    """

    make: Callable[[Tensor], Tensor]
    at: Tensor


def plan_dense(linear: nn.Linear, block: Block) -> Messages:
    """All types of all vertices; sender u · types + t.

    Args:
        linear: From hidden to types · hidden.
        block: Of which messages are to be made.
    """
    hidden = linear.in_features
    types = linear.out_features // hidden
    return Messages(partial(_make_dense, linear), block.source * types + block.type)


def _make_dense(linear: nn.Linear, h: Tensor) -> Tensor:
    return cast(Tensor, linear(h)).view(-1, h.shape[1])


def plan_sparse(linear: nn.Linear, block: Block) -> Messages:
    """Only the (type, vertex) that occur, by type.

    Args:
        linear: From hidden to types · hidden.
        block: Of which messages are to be made.
    """
    vertices = max(len(block.start), 1)
    types = linear.out_features // linear.in_features
    pairs, at = (block.type * vertices + block.source).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    counts = torch.bincount(pairs // vertices, minlength=types).tolist()
    return Messages(partial(_make_sparse, linear, pairs % vertices, counts), at)


def _make_sparse(linear: nn.Linear, vertex: Tensor, counts: list[int], h: Tensor) -> Tensor:
    """``counts`` of each type, of the vertices ``(senders,)``."""
    hidden = h.shape[1]
    weights = linear.weight.view(-1, hidden, hidden).unbind()
    biases = linear.bias.view(-1, hidden).unbind()
    groups = h.index_select(0, vertex).split(counts)  # type: ignore[no-untyped-call]
    made = [F.linear(x, w, b) for x, w, b in zip(groups, weights, biases, strict=True)]
    return torch.cat(made)


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


class Build(Protocol):
    """Makes a network of ``Block -> (v, hidden)`` with the parameters of ``GatedGraphNet``."""

    def __call__(
        self, hidden: int, types: int, steps: int, *, lengths: bool = False
    ) -> nn.Module: ...


def _as_they_are(graphs: Graphs, types: int) -> Collates:
    return graphs


@final
@dataclass(frozen=True, slots=True)
class Form:
    """How a gated graph network is run.

    Args:
        build: Makes the network.
        collating: Makes what collates, of graphs and the number of edge types.
        at_once: Graphs that run together; None: all of an update.
    """

    build: Build
    collating: Callable[[Graphs, int], Collates] = _as_they_are
    at_once: int | None = None

    def parts(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The graphs of an update, cut into those that run together."""
        most = self.at_once or len(rows)
        for first in range(0, len(rows), most):
            yield rows[first : first + most]


DENSE: Final = Form(partial(GatedGraphNet, method="dense"))
SPARSE: Final = Form(partial(GatedGraphNet, method="sparse"))
SINGLE: Final = Form(partial(GatedGraphNet, method="matrix"), Singles, at_once=1)
