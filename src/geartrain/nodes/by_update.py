"""Sums of which those that add say what updates it is for: the present one and those after it.

present       0   the sum itself
those ahead   1, 2, ...   sums of their own, until the update before theirs is done
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from geartrain.errors import ProtocolError
from geartrain.frames.message import IntArray
from geartrain.nodes.apart import for_rows


class AbstractByUpdate(ABC):
    """A sum of the present update, with those of the updates after it."""

    __slots__ = ("_ahead", "_pieces", "_spare", "_updates")

    def __init__(self) -> None:
        self._updates: IntArray | int | None = None
        self._pieces: tuple[IntArray, int, dict[int, int]] | None = None  # of so many rows
        self._ahead: list[Self] = []
        self._spare: list[Self] = []  # empty, with buffers

    @abstractmethod
    def _made_alike(self) -> Self:
        """An empty one of the same parameters."""

    @contextmanager
    def of_updates(self, updates: IntArray | int) -> Iterator[None]:
        """What is added meanwhile is of these updates, counted from the present one, which is 0.

        Args:
            updates: int64 ``(n,)``, of each row that a call has, of which what is added has one or
                some side by side; or that of all that is added.
        """
        some = updates != 0 if isinstance(updates, int) else updates.any()
        before, self._updates = self._updates, updates if some else None
        try:
            yield
        finally:
            self._updates = before

    def updates_of(self, n: int) -> IntArray:
        """The updates of n rows that are added now."""
        updates = self._updates
        if updates is None or isinstance(updates, int):
            return np.full(n, updates or 0, np.int64)
        return for_rows(updates, n)

    def _side_by_side(self, updates: IntArray, n: int) -> dict[int, int]:
        """How many of n rows each update has, if they lie side by side, one update after the other;
        else nothing.

        Args:
            updates: Those of which several are added now.
            n: Rows of what is added.
        """
        known = self._pieces
        if known is None or known[0] is not updates or known[1] != n:
            each = for_rows(updates, n)
            mixed = (each[1:] < each[:-1]).any()
            counts = [] if mixed else np.bincount(each).tolist()
            many = {update: rows for update, rows in enumerate(counts) if rows}
            known = self._pieces = updates, n, many
        return known[2]

    @property
    def whole(self) -> Self | None:
        """The sum of what is added now; None: it is of rows of several updates."""
        updates = self._updates
        if updates is None:
            return self
        return self.of_update(updates) if isinstance(updates, int) else None

    @property
    def of_several(self) -> bool:
        """Whether what is added now is of rows of several updates."""
        return self._updates is not None and not isinstance(self._updates, int)

    def _whole(self) -> Self:
        """The sum of the update that all is of which is added now."""
        if not isinstance(self._updates, int):
            raise ProtocolError(
                "a gradient that is no product and no sum of rows is of several updates at once"
            )
        return self.of_update(self._updates)

    def of_update(self, update: int) -> Self:
        """The sum of one update, counted from the present one."""
        while len(self._ahead) < update:
            self._ahead.append(self._spare.pop() if self._spare else self._made_alike())
        return self if update == 0 else self._ahead[update - 1]
