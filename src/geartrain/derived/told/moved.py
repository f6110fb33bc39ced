"""Operators that move entries of rows to places that are known, told by taking entries there.

    x[:, ::2]            ─►  those of an axis by number              back: added up there
    z[:, 1:3] = y        ─►  a cat, or entries of a cat
    x.diagonal(0, 1, 2)  ─►  entries of rows by number, -1: zero     back: added up there

As in ``simpler.py``, an operator and its gradient each by themselves. Numbers are told where the
first axis, that of the rows, stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.derived.told.windows import lifted, put_back, taken

aten = torch.ops.aten
Places = NDArray[np.int64]


def numbers_of(x: Tensor) -> Places:
    """Of each entry of a row its number."""
    return np.arange(math.prod(x.shape[1:])).reshape(x.shape[1:])


def _chosen(x: Tensor, dim: int, which: Any) -> Tensor:
    return x.index_select(dim, lifted(np.ascontiguousarray(which)))


def _axis(x: Tensor, dim: int) -> int:
    """Which axis behind that of rows; -1: it is that of rows."""
    return dim % max(x.ndim, 1) - 1


# Slices with gaps, and what is written into slices.


def _slice(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    if step == 1 or _axis(x, dim) < 0:
        return None
    return _chosen(x, dim, np.arange(x.shape[dim])[start:end:step])


def _slice_back(
    g: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor | None:
    if step == 1 or _axis(g, dim) < 0:
        return None
    which = np.arange(sizes[dim])[start:end:step]
    return g.new_zeros(sizes).index_add(dim, lifted(which), g)


def _slice_scatter(
    x: Tensor,
    into: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor | None:
    if _axis(x, dim) < 0:
        return None
    size = x.shape[dim]
    which = np.arange(size)[start:end:step]
    if not which.size:
        return x.clone()
    if step != 1:
        order = np.arange(size)
        order[which] = np.arange(size, size + which.size)
        return _chosen(torch.cat([x, into], dim), dim, order)
    around = [(0, int(which[0])), (int(which[-1]) + 1, size)]
    before, after = (aten.slice(x, dim, a, b) for a, b in around)
    return torch.cat([y for y in (before, into, after) if y.shape[dim]], dim)


def _select_scatter(x: Tensor, into: Tensor, dim: int, index: int) -> Tensor | None:
    if _axis(x, dim) < 0:
        return None
    dim, index = dim % x.ndim, index % x.shape[dim]
    found: Tensor = aten.slice_scatter(x, into.unsqueeze(dim), dim, index, index + 1)
    return found


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor | None:
    return source.expand(x.shape) if source.dtype is x.dtype else None


def _fill(x: Tensor, value: Tensor) -> Tensor | None:
    return value.expand(x.shape) if value.dtype is x.dtype else None


def _strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> tuple[Tensor, Places] | None:
    """All of each row side by side, and numbers of entries that lie so far apart in it.

    None: they are not as many of each row.
    """
    n = size[0] if size else 0
    if not n or not x.is_contiguous() or stride[0] * n != x.numel():
        return None
    found = np.full(tuple(size[1:]), offset)
    for k, (many, apart) in enumerate(zip(size[1:], stride[1:], strict=True)):
        found += (np.arange(many) * apart).reshape(-1, *[1] * (len(size) - k - 2))
    within = found.size and found.min() >= 0 and found.max() < stride[0]
    return (x.reshape(n, stride[0]), found) if within else None


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor | None:
    some = _strided(x, size, stride, storage_offset or 0)
    return None if some is None else taken(*some)


def _into_strided(
    x: Tensor,
    into: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor | None:
    some = _strided(x, size, stride, storage_offset or 0)
    if some is None or np.unique(some[1]).size < some[1].size:
        return None
    (rows, places), (n, width) = some, some[0].shape
    order = np.arange(width)
    order[places.ravel()] = np.arange(width, width + places.size)
    return taken(torch.cat([rows, into.reshape(n, places.size)], 1), order).reshape(x.shape)


def _where_put(
    x: Tensor, index: Sequence[Tensor | None], value: Tensor, accumulate: bool = False
) -> Tensor | None:
    """One number where a mask of all entries is."""
    mask = index[0]
    if len(index) != 1 or mask is None or mask.dtype is not torch.bool or accumulate:
        return None
    if mask.shape != x.shape or value.numel() != 1 or value.dtype is not x.dtype:
        return None
    return torch.where(mask, value, x)


def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
    if _axis(x, dim) < 0 or not source.numel():
        return None
    size, many = x.shape[dim], source.shape[dim]
    order = torch.arange(size).index_copy(0, index, torch.arange(size, size + many))
    return torch.cat([x, source], dim).index_select(dim, order)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor | None:
    axis = _axis(x, dim)
    if axis < 0:
        return None
    mask = torch.zeros(x.shape[dim], dtype=torch.bool).index_fill(0, index, 1)
    return x.masked_fill(mask.view(-1, *[1] * (x.ndim - axis - 2)), value)


# Parts of matrices.


def _triangle(x: Tensor, diagonal: int) -> NDArray[np.bool_]:
    """Which entries of a matrix are on a diagonal, or below it."""
    return np.tri(x.shape[-2], x.shape[-1], diagonal, dtype=np.bool_)


def _below(x: Tensor, diagonal: int = 0) -> Tensor | None:
    if x.ndim < 3:
        return None
    return x.masked_fill(lifted(~_triangle(x, diagonal)), 0)


def _above(x: Tensor, diagonal: int = 0) -> Tensor | None:
    if x.ndim < 3:
        return None
    return x.masked_fill(lifted(_triangle(x, diagonal - 1)), 0)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor | None:
    one, other = _axis(x, dim1), _axis(x, dim2)
    if min(one, other) < 0:
        return None
    return taken(x, np.diagonal(numbers_of(x), offset, one, other))


def _diagonal_back(
    g: Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Tensor | None:
    one, other = (dim % len(sizes) - 1 for dim in (dim1, dim2))
    if min(one, other) < 0:
        return None
    whole = np.arange(math.prod(sizes[1:])).reshape(sizes[1:])
    return put_back(g, np.diagonal(whole, offset, one, other), sizes)


def _as_diagonal(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor | None:
    one, other = (dim % (x.ndim + 1) - 1 for dim in (dim1, dim2))
    if x.ndim < 2 or min(one, other) < 0:
        return None
    many = x.shape[-1]
    whole = np.full((*x.shape[1:-1], *[many + abs(offset)] * 2), -1)
    first = np.arange(many)
    whole[..., first + max(-offset, 0), first + max(offset, 0)] = numbers_of(x)
    return taken(x, np.moveaxis(whole, (-2, -1), (one, other)))


def _turned_about(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor | None:
    one, other = (_axis(x, dim) for dim in dims)
    return None if min(one, other) < 0 else taken(x, np.rot90(numbers_of(x), k, (one, other)))


def _cross(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor | None:
    if _axis(x, dim) < 0 or x.shape[dim] != 3 or y.shape[dim] != 3:
        return None
    one, other = np.array([1, 2, 0]), np.array([2, 0, 1])
    return _chosen(x, dim, one) * _chosen(y, dim, other) - _chosen(x, dim, other) * _chosen(
        y, dim, one
    )


# Channels and what is around planes.


def _shuffled(x: Tensor, upscale_factor: int) -> Tensor | None:
    if x.ndim != 4:
        return None
    many, high, wide = x.shape[1:]
    r = upscale_factor
    some = numbers_of(x).reshape(many // (r * r), r, r, high, wide).transpose(0, 3, 1, 4, 2)
    return taken(x, some.reshape(-1, high * r, wide * r))


def _unshuffled(x: Tensor, downscale_factor: int) -> Tensor | None:
    if x.ndim != 4:
        return None
    many, high, wide = x.shape[1:]
    r = downscale_factor
    some = numbers_of(x).reshape(many, high // r, r, wide // r, r).transpose(0, 2, 4, 1, 3)
    return taken(x, some.reshape(-1, high // r, wide // r))


def _dealt(x: Tensor, groups: int) -> Tensor | None:
    if x.ndim < 3:
        return None
    many, *rest = x.shape[1:]
    some = numbers_of(x).reshape(groups, many // groups, *rest).swapaxes(0, 1)
    return taken(x, some.reshape(many, *rest))


def around(shape: Sequence[int], pads: Sequence[int], how: Any) -> Places | None:
    """Numbers of entries of rows, and of those that are beside them on each side of last axes.

    Args:
        shape: Of all rows.
        pads: Before and after each, the last first; None comes of a number below zero.
        how: As of ``numpy.pad``.
    """
    sides = list(zip(pads[::2], pads[1::2], strict=True))
    whole = np.arange(math.prod(shape[1:])).reshape(shape[1:])
    if min(pads, default=0) < 0 or len(sides) > whole.ndim:
        return None
    each = [(0, 0)] * (whole.ndim - len(sides)) + sides[::-1]
    found: Places = np.pad(whole, each, mode=how)
    return found


def _with_around(how: str) -> Callable[..., Tensor | None]:
    def way(x: Tensor, padding: Sequence[int]) -> Tensor | None:
        places = around(x.shape, padding, how) if x.ndim == len(padding) // 2 + 2 else None
        return None if places is None else taken(x, places)

    return way


def _without_around(how: str) -> Callable[..., Tensor | None]:
    def way(g: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor | None:
        places = around(x.shape, padding, how) if x.ndim == len(padding) // 2 + 2 else None
        return None if places is None else put_back(g, places, x.shape)

    return way


# Which of known places.


def _bucket(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor | None:
    if out_int32 or not x.is_floating_point() or boundaries.dtype is not x.dtype:
        return None
    each = x.unsqueeze(-1)
    after = boundaries > each if right else boundaries >= each
    return after.logical_not().sum(-1)


def _place_among(
    ordered: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor | None:
    if sorter is not None:
        return None
    ordered = ordered if ordered.ndim == 1 else ordered.unsqueeze(-2)
    return _bucket(x, ordered, out_int32=out_int32, right=right or side == "right")


def _is_among(
    x: Tensor, others: Tensor, *, assume_unique: bool = False, invert: bool = False
) -> Tensor | None:
    if others.ndim != 1 or not others.numel():
        return None
    found = (x.unsqueeze(-1) == others).any(-1)
    return found.logical_not() if invert else found


def _put_number(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor | None:
    """By number; which are out of range, the step of the mask says."""
    if _axis(x, dim) < 0 or index.shape[0] != x.shape[0] or index.ndim != x.ndim:
        return None
    ones = torch.full(index.shape, 1, dtype=x.dtype, device=x.device)
    mask = x.new_zeros(x.shape).scatter_add(dim, index, ones)
    return x.masked_fill(mask > 0, value)


LAID: Final = {
    aten.slice.Tensor,
    aten.diagonal.default,
    aten.as_strided.default,
    aten.as_strided_scatter.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.copy.default,
    aten.fill.Tensor,
}
"""Those of which autograd asks how their results lie: views, and what is written into such."""
_PADS: Final[Mapping[str, str]] = {"reflection": "reflect", "replication": "edge"}
MOVED: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_back,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _into_strided,
    aten.copy.default: _copy,
    aten.fill.Tensor: _fill,
    aten.index_put.default: _where_put,
    aten.index_copy.default: _index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.tril.default: _below,
    aten.triu.default: _above,
    aten.diagonal.default: _diagonal,
    aten.diagonal_backward.default: _diagonal_back,
    aten.diag_embed.default: _as_diagonal,
    aten.rot90.default: _turned_about,
    aten.linalg_cross.default: _cross,
    aten.pixel_shuffle.default: _shuffled,
    aten.pixel_unshuffle.default: _unshuffled,
    aten.channel_shuffle.default: _dealt,
    **{
        getattr(aten, f"{name}_pad{k}d").default: _with_around(how)
        for name, how in _PADS.items()
        for k in (1, 2, 3)
    },
    **{
        getattr(aten, f"{name}_pad{k}d_backward").default: _without_around(how)
        for name, how in _PADS.items()
        for k in (1, 2, 3)
    },
    aten.bucketize.Tensor: _bucket,
    aten.searchsorted.Tensor: _place_among,
    aten.isin.Tensor_Tensor: _is_among,
    aten.scatter.value: _put_number,
}
"""As ``SIMPLER``."""
