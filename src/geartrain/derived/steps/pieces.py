"""Parts of rows along any axis as steps in C, and what is put together of them.

Along the first axis of a row a part is a place; along another it is pieces, which are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.steps.places import LARGEST, RESHAPES, Like, Places, Refused, Value, like_of
from geartrain.native.fused import Op

aten = torch.ops.aten


def axis_of(like: Like, dim: int) -> tuple[int, int, int]:
    """Where an axis of a tensor is in the shape of its rows, its entries, and those after it."""
    apart = not like.merged  # the axis of rows is one of its own
    at = dim % (len(like.tail) + apart) - apart
    if not like.rows or at < like.merged:
        raise Refused
    return at, like.tail[at], math.prod(like.tail[at + 1 :])


def _of_weight(like: Like, dim: int, first: int) -> int:
    """Where a part of what is no row begins: along its first axis, or behind axes of one entry."""
    at = dim % len(like.tail)
    if like.rows or math.prod(like.tail[:at]) != 1 or not 0 <= first <= like.tail[at]:
        raise Refused
    return first * math.prod(like.tail[at + 1 :])


def _begins(x: fx.Node, like: Like) -> int:
    """The same of a slice, an item, or what goes back to such."""
    args: Any = x.args
    back = x.target in _BACK
    dim, first, *more = args[2:] if back else [*args[1:], *_ALL[len(args) :]]
    if not like.tail or more[1:] not in ([], [1]):
        raise Refused
    first, many = first or 0, like.tail[dim % len(like.tail)]
    return _of_weight(like, dim, min(first + many if first < 0 else first, many))


def home_of_sum(places: Places, x: fx.Node) -> Value | None:
    """Its own place, or that of what is nothing but a view of it, or what it is some of."""
    home, view, first = places.homes.get(x), x, 0
    while home is None and len(view.users) == 1:
        (view,) = view.users
        if view.target in _BACK and not like_of(view).rows:
            first += _begins(view, like_of(view))
        elif view.target not in RESHAPES:
            return None
        home = places.homes.get(view)
    if home is None or view is x:
        return home
    return None if home.like.rows else Value(replace(home.at, at=home.at.at + first), like_of(x))


def _put_back_there(places: Places, x: fx.Node) -> None:
    """Part of a weight's gradient, which has been added up where it belongs."""
    home, source = home_of_sum(places, x), places.raw(x.args[0])
    begins = None if home is None else replace(home.at, at=home.at.at + _begins(x, like_of(x)))
    if home is None or source.at != begins:
        raise Refused
    places.values[x] = home


def _part(
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


def _put(places: Places, out: Value, piece: Value, at: int, first: int) -> None:
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


def _slice(places: Places, x: fx.Node) -> Value:
    args: Any = x.args
    source, dim = places.held(args[0]), args[1] if len(args) > 1 else 0
    like = like_of(x)
    if not source.like.rows:
        return source.part(_begins(x, source.like), like.tail)
    if not like.rows or len(args) > 4:
        raise Refused
    if dim == 0 and like.tail == source.like.tail:
        return source
    (at, size, _), start = axis_of(source.like, dim), args[2] if len(args) > 2 else None
    if not isinstance(start, int | None):
        raise Refused
    start = start or 0
    return _part(places, x, source, at, max(start + size, 0) if start < 0 else min(start, size))


def _select(places: Places, x: fx.Node) -> Value:
    args: Any = x.args
    source, like = places.held(args[0]), like_of(x)
    if not source.like.rows:
        return source.part(_begins(x, source.like), like.tail)
    (at, many, _), index = axis_of(source.like, args[1]), args[2]
    tail = source.like.tail
    one = replace(like, tail=(*tail[:at], 1, *tail[at + 1 :]))
    found = _part(places, x, source, at, index + many if index < 0 else index, one)
    return replace(found, like=like)


def _split(places: Places, x: fx.Node) -> list[Value | None]:
    args: Any = x.args
    source, dim = places.held(args[0]), args[2] if len(args) > 2 else 0
    at, many, _ = axis_of(source.like, dim)
    sizes = args[1]
    if isinstance(sizes, int):
        sizes = [min(sizes, many - k) for k in range(0, many, sizes)]
    items, first = places.items(x), 0
    found: list[Value | None] = [None] * len(sizes)
    for k, size in enumerate(sizes):
        if k in items:
            found[k] = _part(places, items[k], source, at, first)
        first += size
    return found


def _unbind(places: Places, x: fx.Node) -> list[Value | None]:
    """Every entry of an axis by itself."""
    args: Any = x.args
    source = places.held(args[0])
    at, many, _ = axis_of(source.like, args[1] if len(args) > 1 else 0)
    tail, items = source.like.tail, places.items(x)
    one = replace(source.like, tail=(*tail[:at], 1, *tail[at + 1 :]))
    found: list[Value | None] = [None] * many
    for k, y in items.items():
        part = _part(places, y, source, at, k, one)
        found[k] = replace(part, like=like_of(y))
    return found


def _cat(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    (at, _, _), first = axis_of(like_of(x), args[1] if len(args) > 1 else 0), 0
    out = places.out(x)
    for y in args[0]:
        piece = places.value(y)
        _put(places, out, piece, at, first)
        first += piece.like.tail[at]
    places.values[x] = out


def _slice_back(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    _, _, dim, start, _, step = args
    like = like_of(x)
    if not like.rows:
        _put_back_there(places, x)
        return
    at, many, _ = axis_of(like, dim)
    start += many if start < 0 else 0
    if step != 1 or start < 0:
        raise Refused
    out = places.values[x] = places.out(x)
    places.add(Op.ZERO, out)
    _put(places, out, places.value(args[0]), at, start)


def _select_back(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    _, _, dim, index = args
    like = like_of(x)
    if not like.rows:
        _put_back_there(places, x)
        return
    piece = places.value(args[0])
    at, many, _ = axis_of(like, dim)
    index = index + many if index < 0 else index
    tail = (*like.tail[:at], 1, *like.tail[at + 1 :])
    out = places.values[x] = places.out(x)
    places.add(Op.ZERO, out)
    _put(places, out, replace(piece, like=replace(piece.like, tail=tail)), at, index)


def _flip(places: Places, x: fx.Node) -> None:
    """Some axes backwards, one after the other."""
    args: Any = x.args
    value = places.value(args[0])
    axes = [axis_of(value.like, dim) for dim in args[1]]
    for k, (_, many, inner) in enumerate(axes):
        out = places.out(x) if k == len(axes) - 1 else places.spare(value.like)
        places.add(Op.FLIP, out, value.at, many=many, inner=inner)
        value = out
    places.values[x] = value


def _cumulate(places: Places, x: fx.Node) -> None:
    """Sums along an axis, so far."""
    args: Any = x.args
    source = places.value(args[0])
    _, many, inner = axis_of(source.like, args[1])
    if x.kwargs or not source.like.width:
        raise Refused
    out = places.values[x] = places.out(x)
    places.add(Op.CUMULATE, out, source.at, many=many, inner=inner)


def _most_so_far(places: Places, x: fx.Node) -> None:
    """The largest or the least along an axis so far, and which it is: the last of those alike."""
    args: Any = x.args
    source = places.value(args[0])
    _, many, inner = axis_of(source.like, args[1])
    if x.kwargs or source.like.dtype is not places.dtype or many > LARGEST:
        raise Refused
    read = source
    if x.target is aten.cummin.default:
        read = places.spare(source.like)
        places.add(Op.NEG, read, source.at)
    items = places.items(x)
    which = places.out(items[1]) if 1 in items else places.spare(source.like)
    found: list[Value | None] = [None, which]
    places.add(Op.MOST_SO_FAR, which, read.at, many=many, inner=inner)
    if 0 in items:
        out = found[0] = places.out(items[0])
        places.add(Op.GATHER, out, source.at, which.at, number=many, many=many, inner=inner)
    places.values[x] = found


_BACK: Final = {aten.slice_backward.default, aten.select_backward.default}
_ALL: Final = (None, 0, None)
"""What a slice says if it says nothing of the axis and of the first."""
PARTS: Final[Mapping[Any, Callable[[Places, fx.Node], Value | list[Value | None]]]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.unsafe_split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}
"""What takes rows apart, and gives where the parts lie."""
WHOLES: Final[Mapping[Any, Callable[[Places, fx.Node], None]]] = {
    aten.cat.default: _cat,
    aten.slice_backward.default: _slice_back,
    aten.select_backward.default: _select_back,
    aten.flip.default: _flip,
    aten.cumsum.default: _cumulate,
    aten.cummax.default: _most_so_far,
    aten.cummin.default: _most_so_far,
}
"""What writes whole rows, of parts or along an axis."""
