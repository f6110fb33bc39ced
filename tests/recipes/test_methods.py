"""Methods: every one trains every network of parts, and equals plain training where it should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from geartrain.data.minibatches import Minibatches, minibatch
from geartrain.data.text import FILE as TEXT
from geartrain.frames.instance import Instance
from geartrain.pipeline.credit import Backprop
from geartrain.recipes import Setting, Task, find_recipe
from geartrain.recipes.methods import METHODS, flops_of
from geartrain.runtime.simulated import Simulated
from geartrain.train.session import Session
from geartrain_baselines.baseline import shuffler
from tests.rigs.products import halved

SMALL = {
    "cifar": {"batch": 5, "width": 2, "blocks": 2, "parts": 3},
    "charlm": {"batch": 4, "length": 8, "dim": 8, "blocks": 3, "heads": 2, "parts": 3},
}


def build(recipe: str, data: Path, epochs: int = 1, **options: object) -> Task:
    found = find_recipe(recipe)
    given = SMALL[recipe] | options
    return found.build(Setting(seed=0, epochs=epochs, update_every=1, data=data, options=given))


def session_of(task: Task, max_active: int, seed: int = 0) -> Session:
    return Session(
        task.graph, rules=task.rules, runtime=Simulated(2, seed=seed), max_active=max_active,
        **task.settings(2),
    )  # fmt: skip


@halved(method=[*METHODS], recipe=[*SMALL])
def test_every_method_trains_every_part_of_every_network(
    recipe: str, method: str, small_data: Path
) -> None:
    task = build(recipe, small_data, method=method, train_size=24)
    max_active = find_recipe(recipe).in_flight(SMALL[recipe] | {"method": method})
    session = session_of(task, max_active)
    before = {name: [p.clone() for p in part.parameters] for name, part in session.parts.items()}
    fit = session.fit(task.load("train"), epochs=1, valid=task.load("valid"))
    assert all(np.isfinite(value) for value in fit.valid.values())
    for name, part in session.parts.items():
        moved = [not torch.equal(a, b) for a, b in zip(before[name], part.parameters, strict=True)]
        assert any(moved), name
    ages = {name: each.max for name, each in fit.staleness.items() if name.startswith("part")}
    if max_active == 1:
        assert set(ages.values()) == {0}
    elif METHODS[method].credit == Backprop() and method not in ("2bw", "pipemare-warm"):
        assert max(ages.values()) > 0


@pytest.mark.parametrize("recipe", SMALL)
def test_a_gear_slows_the_lower_half(recipe: str, small_data: Path) -> None:
    task = build(recipe, small_data, method="backprop", gear=3)
    session = session_of(task, 1)
    data = task.load("train")
    session.fit(data, epochs=1)
    n = len(data)
    updates = {name: part.version for name, part in session.parts.items()}
    assert updates == {"part 0": -(-n // 3), "part 1": n, "part 2": n}
    with pytest.raises(ValueError, match="gear=3: there is no lower half"):
        build(recipe, small_data, parts=1, gear=3)


@pytest.mark.parametrize("recipe", SMALL)
def test_backpropagation_is_plain_training(recipe: str, small_data: Path) -> None:
    options = {"method": "backprop", "learning_rate": 0.1}
    task, other, new = (build(recipe, small_data, **options) for _ in range(3))
    # In float64, as Adam makes a step of rounding where the gradient is zero: at biases of keys.
    for each in (task, other, new):
        each.pipeline.module.double()
    batches = in_double(task.load("train"), epoch=1)
    session_of(task, 1).fit(batches, epochs=1)
    net = other.pipeline.module.train()
    optimizer = other.rules.optimizer(list(net.parameters()))
    rate = optimizer.param_groups[0]["lr"]
    for number, at in enumerate(shuffler(0, 1).permutation(len(batches))):
        x, y = (batches[int(at)].inputs[name] for name in "xy")
        optimizer.param_groups[0]["lr"] = rate * other.rules.schedule(number)
        optimizer.zero_grad()
        F.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()
        if other.rules.clip is not None:  # each part's own norm
            for stage in other.pipeline.stages:
                torch.nn.utils.clip_grad_norm_(stage.parameters(), other.rules.clip.norm)
        optimizer.step()
    found, before = task.pipeline.module.state_dict(), new.pipeline.module.state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=name)
        assert not torch.allclose(found[name], before[name]), name


def in_double(minibatches: Minibatches, epoch: int) -> list[Instance]:
    """The minibatches of an epoch, numbers that are not whole as float64."""
    minibatches.set_epoch(epoch)
    pairs = [(each.inputs["x"], each.inputs["y"]) for each in minibatches]
    return [minibatch(x.double() if x.is_floating_point() else x, y, key=None) for x, y in pairs]


@pytest.mark.parametrize(("recipe", "metric"), [("cifar", "accuracy"), ("charlm", "accuracy")])
def test_a_network_learns_its_data_by_the_default_method(
    recipe: str, metric: str, small_data: Path
) -> None:
    large = {"width": 4} if recipe == "cifar" else {"dim": 16, "learning_rate": 1e-2}
    epochs = 12 if recipe == "cifar" else 6
    task = build(recipe, small_data, epochs=epochs, **large)
    fit = session_of(task, 3).fit(task.load("train"), epochs=epochs, valid=task.load("valid"))
    assert fit.valid[metric] > 0.4
    assert fit.valid["loss"] < fit.history[0].valid["loss"] - 0.3


def test_bits_are_the_same_whatever_a_token_is(small_data: Path) -> None:
    found = {}
    for tokens in ("characters", "pairs"):
        task = build("charlm", small_data, tokens=tokens)
        metrics = session_of(task, 1).evaluate(task.load("valid")).metrics
        text = (small_data / TEXT).read_text()
        vocabulary = json.loads(task.files["tokens.json"])
        characters = 1.0 if tokens == "characters" else None
        found[tokens] = metrics["loss"] / metrics["bits"] / np.log(2), len(vocabulary["merges"])
        if characters:
            assert found[tokens][0] == pytest.approx(1)
            assert len(vocabulary["alphabet"]) == len(set(text))
    assert found["pairs"][0] > 2
    assert found["pairs"][1] > 0


def test_tokens_are_those_of_the_run_that_is_built_again(small_data: Path, tmp_path: Path) -> None:
    files = build("charlm", small_data).files
    (tmp_path / TEXT).parent.mkdir()
    (tmp_path / TEXT).write_text("the tat\n" * 40)
    again = find_recipe("charlm").build(
        Setting(seed=0, epochs=1, update_every=1, data=tmp_path, options=SMALL["charlm"],
                files=files)
    )  # fmt: skip
    assert again.files == files
    assert again.pipeline.module[-1].linear.out_features == len(json.loads(
        files["tokens.json"])["alphabet"])  # fmt: skip


def test_an_epoch_is_as_long_as_it_is_asked_to_be(small_data: Path) -> None:
    assert len(build("cifar", small_data, train_size=11).load("train")) == 3
    assert len(build("charlm", small_data, train_size=9).load("train")) == 3


@pytest.mark.parametrize("recipe", SMALL)
def test_parts_get_equal_shares_of_the_operations(recipe: str) -> None:
    graph = find_recipe(recipe).draw()
    modules = [m for m in graph.modules() if any(True for _ in m.parameters())]
    assert len(modules) == 4
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    assert flops_of(network, torch.zeros(5, 2)) == [12, 0, 6]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": 30}, "parts=30"),
        ({"parts": 1, "method": "chunk2"}, "chunks"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    options: dict[str, object], said: str, small_data: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        build("cifar", small_data, **options)


def test_an_unknown_method_is_refused_with_the_likely_one() -> None:
    with pytest.raises(ValueError, match=r"one of stash, backprop.*did you mean 'greedy'"):
        find_recipe("cifar").parse_options(["method=gredy"])
