"""Figures of topologies."""

from __future__ import annotations

import importlib.util

import pytest

from geartrain.observe.graphs import draw_topology, places_of
from geartrain.sharing.topology import Exponential

plotting = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra plot"
)


def test_a_torus_lies_in_rows_and_columns():
    assert places_of("torus", 6) == [(0, 0), (1, 0), (2, 0), (0, -1), (1, -1), (2, -1)]


@pytest.mark.parametrize("topology", ["ring", "full", "torus"])
def test_copies_do_not_lie_on_one_another(topology):
    places = places_of(topology, 16)
    assert len({(round(x, 3), round(y, 3)) for x, y in places}) == 16


@plotting
@pytest.mark.parametrize("topology", ["ring", "torus", Exponential(), [(0, 1), (1, 2), (2, 3)]])
def test_every_copy_and_edge_is_drawn(topology, tmp_path):
    path = tmp_path / "t.svg"
    draw_topology(path, topology, 4, title="four of them")
    assert path.read_text(encoding="utf-8").count("<path") > 4


@plotting
def test_a_topology_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="7 copies do not fit"):
        draw_topology(tmp_path / "t.png", "torus", 7)
    assert not list(tmp_path.iterdir())
