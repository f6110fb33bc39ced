"""Which numbers of a row of them are free: whole ranges are taken and given back."""

from __future__ import annotations

from bisect import bisect_left
from typing import final


@final
class Ranges:
    """Free ranges of 0..capacity-1, neighbours merged."""

    __slots__ = ("_lengths", "_starts", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts = [0]
        self._lengths = [capacity]

    def take(self, n: int) -> int | None:
        """The start of a free range of n, now taken: the first that has room; None: there is
        none."""
        for i, length in enumerate(self._lengths):
            if length >= n:
                return self._taken(i, n)
        return None

    def take_closest(self, n: int) -> int | None:
        """Likewise of the least that has room, so that large ones stay for what is large."""
        found, least = -1, self.capacity + 1
        for i, length in enumerate(self._lengths):
            if n <= length < least:
                found, least = i, length
        return None if found < 0 else self._taken(found, n)

    def _taken(self, i: int, n: int) -> int:
        """The first n of a range."""
        start = self._starts[i]
        if self._lengths[i] == n:
            del self._starts[i], self._lengths[i]
        else:
            self._starts[i] = start + n
            self._lengths[i] -= n
        return start

    def give(self, start: int, n: int) -> None:
        starts, lengths = self._starts, self._lengths
        i = bisect_left(starts, start)
        if i < len(starts) and start + n == starts[i]:
            n += lengths[i]
            del starts[i], lengths[i]
        if i and starts[i - 1] + lengths[i - 1] == start:
            lengths[i - 1] += n
        else:
            starts.insert(i, start)
            lengths.insert(i, n)

    def grow(self, capacity: int) -> None:
        self.give(self.capacity, capacity - self.capacity)
        self.capacity = capacity

    def free(self) -> int:
        return sum(self._lengths)

    @property
    def end(self) -> int:
        """Behind the last one that is taken."""
        if self._starts and self._starts[-1] + self._lengths[-1] == self.capacity:
            return self._starts[-1]
        return self.capacity
