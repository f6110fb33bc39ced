"""Members that name others of their bundle: those with whom they have the most, by a score.

scores of pairs ─► topk ─► numbers in the bundle ─► what the pairs with them have
                                 │
                                 + the first of the bundle ─► what they have themselves
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.traced import same_numbers
from geartrain.derived.ragged.values import (
    BUNDLES,
    MEMBERS,
    Axes,
    Constant,
    CountedRows,
    NamedMembers,
    RaggedValue,
)
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten


def _top(low: AbstractLowering, x: fx.Node) -> None:
    """The most over the second members of pairs; where there are fewer, the rest are no numbers."""
    source, many, *rest = list[Any](x.args)
    dim, most, in_order = rest + [-1, True, True][len(rest) :]
    same_numbers(x, low.twin[x])
    late, like = low.late(x), low.like(source)
    at = like.second >= 0 and dim % len(low.shapes[source]) == like.pair[1]
    if not at or like.width != 1 or not most or not in_order:
        raise Refused("the most over other than the second members of pairs")
    value = low.whole(source, late=late)
    rows = Axes(MEMBERS, 1, (many,), 1)
    names, found = (low.room(rows, late=late) for _ in range(2))
    ways = (Way.PAIR_TOP, names, (value,)), (Way.PAIR_TAKE, found, (value, names))
    for way, out, reads in ways:
        how = {"width": 1, "many": many, "number": -math.inf}
        low.step(way, out, *reads, kind=BUNDLES, late=late, inside=True, **how)
    low.values[x] = [found, NamedMembers(names)]


def put_named(low: AbstractLowering, x: fx.Node, named: NamedMembers) -> None:
    """Numbers of members put where the pairs with those are that they name."""
    args: Any = x.args
    base, dim, _, came = args
    late, like, begun = low.late(x), low.like(x), low.values.get(base)
    at = like.second >= 0 and dim % len(low.shapes[x]) == like.pair[1] and like.width == 1
    if not at or named.whole or not isinstance(begun, Constant) or begun.number:
        raise Refused("an axis is scattered")
    out = low.values[x] = low.room(like, late=late)
    _named(low, Way.PAIR_PUT, out, low.whole(came, late=late), named, 1, late=late)


def take_named(low: AbstractLowering, x: fx.Node, named: NamedMembers) -> None:
    """What the pairs with members have that these numbers name."""
    args: Any = x.args
    source, dim, late = args[0], args[1], low.late(x)
    like = low.like(source)
    at = like.second >= 0 and dim % len(low.shapes[x]) == like.pair[1] and like.width == 1
    if not at or named.whole:
        raise Refused("an axis is gathered")
    out = low.values[x] = low.room(low.like(x), late=late)
    _named(low, Way.PAIR_TAKE, out, low.whole(source, late=late), named, 1, late=late)


def among_all(low: AbstractLowering, x: fx.Node) -> NamedMembers | None:
    """Members that a node names among all, as those of a bundle behind its first; None: it names
    none."""
    if x.target is not aten.add.Tensor or x.kwargs or low.padding is None:
        return None
    for one, other in (x.args, x.args[::-1]):
        named = low.values.get(one) if isinstance(one, fx.Node) else None
        if isinstance(named, NamedMembers) and not named.whole and isinstance(other, fx.Node):
            counted = isinstance(low.values.get(other), CountedRows)
            if counted and low.padding.are_firsts(other):
                return replace(named, whole=True)
    return None


def others(
    low: AbstractLowering, value: RaggedValue, named: NamedMembers, like: Axes, *, late: bool
) -> RaggedValue:
    """What members have that are named."""
    _check(named, value, like)
    out = low.room(like, late=late)
    _named(low, Way.TAKE_OTHER, out, value, named, value.width, late=late)
    return out


def add_to_others(
    low: AbstractLowering, value: RaggedValue, named: NamedMembers, like: Axes, *, late: bool
) -> RaggedValue:
    """Rows added to members that are named, where nothing is there yet."""
    _check(named, like, value)
    out = low.room(like, late=late)
    low.plain(Op.ZERO, out, late=late)
    _named(low, Way.ADD_OTHER, out, value, named, like.width, late=late)
    return out


def _check(named: NamedMembers, one: RaggedValue | Axes, several: RaggedValue | Axes) -> None:
    """Raises:
    Refused: Several are not one for each that is named.
    """
    many = math.prod(named.value.tail)
    kinds = (one.kind, one.times, several.kind, several.times)
    if not named.whole or kinds != (MEMBERS, 1, MEMBERS, 1) or several.width != many * one.width:
        raise Refused("rows are taken by numbers that are computed")


def _named(
    low: AbstractLowering,
    way: Way,
    out: RaggedValue,
    value: RaggedValue,
    named: NamedMembers,
    width: int,
    *,
    late: bool,
) -> None:
    many = math.prod(named.value.tail)
    reads = value, named.value
    low.step(way, out, *reads, kind=BUNDLES, late=late, inside=True, width=width, many=many)


OTHERS: Final[Mapping[Any, Convert]] = {aten.topk.default: _top}
