"""A trace, read once and summed up: who was busy with what, in which batches, and the last bit.

    trace.json ─► Timeline   busy seconds by worker and node, firings by batch size, and the
                             firings of the last moments of training, for a Gantt chart

Memory is bounded: of a long trace only the last few thousand firings are kept whole.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from geartrain.errors import DataError
from geartrain.observe.trace import TRACE_FULL, read_trace
from geartrain.schema import MOST

_LONGEST_S: Final = 1e12
_WINDOW_S: Final = 2.0
_RECENT: Final = (60, 3000)  # firings to show at least, if there are; and at most


@dataclass(frozen=True, slots=True)
class FiringSpan:
    """One batch at one node; seconds since the run began."""

    worker: int
    node: str
    direction: str
    rows: int
    start_s: float
    end_s: float


@final
@dataclass(slots=True)
class NodeUse:
    """What one node did over the whole trace."""

    firings: int = 0
    rows: int = 0
    busy_s: float = 0.0


@final
@dataclass(slots=True)
class Timeline:
    """The sums over a trace.

    ``batch_sizes[direction][k]`` counts firings with more than 2^(k-1) and at most 2^k rows; k is
    -1 for firings without rows.
    """

    workers: set[int] = field(default_factory=set)
    first_s: float = float("inf")
    last_s: float = float("-inf")
    busy_s: dict[tuple[int, str], float] = field(default_factory=dict)  # by worker and node
    nodes: dict[str, NodeUse] = field(default_factory=dict)
    batch_sizes: dict[str, Counter[int]] = field(default_factory=dict)
    recent: list[FiringSpan] = field(default_factory=list)
    is_cut: bool = False  # the trace reached its limit of events

    @property
    def span_s(self) -> float:
        """From the first start to the last end."""
        return max(0.0, self.last_s - self.first_s)

    def nodes_by_use(self) -> list[str]:
        """Node names, the busiest first."""
        return sorted(self.nodes, key=lambda name: (-self.nodes[name].busy_s, name))


def read_timeline(path: Path) -> Timeline:
    """Sum up a trace that ``PerfettoTrace`` wrote.

    Raises:
        DataError: The file is not such a trace.
    """
    timeline = Timeline()
    # Validation comes last and is forward only: the window ends with the last backward instead.
    trained: deque[FiringSpan] = deque(maxlen=_RECENT[1])
    since: deque[FiringSpan] = deque(maxlen=_RECENT[1])
    for event in read_trace(path):
        try:
            firing = _taken(timeline, event)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"the event {str(event)[:120]} lacks what PerfettoTrace writes ({error!r}); "
                "delete the trace, or record it anew",
                path=path,
            ) from error
        if firing is None:
            continue
        since.append(firing)
        if firing.direction == "backward":
            trained.extend(since)
            since.clear()
    timeline.recent = _last_moments(trained or since)
    return timeline


def batch_size_label(k: int) -> str:
    """The rows that bin k of ``Timeline.batch_sizes`` stands for."""
    if k <= 1:
        return str(k + 1)
    return f"{2 ** (k - 1) + 1}\N{EN DASH}{2**k}"


def _taken(timeline: Timeline, event: dict[str, Any]) -> FiringSpan | None:
    """Add the event to the sums; the firing, if it is one."""
    kind = event["ph"]
    if kind == "M" and event["name"] == "thread_name":
        timeline.workers.add(_count(event["tid"]) - 1)
    if kind == "i" and event["name"] == TRACE_FULL:
        timeline.is_cut = True
    if kind != "X":
        return None
    args, start_s = event["args"], _seconds(event["ts"])
    firing = FiringSpan(
        worker=_count(event["tid"]) - 1,
        node=str(args["node"]),
        direction=str(args["direction"]),
        rows=_count(args["rows"]),
        start_s=start_s,
        end_s=start_s + _seconds(event["dur"]),
    )
    _add(timeline, firing)
    return firing


def _seconds(microseconds: float) -> float:
    """Raises:
    ValueError: It is no time that a run has.
    """
    found = float(microseconds) / 1e6
    if not 0 <= found <= _LONGEST_S:
        raise ValueError(f"{found:g} seconds")
    return found


def _count(value: int) -> int:
    """Raises:
    ValueError: It is none.
    """
    found = int(value)
    if not 0 <= found <= MOST:
        raise ValueError("a count that is none")
    return found


def _add(timeline: Timeline, firing: FiringSpan) -> None:
    spent = firing.end_s - firing.start_s
    timeline.workers.add(firing.worker)
    timeline.first_s = min(timeline.first_s, firing.start_s)
    timeline.last_s = max(timeline.last_s, firing.end_s)
    place = (firing.worker, firing.node)
    timeline.busy_s[place] = timeline.busy_s.get(place, 0.0) + spent
    use = timeline.nodes.setdefault(firing.node, NodeUse())
    use.firings += 1
    use.rows += firing.rows
    use.busy_s += spent
    k = (firing.rows - 1).bit_length() if firing.rows > 0 else -1
    timeline.batch_sizes.setdefault(firing.direction, Counter())[k] += 1


def _last_moments(firings: Iterable[FiringSpan]) -> list[FiringSpan]:
    ordered = sorted(firings, key=lambda firing: firing.end_s)
    if not ordered:
        return []
    begin = ordered[-1].end_s - _WINDOW_S
    inside = sum(firing.end_s >= begin for firing in ordered)
    return ordered[-max(inside, _RECENT[0]) :]
