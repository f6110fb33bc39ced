"""Plans of loops that run whole, made by C of tables; see plans.inc."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, final

import numpy as np

from geartrain.native import library
from geartrain.native.pool import made_words
from geartrain.native.rows import Rows, pointer

EVENT_WORDS: Final = 5
MOST_MODULES: Final = 62
"""Modules of a loop that are told apart by the bits of a number."""
_CROWDED, _ENDLESS = 1, 4  # of what C returns
_MOST_WORDS: Final = 1 << 24
_VISITS: Final = 4
"""So often rows of a vertex are told of, most of the time."""


@final
class StageKind(IntEnum):
    """What a stage does."""

    ROUTES, MOVES, PASSES, SWALLOWS, GROUPS, CALLS, LEAVES = range(7)


@final
class EventKind(IntEnum):
    """What is told of a plan."""

    A_CALL, AN_EXIT, SOME_GROUPS, A_ROUND = range(4)


@final
class SourceHow(IntEnum):
    """Where a number comes from that is said of a row."""

    GIVEN, OF_TABLE, OF_COLUMN, INSIDE = range(4)


@final
class EnteringRows(NamedTuple):
    """Rows that enter: the stage that gets them, int64 numbers and ``(columns, n)``."""

    stage: int
    numbers: Rows
    state: Rows


@final
class ToldPlan(NamedTuple):
    """What C has found.

    Args:
        events: ``EVENT_WORDS`` each: of what, who, how many, what else, and where its words are.
        words: These.
        counts: The rows of each value then.
        endless: Whether there is no end: then it is told as far as rows came where they had been.
    """

    events: list[list[int]]
    words: Rows
    counts: list[int]
    endless: bool


@final
class PlannedRows:
    """Makes plans of one loop.

    Args:
        told: The loop, as C reads it.
        rounds: Rows that go round, of which more are too many.
    """

    __slots__ = ("_at", "_between", "_events", "_rounds", "_told", "_words")

    def __init__(self, told: Sequence[int], rounds: int) -> None:
        self._told = np.array(told, np.int64)
        self._at, self._rounds = pointer(self._told), rounds
        self._events, self._words = 256, 1 << 13  # of which there is room
        self._between = 1 << 13  # likewise, for what C reckons with

    def make(
        self, where: Rows, tables: Rows, entering: Sequence[EnteringRows], counts: Sequence[int]
    ) -> ToldPlan | None:
        """What becomes of rows that enter.

        Args:
            where: int64, by vertex its place in the tables, or -1.
            tables: int64 ``(tables, places)``.
            entering: The rows.
            counts: Rows of each value before.

        Returns:
            What is found; None: it is for others to plan.
        """
        native = library.current()
        if native is None:
            return None
        words = [
            word
            for one in entering
            for word in (one.stage, one.numbers.size, pointer(one.numbers), pointer(one.state))
        ]
        came = np.array(words, np.int64)
        usual = _VISITS * tables.shape[1] * (1 + len(entering[0].state))
        self._words = max(self._words, usual)
        while True:
            between = made_words((self._between,))  # so that it lies where rows of a turn will
            sizes = np.array([*self._sizes, pointer(between), between.size], np.int64)
            now = np.array(counts, np.int64)
            events = np.empty((self._events, EVENT_WORDS), np.int64)
            out = made_words((self._words,))
            rest = [pointer(each) for each in (came, now, sizes, events, out)]
            places = (pointer(where), where.size, pointer(tables), tables.shape[1])
            trouble = native.plan(self._at, *places, len(entering), *rest)
            if trouble in (0, _ENDLESS):
                self._between = max(self._between, int(sizes[2]))
                found = made_words((int(sizes[1]),))  # it stays as long as the turn
                found[:] = out[: found.size]
                told = events[: int(sizes[0])].tolist()
                return ToldPlan(told, found, now.tolist(), trouble == _ENDLESS)
            if trouble != _CROWDED or self._words >= _MOST_WORDS:
                return None
            self._events, self._words = 2 * self._events, 2 * self._words

    @property
    def _sizes(self) -> list[int]:
        return [self._events, self._words, self._rounds]
