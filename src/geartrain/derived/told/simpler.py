"""Operators of torch told by simpler ones, which have steps in C.

    glu(x)  ─►  a, b = x.chunk(2);  a * sigmoid(b)

It is done as a trace is recorded, below autograd: an operator and its gradient each by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten


def _halves(x: Tensor, dim: int) -> Sequence[Tensor]:
    return torch.split(x, x.shape[dim] // 2, dim)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = _halves(x, dim)
    return a * torch.sigmoid(b)


def _glu_back(g: Tensor, x: Tensor, dim: int) -> Tensor:
    a, b = _halves(x, dim)
    open_ = torch.sigmoid(b)
    through = g * open_
    return torch.cat([through, through * a * (1 - open_)], dim)


def _lerp(a: Tensor, b: Tensor, weight: Tensor | float) -> Tensor:
    return a + weight * (b - a)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a * b if value == 1 else a * b * value)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a / b if value == 1 else a / b * value)


def _baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(a, b) if alpha == 1 else torch.bmm(a, b) * alpha
    return product + (x if beta == 1 else x * beta)


def _turned(x: Tensor, *dims: Any) -> Tensor | None:
    """A matrix the other way round is ``t``, which products know."""
    order = dims[0] if len(dims) == 1 else dims
    both = x.dim() == 2 and sorted(k % 2 for k in order) == [0, 1]
    turns = both and (len(dims) == 2 or order[0] % 2 == 1)
    return x.t() if turns else None


def _clamp(x: Tensor, least: float | None = None, most: float | None = None) -> Tensor | None:
    if least is None or most is None:
        return None
    return x.clamp_min(least).clamp_max(most)


def _hardtanh(x: Tensor, least: float = -1, most: float = 1) -> Tensor:
    return x.clamp_min(least).clamp_max(most)


def _hardtanh_back(g: Tensor, x: Tensor, least: float, most: float) -> Tensor:
    inside: Tensor = aten.threshold_backward(g, x, least)
    found: Tensor = aten.threshold_backward(inside, -x, -most)
    return found


def _vector_norm(
    x: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    if not dim or dtype is not None or not x.is_floating_point():
        return None
    dims = list(dim)
    if order == 2:
        return (x * x).sum(dims, keepdim).sqrt()
    if order == 1:
        return x.abs().sum(dims, keepdim)
    if order == 0:
        return torch.where(x != 0, _full(x, 1), _full(x, 0)).sum(dims, keepdim)
    if math.isinf(order):
        return (x.abs().amax if order > 0 else x.abs().amin)(dims, keepdim)
    return (x.abs() ** order).sum(dims, keepdim) ** (1 / order)


def _full(like: Tensor, number: float) -> Tensor:
    return torch.full((), number, dtype=like.dtype, device=like.device)


def _norm(
    x: Tensor, order: float | None = None, dim: Sequence[int] = (), keepdim: bool = False
) -> Tensor | None:
    return _vector_norm(x, 2 if order is None else order, dim, keepdim)


def _variance(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor | None:
    if not dim:
        return None
    n = math.prod(x.shape[d] for d in dim) - (1 if correction is None else correction)
    if n <= 0:
        return None
    apart = x - x.mean(list(dim), True)
    return (apart * apart).sum(list(dim), keepdim) / n


def _variance_and_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor] | None:
    found = _variance(x, dim, correction=correction, keepdim=keepdim)
    return None if found is None or not dim else (found, x.mean(list(dim), keepdim))


def _deviation_and_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor] | None:
    found = _variance_and_mean(x, dim, correction=correction, keepdim=keepdim)
    return None if found is None else (found[0].sqrt(), found[1])


def _deviation(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor | None:
    found = _variance(x, dim, correction=correction, keepdim=keepdim)
    return None if found is None else found.sqrt()


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= tensors[0].ndim + 1
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


def _frac(x: Tensor) -> Tensor:
    return x - x.trunc()


def _any(x: Tensor, dim: int, keepdim: bool = False) -> Tensor | None:
    """Of truths: whether there are any, as a number."""
    few = x.dtype is torch.bool and dim % max(x.ndim, 1)
    return x.sum(dim, keepdim) > 0 if few else None


def _all(x: Tensor, dim: int, keepdim: bool = False) -> Tensor | None:
    few = x.dtype is torch.bool and dim % max(x.ndim, 1)
    return x.logical_not().sum(dim, keepdim) == 0 if few else None


def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(torch.nn.functional.softplus(x))


def _mish_back(g: Tensor, x: Tensor) -> Tensor:
    t = torch.tanh(torch.nn.functional.softplus(x))
    return g * (t + x * torch.sigmoid(x) * (1 - t * t))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate != "tanh":
        return None
    return 0.5 * x * (1 + torch.tanh(_ROOT * (x + 0.044715 * x * x * x)))


def _gelu_back(g: Tensor, x: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate != "tanh":
        return None
    t = torch.tanh(_ROOT * (x + 0.044715 * x * x * x))
    slope = _ROOT * (1 + 3 * 0.044715 * x * x)
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


_ROOT: Final = math.sqrt(2 / math.pi)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, inner: float = 1) -> Tensor | None:
    """Of ``selu`` and ``celu``."""
    if scale == 1 and inner == 1:
        return None
    return scale * (torch.relu(x) + alpha * ((x.clamp_max(0) * inner).exp() - 1))


def _elu_back(
    g: Tensor, alpha: float, scale: float, inner: float, of_result: bool, x: Tensor
) -> Tensor | None:
    if of_result or (scale == 1 and inner == 1):
        return None
    above: Tensor = aten.threshold_backward(g, x, 0)
    return scale * (above + (g - above) * (alpha * inner) * (x.clamp_max(0) * inner).exp())


def _hard_sigmoid(x: Tensor) -> Tensor:
    return ((x + 3) / 6).clamp_min(0).clamp_max(1)


def _within(g: Tensor, x: Tensor) -> Tensor:
    """Of a gradient what comes where x is between -3 and 3."""
    inside: Tensor = aten.threshold_backward(g, x, -3)
    found: Tensor = aten.threshold_backward(inside, -x, -3)
    return found


def _hard_sigmoid_back(g: Tensor, x: Tensor) -> Tensor:
    return _within(g, x) / 6


def _hard_swish(x: Tensor) -> Tensor:
    return x * _hard_sigmoid(x)


def _hard_swish_back(g: Tensor, x: Tensor) -> Tensor:
    return g * _hard_sigmoid(x) + _within(g * x, x) / 6


def _power_of(base: float, x: Tensor) -> Tensor | None:
    return torch.exp(x * math.log(base)) if base > 0 and x.is_floating_point() else None


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    above = torch.relu(x)
    return above + weight * (x - above)


def _prelu_back(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    above: Tensor = aten.threshold_backward(g, x, 0)
    below = g - above
    return above + weight * below, below * x


def _log_sum_exp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor | None:
    if not dim or not x.is_floating_point():
        return None
    large = torch.finfo(x.dtype).max  # of rows that are infinite all over, nothing is taken off
    most = x.amax(list(dim), True).clamp_min(-large).clamp_max(large)
    found = (x - most).exp().sum(list(dim), True).log() + most
    for axis in () if keepdim else sorted((d % x.ndim for d in dim), reverse=True):
        found = found.squeeze(axis)
    return found


def _count(x: Tensor, dim: Sequence[int] | int | None = None) -> Tensor | None:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return (x != 0).sum(dims) if dims else None


def _least_and_most(
    x: Tensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor] | None:
    return None if dim is None else (x.amin(dim, keepdim), x.amax(dim, keepdim))


def _at_place(x: Tensor, place: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Of an axis what comes so far in order, the least first, and which it is."""
    values, which = torch.topk(x, place, dim, False, True)
    last = [aten.slice(y, dim, place - 1, place) for y in (values, which)]
    if not keepdim:
        last = [y.squeeze(dim) for y in last]
    return last[0], last[1]


def _may_order(x: Tensor, dim: int, place: int) -> bool:
    axis = dim % max(x.ndim, 1)
    return bool(axis) and x.is_floating_point() and 0 < place <= x.shape[axis]


def _in_order(
    x: Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor, Tensor] | None:
    return _at_place(x, k, dim, keepdim) if _may_order(x, dim, k) else None


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor] | None:
    """The lower of two; no number, where there is one that is none."""
    place = (x.shape[dim] + 1) // 2
    if not _may_order(x, dim, place):
        return None
    found, which = _at_place(x, place, dim, True)
    most, first = x.amax(dim, True), x.argmax(dim, True)
    none = most != most
    found, which = torch.where(none, most, found), torch.where(none, first, which)
    return (found, which) if keepdim else (found.squeeze(dim), which.squeeze(dim))


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return -torch.nn.functional.softplus(-x), x


def _log_sigmoid_back(g: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return g * torch.sigmoid(-x)


def _of_number(x: Tensor, dim: int, many: int, value: float) -> Tensor:
    """As x, but for so many entries of an axis, which are all the same."""
    shape = (*x.shape[:dim], many, *x.shape[dim + 1 :])
    return x.new_full(shape, value) if value else x.new_zeros(shape)


def _pad(x: Tensor, pads: Sequence[int], value: float = 0) -> Tensor | None:
    sides = list(zip(pads[::2], pads[1::2], strict=True))
    if len(sides) == x.ndim and any(sides[-1]):
        return None
    for k, (before, after) in enumerate(sides):
        dim = x.ndim - 1 - k
        if before < 0 or after < 0:
            x = aten.slice(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
        around = [_of_number(x, dim, max(many, 0), value) for many in (before, after)]
        pieces = [y for y in (around[0], x, around[1]) if y.shape[dim]]
        x = torch.cat(pieces, dim) if len(pieces) > 1 else x
    return x


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor | None:
    if not dims or any(dim % x.ndim == 0 for dim in dims):
        return None
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if by := shift % max(size, 1):
            x = torch.cat(
                [aten.slice(x, dim, size - by, size), aten.slice(x, dim, 0, size - by)], dim
            )
    return x


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor | None:
    for _ in range(len(repeats) - x.ndim):
        x = x.unsqueeze(0)
    if repeats[0] != 1:  # what all rows have in common, for each of them
        if x.shape[0] != 1:
            return None
        x = x.expand(repeats[0], *x.shape[1:])
    for dim, times in enumerate(repeats):
        if dim and times != 1:
            shape = list(x.shape)
            many = x.unsqueeze(dim).expand([*shape[:dim], times, *shape[dim:]])
            shape[dim] *= times
            x = many.clone(memory_format=torch.contiguous_format).view(shape)
    return x


SIMPLER: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.permute.default: _turned,
    aten.transpose.int: _turned,
    aten.glu.default: _glu,
    aten.glu_backward.default: _glu_back,
    aten.lerp.Tensor: _lerp,
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.baddbmm.default: _baddbmm,
    aten.clamp.default: _clamp,
    aten.hardtanh.default: _hardtanh,
    aten.hardtanh_backward.default: _hardtanh_back,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.var.correction: _variance,
    aten.var_mean.correction: _variance_and_mean,
    aten.std_mean.correction: _deviation_and_mean,
    aten.std.correction: _deviation,
    aten.stack.default: _stack,
    aten.frac.default: _frac,
    aten.any.dim: _any,
    aten.all.dim: _all,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_back,
    aten.elu.default: _elu,
    aten.elu_backward.default: _elu_back,
    aten.hardsigmoid.default: _hard_sigmoid,
    aten.hardsigmoid_backward.default: _hard_sigmoid_back,
    aten.hardswish.default: _hard_swish,
    aten.hardswish_backward.default: _hard_swish_back,
    aten.celu.default: lambda x, alpha=1: aten.elu(x, alpha, 1, 1 / alpha),
    aten.pow.Scalar: _power_of,
    aten.mish.default: _mish,
    aten.mish_backward.default: _mish_back,
    aten._prelu_kernel.default: _prelu,
    aten._prelu_kernel_backward.default: _prelu_back,
    aten.logsumexp.default: _log_sum_exp,
    aten.count_nonzero.default: _count,
    aten.count_nonzero.dim_IntList: _count,
    aten.aminmax.default: _least_and_most,
    aten.kthvalue.default: _in_order,
    aten.median.dim: _median,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.log_sigmoid_backward.default: _log_sigmoid_back,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    aten.repeat.default: _repeat,
}
"""What gives the same as an operator; None, and the operator is to be called."""
