"""What our own steps buy: each comparison runs, and says what it has found."""

from __future__ import annotations

import re

import pytest

from benchmarks.special import main as special
from benchmarks.special import whole


def test_each_part_of_a_recipe_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(special, "TURNS", 3)
    monkeypatch.setattr(special, "BLOCK_S", 0.0)
    special.main("adam")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(re.search(r"torch/ours \d+\.\d\d \(", line) for line in lines)


@pytest.mark.slow
def test_a_whole_model_is_measured_beside_both_loops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(whole, "TURNS", 1)
    monkeypatch.setitem(whole.SIZES, "listreduce", 40)
    how = whole.How(data=None, evaluate=False, bf16=False, workers=1, kernel_threads=1)
    whole.measure("listreduce", how)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["listreduce", way] for way in ("special", "loop", "own")
    ]
    assert "1.00 (1.00 to 1.00) times special" in lines[0]
