"""Which runtime a run on the command line has: as given, as suits the recipe, or chosen."""

from __future__ import annotations

import pytest

import geartrain as gt
from geartrain.cli import settings
from geartrain.cli.settings import new_settings
from geartrain.recipes import RECIPES, find_recipe
from geartrain.recipes.recipe import Setting

GIVEN = {
    "runtime": None,
    "workers": None,
    "options": None,
    "replicas": None,
}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(settings, "cores", lambda: 2)


def of(recipe: str, **given: object) -> settings.RunSettings:
    return new_settings(find_recipe(recipe), GIVEN | given)


def test_pipelines_train_on_two_worker_processes_by_default():
    assert (of("shapes").runtime, of("shapes").workers) == ("processes", 2)
    assert of("shapes", workers=1).runtime == "threads"
    assert of("shapes", runtime="threads").runtime == "threads"
    assert of("shapes", mixer="weights").runtime == "threads"
    assert (of("sentiment").runtime, of("listreduce").workers) == ("threads", 1)


def test_one_core_has_one_worker(monkeypatch):
    monkeypatch.setattr(settings, "cores", lambda: 1)
    assert (of("shapes").runtime, of("shapes").workers) == ("threads", 1)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_says_how_many_workers_and_why_with_a_figure(recipe):
    number = "one worker" if recipe.workers == 1 else "two worker"
    assert recipe.why.startswith(number)
    assert any(sign.isdigit() for sign in recipe.why) or "thousand" in recipe.why


def test_auto_has_as_many_workers_as_cores_at_most_or_fewer():
    chosen = of("listreduce", runtime="auto")
    assert chosen.make_runtime() == gt.Auto(workers=2)
    assert of("listreduce", runtime="auto", workers=1).make_runtime() == gt.Auto(workers=1)


def test_what_is_to_be_chosen_is_not_said_by_the_recipe():
    recipe = find_recipe("shapes")
    options = recipe.complete({"train_size": 25, "valid_size": 25})
    task = recipe.build(Setting(seed=0, epochs=1, update_every=1, options=options))
    assert task.settings(2)["schedule"].placement
    assert not task.settings(2, chosen=True)["schedule"].placement
    copies = gt.PartCopies({"part 0": 2})
    assert task.settings(2, copies, chosen=True)["sharing"] is copies
    assert "sharing" not in task.settings(2, gt.SharedWeights(), chosen=True)
