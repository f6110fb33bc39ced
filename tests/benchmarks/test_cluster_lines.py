"""What commands of the cluster benchmarks have in common: lines as they come, a table of all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import lines, pipelines, stages
from benchmarks.cluster.hosts import Link


def command(path: Path, *words: str, fails: bool = False) -> None:
    made = lines.parser("What it is.", "none")
    lines.add_links(made, [1], [100])
    given = made.parse_args(["--out", str(path), *words])

    def measured(asked: Any) -> Iterator[lines.Line]:
        for link in lines.links(asked):
            yield {"ms": 1e3 * link.latency_s, "mbit": link.bits_per_s / 1e6, "losses": [1.0]}
        if fails:
            raise RuntimeError("the second link")

    def table(found: Sequence[lines.Line]) -> Iterator[str]:
        yield " ".join(f"{line['ms']:g}/{line['mbit']:g}" for line in found)

    lines.run(given, measured, table)


def test_lines_are_kept_as_they_come_and_the_table_is_of_all_that_there_are(tmp_path, capsys):
    path = tmp_path / "new" / "lines.jsonl"
    with pytest.raises(RuntimeError):
        command(path, "--latency-ms", "10", fails=True)
    command(path, "--mbit", "5", "6")
    told = capsys.readouterr()
    assert told.out == "10/100 1/5 1/6\n"
    assert "losses" not in told.err and len(told.err.splitlines()) == 3
    assert [json.loads(line)["losses"] for line in path.read_text().splitlines()] == [[1.0]] * 3
    command(path, "--table", "--mbit", "7")
    assert capsys.readouterr().out == "10/100 1/5 1/6\n"


def test_asynchronous_trainings_have_a_momentum_of_their_own():
    words = ["--momentum", "0.5", "--async-rates", "0.2", "--in-flight", "7", "--lengths", "1"]
    given = pipelines._arguments(words)
    trials = pipelines.trials_of(stages.Work(), Link(), given)
    found = [changed for system, _, changed in trials if system == "async:7"]
    assert [(each["rate"], each["momentum"]) for each in found] == [(0.2, 0.5)]
    assert all("momentum" not in each for system, _, each in trials if system != "async:7")


def test_busy_is_the_share_of_cores_that_somebody_used(monkeypatch) -> None:
    ticks = iter([(100, 200), (130, 300)])
    monkeypatch.setattr(lines, "_ticks", lambda: next(ticks))
    with lines.Busy() as busy:
        assert busy.share == 0.0
    assert busy.share == pytest.approx(0.7)
    monkeypatch.undo()
    idle, total = lines._ticks()
    assert 0 < idle < total
