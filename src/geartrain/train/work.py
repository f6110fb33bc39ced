"""Who did what in training: sums of firings, waiting and traffic, from one evaluation to the next.

Observer of a segment ─► PassWork ─┐
Observer of the next  ─► PassWork ─┴► Work ─► Worked, before each EpochEnded
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, final

from geartrain.engine.costs import NOTHING, NodeCost
from geartrain.engine.firing import Firing
from geartrain.engine.instrument import Link, NodeWork, Worked

Direction: TypeAlias = Literal["forward", "backward", "exchange"]

_SIZES: Final = 64  # no batch has 2^63 rows
_FEW: Final = 4  # firings, of which none stands for the others


@final
@dataclass(slots=True)
class Use:
    """Firings of one node on one worker, one way."""

    seconds: float = 0.0
    firings: int = 0
    rows: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * _SIZES)
    row_squares: int = 0
    row_seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)
    """Seconds and rows of the slowest firing."""
    nbytes: int = 0

    def fired(self, seconds: float, rows: int, nbytes: int = 0) -> None:
        """Count a firing."""
        self.seconds += seconds
        self.firings += 1
        self.rows += rows
        self.nbytes += nbytes
        self.row_squares += rows * rows
        self.row_seconds += rows * seconds
        self.sizes[(rows - 1).bit_length() + 1 if rows else 0] += 1
        if seconds > self.slowest[0]:
            self.slowest = seconds, rows

    @property
    def usual_s(self) -> float:
        """Seconds, as if the slowest firing had cost what others cost by their rows.

        The first firing of a node makes what later ones find, and a worker may be kept from its
        core in any: of few firings one such would decide where a part lives.
        """
        slow, rows = self.slowest
        if self.firings < _FEW or self.rows <= rows:
            return self.seconds
        return (self.seconds - slow) * self.rows / (self.rows - rows)

    def add(self, other: Use) -> None:
        """Count those of another one, too."""
        self.seconds += other.seconds
        self.firings += other.firings
        self.rows += other.rows
        self.nbytes += other.nbytes
        self.sizes = [a + b for a, b in zip(self.sizes, other.sizes, strict=True)]
        self.row_squares += other.row_squares
        self.row_seconds += other.row_seconds
        self.slowest = max(self.slowest, other.slowest)


@final
class PassWork:
    """What workers did in one pass."""

    def __init__(self) -> None:
        self.uses: dict[tuple[int, str, Direction], Use] = {}
        self.waiting: dict[int, float] = {}
        self.links: dict[tuple[int, int], tuple[int, int]] = {}

    def fired(self, worker: int, firing: Firing, seconds: float) -> None:
        """Count a firing."""
        direction: Direction = "forward" if firing.forward else "backward"
        if firing.taken:
            direction = "exchange"
        key = worker, firing.node, direction
        use = self.uses.get(key)
        if use is None:
            use = self.uses[key] = Use()
        use.fired(seconds, firing.rows, firing.nbytes)

    def add(self, other: PassWork) -> None:
        """Count what was done in another one, too."""
        for key, use in other.uses.items():
            mine = self.uses.get(key)
            if mine is None:
                self.uses[key] = replace(use, sizes=[*use.sizes])
            else:
                mine.add(use)
        for worker, waited in other.waiting.items():
            self.waiting[worker] = self.waiting.get(worker, 0.0) + waited
        for link, (messages, nbytes) in other.links.items():
            old = self.links.get(link, (0, 0))
            self.links[link] = old[0] + messages, old[1] + nbytes

    def costs(self) -> dict[str, NodeCost]:
        """What each node has cost."""
        found: dict[str, NodeCost] = {}
        for (_, node, direction), use in self.uses.items():
            forward, backward = direction == "forward", direction == "backward"
            cost = NodeCost(
                use.usual_s,
                use.firings * forward,
                use.firings * backward,
                use.nbytes * forward,
                use.nbytes * backward,
            )
            found[node] = found.get(node, NOTHING) + cost
        return found


@final
class Work:
    """What workers did in the passes since the last evaluation.

    Args:
        workers: How many; it may change.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._sum, self._seconds = PassWork(), 0.0

    def add(self, work: PassWork, seconds: float) -> None:
        """Count a pass that took so long."""
        self._seconds += seconds
        self._sum.add(work)

    def take(self, epoch: float, time_s: float) -> Worked:
        """The event, after which it counts anew.

        Args:
            epoch, time_s: Of the event.
        """
        total, seconds = self._sum, self._seconds
        self._sum, self._seconds = PassWork(), 0.0
        nodes = [
            NodeWork(
                *key,
                use.firings,
                use.rows,
                use.seconds,
                _trimmed(use.sizes),
                use.row_squares,
                use.row_seconds,
            )
            for key, use in sorted(total.uses.items())
        ]
        waiting = [total.waiting.get(w, 0.0) for w in range(self.workers)]
        links = [Link(*link, *counts) for link, counts in sorted(total.links.items())]
        return Worked(epoch, time_s, seconds, nodes, waiting, links)


def _trimmed(sizes: list[int]) -> tuple[int, ...]:
    """Without the zeros at the end."""
    used = len(sizes)
    while used and not sizes[used - 1]:
        used -= 1
    return tuple(sizes[:used])
