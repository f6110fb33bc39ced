"""The section of a run's page on copies of the model: who trained, who said what, how far apart.

Exchanged events ─► distance over epochs, a table with a line a copy
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from geartrain.observe.charts import ChartLine, line_chart
from geartrain.observe.figures import count, number, rate
from geartrain.observe.page import section, table

_HEAD = (
    "copy", "instances", "instances/s", "own gradients", "letters sent", "bytes/gradient",
    "applied", "merged", "dropped", "lost", "declined", "meetings/gradient", "staleness",
)  # fmt: skip


def copies_section(events: Sequence[Mapping[str, Any]]) -> str:
    """HTML, or nothing for a run without copies of the model.

    Args:
        events: ``Exchanged``, as JsonLog writes them.
    """
    if not events:
        return ""
    points = [(float(e["epoch"]), _float(e["distance"])) for e in events]
    chart = line_chart(
        "distance of the copies from their mean", "epochs", [ChartLine("rms", points, 0)], number
    )
    rows = [_row(k, [e["copies"][k] for e in events]) for k in range(len(events[-1]["copies"]))]
    note = (
        f"<p>{len(rows)} copies of the model, {events[-1]['exchange']}. Staleness: versions of the "
        "receiver while a letter was under way. Declined: sent, and not taken up by the receiver. "
        "Meetings: weights mixed with others', mean over parts.</p>"
    )
    return section("Copies", note + chart + table(_HEAD, rows))


def _row(k: int, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    def total(name: str) -> int:
        return sum(int(e.get(name, 0)) for e in entries)  # older logs lack some

    rounds = total("rounds")
    seconds = sum(
        e["instances"] / e["instances_per_second"] for e in entries if e["instances_per_second"]
    )
    letters = sum(n for e in entries for n in e["staleness"]["histogram"])
    ages = sum(age * n for e in entries for age, n in enumerate(e["staleness"]["histogram"]))
    counts = [count(total(name)) for name in ("applied", "merged", "dropped", "lost", "declined")]
    meetings = sum(e.get("meetings_per_round", 0.0) * e["rounds"] for e in entries)
    return [
        str(k) if entries[-1]["present"] else f"{k} (absent)",
        count(total("instances")),
        rate(total("instances") / seconds if seconds else math.nan),
        count(rounds),
        count(total("sent")),
        count(total("bytes") // rounds) if rounds else "-",
        *counts,
        f"{meetings / rounds:.2f}" if rounds else "-",
        f"{ages / letters:.2f}" if letters else "-",
    ]


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)
