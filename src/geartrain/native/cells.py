"""Gates of recurrent cells, from what a matrix product gave to h and c, and back.

    forward    gates before squashing ─► kept (squashed, tanh(c')), h, c        one pass
    backward   dh, dc, rows of what is kept ─► gradients before squashing, their sum

All tensors contiguous on the CPU, float32, float64 or bfloat16; for others the answer is None, and
the caller does it in torch. Sums over rows are taken in the order of the rows; those of bfloat16
are float32, as is all between a row that is read and one that is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.native import library
from geartrain.native.library import SMALL, Function
from geartrain.native.rows import Rows, address, contiguous, out_of_range, pointer


def lstm_forward(kept: Tensor, c: Tensor) -> tuple[Tensor, Tensor] | None:
    """nn.LSTMCell: h' and c', ``(n, H)``.

    Args:
        kept: ``(n, 5, H)``: i, f, g, o before squashing, squashed in place; gets tanh(c').
        c: ``(n, H)``.
    """
    run = _function("lstm_forward", kept, c)
    n, parts, width = kept.shape
    if run is None or c.shape != (n, width) or parts != 5:
        return None
    h, c_new = kept.new_empty((n, width)), kept.new_empty((n, width))
    _refuse(run(n, width, kept.data_ptr(), c.data_ptr(), h.data_ptr(), c_new.data_ptr()))
    return h, c_new


def lstm_backward(
    dh: Tensor | None, dc: Tensor | None, kept: Tensor, c: Tensor, rows: Rows | None, whole: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients at the gates, at c, and the sum of the former over the rows.

    Args:
        dh, dc: ``(n, H)``; one of them may be None, which is zero.
        kept: ``(m, 5, H)``, what ``lstm_forward`` wrote.
        c: ``(m, H)``.
        rows: int64 ``(n,)``, the rows of ``kept`` and ``c``; None: all.
        whole: Rows of the first result, n or more; those after n are zero.

    Returns:
        ``(whole, 4 H)``, ``(n, H)``, ``(4 H,)``.

    Raises:
        ProtocolError: A row is out of range.
    """
    limit, parts, width = kept.shape
    n = limit if rows is None else rows.size
    rows = contiguous(rows)
    run = _function("lstm_backward", kept, c, dh, dc, entries=5 * n * width)
    if run is None or not _one_is_of((n, width), dh, dc) or c.shape != (limit, width):
        return None
    if parts != 5:
        return None
    d_gates, d_c = kept.new_empty((whole, 4 * width)), kept.new_empty((n, width))
    ends = kept.new_empty(5 * width, dtype=_summed(kept))  # the sum, and scratch
    at = ends.data_ptr()
    bad = run(
        n,
        whole,
        width,
        address(dh),
        address(dc),
        kept.data_ptr(),
        c.data_ptr(),
        pointer(rows),
        limit,
        d_gates.data_ptr(),
        d_c.data_ptr(),
        at,
        at + 4 * width * ends.element_size(),
    )
    _refuse(bad, rows, limit)
    return d_gates, d_c, ends[: 4 * width]


def gru_forward(of_x: Tensor, of_h: Tensor, h: Tensor, kept: Tensor) -> Tensor | None:
    """nn.GRUCell: h', ``(n, H)``.

    Args:
        of_x, of_h: ``(n, 3 H)``, what the maps of x and h gave: r, z, n.
        h: ``(n, H)``.
        kept: ``(n, 4, H)``, gets r, z, n and what the map of h gave for n.
    """
    run = _function("gru_forward", kept, of_x, of_h, h)
    n, parts, width = kept.shape
    shape = (n, 3 * width)
    if (
        run is None
        or parts != 4
        or h.shape != (n, width)
        or of_x.shape != shape
        or of_h.shape != shape
    ):
        return None
    y = kept.new_empty((n, width))
    found = (of_x.data_ptr(), of_h.data_ptr(), h.data_ptr())
    _refuse(run(n, width, *found, kept.data_ptr(), y.data_ptr()))
    return y


def gru_backward(
    dy: Tensor, h: Tensor, kept: Tensor, rows: Rows | None, whole: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients at the maps of x and of h, and what goes past them to h.

    Args:
        dy: ``(n, H)``.
        h: ``(n, H)``, or with rows after those.
        kept: ``(m, 4, H)``, what ``gru_forward`` wrote.
        rows: int64 ``(n,)``, the rows of ``kept``; None: all.
        whole: Rows of the first two results, n or more; those after n are zero.

    Returns:
        ``(whole, 3 H)`` twice, ``(n, H)``.

    Raises:
        ProtocolError: A row is out of range.
    """
    limit, parts, width = kept.shape
    n = limit if rows is None else rows.size
    rows = contiguous(rows)
    run = _function("gru_backward", kept, dy, h, entries=4 * n * width)
    if run is None or dy.shape != (n, width) or h.shape[0] < n or h.shape[1:] != (width,):
        return None
    if parts != 4:
        return None
    d_x, d_h = kept.new_empty((whole, 3 * width)), kept.new_empty((whole, 3 * width))
    dh = kept.new_empty((n, width))
    bad = run(
        n,
        whole,
        width,
        dy.data_ptr(),
        h.data_ptr(),
        kept.data_ptr(),
        pointer(rows),
        limit,
        d_x.data_ptr(),
        d_h.data_ptr(),
        dh.data_ptr(),
    )
    _refuse(bad, rows, limit)
    return d_x, d_h, dh


def tanh(x: Tensor, out: Tensor) -> bool:
    """Write tanh(x) to ``out``, of x's shape, which may be ``x``; False if torch is to do it."""
    run = _function("tanh", x, out)
    if run is None or out.requires_grad or x.shape != out.shape:
        return False
    run(x.numel(), x.data_ptr(), out.data_ptr())
    return True


def _function(
    name: str, like: Tensor, *others: Tensor | None, entries: int | None = None
) -> Function | None:
    """The kernel for these tensors, or None if it is not for them."""
    native = library.current()
    typed = None if native is None else native.typed.get(like.dtype)
    if typed is None or not (like.is_cpu and like.is_contiguous()):
        return None
    for x in others:
        if x is not None and not (x.dtype == like.dtype and x.is_cpu and x.is_contiguous()):
            return None
    return typed[name][(like.numel() if entries is None else entries) > SMALL]


def _refuse(bad: int, rows: Rows | None = None, limit: int = 0) -> None:
    if bad and rows is not None and bad > 0:
        raise out_of_range(rows, limit, "read")
    if bad:
        raise MemoryError("no memory for a row of a cell in float32, which bfloat16 rows want")


def _summed(rows: Tensor) -> torch.dtype:
    """What sums over such rows are."""
    return torch.float32 if rows.dtype is torch.bfloat16 else rows.dtype


def _one_is_of(shape: tuple[int, ...], *gradients: Tensor | None) -> bool:
    """Whether there is a gradient, and those that are there have the shape."""
    there = [d.shape for d in gradients if d is not None]
    return bool(there) and all(s == shape for s in there)
