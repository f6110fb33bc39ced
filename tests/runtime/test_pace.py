"""When a worker process tells its parent what it has done."""

from __future__ import annotations

import operator
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geartrain.engine.router import Outbox
from geartrain.engine.stock import Lot, PartialStock, Stock
from geartrain.frames.frame import Arena
from geartrain.runtime.processes.child import _Work
from geartrain.runtime.processes.messages import Report
from geartrain.runtime.processes.pace import MOST_FIRINGS, SLOW_S, SOON_S, CoreClock, Pace


def test_what_the_parent_waits_for_goes_soon_and_the_rest_as_often_as_progress() -> None:
    pace = Pace(None)
    pace.told(10.0)
    soon, slow = 10.0 + 1.5 * SOON_S, 10.0 + 1.5 * SLOW_S
    assert not pace.due(10.0, matters=True, firings=1)
    assert pace.due(soon, matters=True, firings=1)
    assert not pace.due(soon, matters=False, firings=1)
    assert pace.due(slow, matters=False, firings=1)
    pace.told(slow)
    assert not pace.due(slow, matters=True, firings=1)


@pytest.mark.parametrize("there", [False, True])
def test_a_report_does_not_grow_without_end(there: bool) -> None:
    pace = Pace(Stock(Arena(), 0, 0, lambda trained: 4) if there else None)
    pace.told(10.0)
    assert not pace.due(10.0, matters=True, firings=MOST_FIRINGS - 1)
    assert pace.due(10.0, matters=True, firings=MOST_FIRINGS)


def test_with_a_stock_answers_wait_until_the_parent_may_send_another_lot() -> None:
    """However long firings are: each of them would else be a report."""
    stock = Stock(Arena(), 0, 0, lambda trained: 4)
    for slots in ([0, 1], [2, 3]):
        stock.put(Lot(np.array(slots), np.ones(2, np.int64), 0, []))
    stock.begin()
    pace = Pace(stock)
    pace.told(10.0)
    later = 10.0 + 0.9 * SLOW_S
    stock.settle(Outbox(answered=[np.array([0])]))
    assert not pace.due(later, matters=True, firings=9)
    stock.settle(Outbox(answered=[np.array([1])]))
    assert pace.due(later, matters=True, firings=10)
    pace.told(later)
    assert not pace.due(later, matters=True, firings=1)
    assert pace.due(later + 2 * SLOW_S, matters=True, firings=1)


def whole(workers: int) -> Pace:
    return Pace(Stock(Arena(), 0, 0, lambda trained: 4), workers)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_many_workers_tell_of_progress_as_often_together_as_one(workers: int) -> None:
    pace = whole(workers)
    pace.told(10.0)
    between = SLOW_S * workers
    assert pace.progress_s == pytest.approx(between)
    assert not pace.due(10.0 + 0.9 * between, matters=True, firings=1)
    assert pace.due(10.0 + 1.1 * between, matters=True, firings=1)


def test_progress_is_told_of_however_many_there_are() -> None:
    assert whole(1000).progress_s == whole(100).progress_s < 1.0


def test_where_others_may_wait_for_it_what_was_done_is_told_as_soon_by_each_of_many() -> None:
    """Rows that one worker was fed are answered at another one, which is fed nothing."""
    for stock in (None, PartialStock(Arena(), 0, lambda trained: 4)):
        pace = Pace(stock, 8)
        pace.told(10.0)
        assert pace.due(10.0 + 1.1 * SLOW_S, matters=True, firings=1)
        assert pace.progress_s > SLOW_S


def test_what_has_no_answers_is_waited_for_by_nobody_wherever_it_was_done() -> None:
    for stock in (None, PartialStock(Arena(), 0, lambda trained: 4)):
        pace = Pace(stock, 8)
        pace.told(10.0)
        assert not pace.due(10.0 + 0.9 * pace.progress_s, matters=False, firings=1)
        assert pace.due(10.0 + 1.1 * pace.progress_s, matters=False, firings=1)


class Clocks:
    """What the two clocks say, from where they stood."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.core_s, self.wall_s = 5.0, 100.0
        self.reads = 0  # of the core's
        monkeypatch.setattr(time, "thread_time", self._core)
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall_s)

    def _core(self) -> float:
        self.reads += 1
        return self.core_s


def test_a_worker_that_shares_its_core_goes_by_what_it_has_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    core = CoreClock()
    assert core.seconds() == 0
    clocks.core_s, clocks.wall_s = 5.5, 102.0  # a quarter
    assert core.seconds() == 0.5


def test_one_that_waits_in_its_firings_is_heard_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    core = CoreClock()
    clocks.wall_s = 108.0
    assert core.seconds() == 1
    clocks.core_s, clocks.wall_s = 5.5, 108.5  # to have waited takes nothing from what follows
    assert core.seconds() == 1.5


def test_by_everybodys_clock_goes_what_others_may_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    paces = whole(2), Pace(PartialStock(Arena(), 0, lambda trained: 4)), Pace(None)
    began = [pace.now() for pace in paces]
    clocks.core_s, clocks.wall_s = 5.5, 102.0
    passed = [pace.now() - before for pace, before in zip(paces, began, strict=True)]
    assert passed == [0.5, 2.0, 2.0]
    assert [pace.core.seconds() for pace in paces] == [0.5, 0.5, 0.5]


def test_the_clock_of_the_core_is_read_only_where_something_may_be_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To read it may end the worker's turn at the core."""
    clocks = Clocks(monkeypatch)
    worker: Any = SimpleNamespace(_pace=whole(2), _report=Report())
    worker._pace.told(worker._pace.now())

    def is_due() -> tuple[bool, int]:
        """And how often that clock was read for it."""
        before = clocks.reads
        return _Work._is_due(worker), clocks.reads - before

    for clocks.wall_s in (100.05, 100.1, 100.15):  # it is told of every 0.2 s
        assert is_due() == (False, 0)
    clocks.core_s, clocks.wall_s = 5.1, 100.25  # others had the core meanwhile
    assert is_due() == (False, 1)
    clocks.wall_s = 100.34  # from then on it has had 0.09 s at most
    assert is_due() == (False, 0)
    clocks.core_s, clocks.wall_s = 5.21, 100.5
    assert is_due() == (True, 1)


def test_whether_something_is_due_is_asked_by_the_clock_that_a_worker_goes_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    paces = whole(2), Pace(PartialStock(Arena(), 0, lambda trained: 4)), Pace(None)
    began = [pace.now() for pace in paces]
    clocks.core_s, clocks.wall_s = 5.5, 102.0
    for pace, before, passed in zip(paces, began, (0.5, 2.0, 2.0), strict=True):
        assert pace.reached(partial(operator.le, before + passed))
        assert not pace.reached(partial(operator.lt, before + passed))
