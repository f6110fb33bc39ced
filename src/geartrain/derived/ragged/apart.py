"""Operators that are done entry by entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.traced import same_numbers
from geartrain.derived.ragged.values import Constant
from geartrain.derived.steps.entries import NUMBERED, NUMBERS, ONE, TWO
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op

aten = torch.ops.aten

_SWAPPED: Final = {Op.ADD: Op.ADD_NUMBER, Op.MUL: Op.TIMES_NUMBER, Op.SUB: Op.NUMBER_LESS}
"""Of a number and a tensor."""


def arithmetic(low: AbstractLowering, x: fx.Node) -> None:
    """Write the step of an operator that steps of rows have too.

    Raises:
        Refused: There is none.
    """
    target: Any = x.target
    args: list[Any] = [low.number(a) for a in x.args]
    if x.kwargs and dict(x.kwargs) != {"approximate": "none"}:
        raise Refused(f"{target} with options")
    if not any(isinstance(a, fx.Node) for a in args):
        low.values[x] = Constant(_of_numbers(low, x, args))
    elif target in NUMBERED:
        same_numbers(x, low.twin[x])
        op, sources, number = NUMBERED[target](*args)
        low.elementwise(x, op, sources, number, ones=len(sources) - 1)
    elif target in ONE and len(args) == 1:
        low.elementwise(x, ONE[target], args)
    elif target in NUMBERS and len(args) == 2 and isinstance(args[1], (int, float)):
        _with_number(low, x, args)
    elif target in TWO and len(args) == 2:
        _of_two(low, x, args)
    else:
        raise Refused(f"{target} has no steps")


def _of_numbers(low: AbstractLowering, x: fx.Node, args: list[Any]) -> float:
    """What an operator makes of tensors that are the same everywhere, as ``1 - mask`` is.

    Raises:
        Refused: It is not done entry by entry, or depends on how many rows there are.
    """
    target: Any = x.target
    same_numbers(x, low.twin[x])
    if not any(target in each for each in (NUMBERED, ONE, NUMBERS, TWO)):
        raise Refused(f"{target} has no steps")
    given = [
        torch.tensor(a, dtype=s.meta["dtype"]) if isinstance(s, fx.Node) else a
        for a, s in zip(args, x.args, strict=True)
    ]
    return float(target(*given))


def _with_number(low: AbstractLowering, x: fx.Node, args: list[Any]) -> None:
    same_numbers(x, low.twin[x])
    op, number = NUMBERS[x.target](float(args[1]))
    if (op, number) in ((Op.TIMES_NUMBER, 1.0), (Op.ADD_NUMBER, 0.0)):
        low.values[x] = low.fit(args[0], low.like(x), late=low.late(x))
    else:
        low.elementwise(x, op, args[:1], number)


def _of_two(low: AbstractLowering, x: fx.Node, args: list[Any]) -> None:
    op, every = TWO[x.target], list(x.args)
    if isinstance(args[0], float) and op in _SWAPPED:
        low.elementwise(x, _SWAPPED[op], args[1:], args[0])
    elif all(isinstance(a, fx.Node) for a in every):
        low.elementwise(x, op, every, ones=1)
    else:
        raise Refused(f"{x.target} of a number")


def _fill(low: AbstractLowering, x: fx.Node) -> None:
    source, mask, number = x.args
    if not isinstance(number, (int, float)):
        raise Refused("filled with other than a number")
    known = low.number(mask)
    if isinstance(known, float):
        if known:
            low.values[x] = Constant(float(number))
        else:
            low.values[x] = low.fit(source, low.like(x), late=low.late(x))
        return
    low.elementwise(x, Op.FILL, [source, mask], float(number), ones=1)


def _where(low: AbstractLowering, x: fx.Node) -> None:
    mask, one, other = x.args
    known = low.number(mask)
    if isinstance(known, float):
        which = one if known else other
        number = low.number(which)
        if isinstance(number, float):
            low.values[x] = Constant(number)
        else:
            low.values[x] = low.fit(which, low.like(x), late=low.late(x))
        return
    low.elementwise(x, Op.WHERE, [mask, one, other])


def _not(low: AbstractLowering, x: fx.Node) -> None:
    known = low.number(x.args[0])
    if isinstance(known, float):
        low.values[x] = Constant(1.0 - known)
    else:
        low.elementwise(x, Op.NUMBER_LESS, x.args, 1.0)


def _and(low: AbstractLowering, x: fx.Node) -> None:
    one, other = (low.number(a) for a in x.args)
    if isinstance(one, float) and isinstance(other, float):
        low.values[x] = Constant(one * other)
    else:
        low.elementwise(x, Op.MUL, x.args, ones=1)


def _less(low: AbstractLowering, x: fx.Node) -> None:
    """Less than a number, or no more: not from it on, or not above it."""
    args: Any = x.args
    same_numbers(x, low.twin[x])
    op = Op.FROM if x.target is aten.lt.Scalar else Op.ABOVE
    low.elementwise(x, op, args[:1], float(args[1]))
    low.elementwise(x, Op.NUMBER_LESS, [x], 1.0)


def _threshold(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    low.elementwise(x, Op.THRESHOLD_BACK, args[:2], float(args[2]))


def _at_least(low: AbstractLowering, x: fx.Node) -> None:
    number = low.number(x.args[1])
    if isinstance(number, float):
        low.elementwise(x, Op.AT_LEAST, x.args[:1], number)
    else:
        low.elementwise(x, Op.MAXIMUM, x.args, ones=1)


def _between(low: AbstractLowering, x: fx.Node) -> None:
    """No less than a number, and no more than another."""
    source, least, most = (*x.args, None)[:3]
    same_numbers(x, low.twin[x])
    for op, number in ((Op.AT_LEAST, least), (Op.AT_MOST, most)):
        if isinstance(number, (int, float)):
            low.elementwise(x, op, [source], float(number))
            source = x


def _between_back(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    came, source, least, most = args
    late, like = low.late(x), low.like(x)
    low.elementwise(x, Op.THRESHOLD_BACK, [came, source], float(least), ones=1)
    first, out = low.whole(x, late=late), low.room(like, late=late)
    turned = low.room(like, late=late)
    low.plain(Op.NEG, turned, low.full(low.fit(source, like, late=late), late=late), late=late)
    low.plain(Op.THRESHOLD_BACK, out, first, turned, number=-float(most), late=late)
    low.values[x] = out


def _log_sigmoid(low: AbstractLowering, x: fx.Node) -> None:
    """-log(1 + exp(-x))"""
    late = low.late(x)
    value = low.whole(x.args[0], late=late)
    out = low.room(low.like_value(value), late=late)
    for op, source in ((Op.NEG, value), (Op.SOFTPLUS, out), (Op.NEG, out)):
        low.plain(op, out, source, late=late)
    low.values[x] = [out, None]


def _log_sigmoid_back(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    late, like = low.late(x), low.like(x)
    value, dy = low.whole(args[1], late=late), low.whole(args[0], late=late)
    out = low.values[x] = low.room(like, late=late)
    low.plain(Op.NEG, out, value, late=late)
    low.plain(Op.SIGMOID, out, out, late=late)
    low.plain(Op.MUL, out, dy, out, late=late)


APART: Final[Mapping[Any, Convert]] = {
    aten.masked_fill.Scalar: _fill,
    aten.where.self: _where,
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.bitwise_and.Tensor: _and,
    aten.logical_and.default: _and,
    aten.lt.Scalar: _less,
    aten.le.Scalar: _less,
    aten.threshold_backward.default: _threshold,
    aten.clamp_min.Tensor: _at_least,
    aten.hardtanh.default: _between,
    aten.clamp.default: _between,
    aten.hardtanh_backward.default: _between_back,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.log_sigmoid_backward.default: _log_sigmoid_back,
}
