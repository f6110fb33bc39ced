"""Instances of whole updates begin together where rows come to updates in parts."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.engine.router import Delivery, Outbox
from geartrain.engine.stock import Lot, Stock
from geartrain.engine.waves import Waves
from geartrain.frames.frame import Arena
from geartrain.frames.message import Forward


@pytest.mark.parametrize(
    ("update", "begun", "room", "wave"),
    [
        (10, 0, 25, 20),
        (10, 0, 10, 10),
        (10, 0, 9, 9),  # no update is whole: as many as there is room for
        (10, 4, 25, 16),  # six of the one that was begun, and the next
        (10, 4, 5, 5),
        (10, 14, 25, 16),
        (10, 0, 1000, 40),  # no more than four
        (1, 0, 3, 3),
        (10, 0, 0, 0),
    ],
)
def test_a_wave_ends_with_an_update(update, begun, room, wave) -> None:
    assert Waves(update, begun).next(room) == wave


def test_a_wave_that_was_cut_short_is_made_good_by_the_next() -> None:
    waves = Waves(10, 0)
    waves.begin(13)
    assert waves.next(25) == 17
    waves.begin(17)
    assert waves.next(25) == 20


def stock(limit: int, update: int) -> Stock:
    here = Stock(Arena(), 0, 0, lambda finished: limit, Waves(update, 0))
    slots = np.arange(30)
    state = np.zeros((2, slots.size), np.int64)
    state[0] = slots
    rows = Delivery(7, 0, Forward((), state, slots))
    here.put(Lot(slots, np.ones(slots.size, np.int64), 0, [rows]))
    return here


def begun(here: Stock, *, idle: bool) -> list[int]:
    found = here.begin(idle=idle)
    return [k for d in found if isinstance(d.batch, Forward) for k in d.batch.state[0].tolist()]


def test_the_next_begin_when_there_is_nothing_else_to_do() -> None:
    here = stock(limit=10, update=4)
    assert begun(here, idle=False) == []
    assert begun(here, idle=True) == [*range(8)]
    here.settle(Outbox(answered=[np.arange(7)]))
    assert begun(here, idle=False) == []
    here.settle(Outbox(answered=[np.array([7])]))
    assert begun(here, idle=True) == [*range(8, 16)]


def test_whoever_has_nothing_to_do_awaits_no_whole_update() -> None:
    here = stock(limit=10, update=4)
    begun(here, idle=True)
    assert begun(here, idle=True) == [8, 9]  # those in flight wait for others
    assert here.active == 10 and begun(here, idle=True) == []
    here.settle(Outbox(answered=[np.arange(5)]))
    assert begun(here, idle=True) == [10, 11]  # and the update that was begun is made whole
