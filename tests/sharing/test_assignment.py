"""Which copy of the graph gets which instance, and what turn it has there."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.frames.frame import Arena
from geartrain.sharing.assignment import Balanced, PerCopy, Stocked, Together


def admit(assignment, slots, copy=0) -> Arena:
    arena = Arena()
    assignment.admit(arena, np.array(slots), copy)
    return arena


def test_turns_of_balanced_copies_are_counted_from_zero_in_each_pass() -> None:
    assignment = Balanced(3)
    for _ in range(2):
        assignment.begin(100, training=True)
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for slots in ([0, 1, 2, 3], [4], [5, 6, 7, 8, 9]):
            arena = admit(assignment, slots)
            for slot in slots:
                seen[int(arena.copy[slot])].append(int(arena.turn[slot]))
            left = assignment.finish(arena, np.array(slots[:1]))
            assert left.tolist() == [int(arena.copy[slots[0]])]
            assignment.finish(arena, np.array(slots[1:], np.int64))
        assert [assignment.first_turn(k, 100) for k in seen] == [0, 0, 0]
        assert all(turns == list(range(len(turns))) for turns in seen.values())
        assert sum(map(len, seen.values())) == 10
        assert assignment.active.tolist() == [0]


def test_those_with_fewest_in_flight_get_the_next_until_all_have_as_many() -> None:
    assignment = Balanced(3)
    assignment.begin(0, training=True)
    arena = admit(assignment, range(6))
    assert np.bincount(arena.copy[:6]).tolist() == [2, 2, 2]
    assignment.finish(arena, np.flatnonzero(arena.copy[:6] == 1))
    assert set(admit(assignment, [6, 7]).copy[6:8].tolist()) == {1}
    assert assignment.active.tolist() == [6]


def test_one_at_a_time_each_goes_to_another_copy_until_all_have_one() -> None:
    assignment = Balanced(3)
    assignment.begin(0, training=True)
    arena = Arena()
    for slot in range(6):
        assignment.admit(arena, np.array([slot]), 0)
    assert arena.copy[:6].tolist() == [0, 1, 2, 0, 1, 2]


def test_what_comes_together_goes_to_the_copy_that_has_the_fewest_and_fills_each() -> None:
    assignment = Stocked(2)
    assignment.begin(0, training=True)
    arena, at = Arena(), 0
    while room := assignment.room(20):
        assert room == 10  # half of them
        assignment.admit(arena, np.arange(at, at + room), 0)
        assert len({*arena.copy[at : at + room].tolist()}) == 1
        at += room
    assert assignment.active.tolist() == [20, 20]
    mine = np.flatnonzero(arena.copy[:at] == 1)
    assert arena.turn[mine].tolist() == list(range(20))
    assert assignment.finish(arena, mine[:3]).tolist() == [1, 1, 1]
    assert assignment.room(20) == 0  # it waits for room for a lot
    assignment.finish(arena, mine[3:10])
    assert assignment.room(20) == 10
    assignment.ahead = 0.5
    assignment.admit(arena, np.arange(at, at + 10), 0)
    assert assignment.room(20) == 10 and assignment.active.tolist() == [20, 20]


def test_where_more_are_worth_a_lot_two_such_lots_may_wait_at_each_copy() -> None:
    assignment = Stocked(2)
    assignment.begin(0, training=True)
    assignment.ahead, assignment.lot = 1.0, 15
    at, given = 0, []
    while room := assignment.room(10):
        assert room == 15
        given.append(int(admit(assignment, range(at, at + room)).copy[at]))
        at += room
    assert assignment.active.tolist() == [30, 30] and given == [0, 1, 0, 1]
    assignment.lot = 4  # less than half of those that may be in flight
    assert assignment.room(10) == 0
    assignment.active[0] = 15
    assert assignment.room(10) == 5
    assignment.begin(0, training=True)
    assert assignment.lot == 0  # nothing is known of the next pass


@pytest.mark.parametrize(("update", "some"), [(1, 10), (4, 12), (10, 10), (16, 16), (21, 10)])
def test_lots_are_of_whole_updates_where_one_has_room(update: int, some: int) -> None:
    assignment = Stocked(2)
    assignment.begin(0, training=True)
    assignment.ahead, assignment.update = 1.0, update
    assert assignment.room(20) == some
    assignment.lot = 25
    more = 25 if update > 20 else -(-25 // update) * update
    assert assignment.room(20) == more
    assignment.active[:] = 20 + 2 * 25 - more
    assert assignment.room(20) == more
    assignment.active += 1
    assert assignment.room(20) == 0  # rather than a part of an update


@pytest.mark.parametrize(
    "make",
    [Together, lambda: Balanced(2), lambda: Stocked(2)],
    ids=["together", "balanced", "stocked"],
)
def test_numbers_go_on_through_the_run_in_training_alone(make) -> None:
    assignment = make()
    assignment.begin(7, training=True)
    assert assignment.number(0) == 7
    admit(assignment, [0, 1, 2])
    assert assignment.number(0) == 10
    assignment.begin(10, training=False)
    assert assignment.number(0) == 0


def test_each_copy_has_numbers_of_its_own() -> None:
    trained = [4, 9]
    assignment = PerCopy(trained)
    assignment.begin(13, training=True)
    arena = admit(assignment, [0, 1, 2], 1)
    assert [assignment.number(0), assignment.number(1)] == [4, 12]
    assert assignment.active.tolist() == [0, 3] and arena.copy[:3].tolist() == [1, 1, 1]
    assert assignment.finish(arena, np.array([0, 2])).tolist() == [1, 1]
    assert assignment.active.tolist() == [0, 1] and trained == [4, 11]
    assert assignment.first_turn(1, 13) == 11
    assignment.begin(15, training=False)
    assert [assignment.number(0), assignment.number(1)] == [0, 0]
    assignment.finish(arena, np.array([1]))
    assert trained == [4, 11]  # evaluation trains nothing


def test_what_is_lost_with_a_copy_is_in_flight_there_no_more() -> None:
    assignment = PerCopy([0, 0])
    assignment.begin(0, training=True)
    arena = Arena()
    for copy, slots in enumerate(([0, 1, 2], [3, 4])):
        assignment.admit(arena, np.array(slots), copy)
    assert assignment.active.tolist() == [3, 2]
    assignment.drop(arena, np.array([0, 1, 2]))
    assert assignment.active.tolist() == [0, 2]
