"""The benchmark of overhead: nodes that do nothing, copies that are counted, tables."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import geartrain as gt
from benchmarks.firings import Operations
from benchmarks.overhead.main import (
    Copies,
    Pass,
    Shape,
    firing_us,
    graph_of,
    instances_of,
    markdown,
    rows_per_second,
)
from geartrain.native.rows import Moves, take
from geartrain.nodes.kernel import kernel_of


@pytest.mark.parametrize("shape", ["chain", "loop"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_firing_is_timed_both_ways(shape: Shape, keeps: bool) -> None:
    found = firing_us(shape, 4, keeps=keeps, nodes=3, width=2, repeats=1)
    assert found["forward"] > 0 < found["backward"]


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_a_second_are_of_the_passes_after_the_first(workers: int) -> None:
    found = rows_per_second(workers, 8, keeps=True, nodes=2, width=2, instances=20, passes=2)
    assert len(found["rates"]) == 2
    assert min(found["rates"]) > 0
    assert found["rows_fired"] == 20 * 5  # forward and back through two nodes, and the loss


def test_a_loop_passes_as_often_as_it_is_asked_to_and_changes_nothing() -> None:
    session = gt.Session(graph_of("loop", 3, keeps=False))
    (loss,) = {round(session.evaluate(instances_of(2, 3, 4)).metrics["loss"], 6)}
    assert loss == pytest.approx(4 * 0.1 * 0.5)


def test_pass_keeps_rows_only_where_it_is_asked_to() -> None:
    x = torch.ones(2, 3)
    for keeps in (False, True):
        kernel = kernel_of(Pass(keeps))
        assert kernel is not None
        outputs, residuals = kernel.forward((x,))  # type: ignore[union-attr]
        assert outputs[0] is x
        assert len(residuals) == keeps


def test_rows_that_are_moved_are_counted_once_whoever_moves_them() -> None:
    copies = Copies()
    moves = Moves()
    with copies.counted(), Operations(copies._see):
        moves.add(torch.zeros(4, 3), np.array([3]), torch.ones(4, 3), np.array([1]))
        moves.run()  # by a kernel, or where there is none by torch
        take([torch.ones(4, 3)], np.array([1, 2]))  # by torch
        take([torch.ones(4, 3, dtype=torch.float64).t()], np.array([0]))  # likewise
        take([torch.ones(4, dtype=torch.int64)], np.array([0]))  # no payload
    assert sum(copies.rows.values()) == 4
    assert sum(copies.bytes.values()) == 3 * 3 * 4 + 4 * 8


def test_a_session_counts_messages_that_are_fired_forward() -> None:
    copies = Copies()
    session = gt.Session(graph_of("chain", 3, keeps=True), runtime=gt.Simulated())
    with copies.counted():
        session.fit(instances_of(5, 3, 2), epochs=1)
    assert copies.fired == 5 * 4  # three nodes and the loss
    assert copies.rows["nodes/payload"] >= 5


def test_the_tables_set_figures_against_the_goals() -> None:
    firing = {"shape": "chain", "keeps": True, "rows": 32, "forward": 90.0, "backward": 160.0}
    document = {
        "settings": {"nodes": 16},
        "firing": [firing, firing | {"rows": 1}, firing | {"rows": 512}],
        "rows": [
            {"workers": 2, "in_flight": 256, "keeps": False, "rates": [4e5, 6e5, 5e5],
             "seconds": [1.0, 3.0, 2.0], "firings": 50_000, "rows_fired": 800_000},
        ],
        "copies": [
            {"task": "t", "instances": 2, "rows_fired": 10, "rows_moved": {"nodes/group": 25},
             "bytes_moved": {"nodes/group": 4096, "nodes/payload": 4096}},
        ],
        "admission": [{"task": "t", "us": [7.0, 9.0, 8.0]}],
    }  # fmt: skip
    lines = list(markdown(json.loads(json.dumps(document))))
    assert "| chain | yes | 32 | 90 | 160 | 150 | no |" in lines
    assert "| chain | yes | 512 | 90 | 160 | 300 | yes |" in lines
    assert "| chain | yes | 1 | 90 | 160 | | |" in lines
    assert (
        "| 2 workers, shared weights | 256 | no | 500,000 | 400,000 to 600,000 | 50% | 16 | 80 |"
        in lines
    )
    assert "| t | 2.50 | 4.0 | nodes/group 50%, nodes/payload 50% |" in lines
    assert lines[-1] == "| t | 8.0 | 7.0 to 9.0 |"
