"""Entries of a row that are named by number, as steps in C.

    gather(x, 1, k)            ─► those of an axis that k says, and back: added up there
    x[arange(len(x)), k]       ─► the same; a number below 0 counts from the end
    of integers                ─► integers

What is named may be several neighbours, where all of them have one number: it is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import fx

from geartrain.derived.steps.broadcast import broadcast, stretch
from geartrain.derived.steps.pieces import axis_of
from geartrain.derived.steps.places import LARGEST, Like, Places, Refused, Value, like_of
from geartrain.derived.traces.counted import ONCE
from geartrain.native.fused import At, Op

aten = torch.ops.aten


def row_numbers(places: Places, x: fx.Node) -> Value:
    """The number of each row, which lies nowhere: it may say that a row is of that row."""
    like, (*first, end) = like_of(x), x.args
    counts = isinstance(end, fx.Node) and end.op == "placeholder"
    if first not in ([], [0]) or not counts or like != Like((), True, torch.int64):
        raise Refused
    return Value(At(), like, whole=True, ordinal=True)


def repeats_for_neighbours(x: fx.Node) -> int:
    """Of numbers that are repeated along the last axes, for how many entries; else 0."""
    own, like = like_of(cast("fx.Node", x.args[0])), like_of(x)
    if not own.rows or len(own.tail) != len(like.tail):
        return 0
    at = len(own.tail)
    while at and own.tail[at - 1] == 1:
        at -= 1
    return math.prod(like.tail[at:]) if own.tail[:at] == like.tail[:at] else 0


def is_named_by(x: fx.Node) -> bool:
    """Whether nobody reads numbers but as names of entries."""
    return all(y.target in NAMING and _is_index_alone(y, x) for y in x.users)


def _is_index_alone(y: fx.Node, x: fx.Node) -> bool:
    return [k for k, z in enumerate(y.args) if z is x] == [2]


def _numbers(places: Places, x: fx.Node, inner: int) -> tuple[Value, int]:
    """Where numbers lie, and for how many neighbours each is, of so many behind the axis."""
    if x.target is not aten.expand.default or x in places.values:
        return places.value(x), 1
    source, piece = places.value(x.args[0]), repeats_for_neighbours(x)
    if piece and inner % piece == 0:
        return source, piece
    out = places.values[x] = places.spare(like_of(x))
    stretch(places, out, source.at, source.like.tail)
    return out, 1


def gather(places: Places, x: fx.Node) -> None:
    """Entries of an axis, by number."""
    args: Any = x.args
    source, dim, index = args
    row = places.held(source)
    some, many, inner = _named(row.like, like_of(index), dim)
    if x.kwargs or like_of(x).tail != like_of(index).tail:
        raise Refused
    _gather(places, x, row, _numbers(places, index, inner), (some, many, inner))


def scatter(places: Places, x: fx.Node) -> None:
    """Of zeros, what goes by number to entries of an axis, added up; or in place of what there was,
    where no two go to one entry."""
    args: Any = x.args
    zeros, dim, index, source = args
    came = places.value(source)
    some, many, inner = _named(like_of(x), like_of(index), dim)
    alone = x.target is aten.scatter_add.default or some == 1 or x.meta.get(ONCE, False)
    if x.kwargs or not alone or came.like.tail != like_of(index).tail or not came.like.rows:
        raise Refused
    numbers, sizes = _numbers(places, index, inner), (some, many, inner)
    if x.target is aten.scatter.src and zeros.target not in ZEROS:
        _scatter_over(places, x, zeros, came, numbers, sizes)
    else:
        _scatter(places, x, zeros, came, numbers, sizes)


def _scatter_over(
    places: Places,
    x: fx.Node,
    before: fx.Node,
    came: Value,
    numbers: tuple[Value, int],
    sizes: tuple[int, int, int],
) -> None:
    """In place of what there was."""
    (which, piece), (some, many, inner), like = numbers, sizes, like_of(x)
    had, put, mask = broadcast(places, places.value(before), like), *map(places.spare, [like] * 2)
    ones = places.held_for(torch.ones(came.like.width, dtype=places.dtype))
    for to, at in ((put, came.at), (mask, ones)):
        read = at, which.at, At(at=piece)
        places.add(Op.SCATTER, to, *read, number=some, many=many, inner=inner)
    out = places.values[x] = places.out(x)
    places.add(Op.WHERE, out, mask.at, put.at, had)


def _named(whole: Like, index: Like, dim: int) -> tuple[int, int, int]:
    """How many of an axis are named, how many there are, and entries after it."""
    at, many, inner = axis_of(whole, dim)
    if len(index.tail) != len(whole.tail) or not index.rows:
        raise Refused
    if any(a != b for k, (a, b) in enumerate(zip(index.tail, whole.tail, strict=True)) if k != at):
        raise Refused
    return index.tail[at], many, inner


def names(places: Places, x: fx.Node) -> bool:
    """Whether a node looks up entries, which may be integers, by number."""
    by_rows = x.target is aten.index.Tensor and not places.is_constant(x.all_input_nodes[-1])
    return by_rows or x.target is aten.gather.default


def by_numbers(places: Places, x: fx.Node) -> None:
    """Of each row, along its first axis, those that numbers say."""
    args: Any = x.args
    row = places.held(args[0])
    which, sizes = _of_rows(places, row.like, args[1])
    if like_of(x).tail != (*which.like.tail, *row.like.tail[1:]):
        raise Refused
    _gather(places, x, row, (which, sizes[2]), sizes)


def put_by_numbers(places: Places, x: fx.Node) -> None:
    """What goes back there, added up."""
    args: Any = x.args
    zeros, index, source, adds = [*args, False][:4]
    came, like = places.value(source), like_of(x)
    which, sizes = _of_rows(places, like, index)
    if x.kwargs or not adds or came.like.tail != (*which.like.tail, *like.tail[1:]):
        raise Refused
    _scatter(places, x, zeros, came, (which, sizes[2]), sizes)


def _of_rows(places: Places, like: Like, index: Any) -> tuple[Value, tuple[int, int, int]]:
    """Numbers along the first axis of a row, from 0 on, and what they name, as ``_named``."""
    if len(index) != 2 or not all(isinstance(k, fx.Node) for k in index):
        raise Refused
    own, which = places.raw(index[0]), places.value(index[1])
    tails = own.like.tail, which.like.tail
    if not own.ordinal or not which.like.rows or not like.rows or not like.tail:
        raise Refused
    if len(tails[0]) != len(tails[1]) or math.prod(tails[0]) != 1:
        raise Refused
    many, inner = like.tail[0], math.prod(like.tail[1:])
    below, found = places.spare(which.like), places.spare(which.like)
    places.add(Op.BELOW, below, which.at)
    places.add(Op.TIMES_NUMBER, below, below.at, number=many)
    places.add(Op.ADD, found, which.at, below.at)
    return found, (which.like.width, many, inner)


def _gather(
    places: Places,
    x: fx.Node,
    source: Value,
    numbers: tuple[Value, int],
    sizes: tuple[int, int, int],
) -> None:
    (which, piece), (some, many, inner) = numbers, sizes
    out = places.out_of_integers(x) if source.whole else places.out(x)
    if many > LARGEST or not source.like.width or not out.like.width:
        raise Refused
    places.values[x] = out
    at, op = (which.at, At(at=piece)), Op.GATHER_INTEGERS if source.whole else Op.GATHER
    places.add(op, out, source.at, *at, number=some, many=many, inner=inner)


def _scatter(
    places: Places,
    x: fx.Node,
    zeros: fx.Node,
    came: Value,
    numbers: tuple[Value, int],
    sizes: tuple[int, int, int],
) -> None:
    (which, piece), (some, many, inner) = numbers, sizes
    if many > LARGEST or not came.like.rows:
        raise Refused
    at = which.at, At(at=piece)
    with added_to(places, x, zeros) as out:
        places.add(Op.SCATTER, out, came.at, *at, number=some, many=many, inner=inner)


@contextmanager
def added_to(places: Places, x: fx.Node, before: fx.Node) -> Iterator[Value]:
    """Where to write what comes to nothing, or to what there was before, which is added then."""
    out = places.values[x] = places.out(x)
    if before.target in ZEROS:
        yield out
    else:
        had, made = broadcast(places, places.value(before), like_of(x)), places.spare(like_of(x))
        yield made
        places.add(Op.ADD, out, had, made.at)


ZEROS: Final = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
"""What is nothing, until something goes there."""
NAMING: Final = {aten.gather.default, aten.scatter_add.default, aten.scatter.src}
"""What reads integers as places of entries: of a number that is not exact there is no entry."""
SCATTERING: Final = {aten.scatter_add.default, aten.scatter.src, aten.index_put.default}
NAMED: Final[Mapping[Any, Callable[[Places, fx.Node], None]]] = {
    aten.gather.default: gather,
    aten.scatter_add.default: scatter,
    aten.scatter.src: scatter,
}
