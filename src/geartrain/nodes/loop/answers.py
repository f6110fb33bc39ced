"""What a turn of a loop tells parts of the rows that they will get, and have got."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from geartrain.frames.message import INSTANCE, Backward, IntArray, join_arrays
from geartrain.nodes.loop.plan import CallStage
from geartrain.nodes.loop.turn import Inner, Turn
from geartrain.nodes.node import Emission
from geartrain.nodes.weights import AbstractWeights


def count(turn: Turn, inner: Sequence[Inner], parts: Collection[str]) -> None:
    """Count the gradient rows that each of these parts will get of a turn, by instance."""
    n, names = turn.slots.size, {name: k for k, name in enumerate(parts)}
    came: list[IntArray] = []
    owners: list[int] = []
    for called in turn.plan.calls:
        if isinstance(called.stage, CallStage):
            its = inner[called.stage.number]
            if its.weights is not None and its.counts:
                slots, lengths = called.rows.state[INSTANCE], called.lengths
                came.append(slots if lengths is None else slots.repeat(lengths))
                owners.append(names[its.weights.name])
    rows = np.zeros((len(names), n), np.int64)
    if came:
        places = np.repeat(np.array(owners) * n, [each.size for each in came])
        places += turn.local[join_arrays(came)]
        rows = np.bincount(places, minlength=rows.size).reshape(rows.shape)
    turn.rows = dict(zip(names, rows, strict=True))
    both = zip(rows.sum(1).tolist(), (rows > 0).sum(1).tolist(), strict=True)
    turn.totals = dict(zip(names, both, strict=True))


def tell(
    turn: Turn,
    which: IntArray,
    name: str,
    weights: AbstractWeights,
    got: Sequence[IntArray],
    updates: IntArray | None,
) -> None:
    """Tell a part whose gradients it has got.

    Args:
        turn: The turn.
        which: Places in it of the instances that have been answered.
        name: Of the part.
        weights: The part.
        got: The places of the instances whose rows have come back, row by row.
        updates: Of which update each place in the turn is; None: all of the present one.
    """
    rows, instances = turn.totals[name]
    if not rows:
        return
    version = turn.versions[name]
    if updates is None and sum([places.size for places in got]) == rows:
        weights.received_of(version, rows, instances)  # all that can come back
        return
    sent = which[turn.rows[name][which] > 0]
    if not sent.size:
        return
    each = np.zeros(turn.slots.size, np.int64)
    if got:
        each = np.bincount(join_arrays(list(got)), minlength=turn.slots.size)
    back = sent[each[sent] > 0]
    some = each[back]
    if some.size and updates is None:
        weights.received_of(version, int(some.sum()), some.size)
    elif some.size and updates is not None:
        weights.received_for(updates[back], np.full(some.size, version, np.int64), some)
    if some.size < sent.size:
        weights.dropped(np.full(sent.size - some.size, version, np.int64))


def answer_entry(
    turn: Turn, k: int, number: int, mine: NDArray[np.bool_] | None, emission: Emission
) -> None:
    """Answer the rows that came in by an entry.

    Args:
        turn: The turn.
        k: Of the entry.
        number: Of the value that its rows have become rows of.
        mine: By place in the turn, whether the instance has been answered; None: all.
        emission: Gets the answers.
    """
    slots, origin = turn.entered[k]
    first, n = turn.plan.entered[k], origin.size
    rows = np.arange(first, first + n)
    if mine is not None:
        chosen = np.flatnonzero(mine[turn.local[slots]])
        rows, origin = rows[chosen], origin[chosen]
    if not rows.size:
        return
    touched = turn.held.touched.get(number)
    some = np.zeros(rows.size, np.bool_) if touched is None else touched[rows]
    if not some.all():
        emission.backward.append(Backward(origin[~some], None))
        rows, origin = rows[some], origin[some]
    if not rows.size:
        return
    lengths = turn.plan.numbers.lengths(number, rows)
    if lengths is None:
        gradient = turn.held.gradient(number, first, n, None)
        emission.backward.append(Backward(origin, gradient, None, rows - first))
    else:
        gradient = turn.held.gradient(number, first, n, rows - first)
        emission.backward.append(Backward(origin, gradient, lengths))
