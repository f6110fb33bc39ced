"""From keys to slots, a whole batch at a time.

    keys (k columns, n rows)  ─►  slots (n,)      equal keys, equal slot

``DirectTable`` serves one column that is an index of the arena: the table is addressed by it.
``HashTable`` serves any columns: open addressing, linear probing, the full key compared. Neither
loops over rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from geartrain.frames.frame import View
from geartrain.frames.message import INSTANCE, VERTEX, Forward, IntArray
from geartrain.nodes.node import Place

NewSlots = Callable[[IntArray], int]
"""Gets the rows (positions in the batch) of new keys; returns the first of as many new slots."""


class AbstractTable(ABC):
    """Keys that are alive now, each with a slot."""

    @abstractmethod
    def slots(self, keys: IntArray, allocate: NewSlots) -> IntArray:
        """The slot of each key ``(columns, n)``; unknown ones get a new slot."""

    @abstractmethod
    def remove(self, keys: IntArray) -> None:
        """Forget keys ``(columns, n)``, which must be there."""


@final
class DirectTable(AbstractTable):
    """One non-negative key column, small numbers: a table addressed by the key."""

    def __init__(self) -> None:
        self._slot = np.full(1024, -1, np.int64)

    def slots(self, keys: IntArray, allocate: NewSlots) -> IntArray:
        key = keys[0]
        top = int(key.max())
        if top >= self._slot.size:
            grown = np.full(max(2 * self._slot.size, top + 1), -1, np.int64)
            grown[: self._slot.size] = self._slot
            self._slot = grown
        found: IntArray = self._slot[key]
        fresh = np.flatnonzero(found < 0)
        if fresh.size:
            unique, first = np.unique(key[fresh], return_index=True)
            start = allocate(fresh[first])
            self._slot[unique] = np.arange(start, start + unique.size)
            found[fresh] = self._slot[key[fresh]]
        return found

    def remove(self, keys: IntArray) -> None:
        self._slot[keys[0]] = -1


@final
class HashTable(AbstractTable):
    """Any key columns.

    Args:
        columns: How many columns a key has.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._used = 0  # entries that are not empty: alive or removed
        self._make(1024)

    def slots(self, keys: IntArray, allocate: NewSlots) -> IntArray:
        n = keys.shape[1]
        if 2 * (self._used + n) > self._entry.size:
            self._rebuild(n)

        def assign(rows: IntArray) -> IntArray:
            start = allocate(rows)
            return np.arange(start, start + rows.size)

        return self._insert(keys, assign)

    def _insert(self, keys: IntArray, assign: Callable[[IntArray], IntArray]) -> IntArray:
        """Find keys, or enter them with the slots that ``assign`` gives to their rows."""
        n = keys.shape[1]
        found = np.full(n, -1, np.int64)
        at = self._hash(keys)
        pending = np.arange(n)
        while pending.size:
            here = at[pending]
            free = self._entry[here] == _EMPTY
            if free.any():
                self._claim(keys, pending[free], here[free], assign)
            slot = self._entry[here]
            match = (slot >= 0) & (self._key[:, here] == keys[:, pending]).all(0)
            found[pending[match]] = slot[match]
            pending = pending[~match]
            at[pending] = (at[pending] + 1) & self._mask
        return found

    def remove(self, keys: IntArray) -> None:
        at = self._hash(keys)
        pending = np.arange(keys.shape[1])
        while pending.size:
            here = at[pending]
            entry = self._entry[here]
            assert (entry != _EMPTY).all(), "a key that is not there was removed"
            match = (entry >= 0) & (self._key[:, here] == keys[:, pending]).all(0)
            self._entry[here[match]] = _REMOVED
            pending = pending[~match]
            at[pending] = (at[pending] + 1) & self._mask

    def _claim(
        self,
        keys: IntArray,
        rows: IntArray,
        here: IntArray,
        assign: Callable[[IntArray], IntArray],
    ) -> None:
        """Of the rows that met the same empty entry, the last one written takes it."""
        self._entry[here] = -3 - rows
        winners = np.flatnonzero(self._entry[here] == -3 - rows)
        rows, here = rows[winners], here[winners]
        self._entry[here] = assign(rows)
        self._key[:, here] = keys[:, rows]
        self._used += rows.size

    def _hash(self, keys: IntArray) -> IntArray:
        mixed = np.zeros(keys.shape[1], np.uint64)
        for column in keys:
            mixed = (mixed ^ column.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return (mixed & np.uint64(self._mask)).astype(np.int64)

    def _make(self, size: int) -> None:
        self._entry = np.full(size, _EMPTY, np.int64)
        self._key = np.zeros((self._columns, size), np.int64)
        self._mask = size - 1

    def _rebuild(self, n: int) -> None:
        alive = np.flatnonzero(self._entry >= 0)
        keys, slots = self._key[:, alive], self._entry[alive]
        size = self._entry.size
        while size < 4 * (alive.size + n):
            size *= 2
        self._make(size)
        self._used = 0
        if alive.size:
            self._insert(keys, lambda rows: slots[rows])


_EMPTY, _REMOVED = -1, -2


def key_columns(columns: Sequence[int], edge: int | None) -> list[int]:
    """State columns of a key, which tell instances apart.

    Args:
        columns: Those that were named.
        edge: The column of edges, if there is one; an edge or a vertex is of one instance.
    """
    inside = {VERTEX, INSTANCE} | ({edge} if edge is not None else set())
    return list(columns) if inside & set(columns) else [INSTANCE, *columns]


def table_for(columns: Sequence[int], edge: int | None) -> AbstractTable:
    """Addressed directly where the key is one index of the arena, else hashed."""
    if len(columns) == 1 and columns[0] in (INSTANCE, VERTEX, edge):
        return DirectTable()
    return HashTable(len(columns))


def describe_key(place: Place, state: IntArray, columns: Sequence[int]) -> str:
    """A key in the user's numbers: ``instance 7 (train.txt:12), vertex=3, step=1``."""
    view = View(Forward((), state, np.zeros(1, np.int64)), place.arena, place.schema)
    names = {i: name for name, i in place.schema.state.items()}
    parts = [place.arena.describe(int(state[INSTANCE, 0]))]
    parts += [f"{names[i]}={int(getattr(view, names[i])[0])}" for i in columns if i != INSTANCE]
    return ", ".join(parts)


def repeated(values: IntArray) -> NDArray[np.bool_]:
    """Mask of the entries that occurred before."""
    _, first = np.unique(values, return_index=True)
    mask = np.ones(values.size, np.bool_)
    mask[first] = False
    return mask
