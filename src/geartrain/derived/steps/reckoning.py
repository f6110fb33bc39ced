"""Arithmetic on integers as steps in C: exact, and around at 64 bits, as torch's.

    int64 of arguments, truths, counts ─► sums, products, remainders, one of two ─► int64
                                              ─► outputs, row numbers, numbers where they meet such

Divided is by what is always the same and above 0: torch raises an error for 0, and C knows no such
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from geartrain.derived.steps.broadcast import broadcast
from geartrain.derived.steps.integers import across
from geartrain.derived.steps.pieces import axis_of
from geartrain.derived.steps.places import Like, Places, Refused, Value, like_of
from geartrain.derived.traces.indexed import WITHIN
from geartrain.native.fused import At, Op, Reckoning

aten = torch.ops.aten

_Found: TypeAlias = tuple[At | None, int]
"""Where integers are read, or the number that all of them are."""


def reckons(x: fx.Node) -> bool:
    """Whether what a node makes is integers, and reckoned as such."""
    like = x.meta.get("like")
    of_integers = isinstance(like, Like) and like.rows and like.dtype is torch.int64
    return of_integers and x.target in RECKONED


def reckon(places: Places, x: fx.Node) -> None:
    """Write what such a node does.

    Raises:
        Refused: There is no step for it.
    """
    places.values[x] = RECKONED[x.target](places, x)


def _operand(places: Places, x: Any, like: Like) -> _Found:
    """What is read for a result like this."""
    if isinstance(x, fx.Node) and x.target is aten.scalar_tensor.default:
        x = x.args[0]
    if isinstance(x, int):
        return None, int(x)
    return across(places.integers(x), like), 0


def _of_two(how: Reckoning) -> Callable[[Places, fx.Node], Value]:
    """Of integers and others, or a number."""

    def way(places: Places, x: fx.Node) -> Value:
        if x.kwargs or len(x.args) != 2:
            raise Refused
        return _written(places, x, how, *x.args)

    return way


def _written(places: Places, x: fx.Node, how: Reckoning, a: Any, b: Any) -> Value:
    like = like_of(x)
    (at, _), (other, number) = (_operand(places, y, like) for y in (a, b))
    if at is None:
        raise Refused
    if how in _DIVIDING and not (number >= 1 if other is None else _above_none(places, b)):
        raise Refused
    out = places.out_of_integers(x)
    read = [at] if other is None else [at, other]
    places.add(Op.RECKON, out, *read, many=number, inner=int(how))
    return out


def _above_none(places: Places, x: fx.Node) -> bool:
    """Whether it is always the same integers, above 0."""
    return places.is_constant(x) and int(places.constant(x, torch.int64)[1].min()) >= 1


def _by_number(how: Reckoning, number: int) -> Callable[[Places, fx.Node], Value]:
    """Of integers and always the same number."""
    return lambda places, x: _written(places, x, how, x.args[0], number)


def _divided(places: Places, x: fx.Node) -> Value:
    if dict(x.kwargs) != {"rounding_mode": "floor"}:
        raise Refused
    return _written(places, x, Reckoning.DIVIDED, *x.args)


def _clamped(places: Places, x: fx.Node) -> Value:
    """Between two numbers, of which one is none: see ``simpler.py``."""
    args: Any = x.args
    least, most = [*args[1:], None, None][:2]
    if (least is None) == (most is None):
        raise Refused
    if least is None:
        return _written(places, x, Reckoning.LOWER, args[0], most)
    return _written(places, x, Reckoning.UPPER, args[0], least)


def _one_of_two(places: Places, x: fx.Node) -> Value:
    args: Any = x.args
    return _picked(places, x, args[0], args[1], args[2])


def _filled(places: Places, x: fx.Node) -> Value:
    args: Any = x.args
    return _picked(places, x, args[1], args[2], args[0])


def _picked(places: Places, x: fx.Node, mask: Any, a: Any, b: Any) -> Value:
    like = like_of(x)
    where = broadcast(places, places.value(mask), like)
    (at, number), (other, instead) = (_operand(places, y, like) for y in (a, b))
    out = places.out_of_integers(x)
    read = where, at or At(), other or At()
    places.add(Op.PICK, out, *read, many=number, inner=instead)
    return out


def _constant(number: Callable[[Sequence[Any]], Any]) -> Callable[[Places, fx.Node], Value]:
    """The same in all rows: what it is, by the arguments."""

    def way(places: Places, x: fx.Node) -> Value:
        found = number(x.args)
        if not isinstance(found, int):
            raise Refused
        out = places.out_of_integers(x)
        places.add(Op.SET_INTEGERS, out, many=int(found))
        return out

    return way


def repeated(places: Places, x: fx.Node) -> Value:
    """One of each row, for all entries."""
    at = across(places.integers(x.args[0]), like_of(x))
    out = places.out_of_integers(x)
    places.copy_integers(at, out)
    return out


def _side_by_side(places: Places, x: fx.Node) -> Value:
    """Along the first axis of a row that has several entries."""
    args: Any = x.args
    tail, (at, _, inner) = like_of(x).tail, axis_of(like_of(x), args[1] if len(args) > 1 else 0)
    if math.prod(tail[:at]) != 1:
        raise Refused
    out, first = places.out_of_integers(x), 0
    for y in args[0]:
        piece = places.integers(y)
        places.copy_integers(piece.at, out.part(first * inner, piece.like.tail))
        first += piece.like.tail[at]
    return out


_DIVIDING: Final = {Reckoning.DIVIDED, Reckoning.LEFT, Reckoning.WITHIN}
_OF_TWO: Final[Mapping[Any, Reckoning]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), Reckoning.PLUS),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), Reckoning.MINUS),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), Reckoning.LESS_FROM),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), Reckoning.TIMES),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar), Reckoning.AND),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.bitwise_or.Scalar), Reckoning.OR),
    **dict.fromkeys((aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar), Reckoning.XOR),
    **dict.fromkeys((aten.minimum.default, aten.clamp_max.default), Reckoning.LOWER),
    **dict.fromkeys((aten.maximum.default, aten.clamp_min.default), Reckoning.UPPER),
    aten.floor_divide.default: Reckoning.DIVIDED,
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), Reckoning.LEFT),
    WITHIN: Reckoning.WITHIN,
}
CONSTANTS: Final[Mapping[Any, Callable[[Sequence[Any]], Any]]] = {
    **dict.fromkeys((aten.zeros_like.default, aten.new_zeros.default), lambda args: 0),
    **dict.fromkeys((aten.ones_like.default, aten.new_ones.default), lambda args: 1),
    **dict.fromkeys((aten.full_like.default, aten.full.default), lambda args: args[1]),
    **dict.fromkeys((aten.new_full.default,), lambda args: args[2]),
    aten.fill.Scalar: lambda args: args[1],
    aten.zeros.default: lambda args: 0,
    aten.ones.default: lambda args: 1,
}
"""The number that all entries of what they make are."""
RECKONED: Final[Mapping[Any, Callable[[Places, fx.Node], Value]]] = {
    **{target: _of_two(how) for target, how in _OF_TWO.items()},
    **{target: _constant(number) for target, number in CONSTANTS.items()},
    aten.neg.default: _by_number(Reckoning.LESS_FROM, 0),
    aten.bitwise_not.default: _by_number(Reckoning.XOR, -1),
    aten.div.Tensor_mode: _divided,
    aten.clamp.default: _clamped,
    aten.where.self: _one_of_two,
    aten.masked_fill.Scalar: _filled,
    aten.cat.default: _side_by_side,
}
"""What makes integers of integers, or of nothing."""
