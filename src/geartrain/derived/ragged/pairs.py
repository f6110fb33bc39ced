"""Members of a bundle that meet one another: pairs, of which a bundle of n members has n * n.

members ─► for the pairs in which they are the first, or the second ─► entry by entry, softmax
scores of pairs = a_i . b_j       sums of pairs ─► members       shares of pairs times members

The way back makes those pairs again that it reads: there may be many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.traced import same_numbers
from geartrain.derived.ragged.values import (
    BUNDLES,
    MEMBERS,
    NO_ROWS,
    PAIRS,
    Axes,
    RaggedValue,
)
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten


def fit_pairs(
    low: AbstractLowering, value: RaggedValue, mine: Axes, like: Axes, *, late: bool
) -> RaggedValue:
    """Numbers of rows of any kind as they are read for a result of pairs."""
    counted, tail = _behind_pairs(value, mine, like)
    value = replace(value, tail=tail) if value.times == 1 else _of_heads(low, value, tail, late)
    ahead, pair = like.rows[:-2], like.pair
    if value.kind == NO_ROWS:
        return value
    if value.kind == PAIRS and counted[-2:] == pair:
        return value
    if value.kind == BUNDLES and counted == ahead:
        value = low.spread(value, late=late)
        return paired(low, value, second=False, late=late)
    if value.kind == MEMBERS and len(counted) and counted[-1] in pair:
        return paired(low, value, second=counted[-1] == pair[1], late=late)
    raise Refused("axes that do not fit")


def _behind_pairs(
    value: RaggedValue, mine: Axes, like: Axes
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which axes of a result count rows of what is read, and its other axes without those."""
    shift = like.rank - mine.rank
    own: list[int | None] = [1] * shift
    for axis in range(mine.rank):
        k = mine.tail_axis(axis)
        own.append(value.tail[k] if k >= 0 else None)
    counted = tuple([k for k, n in enumerate(own) if n is None])
    if shift < 0 or any(own[k] not in (None, 1) for k in like.rows):
        raise Refused("axes that do not fit")
    tail = tuple([n for k, n in enumerate(own) if k not in like.rows and n is not None])
    if set(counted) - set(like.rows):
        raise Refused("axes that do not fit")
    if like.merged:
        tail = (mine.tail[0] if mine.merged else value.times, *tail)
    return counted, tail


def _of_heads(
    low: AbstractLowering, value: RaggedValue, tail: tuple[int, ...], late: bool
) -> RaggedValue:
    """Rows of which each bundle has one for each head."""
    if value.kind != BUNDLES or value.times != tail[0]:
        raise Refused("rows of two kinds meet")
    value = low.dense(value, late=late)
    return replace(value, times=1, row=value.times * value.row, tail=tail)


def paired(low: AbstractLowering, value: RaggedValue, *, second: bool, late: bool) -> RaggedValue:
    """What members have, for all pairs in which they are the first, or the second."""
    drafts = low.drafts(late=late)
    found = drafts.paired.get((value, second))
    if found is None:
        tail = () if value.one else value.tail
        found = low.room(Axes(PAIRS, 1, tail, 1), late=late)
        one = replace(value, one=False, tail=tail)
        if second:
            low.step(Way.PAIR_SECOND, found, one, kind=BUNDLES, late=late, inside=True)
        else:
            low.step(Way.SPREAD, found, one, kind=MEMBERS, late=late, pairs=True)
        found = replace(found, tail=value.tail, one=value.one)
        drafts.paired[value, second] = found
    return found


def turned(low: AbstractLowering, value: RaggedValue, *, late: bool) -> RaggedValue:
    """The same numbers, with the members of each pair the other way round."""
    drafts = low.drafts(late=late)
    out = low.room(low.like_value(value), late=late)
    value = low.full(value, late=late)
    low.step(Way.PAIR_TURN, out, value, kind=BUNDLES, late=late, inside=True)
    drafts.turned[out.buffer] = value
    return out


def _unturned(low: AbstractLowering, value: RaggedValue) -> RaggedValue | None:
    """What was turned, as long as nobody else has written it; None: it was not."""
    for drafts in (low.back, low.forward):
        found = drafts.turned.get(value.buffer)
        if found is not None and value.dense:
            return found
    return None


def sum_of_pairs(
    low: AbstractLowering, value: RaggedValue, dims: Sequence[int], like: Axes, *, late: bool
) -> RaggedValue:
    """Added up over the pairs of each member, as the first or the second, or of a bundle.

    Args:
        value: Numbers of pairs.
        dims: Axes that count rows, of one or both members.
        like: Axes of those.
    """
    if like.pair[1] in dims:
        out = sum_of_firsts(low, value, late=late)
    else:
        out = low.room(Axes(MEMBERS, 1, value.tail, 1), late=late)
        low.step(Way.PAIR_ADD_UP, out, value, kind=BUNDLES, late=late, inside=True)
    if len(dims) == 1:
        return out
    every = low.room(Axes(BUNDLES, 1, value.tail, 1), late=late)
    low.step(Way.SUM_OVER, every, out, kind=BUNDLES, late=late, inside=True)
    return every


def sum_of_firsts(low: AbstractLowering, value: RaggedValue, *, late: bool) -> RaggedValue:
    """Added up over the pairs in which each member is the first."""
    out = low.room(Axes(MEMBERS, 1, value.tail, 1), late=late)
    low.step(Way.SUM_OVER, out, value, kind=MEMBERS, late=late, pairs=True)
    return out


def scores(
    low: AbstractLowering,
    left: fx.Node,
    right: fx.Node,
    heads: int,
    width: int,
    like: Axes,
    *,
    late: bool,
) -> RaggedValue:
    """(members, width) times (width, members): numbers of pairs, for each head."""
    reads = [low.dense(low.whole(x, late=late), late=late) for x in (left, right)]
    out = low.room(like, late=late)
    low.step(
        Way.PAIR_DOT, out, *reads, kind=BUNDLES, late=late, inside=True, width=width, many=heads
    )
    return out


def shared(
    low: AbstractLowering,
    pairs: fx.Node,
    rows: fx.Node,
    heads: int,
    width: int,
    like: Axes,
    *,
    turn: bool,
    late: bool,
) -> RaggedValue:
    """Numbers of pairs times members: what each gets as their first; turned, as their second."""
    of, each = low.whole(pairs, late=late), low.whole(rows, late=late)
    source = _unturned(low, of)
    if source is not None:
        of, turn = source, not turn
    out = low.room(like, late=late)
    way = Way.PAIR_SUM_BACK if turn else Way.PAIR_SUM
    low.step(way, out, of, each, kind=BUNDLES, late=late, inside=True, width=width, many=heads)
    return out


def _apart(low: AbstractLowering, x: fx.Node) -> RaggedValue:
    """By how many places the second member of each pair is behind the first.

    Raises:
        Refused: It is not numbers of pairs that a node makes.
    """
    late, like = low.late(x), low.like(x)
    if like.second < 0 or like.tail[: like.at] != like.tail:
        raise Refused("a triangle of other than pairs")
    place = low.place(late=late)
    first, second = (paired(low, place, second=yes, late=late) for yes in (False, True))
    out = low.room(Axes(PAIRS, 1, (), 1), late=late)
    low.plain(Op.SUB, out, second, first, late=late)
    return replace(out, tail=like.tail, one=like.width > 1)


def _without(
    low: AbstractLowering, x: fx.Node, value: RaggedValue, *, upper: bool, by: int
) -> RaggedValue:
    """Numbers of pairs, but nothing where the second member is more than so many places behind the
    first; of the upper triangle, less than so many."""
    late, like = low.late(x), low.like(x)
    apart, out = low.full(_apart(low, x), late=late), low.room(like, late=late)
    if upper:
        apart, by = low.turned_over(apart, late=late), -by
    low.plain(Op.ABOVE, out, apart, number=float(by), late=late)
    low.plain(Op.FILL, out, value, out, number=0.0, late=late)
    return out


def _triangle(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    source, by = (*args, 0)[:2]
    same_numbers(x, low.twin[x])
    late = low.late(x)
    value = low.full(low.fit(source, low.like(x), late=late), late=late)
    low.values[x] = _without(low, x, value, upper=x.target is aten.triu.default, by=by)


def _themselves(low: AbstractLowering, x: fx.Node) -> None:
    """One where both members of a pair are the same; else rows that numbers take."""
    if not low.varies(x):
        low.values[x] = None
        return
    low.values[x] = _of_places(low, x, torch.eye(low.shapes[x][0]))


def of_places(low: AbstractLowering, x: fx.Node, found: torch.Tensor) -> RaggedValue | None:
    """A constant that is one where the second member of pairs is some places behind the first, no
    less than a number of them and no more than another, and else nothing; None: it is not."""
    square = found.ndim == 2 and found.shape[0] == found.shape[1]
    return _of_places(low, x, found) if square and low.varies(x) else None


def _of_places(low: AbstractLowering, x: fx.Node, found: torch.Tensor) -> RaggedValue | None:
    ones, n = torch.ones_like(found), found.shape[0]
    there = [d for d in range(1 - n, n) if found.diagonal(d).any()]
    least, most = (there[0], there[-1]) if there else (0, -1)
    if not torch.equal(found, ones.tril(most).triu(least)):
        return None
    late = low.late(x)
    value = low.room(low.like(x), late=late)
    low.plain(Op.ZERO, value, late=late)
    low.plain(Op.ADD_NUMBER, value, value, number=1.0, late=late)
    if most < n - 1:
        value = _without(low, x, value, upper=False, by=most)
    return value if least == 1 - n else _without(low, x, value, upper=True, by=least)


PAIRED_ROWS: Final[Mapping[Any, Convert]] = {
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten.eye.default: _themselves,
    aten.eye.m: _themselves,
}
