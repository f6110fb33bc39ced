"""Which copy of the graph gets which instance, and what number it has there.

Together    one copy; numbers go on through the run
Balanced    so many copies; who has the fewest in flight gets the next
Stocked     so many copies, each with a limit; who has the fewest gets all that come together
PerCopy     whoever feeds names the copy; each has a limit and numbers of its own
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final, final

import numpy as np

from geartrain.frames.frame import Arena
from geartrain.frames.message import IntArray


class AbstractAssignment(ABC):
    """Instances in flight and their copies.

    Args:
        limited: Limits on instances in flight hold for each of so many copies by itself; 1: for all
            together.

    Attributes:
        active: int64 ``(limited,)``, instances in flight.
        open: bool ``(limited,)``, whether any may be admitted.
    """

    def __init__(self, limited: int = 1) -> None:
        self.active = np.zeros(limited, np.int64)
        self.open = np.ones(limited, np.bool_)

    @abstractmethod
    def begin(self, trained: int, *, training: bool) -> None:
        """A pass begins.

        Numbers of instances start from 0, but in training they go on: an instance is number
        ``trained`` of the run, so that every part knows the same number for it.

        Args:
            trained: Instances finished in training so far.
            training: Whether it is for training.
        """

    @abstractmethod
    def first_turn(self, copy: int, trained: int) -> int:
        """The turn of the next instance that comes by a copy."""

    def room(self, limit: int) -> int:
        """How many more may be admitted together now, where so many may be in flight."""
        return limit - int(self.active[0])

    @abstractmethod
    def number(self, copy: int) -> int:
        """That of the next instance, where whoever feeds names this copy (0 if it names none)."""

    @abstractmethod
    def admit(self, arena: Arena, slots: IntArray, copy: int) -> None:
        """Instances have got slots: write into the frames which copies they go to."""

    @abstractmethod
    def finish(self, arena: Arena, slots: IntArray) -> IntArray:
        """Instances have finished; returns their copies."""

    def drop(self, arena: Arena, slots: IntArray) -> None:
        """Instances are lost; where each copy is limited by itself."""
        self.active -= np.bincount(arena.copy[slots], minlength=self.active.size)


@final
class Together(AbstractAssignment):
    """One copy of the graph has all instances.

    Attributes:
        ahead: How many more than may be in flight are given to the workers, where they wait until
            there is room.
        lot: So many of them go together.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = 0
        self.ahead, self.lot = 0, 1

    def room(self, limit: int) -> int:
        room = limit + self.ahead - int(self.active[0])
        return room if room >= self.lot else 0

    def begin(self, trained: int, *, training: bool) -> None:
        self._next = trained if training else 0
        self.ahead, self.lot = 0, 1

    def first_turn(self, copy: int, trained: int) -> int:
        return trained

    def number(self, copy: int) -> int:
        return self._next

    def admit(self, arena: Arena, slots: IntArray, copy: int) -> None:
        self._next += slots.size
        self.active += slots.size

    def finish(self, arena: Arena, slots: IntArray) -> IntArray:
        self.active -= slots.size
        return np.zeros(slots.size, np.int64)


class _TurnsByCopy(AbstractAssignment):
    """Instances are numbered through all copies, their turns by copy, from 0 in each pass.

    Args:
        copies: How many.
        limited: As for ``AbstractAssignment``.
    """

    def __init__(self, copies: int, limited: int = 1) -> None:
        super().__init__(limited)
        self._next = 0
        self._turns = np.zeros(copies, np.int64)

    def begin(self, trained: int, *, training: bool) -> None:
        self._next = trained if training else 0
        self._turns[:] = 0

    def first_turn(self, copy: int, trained: int) -> int:
        return 0

    def number(self, copy: int) -> int:
        return self._next


@final
class Balanced(_TurnsByCopy):
    """All copies have about equally many in flight; turns are counted by copy, from 0 in each pass.

    A copy that finishes sooner than others gets more; none is without work while others queue.

    Args:
        copies: How many.
    """

    def __init__(self, copies: int) -> None:
        super().__init__(copies)
        self._active = np.zeros(copies, np.int64)

    def admit(self, arena: Arena, slots: IntArray, copy: int) -> None:
        self._next += slots.size
        self.active += slots.size
        n, active = slots.size, np.sort(self._active)
        reached = np.arange(1, active.size + 1)
        level = -(-(n + active.cumsum()) // reached)  # if they go to the so many emptiest copies
        height = int(level.min())
        begin = 0
        for k in np.argsort(self._active, kind="stable").tolist():
            end = min(n, begin + max(0, height - int(self._active[k])))
            arena.copy[slots[begin:end]] = k
            turn = int(self._turns[k])
            arena.turn[slots[begin:end]] = np.arange(turn, turn + end - begin)
            self._turns[k] += end - begin
            self._active[k] += end - begin
            begin = end

    def finish(self, arena: Arena, slots: IntArray) -> IntArray:
        self.active -= slots.size
        owners = arena.copy[slots]
        self._active -= np.bincount(owners, minlength=self._active.size)
        return owners


@final
class Stocked(_TurnsByCopy):
    """Each copy has a limit of its own; all that is admitted together goes to one of them.

    It is the one that has the fewest, so none is without work while others queue. Turns are counted
    by copy, from 0 in each pass.

    Args:
        copies: How many.

    Attributes:
        ahead: How many more than may be in flight a copy may be given, as a share of them: they
            wait there until there is room, so that it waits for nobody.
        lot: So many go together at least, and two such lots may wait.
        update: Lots are of whole updates, of so many instances each, where one has room: a copy
            that has a part of one begins that by itself.
    """

    def __init__(self, copies: int) -> None:
        super().__init__(copies, copies)
        self.ahead, self.lot, self.update = 0.0, 0, 1

    def begin(self, trained: int, *, training: bool) -> None:
        super().begin(trained, training=training)
        self.lot = 0

    def room(self, limit: int) -> int:
        ahead = max(math.ceil(limit * self.ahead), 2 * self.lot)
        room = limit + ahead - int(self.active.min())
        some = max(lot_of(limit), self.lot)
        if self.update <= limit:
            some += -some % self.update
        return some if room >= some else 0

    def admit(self, arena: Arena, slots: IntArray, copy: int) -> None:
        least = int(self.active.argmin())
        self._next += slots.size
        self.active[least] += slots.size
        arena.copy[slots] = least
        turn = int(self._turns[least])
        arena.turn[slots] = np.arange(turn, turn + slots.size)
        self._turns[least] += slots.size

    def finish(self, arena: Arena, slots: IntArray) -> IntArray:
        owners = arena.copy[slots]
        self.active -= np.bincount(owners, minlength=self.active.size)
        return owners


def lot_of(limit: int) -> int:
    """Instances that are given to a copy together; a lot has a cost of its own, whatever is in it.

    Args:
        limit: Instances in flight, at most.
    """
    return max(1, limit // _LOTS)


_LOTS: Final = 2  # of instances in flight


@final
class PerCopy(AbstractAssignment):
    """Each copy has instances, limits and numbers of its own, as it sees no instance of another.

    Args:
        trained: Instances that each copy has finished in training; counted on here.
    """

    def __init__(self, trained: list[int]) -> None:
        super().__init__(len(trained))
        self._trained, self._training = trained, True
        self._next = np.zeros(len(trained), np.int64)

    def begin(self, trained: int, *, training: bool) -> None:
        self._training = training
        self._next[:] = self._trained if training else 0

    def first_turn(self, copy: int, trained: int) -> int:
        return self._trained[copy]

    def number(self, copy: int) -> int:
        return int(self._next[copy])

    def admit(self, arena: Arena, slots: IntArray, copy: int) -> None:
        self._next[copy] += slots.size
        self.active[copy] += slots.size
        arena.copy[slots] = copy

    def finish(self, arena: Arena, slots: IntArray) -> IntArray:
        owners = arena.copy[slots]
        finished = np.bincount(owners, minlength=self.active.size)
        self.active -= finished
        if self._training:
            for k in np.flatnonzero(finished).tolist():
                self._trained[k] += int(finished[k])
        return owners
