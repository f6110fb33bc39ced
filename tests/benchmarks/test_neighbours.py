"""Neighbours: what is asked for, what is kept, and how it is shown."""

from __future__ import annotations

import math
from typing import Any

import pytest

import geartrain as gt
from benchmarks.neighbours.main import accuracy, best_rates, rates, scale, stragglers
from benchmarks.neighbours.tables import page_of, seconds_to
from benchmarks.neighbours.trials import Trial, costs_key, exchange_of
from geartrain.sharing.topology import levels_of, topology_of

NOTHING: dict[str, list[dict[str, Any]]] = {
    name: [] for name in ("costs", "clock", "scale", "rates", "accuracy", "stragglers")
}


def line(method: str, **more: Any) -> dict[str, Any]:
    """Of a trial of four copies."""
    return {
        "method": method, "copies": 4, "rate": 0.1, "seed": 1, "slow": 1.0, "topology": "torus",
        "options": {"batch": 25}, "exchanged": {"distance": 0.5, "bytes_per_gradient": 2e6},
        "history": [], "instances": 100, "seconds": 1.0, **more,
    }  # fmt: skip


def history(*entries: tuple[float, float]) -> list[dict[str, float]]:
    return [{"seconds": seconds, "accuracy": value} for seconds, value in entries]


def test_a_method_is_a_name_with_every_or_a_scale() -> None:
    average, gradients = exchange_of("average:16"), exchange_of("gradients*0.2")
    assert isinstance(average, gt.PeriodicAverage)
    assert average.every == 16
    assert isinstance(gradients, gt.NearestNeighbours)
    assert gradients.scale == 0.2
    with pytest.raises(ValueError, match="method nobody"):
        exchange_of("nobody")


def test_every_planned_method_exists_and_shares_costs_with_its_kind() -> None:
    for trial in (*scale(), *rates()):
        if trial.method != "alone":
            exchange_of(trial.method)
    first = Trial(table="scale", method="gradients:4", copies=8, options={"batch": 100})
    other = Trial(
        table="scale", method="alone", copies=1, options={"batch": 100, "train_size": 500}
    )
    assert costs_key(first) == costs_key(other)


def test_the_best_rate_is_that_of_the_best_end() -> None:
    lines = [
        line("d-psgd", rate=0.1, history=history((1.0, 0.9), (2.0, 0.7))),
        line("d-psgd", rate=0.3, history=history((1.0, 0.5), (2.0, 0.8))),
        line("d-psgd", rate=0.9, history=[]),
    ]
    assert best_rates(lines) == {("d-psgd", 4): 0.3}
    assert {trial.rate for trial in accuracy(best_rates(lines))} == {0.3}


def test_seconds_to_a_target_lie_on_the_line_between_evaluations() -> None:
    run = line("d-psgd", history=history((1.0, 0.5), (3.0, 0.9), (4.0, 0.95)))
    assert seconds_to(run, 0.7) == pytest.approx(2.0)
    assert seconds_to(run, 0.25) == pytest.approx(0.5)
    assert seconds_to(run, 0.99) == math.inf


def test_the_tables_set_methods_beside_all_reduce() -> None:
    lines = NOTHING | {
        "scale": [line("alone", copies=1), line("gradients", instances=360, seconds=1.0)],
        "accuracy": [
            line("all-reduce", history=history((1.0, 0.95))),
            line("gradients", history=history((1.0, 0.93))),
        ],
        "stragglers": [
            line(method, slow=slow, history=history((seconds, 0.93)))
            for method, slow, seconds in (
                ("all-reduce", 1.0, 1.0), ("all-reduce", 0.25, 4.0),
                ("gradients", 1.0, 1.0), ("gradients", 0.25, 1.3),
            )
        ] + [line("gradients", slow=0.25, slow_copy=2, history=history((1.6, 0.93)))],
        "clock": [
            line("alone", copies=1, runtime="threads", seconds=2.0),
            line("alone", copies=1, runtime="simulated", seconds=1.8),
        ],
    }  # fmt: skip
    page = "\n".join(page_of(lines))
    assert "| 25 images | gradients | torus | of linear | 90% |" in page
    assert "| gradients | 93.0% | -2.0 | 0.1 | 0.5 |" in page
    assert "| gradients | 1.00 s | 1.30 s | 0.30 s | 0.10 |" in page
    assert "| gradients, copy 2 slow | 1.00 s | 1.60 s | 0.60 s | 0.20 |" in page
    assert "| 1 | alone | 2.00 s | 1.80 s | -10% |" in page


def test_meetings_are_told_of_lines_that_counted_them() -> None:
    letters = {"sent": 1200, "declined": 3}
    told = {"distance": 0.5, "bytes_per_gradient": 2e6, "letters": letters}
    lines = [
        line("weights", history=history((1.0, 0.9)), exchanged={**told, "meetings_per_gradient": x})
        for x in (0.75, 0.5, 1.0)
    ]
    page = "\n".join(page_of(NOTHING | {"accuracy": [*lines, line("d-psgd")]}))
    assert "| weights | 4 | no | 0.75 | 3 of 1,200 | 2.00 | 0.5 |" in page


def test_the_slow_copy_of_stragglers_makes_no_offers_where_it_is_said_so() -> None:
    told = [t for t in stragglers({("weights", 9): 0.1}) if t.slow_copy]
    levels = levels_of(topology_of("torus").neighbours(9))
    assert [t.seed for t in told] == [1, 2, 3]
    assert {levels[t.slow_copy] for t in told} == {max(levels)} != {levels[0]}


def test_a_training_that_failed_has_no_accuracy() -> None:
    page = "\n".join(page_of(NOTHING | {"accuracy": [line("gradients", exchanged=None)]}))
    assert "| gradients | failed | - |" in page
