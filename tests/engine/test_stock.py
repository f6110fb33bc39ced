"""Instances that wait at a worker until there is room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from geartrain.engine.router import Delivery, Outbox
from geartrain.engine.stock import Lot, PartialStock, Stock, waits_for
from geartrain.frames.frame import Arena
from geartrain.frames.message import Forward


def stock(limit: int = 4, trained: int = 0) -> Stock:
    arena = Arena()
    arena.turn[:] = np.arange(64) + 100
    return Stock(arena, 1, trained, lambda finished: limit)


def lot(slots: Sequence[int], answers: Sequence[int] | None = None, elsewhere: int = 0) -> Lot:
    state = np.zeros((2, len(slots)), np.int64)
    state[0] = slots
    rows = Delivery(7, 0, Forward((), state, np.array(slots)))
    return Lot(np.array(slots), np.array(answers or [1] * len(slots)), elsewhere, [rows])


def begun(here: Stock) -> list[list[int]]:
    return [d.batch.state[0].tolist() for d in here.begin() if isinstance(d.batch, Forward)]


def answered(*slots: int) -> Outbox:
    return Outbox(answered=[np.array(slots)])


def test_lots_begin_in_their_order_as_far_as_there_is_room() -> None:
    here = stock(4)
    for slots in ([0, 1], [2, 3], [4]):
        here.put(lot(slots))
    assert begun(here) == [[0, 1], [2, 3]]
    assert (here.active, here.waiting) == (4, 1)
    assert here.settle(answered(2)) is not None
    assert begun(here) == [[4]]
    assert (here.active, here.waiting) == (4, 0)


def test_an_instance_finishes_with_its_last_answer_and_spawned_rows_are_awaited() -> None:
    here = stock()
    here.put(lot([5, 6], [2, 1]))
    here.begin()
    assert here.settle(answered(5)) is None
    both = Outbox(answered=[np.array([5, 6, 6])], spawned=[np.array([6])])
    told = here.settle(both)
    assert told is not None
    assert sorted(told.turns.tolist()) == [105, 106] and told.copy == 1
    assert here.active == 0


def test_what_finished_as_it_was_admitted_takes_no_room() -> None:
    here = stock(2)
    here.put(lot([0, 1, 2], [0, 1, 0]))
    here.put(lot([3]))
    assert begun(here) == [[0, 1, 2], [3]]
    assert here.active == 2


def test_a_lot_that_is_larger_than_the_room_begins_in_part() -> None:
    here = stock(2)
    here.put(lot([0, 5, 2, 3], [1, 0, 1, 1]))
    assert begun(here) == [[0, 5, 2]]
    assert (here.active, here.waiting) == (2, 1)
    assert begun(here) == []
    here.settle(answered(0))
    assert begun(here) == [[3]]
    assert (here.active, here.waiting) == (2, 0)


def test_rows_of_a_split_lot_go_with_their_instances_in_whatever_order_they_are() -> None:
    state = np.array([[3, 1, 3, 2], [0, 1, 2, 3]])
    rows = Forward((), state, np.arange(4))
    first, others = Lot(np.array([1, 3, 2]), np.array([1, 2, 1]), 0, [Delivery(7, 0, rows)]).split(
        2
    )
    assert first.slots.tolist() == [1, 3] and others.slots.tolist() == [2]
    (now,), (later,) = first.deliveries, others.deliveries
    assert isinstance(now.batch, Forward) and isinstance(later.batch, Forward)
    assert now.batch.state.tolist() == [[3, 1, 3], [0, 1, 2]]
    assert later.batch.state.tolist() == [[2], [3]] and later.batch.origin.tolist() == [3]


@pytest.mark.parametrize("opened", [[1, 1, 1, 2], [1, 0, 1, 2]], ids=["all", "not all"])
def test_a_lot_with_a_row_for_each_instance_is_cut(opened: list[int]) -> None:
    slots = np.array([4, 2, 7, 5])
    rows = Forward((torch.arange(9),), slots[None], slots, np.array([2, 1, 3, 3]))
    whole = Lot(slots, np.array(opened), 0, [Delivery(7, 0, rows)])
    many = 2 if all(opened) else 3  # one has finished as it was admitted
    first, others = whole.split(2)
    assert first.slots.tolist() == slots[:many].tolist() and len(first) == 2
    (now,), (later,) = first.deliveries, others.deliveries
    assert now.batch.origin.tolist() == slots[:many].tolist()
    assert later.batch.origin.tolist() == slots[many:].tolist()
    assert isinstance(now.batch, Forward) and isinstance(later.batch, Forward)
    cut = [2 + 1, 2 + 1 + 3][many - 2]
    assert now.batch.payload[0].tolist() == [*range(cut)]
    assert later.batch.payload[0].tolist() == [*range(cut, 9)]


def test_where_many_may_be_in_flight_room_for_a_sixteenth_is_awaited() -> None:
    here = stock(32)
    here.put(lot(range(40)))
    assert [len(some) for some in begun(here)] == [32]
    here.settle(answered(3))
    assert begun(here) == []
    here.settle(answered(4))
    assert begun(here) == [[32, 33]]


def test_what_has_finished_is_that_of_others_as_was_told_and_its_own_as_it_is() -> None:
    here = stock(trained=10)
    here.put(lot([0, 1], elsewhere=14))
    here.begin()
    told = here.settle(answered(0))
    assert told is not None and told.trained == here.trained == 15
    here.put(lot([2], elsewhere=12))  # it never goes back
    told = here.settle(answered(1))
    assert told is not None and told.trained == 16


def test_slots_beyond_those_that_were_there_make_room() -> None:
    here = stock()
    here.put(lot([200]))
    assert begun(here) == [[200]] and here.active == 1


def test_the_controller_is_told_when_it_may_send_another_lot_and_not_sooner() -> None:
    here = stock(limit=4)  # a lot is half of them
    for slots in ([0, 1], [2, 3], [4, 5]):
        here.put(lot(slots))
    here.begin()
    assert not here.has_room
    here.settle(answered(0))
    assert not here.has_room
    here.settle(answered(2))
    assert here.has_room
    here.told()
    assert not here.has_room
    here.settle(answered(1))
    assert not here.has_room


def test_where_lots_are_larger_than_half_of_those_in_flight_it_is_told_of_one_of_these() -> None:
    here = stock(limit=4)
    here.put(lot(range(6)))
    here.put(lot(range(6, 12)))
    assert begun(here) == [[0, 1, 2, 3]]
    here.settle(answered(0, 1, 2))
    assert begun(here) == [[4, 5], [6]]
    here.settle(answered(3, 4))
    assert not here.has_room
    here.settle(answered(5))
    assert here.has_room


def test_who_has_begun_its_last_lot_tells_of_the_next_that_finish_and_once() -> None:
    """So that another lot comes while there are some in flight."""
    here = stock(limit=4)
    here.put(lot(range(6)))
    here.begin()
    here.settle(answered(0, 1, 2))
    assert not here.has_room  # three of six, and more are waiting
    here.told()
    assert begun(here) == [[4, 5]] and not here.has_room
    here.settle(answered(3))
    assert here.has_room
    here.told()
    here.settle(answered(4))
    assert begun(here) == [] and not here.has_room
    here.put(lot([6]))  # the last of the data
    assert begun(here) == [[6]] and here.has_room
    here.told()
    here.settle(answered(5))
    assert not here.has_room


def partial_stock(limit: int = 2) -> PartialStock:
    return PartialStock(Arena(), 0, lambda finished: limit)


def test_rows_begin_when_those_that_were_fed_here_have_been_answered() -> None:
    here = partial_stock(2)
    here.put(lot([0, 1, 2, 3], [2, 1, 1, 1]))
    assert begun(here) == [[0, 1]]
    assert here.settle(answered(0)) is None and begun(here) == []
    assert here.settle(answered(0)) is None and begun(here) == [[2]]
    assert (here.active, here.waiting) == (2, 1)


def test_what_is_answered_elsewhere_makes_room_when_it_is_said_to_have_finished_and_once() -> None:
    here = partial_stock(2)
    here.put(lot([0, 1, 2, 3, 4]))
    assert begun(here) == [[0, 1]]
    here.over(np.array([1, 60]), 1)
    assert begun(here) == [[2]]
    here.over(np.array([1]), 1)
    assert begun(here) == [] and here.active == 2
    here.settle(answered(0))
    here.over(np.array([0]), 2)
    assert (begun(here), here.active, here.trained) == ([[3]], 2, 2)


def test_the_controller_is_told_of_a_lot_or_when_there_is_nothing_left() -> None:
    here = partial_stock(2)
    here.put(lot([0, 1, 2]))
    assert begun(here) == [[0, 1]]
    here.settle(answered(0))
    assert not here.has_room  # one of three, and another one waits
    assert begun(here) == [[2]]
    assert here.has_room
    here.told()
    assert not here.has_room
    here.settle(answered(1, 2))
    assert here.has_room


def test_answers_that_are_waited_for_are_those_of_rows_that_are_fed_to_a_worker() -> None:
    rows = lot([3, 1, 3]).deliveries[0]
    other = lot([1]).deliveries[0]
    assert waits_for([rows, other], np.array([1, 2, 3])).tolist() == [2, 0, 2]
    assert waits_for([], np.array([5])).tolist() == [0]


def partial(limit: int = 4) -> PartialStock:
    return PartialStock(Arena(), 0, lambda finished: limit)


def test_answers_of_instances_that_others_were_fed_count_for_nothing() -> None:
    here = partial(2)
    here.put(lot([0, 1]))
    here.begin()
    # Of slots that were never fed here, within and beyond those that there are, and one spawned.
    here.settle(Outbox(answered=[np.array([7, 70, 70])], spawned=[np.array([8, 90])]))
    assert here.active == 2
    here.put(lot([7]))
    assert begun(here) == []
    here.settle(answered(0))
    assert begun(here) == [[7]]
    here.settle(answered(7))
    assert here.active == 1


def test_an_instance_is_over_once_however_often_it_is_answered_and_said() -> None:
    here = partial(2)
    here.put(lot([0, 1, 2], [1, 2, 1]))
    assert begun(here) == [[0, 1]]
    here.settle(answered(0, 0, 0))  # rows of it were answered here that others were fed
    here.settle(answered(0))
    assert here.active == 1
    here.over(np.array([0]), 1)
    assert here.active == 1
    here.over(np.array([1]), 2)
    here.over(np.array([1]), 2)
    assert here.active == 0 and begun(here) == [[2]]
