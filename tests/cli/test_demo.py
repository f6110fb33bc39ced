"""The demo: both sides are trained, in turns and alike, and what was measured is said."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from geartrain.cli.demo import verdict

TINY = (
    *("--option", "width=2", "--option", "blocks=4", "--option", "batch=4"),
    *("--option", "train_size=40", "--option", "valid_size=8", "--epochs", "2"),
)


def test_both_are_trained_alike_and_what_was_measured_is_on_the_screen(
    geartrain, tmp_path: Path
) -> None:
    done = geartrain("demo", *TINY, "--out", tmp_path / "both")
    assert done.status == 0
    words = " ".join(done.out.split())
    assert "kernels in C (compiled once, some 20 s): " in words
    assert "40 drawn images, minibatches of 4, 2 epochs; a residual network in 2 parts" in words
    # They take turns, and the second round is begun by who came second in the first.
    told = re.findall(r"epoch (\d)/2 (one worker|two worker processes) +loss", words)
    assert told == [
        *(("1", "one worker"), ("1", "two worker processes")),
        *(("2", "two worker processes"), ("2", "one worker")),
    ]
    folders = {name: tmp_path / "both" / name for name in ("one-worker", "two-processes")}
    results = {name: json.loads((f / "result.json").read_text()) for name, f in folders.items()}
    one, two = results.values()
    assert one["runtime"] == "threads" and two["runtime"] == "processes"
    assert (one["workers"], two["workers"]) == (1, 2)
    assert (one["max_active"], two["max_active"]) == (1, 2)
    assert one["updates"] == two["updates"] == {f"part {k}": 20 for k in range(2)}
    assert {age["max"] for age in one["staleness"].values()} == {0}
    assert two["staleness"]["part 0"]["max"] >= 1
    spent = [sum(epochs_of(folder)) for folder in folders.values()]
    assert re.search(r"updates of each part 20 20 ", words)
    assert "staleness by part, mean (max) 0.0 (0) " in words
    busy = ", ".join(f"{100 * each:.0f}%" for each in two["busy"])
    assert f"busy {100 * one['busy'][0]:.0f}% {busy} " in words
    rates = " ".join(f"{80 / seconds:,.0f} images/s" for seconds in spent)
    assert f"throughput {rates} " in words
    assert verdict([math.nan, spent[0] / spent[1]], 2).split(":")[0].strip() in words
    for folder in folders.values():
        assert str(folder / "report.html") in done.out.replace("\n", "")
        page = (folder / "report.html").read_text(encoding="utf-8")
        assert "Who worked, who waited" in page and '<svg class="graph"' in page
    assert "Between workers" in page and "program" in page


def epochs_of(folder: Path) -> list[float]:
    """Seconds of training by epoch."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [e["seconds"] for e in map(json.loads, lines) if e["event"] == "EpochEnded"]


def test_as_json_it_has_both_and_the_ratio_of_their_times(geartrain, tmp_path: Path) -> None:
    done = geartrain("demo", *TINY, "--seed", 3, "--out", tmp_path / "both", "--json")
    told = done.json
    assert told["one"]["seed"] == told["two"]["seed"] == 3
    seconds = [epochs_of(tmp_path / "both" / n) for n in ("one-worker", "two-processes")]
    assert told["ratio"] == pytest.approx(sum(seconds[0]) / sum(seconds[1]))
    assert told["ratios"] == pytest.approx([a / b for a, b in zip(*seconds, strict=True)])
    for side in (told["one"], told["two"]):
        assert len(side["losses"]) == 2 and all(math.isfinite(loss) for loss in side["losses"])
        assert len(side["busy"]) == side["workers"] and all(0 < b <= 1 for b in side["busy"])
    assert len(told["reports"]) == 2 and all(Path(each).is_file() for each in told["reports"])
    # The folders are runs like others.
    found = geartrain("evaluate", tmp_path / "both" / "two-processes", "--split", "test", "--json")
    assert found.json["recipe"] == "shapes" and found.json["instances"] == 2


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.7, 1.9, 1.8], "trained 1.80 times as fast as one worker here: 1.70 to 1.90 over 2"),
        ([1.0, 1.04, 1.02], "trained no faster (1.02 times) than one worker here"),
        ([0.7, 0.9, 0.8], "were slower (0.80 times as fast) than one worker here: 0.70 to 0.90"),
    ],
)
def test_the_verdict_is_what_was_measured_also_where_two_are_slower(ratios, said) -> None:
    assert said in verdict(ratios, 2)


def test_runs_that_are_there_are_not_written_over(geartrain, tmp_path: Path) -> None:
    both = tmp_path / "both"
    assert geartrain("demo", *TINY, "--epochs", 1, "--out", both).status == 0
    before = {path: path.stat().st_mtime_ns for path in both.rglob("*")}
    refused = geartrain("demo", *TINY, "--out", both)
    assert refused.status == 2 and "holds a finished run" in refused.err
    assert {path: path.stat().st_mtime_ns for path in both.rglob("*")} == before


@pytest.mark.slow
def test_without_a_name_runs_have_a_folder_of_their_own(geartrain, tmp_path: Path) -> None:
    told = [geartrain("demo", *TINY, "--epochs", 1, "--json").json for _ in range(2)]
    folders = {Path(report).parents[1] for each in told for report in each["reports"]}
    assert len(folders) == 2 and all(folder.parent == Path("runs") for folder in folders)


def test_wrong_use_is_told_before_anything_is_trained(geartrain, tmp_path: Path) -> None:
    refused = geartrain("demo", "--option", "widht=2", "--out", tmp_path / "both")
    assert refused.status == 2 and "did you mean 'width'" in refused.err
    assert not (tmp_path / "both").exists()
