"""Named columns over ranges that come and go; what the arena of frames is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import DataError
from geartrain.frames.message import IntArray
from geartrain.native.ranges import Ranges

Column = NDArray[Any]


@final
class Table:
    """Named columns over ranges that come and go."""

    def __init__(self, kind: str, names: Iterable[str], capacity: int = 4096) -> None:
        self.kind = kind
        self.ranges = Ranges(capacity)
        self.columns: dict[str, Column | None] = dict.fromkeys(names)
        self._guessed: set[str] = set()  # only empty columns came: their type says nothing

    def place(self, n: int) -> int:
        """The start of n fresh entries."""
        start = self.ranges.take(n)
        if start is None:
            capacity = self.ranges.capacity
            while capacity - self.ranges.capacity < n:
                capacity *= 2
            self.grow(capacity)
            start = self.ranges.take(n)
            assert start is not None
        return start

    def grow(self, capacity: int) -> None:
        self.ranges.grow(capacity)
        for name, column in self.columns.items():
            if column is not None:
                grown = np.zeros((capacity, *column.shape[1:]), column.dtype)
                grown[: len(column)] = column
                self.columns[name] = grown

    def write(self, name: str, start: int, values: Column) -> None:
        column = self.columns[name]
        if column is None or (name in self._guessed and len(values)):
            column = np.zeros((self.ranges.capacity, *values.shape[1:]), values.dtype)
            self.columns[name] = column
            (self._guessed.discard if len(values) else self._guessed.add)(name)
        column[start : start + len(values)] = values

    def put(self, name: str, at: IntArray, values: Column) -> None:
        """Write one entry at each place."""
        if self.columns[name] is None:
            self.write(name, 0, values[:0])
            self._guessed.discard(name)
        self[name][at] = values

    def takes(self, name: str, part: Column) -> bool:
        """Whether entries are numbers, and of the type that earlier ones were."""
        like = None if name in self._guessed else self.columns[name]
        if like is None:
            return part.dtype.kind in "if" and len(part) > 0
        return like.dtype == part.dtype and like.shape[1:] == part.shape[1:]

    def zeros(self, name: str, n: int) -> Column:
        """n zeros of the column's type; they stand for what an instance may leave out."""
        known = self.columns[name]
        if known is None:
            return np.zeros(n, np.int64)
        return np.zeros((n, *known.shape[1:]), known.dtype)

    def fitting(self, name: str, part: Column, before: Sequence[Column], called: str) -> Column:
        """What one instance brings, of the type that earlier ones (or those before it) brought.

        Raises:
            DataError: It is of another type, or no numbers.
        """
        like = None if name in self._guessed else self.columns[name]
        if like is None:
            like = next((b for b in before if len(b)), None)
        if len(part) == 0:  # an empty list has a type of numpy's choosing
            return np.zeros(0, np.int64) if like is None else like[:0]
        if part.dtype.kind not in "if":
            raise DataError(
                f"{called}: {self.kind} column '{name}' holds {part.dtype}; give integers "
                "up to 2**63 - 1, or floats"
            )
        if like is not None and (like.dtype, like.shape[1:]) != (part.dtype, part.shape[1:]):
            raise DataError(
                f"{called}: {self.kind} column '{name}' came as {part.dtype} {part.shape[1:]}, "
                f"earlier instances brought {like.dtype} {like.shape[1:]}; use one type throughout"
            )
        return part

    def __getitem__(self, name: str) -> Column:
        column = self.columns[name]
        if column is None:
            raise DataError(f"{self.kind} column '{name}' was never brought by an instance")
        return column
