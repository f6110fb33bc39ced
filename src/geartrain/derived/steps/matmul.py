"""Products of rows and weights, and of matrices within a row, as steps in C; and transposes.

What is transposed is moved when somebody reads it in order: a product of matrices reads it as it
lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import fx

from geartrain.derived.steps.fold import affine_columns, times_columns
from geartrain.derived.steps.places import Like, Places, Refused, like_of
from geartrain.derived.traces.turns import TURNS, order_of
from geartrain.native.fused import At, Op
from geartrain.nodes.products import affine, times

aten = torch.ops.aten


def _product(
    places: Places, x: fx.Node, *, turned: bool, columns: tuple[int, int] | None = None
) -> None:
    args: Any = x.args
    rows = places.value(args[0])
    runs = None if columns is None else (columns,)
    weight, depth, width = places.weight(args[1], turned=turned, columns=runs)
    bias = At()
    if not turned and args[2] is not None:
        bias = places.value(args[2]).at
        if like_of(args[2]).rows or like_of(args[2]).tail != (width,):
            raise Refused
    *several, own = rows.like.tail or (0,)
    if own != depth or not rows.like.rows or len(several) != int(rows.like.merged):
        raise Refused
    out = places.values[x] = places.out(x)
    places.add(Op.PRODUCT, out, rows.at, weight, bias, many=depth, number=math.prod(several))


def _columns(x: fx.Node) -> tuple[int, int]:
    """Which columns of a weight a product reads, as its last arguments say."""
    first, end = cast("Sequence[int]", x.args[-2:])
    return first, end


def _matrices(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    a, b = places.raw(args[0]), places.raw(args[1])
    if a.which is not None or (a.turned and b.turned):
        a = places.value(args[0])
    if not a.like.rows or not b.like.rows or a.like.merged != b.like.merged:
        raise Refused
    *several, many, inner = b.like.tail
    out = places.values[x] = places.out(x)
    which, how = b.which or At(), At(at=1 if a.turned else 2 if b.turned else 0)
    places.add(
        *(Op.MATRICES, out, a.at, b.at, which, At(at=b.of), how),
        many=many,
        inner=inner,
        number=math.prod(several),
    )


def _turn(places: Places, x: fx.Node) -> None:
    """Axes within a row change places: the last two when somebody reads them in order."""
    args: Any = x.args
    source, like = places.raw(args[0]), like_of(x)
    tail = source.like.tail
    if not source.like.rows or not like.rows:
        raise Refused
    moved = moved_axes(x, source.like)
    real = [d for d in moved if tail[d] != 1]
    ends = [len(tail) - 1, len(tail) - 2]
    if source.turned and moved[-2:] != ends:
        source = places.value(args[0])
    if moved[-2:] == ends and moved[:-2] == list(range(len(tail) - 2)) and 1 not in tail[-2:]:
        places.values[x] = replace(source, like=like, turned=not source.turned)
        return
    if real == sorted(real):
        places.values[x] = replace(source, like=like)
        return
    every = list(swaps(real))
    source = places.value(args[0])
    for k, some in enumerate(every):
        out = places.out(x) if k == len(every) - 1 else places.spare(like)
        many, inner, rest = (math.prod(tail[d] for d in axes) for axes in some)
        places.add(Op.TURN, out, source.at, many=many, inner=inner, number=rest)
        source = out
    places.values[x] = source


def moved_axes(x: fx.Node, like: Like) -> list[int]:
    """Which axes of the tail of what it turns come one after the other."""
    order = order_of(x, len(like.tail) + (not like.merged))
    if order[0] != 0:
        raise Refused
    return [0, *order[1:]] if like.merged else [d - 1 for d in order[1:]]


def swaps(order: Sequence[int]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Neighbours that change places, one pair after the other, and what comes after them."""
    now = sorted(order)
    for k, d in enumerate(order):
        at = end = now.index(d)
        if at > k:
            while end < len(now) and now[end] == order[k + end - at]:
                end += 1
            many, inner, rest = now[k:at], now[at:end], now[end:]
            now = [*now[:k], *inner, *many, *rest]
            yield many, inner, rest


MATMUL: Final[Mapping[Any, Callable[[Places, fx.Node], None]]] = {
    affine: lambda places, x: _product(places, x, turned=False),
    times: lambda places, x: _product(places, x, turned=True),
    affine_columns: lambda places, x: _product(places, x, turned=False, columns=_columns(x)),
    times_columns: lambda places, x: _product(places, x, turned=True, columns=_columns(x)),
    aten.bmm.default: _matrices,
    **dict.fromkeys(TURNS, _turn),
}
"""All of them know of several rows for each row."""
