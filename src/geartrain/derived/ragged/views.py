"""Operators that move nothing, or parts of rows: views, parts, and rows put together of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.front import (
    beside_in_front,
    put_behind,
    put_in_front,
    selected_back,
)
from geartrain.derived.ragged.pairs import turned
from geartrain.derived.ragged.traced import SAME, same_numbers
from geartrain.derived.ragged.values import (
    MEMBERS,
    NO_ROWS,
    Axes,
    Constant,
    HeldValue,
    InFront,
    MostOf,
    NamedMembers,
    RaggedValue,
)
from geartrain.derived.steps.matmul import swaps
from geartrain.derived.steps.places import Refused
from geartrain.derived.traces.turns import TURNS, order_of
from geartrain.native.fused import Op

aten = torch.ops.aten


def _view(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    known = low.values.get(args[0])
    if isinstance(known, Constant | MostOf) or known is None:
        low.values[x] = known
        return
    if isinstance(known, InFront) and low.shapes[x] == low.shapes[args[0]]:
        low.values[x] = known
        return
    if x.target is aten.unsqueeze.default and not low.has_rows_first(x) and args[1] == 0:
        low.values[x] = InFront((low.whole(args[0], late=low.late(x)),))
        return
    if isinstance(known, NamedMembers):
        named = replace(known.value, tail=low.like(x).tail)
        low.values[x] = replace(known, value=named)
        return
    if x.target is aten._to_copy.default and x.meta["dtype"] is torch.bool:
        low.elementwise(x, Op.OTHER_THAN, args[:1])
        return
    if x.target is aten._to_copy.default and x.meta["dtype"] is not low.dtype:
        raise Refused("numbers of another dtype")
    like = low.like(x)
    if isinstance(known, HeldValue):
        alike = low.like(args[0]).before == like.before and math.prod(known.tail) == like.width
        if (like.kind, like.times) == (MEMBERS, 1) and alike:
            low.values[x] = replace(known, tail=like.tail)
            return
    _view_rows(low, x, args[0], like)


def _view_rows(low: AbstractLowering, x: fx.Node, source: fx.Node, like: Axes) -> None:
    late = low.late(x)
    value, mine = low.value(source, late=late), low.like(source)
    if value.kind == NO_ROWS:
        low.values[x] = replace(value, tail=like.tail) if like.kind == NO_ROWS else None
        if like.kind != NO_ROWS or like.width != value.width:
            low.values[x] = low.fit(source, like, late=late)
    elif x.target is aten.expand.default:
        low.values[x] = low.fit(source, like, late=late)
    elif like.kind != value.kind:
        raise Refused("rows of one kind are taken for rows of another")
    elif mine.before != like.before:
        raise Refused("members become something else")
    elif like.times == value.times:
        low.values[x] = replace(value, tail=like.tail)
    else:
        value = low.dense(value, late=late)
        low.values[x] = replace(value, row=like.width, times=like.times, tail=like.tail)


def _axis(like: Axes, rank: int, dim: int) -> int:
    """Which axis of the tail is cut."""
    at = like.tail_axis(dim % rank)
    if at < 0 or like.kind == NO_ROWS:
        raise Refused("an axis of rows is cut")
    return at


def _axis_of(low: AbstractLowering, x: fx.Node, dim: int) -> int:
    return _axis(low.like(x), len(low.shapes[x]), dim)


def _is_one(low: AbstractLowering, x: fx.Node, dim: int) -> bool:
    """Whether an axis has one entry, and is none of rows."""
    shape, like = low.shapes[x], low.like(x)
    return like.tail_axis(dim % len(shape)) >= 0 and shape[dim % len(shape)] == 1


def _part(value: RaggedValue, at: int, start: int, tail: tuple[int, ...]) -> RaggedValue:
    inner = math.prod(value.tail[at + 1 :])
    return replace(value, at=value.at + start * inner, tail=tail)


def _from_axis(value: RaggedValue, at: int) -> RaggedValue:
    """All that lies side by side, as rows of the axes from one on."""
    ahead = math.prod(value.tail[:at])
    if ahead == 1:
        return replace(value, tail=value.tail[at:])
    row = math.prod(value.tail[at:])
    return replace(value, times=value.times * ahead, row=row, tail=value.tail[at:])


def _piece(
    low: AbstractLowering,
    value: RaggedValue,
    at: int,
    start: int,
    tail: tuple[int, ...],
    *,
    late: bool,
) -> RaggedValue:
    """A part along an axis: where it lies, or if it lies in pieces, a copy."""
    if math.prod(value.tail[:at]) == 1:
        return _part(value, at, start, tail)
    part = _part(_from_axis(low.dense(value, late=late), at), 0, start, tail[at:])
    out = low.room(Axes(value.kind, value.times, tail, 1), late=late)
    low.plain(Op.COPY, _from_axis(out, at), part, late=late)
    return out


def _put(
    low: AbstractLowering, out: RaggedValue, at: int, start: int, piece: RaggedValue, *, late: bool
) -> None:
    """A part along an axis is written."""
    if math.prod(out.tail[:at]) != 1:
        piece = low.dense(piece, late=late)
    piece = _from_axis(piece, at)
    home = _part(_from_axis(out, at), 0, start, piece.tail)
    low.plain(Op.COPY, home, piece, late=late)


def _slice(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    dim = args[1] if len(args) > 1 else 0
    source = args[0]
    if low.shapes[x] == low.shapes[source]:
        _refuse_most(low, source, x, args[1:4])
        _view(low, x)
        return
    if _is_table(low, x, dim, args[2:4]):
        return
    same_numbers(x, low.twin[x])
    if len(args) > 4 and args[4] != 1:
        raise Refused("a slice with gaps")
    at = _axis_of(low, source, dim)
    value = low.whole(source, late=low.late(x))
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    start = start + value.tail[at] if start < 0 else start
    low.values[x] = _piece(low, value, at, start, low.like(x).tail, late=low.late(x))


def _is_table(low: AbstractLowering, x: fx.Node, dim: int, cut: Sequence[Any]) -> bool:
    """Whether it is as many rows of a weight as the longest bundle has members: each reads one."""
    source: Any = x.args[0]
    value = low.values.get(source)
    if low.lengths is None or source not in low.operands or not low.like(x).alone:
        return False
    if dim != 0 or len(low.shapes[source]) != 2 or not isinstance(value, RaggedValue) or cut[0]:
        return False
    low.number_members(x)
    numbers = RaggedValue(low.ints(x), 0, 1, MEMBERS, 1, ())
    low.values[x] = out = low.room(low.like(x), late=False)
    low.plain(Op.EMBED, out, numbers, value, many=value.tail[0], late=False)
    return True


_ENDLESS: Final = 1 << 62
"""To the end, however far that is."""


def _refuse_most(low: AbstractLowering, whole: fx.Node, x: fx.Node, cut: Sequence[Any]) -> None:
    """Raises:
    Refused: All rows are taken, or members, if they are no more than a number."""
    dim, start, end = (*cut, None, None, None)[:3]
    like, rank = low.like(whole), len(low.shapes[whole])
    if like.kind == NO_ROWS or like.tail_axis((dim or 0) % rank) >= 0:
        return
    every = end is None or end >= _ENDLESS or end not in low.twin[x].args
    if start or not every:
        raise Refused("so many rows at most")


def _select(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    source, dim, which = args
    same_numbers(x, low.twin[x])
    known = low.values.get(source)
    if isinstance(known, InFront) and dim == 0:
        low.values[x] = known.parts[which]
        return
    if _is_one(low, source, dim):
        _view(low, x)
        return
    at = _axis_of(low, source, dim)
    value = low.whole(source, late=low.late(x))
    which %= value.tail[at]
    low.values[x] = _piece(low, value, at, which, low.like(x).tail, late=low.late(x))


def _split(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    at = _axis_of(low, args[0], args[2] if len(args) > 2 else 0)
    same_numbers(x, low.twin[x])
    value, sizes = low.whole(args[0], late=low.late(x)), args[1]
    if isinstance(sizes, int):
        whole = value.tail[at]
        sizes = [min(sizes, whole - begin) for begin in range(0, whole, sizes)]
    found, start = [], 0
    for size in sizes:
        tail = (*value.tail[:at], size, *value.tail[at + 1 :])
        found.append(_piece(low, value, at, start, tail, late=low.late(x)))
        start += size
    low.values[x] = found


def _unbind(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    dim, known = args[1] if len(args) > 1 else 0, low.values.get(args[0])
    if isinstance(known, InFront) and dim == 0:
        low.values[x] = list(known.parts)
        return
    at = _axis_of(low, args[0], dim)
    value = low.whole(args[0], late=low.late(x))
    tail = (*value.tail[:at], *value.tail[at + 1 :])
    late = low.late(x)
    low.values[x] = [_piece(low, value, at, k, tail, late=late) for k in range(value.tail[at])]


def _item(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    found = low.values.get(args[0])
    low.values[x] = found[args[1]] if isinstance(found, list) else None


def _cat(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    if beside_in_front(low, x):
        return
    late, like = low.late(x), low.like(x)
    at = _axis_of(low, x, args[1] if len(args) > 1 else 0)
    out, start = low.room(like, late=late), 0
    for y in args[0]:
        piece = low.whole(y, late=late)
        same = (piece.kind, piece.times) == (like.kind, like.times)
        if not same or low.like(y).at != like.at or low.like(y).second != like.second:
            raise Refused("rows of two kinds side by side")
        _put(low, out, at, start, piece, late=late)
        start += piece.tail[at]
    low.values[x] = out


def _stack(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    late, like = low.late(x), low.like(x)
    at = _axis_of(low, x, args[1] if len(args) > 1 else 0)
    out = low.room(like, late=late)
    for k, y in enumerate(args[0]):
        piece = low.whole(y, late=late)
        if (piece.kind, piece.times) != (like.kind, like.times):
            raise Refused("rows of two kinds side by side")
        _put(low, out, at, k, piece, late=late)
    low.values[x] = out


def _put_back(low: AbstractLowering, x: fx.Node) -> None:
    """The gradient of a part."""
    args: Any = x.args
    selects = x.target is aten.select_backward.default
    if selects and not low.has_rows_first(x) and selected_back(low, x):
        return
    if low.late(x) and low.like(x).kind == NO_ROWS:
        low.values[x] = None  # the gradient of a weight
        return
    if low.shapes[x] == low.shapes[args[0]] and x.target is aten.slice_backward.default:
        _refuse_most(low, x, x, args[2:5])
        _view(low, x)
        return
    same_numbers(x, low.twin[x], but=1)
    late, like = low.late(x), low.like(x)
    if _is_one(low, x, args[2]):
        _view(low, x)
        return
    at = _axis_of(low, x, args[2])
    piece = low.whole(args[0], late=late)
    if len(args) > 5 and args[5] != 1:
        raise Refused("a slice with gaps")
    if piece.width == like.width:
        low.values[x] = replace(piece, tail=like.tail)
        return
    out, start = low.room(like, late=late), args[3]
    start = start + like.tail[at] if start < 0 else start
    low.plain(Op.ZERO, out, late=late)
    _put(low, out, at, start, piece, late=late)
    low.values[x] = out


def _turn(low: AbstractLowering, x: fx.Node) -> None:
    """Axes change places; of those of members, and of one entry, nothing moves."""
    source: Any = x.args[0]
    known, shape = low.values.get(source), low.shapes[source]
    if isinstance(known, Constant | MostOf) or known is None:
        low.values[x] = known
        return
    order = order_of(x, len(shape))
    if isinstance(known, InFront):
        put_behind(low, x, known, order)
        return
    if not low.has_rows_first(x):
        low.values[x] = put_in_front(low, x, order)
        return
    mine, like = low.like(source), low.like(x)
    places = [mine.tail_axis(k) for k in order if shape[k] != 1]
    own = [k for k in places if k >= 0]
    if (like.kind, like.times) != (mine.kind, mine.times):
        raise Refused("axes change places")
    if mine.kind == NO_ROWS:
        raise Refused("axes of a weight change places")
    if mine.merged != like.merged:
        raise Refused("axes change places")
    if isinstance(known, HeldValue) and own == sorted(own):
        low.values[x] = replace(known, tail=like.tail)
        return
    value, order = low.value(source, late=low.late(x)), order_of(x, len(shape))
    if mine.second >= 0 and order.index(mine.pair[0]) > order.index(mine.pair[1]):
        value = turned(low, value, late=low.late(x))
    for some in () if value.one else swaps(own):
        many, inner, rest = (math.prod(mine.tail[k] for k in axes) for axes in some)
        moved = low.room(like, late=low.late(x))
        low.plain(Op.TURN, moved, value, many=many, inner=inner, number=rest, late=low.late(x))
        value = moved
    low.values[x] = replace(value, tail=like.tail)


VIEWS: Final[Mapping[Any, Convert]] = {
    **dict.fromkeys(SAME, _view),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.unsafe_split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    operator.getitem: _item,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    **dict.fromkeys(TURNS, _turn),
    aten.slice_backward.default: _put_back,
    aten.select_backward.default: _put_back,
}
