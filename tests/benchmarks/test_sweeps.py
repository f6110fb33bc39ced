"""Sweeps: which trials are run, what is kept of them, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweeps import main as sweeps
from benchmarks.sweeps import trials
from benchmarks.sweeps.main import axes_of, main, read
from benchmarks.sweeps.trials import Point, Terms, asked, command_of, outcome_of, try_once
from geartrain.recipes import RECIPES, find_recipe
from tests.rigs.programs import Nursery, Program

TERMS = Terms(
    task="listreduce", workers=2, epochs=2, target="accuracy>=0.6", stops=True,
    evaluate_every=0.5, options=("hidden=8", "train_size=300", "valid_size=60"),
)  # fmt: skip
POINT = Point(16, 100, 1)


class Stub:
    """Stands in for the training; more in flight is faster and needs more epochs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Point, int]] = []

    def __call__(
        self, point: Point, terms: Terms, seed: int, data: Path | None, cap_s: float
    ) -> dict[str, Any]:
        self.calls.append((point, seed))
        line = asked(point, terms, seed)
        if point.max_active == 1:
            return {**line, "outcome": "capped", "cap_s": cap_s}
        if point.update_every == 400:
            return {**line, "outcome": "failed", "reason": "geartrain: NaN in 'cell'"}
        speed = 100.0 * point.max_active * point.replicas
        at = 0.5 if point.max_active < 64 else 1
        ends = [e for e in (0.5, 1) if e <= at]
        values = [0.2 if e < at else 0.7 + seed / 100 for e in ends]
        history = [
            {"epoch": e, "seconds": 100 * e / speed, "valid": {"accuracy": v, "loss": 1 - v}}
            for e, v in zip(ends, values, strict=True)
        ]
        ages = {"cell": {"mean": point.max_active / 10, "max": point.max_active}}
        return {
            **line, "outcome": "done", "history": history, "instances": 100 * at,
            "staleness": ages, "peak_rss_mib": 300.0, "updates": {"cell": 30 * at, "out": 31 * at},
        }  # fmt: skip


def sweep(out: Path, *words: str) -> Stub:
    stub = Stub()
    given = ["listreduce", "--until", TERMS.target, "--out", str(out), "--cap", "60"]
    main([*given, "--no-figure", *words], stub)
    return stub


def test_every_setting_is_tried_once_for_every_seed(tmp_path: Path, capsys) -> None:
    calls = sweep(tmp_path, "--seeds", "2").calls
    assert len(calls) == len(set(calls))
    points = {point for point, _ in calls}
    assert {p.max_active for p in points} == {1, 4, 16, 64, 256}
    assert {p.update_every for p in points} == {25, 50, 100, 200, 400}
    assert {p.replicas for p in points} == {1, 2}
    assert len(points) == 5 + 4 + 1
    assert len(calls) == 2 * len(points)
    table = capsys.readouterr().out
    assert (tmp_path / "listreduce.md").read_text() == table
    for axis in ("max_active, with update_every=100, replicas=1:", "replicas, with max_active=256"):
        assert axis in table
    (row,) = [line for line in table.splitlines() if line.startswith("| 16 |")]
    assert "| 1,600 | 30 to 31 |" in row  # instances/s, updates an epoch
    assert "| 0.50 |" in row  # epochs to the target
    assert "| 2/2 |" in row
    assert "70.5% (70.0%..71.0%)" in row
    assert "cell 1.60, max 16" in row
    assert "| 300 |" in row
    assert "- max_active=1, update_every=100, replicas=1, seed=0: stopped at 1 min 00 s" in table
    assert "seed=1: failed, geartrain: NaN in 'cell'" in table


def test_what_has_a_line_is_not_run_again_unless_it_is_asked_for(tmp_path: Path, capsys) -> None:
    first = sweep(tmp_path, "--axes", "max_active").calls
    assert sweep(tmp_path, "--axes", "max_active").calls == []
    assert {seed for _, seed in sweep(tmp_path, "--axes", "max_active", "--seeds", "2").calls} == {
        1
    }
    assert sweep(tmp_path, "--axes", "max_active", "--again").calls == first
    assert len(read(tmp_path / "listreduce.jsonl")) == 3 * len(first)
    capsys.readouterr()
    other = sweep(tmp_path, "--axes", "max_active", "--option", "hidden=8").calls
    assert other == first  # other terms are other trials
    table = capsys.readouterr().out
    assert "1/1" in table
    assert "2/2" not in table


def test_tables_are_printed_again_without_running(tmp_path: Path, capsys) -> None:
    sweep(tmp_path, "--seeds", "2")
    table = capsys.readouterr().out
    assert sweep(tmp_path, "--table").calls == []
    assert capsys.readouterr().out == table


def test_nothing_to_print_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no trial of this sweep"):
        sweep(tmp_path, "--table")


@pytest.mark.parametrize("words", [["--cap", "0"], ["--cap", "1e9"], ["--axes", "workers"]])
def test_what_cannot_be_swept_is_refused(tmp_path: Path, words: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        sweep(tmp_path, *words)
    assert not (tmp_path / "listreduce.jsonl").exists()


def test_the_figure_is_drawn_also_where_the_target_was_missed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for until, seeds in (("accuracy>=0.6", "2"), ("accuracy>=0.9", "1")):
        main(["listreduce", "--out", str(tmp_path), "--until", until, "--seeds", seeds], Stub())
        assert (tmp_path / "listreduce.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "listreduce.png").unlink()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_recipe_has_axes_with_its_own_values_among_them(recipe) -> None:
    axes = axes_of(recipe, ("max_active", "update_every", "replicas"))
    base = Point(recipe.in_flight({}), recipe.update_size({}), 1)
    assert all(base in points for points in axes.values())
    assert ("replicas" in axes) == (recipe.bottleneck is not None)
    assert {p.max_active for p in axes["max_active"]} >= set(sweeps.MAX_ACTIVE)


def test_a_recipe_that_no_table_knows_is_swept_around_its_own_update_size() -> None:
    recipe = replace(find_recipe("listreduce"), name="new", update_every=5)
    points = axes_of(recipe, ("update_every",))["update_every"]
    assert [point.update_every for point in points] == [2, 5, 10]
    (one, two) = axes_of(replace(recipe, update_every=1), ("update_every",))["update_every"]
    assert (one.update_every, two.update_every) == (1, 2)


def test_lines_are_small_and_instances_are_spread_over_the_evaluations() -> None:
    line = Stub()(Point(256, 100, 1), TERMS, 0, None, 1.0)
    assert len(json.dumps(line)) < 800
    outcome = outcome_of(line, "256")
    assert outcome is not None
    assert [e.instances for e in outcome.epochs] == [50, 50]
    assert outcome.instances_per_second == pytest.approx(25600)
    assert outcome_of(Stub()(Point(1, 100, 1), TERMS, 0, None, 1.0), "1") is None


def test_the_command_trains_what_is_asked_for() -> None:
    words = command_of(Point(4, 50, 2), TERMS, 3, Path("here"))
    assert words[:2] == ["train", "listreduce"]
    said = dict(zip(words[3::2], words[4::2], strict=False))
    assert said["--max-active"] == "4"
    assert (said["--update-every"], said["--replicas"], said["--seed"]) == ("50", "2", "3")
    assert (said["--until"], said["--evaluate-every"]) == ("accuracy>=0.6", "0.5")
    assert words.count("--option") == 3


MODULE = """
import runpy, sys
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_trial_is_a_process_whose_json_is_kept(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(command: Sequence[str], cap_s: float) -> tuple[int | None, str, str]:
        assert (command[1], cap_s) == ("-m", 60.0)
        program = Program(nursery, tmp_path / "trial", MODULE, *command[2:])
        try:
            status, errors = program.end()
        finally:
            program.close()
        return status, "\n".join(program.lines), errors

    monkeypatch.setattr(trials, "_run", forked)  # it does not import torch once more
    line = try_once(POINT, TERMS, 1, None, 60.0)  # two epochs of 300 lists reach nothing
    assert (line["outcome"], line["seed"], line["max_active"]) == ("done", 1, 16)
    assert [e["epoch"] for e in line["history"]] == [0.5, 1, 1.5, 2]
    assert line["instances"] == 600
    assert set(line["staleness"]) == {"cell"}
    assert line["peak_rss_mib"] > 50
    assert find_recipe("listreduce").metrics[0] in line["history"][0]["valid"]


STOPPED = """
import json, pathlib, sys, time
if "--seed" not in sys.argv: sys.exit("no seed")
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir()
ages = {"cell": {"mean": 0.5, "max": 1, "histogram": [5, 5]}}
line = {"event": "EpochEnded", "epoch": 0.5, "epochs": 2, "instances": 150, "seconds": 1.0,
    "loss": None, "metrics": {}, "valid": {"accuracy": 0.25}, "staleness": ages,
    "updates": {"cell": 3}, "time_s": 1.0}
for each in [{"event": "RunStarted"}] + [line] * %d:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(each) + "\\n")
try:
    time.sleep(60)
except KeyboardInterrupt:
    pass
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a program that ``python -m geartrain`` runs in a trial."""

    def make(text: str) -> None:
        (tmp_path / "geartrain").mkdir()
        (tmp_path / "geartrain" / "__init__.py").touch()
        (tmp_path / "geartrain" / "__main__.py").write_text(text)
        monkeypatch.setattr(trials, "SOURCE", tmp_path)

    return make


@pytest.mark.parametrize("evaluations", [0, 1])
def test_a_trial_at_its_cap_keeps_what_its_log_says(
    program: Callable[[str], None], evaluations: int
) -> None:
    program(STOPPED % evaluations)
    line = try_once(POINT, TERMS, 0, None, 1.5)
    assert (line["outcome"], line["cap_s"]) == ("capped", 1.5)
    assert ("history" in line) == bool(evaluations)
    if evaluations:
        assert line["history"] == [{"epoch": 0.5, "seconds": 1.0, "valid": {"accuracy": 0.25}}]
        assert line["instances"] == 150 and line["updates"] == {"cell": 3}
        assert line["staleness"] == {"cell": {"mean": 0.5, "max": 1}}


def test_a_trial_that_fails_keeps_the_last_thing_it_said(
    program: Callable[[str], None],
) -> None:
    program("import sys\nsys.exit('starting\\ngeartrain: no memory left')\n")
    line = try_once(POINT, TERMS, 0, None, 30.0)
    assert (line["outcome"], line["reason"]) == ("failed", "geartrain: no memory left")
