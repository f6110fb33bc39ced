"""Linear maps of few rows or few columns in C: one call each way.

    forward    x ─► x Wᵀ + b
    backward   d ─► d W, dᵀ x, the sum of d's rows

A product of 14 tokens or of 10 classes costs torch more to begin than to do. All tensors contiguous
on the CPU, float32 or float64; for others the answer is None, and the caller does it in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from geartrain.native import library
from geartrain.native.library import Function


def map_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """y ``(n, out)`` of x ``(n, in)``, weight ``(out, in)`` and bias ``(out,)``."""
    run = _function("map_forward", x, weight, (bias,))
    if run is None or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    n, (out, into) = x.shape[0], weight.shape
    y = x.new_empty((n, out))
    bad = run(
        n,
        into,
        out,
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    return None if bad else y


def map_backward(
    d: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    wanted: bool = True,
    rooms: Sequence[Tensor | None] = (),
) -> tuple[Tensor | None, Tensor, Tensor] | None:
    """The gradients of x (None unless it is wanted), weight and bias.

    Args:
        d: ``(n, out)``, of y.
        x, weight: As for ``map_forward``.
        wanted: Whether that of x is.
        rooms: Where those of weight and bias are to be, of their shapes, contiguous and of x's
            dtype; None, or fewer: anywhere.
    """
    run = _function("map_backward", x, weight, (d,))
    if run is None or d.shape != (x.shape[0], weight.shape[0]):
        return None
    n, (out, into) = x.shape[0], weight.shape
    d_x = torch.empty_like(x) if wanted else None
    d_weight, d_bias, *_ = *rooms, None, None
    d_weight = x.new_empty((out, into)) if d_weight is None else d_weight
    d_bias = x.new_empty(out) if d_bias is None else d_bias
    bad = run(
        n,
        into,
        out,
        d.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        None if d_x is None else d_x.data_ptr(),
        d_weight.data_ptr(),
        d_bias.data_ptr(),
    )
    return None if bad else (d_x, d_weight, d_bias)


def _function(
    name: str, x: Tensor, weight: Tensor, others: tuple[Tensor | None, ...]
) -> Function | None:
    """The kernel for these, or None if it is not for them."""
    native, dtype = library.current(), x.dtype
    typed = None if native is None else native.typed.get(dtype)
    if typed is None or name not in typed or x.ndim != 2 or x.shape[1] != weight.shape[1]:
        return None
    for t in (x, weight, *others):
        if t is not None and not (t.dtype is dtype and t.is_cpu and t.is_contiguous()):
            return None
    return typed[name][x.shape[0] * weight.numel() > library.SMALL << 5]
