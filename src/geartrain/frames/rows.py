"""Rows that wait for their gradient, found again by address.

    allocate(5) ─► rows 12..16, contiguous, so that a kernel writes straight into the store
    release([13, 16]) ... release([12, 14, 15]) ─► the range is free again: counted, not searched

A store hands out contiguous ranges and takes rows back in any order and mixture. Each segment of
up to 128 rows of a range is free when its last row has come back. When nothing fits, the store
grows by a quarter; row numbers stay.
"""

from __future__ import annotations

from typing import Final, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import LeakError, ProtocolError
from geartrain.frames.message import IntArray
from geartrain.native import pool
from geartrain.native.ledger import WaitingRows, longer
from geartrain.native.ranges import Ranges

_CHUNK: Final = 128
"""Rows that are freed together. With whole ranges, rows that had come back held 2.3 times as much
memory as those that were waited for (trees, 256 in flight); so it is 1.8."""


@final
class RowStore:
    """Rows of one node: named int64 columns, tensor buffers, and who is still waited for.

    Args:
        name: The node, for messages.
        columns: Names of int64 columns to keep per row, reached as ``store[name]``.
        states: State columns to keep per row, reached as ``store.state``, ``(states, capacity)``.
        capacity: Rows to begin with; more when full.
    """

    def __init__(
        self,
        name: str,
        columns: tuple[str, ...] = ("origin",),
        states: int = 0,
        capacity: int = 1024,
    ) -> None:
        self.name = name
        self.waiting = 0
        self.peak = 0
        self._ranges = Ranges(capacity)
        self._columns: dict[str, IntArray] = {c: np.zeros(capacity, np.int64) for c in columns}
        self.state = np.zeros((states, capacity), np.int64)
        self._buffers: dict[int, Tensor] = {}
        self._ledger = WaitingRows(capacity, 64)
        self._chunks: list[tuple[int, int]] = [(0, 0)] * 64
        self._spare_chunks = list(range(63, -1, -1))

    @property
    def capacity(self) -> int:
        return self._ranges.capacity

    def __getitem__(self, column: str) -> IntArray:
        return self._columns[column]

    def allocate(self, n: int) -> int:
        """n consecutive rows, which now wait; returns the first."""
        start = self._ranges.take(n)
        if start is None:
            self._grow(n)
            start = self._ranges.take(n)
            assert start is not None
        for at in range(start, start + n, _CHUNK):
            if not self._spare_chunks:
                self._more_chunks()
            chunk = self._spare_chunks.pop()
            length = min(_CHUNK, start + n - at)
            self._chunks[chunk] = (at, length)
            self._ledger.lend(chunk, at, length)
        self.waiting += n
        if self.waiting > self.peak:
            self.peak = self.waiting
        return start

    def release(self, rows: IntArray) -> None:
        """Rows have been answered.

        Raises:
            ProtocolError: A row does not wait here, or is named twice.
        """
        free = self._ledger.release(rows)
        if free is None:
            self._refuse(rows)
        self.waiting -= rows.size
        for chunk in free:
            self._ranges.give(*self._chunks[chunk])
            self._spare_chunks.append(chunk)

    def buffer(self, j: int, like: Tensor, rows: int | None = None) -> Tensor:
        """Buffer j, ``(capacity, ...)``, of dtype and inner shape of ``like``; made when new.

        A new one is on the device of ``like``; rows from other devices are then copied there.

        Args:
            j: Its number.
            like: What will be written into it.
            rows: How many rows of ``like`` will be; None: all.

        Raises:
            ProtocolError: Rows of another shape or dtype arrive than those that wait.
        """
        inner = tuple(like.shape[1:])
        found = self._buffers.get(j)
        if found is not None and found.shape[1:] == inner and found.dtype == like.dtype:
            return found
        if found is not None and self.waiting > (like.shape[0] if rows is None else rows):
            raise ProtocolError(
                f"'{self.name}': payload {j} came as {like.dtype} {inner}, but rows of "
                f"{found.dtype} {tuple(found.shape[1:])} wait; all rows of a stream have one shape"
                " and dtype: cast or pad them before they enter"
            )
        found = _empty((self.capacity, *inner), like)
        self._buffers[j] = found
        return found

    def fits(self, j: int, like: Tensor) -> bool:
        """Whether ``buffer`` has room for rows like these: of its shape, or they alone wait."""
        found = self._buffers.get(j)
        if found is None or self.waiting <= like.shape[0]:
            return True
        return found.shape[1:] == like.shape[1:] and found.dtype == like.dtype

    def buffers(self, first: int = 0) -> tuple[Tensor, ...]:
        """Buffers first, first + 1, ... as far as they exist."""
        found: list[Tensor] = []
        while (buffer := self._buffers.get(first + len(found))) is not None:
            found.append(buffer)
        return tuple(found)

    def drop_buffers(self, first: int, count: int) -> None:
        """Free those of these numbers that exist; nobody waits for what is in them."""
        for j in [j for j in self._buffers if first <= j < first + count]:
            del self._buffers[j]

    def rest(self) -> None:
        """Free all of them, if nobody waits for what is in them."""
        if not self.waiting:
            self._buffers.clear()

    def existing(self, j: int) -> Tensor | None:
        return self._buffers.get(j)

    def check_empty(self) -> None:
        """Raises:
        LeakError: Rows still wait; names the node and the first of them.
        """
        if self.waiting:
            rows = np.flatnonzero(self._ledger.live)
            raise LeakError(
                f"'{self.name}': {self.waiting} rows were never answered, first "
                f"{rows[:8].tolist()}; every forward row wants exactly one backward row"
            )

    def are_waiting(self, rows: IntArray) -> bool:
        """Whether all of these rows wait here."""
        return bool(self._ledger.live[rows].all())

    def live_rows(self) -> IntArray:
        return np.flatnonzero(self._ledger.live)

    def nbytes(self) -> int:
        """Bytes held by the tensor buffers."""
        return sum(b.nelement() * b.element_size() for b in self._buffers.values())

    def _grow(self, n: int) -> None:
        old = self._ranges.capacity
        new = old + max(old // 4, n)
        new += -new % _CHUNK
        self._ranges.grow(new)
        for name, column in self._columns.items():
            self._columns[name] = longer(column, new)
        state = np.zeros((len(self.state), new), np.int64)
        state[:, :old] = self.state
        self.state = state
        self._ledger.grow(new, len(self._chunks))
        for j, buffer in self._buffers.items():
            grown = _empty((new, *buffer.shape[1:]), buffer)
            grown[:old].copy_(buffer)
            self._buffers[j] = grown

    def _more_chunks(self) -> None:
        old = len(self._chunks)
        self._chunks.extend([(0, 0)] * old)
        self._ledger.grow(self.capacity, 2 * old)
        self._spare_chunks.extend(range(2 * old - 1, old - 1, -1))

    def _refuse(self, rows: IntArray) -> NoReturn:
        values, counts = np.unique(rows, return_counts=True)
        bad = values[(counts > 1) | ~self._ledger.live[values]]
        raise ProtocolError(
            f"'{self.name}': rows {bad[:8].tolist()} came back but do not wait here "
            f"(never sent, or answered twice); {self.waiting} rows wait"
        )


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Room of the dtype of a tensor, where it is; on the host of the pool, which has it back."""
    if like.is_cpu:
        return pool.shared.empty(shape, like.dtype)
    return torch.empty(shape, dtype=like.dtype, device=like.device)
