"""Values of graphs out of the states of their vertices, in C: a softmax over them, a gated sum.

    choice   scores w h ─► softmax over the vertices of a graph ─► loss, choice
    sum      sigmoid(gate [h, x]) · value(h), summed over the vertices of a graph

Vertices lie one graph below the other. All tensors contiguous on the CPU, float32 or float64; for
others the answer is None, and the caller does it in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from geartrain.errors import DataError
from geartrain.native.library import SMALL, Function
from geartrain.native.rows import Rows, contiguous, out_of_range, pointer
from geartrain.whole.graph.loader import NATIVE


def choice_forward(
    h: Tensor, answers: Tensor, lengths: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Losses ``(n,)``, choices int64 ``(n,)``, and the slope of the loss at each score ``(rows,)``.

    Args:
        h: ``(rows, H)``.
        answers: int64 ``(rows,)``, the right vertex of each graph at its first row.
        lengths: int64 ``(n,)``, vertices of each graph.
        w: ``(1, H)``.

    Raises:
        DataError: An answer is no vertex of its graph.
    """
    run = _function("choice_forward", h, h.numel(), (w,), (answers, lengths))
    if run is None or answers.shape != h.shape[:1] or w.shape != (1, h.shape[1]):
        return None
    n, (rows, width) = lengths.shape[0], h.shape
    losses, choices = h.new_empty(n), lengths.new_empty(n)
    slopes = h.new_empty(rows)
    bad = run(
        n,
        rows,
        width,
        lengths.data_ptr(),
        h.data_ptr(),
        answers.data_ptr(),
        w.data_ptr(),
        slopes.data_ptr(),
        losses.data_ptr(),
        choices.data_ptr(),
    )
    if bad > 0:
        at = int(lengths[: bad - 1].sum())
        size = int(lengths[bad - 1])
        raise no_vertex(int(answers[at]) if size else 0, size)
    return None if bad else (losses, choices, slopes)


def no_vertex(answer: int, size: int) -> DataError:
    """The error for an answer that is no vertex of its graph of so many."""
    return DataError(
        f"the answer {answer} is no vertex of its graph, which has vertices 0.."
        f"{size - 1}; number vertices from 0 inside the instance"
    )


def choice_backward(
    d: Tensor, h: Tensor, slopes: Tensor, rows: Rows | None, lengths: Tensor, w: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The gradients of h, ``(rows, H)``, and of w, ``(1, H)``.

    Args:
        d: ``(n,)``, at the losses.
        h, slopes: ``(m, H)`` and ``(m,)``, as ``choice_forward`` got and gave them.
        rows: int64 ``(rows,)``, the rows of both; None: all.
        lengths, w: As for ``choice_forward``.

    Raises:
        ProtocolError: A row is out of range.
    """
    limit, width = h.shape
    n = limit if rows is None else rows.size
    run = _function("choice_backward", h, n * width, (d, slopes, w), (lengths,))
    if run is None or d.shape != lengths.shape:
        return None
    if slopes.shape != (limit,) or w.shape != (1, width):
        return None
    rows = contiguous(rows)
    d_h, d_w = h.new_empty((n, width)), torch.empty_like(w)
    bad = run(
        lengths.shape[0],
        n,
        width,
        lengths.data_ptr(),
        h.data_ptr(),
        slopes.data_ptr(),
        pointer(rows),
        limit,
        d.data_ptr(),
        w.data_ptr(),
        d_h.data_ptr(),
        d_w.data_ptr(),
    )
    if bad > 0 and rows is not None:
        raise out_of_range(rows, limit, "read")
    return None if bad else (d_h, d_w)


@final
@dataclass(frozen=True, slots=True)
class Maps:
    """Of a gated sum, or their gradients.

    Args:
        gate: ``(out, H + features)``.
        gate_bias: ``(out,)``.
        value: ``(out, H)``.
        value_bias: ``(out,)``.
    """

    gate: Tensor
    gate_bias: Tensor
    value: Tensor
    value_bias: Tensor

    @property
    def features(self) -> int:
        """How many columns of the gate are for x."""
        return self.gate.shape[1] - self.value.shape[1]

    def agree(self) -> bool:
        """Whether they are of one width and one number of sums."""
        out = self.value.shape[0]
        biases = self.gate_bias.shape == self.value_bias.shape == (out,)
        return biases and self.gate.shape[0] == out and self.features >= 0


def sum_forward(
    h: Tensor, x: Tensor | None, lengths: Tensor, maps: Maps
) -> tuple[Tensor, Tensor] | None:
    """Sums ``(n, out)``, and the gates and values that made them, ``(rows, 2, out)``.

    Args:
        h: ``(rows, H)``.
        x: int64 ``(rows,)``, the feature of each vertex; None where there are none.
        lengths: int64 ``(n,)``, vertices of each graph.
        maps: Of now.

    Raises:
        DataError: A feature is out of range.
    """
    out, width = maps.value.shape
    weights = (maps.gate, maps.gate_bias, maps.value, maps.value_bias)
    run = _function("sum_forward", h, 2 * out * h.numel(), weights, (lengths, x))
    if run is None or h.shape[1] != width or (x is not None and x.shape != h.shape[:1]):
        return None
    if not maps.agree():
        return None
    n, rows = lengths.shape[0], h.shape[0]
    y, kept = h.new_empty((n, out)), h.new_empty((rows, 2, out))
    bad = run(
        n,
        rows,
        width,
        maps.features,
        out,
        lengths.data_ptr(),
        h.data_ptr(),
        None if x is None else x.data_ptr(),
        *(each.data_ptr() for each in weights),
        kept.data_ptr(),
        y.data_ptr(),
    )
    if bad > 0 and x is not None:
        raise _no_feature(x[bad - 1 : bad], maps.features)
    return None if bad else (y, kept)


def sum_backward(
    d: Tensor,
    h: Tensor,
    x: Tensor | None,
    kept: Tensor,
    rows: Rows | None,
    lengths: Tensor,
    maps: Maps,
) -> tuple[Tensor, Maps] | None:
    """The gradients of h, ``(rows, H)``, and of the maps.

    Args:
        d: ``(n, out)``.
        h, x, kept: ``(m, ...)``, as ``sum_forward`` got and gave them.
        rows: int64 ``(rows,)``, the rows of those; None: all.
        lengths, maps: As for ``sum_forward``.

    Raises:
        DataError: A feature is out of range.
        ProtocolError: A row is out of range.
    """
    out, width = maps.value.shape
    limit = h.shape[0]
    n = limit if rows is None else rows.size
    floats = (d, kept, maps.gate, maps.gate_bias, maps.value, maps.value_bias)
    run = _function("sum_backward", h, 4 * out * n * width, floats, (lengths, x))
    if run is None or d.shape != (lengths.shape[0], out) or not maps.agree():
        return None
    if h.shape[1] != width or kept.shape != (limit, 2, out):
        return None
    if x is not None and x.shape != (limit,):
        return None
    rows = contiguous(rows)
    d_h, d_bias = h.new_empty((n, width)), h.new_empty((2, out))
    d_gate, d_value = torch.empty_like(maps.gate), torch.empty_like(maps.value)
    bad = run(
        lengths.shape[0],
        n,
        width,
        maps.features,
        out,
        lengths.data_ptr(),
        h.data_ptr(),
        None if x is None else x.data_ptr(),
        kept.data_ptr(),
        pointer(rows),
        limit,
        d.data_ptr(),
        maps.gate.data_ptr(),
        maps.value.data_ptr(),
        d_h.data_ptr(),
        d_gate.data_ptr(),
        d_value.data_ptr(),
        d_bias.data_ptr(),
    )
    if bad == _BAD_FEATURE and x is not None:
        raise _no_feature(x, maps.features)
    if bad > 0 and rows is not None:
        raise out_of_range(rows, limit, "read")
    return None if bad else (d_h, Maps(d_gate, d_bias[0], d_value, d_bias[1]))


_BAD_FEATURE = 2


def _no_feature(x: Tensor, features: int) -> DataError:
    wrong = x[(x < 0) | (x >= features)]
    return DataError(
        f"a vertex has feature {int(wrong[0])}; expected 0..{features - 1}: number them from 0, or "
        "give the sum more features"
    )


def _function(
    name: str,
    h: Tensor,
    work: int,
    floats: tuple[Tensor, ...],
    integers: tuple[Tensor | None, ...],
) -> Function | None:
    """The kernel for these tensors, or None if it is not for them."""
    typed = NATIVE.functions(h.dtype)
    if typed is None or h.ndim != 2:
        return None
    for x in (h, *floats):
        if x.dtype is not h.dtype or not x.is_cpu or not x.is_contiguous():
            return None
    for i in integers:
        if i is not None and not (
            i.ndim == 1 and i.dtype is torch.int64 and i.is_cpu and i.is_contiguous()
        ):
            return None
    return typed[name][work > SMALL]
