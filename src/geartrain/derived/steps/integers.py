"""Operators on integers that have a step in C.

    int64 ─► compared as integers ─► truths, as numbers
          ─► numbers, where they meet numbers
    the place of the most, and which entries come first in order

What comes out of here is small, or a truth, so that a number of the program's dtype has it exactly.
``reckoning.py`` makes integers of integers, and ``named.py`` reads entries by them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import fx

from geartrain.derived.steps.broadcast import step
from geartrain.derived.steps.pieces import axis_of
from geartrain.derived.steps.places import LARGEST, RESHAPES, Like, Places, Refused, Value, like_of
from geartrain.native.fused import At, Op

aten = torch.ops.aten

_LESS, _SAME, _MORE = 1, 2, 4
COMPARED: Final[Mapping[Any, int]] = {
    **dict.fromkeys((aten.lt.Scalar, aten.lt.Tensor), _LESS),
    **dict.fromkeys((aten.le.Scalar, aten.le.Tensor), _LESS + _SAME),
    **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), _SAME),
    **dict.fromkeys((aten.ne.Scalar, aten.ne.Tensor), _LESS + _MORE),
    **dict.fromkeys((aten.ge.Scalar, aten.ge.Tensor), _SAME + _MORE),
    **dict.fromkeys((aten.gt.Scalar, aten.gt.Tensor), _MORE),
}
"""Operators, and the outcomes of a comparison that they ask for."""


def compares(places: Places, x: fx.Node) -> bool:
    """Whether a node compares nothing but integers, of which some are int64."""
    if x.target not in COMPARED or x.kwargs:
        return False
    given = [y for y in x.args if not isinstance(y, int)]
    integers = all(_is_of_integers(places, y) for y in given)
    return integers and any(places.held(y).whole for y in given)


def _is_of_integers(places: Places, x: Any) -> bool:
    like = x.meta.get("like") if isinstance(x, fx.Node) else None
    if not isinstance(like, Like) or not (like.rows or places.is_constant(x)):
        return False
    return like.dtype is torch.int64 or (like.dtype is torch.bool and like.rows)


def compare(places: Places, x: fx.Node) -> None:
    """Integers as such, with others or with one."""
    a, b = x.args
    which, like = COMPARED[x.target], like_of(x)
    read = [across(places.integers(y), like) for y in (a, b) if isinstance(y, fx.Node)]
    number = b if isinstance(b, int) else 0
    _write_comparison(places, x, read, number, which)


def _write_comparison(places: Places, x: fx.Node, read: list[At], number: int, which: int) -> None:
    out = places.values[x] = places.out(x)
    places.add(Op.COMPARE, out, *read, many=number, inner=which)


def across(value: Value, like: Like) -> At:
    """Where integers are read, each for itself or one for all of a row."""
    tail = value.like.beside(like)
    if tail == like.tail:
        return value.at
    if value.like.width != 1 or len(tail) != len(like.tail):
        raise Refused
    return replace(value.at, one=True)


def convert_dtype(places: Places, x: fx.Node) -> Value:
    """A truth or a count is a number as it is; integers of an argument become numbers."""
    args: Any = x.args
    source, like, before = places.held(args[0]), like_of(x), like_of(args[0]).dtype
    if not source.like.rows or not set(x.kwargs) <= _NEITHER_HERE_NOR_THERE:
        raise Refused
    if like.dtype is before:
        return source
    if like.dtype is torch.bool:
        if source.whole:
            _write_comparison(places, x, [source.at], 0, _LESS + _MORE)
        else:
            step(places, x, Op.OTHER_THAN, args[:1], 0.0)
        found: Value = places.values[x]
        return found
    if before is places.dtype and like.dtype is torch.int64:
        step(places, x, Op.TRUNCATE, args[:1])  # a number has it exactly
        cut: Value = places.values[x]
        return cut
    if before not in (torch.bool, torch.int64) or like.dtype not in (places.dtype, torch.int64):
        raise Refused
    return replace(places.value(args[0]), like=like)


_NEITHER_HERE_NOR_THERE: Final = {"dtype", "layout", "device", "memory_format"}


def most(places: Places, x: fx.Node) -> None:
    """The largest or least of some axes that are neighbours."""
    args: Any = x.args
    like = like_of(args[0])
    dims = sorted(d % (len(like.tail) + 1) for d in args[1])
    if not dims or dims[0] == 0 or dims != list(range(dims[0], dims[-1] + 1)):
        raise Refused
    many, inner = math.prod(like.tail[dims[0] - 1 : dims[-1]]), math.prod(like.tail[dims[-1] :])
    least = x.target is aten.amin.default
    source = _maybe_negative(places, args[0], least)
    out = places.out(x)
    _write_most(places, out, source, least, many, inner)
    places.values[x] = out


def _maybe_negative(places: Places, x: fx.Node, least: bool) -> Value:
    """What is read for the most of it, or for the least; of integers, numbers may be alike."""
    whole, source = places.held(x).whole, places.value(x)
    if not source.like.rows or whole:
        raise Refused
    if not least:
        return source
    other = places.spare(source.like)
    places.add(Op.NEG, other, source.at)
    return other


def _write_most(
    places: Places, out: Value, source: Value, least: bool, many: int, inner: int
) -> None:
    places.add(Op.MOST, out, source.at, many=many, inner=inner)
    if least:
        places.add(Op.NEG, out, out.at)


def most_and_where(places: Places, x: fx.Node) -> None:
    """The largest or least of an axis, and which it is, if anybody asks."""
    args: Any = x.args
    _, many, inner = axis_of(like_of(args[0]), args[1])
    least = x.target is aten.min.dim
    source = _maybe_negative(places, args[0], least)
    result: list[Value | None] = [None, None]
    for k, y in places.items(x).items():
        out = result[k] = places.out(y)
        if k == 0:
            _write_most(places, out, source, least, many, inner)
        else:
            _write_where(places, out, source, many, inner)
    places.values[x] = result


def _write_where(places: Places, out: Value, source: Value, many: int, inner: int) -> None:
    if many > LARGEST:
        raise Refused
    places.add(Op.MOST_AT, out, source.at, many=many, inner=inner)


def where_most(places: Places, x: fx.Node) -> None:
    """Which of an axis is the first of the largest, or of the least."""
    args: Any = x.args
    if len(args) < 2 or args[1] is None:
        raise Refused
    _, many, inner = axis_of(like_of(args[0]), args[1])
    source = _maybe_negative(places, args[0], x.target is aten.argmin.default)
    out = places.out(x)
    _write_where(places, out, source, many, inner)
    places.values[x] = out


def _topmost(places: Places, x: fx.Node) -> None:
    """The largest of an axis, or the least, in order, and which they are."""
    args: list[Any] = [*x.args, *_AS_TOPK[len(x.args) :]]
    _, some, dim, largest, in_order = args
    if x.kwargs or not in_order:
        raise Refused
    _rank(places, x, dim, some, down=largest)


def _sorted(places: Places, x: fx.Node) -> None:
    args: list[Any] = [*x.args, *_AS_SORT[len(x.args) :]]
    if x.kwargs:
        raise Refused
    _rank(places, x, args[1], None, down=args[2])


def _sorted_as_it_was(places: Places, x: fx.Node) -> None:
    """Of those alike the first comes first, as it does in C."""
    kwargs: Any = x.kwargs
    if len(x.args) > 1 or not set(kwargs) <= {"stable", "dim", "descending"}:
        raise Refused
    _rank(places, x, kwargs.get("dim", -1), None, down=kwargs.get("descending", False))


def _rank(places: Places, x: fx.Node, dim: int, some: int | None, *, down: bool) -> None:
    """Which of an axis come first, so many, and these."""
    source = places.held(x.args[0])
    if not source.like.rows or source.whole or source.like.dtype is not places.dtype:
        raise Refused
    at, many, inner = axis_of(source.like, dim)
    some = many if some is None else some
    if not 0 < some <= many or some * many > MOST_RANKED:
        raise Refused
    tail = (*source.like.tail[:at], some, *source.like.tail[at + 1 :])
    items = places.items(x)
    found: list[Value | None] = [None, None]
    which = places.out(items[1]) if 1 in items else places.spare(replace(source.like, tail=tail))
    op = Op.RANK if down else Op.RANK_UP
    places.add(op, which, source.at, number=some, many=many, inner=inner)
    found[1] = which
    if 0 in items:
        out = found[0] = places.out(items[0])
        places.add(Op.GATHER, out, source.at, which.at, number=some, many=many, inner=inner)
    places.values[x] = found


_AS_TOPK: Final = (None, None, -1, True, True)
_AS_SORT: Final = (None, -1, False)
_WHICH: Final = (
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.max.dim,
    aten.min.dim,
    aten.cummax.default,
    aten.cummin.default,
)
"""What finds, beside entries, which of an axis they are."""
MOST_RANKED: Final = 1 << 14
"""Comparisons for each row, of every entry with those wanted, that are worth a step."""
COUNTS: Final = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.argmax.default,
    aten.argmin.default,
    aten.embedding.default,  # of a unit matrix
}
"""What makes integers that a number has exactly."""


def is_count(x: fx.Node) -> bool:
    """Whether integers are told by numbers, as steps make them."""
    while x.target in RESHAPES:
        x = cast("fx.Node", x.args[0])
    if x.target is not operator.getitem:
        return x.target in COUNTS
    args: Any = x.args
    return args[0].target in _WHICH and args[1] == 1


INTEGERS: Final[Mapping[Any, Callable[[Places, fx.Node], None]]] = {
    aten.topk.default: _topmost,
    aten.sort.default: _sorted,
    aten.sort.stable: _sorted_as_it_was,
    aten.amax.default: most,
    aten.amin.default: most,
    aten.max.dim: most_and_where,
    aten.min.dim: most_and_where,
    aten.argmax.default: where_most,
    aten.argmin.default: where_most,
}
