"""A part in many hands: what each worker has of it, and what keeps them apart.

    worker 0   look ─► firing ─► settle: sum, counts ┐
    worker 1      look ─► firing ─► settle           ├─► due? ─► one step, by whoever noticed
                                                     ┘

A worker sees the part through a share of its own. A firing looks at the weights once, at its start;
what it adds and counts is settled at its end, in one go. Two ways to look: ``snapshots``, where
nobody waits, and ``guarded``, where steps wait for firings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from geartrain.frames.message import IntArray
from geartrain.nodes.gradient import GradientSum
from geartrain.parts.ownership import Ownership
from geartrain.parts.part import PartState
from geartrain.parts.trained import StepTaken
from geartrain.sharing.locks import MakeLock
from geartrain.sharing.worker_share import WorkerShare


class SharedPart(Ownership):
    """How workers and the steps of a part keep out of each other's way.

    Args:
        lock: Makes the locks.

    Attributes:
        shares: What workers have of the part.
    """

    shares: Sequence[AbstractShare] = ()

    def __init__(self, lock: MakeLock) -> None:
        self.counts = lock()
        """Held while the part counts rows."""
        self.step_lock = lock()
        """Held by the one that steps."""
        self.progress = 0
        """Instances finished in training, as far as any worker has been told."""
        self.reserved = 0
        """What firings under way are adding, in the unit of the trigger; under the lock of
        counts."""

    @abstractmethod
    def quiet(self) -> AbstractContextManager[object]:
        """Around a whole step: while no worker may compute, if that is so."""

    def taking(self) -> AbstractContextManager[object]:
        """While sums and counts are taken from workers."""
        return self.counts

    def collect(self, into: GradientSum) -> None:
        for share in self.shares:
            share.hand_over(into)

    def forget(self) -> None:
        for share in self.shares:
            share.forget()


class AbstractShare(WorkerShare):
    """A part as one worker sees it; entered for each firing.

    What a firing adds and counts is settled at its end, in one go. Whoever completes an update by
    that takes its step at once, and whoever would complete the next one waits for it: so updates
    are as many as was asked for, however many workers add.

    Args:
        part: The part.
        shared: What keeps its shares apart.

    Attributes:
        gathers: Whether what is added is settled when so many instances of this worker have
            finished as make an update, and not before.
    """

    gathers = False
    reserves = True

    def __init__(self, part: PartState, shared: SharedPart) -> None:
        super().__init__(part)
        self._shared = shared
        self._counts: list[Callable[[], None]] = []
        self._rows = self._messages = self._instances = 0  # that are not settled
        self._reserved = 0
        self._taken: StepTaken | None = None

    @abstractmethod
    def _hand_in(self) -> None:
        """Add the firing's gradient to what has been settled."""

    @abstractmethod
    def hand_over(self, into: GradientSum) -> None:
        """Add what has been settled to a sum."""

    def forget(self) -> None:
        """Drop what firings have added and not settled; none is under way."""
        self.gradient.forget()
        self._counts.clear()
        self._rows = self._messages = self._instances = self._reserved = 0
        self._shared.reserved = 0
        self._taken = None

    @property
    def open(self) -> bool:
        return self._part.open

    @property
    def outstanding(self) -> int:
        return self._part.outstanding

    @property
    def once(self) -> bool:  # type: ignore[override]
        return self._part.once

    @property
    def lacking(self) -> int | None:
        """As of the part, less what firings under way are adding; where nothing is left of that,
        the next update begins."""
        lacking = self._part.lacking
        if lacking is None:
            return None
        left = lacking - self._shared.reserved
        return left if left > 0 else self.trigger.n

    def in_cohorts(
        self,
        ahead: Callable[[int], int] | None,
        updates: Callable[[IntArray], IntArray | None] | None,
    ) -> None:
        # Each worker has cohorts of its own, and none waits for another.
        self.gathers = ahead is not None and self.rules.max_staleness is None

    def reserve(self, units: int) -> None:
        with self._shared.counts:
            self._reserved += units
            self._shared.reserved += units

    def heard(self, progress: int) -> None:
        self._shared.progress = max(progress, self._shared.progress)

    def finished(self, instances: int) -> None:
        self._instances += instances
        if not self.gathers or self._instances == self.trigger.n:
            self._settle()

    def rest(self) -> StepTaken | None:
        """Nothing is in flight: settle what is left; a step that falls due by it."""
        self._settle()
        taken, self._taken = self._taken, None
        return taken

    def received(self, rows: int, versions: IntArray, lengths: IntArray | None = None) -> None:
        self._add(rows, versions.size, lambda: self._part.received(rows, versions, lengths))

    def answered(self, rows: int, messages: int) -> None:
        seen = self.version
        self._add(rows, messages, lambda: self._part.answered(rows, messages, seen))

    def dropped(self, versions: IntArray) -> None:
        self._add(0, versions.size, lambda: self._part.dropped(versions))

    def _add(self, rows: int, messages: int, count: Callable[[], None]) -> None:
        self._rows += rows
        self._messages += messages
        self._counts.append(count)

    def _end_firing(self) -> None:
        """Settle what a firing has added and counted; no lock is held."""
        if not self.gathers and (self._counts or self._reserved):
            self._settle()

    def _settle(self) -> None:
        shared, part = self._shared, self._part
        added = self._rows, self._messages, self._instances
        with shared.counts:
            if not any(added) or part.holding or not part.counting.completes(*added):
                self._count()
                return
        with shared.step_lock:
            with shared.counts:
                self._count()
            self._taken = self._step_if_due()

    def _count(self) -> None:
        self._shared.reserved -= self._reserved
        if self._rows or self._messages:
            self._hand_in()
        for count in self._counts:
            count()
        self._part.finished(self._instances)
        self._counts.clear()
        self._rows = self._messages = self._instances = self._reserved = 0

    def _step_if_due(self) -> StepTaken | None:
        with self._shared.quiet():
            return self._part.step_if_due(self._shared.progress)

    def note_holding(self) -> bool | None:
        return None

    def step_if_due(self, progress: int) -> StepTaken | None:
        """The step that has been taken since the last call, or one that has been held till now."""
        self.heard(progress)
        taken, self._taken = self._taken, None
        # Another worker that steps just now will do; what is left falls due with the next rows.
        if taken or not self._part.due() or not self._shared.step_lock.acquire(blocking=False):
            return taken
        try:
            return self._step_if_due()
        finally:
            self._shared.step_lock.release()

    def step(self, progress: int) -> StepTaken | None:
        with self._shared.step_lock, self._shared.quiet():
            return self._part.step(progress)
