"""Rows by their keys: in what order they are, which have the same, and whether they lie so already.

Keys are int64 columns, the first of them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geartrain.frames.message import IntArray

_MANY: Final = 1024
"""Rows from which on it takes less to make one number of their keys than to sort by each."""
_ROOM: Final = 1 << 62


def _combined(keys: Sequence[IntArray]) -> IntArray | None:
    """One number for each row, in the order of its keys, the first of them first; None: it has no
    room for them."""
    found, room = np.zeros(keys[0].size, np.int64), 1
    for key in keys:
        least = int(key.min())
        size = int(key.max()) - least + 1
        room *= size
        if room > _ROOM:
            return None
        if size > 1:
            found *= size
            found += key
            found -= least
    return found


def order_of(keys: Sequence[IntArray]) -> IntArray:
    """Rows in the order of their keys, the first of them first, and else as they are."""
    one = keys[0] if len(keys) == 1 else None
    if one is None and keys[0].size >= _MANY:
        one = _combined(keys)
    return np.lexsort(tuple(keys)[::-1]) if one is None else one.argsort(kind="stable")


def by_key(
    keys: Sequence[IntArray], places: IntArray | None
) -> tuple[IntArray, IntArray, IntArray]:
    """An order of rows by key and then place, where in it each key begins, and how many it has."""
    keys = keys[::-1]
    if len(keys) > 1 and keys[0].size >= _MANY and (one := _combined(keys)) is not None:
        keys = [one]
    order = order_of(keys if places is None else [*keys, places])
    begins = np.zeros(order.size, np.bool_)
    begins[0] = True
    for key in keys:
        ranked = key.take(order)
        begins[1:] |= ranked[1:] != ranked[:-1]
    (starts,) = begins.nonzero()
    counts = np.empty_like(starts)
    counts[-1] = order.size - starts[-1]
    np.subtract(starts[1:], starts[:-1], out=counts[:-1])
    return order, starts, counts


def ascend(keys: Sequence[IntArray], *, strictly: bool = True) -> bool:
    """Whether rows are in the order of their keys, the first of them first, and none has those of
    the one before, or may."""
    equal: NDArray[np.bool_] | None = None  # to the row before, by the keys so far
    for key in keys:
        less, same = key[1:] < key[:-1], key[1:] == key[:-1]
        if equal is not None:
            less &= equal
            same &= equal
        if np.count_nonzero(less):
            return False
        equal = same
        if not np.count_nonzero(equal):
            return True
    return not strictly or equal is None


def equal(some: Sequence[IntArray], others: Sequence[IntArray]) -> bool:
    """Whether columns are the same."""
    for a, b in zip(some, others, strict=True):
        if np.count_nonzero(a != b):
            return False
    return True


def repeated(places: IntArray, starts: IntArray) -> NDArray[np.bool_]:
    """Which rows, sorted by key and place, have the place of the one before."""
    same = np.zeros(places.size, np.bool_)
    np.equal(places[1:], places[:-1], out=same[1:])
    same[starts] = False
    return same
