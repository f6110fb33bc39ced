"""Operators that go over an axis, of members or of what each row has: sums, softmax, the most,
norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.others import put_named
from geartrain.derived.ragged.pairs import sum_of_pairs, turned
from geartrain.derived.ragged.values import (
    BUNDLES,
    MEMBERS,
    NO_ROWS,
    PADDED,
    Axes,
    Constant,
    MostOf,
    NamedMembers,
    RaggedValue,
)
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten


def sums_rows(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether it adds up all rows of a matrix, or multiplies those of two."""
    args: Any = x.args
    if x.target is aten.mm.default:
        return bool(args[0].target is aten.t.default)
    if x.target is not aten.sum.dim_IntList:
        return False
    like, rank = low.like(args[0]), len(low.shapes[args[0]])
    dims = [d % rank for d in args[1] if low.shapes[args[0]][d] != 1]
    rows = [k for k in range(rank) if like.tail_axis(k) < 0]
    return like.kind != NO_ROWS and not like.merged and sorted(dims) == rows


def sums_all(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether it adds up all that there is, as the gradient of one number."""
    adds = x.target in (aten.sum.default, aten.sum.dim_IntList)
    return adds and low.late(x) and low.like(x).kind == NO_ROWS and math.prod(low.shapes[x]) == 1


def sum_of_entries(low: AbstractLowering, value: RaggedValue, *, late: bool) -> RaggedValue:
    """What each row has, added up."""
    if value.width == 1:
        return value
    value = low.dense(value, late=late)
    out = low.room(Axes(value.kind, value.times, (), 1), late=late)
    low.plain(Op.REDUCE, out, value, number=1.0, many=value.width, inner=1, late=late)
    return out


def _over_members(like: Axes, dims: list[int]) -> bool:
    return like.kind == MEMBERS and like.lead == PADDED and dims == [like.members]


def _over_bundles(low: AbstractLowering, x: fx.Node, dims: list[int]) -> bool:
    """Whether gradients are added up of what all bundles have in common along their members: each
    has its own instead, as all that is made of them adds up."""
    source: Any = x.args[0]
    like, to = low.like(source), low.like(x)
    if like.lead < PADDED or not to.alone or like.merged or like.kind != to.kind:
        return False
    bundles = 1 if like.at < 0 else 0
    left = math.prod(_without(like, [d for d in dims if d != bundles]))
    return bundles in like.rows[:-1] and bundles in dims and to.width == left


def _sum(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    if sums_rows(low, x) or sums_all(low, x):
        low.values[x] = None
        return
    if x.kwargs:
        raise Refused("a sum of another dtype")
    like, late, rank = low.like(args[0]), low.late(x), len(low.shapes[args[0]])
    dims, mean = sorted(d % rank for d in args[1]), x.target is aten.mean.dim
    value = low.whole(args[0], late=late)
    rows = [d for d in range(rank) if like.tail_axis(d) < 0]
    if late and not mean and low.like(x).kind == NO_ROWS and set(rows) < set(dims):
        dims = [d for d in dims if d not in rows]
        to = Axes(like.kind, like.times, _without(like, dims), 1)
        low.summed[x] = _reduced(low, value, like, dims, to, mean=False, late=late)
        low.values[x] = None
        return
    if late and not mean and _over_bundles(low, x, dims):
        dims = [d for d in dims if like.tail_axis(d) >= 0]
        if dims:
            value = _reduced(low, value, like, dims, low.like(x), mean=False, late=late)
        low.values[x] = replace(value, tail=low.like(x).tail)
        return
    own = [d for d in dims if like.second >= 0 and d in like.pair]
    if own and not mean:
        dims = [d for d in dims if d not in own]
        if dims:
            left = replace(like, tail=_without(like, dims))
            value = _reduced(low, value, like, dims, left, mean=False, late=late)
        out = sum_of_pairs(low, value, own, like, late=late)
        low.values[x] = replace(out, tail=low.like(x).tail)
        return
    if like.kind == MEMBERS and like.lead == PADDED and like.members in dims and not mean:
        dims.remove(like.members)
        left = replace(like, tail=_without(like, dims), at=0)
        if dims:
            value = _reduced(low, value, like, dims, left, mean=False, late=late)
        out = low.room(low.like(x), late=late)
        low.step(Way.SUM_OVER, out, value, kind=BUNDLES, late=late, inside=True)
        low.values[x] = out
        return
    low.values[x] = _reduced(low, value, like, dims, low.like(x), mean=mean, late=late)


def _without(like: Axes, dims: list[int]) -> tuple[int, ...]:
    gone = {like.tail_axis(d) for d in dims}
    return tuple(n for k, n in enumerate(like.tail) if k not in gone)


def _reduced(
    low: AbstractLowering,
    value: RaggedValue,
    like: Axes,
    dims: list[int],
    to: Axes,
    *,
    mean: bool,
    late: bool,
) -> RaggedValue:
    """Added up along axes that follow upon one another."""
    axes = [like.tail_axis(d) for d in dims]
    if not axes or axes[0] < 0 or axes != list(range(axes[0], axes[-1] + 1)):
        raise Refused("a sum over rows")
    if like.merged and axes[0] == 0:
        raise Refused("a sum over rows")
    many = math.prod(like.tail[axes[0] : axes[-1] + 1])
    inner = math.prod(like.tail[axes[-1] + 1 :])
    out = low.room(to, late=late)
    number = 1 / many if mean else 1.0
    low.plain(Op.REDUCE, out, value, number=number, many=many, inner=inner, late=late)
    return out


_SOFT: Final[Mapping[Any, Way]] = {
    aten._softmax.default: Way.SOFT,
    aten._safe_softmax.default: Way.SOFT,
    aten._log_softmax.default: Way.LOG_SOFT,
    aten._softmax_backward_data.default: Way.SOFT_BACK,
    aten._log_softmax_backward_data.default: Way.LOG_SOFT_BACK,
}


def _softmax(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    back = x.target in (
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    )
    log = x.target in (aten._log_softmax.default, aten._log_softmax_backward_data.default)
    late, like = low.late(x), low.like(x)
    reads = [low.whole(y, late=late) for y in args[: 2 if back else 1]]
    dim = args[2 if back else 1] % len(low.shapes[x])
    if not back and len(args) > 2 and args[2]:
        raise Refused("a softmax of another dtype")
    out = low.room(like, late=late)
    if _over_members(like, [dim]):
        low.step(_SOFT[x.target], out, *reads, kind=BUNDLES, late=late, inside=True)
    elif like.second >= 0 and dim in like.pair:
        over_first = dim == like.pair[0]
        if over_first:
            reads = [turned(low, v, late=late) for v in reads]
        low.step(_SOFT[x.target], out, *reads, kind=MEMBERS, late=late, pairs=True)
        out = turned(low, out, late=late) if over_first else out
    elif like.tail and like.tail_axis(dim) == len(like.tail) - 1:
        op = Op.SOFTMAX_BACK if back else Op.SOFTMAX
        if log:
            op = Op.LOG_SOFTMAX_BACK if back else Op.LOG_SOFTMAX
        each = [by_rows(low, v, late=late) for v in reads]
        low.plain(op, by_rows(low, out, late=late), *each, late=late, many=like.tail[-1])
    else:
        raise Refused("a softmax over other than members, or the last axis")
    low.values[x] = out


def by_rows(low: AbstractLowering, value: RaggedValue, *, late: bool) -> RaggedValue:
    """The last axis alone, as rows: so many times those that there were."""
    if len(value.tail) < 2:
        return value
    value, width = low.dense(value, late=late), value.tail[-1]
    times = value.times * math.prod(value.tail[:-1])
    return replace(value, times=times, row=width, tail=(width,))


def _most(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    source = args[0]
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    if len(dims) != 1:
        raise Refused("the most of several axes")
    like, late, dim = low.like(source), low.late(x), dims[0] % len(low.shapes[source])
    least = x.target in (aten.amin.default, aten.min.dim)
    value = low.whole(source, late=late)
    value = low.turned_over(value, late=late) if least else value
    tail = _without(like, [dim])
    if like.second >= 0 and dim == like.pair[1]:
        out, tail = low.room(Axes(MEMBERS, 1, like.tail, 1), late=late), like.tail
        low.step(Way.MOST_OVER, out, value, kind=MEMBERS, late=late, pairs=True)
    elif _over_members(like, [dim]):
        heads = like.tail[0] if like.merged else 1
        out = low.room(Axes(BUNDLES, 1, like.tail, 1), late=late)
        low.step(Way.MOST_OVER, out, value, kind=BUNDLES, late=late, inside=True)
        tail = like.tail
        if heads > 1:
            raise Refused("the most of several heads")
    else:
        at = like.tail_axis(dim)
        if at < 0:
            raise Refused("the most of all rows")
        out = low.room(replace(like, tail=tail, at=0, lead=1, merged=False), late=late)
        many, inner = like.tail[at], math.prod(like.tail[at + 1 :])
        low.plain(Op.MOST, out, value, many=many, inner=inner, late=late)
    out = low.turned_over(out, late=late) if least else out
    if x.target in (aten.amax.default, aten.amin.default):
        low.values[x] = replace(out, tail=low.like(x).tail)
        return
    keep = len(args) > 2 and args[2]
    if keep:
        raise Refused("the most of an axis that is kept")
    low.values[x] = [out, MostOf(source, dim, least)]


def _log_sum(low: AbstractLowering, x: fx.Node) -> None:
    """log(sum(exp(x))), which is the most and the log of what is left."""
    args: Any = x.args
    source, dims, rank = args[0], args[1], len(low.shapes[args[0]])
    like, late = low.like(source), low.late(x)
    if not _over_members(like, [d % rank for d in dims]) or like.merged:
        raise Refused("a sum of exponentials over other than members")
    value = low.whole(source, late=late)
    rows, each = Axes(BUNDLES, 1, like.tail, 1), Axes(MEMBERS, 1, like.tail, 1)
    most, total, left = (
        low.room(rows, late=late),
        low.room(rows, late=late),
        low.room(each, late=late),
    )
    out = low.room(rows, late=late)
    low.step(Way.MOST_OVER, most, value, kind=BUNDLES, late=late, inside=True)
    low.plain(Op.SUB, left, value, low.spread(most, late=late), late=late)
    low.plain(Op.EXP, left, left, late=late)
    low.step(Way.SUM_OVER, total, left, kind=BUNDLES, late=late, inside=True)
    low.plain(Op.LOG, out, total, late=late)
    low.plain(Op.ADD, out, out, most, late=late)
    low.values[x] = replace(out, tail=low.like(x).tail)


def _most_back(low: AbstractLowering, x: fx.Node) -> None:
    """A gradient that goes where the most was."""
    args: Any = x.args
    base, dim, index, came = args
    known, begun = low.values.get(index), low.values.get(base)
    if isinstance(known, NamedMembers):
        put_named(low, x, known)
        return
    if not isinstance(known, MostOf) or not isinstance(begun, Constant) or begun.number:
        raise Refused("an axis is scattered")
    like, late = low.like(x), low.late(x)
    source = low.whole(known.node, late=late)
    if known.dim != dim % len(low.shapes[x]) or low.like(known.node) != like:
        raise Refused("an axis is scattered")
    source = low.turned_over(source, late=late) if known.least else source
    out, dy = low.room(like, late=late), low.whole(came, late=late)
    if _over_members(like, [known.dim]):
        low.step(Way.MOST_OVER_BACK, out, dy, source, kind=BUNDLES, late=late, inside=True)
    else:
        at = like.tail_axis(known.dim)
        many, inner = like.tail[at], math.prod(like.tail[at + 1 :])
        low.plain(Op.MOST_BACK, out, dy, source, many=many, inner=inner, late=late)
    low.values[x] = out


def _norm(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    source, shape, weight, bias, least = args
    like, late = low.like(source), low.late(x)
    if len(shape) != 1 or weight is None or bias is None or like.tail[-1:] != tuple(shape):
        raise Refused("a norm of several axes, or without weights")
    if like.lead == PADDED and like.at == len(like.tail):
        raise Refused("a norm over members")
    value = by_rows(low, low.whole(source, late=late), late=late)
    w, b = low.value(weight, late=late), low.value(bias, late=late)
    times = replace(like, times=value.times, tail=(), at=0, lead=1, merged=False)
    out, mean, less = low.room(like, late=late), *(low.room(times, late=late) for _ in range(2))
    for each in (mean, less):  # they are written by the step, beside what it makes
        low.plain(Op.ZERO, each, late=late)
    rows = by_rows(low, out, late=late)
    read = value, w, b, mean, less
    low.plain(Op.NORM, rows, *read, number=least, many=value.width, late=late)
    low.values[x] = [out, mean, less]


def _norm_back(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    came, source, _, mean, less, weight, *_ = args
    like, late = low.like(came), low.late(x)
    stats = [low.values.get(y) for y in (mean, less)]
    m, s = (y if isinstance(y, RaggedValue) else None for y in stats)
    if m is None or s is None:
        raise Refused("a norm of which something is not known")
    dy, value = (by_rows(low, low.whole(y, late=late), late=late) for y in (came, source))
    w = low.value(weight, late=late)
    found: list[Any] = [None] * 3
    out = found[0] = low.room(like, late=late)
    read = dy, value, w, m, s
    low.plain(Op.NORM_BACK, by_rows(low, out, late=late), *read, many=dy.width, late=late)
    rows = low.room(Axes(dy.kind, dy.times, dy.tail, 1), late=late)
    low.plain(Op.ZERO, rows, late=late)
    low.plain(Op.NORM_WEIGHT, rows, dy, value, None, m, s, many=1, late=late)
    low.values[x] = found
    for y in x.users:
        if y.args[1] in (1, 2):
            low.summed[y] = rows if y.args[1] == 1 else dy


OVER: Final[Mapping[Any, Convert]] = {
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _sum,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax,
    aten._log_softmax_backward_data.default: _softmax,
    aten.logsumexp.default: _log_sum,
    aten.amax.default: _most,
    aten.amin.default: _most,
    aten.max.dim: _most,
    aten.min.dim: _most,
    aten.scatter.src: _most_back,
    aten.native_layer_norm.default: _norm,
    aten.native_layer_norm_backward.default: _norm_back,
}
