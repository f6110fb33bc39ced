"""Instances that wait at a worker until there is room, so that it waits for nobody.

    controller ── lots ──► stock ── when others have finished ──► the worker's queues
        ▲                                                              │
        └────────── what was answered, by and by ──────────────────────┘

Where an instance lives wholly on one worker, that worker sees all of its answers. So it can tell by
itself that an instance has finished and begin the next: the controller's own count may come later,
and its messages may be few.

Where it lives on several, a worker sees the answers to the rows that were fed there, and by these
it begins rows of another one. Who is fed nothing needs no stock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np

from geartrain.engine.firing import Finished
from geartrain.engine.router import Delivery, Outbox
from geartrain.engine.waves import Waves
from geartrain.frames.frame import Arena
from geartrain.frames.message import INSTANCE, Forward, IntArray, join_arrays
from geartrain.sharing.assignment import lot_of


@final
@dataclass(slots=True, eq=False)
class Lot:
    """Instances that were admitted together, or their rows for one worker.

    Args:
        slots: int64 ``(n,)``; their frames are in the worker's arena.
        open: int64 ``(n,)``, answers that each waits for, of rows that are fed to the worker; 0: it
            has finished as it was admitted, or has no rows there.
        elsewhere: Instances finished in training, as far as the controller knows; those of this
            worker are left out, if instances live on one wholly.
        deliveries: Their rows.
    """

    slots: IntArray
    open: IntArray
    elsewhere: int
    deliveries: Sequence[Delivery]

    def __len__(self) -> int:
        """Those of them that have not finished."""
        return int(np.count_nonzero(self.open))

    def split(self, n: int) -> tuple[Lot, Lot]:
        """The first of them, so that n have not finished, and the others."""
        slots, left = self.slots, self.open
        many = n
        if not left.all():
            many = int(np.searchsorted(np.cumsum(left > 0), n, side="right"))
        now: list[Delivery] = []
        later: list[Delivery] = []
        for delivery in self.deliveries:
            batch = delivery.batch
            assert isinstance(batch, Forward)  # rows that were fed
            for some, rows in zip((now, later), self._apart(batch, many), strict=True):
                if len(rows):
                    some.append(Delivery(delivery.node, delivery.port, rows))
        return (
            Lot(slots[:many], left[:many], self.elsewhere, now),
            Lot(slots[many:], left[many:], self.elsewhere, later),
        )

    def _apart(self, batch: Forward, many: int) -> tuple[Forward, Forward]:
        """The rows of the first so many instances, and the others; cut where they come one after
        the other."""
        slots, of = self.slots, batch.state[INSTANCE]
        if of.size == slots.size and (of == slots).all():  # one of each
            return batch.cut(many)
        here = np.zeros(int(slots.max()) + 1, np.bool_)
        here[slots[:many]] = True
        first = here[of]
        n = int(np.count_nonzero(first))
        if first[:n].all():
            return batch.cut(n)
        return batch.take(np.flatnonzero(first)), batch.take(np.flatnonzero(~first))


def waits_for(deliveries: Sequence[Delivery], slots: IntArray) -> IntArray:
    """How many answers to rows that are fed each of the instances in these slots waits for."""
    counts = np.zeros(int(slots.max(initial=-1)) + 1, np.int64)
    for delivery in deliveries:
        assert isinstance(delivery.batch, Forward)  # rows that are fed
        counts += np.bincount(delivery.batch.state[INSTANCE], minlength=counts.size)
    return counts[slots]


_SHARE: Final = 16
"""Room for one in so many of those in flight is awaited: to begin has a cost of its own."""


class AbstractStock(ABC):
    """What a worker has been given and has not begun, and what is in flight there.

    Args:
        arena: Has the frames.
        trained: Instances finished in training before this pass.
        limit: Instances finished in training to how many may be in flight.
        waves: How many begin together, and they do when there is nothing else to do; None: whenever
            there is room.

    Attributes:
        active: Instances in flight, of whose rows some were fed here.
    """

    whole: ClassVar[bool]
    """Whether instances live here wholly: then nobody else waits for what is fired here."""

    def __init__(
        self,
        arena: Arena,
        trained: int,
        limit: Callable[[int], int],
        waves: Waves | None = None,
    ) -> None:
        self._arena, self._limit, self._waves = arena, limit, waves
        self._elsewhere = trained
        self._untold = 0  # finished here, and the controller has not been told
        self._lots: list[Lot] = []
        self._lot = 1  # instances of the last one
        self._emptied = False  # since the controller was told: the last lot has been begun
        self._open = np.zeros(64, np.int64)  # answers that are waited for, by slot
        self.active = 0

    @property
    def waiting(self) -> int:
        """Lots that have not been begun."""
        return len(self._lots)

    @property
    @abstractmethod
    def trained(self) -> int:
        """Instances finished in training, as far as is known here."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether so many have finished since the controller was told that it may send a lot.

        What it is told sooner has it do nothing.
        """

    @abstractmethod
    def settle(self, out: Outbox) -> Finished | None:
        """Count what a firing says of instances; those that have finished by it, if any have.

        What was answered too often is for the controller to say, who counts as well.
        """

    def told(self) -> None:
        """The controller is being told of all that have finished."""
        self._untold, self._emptied = 0, False

    def put(self, lot: Lot) -> None:
        """A lot has come."""
        self._elsewhere = max(self._elsewhere, lot.elsewhere)
        self._lots.append(lot)
        self._lot = lot.slots.size

    def begin(self, *, idle: bool = False) -> list[Delivery]:
        """The rows of those that may begin now.

        Args:
            idle: Whether there is nothing else to do.
        """
        found: list[Delivery] = []
        limit = self._limit(self.trained)
        if self._waves is not None:
            if not idle:
                return found
            limit = self.active + self._waves.next(limit - self.active)
        while self._lots:
            room = limit - self.active
            if len(self._lots[0]) > room:
                if room < max(1, limit // _SHARE):
                    break
                self._lots[0:1] = self._lots[0].split(room)
            found += self._begin(self._lots.pop(0))
            self._emptied = not self._lots
        return found

    def _begin(self, lot: Lot) -> Sequence[Delivery]:
        top = int(lot.slots.max(initial=0))
        if top >= self._open.size:
            self._open = np.concatenate([self._open, np.zeros(top, np.int64)])
        self._open[lot.slots] = lot.open
        self.active += len(lot)
        if self._waves is not None:
            self._waves.begin(lot.slots.size)
        return lot.deliveries

    def _in_flight(self, slots: IntArray) -> IntArray:
        """Those of slots whose answers are counted here."""
        return slots

    def _settled(self, out: Outbox) -> IntArray | None:
        """Slots of those all of whose rows have been answered now."""
        for slots in out.spawned:
            np.add.at(self._open, self._in_flight(slots), 1)
        finished: list[IntArray] = []
        for slots in out.answered:
            counts = np.bincount(self._in_flight(slots))
            touched = np.flatnonzero(counts)
            before = self._open[touched]
            self._open[touched] = now = before - counts[touched]
            done = touched[(before > 0) & (now <= 0)]
            if done.size:
                finished.append(done)
        if not finished:
            return None
        slots = join_arrays(finished)
        self.active -= slots.size
        self._untold += slots.size
        return slots


@final
class Stock(AbstractStock):
    """Of a worker on which instances live wholly: it knows when they have finished.

    Args:
        arena, trained, limit, waves: As for any.
        copy: Of the graph, that lives on the worker.
    """

    whole = True

    def __init__(
        self,
        arena: Arena,
        copy: int,
        trained: int,
        limit: Callable[[int], int],
        waves: Waves | None = None,
    ) -> None:
        super().__init__(arena, trained, limit, waves)
        self._copy, self._finished = copy, 0

    @property
    def trained(self) -> int:
        return self._elsewhere + self._finished

    @property
    def has_room(self) -> bool:
        # A lot that came when there was none lasts until it has finished: the next is to come while
        # what is in flight is left to do.
        lot = max(self._lot, lot_of(self._limit(self.trained)))
        return self._untold >= (1 if self._emptied else lot)

    def settle(self, out: Outbox) -> Finished | None:
        slots = self._settled(out)
        if slots is None:
            return None
        turns = self._arena.turn[slots]
        self._arena.forget(slots)
        self._finished += slots.size
        return Finished(turns, self.trained, self._copy)


@final
class PartialStock(AbstractStock):
    """Of a worker to which some rows of instances are fed: others compute with them, too.

    It begins another instance when all rows that were fed here for one have been answered, or when
    the controller says that it has finished, which it says of all.
    """

    whole = False

    @property
    def trained(self) -> int:
        return self._elsewhere

    @property
    def has_room(self) -> bool:
        return self._untold > 0 and (self._untold >= self._lot or not self._lots)

    def settle(self, out: Outbox) -> Finished | None:
        self._settled(out)
        return None

    def _in_flight(self, slots: IntArray) -> IntArray:
        # Rows of instances are answered here, too, that others were fed, or that are over.
        here = slots[slots < self._open.size]
        return here[self._open[here] > 0]

    def over(self, slots: IntArray, trained: int) -> None:
        """Instances have finished, wherever they were answered.

        Args:
            slots: int64, where they are.
            trained: All that have finished in training so far.
        """
        self._elsewhere = max(self._elsewhere, trained)
        here = self._in_flight(slots)
        self._open[here] = 0
        self.active -= here.size
