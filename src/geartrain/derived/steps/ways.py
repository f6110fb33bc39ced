"""The operators that have a step in C, or none to do: views and items are only places.

Those of a kind have a file each, with a table that is put together here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import fx

from geartrain.derived.draws import drawn, evenly_drawn
from geartrain.derived.steps.broadcast import across, broadcast, step, stretch
from geartrain.derived.steps.distances import is_within_distances, of_distances, write_distances
from geartrain.derived.steps.embeddings import EMBEDDINGS
from geartrain.derived.steps.entries import NUMBERED, NUMBERS, ONE, TRUTHS, TWO
from geartrain.derived.steps.integers import (
    COUNTS,
    INTEGERS,
    compare,
    compares,
    convert_dtype,
)
from geartrain.derived.steps.matmul import MATMUL, moved_axes
from geartrain.derived.steps.named import (
    NAMED,
    NAMING,
    SCATTERING,
    is_named_by,
    names,
    repeats_for_neighbours,
    row_numbers,
)
from geartrain.derived.steps.pieces import PARTS, WHOLES, axis_of, home_of_sum
from geartrain.derived.steps.places import RESHAPES, Like, Places, Refused, Value, called, like_of
from geartrain.derived.steps.reckoning import CONSTANTS, reckon, reckons, repeated
from geartrain.derived.steps.taken import ADDED, TAKEN
from geartrain.derived.told.windows import MOST_ENTRIES, MOST_GROUPS
from geartrain.derived.traces.turns import TURNS
from geartrain.native.fused import At, Op

aten = torch.ops.aten


def convert(places: Places, x: fx.Node) -> None:
    """Write what a node does.

    Raises:
        Refused: There is no step for it.
    """
    target: Any = x.target
    if target not in _SEVERAL and any(_is_merged(y) for y in (x, *x.all_input_nodes)):
        raise Refused
    if is_within_distances(x):
        return
    if target in VIEWS:
        places.values[x] = VIEWS[target](places, x)
        return
    if reckons(x):
        reckon(places, x)
        return
    if not _is_told(places, x):
        raise Refused
    if target in _WAYS:
        _WAYS[target](places, x)
    elif compares(places, x):
        compare(places, x)
    else:
        _entry_by_entry(places, x)


def _is_told(places: Places, x: fx.Node) -> bool:
    """Whether numbers can say what a node makes, as they cannot of any integers."""
    like = x.meta.get("like")
    if not isinstance(like, Like) or not like.rows or x.target is aten.expand.default:
        return True
    return like.dtype in (places.dtype, torch.bool) or x.target in COUNTS or names(places, x)


def _entry_by_entry(places: Places, x: fx.Node) -> None:
    target: Any = x.target
    args: Any = x.args
    if target in TRUTHS and any(like_of(y).dtype is not torch.bool for y in args):
        raise Refused
    if target in NUMBERED and not x.kwargs:
        op, sources, number = NUMBERED[target](*args)
        step(places, x, op, sources, number)
        return
    if target not in NUMBERS and target not in ONE and target not in TWO:
        raise Refused
    if x.kwargs and dict(x.kwargs) != {"approximate": "none"}:
        raise Refused
    if target in ONE and len(args) == 1:
        step(places, x, ONE[target], [args[0]])
    elif target in NUMBERS and isinstance(args[1], (int, float)) and len(args) == 2:
        op, number = NUMBERS[target](float(args[1]))
        step(places, x, op, [args[0]], number)
    elif target in TWO and len(args) == 2:
        step(places, x, TWO[target], args)
    else:
        raise Refused


def lay_within_cats(places: Places, graph: fx.Graph) -> None:
    """What nobody reads but a cat is written where it lies there."""
    for x in graph.nodes:
        like = x.meta.get("like")
        args: Any = x.args
        if x.target is not aten.cat.default or not isinstance(like, Like) or not like.rows:
            continue
        if like.dtype is torch.int64 or like.merged:
            continue
        if len(args) != 2 or args[1] % (len(like.tail) + 1) != 1:
            continue
        at = 0
        for y in args[0]:
            lone = list(y.users) == [x] and args[0].count(y) == 1 and y not in places.homes
            if lone and y.op == "call_function" and y.target not in SHARING and like_of(y).rows:
                places.lay_within(y, x, at)
            at += like_of(y).width


def _sum(places: Places, x: fx.Node, *, mean: bool) -> None:
    args: Any = x.args
    if not mean and (pair := of_distances(x)) is not None:
        write_distances(places, x, pair)
        return
    if x.kwargs:
        raise Refused
    source = places.value(args[0])
    tail = source.like.tail
    if source.like.dtype not in (places.dtype, torch.bool):
        raise Refused
    named, apart = args[1] if len(args) > 1 else None, not source.like.merged
    rank = len(tail) + apart
    dims = sorted(d % rank for d in (named or range(rank)))
    if not source.like.rows:
        raise Refused
    home = home_of_sum(places, x)
    if dims[0] == 0 and not mean and home is not None and apart:
        _sum_of_rows(places, x, source, dims[1:], home)
        return
    if dims[0] == 0:
        raise Refused
    out = places.out(x)
    _add_up(places, out, source, [d - apart for d in dims], mean=mean)
    places.values[x] = out


def _add_up(places: Places, out: Value, source: Value, axes: Sequence[int], *, mean: bool) -> None:
    """Some axes of rows, the last ones first: those that are neighbours at once."""
    first = len(axes) - 1
    while first and axes[first - 1] == axes[first] - 1:
        first -= 1
    tail, begin, end = source.like.tail, axes[first], axes[-1] + 1
    many, inner = math.prod(tail[begin:end]), math.prod(tail[end:])
    number = 1 / many if mean else 1.0
    rest = replace(source.like, tail=(*tail[:begin], *tail[end:]))
    to = places.spare(rest) if first else out
    places.add(Op.REDUCE, to, source.at, number=number, many=many, inner=inner)
    if first:
        _add_up(places, out, to, axes[:first], mean=mean)


def _sum_of_rows(
    places: Places, x: fx.Node, source: Value, dims: Sequence[int], home: Value
) -> None:
    """Rows added up, of which axes have been before."""
    tail, at = source.like.tail, source.at
    if dims:
        axes = [d - 1 for d in dims]
        rest = [n for k, n in enumerate(tail) if k not in axes]
        few = places.spare(replace(source.like, tail=(math.prod(rest),)))
        _add_up(places, few, source, axes, mean=False)
        at = few.at
    places.values[x] = home
    places.add(Op.SUM_OF_ROWS, home, at)


def _softmax(places: Places, x: fx.Node, op: Op) -> None:
    args: Any = x.args
    if args[2]:
        raise Refused
    _along(places, x, op, [places.value(args[0])], args[1])


def _softmax_back(places: Places, x: fx.Node, op: Op) -> None:
    args: Any = x.args
    _along(places, x, op, [places.value(y) for y in args[:2]], args[2])


def _along(places: Places, x: fx.Node, op: Op, read: Sequence[Value], dim: int) -> None:
    """A step that takes the last axis, of any: that is turned to be the last, and back."""
    like = read[0].like
    _, many, inner = axis_of(like, dim)
    if any(value.like.tail != like.tail for value in read):
        raise Refused
    out = places.values[x] = places.out(x)
    if inner == 1:
        places.add(op, out, *[value.at for value in read], many=many)
        return
    turned = [places.spare(like) for _ in read]
    for value, other in zip(read, turned, strict=True):
        places.add(Op.TURN, other, value.at, number=1, many=many, inner=inner)
    made = places.spare(like)
    places.add(op, made, *[value.at for value in turned], many=many)
    places.add(Op.TURN, out, made.at, number=1, many=inner, inner=many)


def _of_last(like: Like, dim: int) -> int:
    """Entries of the last axis, if it is that one."""
    if not like.rows or not like.tail or dim not in (-1, len(like.tail)):
        raise Refused
    return like.tail[-1]


def _norm(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    source = places.value(args[0])
    if len(args[1]) != 1 or not source.like.rows:
        raise Refused
    many = _of_last(source.like, -1)
    if (args[2] is None) != (args[3] is None):
        raise Refused
    weight, bias = (At() if y is None else places.value(y).at for y in args[2:4])
    small = replace(source.like, tail=(*source.like.tail[:-1], 1))
    items = places.items(x)
    found = [
        places.out(items.get(k, x), like) if k in items else places.spare(like)
        for k, like in enumerate((source.like, small, small))
    ]
    places.values[x] = found
    where = [source.at, weight, bias, found[1].at, found[2].at]
    places.add(Op.NORM, found[0], *where, number=args[4], many=many)


def _norm_back(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    came, source = places.value(args[0]), places.value(args[1])
    if len(args[2]) != 1 or source.like.tail != came.like.tail:
        raise Refused
    many = _of_last(came.like, -1)
    several = came.like.width // many
    mean, less = places.value(args[3]), places.value(args[4])
    weight = At() if args[5] is None else places.value(args[5]).at
    items = places.items(x)
    found: list[Value | None] = [None] * 3
    if 0 in items:
        out = found[0] = places.out(items[0])
        where = [came.at, source.at, weight, mean.at, less.at]
        places.add(Op.NORM_BACK, out, *where, many=many)
    for k in (1, 2):
        if k in items:
            home = found[k] = places.homes.get(items[k])
            if home is None:
                raise Refused
            if k == 1:
                where = [came.at, source.at, At(), mean.at, less.at]
                places.add(Op.NORM_WEIGHT, home, *where, many=several)
            else:
                _sum_of_rows(places, items[k], came, range(1, len(came.like.tail)), home)
    places.values[x] = found


def _threshold(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    step(places, x, Op.THRESHOLD_BACK, args[:2], float(args[2]))


def _where(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    whole, other = (_number(y) for y in args[1:])
    if whole is not None:
        step(places, x, Op.FILL, [args[2], args[0]], whole)
    elif other is not None:
        mask = places.value(args[0])
        around = places.spare(mask.like)
        places.add(Op.NUMBER_LESS, around, mask.at, number=1.0)
        _put(places, x, args[1], around, other)
    else:
        _choose(places, x)


def _choose(places: Places, x: fx.Node) -> None:
    """One of two, entry by entry, or by one truth for all of a row."""
    args: Any = x.args
    like = like_of(x)
    mask, *others = (broadcast(places, places.value(y), like) for y in args)
    both = [across(places, at, like) for at in others]
    out = places.values[x] = places.out(x)
    places.add(Op.WHERE, out, mask, *both)


def _put(places: Places, x: fx.Node, source: fx.Node, mask: Value, number: float) -> None:
    """The number where a mask is, else what there was."""
    like = like_of(x)
    where = broadcast(places, mask, like)
    at = across(places, broadcast(places, places.value(source), like), like)
    out = places.values[x] = places.out(x)
    places.add(Op.FILL, out, at, where, number=number)


def _is_merged(x: fx.Node) -> bool:
    like = x.meta.get("like")
    return isinstance(like, Like) and like.merged


def _number(x: Any) -> float | None:
    """Of a tensor that is nothing but a number."""
    if not isinstance(x, fx.Node) or x.target is not aten.scalar_tensor.default:
        return None
    found = x.args[0]
    return float(found) if isinstance(found, (int, float)) else None


def _untold(places: Places, x: fx.Node) -> None:
    most = f"more than {MOST_ENTRIES} entries of windows a row"
    groups = f"more than {MOST_GROUPS} groups of several channels"
    raise Refused(f"{called(x)} has no step in C where it has {groups}, or {most}")


def _scalar(places: Places, x: fx.Node) -> None:
    if _number(x) is None or any(y.target not in _SCALARS_READ for y in x.users):
        raise Refused


def _at_least(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    number = _number(args[1])
    if number is None:
        step(places, x, Op.MAXIMUM, args)
    else:
        step(places, x, Op.AT_LEAST, args[:1], number)


def _full(places: Places, x: fx.Node) -> None:
    number = CONSTANTS[x.target](x.args)
    if not isinstance(number, (int, float)):
        raise Refused
    out = places.values[x] = places.out(x)
    places.add(Op.ZERO, out)
    places.add(Op.ADD_NUMBER, out, out.at, number=float(number))


def seen(x: fx.Node) -> fx.Node:
    """What makes the numbers that x has, if they lie in one order in both; else x."""
    chain, source = [], x
    while source.target in RESHAPES or source.target in TURNS:
        chain.append(source)
        source = cast("fx.Node", source.args[0])
    likes = [y.meta.get("like") for y in (source, *chain)]
    if source.target in SHARING or source.op != "call_function":
        return x
    if any(not isinstance(like, Like) or not like.rows for like in likes):
        return x
    if any(like_of(y).width != like_of(x).width for y in (source, *chain)):
        return x
    order = torch.arange(like_of(x).width).reshape(like_of(source).tail)
    for y in reversed(chain):
        if y.target in TURNS:
            order = order.permute(moved_axes(y, like_of(cast("fx.Node", y.args[0]))))
        order = order.reshape(like_of(y).tail)
    return source if torch.equal(order.flatten(), torch.arange(order.numel())) else x


def _draw(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    _, _, p, number, _ = args
    if not 0 <= p <= 1:
        raise Refused
    out = places.values[x] = places.out(x)
    places.add(Op.DRAW, out, places.seeds(), number=p, many=number)


def _draw_evenly(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    out = places.values[x] = places.out(x)
    places.add(Op.DRAW, out, places.seeds(), number=2.0, many=args[2])


def _fill(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    if not isinstance(args[2], (int, float)):
        raise Refused
    step(places, x, Op.FILL, args[:2], float(args[2]))


def _zeros(places: Places, x: fx.Node) -> None:
    begins = {*SCATTERING, *ADDED}
    if x.users and all(y.target in begins and y.args.count(x) == 1 for y in x.users):
        return
    out = places.values[x] = places.out(x)
    places.add(Op.ZERO, out)


def _expand(places: Places, x: fx.Node) -> None:
    like, source = like_of(x), places.held(x.args[0])
    tail = source.like.tail
    if is_named_by(x) and repeats_for_neighbours(x):
        return
    if tail == like.tail and source.like.rows == like.rows:
        places.values[x] = replace(source, like=like)
        return
    if source.whole and any(y.target not in NAMING for y in x.users):
        places.values[x] = repeated(places, x)
        return
    source = places.value(x.args[0])
    tail = source.like.beside(like)
    if not source.like.rows and like.rows and tail == like.tail and x not in places.homes:
        places.values[x] = Value(source.at, like)  # every row is the same
        return
    if not like.rows or len(tail) != len(like.tail):
        raise Refused
    out = places.values[x] = places.out(x)
    stretch(places, out, source.at, tail)


def _same(places: Places, x: fx.Node) -> Value:
    like, source = like_of(x), places.raw(x.args[0])
    if like.rows != source.like.rows or like.width != source.like.width:
        raise Refused
    if source.turned and like.tail[-2:] != source.like.tail[-2:]:
        source = places.value(x.args[0])
    return replace(source, like=like)


def _item(places: Places, x: fx.Node) -> Value:
    args: Any = x.args
    found = places.values.get(args[0])
    value = found[args[1]] if isinstance(found, list) else None
    if not isinstance(value, Value):
        raise Refused
    return value


_Way = Callable[[Places, fx.Node], Any]
VIEWS: Final[Mapping[Any, _Way]] = {
    **dict.fromkeys(RESHAPES, _same),
    **PARTS,
    aten._to_copy.default: convert_dtype,
    operator.getitem: _item,
    aten.arange.default: row_numbers,
    aten.arange.start: row_numbers,
}
SHARING: Final = {*VIEWS, *TURNS, aten.expand.default}
"""What may lie in another's place."""
_WAYS: Final[Mapping[Any, _Way]] = {
    drawn: _draw,
    evenly_drawn: _draw_evenly,
    aten.sum.default: lambda places, x: _sum(places, x, mean=False),
    aten.sum.dim_IntList: lambda places, x: _sum(places, x, mean=False),
    aten.mean.dim: lambda places, x: _sum(places, x, mean=True),
    aten._softmax.default: lambda places, x: _softmax(places, x, Op.SOFTMAX),
    aten._softmax_backward_data.default: lambda places, x: _softmax_back(
        places, x, Op.SOFTMAX_BACK
    ),
    aten._log_softmax.default: lambda places, x: _softmax(places, x, Op.LOG_SOFTMAX),
    aten._log_softmax_backward_data.default: lambda places, x: _softmax_back(
        places, x, Op.LOG_SOFTMAX_BACK
    ),
    aten.convolution.default: _untold,
    aten.scalar_tensor.default: _scalar,
    aten.clamp_min.Tensor: _at_least,
    **dict.fromkeys(CONSTANTS, _full),
    aten.native_layer_norm.default: _norm,
    aten.native_layer_norm_backward.default: _norm_back,
    aten.threshold_backward.default: _threshold,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _fill,
    aten.zeros_like.default: _zeros,
    aten.empty_like.default: _zeros,
    aten.new_zeros.default: _zeros,
    aten.zeros.default: _zeros,
    aten.expand.default: _expand,
    **EMBEDDINGS,
    **INTEGERS,
    **MATMUL,
    **NAMED,
    **WHOLES,
    **TAKEN,
}
_SEVERAL: Final = {
    *(*RESHAPES, *MATMUL, *ONE, *TWO, *NUMBERS, *NUMBERED),
    *(aten.expand.default, aten.new_zeros.default, operator.getitem),
    *(*PARTS, aten.cat.default, aten.slice_backward.default, aten.select_backward.default),
    *(aten.sum.dim_IntList, aten.mean.dim),
    *(aten._softmax.default, aten._softmax_backward_data.default),
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
    *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
    *(aten.threshold_backward.default, aten.where.self, aten.masked_fill.Scalar),
}
"""What knows of several rows for each row, or does not care."""
_SCALARS_READ: Final = {aten.where.self, aten.clamp_min.Tensor}
"""What reads a tensor that is nothing but a number."""
