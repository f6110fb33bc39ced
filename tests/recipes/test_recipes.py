"""Recipes: options are checked, graphs are sound, and short training learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from geartrain.data.listreduce import generate
from geartrain.engine.schedule import Schedule
from geartrain.errors import DataError
from geartrain.recipes import RECIPES, Recipe, Setting, find_recipe
from geartrain.recipes.listreduce import WARM_UP, instances_of
from geartrain.recipes.schedules import up_and_down
from geartrain.runtime.simulated import Simulated
from geartrain.train.results import Target
from geartrain.train.session import Session

TREES = "(3 (2 It) (4 (2 's) (3 good)))\n(1 (2 so) (0 bad))\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "sst").mkdir()
    for name in ("train", "dev", "test"):
        (tmp_path / "sst" / f"{name}.txt").write_text(TREES)
    return tmp_path


def setting(recipe: Recipe, data: Path | None = None, **options: float) -> Setting:
    update = recipe.update_size(options)
    return Setting(seed=3, epochs=2, update_every=update, data=data, options=options)


def test_each_form_of_a_recipe_has_its_own_updates() -> None:
    """At those of whole trees, vertex by vertex misses the target that it reaches at its own."""
    sentiment, lists = find_recipe("sentiment"), find_recipe("listreduce")
    assert [sentiment.update_size({"whole": whole}) for whole in (1, 0)] == [750, 300]
    assert sentiment.update_size({}) == 750
    assert {lists.update_size({"whole": whole}) for whole in (1, 0)} == {100}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_says_what_it_is_and_draws_a_graph_without_data(recipe: Recipe) -> None:
    assert recipe.summary
    assert recipe.paper
    assert Target.parse(recipe.target).metric in recipe.metrics
    assert find_recipe(recipe.name) is recipe
    assert "flowchart" in recipe.draw().mermaid()


def test_an_unknown_recipe_is_refused_with_the_likely_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'sentiment'"):
        find_recipe("sentimnt")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden", "NAME=VALUE"),
        ("hiden=3", "did you mean 'hidden'"),
        ("hidden=0", "1 or more"),
        ("hidden=2.5", "whole number"),
        ("learning_rate=nan", "a number, 0 or more"),
        ("learning_rate=inf", "a number, 0 or more"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_can(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_recipe("listreduce").parse_options([text])


def test_options_become_numbers_of_their_kind() -> None:
    values = find_recipe("listreduce").parse_options(["hidden=16", "learning_rate=1e-2"])
    assert values == {"hidden": 16, "learning_rate": 0.01}


def test_a_list_enters_at_its_operation_and_brings_its_tokens_alone() -> None:
    lists = generate(50, 0)
    for i, instance in enumerate(instances_of(lists, hidden=4)):
        length = lists.length[i]
        assert np.array_equal(instance.vertex["token"], lists.tokens[i, :length])
        assert instance.value["label"] == lists.label[i]
        rows, at = instance.inputs["start"]
        assert rows.shape == (1, 4)
        assert not rows.any()
        assert at.tolist() == [0]


def test_the_rate_rises_for_a_tenth_and_falls_to_nothing() -> None:
    factor = up_and_down(1000, WARM_UP)
    values = [factor(n) for n in range(1000)]
    top = int(np.argmax(values))
    assert 95 < top < 105
    assert values[top] == pytest.approx(1, abs=0.02)
    assert np.all(np.diff(values[:top]) > 0)
    assert np.all(np.diff(values[top:]) < 0)
    assert 0 < values[0] < 0.02
    assert 0 < values[-1] < 0.002
    assert factor(5000) == values[-1]


def test_the_splits_of_generated_lists_differ() -> None:
    recipe = find_recipe("listreduce")
    task = recipe.build(setting(recipe, train_size=200, valid_size=200, hidden=4))
    labels = {
        split: [int(i.value["label"]) for i in task.load(split)]
        for split in ("train", "valid", "dev", "test")
    }
    assert labels["valid"] == labels["dev"]
    assert len({tuple(v) for v in labels.values()}) == 3


def test_lists_are_the_same_whole_and_in_a_loop() -> None:
    recipe = find_recipe("listreduce")
    whole, loop = (
        recipe.build(setting(recipe, train_size=50, valid_size=9, hidden=4, whole=w)).load("train")
        for w in (1, 0)
    )
    for one, other in zip(whole, loop, strict=True):
        assert one.inputs["tokens"].tolist() == other.vertex["token"].tolist()
        assert (one.value["label"], one.key) == (other.value["label"], other.key)


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    recipe = find_recipe("listreduce")

    def weights(seed: int) -> torch.Tensor:
        task = recipe.build(Setting(seed=seed, epochs=1, update_every=1, options={"hidden": 8}))
        return torch.cat(
            [p.detach().flatten() for m in task.graph.modules() for p in m.parameters()]
        )

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("whole", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_list_reduction_learns(whole: int) -> None:
    recipe = find_recipe("listreduce")
    sizes = {"train_size": 400, "valid_size": 200, "hidden": 32, "whole": whole}
    task = recipe.build(Setting(seed=0, epochs=4, update_every=10, options=sizes))
    session = Session(
        task.graph, rules=task.rules, runtime=Simulated(2), schedule=Schedule(ramp=task.ramp)
    )
    valid = task.load("valid")
    before = session.evaluate(valid).metrics
    session.fit(task.load("train"), epochs=4)
    after = session.evaluate(valid).metrics
    assert after["loss"] < before["loss"] - 0.1
    assert after["accuracy"] > before["accuracy"] + 0.05


@pytest.mark.parametrize("whole", [0, 1])
def test_sentiment_learns_its_trees_by_heart(data: Path, whole: int) -> None:
    recipe, options = find_recipe("sentiment"), {"hidden": 8, "whole": whole}
    task = recipe.build(Setting(seed=0, epochs=30, update_every=8, data=data, options=options))
    session = Session(
        task.graph, rules=task.rules, runtime=Simulated(2), schedule=Schedule(ramp=task.ramp)
    )
    fit = session.fit(task.load("train"), epochs=30, valid=task.load("dev"))
    assert fit.valid["all"] > 0.8
    assert set(fit.valid) == {"loss", "all", "root"}


def test_words_that_training_never_saw_get_id_0_when_the_task_is_built_again(data: Path) -> None:
    recipe = find_recipe("sentiment")
    files = recipe.build(setting(recipe, data, hidden=4)).files
    (data / "sst" / "train.txt").unlink()  # not needed any more
    (data / "sst" / "test.txt").write_text("(3 (2 good) (4 unheard-of))\n")
    again = recipe.build(
        Setting(seed=3, epochs=2, update_every=1, data=data, options={"hidden": 4}, files=files)
    )
    (instance,) = again.load("test")
    words = instance.inputs["word"]
    assert words[0] > 0
    assert words[1:].tolist() == [0, -1]  # no word at the root


def test_missing_trees_are_refused_with_what_to_put_where(tmp_path: Path) -> None:
    recipe = find_recipe("sentiment")
    with pytest.raises(DataError, match=r"sst/train\.txt is missing.*Treebank"):
        recipe.build(setting(recipe, tmp_path))


def test_an_unknown_split_is_refused() -> None:
    recipe = find_recipe("listreduce")
    with pytest.raises(ValueError, match="there is train, valid, test"):
        recipe.build(setting(recipe, hidden=4)).load("holdout")


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.bottleneck], ids=lambda r: r.name)
def test_the_bottleneck_is_a_part_and_may_have_copies(recipe) -> None:
    asked = Setting(seed=0, epochs=1, update_every=1, replicas=2, options={"average_every": 10})
    sharing = asked.copies_of(recipe.bottleneck)
    assert sharing.mixer.every == 10
    assert f"{recipe.bottleneck}#1" in Session(recipe.draw(), sharing=sharing).parts
    assert replace(asked, replicas=1).copies_of(recipe.bottleneck) is None
    assert [n for n in Session(recipe.draw()).parts if "#" in n] == []


def test_copies_of_what_is_no_bottleneck_are_refused() -> None:
    setting = Setting(seed=0, epochs=1, update_every=1, replicas=2)
    with pytest.raises(ValueError, match="recipe 'mnist' has no bottleneck to copy"):
        find_recipe("mnist").build(setting)
