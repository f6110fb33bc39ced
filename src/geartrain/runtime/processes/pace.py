"""When a worker tells the parent what it has done since it last did.

the parent waits for it    at once, or nearly: answers make room for more instances
there is a stock           when so many have finished that the parent may send another lot
nobody waits               as often as progress is told, or when it gets long

A report has a cost of its own on both sides, about that of a small firing, and the program takes a
core from a worker to read it. What is told by the clock, and waited for by nobody, is told so often
by all workers together; and where instances live wholly on a worker by a clock of cores: where
these are shared, with other workers or other programs, a worker does less between two moments of
any other. Elsewhere what has no answers in it is waited for by nobody.

The system ends a turn at a core where that clock is read, if the turn is over; who does not ask
keeps the core until the system's next tick. Read at every firing it more than doubles how often
workers change places, each time with cold caches. So it is read where everybody's clock, by which a
worker has had at least as much time, says that something may be due.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

from geartrain.engine.stock import AbstractStock

SOON_S: Final = 0.002
SLOW_S: Final = 0.1
_ALL_S: Final = 0.1  # between two words of progress of all workers together, where they are many
_MOST_S: Final = 0.8
MOST_FIRINGS: Final = 256


_AT_LEAST: Final = 1 / 8


@final
class CoreClock:
    """Seconds of a core that the thread which made it has had since.

    Of any other clock's they are an eighth or more: who waits in a firing is to be heard, too.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._core_s, self._wall_s = time.thread_time(), time.perf_counter()

    def seconds(self) -> float:
        """They; never fewer than before."""
        core_s, wall_s = time.thread_time(), time.perf_counter()
        self._seconds += max(core_s - self._core_s, _AT_LEAST * (wall_s - self._wall_s))
        self._core_s, self._wall_s = core_s, wall_s
        return self._seconds

    def reached(self, due: Callable[[float], bool]) -> bool:
        """Whether something is due after so many seconds.

        Args:
            due: Whether it is after those that it is given; if so, it is after more, too.
        """
        at_most = self._seconds + time.perf_counter() - self._wall_s
        return due(at_most) and due(self.seconds())


def _by_everybodys_clock(due: Callable[[float], bool]) -> bool:
    return due(time.perf_counter())


@final
class Pace:
    """Of one worker in one pass; seconds are those of ``now``.

    Args:
        stock: What the worker has in stock, if it is given instances ahead of time.
        workers: How many there are.

    Attributes:
        core: How long its thread has had a core.
        now: By that, where nobody waits for what it does, else by everybody's clock.
        reached: Whether something is due now, given whether it is at a time.
        progress_s: Between two words on progress.
    """

    def __init__(self, stock: AbstractStock | None, workers: int = 1) -> None:
        self._stock = stock
        self._told_s = 0.0
        self.progress_s = min(_MOST_S, max(SLOW_S, _ALL_S * workers))
        # Elsewhere others may wait for answers that are told of by the clock alone.
        whole = stock is not None and stock.whole
        self._answers_s = self.progress_s if whole else SLOW_S
        self.core = CoreClock()
        self.now = self.core.seconds if whole else time.perf_counter
        self.reached = self.core.reached if whole else _by_everybodys_clock

    def due(self, now_s: float, *, matters: bool, firings: int) -> bool:
        """Whether the parent is to be told now.

        Args:
            now_s: The time.
            matters: Whether it counts by what is told.
            firings: That are told of.
        """
        slow_s = self._answers_s if matters else self.progress_s
        if firings >= MOST_FIRINGS or now_s - self._told_s > slow_s:
            return True
        if self._stock is not None:
            return self._stock.has_room
        return matters and now_s - self._told_s > SOON_S

    def told(self, now_s: float) -> None:
        """It is being told."""
        self._told_s = now_s
        if self._stock is not None:
            self._stock.told()
