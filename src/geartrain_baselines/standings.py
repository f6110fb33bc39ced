"""What a comparison came to: a row for each system, over its seeds.

    outcomes of a system ─► medians, least and most ─► row of the JSON ─► line of the table

A seed that misses the target counts as infinitely late, so the median over the seeds is a number
only if more than half of them reached it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from rich import box
from rich.table import Table

from geartrain.observe.figures import duration, epochs, measure, rate
from geartrain.train.results import Target


@final
@dataclass(frozen=True, slots=True)
class System:
    """Something that is compared.

    Args:
        key: Unique in the comparison: the name, and the batch or settings where some were given.
        name: ``ours``, ``ours-sync`` or a baseline's.
        what: A line.
        batch: Examples per update; for ours the recipe's update has its own unit, so None.
        epochs: To train.
        changes: Settings of ours that are other than those of the comparison, by field name.
    """

    key: str
    name: str
    what: str
    batch: int | None
    epochs: int
    changes: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class EpochOf:
    """An evaluation of a trial.

    Args:
        epoch: Epochs so far, a fraction within one.
        seconds: Training so far.
        instances: Since the evaluation before.
        valid: Metrics.
    """

    epoch: float
    seconds: float
    instances: float
    valid: Mapping[str, float]


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """A trial that has ended.

    Args:
        system: Its key.
        seed: Its seed.
        epochs: All evaluations, at least one.
        peak_rss_mib: Of its process.
        staleness: Part to mean and max; empty for baselines.
        updates: Part to its optimiser steps an epoch; empty where nobody has counted them.
    """

    system: str
    seed: int
    epochs: Sequence[EpochOf]
    peak_rss_mib: float | None
    staleness: Mapping[str, Mapping[str, float]]
    updates: Mapping[str, float] = field(default_factory=dict)

    @property
    def instances_per_second(self) -> float:
        """Over all epochs, training alone."""
        seconds = self.epochs[-1].seconds
        return sum(e.instances for e in self.epochs) / seconds if seconds > 0 else math.nan

    def reached(self, target: Target) -> EpochOf | None:
        """The first evaluation at the target."""
        return next((e for e in self.epochs if target.reached(e.valid)), None)


def row_of(system: System, outcomes: Sequence[Outcome], target: Target) -> dict[str, Any]:
    """A system as JSON.

    Args:
        system: Which.
        outcomes: Of its seeds, at least one.
        target: That it is timed to.
    """
    ends = [outcome.reached(target) for outcome in outcomes]
    metrics = [m for m in outcomes[0].epochs[-1].valid if m != "loss"]
    columns: dict[str, list[float]] = {
        "instances_per_second": [outcome.instances_per_second for outcome in outcomes],
        "seconds_to_target": [math.inf if e is None else e.seconds for e in ends],
        "epochs_to_target": [math.inf if e is None else e.epoch for e in ends],
        "peak_rss_mib": [m for o in outcomes if (m := o.peak_rss_mib) is not None] or [math.nan],
    }
    staleness = _staleness([outcome.staleness for outcome in outcomes])
    updates = {part: [o.updates[part] for o in outcomes] for part in _parts(outcomes)}
    valid = {m: [outcome.epochs[-1].valid[m] for outcome in outcomes] for m in metrics}
    return {
        "system": system.key,
        "what": system.what,
        "batch": system.batch,
        "seeds": len(outcomes),
        "reached": sum(e is not None for e in ends),
        "epochs": max(outcome.epochs[-1].epoch for outcome in outcomes),
        **{name: _finite(statistics.median(values)) for name, values in columns.items()},
        "valid": {m: _finite(statistics.median(values)) for m, values in valid.items()},
        "spread": {
            **{name: _range(values) for name, values in columns.items()},
            "valid": {m: _range(values) for m, values in valid.items()},
            "updates_per_epoch": {part: _range(values) for part, values in updates.items()},
            "staleness": {
                part: {what: _range(values) for what, values in ages.items()}
                for part, ages in staleness.items()
            },
        },
        "updates_per_epoch": {part: statistics.median(values) for part, values in updates.items()},
        "staleness": {
            part: {what: statistics.median(values) for what, values in ages.items()}
            for part, ages in staleness.items()
        },
    }


def table_of(rows: Sequence[Mapping[str, Any]], target: Target) -> Table:
    """The rows for a terminal; least and most over the seeds stand below the median.

    Args:
        rows: As ``row_of`` makes them.
        target: That they are timed to.
    """
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("system", no_wrap=True)
    metrics = list(rows[0]["valid"])
    counted = _counted(rows)
    for head in _heads(metrics, target, counted=counted):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(row["system"], *_cells(row, metrics, counted=counted))
    return table


def markdown_of(
    rows: Sequence[Mapping[str, Any]], target: Target, first: str = "system"
) -> list[str]:
    """The rows as lines of a Markdown table, staleness in a column.

    Args:
        rows: As ``row_of`` makes them.
        target: That they are timed to.
        first: Over the first column.
    """
    metrics = list(rows[0]["valid"])
    counted = _counted(rows)
    heads = [first, *_heads(metrics, target, counted=counted), "staleness: mean, max"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|"]
    for row in rows:
        stale = "<br>".join(_ages(row)) or "-"
        cells = [
            row["system"],
            *(_flat(cell) for cell in _cells(row, metrics, counted=counted)),
            stale,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def staleness_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each of our systems: mean and maximum of every part, over the seeds."""
    return [
        f"staleness of {row['system']}, in updates: {'; '.join(_ages(row))}"
        for row in rows
        if row["staleness"]
    ]


def _counted(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether updates were counted in any of them; in older results they were not."""
    return any(row["updates_per_epoch"] for row in rows)


def _heads(metrics: Sequence[str], target: Target, *, counted: bool) -> list[str]:
    updates = ["updates an epoch"] * counted
    return ["inst./s", *updates, f"to {target}", "epochs", "reached", *metrics, "peak MiB"]


def _cells(row: Mapping[str, Any], metrics: Sequence[str], *, counted: bool) -> list[str]:
    spread = row["spread"]
    return [
        _cell(row, "instances_per_second", lambda x: rate(x).removesuffix("/s")),
        *([updates_told(row["updates_per_epoch"])] if counted else ()),
        _cell(row, "seconds_to_target", duration),
        _cell(row, "epochs_to_target", epochs),
        f"{row['reached']}/{row['seeds']}",
        *(_told(row["valid"][m], spread["valid"][m], _as(m)) for m in metrics),
        _cell(row, "peak_rss_mib", lambda x: f"{x:,.0f}"),
    ]


def updates_told(updates: Mapping[str, float]) -> str:
    """Such as ``285``, or ``283 to 285`` where parts differ; ``-`` where nobody has counted."""
    ends = dict.fromkeys(f"{end(updates.values()):,.0f}" for end in (min, max) if updates)
    return " to ".join(ends) or "-"


def _flat(cell: str) -> str:
    """A median and its range in one line."""
    middle, _, ends = cell.partition("\n")
    return f"{middle} ({ends})" if ends else middle


def _ages(row: Mapping[str, Any]) -> list[str]:
    """Such as ``cell 6.51 (6.10..6.92), max 40``, for each part."""
    told = []
    for part, ages in row["staleness"].items():
        spread = row["spread"]["staleness"][part]
        mean = _flat(_told(ages["mean"], spread["mean"], lambda x: f"{x:.2f}"))
        most = _flat(_told(ages["max"], spread["max"], lambda x: f"{x:g}"))
        told.append(f"{part} {mean}, max {most}")
    return told


def _cell(row: Mapping[str, Any], name: str, say: Callable[[float], str]) -> str:
    return _told(row[name], row["spread"][name], say)


def _told(
    middle: float | None,
    spread: Sequence[float | None],
    say: Callable[[float], str],
) -> str:
    if middle is None:
        return "-"
    low, high = ("-" if end is None else say(end) for end in spread)
    return say(middle) if low == high else f"{say(middle)}\n{low}..{high}"


def _as(metric: str) -> Callable[[float], str]:
    return lambda value: measure(metric, value)


def _staleness(
    of_seeds: Sequence[Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, list[float]]]:
    """Part to means and maxima, one for each seed."""
    return {
        part: {what: [seed[part][what] for seed in of_seeds] for what in ("mean", "max")}
        for part in of_seeds[0]
    }


def _parts(outcomes: Sequence[Outcome]) -> list[str]:
    """Whose updates have been counted in all outcomes."""
    return [part for part in outcomes[0].updates if all(part in o.updates for o in outcomes)]


def _range(values: Sequence[float]) -> list[float | None]:
    return [_finite(min(values)), _finite(max(values))]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
