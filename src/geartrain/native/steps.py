"""Steps of optimisers, and what is done to gradients before: one pass, one call for all tensors.

Functions that say so answer None, or False, for what they are not for, and torch is to do it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from struct import pack
from typing import Final

import torch
from torch import Tensor

from geartrain.native import library
from geartrain.native.library import Function


def adagrad_rows(
    table: Tensor, total: Tensor, rows: Tensor, gradient: Tensor, rate: float, eps: float
) -> None:
    """Adagrad where a gradient is: total += g², table -= rate g / (√total + eps).

    Args:
        table, total: ``(limit, width)``, are changed in place.
        rows: int64 ``(n,)``, each once.
        gradient: ``(n, width)``, of those rows.
        rate, eps: Adagrad's.

    Raises:
        IndexError: A row is out of range.
    """
    native = library.current()
    typed = None if native is None else native.typed.get(table.dtype)
    same = all(
        x.is_cpu and x.is_contiguous() and x.dtype is table.dtype for x in (table, total, gradient)
    )
    if typed is None or "adagrad_rows" not in typed or not same or not rows.is_contiguous():
        s = total.index_select(0, rows).addcmul_(gradient, gradient)
        total.index_copy_(0, rows, s)
        table.index_add_(0, rows, gradient / s.sqrt_().add_(eps), alpha=-rate)
        return
    n, limit = rows.shape[0], table.shape[0]
    width = table[0].numel() if limit else 0
    bad = typed["adagrad_rows"][n * width > library.SMALL](
        n,
        width,
        rows.data_ptr(),
        limit,
        gradient.data_ptr(),
        rate,
        eps,
        table.data_ptr(),
        total.data_ptr(),
    )
    if bad:
        raise IndexError(f"a gradient is for rows {rows.tolist()[:8]}..., the table has {limit}")


def norm_of(tensors: Sequence[Tensor]) -> float | None:
    """The 2-norm of all entries of dense tensors; None: torch is to find it."""
    run = _function("square_sum", tensors)
    if run is None:
        return None
    total = ctypes.c_double()
    run(_entries(tensors), len(tensors), ctypes.addressof(total))
    # What overflows its type has no norm in torch either.
    return math.sqrt(total.value) if total.value >= 0 else math.nan


def scaled_(tensors: Sequence[Tensor], factor: float) -> bool:
    """Multiply dense tensors in place; False: torch is to do it."""
    run = _function("scale_all", tensors)
    if run is None:
        return False
    run(_entries(tensors), len(tensors), factor)
    return True


def adam_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> bool:
    """One step of Adam; False: torch is to take it.

    Args:
        weights: Are changed, as are ``means``, ``squares`` and ``steps``.
        gradients: Dense, of the weights' shapes.
        means, squares: Of the gradients, decaying, of the weights' shapes.
        steps: float32 scalars, steps taken before.
        rate, betas, eps, weight_decay, maximize: Adam's.
    """
    tensors = [*weights, *gradients, *means, *squares]
    run = _function("adam", tensors)
    if run is None or any(s.dtype is not torch.float32 or not s.is_cpu for s in steps):
        return False
    columns = zip(weights, gradients, means, squares, steps, strict=True)
    words: list[int] = []
    for w, g, m, v, t in columns:
        if not w.shape == g.shape == m.shape == v.shape:
            return False
        words += (w.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), t.data_ptr(), w.numel())
    jobs = pack(f"{len(words)}q", *words)
    run(jobs, len(weights), rate, *betas, eps, weight_decay, maximize)
    return True


_FREE: Final = 1 << 16
"""Entries from which on the interpreter lock is freed."""


def _function(name: str, tensors: Sequence[Tensor]) -> Function | None:
    """The kernel for these, or None if it is not for them."""
    native = library.current()
    if native is None or not tensors:
        return None
    dtype = tensors[0].dtype
    typed = native.typed.get(dtype)
    if typed is None or name not in typed:
        return None
    entries = 0
    for x in tensors:
        if x.dtype is not dtype or not x.is_cpu or x.is_sparse or not x.is_contiguous():
            return None
        entries += x.numel()
    return typed[name][entries > _FREE]


def _entries(tensors: Sequence[Tensor]) -> bytes:
    words: list[int] = []
    for x in tensors:
        words += (x.data_ptr(), x.numel())
    return pack(f"{len(words)}q", *words)
