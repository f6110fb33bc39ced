"""Operators that take rows by number, or add to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.integers import end_of_bundles
from geartrain.derived.ragged.looked_up import look_up
from geartrain.derived.ragged.most import UNITS, most_named, one_of, put_most, take_most
from geartrain.derived.ragged.others import add_to_others, others, take_named
from geartrain.derived.ragged.values import (
    BUNDLES,
    HELD,
    MEMBERS,
    NO_ROWS,
    PADDED,
    PAIRS,
    Axes,
    Buffer,
    ChosenMatrices,
    Constant,
    HeldValue,
    MostOf,
    NamedMembers,
    RaggedValue,
)
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten


def _embed(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    index = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    if _is_padded(low, x, args[0], index):
        return
    if len(index) != 1:
        raise Refused("entries are taken by several numbers")
    unit, known = args[0].target in UNITS, low.values.get(index[0])
    if unit and isinstance(known, MostOf) and low.like(x).is_padded:
        out = one_of(low, known, late=low.late(x))
        low.values[x] = replace(out, tail=low.like(x).tail)
    elif unit and not low.varies(args[0]):
        _one_of(low, x, args[0], index[0])
    else:
        _take(low, x, args[0], index[0])


def _one_of(low: AbstractLowering, x: fx.Node, unit: fx.Node, index: fx.Node) -> None:
    """One where an integer says, of as many entries as a square has rows; else nothing."""
    late, like = low.late(x), low.like(x)
    which, (rows, many) = low.whole(index, late=late), low.shapes[unit]
    if like.kind == NO_ROWS or rows != many or which.width != 1 or like.width != many:
        raise Refused("one of what is no square, or by several numbers")
    out = low.values[x] = low.room(like, late=late)
    low.plain(Op.ONE_HOT, out, replace(which, tail=()), late=late, inner=many)


def _is_padded(
    low: AbstractLowering, x: fx.Node, source: fx.Node, index: Sequence[Any], *, over: bool = True
) -> bool:
    """Whether members become what is padded, or that the members: it is the same then.

    Args:
        x: What is made.
        source: What is moved.
        index: Where from, or where to.
        over: Whether what is there already is written over.
    """
    known = low.values.get(source)
    if low.padding is None or not over or not low.padding.are_members(index):
        return False
    like, late = low.like(x), low.late(x)
    if like.kind not in (MEMBERS, PAIRS) or like.times != 1:
        return False
    if isinstance(known, Constant):
        low.values[x] = known
        return True
    value = low.whole(source, late=late)
    if (value.kind, value.times, value.tail) != (like.kind, 1, like.tail):
        return False
    low.values[x] = value
    return True


def _index_select(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    if args[1] != 0:
        raise Refused("an axis of rows is cut")
    if not _is_padded(low, x, args[0], [args[2]]):
        _take(low, x, args[0], args[2])


def _take(low: AbstractLowering, x: fx.Node, source: fx.Node, index: Any) -> None:
    """Rows by number, of rows or of a table."""
    found = low.ints_of(index) if isinstance(index, fx.Node) else None
    late, like = low.late(x), low.like(x)
    value = low.whole(source, late=late)
    named = low.values.get(index)
    if isinstance(named, NamedMembers):
        low.values[x] = others(low, value, named, like, late=late)
        return
    if found is None and value.kind == NO_ROWS and like.kind != NO_ROWS:
        low.values[x] = look_up(low, value, index, like, late=late)
        return
    if found is None or like.kind == NO_ROWS:
        raise Refused("rows are taken by numbers that are computed")
    base, rows = found
    if (rows.kind, rows.times) != (like.kind, like.times):
        raise Refused("rows are taken by numbers of several axes")
    if value.kind == NO_ROWS:
        low.values[x] = _of_table(low, value, base, rows, like, late=late)
        low.matrices[x] = ChosenMatrices(value, base)
    elif base is low.segment and (value.kind, value.times) == (BUNDLES, 1):
        low.values[x] = replace(low.spread(value, late=late), tail=like.tail)
    elif (end := _end(low, base, like, value)) is not None:
        low.values[x] = out = low.room(like, late=late)
        _inside(low, Way.TAKE_INSIDE, out, value, end, late=late)
    else:
        low.values[x] = out = low.room(like, late=late)
        _by_number(low, Way.TAKE, out, value, (like, value), base, late=late)


def _end(
    low: AbstractLowering, base: fx.Node, rows: Axes | RaggedValue, members: Axes | RaggedValue
) -> int | None:
    """Which member of each bundle has these numbers, if it is the first (0) or the last (-1)."""
    if (rows.kind, rows.times) != (BUNDLES, 1) or (members.kind, members.times) != (MEMBERS, 1):
        return None
    return end_of_bundles(low, base)


def _inside(
    low: AbstractLowering, way: Way, out: RaggedValue, value: RaggedValue, end: int, *, late: bool
) -> None:
    """The first or the last member of each bundle is taken, or added to."""
    low.step(way, out, value, kind=BUNDLES, source=MEMBERS, inside=True, inner=end, late=late)


def _of_table(
    low: AbstractLowering,
    table: RaggedValue,
    base: fx.Node,
    rows: Axes,
    like: Axes,
    *,
    late: bool,
) -> RaggedValue:
    if not table.tail or table.buffer.role != "operand":
        raise Refused("a table that is no weight")
    numbers = RaggedValue(low.ints(base), 0, 1, rows.kind, rows.times, ())
    if like.width != math.prod(table.tail[1:]):
        raise Refused("a table by numbers of several axes")
    out = low.room(like, late=late)
    low.plain(Op.EMBED, out, numbers, table, many=table.tail[0], late=late)
    return out


def _by_number(
    low: AbstractLowering,
    way: Way,
    out: RaggedValue,
    value: RaggedValue,
    kinds: tuple[Axes | RaggedValue, Axes | RaggedValue],
    numbers: fx.Node,
    *,
    late: bool,
) -> None:
    """A step that is done for rows of one kind, and whose numbers name those of another."""
    done, named = kinds
    low.step(
        way,
        out,
        value,
        kind=done.kind,
        times=done.times,
        source=named.kind,
        source_times=named.times,
        index=low.ints(numbers),
        late=late,
    )


def _index_add(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    if x.target is aten.index_put.default:
        over = len(args) < 4 or not args[3] or _is_nothing(low, args[0])
        if _is_padded(low, x, args[2], args[1], over=over):
            return
        if len(args[1]) != 1 or len(args) < 4 or not args[3]:
            raise Refused("rows are written over")
        base, index, source = args[0], args[1][0], args[2]
    else:
        base, dim, index, source = args
        if dim != 0 or x.kwargs:
            raise Refused("an axis of rows is cut")
        if _is_padded(low, x, source, [index], over=_is_nothing(low, base)):
            return
    _add_at(low, x, base, index, source)


def _is_nothing(low: AbstractLowering, x: fx.Node) -> bool:
    known = low.values.get(x)
    return isinstance(known, Constant) and known.number == 0


def _masked_scatter(low: AbstractLowering, x: fx.Node) -> None:
    """Members put where a mask is true."""
    args: Any = x.args
    _, mask, source = args
    if not _is_padded(low, x, source, [mask]):
        raise Refused("rows are put where a mask is true")


def _masked_scatter_back(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    if not _is_padded(low, x, args[0], [args[1]]):
        raise Refused("rows are taken where a mask is true")


def _add_at(low: AbstractLowering, x: fx.Node, base: fx.Node, index: Any, source: fx.Node) -> None:
    """Rows added to others by number."""
    like, late = low.like(x), low.late(x)
    if like.kind == NO_ROWS:
        low.values[x] = None  # of a table: the gradient of a weight
        return
    named = low.values.get(index)
    if isinstance(named, NamedMembers) and _is_nothing(low, base):
        value = low.whole(source, late=late)
        low.values[x] = add_to_others(low, value, named, like, late=late)
        return
    found = low.ints_of(index) if isinstance(index, fx.Node) else None
    if found is None:
        raise Refused("rows are added by numbers that are computed")
    numbers, rows = found
    value = low.whole(source, late=late)
    if (rows.kind, rows.times) != (value.kind, value.times) or value.width != like.width:
        raise Refused("rows are added by numbers of several axes")
    empty = _is_nothing(low, base)
    out = low.room(like, late=late)
    whole = numbers is low.segment and (like.kind, like.times) == (BUNDLES, 1)
    if whole and (value.kind, value.times) == (MEMBERS, 1):
        low.step(Way.SUM_OVER, out, value, kind=BUNDLES, late=late, inside=True)
        if not empty:
            low.plain(
                Op.ADD, out, out, low.full(low.fit(base, like, late=late), late=late), late=late
            )
    else:
        if empty:
            low.plain(Op.ZERO, out, late=late)
        else:
            begin = low.full(low.fit(base, like, late=late), late=late)
            low.plain(Op.COPY, out, begin, late=late)
        end = _end(low, numbers, value, like)
        if end is None:
            _by_number(low, Way.ADD_AT, out, value, (value, like), numbers, late=late)
        else:
            _inside(low, Way.ADD_INSIDE, out, value, end, late=late)
    low.values[x] = out


def _reduce(low: AbstractLowering, x: fx.Node) -> None:
    """The most, or the least, of rows by number; or their mean."""
    args: Any = x.args
    base, dim, index, source, how = args[:5]
    late, like = low.late(x), low.like(x)
    found, begun = low.ints_of(index), low.values.get(base)
    own = args[5] if len(args) > 5 else x.kwargs.get("include_self", True)
    if dim != 0 or how not in ("amax", "amin", "mean") or found is None:
        raise Refused(f"rows are reduced by {how}")
    (numbers, rows), value = found, low.whole(source, late=late)
    if (rows.kind, rows.times) != (value.kind, value.times) or value.width != like.width:
        raise Refused("rows are reduced by numbers of several axes")
    if not isinstance(begun, Constant) or like.kind == NO_ROWS:
        raise Refused("rows are reduced beside others")
    if how == "mean":
        if own or begun.number:
            raise Refused("a mean with what was there")
        low.values[x] = _mean_at(low, like, value, numbers, late=late)
        return
    least = how == "amin"
    value = low.turned_over(value, late=late) if least else value
    begin = (-begun.number if least else begun.number) if own else -math.inf
    out = _most_at(low, like, value, numbers, begin, late=late)
    out = low.turned_over(out, late=late) if least else out
    if not own:
        there = _count_at(low, like, value, numbers, late=late)
        before = low.full(low.fit(base, like, late=late), late=late)
        low.plain(Op.WHERE, out, there, out, before, late=late)
    low.values[x] = out


def _most_at(
    low: AbstractLowering,
    like: Axes,
    value: RaggedValue,
    numbers: fx.Node,
    begin: float,
    *,
    late: bool,
) -> RaggedValue:
    """The most of rows and of a number, for each row that they name."""
    out, members = low.room(like, late=late), (value.kind, value.times) == (MEMBERS, 1)
    if members and numbers is low.segment and (like.kind, like.times) == (BUNDLES, 1):
        low.step(Way.MOST_OVER, out, value, kind=BUNDLES, late=late, inside=True)
        low.plain(Op.AT_LEAST, out, out, number=begin, late=late)
        return out
    low.plain(Op.ZERO, out, late=late)
    low.plain(Op.ADD_NUMBER, out, out, number=begin, late=late)
    _by_number(low, Way.RAISE_AT, out, value, (value, like), numbers, late=late)
    return out


def _count_at(
    low: AbstractLowering, like: Axes, value: RaggedValue, numbers: fx.Node, *, late: bool
) -> RaggedValue:
    """How many rows name a row, in each column."""
    ones, out = low.room(low.like_value(value), late=late), low.room(like, late=late)
    low.plain(Op.ZERO, ones, late=late)
    low.plain(Op.ADD_NUMBER, ones, ones, number=1.0, late=late)
    low.plain(Op.ZERO, out, late=late)
    _by_number(low, Way.ADD_AT, out, ones, (value, like), numbers, late=late)
    return out


def _mean_at(
    low: AbstractLowering, like: Axes, value: RaggedValue, numbers: fx.Node, *, late: bool
) -> RaggedValue:
    """The mean of the rows that name a row; of none, nothing."""
    out, there = low.room(like, late=late), _count_at(low, like, value, numbers, late=late)
    low.plain(Op.AT_LEAST, there, there, number=1.0, late=late)
    low.plain(Op.ZERO, out, late=late)
    _by_number(low, Way.ADD_AT, out, value, (value, like), numbers, late=late)
    low.plain(Op.DIV, out, out, there, late=late)
    return out


def _of_each(low: AbstractLowering, index: Any, dim: int, of: Axes) -> Buffer | None:
    """The number of one member of each bundle; None: that is not what an axis is taken by."""
    found = low.ints_of(index)
    single = found is not None and found[1] == Axes(BUNDLES, 1, (), 1)
    padded = of.kind == MEMBERS and of.lead == PADDED and of.at == 0
    return low.ints(found[0]) if found is not None and single and dim == 1 and padded else None


def _names(low: AbstractLowering, index: Any, dim: int, of: Axes) -> RaggedValue | None:
    """Integers of a memory that name an entry of its row for each member; None: they are none."""
    known = low.values.get(index)
    if not isinstance(known, HeldValue) or not known.whole or math.prod(known.tail) != 1:
        return None
    if (of.kind, of.times, of.lead, len(of.tail)) != (BUNDLES, 1, 1, 1) or dim not in (1, -1):
        raise Refused("integers of a memory name other than entries of a row")
    return RaggedValue(low.held(known.number, 1), 0, 1, HELD, 1, ())


def _by_name(
    low: AbstractLowering,
    way: Way,
    out: RaggedValue,
    value: RaggedValue,
    names: RaggedValue,
    many: int,
    *,
    late: bool,
) -> None:
    low.step(
        way,
        out,
        value,
        names,
        kind=BUNDLES,
        source=HELD,
        inside=True,
        cells=low.cells,
        width=1,
        many=many,
        late=late,
    )


def _gather(low: AbstractLowering, x: fx.Node) -> None:
    """One member of each bundle, rows by number, or entries by name."""
    args: Any = x.args
    source, dim, index = args[:3]
    like, late = low.like(x), low.late(x)
    if dim == 0:
        _take(low, x, source, index)
        return
    names = _names(low, index, dim, low.like(source))
    if names is not None:
        value, out = low.whole(source, late=late), low.room(like, late=late)
        _by_name(low, Way.TAKE_NAMED, out, value, names, value.width, late=late)
        low.values[x] = out
        return
    if isinstance(named := low.values.get(index), NamedMembers):
        take_named(low, x, named)
        return
    if (most := most_named(low, index)) is not None:
        take_most(low, x, most)
        return
    of = low.like(source)
    ints = _of_each(low, index, dim, of)
    if ints is None or x.kwargs or like.kind != BUNDLES or like.width != of.width:
        raise Refused("an axis is gathered")
    out = low.values[x] = low.room(like, late=late)
    known = low.values.get(source)
    cells, of_kind = None, MEMBERS
    if isinstance(known, HeldValue):  # that member alone is read
        at = low.held(known.number, like.width)
        value = RaggedValue(at, 0, like.width, HELD, 1, known.tail)
        cells, of_kind = low.cells, HELD
    else:
        value = low.whole(source, late=late)
    low.step(
        Way.TAKE_INSIDE,
        out,
        value,
        kind=BUNDLES,
        source=of_kind,
        index=ints,
        inside=True,
        cells=cells,
        late=late,
    )


def _scatter(low: AbstractLowering, x: fx.Node) -> None:
    """``_gather`` back."""
    args: Any = x.args
    base, dim, index, source = args
    like, late = low.like(x), low.late(x)
    if dim == 0:
        _add_at(low, x, base, index, source)
        return
    names = _names(low, index, dim, like)
    if names is not None:
        value, out = low.whole(source, late=late), low.room(like, late=late)
        low.plain(Op.COPY, out, low.full(low.fit(base, like, late=late), late=late), late=late)
        _by_name(low, Way.ADD_NAMED, out, value, names, like.width, late=late)
        low.values[x] = out
        return
    if (most := most_named(low, index)) is not None:
        put_most(low, x, most)
        return
    ints, begun = _of_each(low, index, dim, like), low.values.get(base)
    value = low.whole(source, late=late)
    if not isinstance(begun, Constant) or begun.number or value.width != like.width:
        raise Refused("an axis is scattered")
    if ints is None:
        raise Refused("an axis is scattered")
    out = low.values[x] = low.room(like, late=late)
    low.plain(Op.ZERO, out, late=late)
    low.step(
        Way.ADD_INSIDE,
        out,
        value,
        kind=BUNDLES,
        source=MEMBERS,
        index=ints,
        inside=True,
        late=late,
    )


def _table_back(low: AbstractLowering, x: fx.Node) -> None:
    low.values[x] = None  # the gradient of a weight


NUMBERED_ROWS: Final[Mapping[Any, Convert]] = {
    aten.embedding.default: _embed,
    aten.index.Tensor: _embed,
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_add,
    aten.scatter_reduce.two: _reduce,
    aten.index_reduce.default: _reduce,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_back,
    aten.gather.default: _gather,
    aten.scatter_add.default: _scatter,
    aten.embedding_dense_backward.default: _table_back,
}
