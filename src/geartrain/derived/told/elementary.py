"""Functions of entries told by simpler ones: those of numbers that are none, steps, shares, losses.

    huber(x, y)  ─►  z = |x - y|;  least = min(z, delta);  least * (z - least / 2)

As in ``simpler.py``, an operator and its gradient each by themselves. What torch asks of values
first (``binary_cross_entropy``: whether they are shares) is not asked: such have no number there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten


def _of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """For tensors of floating-point numbers alone."""

    def way(*args: Any, **how: Any) -> Any:
        floats = all(x.is_floating_point() for x in args if isinstance(x, Tensor))
        return function(*args, **how) if floats else None

    return way


def _number(like: Tensor, number: float) -> Tensor:
    return torch.full((), number, dtype=like.dtype, device=like.device)


# What is no number, or without an end.


def _is_nan(x: Tensor) -> Tensor:
    return x != x


def _is_infinite(x: Tensor) -> Tensor:
    return x.abs() == math.inf


def _to_numbers(
    x: Tensor, nan: float | None = None, above: float | None = None, below: float | None = None
) -> Tensor:
    most = torch.finfo(x.dtype).max
    found = x.masked_fill(x != x, nan or 0.0)
    found = found.masked_fill(x == math.inf, most if above is None else above)
    return found.masked_fill(x == -math.inf, -most if below is None else below)


def _sum_of_numbers(
    x: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    if dim is None or dtype is not None:
        return None
    found: Tensor = aten.sum.dim_IntList(x.masked_fill(x != x, 0), list(dim), keepdim)
    return found


def _larger(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(torch.logical_or(x >= y, y != y), x, y)


def _smaller(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(torch.logical_or(x <= y, y != y), x, y)


def _between(x: Tensor, least: Tensor | None = None, most: Tensor | None = None) -> Tensor:
    found = x if least is None else torch.maximum(x, least)
    return found if most is None else torch.minimum(found, most)


# Remainders, and what is rounded.


def _divided(x: Tensor, y: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode == "floor":
        found: Tensor = aten.floor_divide.default(x, y if isinstance(y, Tensor) else _number(x, y))
        return found
    return x / y if rounding_mode is None else (x / y).trunc()


def _left_over(x: Tensor, y: float) -> Tensor:
    return torch.fmod(x, _number(x, y))


def _modulo(x: Tensor, y: float) -> Tensor:
    return torch.remainder(x, _number(x, y))


def _rounded(x: Tensor, *, decimals: int) -> Tensor:
    power = 10.0 ** abs(decimals)
    return (x / power).round() * power if decimals < 0 else (x * power).round() / power


# Logarithms.


def _times_log(x: Tensor, y: Tensor) -> Tensor:
    return (x * y.log()).masked_fill(torch.logical_and(x == 0, y == y), 0)


def _entropy(x: Tensor) -> Tensor:
    return (-x * x.log()).masked_fill(x == 0, 0).masked_fill(x < 0, -math.inf)


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp_min(eps).clamp_max(1 - eps)
    return (x / (1 - x)).log()


def _logit_back(g: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    eps = -1.0 if eps is None else eps
    least, without = (0.0, math.nan) if eps < 0 else (eps, 0.0)
    outside = torch.logical_or(x < least, x > 1 - least)
    return (g / (x * (1 - x))).masked_fill(outside, without)


def _log_of_both(x: Tensor, y: Tensor) -> Tensor:
    apart = (x - y).abs().masked_fill(x == y, 0)  # of two that have no end there is no difference
    return torch.maximum(x, y) + (-apart).exp().log1p()


def _sinc(x: Tensor) -> Tensor:
    turned = x * math.pi
    return (turned.sin() / turned).masked_fill(x == 0, 1)


# What is nothing, or a line, on one side of a number.


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor | None:
    if beta == 1 and threshold == 20:
        return None
    z = x * beta
    return torch.where(z > threshold, x, z.clamp_max(threshold).exp().log1p() / beta)


def _softplus_back(g: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor | None:
    if beta == 1 and threshold == 20:
        return None
    z = x * beta
    return torch.where(z > threshold, g, g * z.sigmoid())


def _soft_shrink(x: Tensor, by: float = 0.5) -> Tensor:
    return x - x.clamp_min(-by).clamp_max(by)


def _hard_shrink(x: Tensor, by: float = 0.5) -> Tensor:
    return _outside(x, x, by)


def _outside(g: Tensor, x: Tensor, by: float) -> Tensor:
    """Of a gradient what comes where x is further from zero."""
    return g.masked_fill(x.abs() <= by, 0)


def _threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return x.masked_fill(x <= threshold, value)


# Losses, entry by entry.


def _square(x: Tensor, y: Tensor, reduction: int = 1) -> Tensor | None:
    return None if reduction else (x - y) * (x - y)


def _square_back(g: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor | None:
    return None if reduction else g * (2 * (x - y))


def _huber(x: Tensor, y: Tensor, reduction: int = 1, delta: float = 1) -> Tensor | None:
    if reduction:
        return None
    apart = (x - y).abs()
    least = apart.clamp_max(delta)
    return least * (apart - 0.5 * least)


def _huber_back(g: Tensor, x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor | None:
    return None if reduction else g * (x - y).clamp_min(-delta).clamp_max(delta)


def _smooth(x: Tensor, y: Tensor, reduction: int = 1, beta: float = 1) -> Tensor | None:
    found = _huber(x, y, reduction, beta)
    return None if found is None or not beta else found / beta


def _smooth_back(g: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor | None:
    found = _huber_back(g, x, y, reduction, beta)
    return None if found is None or not beta else found / beta


def _of_shares(
    x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor | None:
    if reduction:
        return None
    found = (y - 1) * (-x).log1p().clamp_min(-100) - y * x.log().clamp_min(-100)
    return found if weight is None else found * weight


def _of_shares_back(
    g: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor | None:
    if reduction:
        return None
    found = g * (x - y) / ((1 - x) * x).clamp_min(1e-12)
    return found if weight is None else found * weight


_TOLD: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.isnan.default: _is_nan,
    aten.isinf.default: _is_infinite,
    aten.nan_to_num.default: _to_numbers,
    aten.nansum.default: _sum_of_numbers,
    aten.fmax.default: _larger,
    aten.fmin.default: _smaller,
    aten.clamp.Tensor: _between,
    aten.div.Tensor_mode: _divided,
    aten.div.Scalar_mode: _divided,
    aten.fmod.Scalar: _left_over,
    aten.remainder.Scalar: _modulo,
    aten.round.decimals: _rounded,
    aten.deg2rad.default: lambda x: x * (math.pi / 180),
    aten.rad2deg.default: lambda x: x * (180 / math.pi),
    aten.xlogy.Tensor: _times_log,
    aten.special_entr.default: _entropy,
    aten.logit.default: _logit,
    aten.logit_backward.default: _logit_back,
    aten.logaddexp.default: _log_of_both,
    aten.sinc.default: _sinc,
    aten.softplus.default: _softplus,
    aten.softplus_backward.default: _softplus_back,
    aten.softshrink.default: _soft_shrink,
    aten.softshrink_backward.default: _outside,
    aten.hardshrink.default: _hard_shrink,
    aten.hardshrink_backward.default: _outside,
    aten.threshold.default: _threshold,
    aten.mse_loss.default: _square,
    aten.mse_loss_backward.default: _square_back,
    aten.huber_loss.default: _huber,
    aten.huber_loss_backward.default: _huber_back,
    aten.smooth_l1_loss.default: _smooth,
    aten.smooth_l1_loss_backward.default: _smooth_back,
    aten.binary_cross_entropy.default: _of_shares,
    aten.binary_cross_entropy_backward.default: _of_shares_back,
}
ELEMENTARY: Final[Mapping[Any, Callable[..., Any]]] = {
    target: _of_floats(function) for target, function in _TOLD.items()
}
"""As ``SIMPLER``, of floating-point numbers."""
