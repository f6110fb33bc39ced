"""What a part counts: how far its update is, what is in flight, how old gradients are.

sent ─► in flight ─► received, answered, dropped ─► rows, messages, instances ─► due?
                        └► by staleness: in all, and in this update
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from geartrain.frames.message import IntArray
from geartrain.parts.rules import Averaging
from geartrain.parts.staleness import Ages, Flights, bincount
from geartrain.parts.triggers import Trigger


@final
class Counting:
    """The counts of one part; it knows no weights, and is told their version.

    ``rows``, ``instances``, ``messages`` and ``over`` say how far the update in the making is; see
    ``triggers.Counts``.

    Args:
        trigger: When an update is due.
        max_staleness: A step waits while it would make a row older; None: no bound.
        ages_of_steps: Whether somebody wants to know how old the gradients of each step are.

    Attributes:
        once: Whether every instance comes by in exactly one message, which then counts for it.
        outstanding: Messages that have left and will be answered.
        staleness: Gradient rows by age, since they were last taken.
        step_ages: Those of the update in the making, where somebody wants to know.
        oldest_elsewhere: The oldest version that rows saw, or may yet see, of which this part hears
            when they come back and not before; None: it hears of all.
    """

    def __init__(self, trigger: Trigger, max_staleness: int | None, ages_of_steps: bool) -> None:
        self.trigger = trigger
        self._bound, self._wants_ages = max_staleness, ages_of_steps
        self.rows = self.instances = self.messages = self.over = 0
        self.once = False
        self.outstanding = 0
        self.staleness, self.step_ages = Ages(), Ages()
        self._in_flight = Flights()  # where there is a bound
        self.oldest_elsewhere: Callable[[], int] | None = None
        self._told_holding = False

    @property
    def lacking(self) -> int | None:
        """What one firing may add, in the unit of the trigger, 1 or more; None: any number.

        While a step is held back, gradients go on adding up.
        """
        if self.trigger.unit == "instances" and not self.once:
            return None  # the queues hold what may be added
        left = self.trigger.lacking(self)
        if left is None or left > 0:
            return left
        return self.trigger.n if self.trigger.due(self) else 1

    def updates_of_next(self, messages: int) -> IntArray:
        """Of which updates the next so many messages are, where each counts as an instance."""
        before = self.over + self.instances
        found: IntArray = np.maximum(np.arange(before, before + messages), 0) // self.trigger.n
        return found

    def completes(self, rows: int = 0, messages: int = 0, instances: int = 0) -> bool:
        """Whether the update would be due with so much more."""
        if self.once:
            instances = messages
        more = _Sum(
            self.rows + rows, self.instances + instances, self.messages + messages, self.over
        )
        return self.trigger.due(more)

    def delay(self, each: int) -> int:
        """Updates until the message that leaves now is answered, if answers come in order.

        Args:
            each: Payload rows of a message.
        """
        return self.trigger.delay(self, self.outstanding, each)

    def sent(self, messages: int, version: int) -> None:
        """Messages have left that saw this version, and will be answered."""
        self.outstanding += messages
        if self._bound is not None:
            self._in_flight.leave(version, messages)

    def received(
        self, version: int, rows: int, versions: IntArray, lengths: IntArray | None = None
    ) -> None:
        """Gradients have been added, at this version; see ``AbstractWeights.received``."""
        self.rows += rows
        self._note(bincount(version - versions, lengths))
        self.dropped(versions)

    def received_of(self, version: int, seen: int, rows: int, messages: int) -> None:
        """The same of messages that all saw one version."""
        self.answered(version - seen, rows, messages)
        self.outstanding -= messages
        if self._bound is not None:
            self._in_flight.come_back(np.full(messages, seen, np.int64))

    def answered(self, age: int, rows: int, messages: int) -> None:
        """Gradients have been added in the firing that made the rows, so many versions ago."""
        self._answer(messages)
        if rows:
            self.rows += rows
            self.staleness.add_of(age, rows)
            if self._wants_ages:
                self.step_ages.add_of(age, rows)

    def added(self, rows: int, messages: int) -> None:
        """Gradients have been added; how old they are is counted elsewhere."""
        self._answer(messages)
        self.rows += rows

    def dropped(self, versions: IntArray) -> None:
        """Messages have come back, perhaps with a zero gradient."""
        self._answer(versions.size)
        self.returned(versions)

    def returned(self, versions: IntArray) -> None:
        """Messages that left at these versions are in flight no more."""
        self.outstanding -= versions.size
        if self._bound is not None:
            self._in_flight.come_back(versions)

    def finished(self, instances: int) -> None:
        """Instances have finished anywhere in the graph."""
        if not self.once:
            self.instances += instances

    def due(self, version: int) -> bool:
        """Whether the part should step now, from this version."""
        due = self.trigger.due(self)
        return due if self._bound is None else due and self._young_enough(version)

    def holding(self, version: int) -> bool:
        """Whether a step that is due waits for older rows to come back."""
        return self.trigger.due(self) and not self._young_enough(version)

    def note_holding(self, version: int) -> bool | None:
        """Whether a step is held back, where that has changed since the last call; else None."""
        if self._bound is None or self.holding(version) == self._told_holding:
            return None
        self._told_holding = not self._told_holding
        return self._told_holding

    def take(self, average: Averaging, *, flush: bool) -> tuple[int, float]:
        """The update ends, and the next one begins.

        Args:
            average: What its sum is divided by.
            flush: Whether it ends before it is due, and leaves nothing to the next one.

        Returns:
            Its rows, and the divisor.
        """
        rows, divisor = self.rows, 1.0
        if average == "rows":
            divisor = self.trigger.rows_to_divide_by(self)
        elif average == "instances":
            divisor = self.trigger.instances_to_divide_by(self)
        held = self._bound is not None
        self.over = 0 if flush else self.trigger.carried(self, held=held)
        self.rows = self.instances = self.messages = 0
        return rows, divisor

    def forget(self) -> None:
        """Nothing is in flight any more, and no update begun."""
        self.rows = self.instances = self.messages = self.over = self.outstanding = 0
        self._in_flight.clear()
        self.step_ages.clear()

    def _answer(self, messages: int) -> None:
        self.messages += messages
        if self.once:
            self.instances += messages

    def _note(self, counts: IntArray) -> None:
        self.staleness.add(counts)
        if self._wants_ages:
            self.step_ages.add(counts)

    def _young_enough(self, version: int) -> bool:
        if self._bound is None:
            return True
        oldest = self._in_flight.oldest
        if self.oldest_elsewhere is not None:
            elsewhere = self.oldest_elsewhere()
            oldest = elsewhere if oldest is None else min(oldest, elsewhere)
        return oldest is None or version + 1 - oldest <= self._bound


@final
@dataclass(frozen=True, slots=True)
class Told:
    """Gradients that have been added, to be counted.

    Args:
        versions: int64 ``(n,)``, at each message's forward.
        lengths: Payload rows of each, where they are bundles.
        answered: Whether they were added in the firing that made the rows, and nobody waited.
    """

    versions: IntArray
    lengths: IntArray | None
    answered: bool

    @staticmethod
    def joined(some: Sequence[Told]) -> Told:
        """Those of several firings together, of which none was answered at once."""
        if len(some) == 1:
            return some[0]
        lengths = None
        if any(each.lengths is not None for each in some):
            lengths = np.concatenate([_each(x.versions.size, x.lengths) for x in some])
        return Told(np.concatenate([each.versions for each in some]), lengths, answered=False)

    def tell(self, counting: Counting, version: int) -> None:
        """Count them, at this version."""
        n = self.versions.size
        rows = n if self.lengths is None else int(self.lengths.sum())
        if self.answered:
            counting.answered(version - int(self.versions[0]), rows, n)
        else:
            counting.received(version, rows, self.versions, self.lengths)


def _each(messages: int, lengths: IntArray | None) -> IntArray:
    return np.ones(messages, np.int64) if lengths is None else lengths


@final
@dataclass(slots=True)
class _Sum:
    """Counts that might be."""

    rows: int
    instances: int
    messages: int
    over: int
