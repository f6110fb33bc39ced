"""Rows that grow: transposed convolutions, folds, images of another size, what goes around.

    x (n, c, l)  ─►  a product (n, l, c' k), added up at places that are known   transposed
    x (n, c, l)  ─►  entries at such places, each with a share                   interpolated

As in ``windows.py``: for C, by places that are the same for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from geartrain.derived.told.moved import around, numbers_of
from geartrain.derived.told.windows import (
    MOST_ENTRIES,
    MOST_GROUPS,
    Line,
    Sizes,
    adaptive_mean,
    each,
    line,
    may,
    numbers,
    put_back,
    taken,
    windows_of,
)


def _spread(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor | None:
    """A transposed convolution."""
    n, (many, out, *kernel) = x.ndim - 2, weight.shape
    if not may(x) or x.ndim != weight.ndim or x.shape[1] != many or groups > MOST_GROUPS:
        return None
    lines, sizes = [], []
    options = (each(value, n) for value in (stride, padding, output_padding, dilation))
    for size, k, s, pad, more, d in zip(x.shape[2:], kernel, *options, strict=True):
        sizes.append((size - 1) * s - 2 * pad + d * (k - 1) + more + 1)
        lines.append(line(sizes[-1], size, k, s, d, pad))
    whole = (x.shape[0], out, *sizes)
    known = [own for own in lines if own is not None]
    places = windows_of(whole, known) if len(known) == n else None
    if places is None or min(sizes) < 1:
        return None
    rows = torch.split(x.flatten(2).transpose(1, 2), many // groups, 2)
    weights = torch.split(weight.flatten(1), many // groups)
    found = [
        put_back(part @ own, places.transpose(1, 0, 2), whole)
        for part, own in zip(rows, weights, strict=True)
    ]
    y = found[0] if groups == 1 else torch.cat(found, 1)
    return y if bias is None else y + bias.view(-1, *[1] * n)


def _folded(
    x: Tensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor | None:
    """As ``functional.fold``."""
    if not may(x) or x.ndim != 3:
        return None
    sizes, kernel = each(output_size, 2), each(kernel_size, 2)
    lines = []
    options = (each(value, 2) for value in (dilation, padding, stride))
    for size, k, d, pad, s in zip(sizes, kernel, *options, strict=True):
        lines.append(line(size, (size + 2 * pad - d * (k - 1) - 1) // s + 1, k, s, d, pad))
    known = [own for own in lines if own is not None]
    whole = (x.shape[0], x.shape[1] // math.prod(kernel), *sizes)
    places = windows_of(whole, known) if len(known) == 2 else None
    if places is None or places.size != math.prod(x.shape[1:]):
        return None
    return put_back(x, places.transpose(0, 2, 1), whole)


def _sizes(
    x: Tensor, size: Any, scale_factor: Any, *, forgets: bool
) -> tuple[list[int], list[float]] | None:
    """Of the axes of what is asked for, and how far its entries are apart in x."""
    n, own = x.ndim - 2, x.shape[2:]
    if (size is None) == (scale_factor is None):
        return None
    if size is not None:
        sizes = list(each(size, n))
        return sizes, [had / out for had, out in zip(own, sizes, strict=True)]
    given = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * n
    sizes = [math.floor(had * scale) for had, scale in zip(own, given, strict=True)]
    if forgets and min(sizes) > 0:
        return sizes, [had / out for had, out in zip(own, sizes, strict=True)]
    return sizes, [1 / scale for scale in given]


def _interpolated(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor | None:
    known = may(x) and not antialias and (mode in _HOW or mode == "area")
    some = _sizes(x, size, scale_factor, forgets=bool(recompute_scale_factor)) if known else None
    if some is None or min(some[0]) < 1 or math.prod(some[0]) * x.shape[1] > MOST_ENTRIES:
        return None
    if mode == "area":
        return adaptive_mean(x, some[0])
    kind = np.float64 if x.dtype is torch.float64 else np.float32
    lines, shares = [], np.ones((1, 1))
    for own, out, apart in zip(x.shape[2:], *some, strict=True):
        at, share = _HOW[mode](own, out, kind(apart), bool(align_corners))
        lines.append(tuple(map(tuple, at.tolist())))
        both = shares[:, None, :, None] * share[None, :, None, :]
        shares = both.reshape(len(shares) * out, -1)
    return _shared(x, lines, some[0], shares)


def _shared(
    x: Tensor, lines: Sequence[Line], sizes: Sequence[int], shares: NDArray[np.float64]
) -> Tensor | None:
    """Of each window the sum of its entries, each a share of it."""
    places, scale = windows_of(x.shape, lines), numbers(x, shares)
    if places is None or scale is None:
        return None
    found = taken(x, places)
    found = found.squeeze(-1) if shares.shape[1] == 1 else (found * scale).sum(-1)
    return found.view(*x.shape[:2], *sizes)


_Found = tuple[NDArray[np.int64], NDArray[np.float64]]


def _nearest(own: int, out: int, apart: Any, corners: bool) -> _Found:
    at = np.minimum(np.floor(np.arange(out).astype(apart.dtype) * apart), own - 1)
    return at.astype(np.int64)[:, None], np.ones((out, 1))


def _nearest_middle(own: int, out: int, apart: Any, corners: bool) -> _Found:
    middle = np.arange(out).astype(apart.dtype) + apart.dtype.type(0.5)
    at = np.minimum(np.floor(middle * apart), own - 1)
    return at.astype(np.int64)[:, None], np.ones((out, 1))


def _between(own: int, out: int, apart: Any, corners: bool) -> _Found:
    """Of two neighbours."""
    kind = apart.dtype.type
    if corners:
        at = np.arange(out).astype(kind) * kind((own - 1) / (out - 1) if out > 1 else 0)
    else:
        at = np.maximum((np.arange(out).astype(kind) + kind(0.5)) * apart - kind(0.5), 0)
    first = np.minimum(at.astype(np.int64), own - 1)
    second = np.minimum(first + 1, own - 1)
    share = np.minimum(at - first, 1).astype(np.float64)
    return np.stack([first, second], 1), np.stack([1 - share, share], 1)


_HOW: Final[dict[str, Callable[[int, int, Any, bool], _Found]]] = {
    "nearest": _nearest,
    "nearest-exact": _nearest_middle,
    **dict.fromkeys(("linear", "bilinear", "trilinear"), _between),
}


def _padded(
    x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor | None:
    """What goes around; else it is torch's."""
    if mode != "circular" or not may(x) or len(pad) != 2 * (x.ndim - 2):
        return None
    sides = zip(pad[::2], pad[1::2], reversed(x.shape[2:]), strict=True)
    if any(max(before, after) > size for before, after, size in sides):
        return None
    places = around(x.shape, pad, "wrap")
    return None if places is None else taken(x, places)


def _by_neighbours(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor | None:
    """As ``functional.local_response_norm``."""
    if not may(x) or x.numel() // x.shape[0] * size > MOST_ENTRIES:
        return None
    places = numbers_of(x)
    pads = [(size // 2, (size - 1) // 2), *[(0, 0)] * (x.ndim - 2)]
    wide = np.pad(places, pads, constant_values=-1)
    some = np.lib.stride_tricks.sliding_window_view(wide, size, 0)
    return x / (taken(x * x, some).mean(-1) * alpha + k) ** beta


GROWN: Final[dict[Any, Callable[..., Any]]] = {
    torch.conv_transpose1d: _spread,
    torch.conv_transpose2d: _spread,
    torch.conv_transpose3d: _spread,
    functional.fold: _folded,
    functional.interpolate: _interpolated,
    functional.pad: _padded,
    functional.local_response_norm: _by_neighbours,
}
"""As ``WINDOWS``."""
