"""How old gradients are: counted by the part that they reach.

sent(version) ─► on its way ─► back(version now - version then) ─► by staleness: in all, in a step
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import numpy as np

from geartrain.frames.message import IntArray


@final
class Ages:
    """Rows by staleness."""

    def __init__(self) -> None:
        self._counts = np.zeros(8, np.int64)

    def add(self, counts: IntArray) -> None:
        """Add rows by staleness."""
        self._reach(counts.size)
        self._counts[: counts.size] += counts

    def add_of(self, age: int, rows: int) -> None:
        """Add rows of one staleness."""
        self._reach(age + 1)
        self._counts[age] += rows

    def _reach(self, ages: int) -> None:
        if ages > self._counts.size:
            self._counts = np.concatenate([self._counts, np.zeros(2 * ages, np.int64)])

    @property
    def counts(self) -> IntArray:
        """int64, by staleness."""
        return self._counts

    def clear(self) -> None:
        """Start anew."""
        self._counts[:] = 0

    def to_tuple(self) -> tuple[int, ...]:
        """Without the zeros at the end."""
        found: list[int] = self._counts.tolist()
        while found and not found[-1]:
            found.pop()
        return tuple(found)

    def take(self) -> tuple[int, ...]:
        """``to_tuple``, and start anew."""
        found = self.to_tuple()
        self.clear()
        return found

    def total(self) -> tuple[float, int]:
        """Sum of the ages of all rows, and how many these are."""
        return float(self._counts @ np.arange(self._counts.size)), int(self._counts.sum())

    def load(self, counts: Iterable[int]) -> None:
        """Put back what ``to_tuple`` gave."""
        given = np.fromiter(counts, np.int64)
        self._counts = np.concatenate([given, np.zeros(8, np.int64)])


@final
class Flights:
    """Messages on their way, by the version that they saw."""

    def __init__(self) -> None:
        self._messages: dict[int, int] = {}

    @property
    def oldest(self) -> int | None:
        """The lowest version; None: nothing is on its way."""
        return min(self._messages, default=None)

    def leave(self, version: int, messages: int) -> None:
        """So many have left that saw this version."""
        self._messages[version] = self._messages.get(version, 0) + messages

    def come_back(self, versions: IntArray) -> None:
        """These are on their way no more."""
        values, counts = np.unique(versions, return_counts=True)
        for version, count in zip(values.tolist(), counts.tolist(), strict=True):
            left = self._messages[version] - count
            if left:
                self._messages[version] = left
            else:
                del self._messages[version]

    def clear(self) -> None:
        """Nothing is on its way."""
        self._messages.clear()


def bincount(ages: IntArray, lengths: IntArray | None) -> IntArray:
    """Rows by staleness, of messages with these ages and lengths."""
    if lengths is None:
        return np.bincount(ages)
    return np.bincount(ages, lengths).astype(np.int64)
