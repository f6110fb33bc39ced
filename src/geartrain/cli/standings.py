"""What a comparison came to: a row for each system, over its seeds.

    outcomes of a system ─► medians, least and most ─► row of the JSON ─► line of the table

A seed that misses the target counts as infinitely late, so the median over the seeds is a number
only if more than half of them reached it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from rich import box
from rich.table import Table

from geartrain.observe.figures import duration, measure, number, rate
from geartrain.train.results import Target


@final
@dataclass(frozen=True, slots=True)
class System:
    """Something that is compared.

    Args:
        key: Unique in the comparison: the name, and the batch where one was given.
        name: ``ours``, ``ours-sync`` or a baseline's.
        what: A line.
        batch: Examples per update; for ours the recipe's update has its own unit, so None.
        epochs: To train.
    """

    key: str
    name: str
    what: str
    batch: int | None
    epochs: int


@final
@dataclass(frozen=True, slots=True)
class EpochOf:
    """An epoch of a trial: training seconds so far, instances of this epoch, metrics."""

    epoch: int
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
        epochs: All of them, at least one.
        peak_rss_mib: Of its process.
        staleness: Part to mean and max; empty for baselines.
    """

    system: str
    seed: int
    epochs: Sequence[EpochOf]
    peak_rss_mib: float | None
    staleness: Mapping[str, Mapping[str, float]]

    @property
    def instances_per_second(self) -> float:
        """Over all epochs, training alone."""
        seconds = self.epochs[-1].seconds
        return sum(e.instances for e in self.epochs) / seconds if seconds > 0 else math.nan

    def reached(self, target: Target) -> EpochOf | None:
        """The first epoch whose validation is at the target."""
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
        "peak_rss_mib": [_or_nan(outcome.peak_rss_mib) for outcome in outcomes],
    }
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
        },
        "staleness": _staleness([outcome.staleness for outcome in outcomes]),
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
    for head in ("inst./s", f"to {target}", "epochs", "reached", *metrics, "peak MiB"):
        table.add_column(head, justify="right")
    for row in rows:
        spread = row["spread"]
        table.add_row(
            row["system"],
            _cell(row, "instances_per_second", lambda x: rate(x).removesuffix("/s")),
            _cell(row, "seconds_to_target", duration),
            _cell(row, "epochs_to_target", lambda x: f"{x:g}"),
            f"{row['reached']}/{row['seeds']}",
            *(_told(row["valid"][m], spread["valid"][m], _as(m)) for m in metrics),
            _cell(row, "peak_rss_mib", lambda x: f"{x:,.0f}"),
        )
    return table


def staleness_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each of our systems: mean and maximum of every part."""
    lines = []
    for row in rows:
        parts = [
            f"{name} {number(s['mean'])} (max {s['max']:g})" for name, s in row["staleness"].items()
        ]
        if parts:
            lines.append(f"staleness of {row['system']}, in updates: {', '.join(parts)}")
    return lines


def _cell(row: Mapping[str, Any], name: str, say: Callable[[float], str]) -> str:
    return _told(row[name], row["spread"][name], say)


def _told(middle: float | None, spread: Sequence[float | None], say: Callable[[float], str]) -> str:
    if middle is None:
        return "-"
    low, high = ("-" if end is None else say(end) for end in spread)
    return say(middle) if low == high else f"{say(middle)}\n{low}..{high}"


def _as(metric: str) -> Callable[[float], str]:
    return lambda value: measure(metric, value)


def _staleness(of_seeds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    return {
        part: {
            "mean": statistics.fmean(seed[part]["mean"] for seed in of_seeds),
            "max": max(seed[part]["max"] for seed in of_seeds),
        }
        for part in of_seeds[0]
    }


def _range(values: Sequence[float]) -> list[float | None]:
    return [_finite(min(values)), _finite(max(values))]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
