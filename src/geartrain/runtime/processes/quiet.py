"""Whether anything is under way between the processes of a pass, or somebody waits in vain.

A worker that has nothing to do says what it has sent to each process, and had of each. Where all of
them have, and all that was sent was had, nothing is under way. Copies that wait for letters may
then wait for some that do not come: all are asked what they wait for, all are told what all have
said, and each says whether it has gone on.

    resting? ─► each says of itself ─► all hear of all ─► each: gone on, or not
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np


@final
class Quiet:
    """Messages between the parent and its workers, counted by all of them.

    Args:
        me: Number of the parent; workers have those below it.
    """

    def __init__(self, me: int) -> None:
        self._me = me
        self._sent, self._had = np.zeros(me + 1, np.int64), np.zeros(me + 1, np.int64)
        self._idle: dict[int, tuple[Any, Any]] = {}

    def sent(self, to: int) -> None:
        """The parent has sent a message."""
        self._sent[to] += 1

    def had(self, sender: int) -> None:
        """It has had one."""
        self._had[sender] += 1

    def idle(self, worker: int, sent: Any, had: Any) -> None:
        """A worker had nothing to do when these were its counts, int64 by process."""
        self._idle[worker] = sent, had

    def busy(self, worker: int) -> None:
        """It has done something since, or is gone."""
        self._idle.pop(worker, None)

    def may_be(self, there: Sequence[int]) -> bool:
        """Whether none of the workers that live has anything to do, as far as they have said."""
        return len(self._idle) == len(there)

    def over(self, there: Sequence[int]) -> bool:
        """Whether nothing is under way then, either."""
        here = [*there, self._me]
        sent = np.stack([*(self._idle[w][0] for w in there), self._sent])[:, here]
        had = np.stack([*(self._idle[w][1] for w in there), self._had])[:, here]
        return np.array_equal(sent, had.T)


@final
class Release:
    """What is said where copies may wait for letters that do not come.

    Attributes:
        number: Of the question: how often they were asked, and anew after a death.
        stuck: Whether all wait in vain.
    """

    def __init__(self) -> None:
        self.number, self.stuck = 0, False
        self._told: dict[int, Any] = {}  # what copies of each worker say of themselves
        self._went_on: dict[int, bool] = {}

    def ask(self) -> int:
        """Begin a question; its number."""
        self._told, self._went_on = {}, {}
        self.number += 1
        return self.number

    def ask_anew(self) -> None:
        """What was said before was without a death that is known now; it counts no more."""
        self.ask()
        self.stuck = False

    def told(self, worker: int, document: Any, workers: int) -> list[Any] | None:
        """What a worker says of itself; if all of so many have, all that they said."""
        self._told[worker] = document
        return [*self._told.values()] if len(self._told) == workers else None

    def in_vain(self, worker: int, went_on: bool, workers: int) -> bool:
        """Whether a worker has gone on without letters; True if all of so many say no."""
        self._went_on[worker] = went_on
        return len(self._went_on) == workers and not any(self._went_on.values())
