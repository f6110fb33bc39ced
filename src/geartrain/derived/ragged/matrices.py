"""Products: of rows and a weight, and of what a row has with each of its members.

Of the latter one side is of members, and the other a vector for each row, or for each of several
heads: entries that are side by side in a row, as the members' are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering, Convert
from geartrain.derived.ragged.over import sums_rows
from geartrain.derived.ragged.pairs import scores, shared
from geartrain.derived.ragged.values import (
    BUNDLES,
    MEMBERS,
    NO_ROWS,
    PADDED,
    PAIRS,
    Axes,
    Buffer,
    RaggedValue,
    Role,
)
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op
from geartrain.native.ragged import Way

aten = torch.ops.aten


def _weight(low: AbstractLowering, x: Any) -> tuple[RaggedValue, int, int]:
    """What a product reads of an operand, its depth and its width."""
    turned = True
    while isinstance(x, fx.Node) and x.target is aten.t.default:
        turned, x = not turned, x.args[0]
    if x not in low.operands:
        raise Refused("a product of what is no weight")
    k = low.operands.index(x)
    out, into = low.shapes[x]
    role: Role = "turned" if turned else "weight"
    found = low.weights.setdefault((k, turned), Buffer(NO_ROWS, out * into, role=role, number=k))
    depth, width = (out, into) if turned else (into, out)
    return RaggedValue(found, 0, 0, NO_ROWS, 1, (out, into)), depth, width


def _product(low: AbstractLowering, x: fx.Node) -> None:
    args: Any = x.args
    if sums_rows(low, x):
        low.values[x] = None
        return
    *bias, rows, weight = args
    late, like = low.late(x), low.like(x)
    packed, depth, width = _weight(low, weight)
    value = low.whole(rows, late=late)
    if x.kwargs or value.tail != (depth,) or value.kind == NO_ROWS or like.tail != (width,):
        raise Refused("a product of other than rows and a weight")
    added = None
    if bias:
        added = low.value(bias[0], late=late)
        if added.kind != NO_ROWS or added.tail != (width,):
            raise Refused("a product with a bias of rows")
    out = low.values[x] = low.room(like, late=late)
    low.plain(Op.PRODUCT, out, value, packed, added, many=depth, late=late)


def _matrices(low: AbstractLowering, x: fx.Node) -> None:
    """Products of a matrix for each row, or for each head of it."""
    args: Any = x.args
    left, right = args
    one, other = low.like(left), low.like(right)
    like, late = low.like(x), low.late(x)
    if PAIRS in (one.kind, other.kind, like.kind):
        low.values[x] = _of_pairs(low, left, right, like, late=late)
        return
    if (one.kind, one.times) == (other.kind, other.times) and one.rows == other.rows == (0,):
        (_, q), (_, r) = one.tail, other.tail  # of each row by itself
        out = low.values[x] = low.room(like, late=late)
        reads = low.whole(left, late=late), low.whole(right, late=late)
        low.plain(Op.MATRICES, out, *reads, many=q, inner=r, number=1.0, late=late)
        return
    heads = one.tail[0] if one.merged else 1
    if (other.tail[0] if other.merged else other.times) != heads and one.merged:
        raise Refused("a product of matrices")
    if other.merged:
        heads = other.tail[0]
    ahead, last = 1 if one.merged else 0, 1 if other.merged else 0
    of_members = [a.kind == MEMBERS and a.lead == PADDED and a.at >= 0 for a in (one, other)]
    if all(of_members) and one.at == ahead + 1 and other.at == last:
        if one.merged != other.merged:
            raise Refused("a product of matrices")
        sizes = one.tail[-1], other.tail[-1]
        out = _added_up(low, left, right, heads, sizes, late=late)
        low.values[x] = replace(out, times=like.times, row=like.width, tail=like.tail)
        return
    if of_members[0] and one.at == ahead and other.kind == BUNDLES:
        q, r = other.tail  # (members, q) times (q, r)
        out = _met(low, left, right, heads, (q, r), like, turned=False, late=late)
    elif of_members[1] and other.at == last + 1 and one.kind == BUNDLES:
        p, q = one.tail  # (p, q) times (q, members)
        out = _met(low, right, left, heads, (q, p), like, turned=True, late=late)
    else:
        raise Refused("a product of matrices")
    low.values[x] = replace(out, tail=like.tail)


def _added_up(
    low: AbstractLowering,
    left: fx.Node,
    right: fx.Node,
    heads: int,
    sizes: tuple[int, int],
    *,
    late: bool,
) -> RaggedValue:
    """(p, members) times (members, r), for each head of each bundle."""
    p, r = sizes
    way, rows, numbers, inner, width = Way.SUM_PRODUCTS, left, right, p, r
    if 1 in sizes:  # a number for each member, by which its row is multiplied
        way, inner, width = Way.SUM_TIMES, 0, p * r
        if p == 1:
            rows, numbers = right, left
    out = low.room(Axes(BUNDLES, 1, (heads, p * r), 1), late=late)
    reads = low.whole(rows, late=late), low.whole(numbers, late=late)
    how: Any = {"width": width, "many": heads, "inner": inner}
    low.step(way, out, *reads, kind=BUNDLES, late=late, inside=True, **how)
    return out


def _of_pairs(
    low: AbstractLowering, left: fx.Node, right: fx.Node, like: Axes, *, late: bool
) -> RaggedValue:
    """Products in which the members of each bundle meet one another, for each head."""
    one, other = low.like(left), low.like(right)
    ahead = int(one.merged)
    heads = one.tail[0] if one.merged else 1
    kinds = [a.kind for a in (one, other) if a.lead >= PADDED and a.at >= 0 and not a.alone]
    if one.merged != other.merged or like.merged != one.merged:
        raise Refused("a product of matrices")
    if kinds == [MEMBERS, MEMBERS] and (one.at, other.at) == (ahead, ahead + 1):
        return scores(low, left, right, heads, one.tail[-1], like, late=late)
    if kinds == [PAIRS, MEMBERS] and other.at == ahead:
        return shared(low, left, right, heads, other.tail[-1], like, turn=False, late=late)
    if kinds == [MEMBERS, PAIRS] and one.at == ahead + 1:
        return shared(low, right, left, heads, one.tail[-1], like, turn=True, late=late)
    raise Refused("a product of matrices")


def _met(
    low: AbstractLowering,
    members: fx.Node,
    rows: fx.Node,
    heads: int,
    sizes: tuple[int, int],
    like: Axes,
    *,
    turned: bool,
    late: bool,
) -> RaggedValue:
    """Members, with q entries each, times what their row has: a matrix, or q entries, or as many as
    wide for one; for each head. turned: the matrix is the other way round."""
    q, width = sizes
    if low.like(rows).times != heads:
        raise Refused("a product of matrices")
    each = low.dense(low.value(rows, late=late), late=late)
    row = replace(each, times=1, row=heads * q * width, tail=(heads, q * width))
    mine, out = low.whole(members, late=late), low.room(like, late=late)
    if 1 not in sizes:
        how: Any = {"width": width, "many": heads, "inner": q, "number": float(turned)}
        low.step(Way.TIMES_MATRIX, out, mine, row, kind=BUNDLES, late=late, inside=True, **how)
        return out
    spread = low.spread(row, late=late)
    if width == 1:
        reads = mine, spread
        low.step(Way.DOT, out, *reads, kind=MEMBERS, late=late, width=q, many=heads, number=1.0)
        return out
    numbers = replace(mine, tail=(heads, 1))
    if heads == 1:
        numbers = replace(numbers, tail=(1, width), one=True)
    else:
        wide = low.room(Axes(MEMBERS, 1, (heads, width), 1), late=late)
        low.plain(Op.EXPAND, wide, numbers, late=late, width=heads, many=width, inner=1)
        numbers = wide
    low.plain(Op.MUL, out, replace(spread, tail=out.tail), numbers, late=late)
    return out


MATRICES: Final[Mapping[Any, Convert]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.bmm.default: _matrices,
}
