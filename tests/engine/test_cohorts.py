"""Which instances are of which update, where several copies of a part have a share of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.engine.cohorts import Cohorts
from geartrain.engine.router import BACKWARD, Delivery
from geartrain.frames.frame import Arena
from geartrain.frames.message import Backward, Forward

N = 3  # instances of an update


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
@pytest.mark.parametrize("first", [0, 1, 2, 7])
@pytest.mark.parametrize("begun", [0, 2])
def test_updates_of_a_copy_are_of_its_own_turns_in_their_order(copies, first, begun) -> None:
    for copy in range(copies):
        own = [turn for turn in range(first, first + 12 * copies) if turn % copies == copy]
        cohorts = Cohorts(Arena(), N, first, begun, copy, copies)
        of = [(begun + place) // N for place in range(len(own))]
        assert [cohorts.ahead(turn) for turn in own] == of
        everybody = np.arange(own[0], own[N - begun])  # and of the next update nobody
        assert list(cohorts.finished(everybody)) == [N - begun, 0]
        assert [cohorts.ahead(turn) for turn in own] == [max(0, k - 1) for k in of]


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("begun", [0, 2])
def test_nobody_waits_until_an_instance_of_a_later_update_has_come(copies, begun) -> None:
    for copy in range(copies):
        arena = Arena()
        cohorts = Cohorts(arena, N, 0, begun, copy, copies)
        assert cohorts.none_waits
        own = [turn for turn in range(4 * copies) if turn % copies == copy]
        for turn in own:
            arena.latest = turn
            assert cohorts.none_waits is (cohorts.ahead(turn) == 0)
        arena.turn[:3] = own[:3]
        arena.latest = own[N - begun - 1]
        assert cohorts.updates(np.arange(N - begun)) is None
        arena.latest = own[N - begun]
        assert cohorts.updates(np.arange(N - begun)).tolist() == [0] * (N - begun)
        assert list(cohorts.finished(np.array(own[: N - begun]))) == [N - begun, 0]
        assert cohorts.none_waits


@pytest.mark.parametrize("turns", [[0, 1, 3, 5, 6, 8, 9], [9, 5, 0, 6, 3, 1, 8]])
def test_what_may_be_added_now_goes_in_one_piece_and_each_later_update_waits_in_its_own(
    turns: list[int],
) -> None:
    arena = Arena()
    arena.turn = np.array(turns)
    cohorts = Cohorts(arena, N, 0, 0)
    rows = np.arange(len(turns))
    of = np.array(turns) // N

    def numbers(deliveries: list[Delivery]) -> list[list[int]]:
        return [[*delivery.batch.rows] for delivery in deliveries]

    found = cohorts.sort(Delivery(7, BACKWARD, Backward(rows, None)), rows, ahead=1)
    assert numbers(found) == [[*np.flatnonzero(of == 0), *np.flatnonzero(of == 1)]]
    for present in range(1, 4):
        assert list(cohorts.finished(np.arange(N * (present - 1), N * present)))
        later = [[*np.flatnonzero(of == present + 1)]] if present < 3 else []
        assert numbers(cohorts.take()) == later


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_answers_that_may_be_added_now_come_update_after_update(ahead: int) -> None:
    arena = Arena()
    turns = np.array([4, 0, 7, 1, 3, 8, 2, 5, 6])
    arena.turn = turns
    cohorts = Cohorts(arena, N, 0, 0)
    rows = np.arange(turns.size)
    (found,) = cohorts.sort(Delivery(7, BACKWARD, Backward(rows + 20, None)), rows, ahead=ahead)
    now = [k for k in rows if turns[k] // N <= ahead]
    # Those of an update are in the order in which they came.
    assert [*found.batch.rows - 20] == sorted(now, key=lambda k: turns[k] // N)


def test_rows_that_go_on_stay_in_their_order() -> None:
    arena = Arena()
    arena.turn = np.array([4, 0, 5, 1])
    delivery = Delivery(7, 0, Forward((torch.zeros(4, 1),), np.zeros((2, 4), np.int64), arena.turn))
    assert Cohorts(arena, N, 0, 0).sort(delivery, np.arange(4), ahead=1) == [delivery]
