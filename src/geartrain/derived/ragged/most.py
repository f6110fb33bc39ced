"""The member of each bundle that has the most: its number, one for it alone, and what it has.

argmax over members ─► one_hot          one for it, nothing for all others
                    ─► gather           what it has, added up as all others have nothing
                    ─► anything else    its number in the bundle
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.traced import SAME
from geartrain.derived.ragged.values import (
    BUNDLES,
    MEMBERS,
    PADDED,
    Axes,
    Constant,
    MostOf,
    RaggedValue,
)
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten

UNITS: Final = frozenset({aten.eye.default, aten.eye.m})
"""Squares, of which a number takes what is one there, and else nothing."""
_LEAST: Final[Mapping[Any, bool]] = {aten.argmax.default: False, aten.argmin.default: True}


def most_named(low: AbstractLowering, index: Any) -> MostOf | None:
    """Which member integers are the number of; None: of none that has the most."""
    while isinstance(index, fx.Node) and index.target in SAME:
        index = index.args[0]
    if not isinstance(index, fx.Node) or index.target not in _LEAST:
        return None
    args: Any = index.args
    if len(args) < 2 or args[1] is None:
        return None
    return MostOf(args[0], args[1] % len(low.shapes[args[0]]), _LEAST[index.target])


def _number(low: AbstractLowering, x: fx.Node) -> None:
    """The number of it, where more is asked than rows of a unit matrix, and what it has."""
    known, late = most_named(low, x), low.late(x)
    if known is None:
        raise Refused("the most of several axes")
    if all(_takes(y, x) for y in x.users):
        low.values[x] = known
        return
    one, out = one_of(low, known, late=late), low.room(low.like(x), late=late)
    low.plain(Op.MUL, one, one, low.place(late=late), late=late)
    low.step(Way.SUM_OVER, out, one, kind=BUNDLES, late=late, inside=True)
    low.values[x] = out


def _takes(x: fx.Node, index: fx.Node) -> bool:
    """Whether it takes rows of a unit matrix, or entries, by these numbers."""
    args: Any = x.args
    if x.target in SAME:
        return x.target is not aten._to_copy.default and all(_takes(y, x) for y in x.users)
    if x.target in (aten.gather.default, aten.scatter_add.default):
        return args[2] is index
    return x.target is aten.embedding.default and args[1] is index and args[0].target in UNITS


def _each(low: AbstractLowering, known: MostOf) -> Axes:
    """The axes of what members have, where it is one number of each.

    Raises:
        Refused: It is not.
    """
    like = low.like(known.node)
    if not like.is_padded or like.members != known.dim or like.width != 1 or like.merged:
        raise Refused("where the most is of other than one number of each member")
    return like


def one_of(low: AbstractLowering, known: MostOf, *, late: bool) -> RaggedValue:
    """One for the first of the largest, or the least, of each bundle; nothing for all others."""
    _each(low, known)
    source = low.whole(known.node, late=late)
    source = low.turned_over(source, late=late) if known.least else source
    ones, out = (low.room(Axes(kind, 1, (), 1), late=late) for kind in (BUNDLES, MEMBERS))
    low.plain(Op.ZERO, ones, late=late)
    low.plain(Op.ADD_NUMBER, ones, ones, number=1.0, late=late)
    low.step(Way.MOST_OVER_BACK, out, ones, source, kind=BUNDLES, late=late, inside=True)
    return out


def take_most(low: AbstractLowering, x: fx.Node, known: MostOf) -> None:
    """What it has."""
    args: Any = x.args
    late, of, like = low.late(x), low.like(args[0]), low.like(x)
    _check(low, x, of, like)
    value = low.whole(args[0], late=late)
    its = low.room(Axes(MEMBERS, 1, of.tail, 1), late=late)
    _times(low, its, value, known, late=late)
    out = low.values[x] = low.room(like, late=late)
    low.step(Way.SUM_OVER, out, its, kind=BUNDLES, late=late, inside=True)


def put_most(low: AbstractLowering, x: fx.Node, known: MostOf) -> None:
    """``take_most`` back."""
    args: Any = x.args
    late, like, begun = low.late(x), low.like(x), low.values.get(args[0])
    _check(low, x, like, low.like(args[3]))
    if not isinstance(begun, Constant) or begun.number:
        raise Refused("an axis is scattered")
    value = low.spread(low.whole(args[3], late=late), late=late)
    out = low.values[x] = low.room(like, late=late)
    _times(low, out, value, known, late=late)


def _check(low: AbstractLowering, x: fx.Node, of: Axes, one: Axes) -> None:
    """Raises:
    Refused: Not one member of each bundle is taken, along their axis.
    """
    args: Any = x.args
    along = of.is_padded and not of.merged and args[1] % len(low.shapes[x]) == of.members
    if not along or x.kwargs or (one.kind, one.lead) == (MEMBERS, PADDED):
        raise Refused("an axis is gathered")
    if one.kind != BUNDLES or one.width != of.width:
        raise Refused("an axis is gathered")


def _times(
    low: AbstractLowering, out: RaggedValue, value: RaggedValue, known: MostOf, *, late: bool
) -> None:
    one = one_of(low, known, late=late)
    low.plain(Op.MUL, out, value, replace(one, tail=out.tail, one=out.width > 1), late=late)


MOST: Final[Mapping[Any, Convert]] = dict.fromkeys(_LEAST, _number)
