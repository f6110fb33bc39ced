"""An axis that comes before those of rows, as ``permute(2, 0, 3, 1, 4)`` puts keys and values.

rows with parts ─► the axis in front ─► one part each  (unbind, select)
parts ─► stacked in front ─► behind the rows again     (their gradients)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from geartrain.derived.ragged.base import AbstractLowering
from geartrain.derived.ragged.values import NO_ROWS, Axes, InFront, RaggedValue
from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Op

aten = torch.ops.aten


def put_in_front(low: AbstractLowering, x: fx.Node, order: Sequence[int]) -> InFront:
    """An axis of what rows have comes before all others.

    Args:
        low: The lowering.
        x: What it makes.
        order: The axis of its source that each axis is.
    """
    source: Any = x.args[0]
    mine, like = low.like(source), low.behind(x)
    at = mine.tail_axis(order[0])
    if at < 0 or mine.kind == NO_ROWS or math.prod(mine.tail[:at]) != 1:
        raise Refused("an axis of rows is cut")
    _check_order([mine.tail_axis(k) for k in order[1:] if low.shapes[source][k] != 1])
    if (like.kind, like.times, like.merged) != (mine.kind, mine.times, mine.merged):
        raise Refused("axes change places")
    value, inner = low.whole(source, late=low.late(x)), math.prod(mine.tail[at + 1 :])
    return InFront(
        tuple(replace(value, at=value.at + k * inner, tail=like.tail) for k in range(mine.tail[at]))
    )


def put_behind(low: AbstractLowering, x: fx.Node, known: InFront, order: Sequence[int]) -> None:
    """The axis comes behind that of rows, where the parts are side by side."""
    source: Any = x.args[0]
    each, like, late = low.behind(source), low.like(x), low.late(x)
    home = order.index(0)
    at = like.tail_axis(home)
    if at < 0 or math.prod(like.tail[:at]) != 1:
        raise Refused("an axis of rows is cut")
    others = [k - 1 for j, k in enumerate(order) if j != home and low.shapes[source][k] != 1]
    _check_order([each.tail_axis(k) for k in others])
    if (like.kind, like.times, like.merged) != (each.kind, each.times, each.merged):
        raise Refused("axes change places")
    out, inner = low.room(like, late=late), math.prod(like.tail[at + 1 :])
    if None in known.parts:
        low.plain(Op.ZERO, out, late=late)
    for k, part in enumerate(known.parts):
        if part is not None:
            place = replace(out, at=out.at + k * inner, tail=part.tail)
            low.plain(Op.COPY, place, low.full(part, late=late), late=late)
    low.values[x] = out


def _check_order(axes: Sequence[int]) -> None:
    own = [k for k in axes if k >= 0]
    if own != sorted(own):
        raise Refused("axes change places")


def beside_in_front(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether parts of an axis in front are put one after the other."""
    pieces: Any = x.args[0]
    known = [low.values.get(y) for y in pieces]
    fronts = [each.parts for each in known if isinstance(each, InFront)]
    if len(fronts) < len(pieces) or (*x.args[1:], 0)[0] != 0:
        return False
    low.values[x] = InFront(tuple(part for parts in fronts for part in parts))
    return True


def selected_back(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether it is the gradient of one part of an axis in front."""
    args: Any = x.args
    came, shape, dim, which = args
    if dim != 0 or low.like(came).kind == NO_ROWS or low.shapes[came] != low.shapes[x][1:]:
        return False
    parts: list[RaggedValue | None] = [None] * shape[0]
    parts[which] = low.whole(came, late=low.late(x))
    low.values[x] = InFront(tuple(parts))
    return True


def added_in_front(low: AbstractLowering, x: fx.Node) -> bool:
    """Whether it adds what have an axis in front."""
    both = [low.values.get(y) for y in x.all_input_nodes]
    if len(both) != 2 or x.kwargs or not all(isinstance(known, InFront) for known in both):
        return False
    one, other = (known.parts for known in both if isinstance(known, InFront))
    late, like = low.late(x), low.behind(x)
    low.values[x] = InFront(
        tuple(_sum_of(low, a, b, like, late=late) for a, b in zip(one, other, strict=True))
    )
    return True


def _sum_of(
    low: AbstractLowering,
    one: RaggedValue | None,
    other: RaggedValue | None,
    like: Axes,
    *,
    late: bool,
) -> RaggedValue | None:
    if one is None or other is None:
        return other if one is None else one
    out = low.room(like, late=late)
    low.plain(Op.ADD, out, low.full(one, late=late), low.full(other, late=late), late=late)
    return out
