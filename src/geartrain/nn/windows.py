"""Convolutions, pools and norms of groups, told by simpler operators that there are steps for.

    x (n, c, l)  ─►  windows (n, p, c k): entries of x at places that are known  ─►  a product
    x (n, c, l)  ─►  windows (n, c, p, k)                                        ─►  most, or mean

What is around x is zero: one entry more, behind its own. That is for C: torch's own operators take
less than these by torch, and where rows or their entries are many, than C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

MOST_ENTRIES: Final = 1 << 13
"""Entries of the windows of a row that are worth their memory, which torch's own kernels need not:
of more, these take less even for a few rows."""

_Sizes: TypeAlias = int | Sequence[int]
_Axis: TypeAlias = tuple[int, int, int, int, int, int]
"""Entries, those of a window, how far windows are apart, and entries of one; zeros before and
after."""


def _each(value: _Sizes, axes: int) -> tuple[int, ...]:
    """One for each axis."""
    some = (value,) if isinstance(value, int) else tuple(value)
    return some * axes if len(some) == 1 else some


def _axes(
    x: Tensor, kernel: _Sizes, stride: _Sizes, dilation: _Sizes, padding: _Sizes | str
) -> tuple[_Axis, ...]:
    """The last axes of x, of which windows are made."""
    n = x.ndim - 2
    kernel, stride, dilation = (_each(value, n) for value in (kernel, stride, dilation))
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = [(each // 2, each - each // 2) for each in total]
    else:
        before = (0,) * n if isinstance(padding, str) else _each(padding, n)
        sides = [(each, each) for each in before]
    given = zip(x.shape[2:], kernel, stride, dilation, sides, strict=True)
    return tuple([(size, k, s, d, *side) for size, k, s, d, side in given])


def _places(axes: tuple[_Axis, ...]) -> list[int]:
    """How many windows there are along each axis."""
    return [(n + b + a - d * (k - 1) - 1) // s + 1 for n, k, s, d, b, a in axes]


@lru_cache(maxsize=256)
def _plane(axes: tuple[_Axis, ...]) -> NDArray[np.int64] | None:
    """Where entries of windows are among those of all axes, ``(p, k)``; -1: around them."""
    found = np.zeros((1, 1), np.int64)
    for many, (size, kernel, stride, dilation, before, _) in zip(_places(axes), axes, strict=True):
        if many < 1 or found.size * many * kernel > MOST_ENTRIES:
            return None
        at = np.arange(many)[:, None] * stride + np.arange(kernel) * dilation - before
        at[at >= size] = -1
        both, one = found[:, None, :, None], at[None, :, None, :]
        all_ = np.where((both < 0) | (one < 0), -1, both * size + one)
        found = all_.reshape(found.shape[0] * many, -1)
    return found


def _may(x: Tensor) -> bool:
    """Whether its rows may have axes of which C knows."""
    return x.is_cpu and x.ndim > 2 and x.is_floating_point()


def _windows(x: Tensor, axes: tuple[_Axis, ...], *, most: bool = False) -> NDArray[np.int64] | None:
    """Where entries of windows are in a row of x, ``(c, p, k)``; -1: around it, or, if the most of
    a window is asked for, another of the window. None: there are too many."""
    plane = _plane(axes)
    if plane is None or plane.size * x.shape[1] > MOST_ENTRIES:
        return None
    if most:
        first = np.take_along_axis(plane, (plane >= 0).argmax(1)[:, None], 1)
        plane = np.where(plane < 0, first, plane)
        if (plane < 0).any():
            return None
    channels = np.arange(x.shape[1])[:, None, None] * math.prod(x.shape[2:])
    return np.where(plane < 0, -1, channels + plane)


def lifted(x: NDArray[Any]) -> Tensor:
    """A tensor that the code makes, and nobody has."""
    found: Tensor = torch.ops.aten.lift_fresh(torch.from_numpy(x.copy()))
    return found


def taken(x: Tensor, places: NDArray[np.int64]) -> Tensor:
    """Entries of the rows of x at these places, -1: zero; ``(n, *places.shape)``."""
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    width, at = flat.shape[1], places.ravel()
    if not np.array_equal(at, np.arange(width)):
        if at.min(initial=0) < 0:
            flat = torch.cat([flat, flat.new_zeros((x.shape[0], 1))], 1)
            at = np.where(at < 0, width, at)
        flat = flat.index_select(1, lifted(at))
    return flat.view(x.shape[0], *places.shape)


def put_back(g: Tensor, places: NDArray[np.int64], shape: Sequence[int]) -> Tensor:
    """Of nothing, with what comes of rows added up at these places of a row, -1: nowhere."""
    width, at = math.prod(shape[1:]), places.ravel()
    beyond = at.min(initial=0) < 0
    zeros = g.new_zeros((g.shape[0], width + beyond))
    flat = g.reshape(g.shape[0], at.size)
    found = zeros.index_add(1, lifted(np.where(at < 0, width, at)), flat)
    return (found[:, :width] if beyond else found).view(g.shape[0], *shape[1:])


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _Sizes = 1,
    padding: _Sizes | str = 0,
    dilation: _Sizes = 1,
    groups: int = 1,
) -> Tensor | None:
    if not _may(x) or x.ndim != weight.ndim or groups != 1 or x.shape[1] != weight.shape[1]:
        return None
    axes = _axes(x, weight.shape[2:], stride, dilation, padding)
    places = _windows(x, axes)
    if places is None:
        return None
    rows = taken(x, places.transpose(1, 0, 2)).flatten(2)
    found = functional.linear(rows, weight.flatten(1), bias).transpose(1, 2)
    return found.reshape(x.shape[0], weight.shape[0], *_places(axes))


def _most(
    x: Tensor,
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    padding: _Sizes = 0,
    dilation: _Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    if not _may(x) or ceil_mode or return_indices:
        return None
    axes = _axes(x, kernel_size, stride or kernel_size, dilation, padding)
    return _pooled(x, axes, most=True)


def _mean(
    x: Tensor,
    kernel_size: _Sizes,
    stride: _Sizes | None = None,
    padding: _Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    if not _may(x) or ceil_mode or divisor_override is not None:
        return None
    if not count_include_pad and any(_each(padding, 1)):
        return None
    return _pooled(x, _axes(x, kernel_size, stride or kernel_size, 1, padding), most=False)


def _adaptive_most(x: Tensor, output_size: Any, return_indices: bool = False) -> Tensor | None:
    axes = None if return_indices else _even(x, output_size)
    return None if axes is None else _pooled(x, axes, most=True)


def _adaptive_mean(x: Tensor, output_size: Any) -> Tensor | None:
    axes = _even(x, output_size)
    return None if axes is None else _pooled(x, axes, most=False)


def _even(x: Tensor, output: Any) -> tuple[_Axis, ...] | None:
    """Axes of which so many windows are side by side; None: their sizes do not divide."""
    if not _may(x):
        return None
    given = output if isinstance(output, (tuple, list)) else [output] * (x.ndim - 2)
    sizes = x.shape[2:]
    wanted = [n if many is None else many for many, n in zip(given, sizes, strict=True)]
    if any(many < 1 or n % many for many, n in zip(wanted, sizes, strict=True)):
        return None
    kernel = [n // many for many, n in zip(wanted, sizes, strict=True)]
    return _axes(x, kernel, kernel, 1, 0)


def _pooled(x: Tensor, axes: tuple[_Axis, ...], *, most: bool) -> Tensor | None:
    places = _windows(x, axes, most=most)
    if places is None:
        return None
    windows = taken(x, places)
    found = windows.max(-1).values if most else windows.mean(-1)
    return found.view(*x.shape[:2], *_places(axes))


def _unfolded(
    x: Tensor, kernel_size: _Sizes, dilation: _Sizes = 1, padding: _Sizes = 0, stride: _Sizes = 1
) -> Tensor | None:
    """As ``functional.unfold``."""
    if not _may(x) or x.ndim != 4:
        return None
    places = _windows(x, _axes(x, kernel_size, stride, dilation, padding))
    return None if places is None else taken(x, places.transpose(0, 2, 1)).flatten(1, 2)


def _slid(x: Tensor, dimension: int, size: int, step: int) -> Tensor | None:
    """As ``Tensor.unfold``."""
    axis = dimension % x.ndim - 1
    if not _may(x.unsqueeze(-1)) or axis < 0 or not 0 < size <= x.shape[axis + 1]:
        return None
    places = np.arange(math.prod(x.shape[1:])).reshape(x.shape[1:])
    slid = np.lib.stride_tricks.sliding_window_view(places, size, axis)
    some = slid[(slice(None),) * axis + (slice(None, None, step),)]
    return None if some.size > MOST_ENTRIES else taken(x, some)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """The norm of layers, of the entries of each group, and then a scale for each channel."""
    if x.ndim < 2 or not _may(x.flatten(1)[..., None]) or x.shape[1] % num_groups:
        return None
    groups = x.reshape(x.shape[0], num_groups, -1)
    found = functional.layer_norm(groups, groups.shape[-1:], eps=eps).view(x.shape)
    channels = -1, *[1] * (x.ndim - 2)
    found = found if weight is None else found * weight.view(channels)
    return found if bias is None else found + bias.view(channels)


WINDOWS: Final[dict[Any, Callable[..., Any]]] = {
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.max_pool1d: _most,
    torch.max_pool2d: _most,
    functional.max_pool1d: _most,
    functional.max_pool2d: _most,
    functional.avg_pool1d: _mean,
    functional.avg_pool2d: _mean,
    functional.adaptive_max_pool1d: _adaptive_most,
    functional.adaptive_max_pool2d: _adaptive_most,
    functional.adaptive_avg_pool1d: _adaptive_mean,
    functional.adaptive_avg_pool2d: _adaptive_mean,
    functional.unfold: _unfolded,
    Tensor.unfold: _slid,
    functional.group_norm: _group_norm,
}
"""What gives the same as a function of torch, where C takes it; None, and it is that function's."""
