"""Gradients of updates that follow the present one: which rows these are, and when they count.

    rows of updates 0 1 1 2 ─► 0: counted now │ 1 1 │ 2: counted when theirs is the present one

The sums themselves are those of ``GradientSum``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np

from geartrain.frames.message import IntArray
from geartrain.parts.counting import Counting, Told
from geartrain.parts.trained import AbstractPart


@final
class UpdatesAhead:
    """Of one part, or of a worker's share of it.

    Args:
        counting: Says how far the present update is.
        count: Counts gradients as of the present update.

    Attributes:
        of_slots: From slots of instances the updates that these are of, counted from the present
            one, where instances are counted as they finish, or None, as no row is of a later one;
            None: rows are of the present one.
    """

    def __init__(self, counting: Counting, count: Callable[[Told], None]) -> None:
        self._counting, self._count = counting, count
        self.of_slots: Callable[[IntArray], IntArray | None] | None = None
        self._told: list[list[Told]] = []  # by update

    def of(self, slots: IntArray) -> IntArray | None:
        """The updates of these messages, as ``AbstractWeights.updates_of`` has them."""
        found: IntArray | None = None
        if self._counting.once:
            found = self._counting.updates_of_next(slots.size)
        elif self.of_slots is not None:
            found = self.of_slots(slots)
        return None if found is None or not (found > 0).any() else np.maximum(found, 0)

    def tell(
        self, updates: IntArray, versions: IntArray, lengths: IntArray | None, *, answered: bool
    ) -> None:
        """Count gradients of the present update now, and others when theirs is the present one."""
        for update, messages in enumerate(np.bincount(updates).tolist()):
            if not messages:
                continue
            mine = updates == update
            told = Told(versions[mine], None if lengths is None else lengths[mine], answered)
            if not update:
                self._count(told)
                continue
            while len(self._told) < update:
                self._told.append([])
            self._told[update - 1].append(told)

    def forget(self) -> None:
        """Nothing is told of any."""
        self._told.clear()

    def next(self) -> bool:
        """The next update is the present one; whether anything has been told of it."""
        if not self._told:
            return False
        told = self._told.pop(0)
        if came := [each for each in told if not each.answered]:
            self._count(Told.joined(came))
        for each in told:
            if each.answered:
                self._count(each)
        return True


class AbstractAhead(AbstractPart):
    """A part, or a worker's share of it, that gradients of later updates may be told to."""

    _ahead: UpdatesAhead

    def updates_of(self, slots: IntArray) -> IntArray | None:
        return self._ahead.of(slots) if self.takes_ahead else None

    def received_for(
        self, updates: IntArray, versions: IntArray, lengths: IntArray | None = None
    ) -> None:
        self._ahead.tell(updates, versions, lengths, answered=False)

    def answered_for(self, updates: IntArray, lengths: IntArray | None) -> None:
        versions = np.full(updates.size, self.version, np.int64)
        self._ahead.tell(updates, versions, lengths, answered=True)

    def next_update(self) -> bool:
        found = self._ahead.next()
        if found:
            self.gradient.next_update()
        return found
