"""What C reads of calls besides the tables: row numbers, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from geartrain.errors import ProtocolError
from geartrain.frames.message import IntArray
from geartrain.native.rows import pointer
from geartrain.nodes.loop.reads import Whence

_POOL: Final = 1 << 13
"""Words of row numbers, and of where they lie, that there is room for at first."""

NOT_THERE: Final = "a row is read that is not there, or a step would never end"


@final
class CallWords:
    """Those of the calls of one turn. They stay where they are as long as the turn does.

    Args:
        left: Of a turn that is over, to be written over.
    """

    __slots__ = ("_alive", "_at", "_held", "_used")

    def __init__(self, left: IntArray) -> None:
        self._held, self._at, self._used = left, pointer(left), 0
        self._alive: list[Any] = []

    def leave(self) -> IntArray:
        """What the next turn may write over."""
        return self._held

    def indexed(self, some: Sequence[Whence], offsets: IntArray) -> IntArray:
        """Write where the rows of reads begin, from each offset on; the addresses of that.

        Raises:
            ProtocolError: Members begin behind their end. C sees what one call reads, and to it
                the end of its last members is where those of the next call begin.
        """
        index = np.zeros((offsets.size, 2 * max(len(some), 1)), np.int64)
        for k, one in enumerate(some):
            if one.starts is None:
                index[:, 2 * k] = one.at + 8 * one.many * offsets
            else:
                if not _rise(one.starts, one.rows.size):
                    raise ProtocolError(NOT_THERE)
                index[:, 2 * k] = one.at + 8 * one.starts[offsets]
                index[:, 2 * k + 1] = one.at_starts + 8 * offsets
        self._alive += [some, index]
        return pointer(index) + index.strides[0] * np.arange(offsets.size)

    def told(self, some: Sequence[Whence], row: int) -> list[int]:
        """Where the rows lie that some reads read from this row on, as C reads it.

        Raises:
            ProtocolError: Members begin behind their end.
        """
        self._alive.append(some)
        risen: set[int] = set()
        words: list[int] = []
        for one in some:
            if one.starts is not None and id(one.starts) not in risen:
                if not _rise(one.starts, one.rows.size):
                    raise ProtocolError(NOT_THERE)
                risen.add(id(one.starts))
            words += one.from_(row)
        return words

    def written(self, words: Sequence[int]) -> int:
        """Write some words to where they stay; their address."""
        begin, end = self._used, self._used + len(words)
        if end > self._held.size:
            self._renew(len(words))
            begin, end = 0, len(words)
        self._held[begin:end] = words
        self._used = end
        return self._at + 8 * begin

    def pooled(self, rows: IntArray) -> int:
        """Copy row numbers to where they stay; their address."""
        n = rows.size
        if self._used + n > self._held.size:
            self._renew(n)
        begin = self._used
        self._used = begin + n
        self._held[begin : begin + n] = rows
        return self._at + 8 * begin

    def _renew(self, least: int) -> None:
        """A pool with room for so many words at least; the one before stays where it is."""
        self._alive.append(self._held)
        self._held = np.empty(max(_POOL, 2 * self._held.size, 2 * least), np.int64)
        self._at, self._used = pointer(self._held), 0


def _rise(starts: IntArray, rows: int) -> bool:
    """Whether no members begin before others end, and none behind so many rows."""
    return bool(0 <= starts[0] and starts[-1] <= rows and (starts[1:] >= starts[:-1]).all())
