"""Rows of tables by numbers that steps compute, as those of places and distances are.

places of pairs ─► distances, no more than some ─► rows of a table, one for each pair
their gradients ─► added up by number for each member ─► a sum of rows for the table
"""

from __future__ import annotations

import math
from typing import Any, Final

from torch import fx

from geartrain.derived.ragged.base import AbstractLowering
from geartrain.derived.ragged.values import BUNDLES, MEMBERS, PAIRS, Axes, RaggedValue
from geartrain.derived.steps.places import Refused
from geartrain.native.ragged import Way

MOST_ENTRIES: Final = 1 << 13
"""Of a table whose gradient is added up for each bundle, or each member, by itself."""


def _numbers(low: AbstractLowering, index: Any, rows: RaggedValue | Axes) -> RaggedValue:
    """One for each row.

    Raises:
        Refused: It is something else.
    """
    known = low.values.get(index)
    if not isinstance(known, RaggedValue) or known.width != 1:
        raise Refused("rows are taken by numbers that are computed")
    if (known.kind, known.times) != (rows.kind, 1) or rows.times != 1:
        raise Refused("rows are taken by numbers of several axes")
    return known


def look_up(
    low: AbstractLowering, table: RaggedValue, index: Any, like: Axes, *, late: bool
) -> RaggedValue:
    """Rows of a table."""
    numbers, (many, *tail) = _numbers(low, index, like), table.tail
    if table.buffer.role != "operand" or like.width != math.prod(tail):
        raise Refused("a table that is no weight")
    out = low.room(like, late=late)
    how: Any = {"width": like.width, "many": many, "kind": like.kind, "late": late}
    low.step(Way.LOOK_UP, out, numbers, table, **how)
    return out


def learned_of(
    low: AbstractLowering, rows: fx.Node, index: fx.Node, shape: tuple[int, ...]
) -> RaggedValue:
    """Gradients of rows of a table of that shape, added up by their numbers."""
    late, many = True, shape[0]
    value = low.whole(rows, late=late)
    numbers = _numbers(low, index, value)
    if math.prod(shape) > MOST_ENTRIES or value.kind not in (MEMBERS, PAIRS):
        raise Refused("a table that is large, by numbers that are computed")
    kind = MEMBERS if value.kind == PAIRS else BUNDLES
    out = low.room(Axes(kind, 1, (math.prod(shape),), 1), late=late)
    how: Any = {"inside": kind == BUNDLES, "pairs": kind == MEMBERS, "late": late}
    low.step(Way.ADD_UP_BY, out, value, numbers, kind=kind, many=many, **how)
    return out
