"""``geartrain compare``: the rows, the figure, what is refused, and the exit status."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from geartrain.cli.main import app
from geartrain.cli.settings import RunSettings, new_settings
from geartrain.cli.train import peak_rss_mib
from geartrain.recipes import RECIPES, find_recipe
from geartrain_baselines import PEERS
from geartrain_baselines.systems import systems_of
from geartrain_baselines.trial import Trial, run
from tests.rigs.programs import Forked, Nursery

LISTS = ("listreduce", "--option", "train_size=300", "--option", "valid_size=60")
LISTS += ("--option", "hidden=8")
ROW = {
    "system", "what", "batch", "seeds", "reached", "epochs", "instances_per_second",
    "seconds_to_target", "epochs_to_target", "valid", "peak_rss_mib", "spread", "staleness",
    "updates_per_epoch",
}  # fmt: skip
TIMED = {"instances_per_second", "seconds_to_target", "epochs_to_target", "peak_rss_mib", "valid"}
TIMED |= {"staleness", "updates_per_epoch"}


def settings(recipe: str = "listreduce", **given: object) -> RunSettings:
    names = "runtime", "workers", "max_active", "update_every", "epochs", "seed", "until"
    names += "checkpoint_every", "evaluate_every", "replicas", "precision", "device", "options"
    nothing = dict.fromkeys(names)
    return new_settings(find_recipe(recipe), nothing | given)


@pytest.fixture(scope="module", autouse=True)
def forked_trials(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trials do not import torch each: they are forked from a process that has."""
    begin, folder = subprocess.Popen, tmp_path_factory.mktemp("trials")

    def start(command: list[str], **options: Any) -> Any:
        if command[1:3] != ["-m", "geartrain_baselines.trial"]:
            return begin(command, **options)
        trial = folder / str(sum(1 for _ in folder.iterdir()))
        return Forked(nursery, trial, command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", start)
        yield


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, Path]:
    """Status, output, errors and folder of a comparison whose target nobody reaches."""
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("compare")
    words = ["compare", *LISTS, "--seeds", "1", "--epochs", "2", "--until", "accuracy>=0.999"]
    words += ["--against", "mixed:50,ours-sync", "--workers", "1", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.stdout, result.stderr, out


def test_a_row_for_each_system_in_the_order_that_was_asked_for(missed) -> None:
    _, text, _, _ = missed
    assert len(text.strip().splitlines()) == 1
    result = json.loads(text)
    assert (result["recipe"], result["target"]) == ("listreduce", "accuracy>=0.999")
    rows = result["rows"]
    assert [row["system"] for row in rows] == ["ours", "mixed:50", "ours-sync"]
    assert [row["batch"] for row in rows] == [None, 50, 100]
    for row in rows:
        assert set(row) == ROW
        assert set(row["spread"]) == TIMED
        assert (row["epochs"], row["seeds"]) == (2, 1)
        assert row["instances_per_second"] > 0
        assert row["peak_rss_mib"] > 50
        assert 0 <= row["valid"]["accuracy"] < 0.999
        assert row["spread"]["valid"]["accuracy"] == [row["valid"]["accuracy"]] * 2
    assert set(rows[0]["staleness"]) == {"cell"}
    assert rows[1]["staleness"] == {}
    # 300 lists: ours and the synchronous one in updates of 100, the baseline in batches of 50.
    assert [row["updates_per_epoch"] for row in rows] == [{"cell": 3}, {"mixed": 6}, {"cell": 3}]


def test_drained_after_every_minibatch_no_gradient_is_stale(missed) -> None:
    _, text, _, _ = missed
    for part in json.loads(text)["rows"][2]["staleness"].values():
        assert part == {"mean": 0, "max": 0}


def test_drained_minibatches_stay_whole_where_parts_are_measured_to_be_placed(capsys) -> None:
    options = {"hidden": 4, "train_size": 700, "valid_size": 20}
    chosen = settings(epochs=1, workers=2, options=options)
    run(Trial(system="ours-sync", batch=100, threads=2, settings=chosen, data=None))
    *_, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert all(part == {"mean": 0, "max": 0} for part in end["staleness"].values())


def test_a_target_that_ours_misses_is_a_failure(missed) -> None:
    status, text, errors, _ = missed
    assert status == 1
    assert "ours reached accuracy>=0.999 from 0 of 1 seeds" in errors
    ours = json.loads(text)["rows"][0]
    assert (ours["reached"], ours["seconds_to_target"], ours["epochs_to_target"]) == (0, None, None)


def test_the_folder_gets_the_json_every_run_and_the_figure(missed) -> None:
    _, text, _, out = missed
    kept = json.loads((out / "compare.json").read_text())
    assert kept["rows"] == json.loads(text)["rows"]
    assert kept["figure"] == "compare.png"
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert [(r["system"], r["seed"], len(r["epochs"])) for r in runs] == [
        ("ours", 0, 2), ("mixed:50", 0, 2), ("ours-sync", 0, 2)
    ]  # fmt: skip
    page = (out / "compare.md").read_text()
    assert "| system | inst./s | updates an epoch |" in page
    assert all(f"\n| {system} | " in page for system in ("ours", "mixed:50", "ours-sync"))
    assert "- mixed:50: " in page
    assert "hidden=8" in page
    assert "(compare.png)" in page
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_reached_target_ends_every_system_and_the_table_shows_it(geartrain) -> None:
    done = geartrain(
        "compare", *LISTS, "--seeds", 1, "--epochs", 2, "--until", "accuracy>=0.0",
        "--against", "ours",
    )  # fmt: skip
    assert done.status == 0
    assert "1/1" in done.out
    assert "epoch 1/2" in done.err
    assert "epoch 2/2" not in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("listredus",), "did you mean 'listreduce'"),
        (("listreduce", "--against", "mixd"), "did you mean 'mixed'"),
        (("listreduce", "--against", "mixed:0"), "a batch of 1 or more"),
        (("listreduce", "--against", "ours-sync:x"), "a batch of 1 or more"),
        (("listreduce", "--against", "ours:replcas=2"), "did you mean 'replicas'"),
        (("listreduce", "--against", "ours:replicas=0"), "a value of 1 or more"),
        (("listreduce", "--against", "ours:replicas=9", "--workers", "2"), "--workers 9 or more"),
        (("mnist", "--against", "ours:replicas=2", "--workers", "2"), "has no bottleneck"),
        (("listreduce", "--evaluate-every", "1.5"), "evaluate_every=1.5"),
        (("listreduce", "--until", "loss<=1"), "the loss is not the same"),
        (("listreduce", "--until", "acuracy>=1"), "reports accuracy"),
        (("listreduce", "--option", "hiden=8"), "did you mean 'hidden'"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_trained(geartrain, words, said: str) -> None:
    done = geartrain("compare", *words)
    assert done.status == 2
    assert said in done.err


@pytest.mark.parametrize(("load", "lines"), [(0.0, 1), (1000.0, 2)])
def test_missing_data_are_wrong_use_and_a_busy_machine_is_told(
    geartrain, monkeypatch: pytest.MonkeyPatch, load: float, lines: int
) -> None:
    monkeypatch.setattr("geartrain_baselines.compare._load", lambda: load)
    done = geartrain("compare", "sentiment", "--against", "fused", "--seeds", 1)
    assert done.status == 2
    assert len(done.err.strip().splitlines()) == lines
    assert "GEARTRAIN_DATA" in done.err
    assert ("load 1000.0" in done.err) == (lines == 2)


def test_a_system_that_fails_ends_the_comparison_and_is_named(geartrain) -> None:
    options = ("--option", "learning_rate=1e30", "--epochs", 2, "--seeds", 1)
    done = geartrain("compare", *LISTS, *options, "--against", "mixed")
    assert done.status == 1
    assert "geartrain: ours, seed 0: " in done.err
    assert "Traceback" not in done.err
    assert "mixed" not in done.err


def test_an_interrupt_says_where_the_trials_that_had_ended_are(
    geartrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    ended = [
        {"epoch": 1, "seconds": 1.0, "instances": 300, "valid": {"accuracy": 0.5}},
        {"peak_rss_mib": 100.0, "staleness": {}, "updates": {"cell": 3.0}},
    ]

    def lines(plan: object, trial: Trial, called: str) -> Iterator[dict[str, object]]:
        if trial.system == "mixed":
            raise KeyboardInterrupt
        return iter(ended)

    monkeypatch.setattr("geartrain_baselines.compare._lines", lines)
    done = geartrain("compare", *LISTS, "--against", "mixed", "--out", tmp_path / "out")
    assert done.status == 130
    runs = tmp_path / "out" / "runs.jsonl"
    assert str(runs) in done.err
    assert [json.loads(line)["system"] for line in runs.read_text().splitlines()] == ["ours"]


TRIAL = """
import sys
print('{"epoch": 1, "seconds": 1.0, "instances": 300, "valid": {"accuracy": 0.5}}', flush=True)
sys.stdin.read()
"""


def test_sigterm_ends_the_trial_that_runs_and_the_status_says_so(
    geartrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, started, begin = signal.getsignal(signal.SIGTERM), [], subprocess.Popen

    def start(command: list[str], **options: object) -> subprocess.Popen[str]:
        assert "geartrain_baselines.trial" in command
        trial = begin([sys.executable, "-c", TRIAL], stdin=subprocess.PIPE, **options)
        started.append(trial)
        return trial

    def told(seconds: float) -> str:  # of the first evaluation
        os.kill(os.getpid(), signal.SIGTERM)
        return str(seconds)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("geartrain_baselines.compare.duration", told)
    done = geartrain("compare", *LISTS, "--against", "mixed")
    (trial,) = started
    assert (done.status, trial.poll()) == (143, -signal.SIGKILL)
    assert "geartrain: terminated" in done.err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_figure_without_matplotlib_is_refused_with_the_extra_to_install(
    geartrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = geartrain("compare", *LISTS, "--against", "ours", "--out", tmp_path / "out")
    assert done.status == 2
    assert "pip install 'geartrain[plot]'" in done.err
    assert not (tmp_path / "out").exists()


def test_by_default_all_baselines_that_are_not_slow_are_run_each_for_its_own_epochs() -> None:
    recipe = find_recipe("listreduce")
    systems = systems_of(recipe, settings(), None, None)
    fast = [b.name for b in PEERS["listreduce"].baselines if not b.slow]
    assert [s.key for s in systems] == ["ours", "ours-sync", *fast]
    assert {s.epochs for s in systems[2:]} == {4}
    assert {s.epochs for s in systems[:2]} == {recipe.epochs}
    assert {s.epochs for s in systems_of(recipe, settings(epochs=7), None, 7)} == {7}


def test_the_drained_graph_updates_as_often_as_ours_or_as_its_peers() -> None:
    lists = systems_of(find_recipe("listreduce"), settings(update_every=30), "ours-sync", None)
    assert lists[1].batch == 30
    trees = systems_of(find_recipe("sentiment"), settings("sentiment"), "ours-sync", None)
    assert trees[1].batch == PEERS["sentiment"].drained


@pytest.mark.parametrize("recipe", sorted(PEERS))
def test_a_baseline_is_compared_at_several_sizes_of_an_update(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for baseline in PEERS[recipe].baselines:
        against = f"{baseline.name},{baseline.name}:4,ours-sync:4,{baseline.name}:4"
        found = systems_of(find_recipe(recipe), settings(recipe), against, None)
        assert [(s.name, s.batch) for s in found[1:]] == [
            (baseline.name, baseline.batch), (baseline.name, 4), ("ours-sync", 4)
        ]  # fmt: skip
        assert len({s.key for s in found}) == 4


@pytest.mark.parametrize("recipe", ["babi", "qm9"])
def test_a_baseline_whose_package_is_missing_is_refused_by_name_and_else_left_out(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'geartrain\[peers\]'"):
        systems_of(find_recipe(recipe), settings(recipe), "pyg:4", None)
    found = systems_of(find_recipe(recipe), settings(recipe), None, None)
    assert [s.name for s in found] == ["ours", "ours-sync", "block"]
    assert "left out: system 'pyg' needs torch_geometric" in capsys.readouterr().err


def test_names_of_baselines_are_their_own() -> None:
    for recipe in RECIPES:
        if recipe.name in PEERS:
            names = [b.name for b in PEERS[recipe.name].baselines]
            assert len({*names, "ours", "ours-sync"}) == len(names) + 2


@pytest.mark.parametrize("system", [b.name for b in PEERS["sentiment"].baselines])
def test_every_tree_baseline_trains_in_a_trial(system: str, trees: Path, capsys) -> None:
    chosen = settings("sentiment", epochs=2, options={"hidden": 4})
    trial = Trial(system=system, batch=2, threads=1, settings=chosen, data=str(trees))
    run(Trial.from_json(trial.to_json()))
    *epochs, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert [e["epoch"] for e in epochs] == [1, 2]
    assert {e["instances"] for e in epochs} == {4}
    assert epochs[0]["seconds"] < epochs[1]["seconds"]
    assert set(epochs[1]["valid"]) == {"all", "root"}
    assert end["staleness"] == {} and [*end["updates"].values()] == [2]
    assert end["peak_rss_mib"] > 50


@pytest.mark.parametrize("system", [b.name for b in PEERS["listreduce"].baselines])
def test_every_list_baseline_trains_in_a_trial(system: str, capsys) -> None:
    options = {"hidden": 4, "train_size": 60, "valid_size": 20}
    chosen = settings(epochs=1, options=options)
    run(Trial(system=system, batch=10, threads=1, settings=chosen, data=None))
    epoch, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert epoch["instances"] == 60
    assert 0 <= epoch["valid"]["accuracy"] <= 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_peak_memory_is_that_of_the_program_itself() -> None:
    before = peak_rss_mib()
    block = bytearray(os.urandom(1) * (64 << 20))
    after = peak_rss_mib()
    assert before is not None
    assert after is not None
    assert after >= before
    assert after > len(block) / (1 << 20)


def test_ours_may_be_compared_with_itself_under_other_settings() -> None:
    chosen = settings(workers=2)
    text = "ours:replicas=2:max_active=16,ours"
    ours, other = systems_of(find_recipe("listreduce"), chosen, text, None)
    assert (ours.key, dict(ours.changes)) == ("ours", {})
    assert (other.key, other.name) == ("ours:replicas=2:max_active=16", "ours")
    assert dict(other.changes) == {"replicas": 2, "max_active": 16}
    assert "16 in flight" in other.what
    assert "2 copies of cell" in other.what


def test_another_form_of_ours_is_compared_at_its_own_updates_unless_told_otherwise() -> None:
    recipe = find_recipe("sentiment")
    _, other = systems_of(recipe, settings("sentiment"), "ours:whole=0", None)
    assert other.changes["update_every"] == 300
    _, other = systems_of(recipe, settings("sentiment", update_every=90), "ours:whole=0", None)
    assert "update_every" not in other.changes
    chosen = settings("sentiment", options={"whole": 0})
    assert chosen.update_every == 300


def test_ours_may_be_compared_with_itself_in_bf16() -> None:
    text = "ours:precision=bf16:max_active=16"
    _, other = systems_of(find_recipe("listreduce"), settings(), text, None)
    assert dict(other.changes) == {"precision": "bf16", "max_active": 16}
    assert "rows in bf16" in other.what
    with pytest.raises(ValueError, match="precision='fp8': expected one of full, bf16"):
        systems_of(find_recipe("listreduce"), settings(), "ours:precision=fp8", None)


def test_ours_may_be_compared_with_itself_on_another_device() -> None:
    there, against = replace(settings(), device="cuda:1"), "ours-sync,ours:device=cpu"
    _, sync, other = systems_of(find_recipe("listreduce"), there, against, None)
    assert dict(other.changes) == {"device": "cpu"}
    assert (sync.what.endswith(", on cuda:1"), "on c" in other.what) == (True, False)
    with pytest.raises(ValueError, match="or device=cuda"):
        systems_of(find_recipe("listreduce"), settings(), "ours:device=tpu", None)


def test_ours_may_be_compared_with_itself_on_worker_processes() -> None:
    recipe, against = find_recipe("listreduce"), "ours-sync,ours:runtime=processes"
    _, sync, other = systems_of(recipe, settings(runtime="threads"), against, None)
    assert dict(other.changes) == {"runtime": "processes"}
    assert ("runtime" in sync.what, other.what.endswith("by runtime processes")) == (False, True)
    with pytest.raises(ValueError, match="runtime= one of threads, processes, auto"):
        systems_of(recipe, settings(), "ours:runtime=ray", None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="worker processes need Linux")
def test_a_trial_on_worker_processes_counts_their_memory(capsys) -> None:
    options = {"hidden": 4, "train_size": 60, "valid_size": 20}
    chosen = settings(epochs=1, workers=2, runtime="processes", options=options)
    run(Trial(system="ours", batch=0, threads=2, settings=chosen, data=None))
    epoch, end = map(json.loads, capsys.readouterr().out.splitlines())
    own = peak_rss_mib()
    assert epoch["instances"] == 60
    assert own is not None and end["peak_rss_mib"] > own + 2 * 20  # no worker is smaller


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_ours_on_a_device_that_is_not_here_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"device='cuda' does not exist; torch .* sees cpu"):
        systems_of(find_recipe("listreduce"), settings(), "ours:device=cuda", None)


@pytest.mark.parametrize("system", ["ours", "ours-sync", "mixed"])
def test_every_system_is_evaluated_at_the_same_fractions(system: str, capsys) -> None:
    options = {"hidden": 4, "train_size": 80, "valid_size": 20}
    chosen = settings(epochs=2, workers=2, replicas=2, evaluate_every=0.25, options=options)
    trial = Trial(system=system, batch=10, threads=2, settings=chosen, data=None)
    run(Trial.from_json(trial.to_json()))
    *lines, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum(line["instances"] for line in lines) == 160
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert [line["epoch"] for line in lines] == [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    assert set(end["staleness"]) == (set() if system == "mixed" else {"cell"})


def test_methods_stand_for_ours_with_them() -> None:
    recipe = find_recipe("cifar")
    chosen = settings("cifar", options={"parts": 3})
    ours, plain, greedy, wide, half = systems_of(
        recipe, chosen, "backprop,greedy,ours:method=chunk2:width=4,stash:max_active=2", None
    )
    assert (ours.key, plain.key, greedy.key) == ("ours", "backprop", "greedy")
    assert [s.name for s in (plain, greedy, wide, half)] == ["ours"] * 4
    assert dict(plain.changes) == {
        "options": {**chosen.options, "method": "backprop"}, "max_active": 1
    }  # fmt: skip
    assert greedy.changes["max_active"] == 3
    assert greedy.what.startswith("greedy: 3 in flight")
    assert wide.changes["options"] == {**chosen.options, "method": "chunk2", "width": 4}
    assert half.changes["max_active"] == 2


def test_a_number_in_flight_that_was_given_is_kept_for_all_methods() -> None:
    recipe = find_recipe("cifar")
    _, plain, greedy = systems_of(recipe, settings("cifar", max_active=7), "backprop,greedy", None)
    assert "max_active" not in plain.changes
    assert plain.what.startswith("backprop: 7 in flight")
    assert greedy.what.startswith("greedy: 7 in flight")


@pytest.mark.parametrize(
    ("against", "said"),
    [
        ("gredy", "did you mean 'greedy'"),
        ("ours:method=gredy", "option method=gredy: expected one of"),
        ("ours:widht=3", "did you mean 'width'"),
        ("greedy:width=0", "a whole number, 1 or more"),
    ],
)
def test_methods_and_options_that_cannot_be_are_refused(against: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        systems_of(find_recipe("cifar"), settings("cifar"), against, None)


def test_methods_are_compared_side_by_side_with_their_staleness(geartrain, small_data) -> None:
    words = ["compare", "charlm", "--data", small_data, "--seeds", 1, "--epochs", 1, "--json"]
    for option in ("batch=4", "length=8", "dim=8", "blocks=2", "heads=2", "parts=2"):
        words += ["--option", option]
    done = geartrain(*words, "--option", "method=backprop", "--against", "greedy")
    assert done.status == 0
    ours, greedy = done.json["rows"]
    assert (ours["system"], greedy["system"]) == ("ours", "greedy")
    assert all(part["max"] == 0 for part in ours["staleness"].values())
    assert set(greedy["staleness"]) == {"part 0", "part 1", "head 0"}
    assert greedy["valid"]["bits"] > 0
