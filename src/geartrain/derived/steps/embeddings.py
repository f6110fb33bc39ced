"""Rows of tables by number as steps in C, and what they meet: alone, beside columns, or one hot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import fx

from geartrain.derived.steps.fold import looked_up
from geartrain.derived.steps.places import RESHAPES, Like, Places, Refused, Value, like_of
from geartrain.derived.traces.turns import TURNS
from geartrain.native.fused import At, Op

aten = torch.ops.aten


def _looked_up(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    rest, weight, runs, entries = args
    out, rows = places.out(x), None if rest is None else places.value(rest)
    *first, last = entries
    if rows is None or first:
        first = entries
    for k, (its, table, ids, columns, biases) in enumerate(first):
        at, which = places.table(its, table, columns, biases), _row_numbers(places, ids)
        places.add(Op.EMBED, out, which, at, many=like_of(table).tail[0], inner=int(k > 0))
    if rows is not None:
        met, depth, width = places.weight(weight, turned=False, columns=runs)
        if rows.like.tail != (depth,) or not rows.like.rows or out.like.tail != (width,):
            raise Refused
        if first:
            places.add(Op.PRODUCT, out, rows.at, met, many=depth, inner=-1)
        else:
            its, table, ids, columns, biases = last
            at, which = places.table(its, table, columns, biases), _row_numbers(places, ids)
            many = like_of(table).tail[0]
            places.add(Op.PRODUCT, out, rows.at, met, at, which, many=depth, inner=many)
    places.values[x] = out


def _row_numbers(places: Places, ids: fx.Node) -> At:
    """Of a table, one for each row, side by side."""
    like = like_of(ids)
    if like != Like((), True, torch.int64):
        raise Refused
    found = places.integers(ids)
    if found.at.row != 1:
        lone = places.spare_integers(like)
        places.copy_integers(found.at, lone)
        found = lone
    return found.at


def _embed(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    if args[0].target is aten.eye.default:
        which = places.value(args[1])
        out = places.values[x] = places.out(x)
        places.add(Op.ONE_HOT, out, which.at, inner=like_of(x).tail[-1])
        return
    table = places.value(args[0])
    if table.like.rows or len(table.like.tail) != 2:
        raise Refused
    many, like = table.like.tail[0], like_of(x)
    if like_of(args[1]).tail:
        _embed_several(places, x, table)
        return
    at = _row_numbers(places, args[1])
    if _are_matrices(x) and x not in places.homes:
        places.values[x] = Value(table.at, like, which=at, of=many)
        return
    out = places.values[x] = places.out(x)
    places.add(Op.EMBED, out, at, table.at, many=many)


def _embed_several(places: Places, x: fx.Node, table: Value) -> None:
    """Rows of a table side by side."""
    ids, like = cast("fx.Node", x.args[1]), like_of(x)
    few = like_of(ids)
    if few.dtype is not torch.int64 or not few.rows or few.merged:
        raise Refused
    which = places.integers(ids).at
    out, (many, width) = places.out(x), table.like.tail
    for k in range(few.width):
        part, at = out.part(k * width, (width,)), replace(which, at=which.at + k)
        places.add(Op.EMBED, part, at, table.at, many=many)
    places.values[x] = Value(out.at, like)


def _are_matrices(x: fx.Node) -> bool:
    """Whether products of matrices alone read it, as it is or turned."""
    return all(
        y.target is aten.bmm.default
        or ((y.target in RESHAPES or y.target in TURNS) and _are_matrices(y))
        for y in x.users
    )


def _eye(places: Places, x: fx.Node) -> None:
    """A unit matrix, of which rows are looked up."""
    if len(x.args) > 1 or any(y.target is not aten.embedding.default for y in x.users):
        raise Refused


EMBEDDINGS: Final[Mapping[Any, Callable[[Places, fx.Node], None]]] = {
    looked_up: _looked_up,
    aten.embedding.default: _embed,
    aten.eye.default: _eye,
}
