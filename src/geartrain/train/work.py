"""Who did what in training: sums of firings, waiting and traffic, from one evaluation to the next.

Observer of a segment ─► PassWork ─┐
Observer of the next  ─► PassWork ─┴► Work ─► Worked, before each EpochEnded
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, final

from geartrain.engine.instrument import Link, NodeWork, Worked
from geartrain.engine.worker import Firing

Direction: TypeAlias = Literal["forward", "backward", "exchange"]

_SIZES: Final = 64  # no batch has 2^63 rows


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

    def add(self, other: Use) -> None:
        """Count those of another one, too."""
        self.seconds += other.seconds
        self.firings += other.firings
        self.rows += other.rows
        self.sizes = [a + b for a, b in zip(self.sizes, other.sizes, strict=True)]
        self.row_squares += other.row_squares
        self.row_seconds += other.row_seconds


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
        rows = firing.rows
        use.seconds += seconds
        use.firings += 1
        use.rows += rows
        use.row_squares += rows * rows
        use.row_seconds += rows * seconds
        use.sizes[(rows - 1).bit_length() + 1 if rows else 0] += 1

    def busy(self) -> dict[str, float]:
        """Seconds by node."""
        found: dict[str, float] = {}
        for (_, node, _), use in self.uses.items():
            found[node] = found.get(node, 0.0) + use.seconds
        return found


@final
class Work:
    """What workers did in the passes since the last evaluation.

    Args:
        workers: How many.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._sum, self._seconds = PassWork(), 0.0

    def add(self, work: PassWork, seconds: float) -> None:
        """Count a pass that took so long."""
        total = self._sum
        self._seconds += seconds
        for key, use in work.uses.items():
            total.uses.setdefault(key, Use()).add(use)
        for worker, waited in work.waiting.items():
            total.waiting[worker] = total.waiting.get(worker, 0.0) + waited
        for link, (messages, nbytes) in work.links.items():
            old = total.links.get(link, (0, 0))
            total.links[link] = old[0] + messages, old[1] + nbytes

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
        waiting = [total.waiting.get(w, 0.0) for w in range(self._workers)]
        links = [Link(*link, *counts) for link, counts in sorted(total.links.items())]
        return Worked(epoch, time_s, seconds, nodes, waiting, links)


def _trimmed(sizes: list[int]) -> tuple[int, ...]:
    """Without the zeros at the end."""
    used = len(sizes)
    while used and not sizes[used - 1]:
        used -= 1
    return tuple(sizes[:used])
