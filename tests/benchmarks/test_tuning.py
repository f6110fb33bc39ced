"""The sweep of the baselines tries what it should, keeps every trial, and picks the best way."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from geartrain.recipes import find_recipe
from geartrain.train.results import Target
from geartrain_baselines import PEERS, Epoch, Terms

FILE = Path(__file__).parents[2] / "benchmarks" / "tuning" / "main.py"


@pytest.fixture(scope="module")
def tuning() -> Iterator[ModuleType]:
    name = "benchmarks_tuning"
    spec = importlib.util.spec_from_file_location(name, FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def runs(tuning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float, int]]:
    """Systems, batches, rates and seeds that were trained, in a sweep whose outcome is a formula.

    The accuracy rises in every half epoch by 1 / batch, ten times the rate; a rate over 0.05 leads
    to NaN. A second form of the network does as the first.
    """
    seen: list[tuple[str, int, float, int]] = []

    def system(name: str):
        def train(terms: Terms, way) -> Iterator[Epoch]:
            seen.append((name, terms.batch, way.rate, terms.seed))
            for half in range(1, 2 * terms.epochs + 1):
                bad = way.rate > 0.05
                value = math.nan if bad else half * 10 * way.rate / terms.batch
                yield Epoch(
                    epoch=half / 2,
                    seconds=half * (2 if terms.batch == 1 else 1.0),
                    instances=10,
                    loss=value,
                    valid={"accuracy": value},
                    updates={},
                )

        return train

    sweep = tuning.Sweep(
        task="babi",
        systems={"first": system("first"), "second": system("second")},
        batches=(1, 2),
        ways=[tuning.Way(rate, "adam") for rate in (0.01, 0.04, 0.1)],
        epochs=(1, 2),
        target=Target.parse("accuracy>=0.5"),
    )
    monkeypatch.setattr(tuning, "SWEEPS", {"babi": lambda: [sweep]})
    return seen


def test_followers_take_the_best_way_of_the_leader(tuning, runs, tmp_path: Path, capsys) -> None:
    out = tmp_path / "deep" / "babi.jsonl"
    tuning.tune("babi", {}, seeds=1, data=None, out=out)
    leader = [run for run in runs if run[0] == "first"]
    assert {(batch, rate) for _, batch, rate, _ in leader} == {
        (batch, rate) for batch in (1, 2) for rate in (0.01, 0.04, 0.1)
    }
    # Four tenths at a batch of 1, two at 2, each half epoch: 1 and 1.5 epochs to one half.
    follower = [run for run in runs if run[0] == "second"]
    assert follower == [("second", 1, 0.04, 0), ("second", 2, 0.04, 0), ("second", 2, 0.04, 0)]
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len(runs)
    reached = {(d["system"], d["batch"], d["epochs_to_target"]) for d in lines
               if d["way"]["rate"] == 0.04 and d["epochs_to_target"]}  # fmt: skip
    assert reached == {(s, b, e) for s in ("first", "second") for b, e in ((1, 1), (2, 1.5))}
    assert all(d["metric"] is None for d in lines if d["way"]["rate"] == 0.1)
    best = [line for line in capsys.readouterr().out.splitlines() if line.endswith("best")]
    assert [line.split()[:2] for line in best] == [["batch", "2"]] * 2  # 3 seconds, not 4


def test_a_way_that_diverges_ends_at_once(tuning, runs) -> None:
    (sweep,) = tuning.SWEEPS["babi"]()
    trials = list(tuning.run(sweep, "first", 1, tuning.Way(0.1, "adam"), 0, None))
    assert [(t.planned, t.epochs, t.metric) for t in trials] == [(1, 0.5, None), (2, 0.5, None)]


def test_more_seeds_that_reach_the_target_count_before_fewer_epochs(tuning, runs) -> None:
    (sweep,) = tuning.SWEEPS["babi"]()
    runs_of = [
        [t for seed in (0, 1) for t in tuning.run(sweep, "first", 1, way, seed, None)]
        for way in (tuning.Way(0.04, "adam"), tuning.Way(0.02, "adam"), tuning.Way(0.01, "adam"))
    ]
    keys = [tuning.score(sweep, trials).key() for trials in runs_of]
    assert keys == sorted(keys)
    assert [key[0] for key in keys] == [0, 0, 2]


@pytest.mark.parametrize("recipe", sorted(PEERS))
def test_there_is_a_sweep_for_every_recipe_with_baselines(tuning, recipe: str) -> None:
    for sweep in tuning.SWEEPS[recipe]():
        assert sweep.task == recipe
        assert sweep.target.metric in find_recipe(recipe).metrics
        assert set(sweep.systems) <= {b.name for b in PEERS[recipe].baselines}
