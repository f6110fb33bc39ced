"""What a turn of a loop tells parts of the rows that they will get, and have got."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from geartrain.frames.message import INSTANCE, IntArray
from geartrain.nodes.loop.answers import count, tell
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.plan import Called, CallStage, LoopPlan, RowNumbers
from geartrain.nodes.loop.turn import Inner, Turn
from geartrain.nodes.loop.values import Stored
from geartrain.nodes.weights import AbstractWeights

SLOTS = np.array([5, 2, 9])
VERSION = 7


class Told:
    """A part that writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def received_of(self, version: int, rows: int, messages: int) -> None:
        self.said.append(("of", version, rows, messages))

    def received_for(self, updates: IntArray, versions: IntArray, lengths: IntArray) -> None:
        self.said.append(("for", *[x.tolist() for x in (updates, versions, lengths)]))

    def dropped(self, versions: IntArray) -> None:
        self.said.append(("dropped", versions.tolist()))


def turn_of(calls: list[tuple[int, list[int], list[int] | None]]) -> Turn:
    """A turn of three instances, of calls: module, the slot of each row, lengths of bundles."""
    plan = LoopPlan(Numbers(1))
    value = Stored(0)
    for number, slots, lengths in calls:
        state = np.zeros((1, len(slots)), np.int64)
        state[INSTANCE] = slots
        rows = RowNumbers(np.arange(len(slots)), state)
        stage = CallStage(number, value, value, pools=False)
        each = None if lengths is None else np.array(lengths)
        plan.calls.append(Called(stage, rows, 0, each))
    local = np.full(10, -1)
    local[SLOTS] = range(3)
    found = Turn(plan, cast("Any", None), SLOTS, local, np.zeros(3, np.int64), [])
    inner = [
        SimpleNamespace(weights=SimpleNamespace(name="a"), counts=True),
        SimpleNamespace(weights=SimpleNamespace(name="b"), counts=True),
        SimpleNamespace(weights=None, counts=True),
        SimpleNamespace(weights=SimpleNamespace(name="a"), counts=False),
    ]
    count(found, cast("list[Inner]", inner), ["a", "b", "c"])
    found.versions = dict.fromkeys("abc", VERSION)
    return found


CALLS: list[tuple[int, list[int], list[int] | None]] = [
    (0, [5, 5, 2], None),
    (1, [9, 2], [3, 0]),
    (2, [5], None),
    (3, [9, 9], None),
    (0, [9], None),
]


def test_rows_are_counted_by_part_and_instance() -> None:
    turn = turn_of(CALLS)
    found = {name: rows.tolist() for name, rows in turn.rows.items()}
    assert found == {"a": [2, 1, 1], "b": [0, 0, 3], "c": [0, 0, 0]}
    assert turn.totals == {"a": (4, 3), "b": (3, 1), "c": (0, 0)}


def test_without_calls_no_part_gets_rows() -> None:
    assert turn_of([]).totals == {"a": (0, 0), "b": (0, 0), "c": (0, 0)}


@pytest.mark.parametrize(
    ("name", "got", "said"),
    [
        ("a", [[0, 0, 1], [2]], [("of", VERSION, 4, 3)]),
        ("a", [[0, 0], [2]], [("of", VERSION, 3, 2), ("dropped", [VERSION])]),
        ("a", [], [("dropped", [VERSION] * 3)]),
        ("b", [[2, 2, 2]], [("of", VERSION, 3, 1)]),
        ("c", [], []),
    ],
    ids=["all", "some", "none", "one instance", "no rows"],
)
def test_a_part_is_told_what_has_come_back_and_what_never_will(
    name: str, got: list[list[int]], said: list[tuple[Any, ...]]
) -> None:
    turn, part = turn_of(CALLS), Told()
    its: list[NDArray[np.int64]] = [np.array(places) for places in got]
    tell(turn, np.arange(3), name, cast("AbstractWeights", part), its, None)
    assert part.said == said


def test_instances_are_told_by_update_where_these_are_several() -> None:
    turn, part = turn_of(CALLS), Told()
    got, updates = [np.array([0, 0, 1, 2])], np.array([0, 1, 1])
    tell(turn, np.arange(3), "a", cast("AbstractWeights", part), got, updates)
    assert part.said == [("for", [0, 1, 1], [VERSION] * 3, [2, 1, 1])]


def test_of_some_instances_only_those_are_told() -> None:
    turn, part = turn_of(CALLS), Told()
    tell(turn, np.array([1]), "a", cast("AbstractWeights", part), [np.array([1])], None)
    assert part.said == [("of", VERSION, 1, 1)]
