"""Parts of rows along any axis as steps in C, and what is put together of them.

Along the first axis of a row a part is a place; along another it is pieces, which are copied.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from geartrain.native.fused import Op
from geartrain.nn.places import Like, Places, Refused, Value, like_of


def axis_of(like: Like, dim: int) -> int:
    """Where an axis of a tensor is in the shape of its rows."""
    at = dim % (len(like.tail) + 1) - 1
    if not like.rows or at < 0:
        raise Refused
    return at


def part(
    places: Places, x: fx.Node, source: Value, at: int, first: int, like: Like | None = None
) -> Value:
    """What x is, or is like: of an axis so many entries as that has there, from the first on."""
    tail, many = source.like.tail, (like or like_of(x)).tail[at]
    if not 0 <= first <= first + many <= tail[at]:
        raise Refused
    part_tail = (*tail[:at], many, *tail[at + 1 :])
    inner = math.prod(tail[at + 1 :])
    if math.prod(tail[:at]) == 1:
        return source.part(first * inner, part_tail)
    if source.whole:
        raise Refused
    out = places.out(x)
    _copy(places, out, source.part(first * inner, part_tail), tail[at] * inner, many * inner)
    return out


def put(places: Places, out: Value, piece: Value, at: int, first: int) -> None:
    """Write a part where it belongs along an axis, from the first entry on."""
    tail, mine = out.like.tail, piece.like.tail
    others = mine[:at] + mine[at + 1 :] == tail[:at] + tail[at + 1 :]
    if not piece.like.rows or len(mine) != len(tail) or not others:
        raise Refused
    if not 0 <= first <= first + mine[at] <= tail[at]:
        raise Refused
    inner = math.prod(tail[at + 1 :])
    there = out.part(first * inner, mine)
    if math.prod(tail[:at]) == 1:
        places.copy(piece, there)
    else:
        _copy(places, there, piece, mine[at] * inner, tail[at] * inner)


def _copy(places: Places, out: Value, piece: Value, apart: int, there: int) -> None:
    """Pieces that lie so far apart, and are to lie so far from one another there."""
    width = piece.like.width
    if width:
        size = min(apart, there)
        places.add(Op.PIECES, out, piece.at, width=width, number=size, many=apart, inner=there)


def flip(places: Places, x: fx.Node) -> None:
    """Some axes backwards, one after the other."""
    args: Any = x.args
    value = places.value(args[0])
    axes = [axis_of(value.like, dim) for dim in args[1]]
    for k, at in enumerate(axes):
        out = places.out(x) if k == len(axes) - 1 else places.spare(value.like)
        tail = value.like.tail
        places.add(Op.FLIP, out, value.at, many=tail[at], inner=math.prod(tail[at + 1 :]))
        value = out
    places.values[x] = value


def cumulate(places: Places, x: fx.Node) -> None:
    """Sums along an axis, so far."""
    args: Any = x.args
    source = places.value(args[0])
    at = axis_of(source.like, args[1])
    if x.kwargs or not source.like.width:
        raise Refused
    tail = source.like.tail
    out = places.values[x] = places.out(x)
    places.add(Op.CUMULATE, out, source.at, many=tail[at], inner=math.prod(tail[at + 1 :]))
