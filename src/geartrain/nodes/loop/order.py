"""The order of instances in the calls of a turn: those that go round most often come first.

What goes on is then the first rows of what a call has made, and of the memories that it has read: a
slice, where rows from everywhere would be copied, and their gradients added up one by one. Whoever
puts a batch together by hand sorts it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from geartrain.frames.message import INSTANCE, IntArray, ragged_index
from geartrain.nodes.loop.door import Came
from geartrain.nodes.loop.plan import LoopPlan, RowNumbers
from geartrain.nodes.loop.values import AbstractValue, Stored, Unbundled


def longest_first(
    plan: LoopPlan,
    came: Sequence[Came],
    entries: Sequence[AbstractValue],
    exits: Sequence[AbstractValue],
    losses: Sequence[AbstractValue],
    local: IntArray,
) -> Sequence[Came]:
    """Put the rows of each call in the order of how long their instances go round.

    Args:
        plan: Is ready, and nothing has been computed; its rows are given other numbers.
        came: The rows that enter.
        entries, exits, losses: What they hold, and those that leave or come to a loss.
        local: Slot to its place among the instances.

    Returns:
        The rows that enter, in that order.
    """
    last = np.zeros(int(local.max()) + 1, np.int64)
    for number, called in enumerate(plan.calls):
        last[local[called.rows.state[INSTANCE]]] = number
    rank = np.empty_like(last)
    rank[(-last).argsort(kind="stable")] = np.arange(last.size)
    if _is_sorted(plan, rank, local):
        return came
    renumbered = {n: np.arange(many) for n, many in enumerate(plan.numbers.counts)}
    sources = [called.stage.source for called in plan.calls]
    begun = {  # where bundles begin whose places are rows
        stored.number: plan.numbers.spans(stored.number, renumbered[stored.number])[0]
        for stored, places in map(_stored, [*sources, *exits, *losses])
        if places
    }

    def now(value: AbstractValue, rows: IntArray) -> IntArray:
        """The numbers that rows have now."""
        stored, places = _stored(value)
        mine = renumbered[stored.number]
        if not places or not rows.size:
            return mine[rows]
        before = begun[stored.number]
        bundles = before.searchsorted(rows, "right") - 1
        starts, _ = plan.numbers.spans(stored.number, mine[bundles])
        return starts + rows - before[bundles]

    entered = []
    for each, value, first in zip(came, entries, plan.entered, strict=True):
        order = rank[local[each.state[INSTANCE]]].argsort(kind="stable")
        entered.append(_reordered(each, order))
        plan.numbers.permute(value.number, first, order)
        renumbered[value.number][first + order] = np.arange(first, first + order.size)
    for called in plan.calls:
        rows, into, first = called.rows, called.stage.into.number, called.first
        order = rank[local[rows.state[INSTANCE]]].argsort(kind="stable")
        numbers = now(called.stage.source, rows.numbers)[order]
        called.rows = RowNumbers(numbers, rows.state.take(order, 1))
        if called.lengths is not None:
            called.lengths = called.lengths[order]
        plan.numbers.permute(into, first, order)
        renumbered[into][first + order] = np.arange(first, first + order.size)
    ends = [*zip(exits, plan.exits, strict=True), *zip(losses, plan.judged, strict=True)]
    for value, left in ends:
        left[:] = [RowNumbers(now(value, r.numbers), r.state) for r in left]
    return entered


def _is_sorted(plan: LoopPlan, rank: IntArray, local: IntArray) -> bool:
    """Whether the rows of each call are in order already."""
    return all(
        bool((np.diff(rank[local[called.rows.state[INSTANCE]]]) >= 0).all())
        for called in plan.calls
    )


def _stored(value: AbstractValue) -> tuple[Stored, bool]:
    """The value that has the rows of another one, and whether these are places of its bundles; else
    both have the same numbers."""
    places = False
    while not isinstance(value, Stored):
        places |= isinstance(value, Unbundled)
        value = value.source  # type: ignore[attr-defined]
    return value, places


def _reordered(came: Came, order: IntArray) -> Came:
    if came.lengths is None:
        at = came.at[order] if came.at.size else came.at
    else:
        at = came.at[ragged_index(came.lengths, order)]
    return replace(
        came,
        at=at,
        rows=came.rows[order],
        state=came.state.take(order, 1),
        origin=came.origin[order],
        lengths=None if came.lengths is None else came.lengths[order],
    )
