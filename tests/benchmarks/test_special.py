"""What our own steps buy: each comparison runs, and says what it has found."""

from __future__ import annotations

import re

import pytest

from benchmarks.special import main as special


def test_each_part_of_a_recipe_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(special, "TURNS", 3)
    monkeypatch.setattr(special, "BLOCK_S", 0.0)
    special.main("adam")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(re.search(r"torch/ours \d+\.\d\d \(", line) for line in lines)
