"""The examples run as they are, with small sizes, and learn what they claim to learn."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sentiment_learns_generated_trees(capsys: pytest.CaptureFixture[str]) -> None:
    fit = load("sentiment").main(["--trees", "150", "--hidden", "32", "--epochs", "2"])
    first, last = fit.history
    assert last.loss < first.loss
    assert last.valid["all"] > 0.5  # five classes
    assert capsys.readouterr().out.count("trees/s") == 2


def test_sentiment_runs_on_two_workers() -> None:
    fit = load("sentiment").main(
        ["--trees", "60", "--hidden", "16", "--epochs", "1", "--workers", "2"]
    )
    assert fit.instances == 48
    assert math.isfinite(fit.valid["loss"])


def test_sentiment_reads_the_treebank(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sst").mkdir()
    for split in ("train", "dev", "test"):
        source = data_dir / "sst" / f"{split}.txt"
        if source.exists():
            lines = source.read_text("utf-8").split("\n")[:40]
            (tmp_path / "sst" / source.name).write_text("\n".join(lines) + "\n", "utf-8")
    fit = load("sentiment").main(["--data", str(tmp_path), "--hidden", "16", "--epochs", "1"])
    assert fit.instances == 40
    assert "at all vertices" in capsys.readouterr().out


def test_early_exit_lets_every_point_leave_once(capsys: pytest.CaptureFixture[str]) -> None:
    result = load("early_exit").main(["--points", "300", "--epochs", "1", "--threshold", "0.6"])
    assert result.instances == 500
    left = [
        int(line.split(": ")[1].split()[0])
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("left")
    ]
    assert len(left) == 5
    assert sum(left) == 500


def test_a_threshold_that_all_reach_makes_every_point_leave_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load("early_exit").main(["--points", "50", "--epochs", "1", "--threshold", "0.5"])
    assert "left after round 1: 500 points" in capsys.readouterr().out


def test_one_s_own_module_trains_is_saved_and_runs_without_geartrain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    accuracy = load("own_module").main(["--sets", "600", "--epochs", "6"])
    assert accuracy > 0.65  # two classes
    assert "agree" in capsys.readouterr().out


def test_graphs_learn_the_energy_of_their_bonds() -> None:
    fit = load("graphs").main(["--graphs", "200", "--epochs", "3"])
    first, *_, last = (epoch.valid["loss"] for epoch in fit.history)
    assert last < 0.8 * first
