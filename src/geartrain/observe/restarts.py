"""The section of a run's page on what has come between: what was chosen, and workers that died.

Chosen events ─► a line each        Restored events ─► a table, a line a death
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from geartrain.observe.figures import count, duration
from geartrain.observe.page import section, table

_HEAD = ("at", "who, and how", "in", "went on from", "repeated", "time lost")
_NOTE = (
    "<p>Training went back to its last checkpoint, or to a copy in memory, and trained what came "
    "after it again. Evaluations began anew.</p>"
)


def chosen_section(events: Sequence[Mapping[str, Any]]) -> str:
    """HTML, or nothing for a run in which nothing was to be chosen.

    Args:
        events: ``Chosen``, as JsonLog writes them.
    """
    lines = [
        f"<p>After {duration(float(e['time_s'] or 0.0))}: {escape(str(e['why']))}{_expected(e)}</p>"
        for e in events
    ]
    return section("Chosen by what was measured", "".join(lines)) if lines else ""


def _expected(event: Mapping[str, Any]) -> str:
    """Of each way that was looked at, how many times as fast as one worker it was thought to be."""
    ways: Mapping[str, float] = event.get("expected") or {}  # logs of before have none
    told = ", ".join(f"{escape(way)} {float(times):.2f}" for way, times in ways.items())
    return f". Expected, times one worker with one kernel thread: {told}." if told else ""


def restarts_section(events: Sequence[Mapping[str, Any]]) -> str:
    """HTML, or nothing for a run in which no worker has died.

    Args:
        events: ``Restored``, as JsonLog writes them.
    """
    if not events:
        return ""
    rows = [
        [
            duration(float(e["time_s"] or 0.0)) if e["mode"] == "train" else "-",
            str(e["message"]),
            "training" if e["mode"] == "train" else f"an {e['mode']} pass",
            str(e["source"]) or "-",
            count(int(e["repeated"])),
            duration(float(e["seconds"] or 0.0)),
        ]
        for e in events
    ]
    return section("Deaths of workers", _NOTE + table(_HEAD, rows))
