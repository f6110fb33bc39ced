"""Updates of so many instances: whose gradients may be added now, and whose wait.

    turn        0 1 2 3 │ 4 5 6 7 │ 8 9 ...        in the order of admission
    cohort      present │    1    │    2
                added   │  wait at the part; forward they go on

A part whose update is to be of n instances takes the gradients of a cohort of n. When all of these
have finished it steps, and the next cohort is the present one. Every part agrees on the order, so
the instance that came first is of the present cohort wherever it goes: there is always one that can
go on, whatever the numbers of other parts.

Where a node tells the gradients of rows apart, those of a few cohorts more are computed with the
present one's, in one firing, and wait at the part as gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from geartrain.engine.router import Delivery
from geartrain.frames.frame import Arena
from geartrain.frames.message import Backward, Forward, IntArray, distinct


@final
class Cohorts:
    """The instances that come by one part, or one copy of it, or by several that step together.

    Args:
        arena: Knows an instance's turn.
        n: Instances of a cohort.
        first: The turn of the next instance.
        begun: Instances of the present cohort that have finished before.
        copy, copies: It is one of so many copies, each of which gets every so-many-th turn.
    """

    def __init__(
        self, arena: Arena, n: int, first: int, begun: int, copy: int = 0, copies: int = 1
    ) -> None:
        self._arena, self.n = arena, n
        self._copy, self._copies = copy, copies
        self._base = int(self._place(np.array([first]))[0]) - begun
        self._done = {0: begun}  # finished, by cohort
        self._present = 0
        self._waiting: dict[int, list[Delivery]] = {}

    def sort(self, delivery: Delivery, slots: IntArray, ahead: int = 0) -> list[Delivery]:
        """What may be added now; the rest waits.

        Args:
            delivery: Some messages.
            slots: int64, of their instances.
            ahead: Of so many cohorts after the present one gradients may be added too.
        """
        cohorts = self._cohort(self._arena.turn[slots]) - ahead  # when its turn is
        if ahead:
            delivery, cohorts = _in_order(delivery, cohorts)
        most = int(cohorts.max())
        if most <= self._present:
            return [delivery]
        if int(cohorts.min()) == most:
            self._wait(most, delivery)
            return []
        now: list[Delivery] = []
        # What goes now goes in one piece: each is copied by itself when it is fired.
        for cohort, batch in _apart(delivery.batch, np.maximum(cohorts, self._present)):
            piece = Delivery(delivery.node, delivery.port, batch)
            if cohort == self._present:
                now.append(piece)
            else:
                self._wait(cohort, piece)
        return now

    def finished(self, turns: IntArray) -> Iterator[int]:
        """Instances have finished: how many of the present cohort, then of those that follow it.

        After each number the part may be due; the next cohort is present when it is asked for.
        """
        if self._copies > 1:
            turns = turns[turns % self._copies == self._copy]
        if turns.size:
            of = self._cohort(turns)
            first = int(of.min())
            counts = np.bincount(of - first).tolist()
            for cohort, many in enumerate(counts, first):
                if many:
                    self._done[cohort] = self._done.get(cohort, 0) + many
            mine = self._present - first
            yield counts[mine] if 0 <= mine < len(counts) else 0
        while self._done.get(self._present, 0) == self.n:
            del self._done[self._present]
            self._present += 1
            yield self._done.get(self._present, 0)

    def take(self) -> list[Delivery]:
        """What has waited and may be added now."""
        return self._waiting.pop(self._present, [])

    @property
    def begun(self) -> int:
        """Instances of the present cohort that have finished."""
        return self._done.get(self._present, 0)

    def ahead(self, turn: int) -> int:
        """Cohorts before that of an instance, the present one among them."""
        return max(0, int(self._cohort(np.array([turn]))[0]) - self._present)

    @property
    def none_waits(self) -> bool:
        """Whether no instance that has come is of a later cohort than the present one."""
        latest = self._arena.latest
        if self._copies > 1:
            latest = (latest + (self._copies - 1 - self._copy)) // self._copies
        return (latest - self._base) // self.n <= self._present

    def updates(self, slots: IntArray) -> IntArray | None:
        """The same of instances in these slots; of those of earlier cohorts negative numbers; None:
        none is of a later one."""
        if self.none_waits:
            return None
        return self._cohort(self._arena.turn[slots]) - self._present

    def _cohort(self, turns: IntArray) -> IntArray:
        found: IntArray = (self._place(turns) - self._base) // self.n
        return found

    def _place(self, turns: IntArray) -> IntArray:
        """Among the turns of this copy."""
        if self._copies == 1:
            return turns
        found: IntArray = (turns + (self._copies - 1 - self._copy)) // self._copies
        return found

    def _wait(self, cohort: int, delivery: Delivery) -> None:
        self._waiting.setdefault(cohort, []).append(delivery)


def _in_order(delivery: Delivery, cohorts: IntArray) -> tuple[Delivery, IntArray]:
    """The same answers and their cohorts, those of a cohort side by side: so they go on to the
    inputs, and are multiplied from where they lie, in each firing behind this one."""
    batch = delivery.batch
    if isinstance(batch, Forward) or not (cohorts[1:] < cohorts[:-1]).any():
        return delivery, cohorts
    order = cohorts.argsort(kind="stable")
    return Delivery(delivery.node, delivery.port, batch.take(order)), cohorts[order]


def _apart(
    batch: Forward | Backward, cohorts: IntArray
) -> Iterator[tuple[int, Forward | Backward]]:
    """The messages of each cohort; cut, not gathered, where they come one after the other."""
    values = distinct(cohorts)
    if (np.diff(cohorts) >= 0).all():
        ends = np.searchsorted(cohorts, values, side="right").tolist()
        start = 0
        for cohort, end in zip(values.tolist(), ends, strict=True):
            piece = batch
            if end < cohorts.size:
                piece, batch = batch.cut(end - start)
            yield cohort, piece
            start = end
        return
    for cohort in values.tolist():
        yield cohort, batch.take(np.flatnonzero(cohorts == cohort))
