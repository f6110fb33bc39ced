"""Rows of a loop that runs whole, by number: what a plan knows of them, without any payload."""

from __future__ import annotations

from typing import final

import numpy as np

from geartrain.frames.counted import consecutive, counted, sliced
from geartrain.frames.message import IntArray, ranges


@final
class _Grown:
    """Numbers that become more."""

    __slots__ = ("_held", "size")

    def __init__(self) -> None:
        self._held = np.empty(64, np.int64)
        self.size = 0

    @property
    def values(self) -> IntArray:
        return self._held[: self.size]

    def extend(self, more: IntArray) -> None:
        end = self.size + more.size
        if end > self._held.size:
            held = np.empty(max(end, 2 * self._held.size), np.int64)
            held[: self.size] = self.values
            self._held = held
        self._held[self.size : end] = more
        self.size = end


@final
class Numbers:
    """What a plan knows of the rows of values, by the values' numbers.

    Where a value has bundles, its rows are bundles, and lie in so many places of a buffer.

    Args:
        counts: Rows of each.
        places: Places of each that has bundles.
    """

    __slots__ = ("_bundles", "_grouped", "_joined", "counts", "places")

    def __init__(self, values: int) -> None:
        self.counts = [0] * values
        self._grouped: dict[int, tuple[_Grown, _Grown, _Grown]] = {}
        self._joined: dict[int, list[_Grown]] = {}
        self._bundles: dict[int, tuple[_Grown, _Grown]] = {}
        self.places: dict[int, int] = {}

    def more(self, number: int, n: int, lengths: IntArray | None = None) -> IntArray:
        """So many rows more of a value, bundles of these lengths; their numbers."""
        first = self.counts[number]
        self.counts[number] = first + n
        if lengths is not None:
            found = self._bundles.get(number)
            if found is None:
                found = self._bundles[number] = _Grown(), _Grown()
            before = self.places.get(number, 0)
            ends = lengths.cumsum() + before
            found[0].extend(ends - lengths)
            found[1].extend(lengths)
            self.places[number] = int(ends[-1]) if n else before
        return counted(first, n)

    def reach(self, values: int) -> None:
        """Have room for so many values."""
        self.counts += [0] * (values - len(self.counts))

    def size(self, number: int) -> int:
        """Places of a value."""
        return self.places.get(number, self.counts[number])

    def lengths(self, number: int, rows: IntArray) -> IntArray | None:
        """Places of these rows of a value, if they are bundles."""
        found = self._bundles.get(number)
        return None if found is None else found[1].values[rows]

    def spans(self, number: int, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Where these rows of a value begin, which are bundles, and how many places each has."""
        starts, lengths = (held.values for held in self._bundles[number])
        return starts[rows], lengths[rows]

    def all_lengths(self, number: int) -> IntArray | None:
        """Places of all rows of a value, if they are bundles."""
        found = self._bundles.get(number)
        return None if found is None else found[1].values

    def at(self, number: int, rows: IntArray) -> IntArray:
        """Where these rows of a value lie, row by row."""
        found = self._bundles.get(number)
        if found is None or not rows.size:
            return rows
        starts, lengths = (held.values for held in found)
        first = consecutive(rows)
        if first >= 0:
            last = first + rows.size - 1
            begin = int(starts[first])
            return counted(begin, int(starts[last] + lengths[last]) - begin)
        return ranges(starts[rows], lengths[rows])

    def owners(self, number: int, places: IntArray) -> IntArray:
        """The rows of a value that lie in these places."""
        found = self._bundles.get(number)
        if found is None:
            return places
        return found[0].values.searchsorted(places, "right") - 1

    def begin(self, number: int, row: int) -> int:
        """Where a row of a value begins, or would."""
        found = self._bundles.get(number)
        if found is None:
            return row
        return int(found[0].values[row]) if row < found[0].size else self.places[number]

    def permute(self, number: int, first: int, order: IntArray) -> None:
        """Rows of a value from ``first`` on are put in another order: where bundles lie."""
        found = self._bundles.get(number)
        if found is None or not order.size:
            return
        span = slice(first, first + order.size)
        begin, lengths = int(found[0].values[first]), found[1].values[span][order]
        found[1].values[span] = lengths
        found[0].values[span] = begin + lengths.cumsum() - lengths

    def group(self, number: int, members: IntArray, sizes: IntArray) -> IntArray:
        """Grouped rows more, of these members of the value beneath; their numbers."""
        found = self._grouped.get(number)
        if found is None:
            found = self._grouped[number] = _Grown(), _Grown(), _Grown()
        starts, counts, all_members = found
        starts.extend(sizes.cumsum() - sizes + all_members.size)
        counts.extend(sizes)
        all_members.extend(members)
        return self.more(number, sizes.size)

    def join(self, number: int, sides: list[IntArray]) -> IntArray:
        """Joined rows more, of these rows of the values beneath; their numbers."""
        found = self._joined.get(number)
        if found is None:
            found = self._joined[number] = [_Grown() for _ in sides]
        for held, side in zip(found, sides, strict=True):
            held.extend(side)
        return self.more(number, sides[0].size)

    def members(self, number: int, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Of grouped rows: the rows of the value beneath, row by row, and how many each has."""
        starts, sizes, members = (held.values for held in self._grouped[number])
        first, n = consecutive(rows), rows.size
        if first >= 0:  # so are their members
            mine = sizes[first : first + n]
            last = first + n - 1
            return members[starts[first] : starts[last] + sizes[last]], mine
        mine = sizes[rows]
        return members[ranges(starts[rows], mine)], mine

    def member_places(self, number: int, rows: IntArray) -> IntArray:
        """Of grouped rows: which of all members theirs are, row by row."""
        starts, sizes, _ = self._grouped[number]
        return ranges(starts.values[rows], sizes.values[rows])

    def members_at(self, number: int, places: IntArray) -> IntArray:
        """The rows of the value beneath which these of all members are."""
        return self._grouped[number][2].values[places]

    def sides(self, number: int, rows: IntArray) -> list[IntArray]:
        """Of joined rows: the row of each value beneath."""
        which = sliced(rows)
        return [side.values[which] for side in self._joined[number]]
