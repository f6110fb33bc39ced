"""What a runtime is: it delivers events, carries out effects, waits, and decides nothing.

The contract, which one test suite checks for every runtime:

1. ``run`` returns when the feeder is exhausted and every admitted instance has finished.
2. Batches from one worker to another arrive in the order they were sent. What a firing says to the
   controller is settled before any of its batches travels on; the controller's word on finished
   instances reaches every worker before rows that were fed after it.
3. The first failure stops the run and is raised to the caller, later ones as its notes; nothing is
   left running. No wait is without a bound.
4. When nothing can move and instances are unfinished, ``StuckError`` tells who waits for what.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Final, Literal, Protocol, final

from geartrain.engine.engine import Engine
from geartrain.engine.router import Outbox
from geartrain.engine.worker import Firing
from geartrain.errors import DataError
from geartrain.ir.instance import Instance
from geartrain.optim.part import StepTaken
from geartrain.optim.share import AbstractLock, NoLock

log = logging.getLogger("geartrain.runtime")

OnBadInstance = Literal["raise", "skip"]

_END: Final = object()


class Watch(Protocol):
    """Told what happens, with the runtime's clock; never steers. Calls come one at a time."""

    def fired(self, worker: int, firing: Firing, start_s: float, end_s: float) -> None:
        """A firing is over."""

    def stepped(self, worker: int, step: StepTaken, now_s: float) -> None:
        """A part has stepped."""

    def finished(self, engine: Engine, now_s: float) -> None:
        """Instances have finished."""


@final
class Feeder:
    """Instances for one pass, pulled when there is room for them.

    Args:
        instances: Pulled one by one.
        on_bad: ``raise`` on an instance that is refused, or ``skip`` it: counted and logged.
        limit: Most instances to pull, or None.
    """

    def __init__(
        self,
        instances: Iterator[Instance],
        on_bad: OnBadInstance = "raise",
        limit: int | None = None,
    ) -> None:
        self._instances, self._on_bad = instances, on_bad
        self._left = limit
        self.taken = 0
        self.skipped = 0
        self.exhausted = False
        self.source_ended = False

    def close(self) -> None:
        """Admit nothing more."""
        self.exhausted = True

    def admit(self, engine: Engine) -> Outbox | None:
        """Admit as many as the controller wants; None when there is nothing to admit now.

        Raises:
            DataError: An instance is refused and the policy is to raise.
        """
        while not self.exhausted and (n := engine.controller.want()):
            batch = self._take(n)
            if not batch:
                continue  # the source has ended, or all of them were skipped
            try:
                return engine.controller.admit(batch)
            except DataError:
                if self._on_bad == "raise":
                    raise
                good = self._admit_singly(engine, batch)
                if good is not None:
                    return good
        return None

    def _take(self, n: int) -> list[Instance]:
        if self._left is not None:
            n = min(n, self._left)
            self._left -= n
        batch: list[Instance] = []
        for _ in range(n):
            try:
                instance = next(self._instances, _END)
            except DataError as error:
                if self._on_bad == "raise":
                    raise
                self.taken, self.skipped = self.taken + 1, self.skipped + 1
                log.warning("skipped: %s", error)
                continue
            if instance is _END:
                self.exhausted = self.source_ended = True
                break
            if not isinstance(instance, Instance):
                raise TypeError(
                    f"the data gave a {type(instance).__name__}; it gives gt.Instance objects: "
                    "pass convert=... to turn yours into them"
                )
            batch.append(instance)
        if self._left == 0:
            self.exhausted = True
        self.taken += len(batch)
        return batch

    def _admit_singly(self, engine: Engine, batch: list[Instance]) -> Outbox | None:
        merged: Outbox | None = None
        for instance in batch:
            try:
                out = engine.controller.admit([instance])
            except DataError as error:
                self.skipped += 1
                log.warning("skipped: %s", error)
                continue
            if merged is None:
                merged = out
            else:
                merged.deliveries += out.deliveries
                merged.answered += out.answered
                merged.spawned += out.spawned
        return merged


class AbstractRuntime(ABC):
    """Carries messages between the workers of an engine."""

    name: str
    workers: int
    virtual = False
    """Whether its seconds are imagined."""

    lock: Callable[[], AbstractLock] = NoLock
    """Makes a lock between its workers."""

    @abstractmethod
    def run(self, engine: Engine, feeder: Feeder, watch: Watch) -> float:
        """Feed instances until the feeder is exhausted and all have finished.

        Returns:
            Seconds that it took, by the runtime's clock.

        Raises:
            WorkerError: A node raised.
            StuckError: Nothing can move.
            KeyboardInterrupt: Ctrl-C; once: what is in flight is finished first, twice: abandoned.
        """
