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
MOST_GROUPS: Final = 8
"""Of channels in a convolution that are each worth a product."""

Sizes: TypeAlias = int | Sequence[int]
Line: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each window along an axis which entries it has, -1: what is around them; as many each."""


def each(value: Sizes, axes: int) -> tuple[int, ...]:
    """One for each axis."""
    some = (value,) if isinstance(value, int) else tuple(value)
    return some * axes if len(some) == 1 else some


@lru_cache(maxsize=256)
def line(size: int, many: int, kernel: int, stride: int, dilation: int, before: int) -> Line | None:
    """So many windows of an axis that has so many entries, and zeros before; None: too many."""
    if many < 1 or many * kernel > MOST_ENTRIES:
        return None
    at = np.arange(many)[:, None] * stride + np.arange(kernel) * dilation - before
    return tuple(map(tuple, np.where((at < 0) | (at >= size), -1, at).tolist()))


def _lines(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes,
    dilation: Sizes,
    padding: Sizes | str,
    *,
    ceil: bool = False,
) -> list[Line] | None:
    """Of the last axes of x; with ``ceil`` the last window may end behind what is around."""
    n = x.ndim - 2
    kernel, stride, dilation = (each(value, n) for value in (kernel, stride, dilation))
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = [(both // 2, both - both // 2) for both in total]
    else:
        before = (0,) * n if isinstance(padding, str) else each(padding, n)
        sides = [(some, some) for some in before]
    found: list[Line] = []
    given = zip(x.shape[2:], kernel, stride, dilation, sides, strict=True)
    for size, k, s, d, (first, last) in given:
        room = size + first + last - d * (k - 1) - 1
        many = (room + s - 1 if ceil else room) // s + 1
        many -= ceil and (many - 1) * s >= size + first
        own = line(size, many, k, s, d, first)
        if own is None:
            return None
        found.append(own)
    return found


def _places(lines: Sequence[Line]) -> list[int]:
    """How many windows there are along each axis."""
    return [len(own) for own in lines]


@lru_cache(maxsize=256)
def _plane(lines: tuple[Line, ...], sizes: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Where entries of windows are among those of all axes, ``(p, k)``; -1: around them."""
    found = np.zeros((1, 1), np.int64)
    for own, size in zip(lines, sizes, strict=True):
        at = np.array(own)
        if found.size * at.size > MOST_ENTRIES:
            return None
        both, one = found[:, None, :, None], at[None, :, None, :]
        all_ = np.where((both < 0) | (one < 0), -1, both * size + one)
        found = all_.reshape(found.shape[0] * at.shape[0], -1)
    return found


def may(x: Tensor) -> bool:
    """Whether its rows may have axes of which C knows."""
    return x.is_cpu and x.ndim > 2 and x.is_floating_point()


def windows_of(
    shape: Sequence[int], lines: Sequence[Line], *, most: bool = False
) -> NDArray[np.int64] | None:
    """Where entries of windows are in a row, ``(c, p, k)``; -1: around it, or, if the most of
    a window is asked for, another of the window. None: there are too many."""
    plane = _plane(tuple(lines), tuple(shape[2:]))
    if plane is None or plane.size * shape[1] > MOST_ENTRIES:
        return None
    if most:
        first = np.take_along_axis(plane, (plane >= 0).argmax(1)[:, None], 1)
        plane = np.where(plane < 0, first, plane)
        if (plane < 0).any():
            return None
    channels = np.arange(shape[1])[:, None, None] * math.prod(shape[2:])
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


def numbers(x: Tensor, given: NDArray[np.float64]) -> Tensor | None:
    """Numbers that the code makes, of x's dtype."""
    kind = {torch.float32: np.float32, torch.float64: np.float64}.get(x.dtype)
    return None if kind is None else lifted(given.astype(kind))


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor | None:
    if not may(x) or x.ndim != weight.ndim or x.shape[1] != weight.shape[1] * groups:
        return None
    lines = _lines(x, weight.shape[2:], stride, dilation, padding)
    places = None if lines is None else windows_of(x.shape, lines)
    if lines is None or places is None:
        return None
    if groups > 1:
        found = _in_groups(x, places, weight, groups)
        if found is None:
            return None
        found = found if bias is None else found + bias.unsqueeze(1)
    else:
        rows = taken(x, places.transpose(1, 0, 2)).flatten(2)
        found = functional.linear(rows, weight.flatten(1), bias).transpose(1, 2)
    return found.reshape(x.shape[0], weight.shape[0], *_places(lines))


def _in_groups(x: Tensor, places: NDArray[np.int64], weight: Tensor, groups: int) -> Tensor | None:
    """Each of some channels; of one alone entry by entry, as a product has little to do there."""
    (many, windows, size), out = places.shape, weight.shape[0] // groups
    if many == groups and out * places.size <= MOST_ENTRIES:
        some = taken(x, places).view(-1, groups, 1, windows, size)
        return (some * weight.view(groups, out, 1, size)).sum(-1).flatten(1, 2)
    if groups > MOST_GROUPS:
        return None
    each_ = places.reshape(groups, -1, windows, size).transpose(0, 2, 1, 3)
    weights = torch.split(weight.flatten(1), out)
    found = [
        functional.linear(taken(x, own).flatten(2), part)
        for own, part in zip(each_, weights, strict=True)
    ]
    return torch.cat(found, 2).transpose(1, 2)


def _most(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    if not may(x) or return_indices:
        return None
    lines = _lines(x, kernel_size, stride or kernel_size, dilation, padding, ceil=ceil_mode)
    return None if lines is None else _pooled(x, lines)


def _mean(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    if not may(x):
        return None
    lines = _lines(x, kernel_size, stride or kernel_size, 1, padding, ceil=ceil_mode)
    if lines is None:
        return None
    if divisor_override is not None:
        return _pooled(x, lines, [[1 / divisor_override]])
    n, counts = x.ndim - 2, []
    given = zip(
        *(x.shape[2:], lines),
        *(each(value, n) for value in (kernel_size, stride or kernel_size, padding)),
        strict=True,
    )
    for size, own, k, s, around in given:
        begin = np.arange(len(own)) * s - around
        first, last = (-around, size + around) if count_include_pad else (0, size)
        counts.append(np.minimum(begin + k, last) - np.maximum(begin, first))
    return _pooled(x, lines, [1 / np.maximum(some, 1) for some in counts])


def _adaptive_most(x: Tensor, output_size: Any, return_indices: bool = False) -> Tensor | None:
    lines = None if return_indices else _even(x, output_size)
    return None if lines is None else _pooled(x, lines)


def adaptive_mean(x: Tensor, output_size: Any) -> Tensor | None:
    lines = _even(x, output_size)
    if lines is None:
        return None
    return _pooled(x, lines, [1 / (np.array(own) >= 0).sum(1) for own in lines])


def _even(x: Tensor, output: Any) -> list[Line] | None:
    """Of so many windows, as even as may be."""
    if not may(x):
        return None
    given = output if isinstance(output, (tuple, list)) else [output] * (x.ndim - 2)
    sizes = x.shape[2:]
    wanted = [n if many is None else many for many, n in zip(given, sizes, strict=True)]
    if min(wanted) < 1 or max(*wanted, *sizes) > MOST_ENTRIES:
        return None
    found = []
    for many, n in zip(wanted, sizes, strict=True):
        some = [range(k * n // many, -(-(k + 1) * n // many)) for k in range(many)]
        most = max(map(len, some))
        found.append(tuple([(*own, *[-1] * (most - len(own))) for own in some]))
    return found


def _pooled(x: Tensor, lines: Sequence[Line], shares: Sequence[Any] | None = None) -> Tensor | None:
    """The most of each window, or the sum of it, each entry as large a share as its axes say."""
    places = windows_of(x.shape, lines, most=shares is None)
    if places is None:
        return None
    windows = taken(x, places)
    if shares is None:
        found = windows.max(-1).values
    else:
        share = np.ones(1)
        for own in shares:
            share = np.multiply.outer(share, own).ravel()
        if (share == 1 / windows.shape[-1]).all():
            found = windows.mean(-1)
        elif (scale := numbers(x, share)) is not None:
            found = windows.sum(-1) * scale
        else:
            return None
    return found.view(*x.shape[:2], *_places(lines))


def _norm_pooled(
    x: Tensor,
    norm_type: float,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    ceil_mode: bool = False,
) -> Tensor | None:
    """The root of a sum of powers."""
    if not math.isfinite(norm_type):
        return None
    mean = _mean(x**norm_type, kernel_size, stride, 0, ceil_mode)
    many = math.prod(each(kernel_size, x.ndim - 2))
    if mean is None:
        return None
    return (torch.sign(mean) * torch.relu(mean.abs()) * many) ** (1 / norm_type)


def _unfolded(
    x: Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Tensor | None:
    """As ``functional.unfold``."""
    if not may(x) or x.ndim != 4:
        return None
    lines = _lines(x, kernel_size, stride, dilation, padding)
    places = None if lines is None else windows_of(x.shape, lines)
    return None if places is None else taken(x, places.transpose(0, 2, 1)).flatten(1, 2)


def _slid(x: Tensor, dimension: int, size: int, step: int) -> Tensor | None:
    """As ``Tensor.unfold``."""
    axis = dimension % x.ndim - 1
    if not may(x.unsqueeze(-1)) or axis < 0 or not 0 < size <= x.shape[axis + 1]:
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
    if x.ndim < 2 or not may(x.flatten(1)[..., None]) or x.shape[1] % num_groups:
        return None
    groups = x.reshape(x.shape[0], num_groups, -1)
    found = functional.layer_norm(groups, groups.shape[-1:], eps=eps).view(x.shape)
    channels = -1, *[1] * (x.ndim - 2)
    found = found if weight is None else found * weight.view(channels)
    return found if bias is None else found + bias.view(channels)


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """The norm of each channel by itself."""
    kept = running_mean is not None or running_var is not None
    if kept or not use_input_stats or x.ndim < 3 or math.prod(x.shape[2:]) < 2:
        return None
    return _group_norm(x, x.shape[1], weight, bias, eps)


def _of_axes(function: Callable[..., Any], *names: str) -> dict[Any, Callable[..., Any]]:
    """For functions of torch with one, two and three axes, wherever they are."""
    found = {}
    for name in names:
        for k in (1, 2, 3):
            for space in (torch, functional):
                if (own := getattr(space, f"{name}{k}d", None)) is not None:
                    found[own] = function
    return found


WINDOWS: Final[dict[Any, Callable[..., Any]]] = {
    **_of_axes(_convolution, "conv"),
    **_of_axes(_most, "max_pool"),
    **_of_axes(_mean, "avg_pool"),
    **_of_axes(_norm_pooled, "lp_pool"),
    **_of_axes(_adaptive_most, "adaptive_max_pool"),
    **_of_axes(adaptive_mean, "adaptive_avg_pool"),
    functional.unfold: _unfolded,
    Tensor.unfold: _slid,
    functional.group_norm: _group_norm,
    functional.instance_norm: _instance_norm,
}
"""What gives the same as a function of torch, where C takes it; None, and it is that function's."""
