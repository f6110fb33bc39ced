"""Measured firings as costs."""

from __future__ import annotations

import pytest

from geartrain.engine.instrument import EpochEnded, Fired, RunStarted
from geartrain.observe.stopwatch import Stopwatch
from geartrain.runtime.costs import Costs


def fired(node: str, direction: str, rows: int, seconds: float) -> Fired:
    return Fired(0, node, "map", direction, rows, 1.0, 1.0 + seconds)  # type: ignore[arg-type]


def ended(seconds: float) -> EpochEnded:
    return EpochEnded(1, 1, 1, seconds, 0.0, {}, {}, {}, {}, 0.0)


def test_seconds_a_row_are_those_after_the_first_epoch_with_the_gaps_spread_over_them():
    watch = Stopwatch()
    watch.on_run_started(RunStarted("threads", 1, 1, 2))
    watch.on_fired(fired("map", "forward", 10, 100.0))
    watch.on_epoch_ended(ended(200.0))
    watch.on_fired(fired("map", "forward", 10, 1.0))
    watch.on_fired(fired("map#1", "forward", 10, 1.0))
    watch.on_fired(fired("map#1", "backward", 10, 2.0))
    watch.on_fired(fired("map#1 exchange", "forward", 4, 1.0))
    watch.on_epoch_ended(ended(10.0))
    found = watch.costs(Costs(latency_s=3.0))
    assert found.latency_s == 3.0
    assert found.nodes["map"] == pytest.approx((0.0, 2 * 2.0 / 20))
    assert found.nodes["map backward"] == pytest.approx((0.0, 2 * 2.0 / 10))
    assert found.nodes["map exchange"] == pytest.approx((0.0, 2 * 1.0 / 4))


def test_one_epoch_is_measured_where_there_is_no_other():
    watch = Stopwatch()
    watch.on_fired(fired("map", "forward", 10, 1.0))
    watch.on_epoch_ended(ended(1.0))
    assert watch.costs().nodes["map"] == pytest.approx((0.0, 0.1))


def test_nothing_measured_and_several_workers_are_refused():
    with pytest.raises(ValueError, match="fit first"):
        Stopwatch().costs()
    with pytest.raises(ValueError, match="one worker, not 2"):
        Stopwatch().on_run_started(RunStarted("threads", 2, 1, 2))
