"""Plain training of static networks: the recipes with one minibatch in flight, by another way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from geartrain.recipes import Setting, find_recipe
from geartrain.runtime.simulated import Simulated
from geartrain.train.session import Session
from geartrain_baselines import PEERS, Terms

SMALL = {
    "cifar": {"batch": 5, "width": 4, "blocks": 1},
    "charlm": {"batch": 4, "length": 8, "dim": 8, "blocks": 1, "heads": 2},
}


def options_of(recipe: str, **changes: object) -> Mapping[str, object]:
    given = SMALL[recipe] | {"parts": 1, "method": "backprop"} | changes
    return find_recipe(recipe).complete(given)


@pytest.mark.parametrize("recipe", SMALL)
def test_the_baseline_is_the_recipe_with_one_minibatch_in_flight(
    recipe: str, small_data: Path
) -> None:
    options = options_of(recipe)
    (baseline,) = PEERS[recipe].baselines
    terms = Terms(seed=3, epochs=2, batch=options["batch"], data=small_data, options=options)
    plain = list(baseline.train(terms))
    task = find_recipe(recipe).build(
        Setting(seed=3, epochs=2, update_every=1, data=small_data, options=options)
    )
    session = Session(
        task.graph, rules=task.rules, runtime=Simulated(1), max_active=1, seed=3,
        **task.settings(1),
    )  # fmt: skip
    fit = session.fit(task.load("train"), epochs=2, valid=task.load("valid"))
    for ours, other in zip(fit.history, plain, strict=True):
        assert ours.instances == other.instances
        for name, value in other.valid.items():
            assert ours.valid[name] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("recipe", SMALL)
def test_larger_minibatches_count_as_many_of_the_recipe(recipe: str, small_data: Path) -> None:
    options = options_of(recipe, train_size=20)
    (baseline,) = PEERS[recipe].baselines
    terms = Terms(
        seed=0, epochs=1, batch=2 * int(options["batch"]), data=small_data, options=options,
        evaluate_every=0.5,
    )  # fmt: skip
    found = list(baseline.train(terms))
    assert sum(epoch.instances for epoch in found) in (4, 6)
    assert found[-1].epoch == 1
    assert len(found) == 2
