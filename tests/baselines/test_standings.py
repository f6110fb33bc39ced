"""Rows of a comparison: medians over seeds, and what a missed target does to them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rich.console import Console

from geartrain.train.results import Target
from geartrain_baselines.standings import (
    EpochOf,
    Outcome,
    System,
    markdown_of,
    row_of,
    staleness_lines,
    table_of,
)

OURS = System("ours", "ours", "4 in flight", None, 3)
TARGET = Target("accuracy", 0.9)


def outcome(*accuracies: float, seconds: float = 2.0, seed: int = 0, age: float = 0.0) -> Outcome:
    epochs = [
        EpochOf(i, seconds * i, 100, {"accuracy": a, "loss": 1.0})
        for i, a in enumerate(accuracies, 1)
    ]
    return Outcome("ours", seed, epochs, 100.0 + seed, {"cell": {"mean": age, "max": 3 * age}})


def test_a_row_holds_medians_and_the_least_and_most_over_the_seeds() -> None:
    row = row_of(
        OURS,
        [outcome(0.5, 0.92), outcome(0.95, seconds=4.0, seed=1), outcome(0.1, 0.2, 0.91, seed=2)],
        TARGET,
    )
    assert (row["reached"], row["seeds"]) == (3, 3)
    assert row["seconds_to_target"] == 4.0
    assert row["spread"]["seconds_to_target"] == [4.0, 6.0]
    assert (row["epochs_to_target"], row["spread"]["epochs_to_target"]) == (2, [1, 3])
    assert (row["instances_per_second"], row["spread"]["instances_per_second"]) == (50, [25, 50])
    assert (row["valid"], row["spread"]["valid"]) == (
        {"accuracy": 0.92},
        {"accuracy": [0.91, 0.95]},
    )
    assert (row["peak_rss_mib"], row["spread"]["peak_rss_mib"]) == (101, [100, 102])


def test_the_first_epoch_at_the_target_counts_even_if_a_later_one_falls_back() -> None:
    row = row_of(OURS, [outcome(0.91, 0.5)], TARGET)
    assert (row["epochs_to_target"], row["valid"]["accuracy"]) == (1, 0.5)


@pytest.mark.parametrize(("misses", "median"), [(1, 2.0), (2, None)])
def test_a_missed_target_counts_as_infinitely_late(misses: int, median: float | None) -> None:
    outcomes = [outcome(0.9) for _ in range(3 - misses)] + [outcome(0.1)] * misses
    row = row_of(OURS, outcomes, TARGET)
    assert row["reached"] == 3 - misses
    assert row["seconds_to_target"] == median
    assert row["spread"]["seconds_to_target"] == [2.0, None]


def test_updates_are_medians_over_the_seeds_and_a_column_where_anybody_has_counted() -> None:
    counted = [
        replace(outcome(0.9, seed=k), updates={"cell": n, "readout": n + 1.0})
        for k, n in enumerate((10.0, 12.0, 20.0))
    ]
    row = row_of(OURS, counted, TARGET)
    assert row["updates_per_epoch"] == {"cell": 12, "readout": 13}
    assert row["spread"]["updates_per_epoch"] == {"cell": [10, 20], "readout": [11, 21]}
    other = row_of(OURS, [outcome(0.9)], TARGET)
    head, _, first, second = markdown_of([row, other], TARGET)
    assert head.startswith("| system | inst./s | updates an epoch | to accuracy")
    assert first.split(" | ")[2] == "12 to 13" and second.split(" | ")[2] == "-"
    assert "updates" not in markdown_of([other], TARGET)[0]
    assert table_of([row], TARGET).columns[2].header == "updates an epoch"


def test_staleness_is_medians_over_the_seeds_with_least_and_most() -> None:
    row = row_of(OURS, [outcome(0.9, age=a) for a in (1.0, 2.0, 4.0)], TARGET)
    assert row["staleness"] == {"cell": {"mean": 2.0, "max": 6}}
    assert row["spread"]["staleness"] == {"cell": {"mean": [1.0, 4.0], "max": [3, 12]}}
    (line,) = staleness_lines([row, {**row, "system": "level", "staleness": {}}])
    told = "cell 2.00 (1.00..4.00), max 6 (3..12)"
    assert line == f"staleness of ours, in updates: {told}"
    level = row_of(OURS, [outcome(0.9)], TARGET) | {"system": "level", "staleness": {}}
    head, rule, first, second = markdown_of([row, level], TARGET)
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|")
    level["valid"]["unseen"] = 0.5  # that the first system does not report
    assert markdown_of([row, level], TARGET) == [head, rule, first, second]
    assert first.endswith(f"| {told} |")
    assert second.endswith("| - |")


def test_a_target_that_is_reached_within_an_epoch_counts_fractions() -> None:
    def at(*values: float) -> Outcome:
        ends = [EpochOf(0.25 * i, i, 25, {"accuracy": v}) for i, v in enumerate(values, 1)]
        return Outcome("ours", 0, ends, 100.0, {})

    row = row_of(OURS, [at(0.2, 0.95), at(0.91, 0.9), at(0.1, 0.2, 0.9)], TARGET)
    assert (row["epochs_to_target"], row["spread"]["epochs_to_target"]) == (0.5, [0.25, 0.75])
    assert row["seconds_to_target"] == 2
    assert "| 0.50 (0.25..0.75) |" in markdown_of([row], TARGET)[2]


def test_a_value_that_is_no_number_is_null_and_a_dash() -> None:
    row = row_of(OURS, [outcome(math.nan)], TARGET)
    assert row["valid"]["accuracy"] is None
    console = Console(width=120, record=True, quiet=True)
    console.print(table_of([row], TARGET))
    assert row["seconds_to_target"] is None


def test_the_table_shows_the_spread_below_the_median() -> None:
    row = row_of(OURS, [outcome(0.95), outcome(0.91, seconds=4.0)], TARGET)
    console = Console(width=120, record=True)
    with console.capture() as captured:
        console.print(table_of([row], TARGET))
    text = captured.get()
    assert "to accuracy>=0.9" in text
    assert "3.0 s" in text
    assert "2.0 s..4.0 s" in text
    assert "2/2" in text


def test_a_peak_that_is_not_known_is_left_out() -> None:
    known, unknown = outcome(0.9, seed=3), replace(outcome(0.9), peak_rss_mib=None)
    assert row_of(OURS, [unknown, known, unknown], TARGET)["peak_rss_mib"] == 103
    assert row_of(OURS, [unknown], TARGET)["peak_rss_mib"] is None
