"""Counting rows back into a store, in one pass over them.

    live      is the row waited for?        release(rows) ─► none of them is live any more, and the
    chunk_of  the chunk it was given out in                  chunks that wait for nothing now
    left      rows of a chunk still out

A row that is not live, or named twice, stops the release before anything has changed.
"""

from __future__ import annotations

from typing import TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.native import library
from geartrain.native.rows import Rows

S = TypeVar("S", bound=np.generic)


@final
class WaitingRows:
    """Which rows of a store are waited for.

    Args:
        capacity: Rows to begin with.
        chunks: Chunks to begin with.
    """

    __slots__ = ("_chunk_of", "_freed", "_left", "_library", "_mark", "_pointers", "live")

    def __init__(self, capacity: int, chunks: int) -> None:
        self.live: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._mark: Rows = np.zeros(capacity, np.int64)
        self._chunk_of: Rows = np.zeros(capacity, np.int64)
        self._left: Rows = np.zeros(chunks, np.int64)
        self._freed: Rows = np.zeros(chunks, np.int64)
        self._library = library.current()
        self._pointers = self._find()

    def lend(self, chunk: int, start: int, n: int) -> None:
        """Rows start, start + 1, ... are waited for; they are the chunk's n."""
        end = start + n
        self._chunk_of[start:end] = chunk
        self.live[start:end] = True
        self._left[chunk] = n

    def release(self, rows: Rows) -> list[int] | None:
        """Numbers of the chunks that became free; None, and nothing changed, for a wrong row."""
        if self._library is None:
            return self._release(rows)
        if not rows.flags.c_contiguous:
            rows = np.ascontiguousarray(rows)
        at = torch.from_numpy(rows).data_ptr()
        count = self._library.release(rows.size, at, self.live.size, *self._pointers)
        if count > 0:
            return list(self._freed[:count].tolist())
        return None if count else []

    def grow(self, capacity: int, chunks: int) -> None:
        """Make room for so many rows and chunks, no fewer than before."""
        self.live = longer(self.live, capacity)
        self._mark = longer(self._mark, capacity)
        self._chunk_of = longer(self._chunk_of, capacity)
        self._left, self._freed = longer(self._left, chunks), longer(self._freed, chunks)
        self._pointers = self._find()

    def _release(self, rows: Rows) -> list[int] | None:
        live, left, n = self.live, self._left, rows.size
        if n and (rows.min() < 0 or rows.max() >= live.size):
            return None
        if n > 1:
            count = np.arange(n)
            self._mark[rows] = count
            if not np.array_equal(self._mark[rows], count):
                return None
        if not live[rows].all():
            return None
        live[rows] = False
        chunks = self._chunk_of[rows]
        first = int(chunks[0])
        if n == 1 or (chunks == first).all():
            left[first] -= n
            return [] if left[first] else [first]
        counts = np.bincount(chunks)
        touched = np.flatnonzero(counts)
        left[touched] -= counts[touched]
        return list(touched[left[touched] == 0].tolist())

    def _find(self) -> tuple[int, ...]:
        arrays = self.live.view(np.uint8), self._chunk_of, self._left, self._freed
        return tuple(torch.from_numpy(array).data_ptr() for array in arrays)


def longer(array: NDArray[S], n: int) -> NDArray[S]:
    """The array with zeros after it, ``(n,)``."""
    grown = np.zeros(n, array.dtype)
    grown[: array.size] = array
    return grown
