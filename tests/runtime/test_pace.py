"""When a worker process tells its parent what it has done."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.engine.router import Outbox
from geartrain.engine.stock import Lot, Stock
from geartrain.frames.frame import Arena
from geartrain.runtime.processes.pace import MOST_FIRINGS, SLOW_S, SOON_S, Pace


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
    stock.put(Lot(np.arange(4), np.ones(4, np.int64), 0, []))
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
