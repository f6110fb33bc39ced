"""Members of groups, collected until groups are complete: in one call of C, where numbers have room
for what they are sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, final

import numpy as np

from geartrain.native import library
from geartrain.native.rows import Rows, pointer

AHEAD: Final = 3
"""Words of a record before its columns: its number, the size of its group, its place in it."""
_COUNTS: Final = 3
_ROOM: Final = 64


def record_words(
    width: int, *, ordered: bool, keys: Sequence[int], more: Sequence[int], alike: Sequence[int]
) -> list[int]:
    """How C is told of records; the arguments are those of ``MemberRecords``."""
    return [width, int(ordered), len(keys), len(more), len(alike), *keys, *more, *alike]


@final
class MemberRecords:
    """Members that wait, a record of words each.

    Args:
        columns: Of a group.
        width: Words of a record.
        ordered: Whether members say their places.
        keys: Words that tell groups apart, the first of them first.
        more: Those by which members of a group are sorted.
        alike: Those that members of a group have in common.
    """

    __slots__ = ("_at", "_columns", "_held", "_pack", "_records", "_told", "_width")

    def __init__(
        self,
        columns: int,
        width: int,
        *,
        ordered: bool,
        keys: Sequence[int],
        more: Sequence[int],
        alike: Sequence[int],
    ) -> None:
        told = record_words(width, ordered=ordered, keys=keys, more=more, alike=alike)
        self._told = np.array(told, np.int64)
        self._columns, self._width, self._held = columns, width, 0
        self._pack = Struct(f"{width}q").pack
        self._records = np.empty((_ROOM, width), np.int64)
        self._at = pointer(self._told), pointer(self._records)

    @property
    def waiting(self) -> Rows:
        """int64 ``(width, n)``, of members that wait, as they came."""
        return self._records[: self._held].T

    def keep(self, waiting: Rows) -> None:
        """These wait, and no others: int64 ``(width, n)``."""
        self._held, held = 0, waiting.shape[1]
        self._reach(held)
        self._records[:held] = waiting.T
        self._held = held

    def collect(self, came: Sequence[Rows]) -> tuple[Rows, Rows, Rows] | None:
        """Take members in, and forget the groups that are complete by that.

        Args:
            came: By word of a record, or some that lie one after the other, int64 ``(n,)`` or
                ``(words, n)``, contiguous.

        Returns:
            The numbers of the members of these groups, group by group; how many each group has;
            and the columns of each group, ``(columns, groups)``. None: nothing has happened, as
            there is no C, some of this is to be refused, or numbers have no room for it.
        """
        native = library.current()
        if native is None:
            return None
        n, columns = came[0].size, self._columns
        most = self._held + n
        self._reach(most)
        words: list[int] = []
        for some in came:
            at = pointer(some)
            words += [at] if some.ndim == 1 else [at + 8 * n * k for k in range(len(some))]
        out = np.empty((2 + columns) * most + _COUNTS, np.int64)
        to, size = pointer(out), 8 * most
        rest = to, to + size, to + 2 * size, to + (2 + columns) * size
        told, records = self._at
        if native.collect(told, self._held, records, n, self._pack(*words), columns, *rest):
            return None
        made, groups, self._held = out[-_COUNTS:].tolist()
        states = out[2 * most : 2 * most + columns * groups].reshape(columns, groups)
        return out[:made], out[most : most + groups], states

    def _reach(self, members: int) -> None:
        """Have room for so many."""
        if members > len(self._records):
            records = np.empty((max(members, 2 * len(self._records)), self._width), np.int64)
            records[: self._held] = self._records[: self._held]
            self._records = records
            self._at = pointer(self._told), pointer(self._records)
