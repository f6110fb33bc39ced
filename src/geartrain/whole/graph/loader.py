"""Gated graph networks in C: some steps of message passing, products included, in one call.

    forward    h ─► [messages, sums, GRU] x steps ─► h'        kept: what is heard, r, z, n, m
    backward   the same steps back, and the gradients of all weights over all steps at once

Small products in many calls are what such a network costs; here the weights are packed once for all
steps, and tiles of the results stay in registers. All tensors contiguous on the CPU, float32 or
float64; for others the answer is None, and the caller does it in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from geartrain.errors import DataError
from geartrain.native import library
from geartrain.native.build import Sources
from geartrain.native.library import POINTER, SMALL_WORK, WORD, Function, threads_for
from geartrain.native.rows import Rows, address, alike, contiguous, out_of_range, pointer

_N, _P = WORD, POINTER
NATIVE: Final = library.add(
    library.Extension(
        Sources("graph", Path(__file__).with_name("graph.c")),
        typed={
            "gated_forward": (*[_N] * 5, *[_P] * 10, *[_N] * 2, *[_P] * 2),
            "gated_backward": (*[_N] * 5, *[_P] * 6, _N, *[_P] * 3, *[_N] * 3, *[_P] * 5),
            "choice_forward": (*[_N] * 3, *[_P] * 7),
            "choice_backward": (*[_N] * 3, *[_P] * 4, _N, *[_P] * 4),
            "sum_forward": (*[_N] * 5, *[_P] * 9),
            "sum_backward": (*[_N] * 5, *[_P] * 5, _N, *[_P] * 7),
        },
    )
)

HEARD: Final = 5
"""What is kept of a step and vertex: what it heard, r, z, n, m, of ``(H,)`` each."""


@final
@dataclass(frozen=True, slots=True)
class Weights:
    """Of messages and of an ``nn.GRUCell``.

    Args:
        message: ``(types H, H)``.
        message_bias: ``(types H,)`` or None.
        ih, hh: ``(3 H, H)``.
        ih_bias, hh_bias: ``(3 H,)`` or None.
        bf16: Whether products may round their operands to bfloat16; their sums are float32.
    """

    message: Tensor
    message_bias: Tensor | None
    ih: Tensor
    ih_bias: Tensor | None
    hh: Tensor
    hh_bias: Tensor | None
    bf16: bool = False

    @property
    def types(self) -> int:
        return self.message.shape[0] // self.message.shape[1]

    def suit(self, like: Tensor) -> bool:
        """Whether C can read them beside such rows."""
        dtype, width, types = like.dtype, like.shape[1], self.types
        square, gates = (3 * width, width), (3 * width,)
        return like.is_cpu and all(
            x is None or (x.dtype is dtype and x.is_cpu and x.is_contiguous() and x.shape == shape)
            for x, shape in (
                (self.message, (types * width, width)),
                (self.message_bias, (types * width,)),
                (self.ih, square),
                (self.ih_bias, gates),
                (self.hh, square),
                (self.hh_bias, gates),
            )
        )


@final
@dataclass(frozen=True, slots=True)
class EdgeIndex:
    """Of a batch of graphs, one below the other.

    Args:
        source, target: int64 ``(E,)``, rows of the batch.
        kind: int64 ``(E,)``, the type of each; None where there is one.

    Raises:
        DataError: They are not equally many.
    """

    source: Tensor
    target: Tensor
    kind: Tensor | None

    def __post_init__(self) -> None:
        shape, kind = self.source.shape, self.kind
        if (
            len(shape) != 1
            or self.target.shape != shape
            or (kind is not None and kind.shape != shape)
        ):
            shapes = [tuple(x.shape) for x in (self.source, self.target, kind) if x is not None]
            raise DataError(
                f"edges with columns of shapes {shapes}; give each edge one source, one target and "
                "one type"
            )

    def suit(self) -> bool:
        """Whether C can read them."""
        return all(
            x is None or (x.dtype is torch.int64 and x.is_cpu and x.is_contiguous())
            for x in (self.source, self.target, self.kind)
        )

    def refuse(self, rows: int, types: int) -> DataError:
        """The error for an edge that leads nowhere or has no type."""
        kind = self.kind
        if kind is not None and (wrong := (kind < 0) | (kind >= types)).any():
            return DataError(
                f"an edge has type {int(kind[wrong][0])}; expected 0..{types - 1}: number the "
                "types from 0, or give the cell more of them"
            )
        return DataError(f"an edge leads from or to no vertex of its graph; expected 0..{rows - 1}")


def gated_forward(h: Tensor, edges: EdgeIndex, weights: Weights, kept: Tensor) -> Tensor | None:
    """States after some steps, ``(n, H)``.

    Args:
        h: ``(n, H)``.
        edges: Of the batch.
        weights: Of all steps.
        kept: ``(n, steps, 5, H)``, is written: its shape says how many steps.

    Raises:
        DataError: An edge has a type that there is not.
    """
    n, steps, parts, width = kept.shape
    run = _function("gated_forward", h, edges, weights, n * steps)
    if run is None or h.shape != (n, width) or parts != HEARD or not alike(h, kept):
        return None
    y = torch.empty_like(h)
    bad = run(
        n,
        width,
        weights.types,
        steps,
        *_edges(edges),
        h.data_ptr(),
        weights.message.data_ptr(),
        address(weights.message_bias),
        weights.ih.data_ptr(),
        address(weights.ih_bias),
        weights.hh.data_ptr(),
        address(weights.hh_bias),
        weights.bf16,
        threads_for(7 * n * steps * width**2),
        kept.data_ptr(),
        y.data_ptr(),
    )
    if bad:
        raise edges.refuse(n, weights.types) if bad > 0 else _no_memory(n, steps)
    return y


@final
@dataclass(frozen=True, slots=True)
class Slopes:
    """Gradients: of h ``(n, H)``, None where nobody wants it, and of the weights, by their name."""

    h: Tensor | None
    message: Tensor
    message_bias: Tensor
    ih: Tensor
    ih_bias: Tensor
    hh: Tensor
    hh_bias: Tensor


def gated_backward(
    dy: Tensor,
    h: Tensor,
    kept: Tensor,
    rows: Rows | None,
    edges: EdgeIndex,
    weights: Weights,
    *,
    wanted: bool = True,
) -> Slopes | None:
    """The way back through all steps.

    Args:
        dy: ``(n, H)``.
        h: ``(m, H)``, the states before the first step.
        kept: ``(m, steps, 5, H)``, what ``gated_forward`` wrote.
        rows: int64 ``(n,)``, the rows of ``h`` and ``kept``; None: all.
        edges: Of the batch.
        weights: Of now.
        wanted: Whether the gradient of h is.

    Raises:
        DataError: An edge has a type that there is not.
        ProtocolError: A row is out of range.
    """
    limit, steps, parts, width = kept.shape
    n, types = limit if rows is None else rows.size, weights.types
    run = _function("gated_backward", dy, edges, weights, n * steps)
    if run is None or parts != HEARD or not alike(dy, kept, h):
        return None
    if dy.shape != (n, width) or h.shape != (limit, width):
        return None
    rows = contiguous(rows)
    d = dy.clone()
    found = dy.new_empty((types + 6) * width * (width + 1))
    square = width * width
    message, ih, hh, sums = torch.split_with_sizes(
        found, [types * square, 3 * square, 3 * square, (types + 6) * width]
    )
    bad = run(
        n,
        width,
        types,
        steps,
        *_edges(edges),
        h.data_ptr(),
        kept.data_ptr(),
        pointer(rows),
        limit,
        weights.message.data_ptr(),
        weights.ih.data_ptr(),
        weights.hh.data_ptr(),
        weights.bf16,
        threads_for(7 * n * steps * width**2),
        wanted,
        d.data_ptr(),
        message.data_ptr(),
        ih.data_ptr(),
        hh.data_ptr(),
        sums.data_ptr(),
    )
    if bad == 1 and rows is not None:
        raise out_of_range(rows, limit, "read")
    if bad:
        raise edges.refuse(n, types) if bad > 0 else _no_memory(n, steps)
    of_message, of_x, of_h = torch.split_with_sizes(sums, [types * width, 3 * width, 3 * width])
    return Slopes(
        d if wanted else None,
        message.view(types * width, width),
        of_message,
        ih.view(3 * width, width),
        of_x,
        hh.view(3 * width, width),
        of_h,
    )


def _function(
    name: str, like: Tensor, edges: EdgeIndex, weights: Weights, rows: int
) -> Function | None:
    """The kernel for these, or None if it is not for them."""
    typed = NATIVE.functions(like.dtype)
    if typed is None or like.ndim != 2 or not like.is_contiguous():
        return None
    if not (edges.suit() and weights.suit(like)):
        return None
    return typed[name][7 * rows * like.shape[1] ** 2 > SMALL_WORK]


def _edges(edges: EdgeIndex) -> tuple[int, int, int, int | None]:
    source = edges.source
    return source.shape[0], source.data_ptr(), edges.target.data_ptr(), address(edges.kind)


def _no_memory(rows: int, steps: int) -> MemoryError:
    return MemoryError(f"no memory for {steps} steps of {rows} rows; lower max_active or max_rows")
