"""Steps that work entry by entry, whose sources may have fewer entries than what is made of them.

    (n, 3, 1) and (n, 3, 4) ─► (n, 3, 4)      the first is read as if it were as wide

What has one entry for each row is read so by the step itself; else axes are made as long first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from geartrain.derived.steps.places import Like, Places, Refused, Value, like_of
from geartrain.native.fused import At, Op


def step(places: Places, x: fx.Node, op: Op, sources: Sequence[Any], number: float = 0.0) -> None:
    """An element-wise step."""
    like = like_of(x)
    read = [broadcast(places, places.value(y), like) for y in sources]
    if sum(at.one for at in read) > (0 if len(read) == 1 else 1):
        raise Refused
    out = places.out(x)
    places.values[x] = out
    places.add(op, out, *read, number=number)


def broadcast(places: Places, value: Value, like: Like) -> At:
    """Where it is read for a result like this."""
    if not like.rows:
        raise Refused
    tail = value.like.beside(like)
    if tail == like.tail:
        return value.at
    ranks = len(tail) == len(like.tail) or not value.like.rows
    if ranks and math.prod(tail) == 1:
        return replace(value.at, one=like.width > 1)
    return _widened(places, value, tail, like)


def across(places: Places, at: At, like: Like) -> At:
    """Where it is read entry by entry, if it was one for each row."""
    if not at.one:
        return at
    out = places.spare(like)
    places.add(Op.EXPAND, out, replace(at, one=False), width=1, many=like.width, inner=1)
    return out.at


def _widened(places: Places, value: Value, tail: tuple[int, ...], like: Like) -> At:
    """With axes of one entry made as long as they are read."""
    if len(tail) != len(like.tail):
        raise Refused
    out = places.spare(like)
    stretch(places, out, value.at, tail)
    return out.at


def stretch(places: Places, out: Value, at: At, tail: tuple[int, ...]) -> None:
    """Write what lies there, axes of one entry as long as they are in ``out``.

    The last ones first, those that are neighbours at once.
    """
    like = out.like
    wide = [k for k, (a, b) in enumerate(zip(tail, like.tail, strict=True)) if a != b]
    if any(tail[k] != 1 for k in wide):
        raise Refused
    if not wide:  # it is what every row has
        places.add(Op.COPY, out, at)
        return
    first = len(wide) - 1
    while first and wide[first - 1] == wide[first] - 1:
        first -= 1
    begin, end = wide[first], wide[-1] + 1
    many, inner = math.prod(like.tail[begin:end]), math.prod(like.tail[end:])
    rest = (*tail[:begin], *like.tail[begin:])
    to = places.spare(replace(like, tail=rest)) if first else out
    places.add(Op.EXPAND, to, at, width=math.prod(tail), many=many, inner=inner)
    if first:
        stretch(places, out, to.at, rest)
