"""Turns at the cores, where workers on which instances live wholly are more than there are cores.

    core 0   worker 0 ######            ######
             worker 2       ######            ######     each until few of its rows are under way
             worker 4             ######            ##

The system lets a worker go in the middle of a firing, as often as every few milliseconds: others
then have all caches, and all rows that it has under way grow older by their steps. So the workers
of a core take turns, each of many firings. A turn ends where few rows that have seen weights wait
for their gradients, so that all workers together have about as many under way as there are where
each has a core.

Where workers hear of steps by letters, these would grow older while their receivers wait, so there
are no turns. Who waits in firings, for a disk or another host, would keep a core that it does not
use, and goes without.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Final, final

from geartrain.engine.worker import WorkerState
from geartrain.runtime.processes.pace import CoreClock
from geartrain.sharing.locks import AbstractLock

SOON_S: Final = 0.02  # of a core: a turn is over if nothing is under way
LATE_S: Final = 0.2  # whatever is under way
_FEW: Final = 8  # more than so many waits in a turn are no chance
_LOCKS: Final = 1 << 40  # numbers of locks from here on are of cores, others of parts


@final
class CoreTurns:
    """Of one worker in one pass.

    Args:
        lock: Gives the lock of a number, which all workers have; None: there are no turns.
        state: Of the worker.
        workers: How many there are, with a kernel thread each ...
        cores: ... on so many.
        clock: Of its thread.
    """

    def __init__(
        self,
        lock: Callable[[int], AbstractLock] | None,
        state: WorkerState,
        workers: int,
        cores: int,
        clock: CoreClock,
    ) -> None:
        self._clock, self._parts = clock, [*state.parts.values()]
        alone = all(part.steppers > 1 for part in self._parts)
        self._steppers = [part.steppers for part in self._parts]
        self._has, self._takes = False, lock is not None and alone and workers > cores
        self._since_s = self._began_s = 0.0
        self._firings = self._waited = self._most = 0
        if lock is not None and self._takes:
            # Who has the core and wants it again waits behind who has the queue.
            core = _LOCKS + 2 * (state.index % cores)
            self._core, self._queue = lock(core), lock(core + 1)
            # So many are at work at a time: what is under way elsewhere sees few steps meanwhile,
            # and a firing may take as many updates together as where there are no more workers.
            for part in self._parts:
                part.steppers = cores

    def take(self) -> None:
        """Something is about to be fired: wait for a turn, if there is none."""
        if not self._takes or self._has:
            return
        with self._queue:
            self._core.acquire()
        self._has = True
        self._begin()

    def _begin(self) -> None:
        self._since_s, self._began_s = self._clock.seconds(), time.perf_counter()
        self._firings, self._waited, self._most = 0, _waits(), 0

    def leave(self) -> None:
        """There is nothing to fire."""
        if self._has:
            self._core.release()
            self._has = False

    def fired(self) -> None:
        """Something has been: a turn ends that is over, if another worker waits for it."""
        self._firings += 1
        wall_s = time.perf_counter() - self._began_s
        if not self._has or wall_s < SOON_S:
            return
        if self._waits_in_firings(wall_s):
            self._takes = False
            for part, steppers in zip(self._parts, self._steppers, strict=True):
                part.steppers = steppers
            self.leave()
        elif self._clock.reached(self._over):
            if self._queue.acquire(blocking=False):  # nobody waits
                self._queue.release()
                self._begin()
            else:
                self.leave()

    def _waits_in_firings(self, wall_s: float) -> bool:
        """Half of the time, and in more than half of them; a few waits are for locks."""
        if 2 * (_waits() - self._waited) <= self._firings + _FEW:
            return False
        return 2 * (self._clock.seconds() - self._since_s) < wall_s

    def _over(self, now_s: float) -> bool:
        """In its second half the more of what was under way may be so still, the later it is."""
        had_s = now_s - self._since_s
        if not SOON_S <= had_s < LATE_S:
            return had_s >= LATE_S
        under_way = sum(part.outstanding for part in self._parts)
        self._most = max(self._most, under_way)
        return under_way <= max(0.0, 2 * had_s / LATE_S - 1) * self._most


def _waits() -> int:
    """How often this thread has given up its core by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
