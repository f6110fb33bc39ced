"""Gated graph networks: steps of message passing, which look inside bundles.

    GatedGraphCell   h, Inside     ─► h'     messages along typed edges, summed, then a GRU

An ordinary module that also has a bundle kernel: no forward runs twice. The kernel makes the
message of a vertex once for every type of edge that leaves it, and no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.device import upload, uploads
from geartrain.errors import DataError, GraphError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.graph.admission import Brought, require_range
from geartrain.nn.recurrent import GruKernel
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered
from geartrain.nodes.products import affine, outer, outer_suits, times
from geartrain.whole.graph.loader import HEARD, EdgeIndex, Weights, gated_backward, gated_forward
from geartrain.whole.wanted import add_wanted

RADIAL: Final = 16
"""Bumps that a length is spread over."""


@final
class GatedGraphCell(nn.Module):
    """Steps of a gated graph network with typed edges.

        a_v = Σ over edges (u, v) of type t of  s(d) (W_t h_u + b_t)          h'_v = GRU(a_v, h_v)

    s is 1, or with lengths d a factor for each column: s = 2 σ(V φ(d) + c), φ being bumps spread
    evenly over ``reach``.

    Inputs: h float ``(rows, hidden)`` and an ``Inside`` whose edges have ``source``, ``target``
    and, with more than one type, the type column. Output ``(rows, hidden)``.

    Args:
        hidden: Width of h.
        types: Number of edge types.
        column: Edge column with the type, 0..types-1.
        bias: Whether messages have a bias.
        length: Edge column of floats with the length of each edge, or None.
        reach: Shortest and longest length.
        steps: How often messages pass in one call. Steps of one call are one firing, so all of them
            see the same weights; ``MessagePassing`` makes a firing of each step.

    Raises:
        ValueError: ``steps`` is not positive.
        DataError: From ``forward``: an edge has no such type; names instance and edge.

    Source: Li et al. 2016, arXiv:1511.05493; bumps as of Schütt et al. 2017, arXiv:1706.08566.
    """

    def __init__(
        self,
        hidden: int,
        types: int = 1,
        column: str = "type",
        *,
        bias: bool = True,
        length: str | None = None,
        reach: tuple[float, float] = (0.8, 2.0),
        steps: int = 1,
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"GatedGraphCell(steps={steps}): give 1 or more")
        self.steps = steps
        self.hidden, self.types, self.column, self.length = hidden, types, column, length
        self.message = nn.Linear(hidden, types * hidden, bias=bias)
        self.update = nn.GRUCell(hidden, hidden)
        self.scale = None if length is None else nn.Linear(RADIAL, hidden)
        self._centres = np.linspace(*reach, RADIAL)

    def forward(self, h: Tensor, inside: Inside) -> Tensor:
        at = inside.edges["source"] * self.types
        self.require_types(inside)
        if self.types > 1:
            at = at + inside.edges[self.column]
        scales = None
        if self.scale is not None and self.length is not None:
            scales = self._scales(inside.edges[self.length].to(h.dtype), self.scale)
        for _ in range(self.steps):
            made = self.message(h).view(-1, self.hidden)
            sent = made.index_select(0, at)
            if scales is not None:
                sent = sent * scales
            heard = torch.zeros_like(h).index_add(0, inside.edges["target"], sent)
            h = self.update(heard, h)
        return h

    def check_instances(self, brought: Brought) -> None:
        """Types of edges, and their lengths.

        Raises:
            DataError: One of the instances brings others, or lengths that are not finite.
        """
        if self.types > 1 and self.column in brought.edges:
            require_range(
                f"edge column '{self.column}' has", brought.edges[self.column], self.types
            )
        if self.length is not None and self.length in brought.edges:
            if not np.isfinite(brought.edges[self.length]).all():
                raise DataError(f"edge column '{self.length}' holds NaN or infinity")

    def bundle_kernel(self) -> AbstractKernel | None:
        """Keeps h and, for each step, what was heard and the GRU's gates; None with lengths."""
        return None if self.scale is not None else _CellKernel(self)

    def require_types(self, inside: Inside) -> None:
        """Look at the types of all edges: another number would be another vertex's message.

        Raises:
            DataError: One is no integer from 0 to types-1; names instance and edge.
            GraphError: Edges have no such column.
        """
        if self.types == 1:
            return
        if self.column not in inside.edges:
            raise GraphError(
                f"GatedGraphCell(types={self.types}) reads edge column '{self.column}', and edges "
                f"have {sorted(inside.edges)}; declare it: Graph(edge=('{self.column}',)), or give "
                "column="
            )
        given = inside.edges[self.column]
        if given.is_meta:  # a dry run, of shapes alone
            return
        at_hand = given.is_cpu and type(given) is Tensor
        kind = given.numpy() if at_hand else inside.on_host(self.column)
        if kind.dtype.kind != "i":
            raise DataError(
                f"edge column '{self.column}' holds {kind.dtype}; types are integers, 0.."
                f"{self.types - 1}"
            )
        wrong = np.flatnonzero((kind < 0) | (kind >= self.types))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                f"{inside.edge_called(at)} has type {int(kind[at])} in column '{self.column}', "
                f"expected 0..{self.types - 1}: number the types from 0, or give the cell more of "
                "them"
            )

    def _scales(self, length: Tensor, scale: nn.Linear) -> Tensor:
        centres = upload(self._centres, length.device).to(length.dtype)
        width = centres[1] - centres[0]
        factors: Tensor = scale(torch.exp(-(((length[:, None] - centres) / width) ** 2)))
        return 2 * factors.sigmoid()


@final
@dataclass(frozen=True, slots=True)
class _Senders:
    """Which vertices send along which type of edge, by type and then by vertex.

    Args:
        vertex: int64 ``(pairs,)``, rows of the batch.
        bounds: Pairs of type t are ``bounds[t]`` to ``bounds[t + 1]``.
        of_edge: int64 ``(E,)``, the pair whose message an edge carries.
        target: int64 ``(E,)``, the row that hears it.
    """

    vertex: Tensor
    bounds: list[int]
    of_edge: Tensor
    target: Tensor


def _senders(
    rows: int,
    types: int,
    source: IntArray,
    target: IntArray,
    kind: IntArray,
    device: torch.device,
) -> _Senders:
    pair = kind * rows + source
    occurs = np.zeros(types * rows, np.bool_)
    occurs[pair] = True
    number = np.cumsum(occurs)
    bounds = [0, *number[rows - 1 :: rows].tolist()] if rows else [0] * (types + 1)
    vertex = np.flatnonzero(occurs) % max(rows, 1)
    sends, of_edge, hears = uploads((vertex, number[pair] - 1, target), device)
    return _Senders(sends, bounds, of_edge, hears)


@final
class _CellKernel(AbstractKernel):
    residuals = 2
    room_for = 1

    def __init__(self, module: GatedGraphCell, *, bf16: bool = False) -> None:
        self._module, self._gru, self._bf16 = module, GruKernel(module.update), bf16

    def rounded(self) -> AbstractKernel:
        return _CellKernel(self._module, bf16=True)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        assert inside is not None
        (h,) = inputs
        kept = room
        if kept is None:
            kept = h.new_empty((h.shape[0], self._module.steps, HEARD, h.shape[1]))
        y = None
        if h.is_cpu:
            try:
                y = gated_forward(h, self._edges(inside), self._weights(), kept)
            except DataError:
                self._module.require_types(inside)  # says whose edge it is
                raise
        if y is None:
            y = self._steps(h, inside, kept)
        return (y,), (h, kept)

    def _steps(self, h: Tensor, inside: Inside, kept: Tensor) -> Tensor:
        """What ``gated_forward`` does, in torch."""
        senders = self._senders(h, inside)
        for step in range(self._module.steps):
            sending = h.index_select(0, senders.vertex)
            messages = [
                affine(sending[of_type], weight, bias)
                for of_type, weight, bias in self._by_type(senders)
            ]
            sent = torch.cat(messages).index_select(0, senders.of_edge)
            heard = torch.zeros_like(h).index_add_(0, senders.target, sent)
            kept[:, step, 0] = heard
            (h,), (_, _, kept[:, step, 1:]) = self._gru.forward((heard, h))
        return h

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        assert inside is not None
        (dy,), (h, gates) = gradients, kept
        if dy is None:
            return (None,)
        found = None
        if h.is_cpu:
            edges, weights = self._edges(inside), self._weights()
            try:
                found = gated_backward(
                    dy.contiguous(), h, gates, rows, edges, weights, wanted=wanted
                )
            except DataError:
                self._module.require_types(inside)
                raise
        if found is None:
            h, gates = gathered((h, gates), rows)
            return (self._steps_back(dy, h, gates, into, inside),)
        module = self._module
        update = module.update
        add_wanted(module.message.weight, found.message, into)
        add_wanted(update.weight_ih, found.ih, into)
        add_wanted(update.weight_hh, found.hh, into)
        if module.message.bias is not None:
            add_wanted(module.message.bias, found.message_bias, into)
        if update.bias:
            add_wanted(update.bias_ih, found.ih_bias, into)
            add_wanted(update.bias_hh, found.hh_bias, into)
        return (found.h,)

    def _steps_back(
        self, d: Tensor, h: Tensor, kept: Tensor, into: GradientSum, inside: Inside
    ) -> Tensor:
        """What ``gated_backward`` does, in torch."""
        states = [h]
        for step in range(self._module.steps - 1):
            _, _, z, made, _ = kept[:, step].unbind(1)
            states.append(torch.lerp(made, states[-1], z))
        senders = self._senders(h, inside)
        for step in reversed(range(self._module.steps)):
            heard, before = kept[:, step, 0].contiguous(), states[step]
            gates = kept[:, step, 1:].contiguous()
            d_heard, dh = self._gru.backward((d,), (heard, before, gates), None, into)
            assert d_heard is not None and dh is not None
            self._messages_back(d_heard, before, senders, dh, into)
            d = dh
        return d

    def _messages_back(
        self,
        d_heard: Tensor,
        h: Tensor,
        senders: _Senders,
        dh: Tensor,
        into: GradientSum,
    ) -> None:
        """The gradients of the messages' weights; what reaches h is added to ``dh``."""
        d_sent = d_heard.index_select(0, senders.target)
        d_made = h.new_zeros((senders.vertex.shape[0], h.shape[1]))
        d_made.index_add_(0, senders.of_edge, d_sent)
        message = self._module.message
        width = h.shape[1]
        d_weight, d_bias = torch.zeros_like(message.weight), h.new_zeros(message.weight.shape[0])
        sending, below = h.index_select(0, senders.vertex), []
        for t, (of_type, weight, _) in enumerate(self._by_type(senders)):
            d, sender = d_made[of_type], sending[of_type]
            if not d.shape[0]:
                continue
            outputs = slice(t * width, (t + 1) * width)
            if message.weight.requires_grad:
                if outer_suits(d, sender):
                    d_weight[outputs] = outer(d, sender)
                else:
                    torch.mm(d.t(), sender, out=d_weight[outputs])
            torch.sum(d, 0, out=d_bias[outputs])
            below.append(times(d, weight))
        if below:
            dh.index_add_(0, senders.vertex, torch.cat(below))
        add_wanted(message.weight, d_weight, into)
        if message.bias is not None:
            add_wanted(message.bias, d_bias, into)

    def _weights(self) -> Weights:
        message, update = self._module.message, self._module.update
        biases = (update.bias_ih, update.bias_hh) if update.bias else (None, None)
        return Weights(
            message.weight,
            message.bias,
            update.weight_ih,
            biases[0],
            update.weight_hh,
            biases[1],
            self._bf16,
        )

    def _edges(self, inside: Inside) -> EdgeIndex:
        edges, module = inside.edges, self._module
        kind = edges[module.column] if module.types > 1 else None
        return EdgeIndex(edges["source"], edges["target"], kind)

    def _senders(self, h: Tensor, inside: Inside) -> _Senders:
        rows, types = h.shape[0], self._module.types
        self._module.require_types(inside)
        source, target = inside.on_host("source"), inside.on_host("target")
        kind = inside.on_host(self._module.column) if types > 1 else np.zeros_like(source)
        for column in (source, target):
            if column.size and (column.min() < 0 or column.max() >= rows):
                raise self._edges(inside).refuse(rows, types)
        return _senders(rows, types, source, target, kind, h.device)

    def _by_type(self, senders: _Senders) -> list[tuple[slice, Tensor, Tensor | None]]:
        """For each type: which pairs send, weight, bias."""
        message, types = self._module.message, self._module.types
        biases = [None] * types if message.bias is None else message.bias.chunk(types)
        bounds = senders.bounds
        return [
            (slice(bounds[t], bounds[t + 1]), weight, biases[t])
            for t, weight in enumerate(message.weight.chunk(types))
        ]


__all__ = ["RADIAL", "GatedGraphCell"]
