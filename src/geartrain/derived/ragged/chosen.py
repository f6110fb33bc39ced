"""Weights that rows choose by number, ``w[kind]``, in products with what each row has.

w (kinds, a, b), kind (n,) ─► w[kind] (n, a, b)    is not made: rows of one kind meet its matrix
x (n, 1, a) @ w[kind]      ─► (n, 1, b)
the gradient of w[kind]    ─► x (n, a), that of the product (n, b), kind (n,)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering
from geartrain.derived.ragged.traced import SAME
from geartrain.derived.ragged.values import NO_ROWS, ChosenMatrices, OuterProducts, RaggedValue
from geartrain.derived.steps.places import Refused
from geartrain.derived.traces.turns import TURNS, order_of
from geartrain.native.ragged import Way

aten = torch.ops.aten


def is_of_chosen(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether a node is a product with matrices that rows choose, or the gradient of these, or
    has those of its source, turned; that is known of it then, or its steps are written."""
    if x.target is aten.bmm.default:
        return _is_product(low, x) or _is_outer(low, x)
    if x.target is aten.add.Tensor:
        return _is_sum(low, x)
    source: Any = x.args[0] if x.args else None
    known = low.matrices.get(source) if isinstance(source, fx.Node) else None
    if known is None:
        return False
    before, after = (without_ones(low.shapes[y][1:]) for y in (source, x))
    if x.target in SAME:
        flat = not known.turned and math.prod(before) == math.prod(after)
        made = known if before == after or flat else None
    elif x.target in TURNS:
        order = [k for k in order_of(x, len(low.shapes[x])) if low.shapes[source][k] != 1]
        turned = known.turned != (order != sorted(order))
        made = replace(known, turned=turned) if order[:1] == [0] else None
    else:
        return False
    if made is None:
        return False
    low.matrices[x] = made
    if made.turned == known.turned and low.values.get(source) is not None:
        return False
    low.values[x] = None
    return True


def without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def _is_product(low: AbstractLowering, x: fx.Node) -> bool:
    """(1, a) times (a, b), or (a, b) times (b, 1): of each row and the matrix that it chooses."""
    args: Any = x.args
    for side, (rows, chosen) in enumerate((args, args[::-1])):
        found = low.matrices.get(chosen)
        if isinstance(found, ChosenMatrices) and low.shapes[rows][2 if side else 1] == 1:
            low.values[x] = _times_chosen(low, x, rows, found, low.shapes[chosen], side == 1)
            return True
    return False


def _times_chosen(
    low: AbstractLowering,
    x: fx.Node,
    rows: fx.Node,
    found: ChosenMatrices,
    shape: Sequence[int],
    behind: bool,
) -> RaggedValue:
    """Steps of a product.

    Args:
        rows: Each meets the matrix that it chooses.
        found: The matrices.
        shape: Of them all.
        behind: Whether the matrix comes first, so that rows meet it turned.
    """
    late, like, mine = low.late(x), low.like(x), low.like(rows)
    depth, width = shape[1:][::-1] if behind else shape[1:]
    value = low.full(low.value(rows, late=late), late=late)
    numbers = low.like(found.numbers)
    kinds = {(y.kind, y.times) for y in (mine, like, numbers)}
    if len(kinds) != 1 or like.kind == NO_ROWS or (value.width, like.width) != (depth, width):
        raise Refused("rows meet matrices of others")
    out = low.room(like, late=late)
    low.step(
        Way.TIMES_CHOSEN,
        out,
        value,
        replace(found.table, tail=()),
        kind=like.kind,
        times=like.times,
        index=low.ints(found.numbers),
        width=width,
        many=depth,
        inner=int(found.turned != behind),
        number=float(found.table.tail[0]),
        late=late,
    )
    return out


def _is_outer(low: AbstractLowering, x: fx.Node) -> bool:
    """(a, 1) times (1, b), of rows."""
    left, right = (y for y in x.args if isinstance(y, fx.Node))
    if not low.late(x) or low.shapes[left][2] != 1 or not low.has_rows_first(x):
        return False
    if low.like(x).lead != 1 or low.like(x).at:
        return False
    low.matrices[x] = OuterProducts(((left, right),))
    low.values[x] = None
    return True


def _is_sum(low: AbstractLowering, x: fx.Node) -> bool:
    """Of products of all entries."""
    both = [low.matrices.get(y) for y in x.all_input_nodes]
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for known in both:
        if not isinstance(known, OuterProducts):
            return False
        pairs += [pair[::-1] if known.turned else pair for pair in known.pairs]
    if len(both) != len(x.args) or x.kwargs:
        return False
    low.matrices[x] = OuterProducts(tuple(pairs))
    low.values[x] = None
    return True
