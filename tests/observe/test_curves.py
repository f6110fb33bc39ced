"""The figure of a comparison: bands over seeds, and a file with two panels."""

from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.errors import GeartrainError
from geartrain.observe.curves import Band, Curve, band_of, draw_curves, require_matplotlib
from tests.rigs.products import in_pairs


def test_a_band_holds_median_least_and_most_at_every_evaluation() -> None:
    runs = [
        [(0.5, 1.0, 0.2), (1, 2.0, 0.6)],
        [(0.5, 3.0, 0.4), (1, 4.0, 0.5)],
        [(0.5, 2.0, 0.3), (1, 9.0, 0.7)],
    ]
    assert band_of(runs) == Band([0.5, 1], [2.0, 4.0], [0.3, 0.6], [0.2, 0.5], [0.4, 0.7])


def test_a_band_ends_when_most_runs_have_ended() -> None:
    short, long = [(1, 1.0, 0.9)], [(1, 1.0, 0.1), (2, 2.0, 0.2)]
    assert band_of([short, short, long]).epochs == [1]
    assert band_of([short, long]).epochs == [1, 2]


@in_pairs(suffix=["png", "svg"], slowest=[3.0, 300.0], first=[0.25, 1])
def test_the_figure_is_written(tmp_path: Path, slowest: float, suffix: str, first: float) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"figure.{suffix}"
    curves = [
        Curve("ours", [[(first, 1.0, 0.5), (2, 2.0, 0.8)], [(first, 1.5, 0.4), (2, 2.5, 0.9)]]),
        Curve("level by level", [[(first, slowest, 0.6)]]),
    ]
    draw_curves(path, "trees", "all", 0.81, curves)
    content = path.read_bytes()
    assert len(content) > 5000
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GeartrainError, match=r"pip install 'geartrain\[plot\]'"):
        require_matplotlib()
