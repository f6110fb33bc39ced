"""Matrix products that a look at torch's operations misses: those inside kernels, and late ones.

    with Counted() as counted: ...     counted.operations     in this thread meanwhile
    with Noted() as noted: ...         noted.products         each that a kernel did, in order

Products of ``native/products.inc`` are counted where they are done. A kernel that multiplies by
itself says so in C: ``COUNT_PRODUCT(rows, depth, width, sizeof(REAL))``. A product that is asked
for now and done by torch later, outside of what is watched, is told of with ``tell``. While nobody
counts, all that is a look at one number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from geartrain.native import library

ROOM: Final = 1 << 16
"""Products that can be noted."""

FIELDS: Final = ("rows", "depth", "width", "bytes", "turned")
"""What is noted of (rows, depth) times (depth, width): bytes of an entry, and whether columns of
the first operand lie side by side."""

listening = 0
"""How many count, in all threads; look at it before a ``tell``."""


@final
class _Here(threading.local):
    told = 0
    done_for_others = False


_here = _Here()
_lock = threading.Lock()


def tell(rows: int, depth: int, width: int) -> None:
    """A product (rows, depth) times (depth, width) is asked for now, whenever it is done."""
    _here.told += 2 * rows * depth * width


@contextmanager
def told_before() -> Iterator[None]:
    """What is multiplied inside has been told of; see ``is_told_before``."""
    outside, _here.done_for_others = _here.done_for_others, True
    try:
        yield
    finally:
        _here.done_for_others = outside


def is_told_before() -> bool:
    """Whether a counter of torch's products is to leave out those of this moment."""
    return _here.done_for_others


@final
class Counted:
    """Operations of products in this thread while it is entered: inside kernels, and told of.

    Two for a multiplication and an addition. Several may be entered at once. ``operations`` is
    known when it is left.
    """

    def __init__(self) -> None:
        self.operations = 0
        self._before = 0

    def __enter__(self) -> Counted:
        self._before = _count(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.operations = _count(-1) - self._before


def _count(more: int) -> int:
    """One more, or less, counts; operations of this thread so far."""
    global listening
    with _lock:
        listening += more
    native = library.current()
    return _here.told + (0 if native is None else native.count(more))


@final
class Noted:
    """Products that kernels do in this thread while it is entered; one at a time in a thread.

    ``products``, int64 ``(n, 5)`` with the columns ``FIELDS``, is known when it is left; it is
    empty where there are no native kernels.

    Raises:
        OverflowError: They are more than ``ROOM``.
    """

    def __init__(self) -> None:
        self.products: NDArray[np.int64] = np.empty((0, len(FIELDS)), np.int64)
        self._notes = self.products

    def __enter__(self) -> Noted:
        native = library.current()
        if native is not None:
            self._notes = np.empty((ROOM, len(FIELDS)), np.int64)
            native.note(ROOM, self._notes.ctypes.data)
            native.count(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        native = library.current()
        if native is None:
            return
        native.count(-1)
        noted = native.note(0, None)
        if noted > ROOM and error is None:
            raise OverflowError(f"{noted} products at once, with room for {ROOM}: note fewer")
        self.products = self._notes[: min(noted, ROOM)].copy()
