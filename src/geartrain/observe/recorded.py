"""What a run has cost, from its log: seconds of a firing and of a row, by node, as the simulator
takes them.

    metrics.jsonl ─► Worked, EpochEnded ─► recorded(events) ─► Costs ─► Simulated(costs=...)

A node's firings of many sizes tell both: the line of least squares through (rows, seconds), of
which the log has the sums. What workers did between firings, neither firing nor waiting, is shared
among the firings of each. So a simulated run of the same firings takes as long as the recorded one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

from geartrain.errors import DataError
from geartrain.observe.jsonlog import read_json_log
from geartrain.runtime.costs import Costs

_COPY: Final = re.compile(r"#\d+")
METRICS: Final = "metrics.jsonl"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a run tells of itself.

    Args:
        nodes: Seconds a firing and a row: by node of its forward, ``NODE backward`` and ``PART
            exchange`` of the others.
        instances: That were trained in what was counted.
        seconds: Of those passes.
        workers: That it had.
        link_bytes: Between two processes, for an instance; 0 where workers have one memory.
    """

    nodes: Mapping[str, tuple[float, float]]
    instances: int
    seconds: float
    workers: int
    link_bytes: float

    @property
    def throughput(self) -> float:
        """Instances a second."""
        return self.instances / self.seconds

    def costs(self, links: Costs | None = None) -> Costs:
        """For ``Simulated``; latency and bandwidth are those of ``links``."""
        return replace(links or Costs(), nodes=dict(self.nodes), backward=0.0)


@final
@dataclass(slots=True)
class _EventLine:
    """Sums over firings, each of so many rows and seconds, and of the time beside them."""

    firings: int = 0
    rows: int = 0
    seconds: float = 0.0
    row_squares: int = 0
    row_seconds: float = 0.0
    beside_s: float = 0.0
    workers: dict[int, int] = field(default_factory=dict)

    def add(self, node: Mapping[str, Any]) -> None:
        for name in ("firings", "rows", "seconds", "row_squares", "row_seconds"):
            setattr(self, name, getattr(self, name) + node.get(name, 0))

    def cost(self) -> tuple[float, float]:
        """Seconds a firing and a row: neither below 0, and right for all firings together."""
        beside = self.beside_s / self.firings
        spread = self.firings * self.row_squares - self.rows**2
        if not self.rows:
            return self.seconds / self.firings + beside, 0.0
        slope = self.seconds / self.rows
        if spread > 0 and self.row_squares:
            slope = (self.firings * self.row_seconds - self.rows * self.seconds) / spread
        slope = min(max(slope, 0.0), self.seconds / self.rows)
        return (self.seconds - slope * self.rows) / self.firings + beside, slope


def recorded_run(path: Path | str) -> Recorded:
    """What the run of a folder has cost.

    Args:
        path: The folder, or its ``metrics.jsonl``.

    Raises:
        DataError: It is no such log, or no epoch of it has ended.
        OSError: It cannot be read.
    """
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    try:
        return recorded(read_json_log(file))
    except ValueError as error:
        raise DataError(str(error), path=file) from error


def recorded(events: Sequence[Mapping[str, Any]]) -> Recorded:
    """What a run has cost, without its first epoch, which warms caches up, if it had others.

    Args:
        events: As ``read_json_log`` gives them.

    Raises:
        ValueError: There is no epoch of training.
    """
    worked = [event for event in events if event.get("event") == "Worked"]
    ended = [event for event in events if event.get("event") == "EpochEnded"]
    pairs = list(zip(worked, ended, strict=False))
    pairs = [pair for pair in pairs if pair[0]["epoch"] > 1] or pairs
    if not pairs or not any(work["nodes"] for work, _ in pairs):
        raise ValueError(
            "no epoch of training has ended in this log, so nothing is known of its costs; record "
            "a run of two epochs or more"
        )
    lines: dict[str, _EventLine] = {}
    for work, _ in pairs:
        _count(work, lines)
    return Recorded(
        nodes={name: line.cost() for name, line in sorted(lines.items())},
        instances=sum(end["instances"] for _, end in pairs),
        seconds=sum(float(work["seconds"]) for work, _ in pairs),
        workers=max(len(work["waiting"]) for work, _ in pairs),
        link_bytes=sum(link["bytes"] for work, _ in pairs for link in work["links"])
        / max(1, sum(end["instances"] for _, end in pairs)),
    )


def _count(work: Mapping[str, Any], lines: dict[str, _EventLine]) -> None:
    """Add the firings of a pass, and to those of each worker its time beside them."""
    for worker, waited in enumerate(work["waiting"]):
        own = [node for node in work["nodes"] if node["worker"] == worker]
        firings = sum(node["firings"] for node in own)
        fired_s = sum(node["seconds"] for node in own)
        beside_s = max(0.0, work["seconds"] - waited - fired_s)
        for node in own:
            line = lines.setdefault(_name(node), _EventLine())
            line.add(node)
            line.beside_s += beside_s * node["firings"] / firings


def _name(node: Mapping[str, Any]) -> str:
    name = _COPY.sub("", str(node["node"]))
    return f"{name} backward" if node["direction"] == "backward" else name
