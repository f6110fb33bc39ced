"""How many instances are given to a worker together, where they live wholly on one."""

from __future__ import annotations

import pytest
import torch

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.runtime.processes.lots import worth_a_lot
from geartrain.sharing.assignment import Stocked, Together
from tests.rigs.pairs import pass_of_two

MANY = 1_000_000


def test_a_lot_is_what_a_worker_does_in_a_quarter_of_a_second() -> None:
    assert worth_a_lot(1600, 2.0, MANY, 2) == 100
    assert worth_a_lot(3200, 2.0, MANY, 4) == 100
    assert worth_a_lot(3, 20.0, MANY, 2) == 0  # each takes long


def test_little_is_known_at_the_beginning_and_lots_are_bounded() -> None:
    assert worth_a_lot(0, 0.0, MANY, 2) == 0
    assert worth_a_lot(10, 1e-4, MANY, 2) == 12  # as if it had been a tenth of a second
    assert worth_a_lot(MANY, 0.1, MANY, 2) == 1024


@pytest.mark.parametrize(("left", "lot"), [(300, 100), (299, 99), (30, 10), (2, 0), (0, 0)])
def test_towards_the_end_lots_are_a_share_of_what_is_left(left: int, lot: int) -> None:
    assert worth_a_lot(4000, 2.0, left, 2) == lot


def test_whoever_gets_a_lot_towards_the_end_leaves_as_much_to_each_of_the_others() -> None:
    for workers in (2, 3, 8):
        left = 999
        lot = worth_a_lot(MANY, 2.0, left, workers)
        assert 0 < workers * lot <= left - lot


def test_a_lot_of_large_rows_has_two_mebibytes_and_pipelines_have_lots_of_their_own() -> None:
    made = gt.Graph()
    made.input("x").through(torch.sin, name="sin").stop()
    engine = Engine(made, {}, Settings(max_active=8))
    engine.give_together(100, 1)
    assert isinstance(engine.controller.assignment, Together)
    assert engine.controller.assignment.lot == 1
    stocked = engine.controller.assignment = Stocked(2)
    for nbytes, lot in ((0, 100), (1 << 10, 100), (1 << 20, 2), (1 << 22, 0)):
        engine.give_together(100, nbytes)
        assert stocked.lot == lot


def test_small_instances_go_by_lots_larger_than_are_in_flight() -> None:
    """And all of them are trained, the last ones too."""
    fit, event = pass_of_two(4000, 4)
    told = sum(x.messages for x in event.links if x.sender == 2)
    assert fit.history[-1].instances == 4000
    assert told < 1000, told  # 2000 lots of two
