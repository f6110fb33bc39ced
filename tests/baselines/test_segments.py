"""Evaluations within epochs: at the points of a session, and no part of the training."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.data.points import evaluation_points
from geartrain.recipes import find_recipe
from geartrain_baselines import PEERS, Terms
from geartrain_baselines.baseline import cut


@pytest.mark.parametrize("every", [None, 0.25, 0.4, 0.01, 1])
@pytest.mark.parametrize("sizes", [[15] * 6 + [10], [100], [1] * 100, [60, 40], [40, 20, 40]])
def test_stretches_end_with_the_first_update_at_or_past_each_point(sizes, every) -> None:
    batches = np.split(np.arange(100), np.cumsum(sizes)[:-1])
    found = list(cut(batches, 3, every))
    assert np.concatenate([b for s in found for b in s.batches]).tolist() == list(range(100))
    done = np.cumsum([len(s) for s in found])
    assert [s.epoch for s in found] == pytest.approx([2 + n / 100 for n in done])
    assert found[-1].epoch == 3
    ends = np.cumsum(sizes)
    expected = {min(e for e in ends if e >= point) for point in evaluation_points(100, every)}
    assert done.tolist() == sorted(expected)


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
