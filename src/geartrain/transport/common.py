"""Large tensors between processes of one host, in memory that all of them have.

    sender ── copies the tensor into its own area, writes into the message where ──► receiver
    sender ◄── any later message says which it has let go of ── has it, for as long as it likes

Only messages tell of what lies there, so nobody looks at memory that another one is writing to,
and no fence is wanted: who has read a message sees what was written before it was sent. A sender
without room waits for nothing: the tensor goes in the message, as it does between hosts.

A receiver lets go of a tensor as the last object in Python that shares its storage goes. Pages that
were wanted while a receiver was behind go back to the system when it is not any more.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from bisect import insort
from collections.abc import Collection
from typing import Any, Final, NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import TransportError
from geartrain.transport.record import (
    KINDS,
    MOST_DIMENSIONS,
    NUMPY_CODES_FROM,
    Array,
    Record,
    plain_tensor,
)

LENT: Final = 0xFFFD
"""Kind of a record, some of whose tensors lie in common memory; no poll returns it."""
AREA_BYTES: Final = 64 << 20
"""Of each process. Pages that nobody has written to take no memory."""
KEPT_BYTES: Final = 8 << 20
"""Of an area, that stay in memory when nothing lies there; the rest goes back to the system when
twice as much has been wanted. To have a page again costs as much as to copy some 4 KiB."""
_LEAST_BYTES: Final = 32 << 10
"""Of a tensor; a smaller one costs less in its message."""
_ALIGNED: Final = 64
_MANY: Final = 8
_MUCH: Final = 1 << 20
"""So many tensors or bytes that have been let go are told with whatever message comes next."""
_HEAD: Final = 3  # ints before the places: kind, tensors, those that are let go


@final
class Common:
    """What one process has lent to others, and has borrowed of them, in one pass.

    Args:
        memory: uint8, the same for all processes; an equal share is the area of each.
        me: Number of this process.
        n: Processes.
        borrowers: Those that drop whatever they have borrowed before the memory is used anew.
    """

    def __init__(
        self, memory: NDArray[np.uint8], me: int, n: int, borrowers: Collection[int]
    ) -> None:
        self._memory, self._n, self._borrowers = memory, n, frozenset(borrowers) - {me}
        self._area = area = memory.size // n // _ALIGNED * _ALIGNED
        self._holes = [(me * area, area)]  # by their start
        self._end = self._wanted = (me + 1) * area  # pages behind this have not been wanted
        self._shrink()
        self._lent: list[dict[int, int]] = [{} for _ in range(n)]  # start to bytes, by receiver
        self._borrowed: list[dict[int, weakref.ref[Any]]] = [{} for _ in range(n)]  # by sender
        self._let_go: list[list[int]] = [[] for _ in range(n)]  # of each sender
        self._let_go_bytes = [0] * n

    @property
    def lent_bytes(self) -> int:
        """What others have of this process, as far as it knows."""
        return sum(sum(lent.values()) for lent in self._lent)

    def put(self, to: int, record: Record) -> tuple[Record, int]:
        """The record with its large tensors in common memory, as far as there is room.

        Returns:
            It, or another one in its place, and the bytes that do not travel.
        """
        places: list[int] = []
        arrays: list[Array | None] | None = None
        count = nbytes = 0
        if to in self._borrowers:
            for k, x in enumerate(record.arrays):
                if not isinstance(x, Tensor) or x.nbytes < _LEAST_BYTES:
                    continue
                array, code = plain_tensor(x)
                start = self._find(array.nbytes)
                if start is None:
                    continue
                np.copyto(self._array(array.shape, array.dtype, start), array)
                self._lent[to][start] = array.nbytes
                arrays = list(record.arrays) if arrays is None else arrays
                arrays[k] = None
                places += k, start, code, array.ndim, *array.shape
                count, nbytes = count + 1, nbytes + array.nbytes
        told = self._let_go[to]
        if not count and len(told) < _MANY and self._let_go_bytes[to] < _MUCH:
            return record, 0
        self._let_go[to], self._let_go_bytes[to] = [], 0
        ints = (record.kind, count, len(told), *places, *told, *record.ints)
        found = record.arrays if arrays is None else tuple(arrays)
        return Record(LENT, ints, record.floats, found), nbytes

    def take(self, sender: int, record: Record) -> tuple[Record, int]:
        """What another process has ``put``, and the bytes that did not travel.

        Raises:
            TransportError: It tells of what that one has not lent, or was not lent.
        """
        ints = record.ints
        if len(ints) < _HEAD:
            _refuse("numbers", len(ints), f"{_HEAD} or more")
        kind, count, told = ints[:_HEAD]
        at, arrays, nbytes = _HEAD, list(record.arrays), 0
        if not 0 <= count <= len(arrays):
            _refuse("number of tensors", count, f"0..{len(arrays)}")
        for _ in range(count):
            k, start, code, ndim, *_ = *ints[at : at + 4], -1, -1, -1, -1
            if not (0 <= k < len(arrays) and arrays[k] is None and 0 <= ndim <= MOST_DIMENSIONS):
                _refuse("place", ints[at : at + 4], "an array that is not there, and its shape")
            shape = ints[at + 4 : at + 4 + ndim]
            arrays[k] = x = self._borrow(sender, start, code, shape, ndim)
            nbytes += x.nbytes
            at += 4 + ndim
        if not 0 <= told <= len(ints) - at:
            _refuse("number let go of", told, f"0..{len(ints) - at}")
        for start in ints[at : at + told]:
            self._take_back(sender, start)
        return Record(kind, ints[at + told :], record.floats, tuple(arrays)), nbytes

    def forget(self, who: int) -> None:
        """A process is gone: nobody has any more what it was lent."""
        for start in [*self._lent[who]]:
            self._take_back(who, start)

    def _borrow(
        self, sender: int, start: int, code: int, shape: tuple[int, ...], ndim: int
    ) -> Array:
        found = KINDS.get(code)
        if (
            found is None
            or code >= NUMPY_CODES_FROM
            or len(shape) != ndim
            or min(shape, default=0) < 1
        ):
            _refuse(
                "tensor", f"of code {code} and shape {shape}", "a known dtype and some elements"
            )
        dtype, make = found
        first = sender * self._area
        nbytes = math.prod(shape) * dtype.itemsize
        if start % _ALIGNED or not first <= start <= first + self._area - nbytes:
            told = f"{nbytes:,} bytes at {start:,}"
            _refuse("place", told, f"a multiple of {_ALIGNED} in the area at {first:,}")
        if start in self._borrowed[sender]:
            _refuse("place", start, "one that was not lent already")
        array = self._array(shape, dtype, start)
        x = array if make is None else make(array)  # knows the array itself, not what that is of

        def over(_: object) -> None:
            del self._borrowed[sender][start]
            self._let_go[sender].append(start)
            self._let_go_bytes[sender] += nbytes

        self._borrowed[sender][start] = weakref.ref(array, over)
        return x

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> NDArray[Any]:
        return np.ndarray(shape, dtype, self._memory, start)

    def _find(self, nbytes: int) -> int | None:
        """Take the first hole that is large enough: what was written to lately is in caches."""
        size = -(-nbytes // _ALIGNED) * _ALIGNED
        for k, (start, room) in enumerate(self._holes):
            if room >= size:
                self._holes[k : k + 1] = [(start + size, room - size)] if room > size else []
                self._wanted = max(self._wanted, start + size)
                return start
        return None

    def _shrink(self) -> None:
        """Give back pages at the end that nothing lies on, if they are many."""
        start, size = self._holes[-1] if self._holes else (0, 0)
        if start + size < self._end or self._wanted - start <= 2 * KEPT_BYTES:
            return
        _give_back(self._memory, start + KEPT_BYTES, self._wanted)
        self._wanted = start + KEPT_BYTES

    def _take_back(self, borrower: int, start: int) -> None:
        nbytes = self._lent[borrower].pop(start, None)
        if nbytes is None:
            _refuse("place let go of", start, f"one that process {borrower} was lent")
        insort(self._holes, (start, -(-nbytes // _ALIGNED) * _ALIGNED))
        self._holes = _joined(self._holes)
        self._shrink()


def may_lie_in_common(x: Tensor) -> bool:
    """Whether a tensor's data can be moved to memory that several processes have."""
    return x.layout is torch.strided and x.is_cpu and type(x.data) is Tensor and x.numel() > 0


def _give_back(memory: NDArray[np.uint8], start: int, end: int) -> None:
    """Whole pages between two places, which are zeros when they are wanted again.

    Memory that is no file stays as it is, and so does any on systems without worker processes.
    """
    if not sys.platform.startswith("linux"):
        return
    at, page = memory.ctypes.data, mmap.PAGESIZE
    first, last = -(-(at + start) // page) * page, (at + end) // page * page
    if last > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_REMOVE)


def _joined(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Holes that touch are one."""
    found: list[tuple[int, int]] = []
    for start, size in holes:
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((start, size))
    return found


def _refuse(what: str, value: object, expected: str) -> NoReturn:
    raise TransportError(
        f"a message on common memory that cannot be read: {what} is {value}, expected {expected}. "
        "It was not sent by this version of geartrain, or was damaged on its way"
    )
