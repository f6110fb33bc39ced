"""Addresses of a routine that C calls for many rows: where what it reads and writes lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from geartrain.frames.message import IntArray
from geartrain.native import calls
from geartrain.native.calls import Lies, RowsOf, SeveralForm, SeveralRoutine
from geartrain.native.rows import pointer

VALUES: Final = ("output", "tangent")


@final
class RoutineSlots:
    """Addresses of one routine.

    Args:
        routine: It.
        rows: Bytes from row to row of each output.
    """

    def __init__(self, form: SeveralForm, routine: SeveralRoutine, rows: Sequence[int]) -> None:
        self._form, self._routine = form, routine
        n = routine.steps.kinds.size
        self._bases, self._strides, self._whose = (np.zeros(n, np.int64) for _ in range(3))
        for slot, (where, number) in routine.slots.items():
            if where in VALUES:
                j = number if where == "output" else form.tangents[number]
                self._whose[slot], self._strides[slot] = RowsOf.OF_VALUE, rows[j]
        self._several = np.zeros(calls.SEVERAL_WORDS, np.int64)
        self._several[2:5] = pointer(routine.steps.kinds), form.answers, -1

    @property
    def words(self) -> tuple[int, ...]:
        """As calls.inc has a routine."""
        arrays = self._bases, self._strides, self._whose, self._several
        return (*self._routine.steps.words, *map(pointer, arrays))

    def place(self, at: dict[Lies, int], held: int) -> None:
        """Write where everything lies.

        Args:
            at: Addresses.
            held: Rows of the memory.
        """
        bases = self._form.addresses(self._routine).copy()
        for slot, lies in self._routine.slots.items():
            bases[slot] = at[lies]
        self._bases[:] = bases
        self._several[:2] = held, at["ends", 0]

    def reach(self, value: int, cells: int, masks: IntArray) -> None:
        """Have it note who has got a gradient of a value that rows read as a memory.

        Args:
            value: Its number.
            cells: Where the places lie that they read.
            masks: By column, the outputs that its gradient comes from, as bits.
        """
        self._several[4:] = value, cells, masks.size, pointer(masks)
