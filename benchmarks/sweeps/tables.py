"""Lines of a sweep as Markdown tables and as a figure.

results/TASK.jsonl ─► a table for each axis: a row for each value, over the seeds
                   └► instances a second, and epochs to the target, against max_active
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.sweeps.trials import Line, Point, Terms, asked, key_of, outcome_of
from geartrain.observe.curves import require_matplotlib
from geartrain.observe.figures import duration
from geartrain.train.results import Target
from geartrain_baselines.standings import System, markdown_of, row_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes as MplAxes

Axes = Mapping[str, Sequence[Point]]
"""Name of what is swept over to its points, one for each value."""

FIELDS: Final = ("max_active", "update_every", "replicas")


def page_of(terms: Terms, axes: Axes, lines: Sequence[Line]) -> Iterator[str]:
    """The tables as lines of Markdown, and what is not in them."""
    yield f"**{terms.task}**, {terms.workers} workers, evaluated every " + (
        f"{terms.evaluate_every:g} epochs, at most {terms.epochs}; target {terms.target}"
        + (", where training ends" if terms.stops else "")
        + (f"; options {', '.join(terms.options)}" if terms.options else "")
    )
    for axis, points in axes.items():
        rows = rows_of(terms, axis, points, lines)
        if rows:
            held = [f"{n}={getattr(points[0], n)}" for n in FIELDS if n != axis]
            yield from ("", f"{axis}, with {', '.join(held)}:", "")
            yield from markdown_of(rows, Target.parse(terms.target), axis)
    notes = [note for line in lines if (note := _note(line))]
    if notes:
        yield from ("", *notes)


def rows_of(
    terms: Terms, axis: str, points: Sequence[Point], lines: Sequence[Line]
) -> list[dict[str, Any]]:
    """As ``geartrain_baselines.standings.row_of`` makes them, for the points that have lines."""
    target, rows = Target.parse(terms.target), []
    for point in points:
        label = str(getattr(point, axis))
        here = [line for line in lines if Point(*(line[n] for n in FIELDS)) == point]
        outcomes = [o for line in here if (o := outcome_of(line, label)) is not None]
        if outcomes:
            rows.append(row_of(System(label, "ours", "", None, terms.epochs), outcomes, target))
    return rows


def of_terms(terms: Terms, axes: Axes, lines: Sequence[Line]) -> list[Line]:
    """The lines of this sweep: of equal trials the last, those of other terms not at all."""
    last = {key_of(line): line for line in lines}
    points = dict.fromkeys(point for points in axes.values() for point in points)
    seeds = sorted({line["seed"] for line in lines})
    keys = [key_of(asked(point, terms, seed)) for point in points for seed in seeds]
    return [last[key] for key in keys if key in last]


def draw(path: Path, terms: Terms, axes: Axes, lines: Sequence[Line]) -> None:
    """Write the figure; where half of the seeds missed the target, a cross stands at the top.

    Raises:
        GeartrainError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = rows_of(terms, "max_active", axes["max_active"], lines)
    _draw(left, rows, "instances_per_second", "instances a second")
    _draw(right, rows, "epochs_to_target", f"epochs to {terms.target}")
    figure.suptitle(f"{terms.task}, {terms.workers} workers")
    figure.savefig(path)


def _draw(panel: MplAxes, rows: Sequence[Mapping[str, Any]], name: str, label: str) -> None:
    known = [row for row in rows if row[name] is not None]
    x = [int(row["system"]) for row in known]
    low = [row["spread"][name][0] for row in known]
    high = [_or_nan(row["spread"][name][1]) for row in known]
    panel.fill_between(x, low, high, alpha=0.15, linewidth=0)
    panel.plot(x, [row[name] for row in known], marker="o", linewidth=2)
    missed = [int(row["system"]) for row in rows if row[name] is None]
    top, height = [1.0] * len(missed), panel.get_xaxis_transform()
    (crosses,) = panel.plot(missed, top, "x", color="0.35", transform=height, clip_on=False)
    crosses.set_in_layout(False)
    panel.set_xscale("log", base=2)
    panel.set_xticks([int(row["system"]) for row in rows])
    panel.minorticks_off()
    for at in missed:
        panel.annotate(
            "missed", (at, 1), xycoords=height, xytext=(0, -14), textcoords="offset points",
            ha="center", fontsize=8, color="0.35",
        )  # fmt: skip
    panel.set_xlim(0.66, 1.5 * max((int(row["system"]) for row in rows), default=1))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylim(0, None if known else 1)
    panel.set_xlabel("max_active, instances in flight")
    panel.set_ylabel(label)
    panel.grid(color="0.9", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def _note(line: Line) -> str | None:
    """What a reader must know of a trial that did not end as it should."""
    named = ", ".join(f"{n}={line[n]}" for n in (*FIELDS, "seed"))
    match line["outcome"]:
        case "failed":
            return f"- {named}: failed, {line['reason']}"
        case "capped":
            history = line.get("history")
            got = f"after {history[-1]['epoch']:g} epochs" if history else "before its evaluation"
            return f"- {named}: stopped at {duration(line['cap_s'])}, {got}"
    return None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
