"""Squared distances of all pairs of members of a row, as one step in C.

    ((x[:, :, None] - y[:, None]) ** 2).sum(3)   ─►  no difference is written down

That is so where nobody else reads what is in between: the way back of distances wants differences.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import fx

from geartrain.derived.steps.places import Like, Places, Refused, like_of
from geartrain.native.fused import Op

aten = torch.ops.aten


def of_distances(x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What a sum is of the squared differences of: ``(..., m, 1, d)``, and ``(..., 1, p, d)``."""
    args: Any = x.args
    like = _rows(x)
    if x.target is not aten.sum.dim_IntList or x.kwargs or like is None or len(args) < 2:
        return None
    difference = _squared(args[0])
    if difference is None or _rows(difference) is None:
        return None
    tail = like_of(difference).tail
    if len(tail) < 3 or list(args[1]) not in ([-1], [len(tail)]):
        return None
    a, b = cast("tuple[fx.Node, fx.Node]", difference.args)
    shapes = (*tail[:-2], 1, tail[-1]), (*tail[:-3], 1, *tail[-2:])
    for pair in ((a, b), (b, a)):
        if tuple(None if (one := _rows(y)) is None else one.tail for y in pair) == shapes:
            return pair
    return None


def _squared(x: Any) -> fx.Node | None:
    """The difference that it is the square of, if neither is read by others."""
    if not isinstance(x, fx.Node) or len(x.users) != 1 or x.kwargs:
        return None
    inner: Any = x.args[0] if x.args else None
    squares = x.target is aten.pow.Tensor_Scalar and x.args[1] == 2
    squares = squares or (x.target is aten.mul.Tensor and x.args[1] is inner)
    if not squares or not isinstance(inner, fx.Node) or inner.kwargs:
        return None
    two = len(inner.args) == 2 and all(isinstance(y, fx.Node) for y in inner.args)
    return inner if inner.target is aten.sub.Tensor and two and len(inner.users) == 1 else None


def _rows(x: fx.Node) -> Like | None:
    like = x.meta.get("like")
    if not isinstance(like, Like) or not like.rows or like.merged:
        return None
    return like if like.dtype.is_floating_point else None


def is_within_distances(x: fx.Node) -> bool:
    """Whether it is nothing but what lies between a sum of distances and what these are of."""
    if x.target not in _BETWEEN or len(x.users) != 1:
        return False
    (reader,) = x.users
    if reader.target is aten.sum.dim_IntList:
        return of_distances(reader) is not None
    return reader.target in _SQUARES and is_within_distances(reader)


_SQUARES = (aten.pow.Tensor_Scalar, aten.mul.Tensor)
_BETWEEN = (*_SQUARES, aten.sub.Tensor)


def write_distances(places: Places, x: fx.Node, pair: tuple[fx.Node, fx.Node]) -> None:
    """Of a sum that is of distances."""
    a, b = (places.value(y) for y in pair)
    *_, many, _, size = a.like.tail
    inner = b.like.tail[-2]
    if not size or a.like.dtype is not places.dtype or b.like.dtype is not places.dtype:
        raise Refused
    out = places.values[x] = places.out(x)
    if out.like.width != math.prod((*a.like.tail[:-2], inner)):
        raise Refused
    places.add(Op.DISTANCES, out, a.at, b.at, many=many, inner=inner, number=size)
