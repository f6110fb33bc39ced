"""A baseline's clock stands while it is validated, and laps add up to epochs."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.baselines import PEERS, Epoch, Terms
from geartrain.baselines import lap as lap_module
from geartrain.baselines.lap import Lap
from geartrain.recipes import find_recipe


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lap_module, "time", clock)
    return clock


def laps(clock: Clock, length: int, batch: int, epochs: int, lap: Lap) -> list[Epoch]:
    found = []
    for _ in range(epochs):
        for first in range(0, length, batch):
            n = min(batch, length - first)
            clock.now += 1.0
            lap.add(2.0 * n, n)
            if lap.ends():
                clock.now += 100.0  # validation
                found.append(lap.entry({"accuracy": 0.5}))
                clock.now += 100.0  # whoever takes it
                lap.resume()
    return found


def test_laps_end_with_the_minibatch_at_or_past_each_point(clock: Clock) -> None:
    found = laps(clock, 100, 15, 2, Lap(100, 0.25))
    assert [e.epoch for e in found] == pytest.approx([0.3, 0.6, 0.75, 1, 1.3, 1.6, 1.75, 2])
    assert [e.instances for e in found] == pytest.approx([30, 30, 15, 25] * 2)
    assert [e.seconds for e in found] == [2, 4, 5, 7, 9, 11, 12, 14]
    assert {e.loss for e in found} == {2.0}


def test_a_minibatch_past_two_points_ends_one_lap(clock: Clock) -> None:
    found = laps(clock, 100, 60, 1, Lap(100, 0.25))
    assert [e.epoch for e in found] == [0.6, 1]


def test_instances_are_counted_as_the_recipe_does(clock: Clock) -> None:
    found = laps(clock, 100, 10, 1, Lap(100, 0.5, instances=5))
    assert [e.instances for e in found] == [2.5, 2.5]


def test_a_loss_may_be_a_mean_over_something_else(clock: Clock) -> None:
    lap = Lap(4)
    lap.add(6.0, 2, 3)
    lap.add(1.0, 2, 4)
    assert lap.ends()
    assert lap.entry({}).loss == 1.0


def terms(recipe: str, every: float | None, **options: int) -> Terms:
    defaults = {o.name: o.default for o in find_recipe(recipe).options}
    return Terms(
        seed=3, epochs=1, batch=10, data=None, options=defaults | options, evaluate_every=every
    )


@pytest.mark.parametrize("baseline", PEERS["listreduce"].baselines, ids=lambda b: b.name)
def test_more_evaluations_change_nothing_about_the_training(baseline) -> None:
    options = {"hidden": 4, "train_size": 80, "valid_size": 20}
    (whole,) = baseline.train(terms("listreduce", None, **options))
    parts = list(baseline.train(terms("listreduce", 0.25, **options)))
    assert len(parts) == 4
    assert parts[-1].epoch == whole.epoch == 1
    assert parts[-1].valid == whole.valid
    assert np.average([e.loss for e in parts], weights=[e.instances for e in parts]) == (
        pytest.approx(whole.loss)
    )
