"""A pool of memory for tensors that come and go together, of other sizes each time.

    empty((1088, 64)) ─► a range of a large block, the least that fits ─► a tensor of its own
    nobody has the tensor any more ─► the range is free, and lent again

malloc keeps what a firing gives back as pieces between what stays, and pieces are seldom as large
as what the next firing asks for: a process has twice what its tensors take. Memory that is taken
from the system anew each time has its pages written with zeros first. A block stays; what lies
behind all of its tensors is lent last, so that it can go back to the system.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.native.ranges import Ranges

LEAST: Final = 1 << 16
"""Bytes of a tensor from which on it is lent; fewer are malloc's."""

_LINE: Final = 64
"""Bytes that are lent together: each tensor begins with a line."""

_BLOCK: Final = 1 << 26
"""Bytes of a block at least; pages of it that nobody has written to are no memory yet."""

_KINDS: Final = {
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.int64: "<i8",
    torch.uint8: "|u1",
}
"""Dtypes as numpy writes them; others are bytes first."""

_LOOK: Final = 64
"""After so many tensors, what none of them has reached goes back to the system."""

_PIECE: Final = 1 << 18
"""Bytes that are moved together."""


@final
class _Pages:
    """Pages of the system's, and which lines of them are free."""

    __slots__ = ("_mapped", "address", "free", "highest", "lent", "most", "written")

    def __init__(self, nbytes: int) -> None:
        self._mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address: int = np.frombuffer(self._mapped, np.uint8).__array_interface__["data"][0]
        self.free = Ranges(nbytes // _LINE)
        self.highest = self.written = 0
        """Bytes to the end of the last tensor since it was looked at, and of the last page that may
        have been written to."""
        self.lent = self.most = 0
        """Lines that are lent, and the most since a run was over."""

    def lend(self, lines: int) -> int | None:
        """The first of so many lines, which are lent now; None: there are not so many."""
        first = self.free.take_closest(lines)
        if first is not None:
            end = (first + lines) * _LINE
            if end > self.highest:
                self.highest = end
            if end > self.written:
                self.written = end
            self.lent += lines
            if self.lent > self.most:
                self.most = self.lent
        return first

    def sort_in(self, first: int, lines: int) -> None:
        """These are free again."""
        self.free.give(first, lines)
        self.lent -= lines

    def give_back_pages(self) -> None:
        """Pages beyond all tensors of late go back to the system."""
        self._keep(self.highest)
        self.highest = self.free.end * _LINE

    def rest(self) -> None:
        """A run is over: pages beyond as many as its tensors had at most go back. Where they have
        reached further there was room between them."""
        self.highest, self.most = self.most * _LINE, 0
        self._keep(self.highest)

    def forget(self, begin: int, end: int) -> None:
        """Whole pages between two addresses go back, those that are here."""
        first = max(begin - self.address, 0)
        first += -first % mmap.PAGESIZE
        last = min(end - self.address, len(self._mapped))
        last -= last % mmap.PAGESIZE
        if last > first:
            self._mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _keep(self, nbytes: int) -> None:
        """Pages beyond these, and beyond all that lives, go back."""
        nbytes = max(nbytes, self.free.end * _LINE)
        first = nbytes + -nbytes % mmap.PAGESIZE
        if self.written > first:
            self._mapped.madvise(mmap.MADV_DONTNEED, first, self.written - first)
        self.written = nbytes


@final
class _Lent:
    """Lines of a block, free as soon as nobody has this object: numpy and torch hold it."""

    __slots__ = ("__array_interface__", "_back", "_block", "_first", "_lines")

    def __init__(
        self, block: _Pages, first: int, lines: int, back: deque[tuple[_Pages, int, int]]
    ) -> None:
        self._block, self._first, self._lines, self._back = block, first, lines, back

    def tensor(self, shape: tuple[int, ...], kind: str) -> Tensor:
        """Entries of a kind, as numpy writes kinds."""
        at = self._block.address + self._first * _LINE
        self.__array_interface__: dict[str, Any] = {
            "data": (at, False),
            "shape": shape,
            "typestr": kind,
            "version": 3,
        }
        return torch.from_numpy(np.asarray(self))

    def __del__(self) -> None:
        # In whatever thread the last one was that had it: who lends next sorts it in.
        self._back.append((self._block, self._first, self._lines))


@final
class MemoryPool:
    """Memory for tensors on the host, which may end in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[_Pages] = []
        self._back: deque[tuple[_Pages, int, int]] = deque()
        self._until_look = _LOOK

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the host, whose numbers have no meaning."""
        count = 1
        for n in shape:
            count *= n
        nbytes = count * dtype.itemsize
        if nbytes < LEAST:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with self._lock:
            lent = self._lend(-(-nbytes // _LINE))
        kind = _KINDS.get(dtype)
        if kind is None:
            return lent.tensor((nbytes,), "|u1").view(dtype).view(tuple(shape))
        return lent.tensor(tuple(shape), kind)

    def nbytes(self) -> int:
        """Bytes that are lent."""
        with self._lock:
            self._sort_in()
            return sum([block.free.capacity - block.free.free() for block in self._blocks]) * _LINE

    def rest(self) -> None:
        """A run is over, and has left its tensors; the next one is taken to want as much. Pages
        beyond that go back, which an earlier one may have wanted, in which ways to compute were
        tried, or this one, as what it had lay apart."""
        with self._lock:
            self._sort_in()
            for block in self._blocks:
                block.rest()

    def move(self, at: int, to: int, nbytes: int) -> None:
        """Copy bytes that nobody will read where they are, from where pages go back meanwhile: they
        are not there twice. What is not lent is copied alone.

        Args:
            at, to: Addresses; what lies there does not overlap.
            nbytes: How many.
        """
        if nbytes < 2 * _PIECE:
            ctypes.memmove(to, at, nbytes)
            return
        with self._lock:
            blocks = [*self._blocks]
        for begin in range(0, nbytes, _PIECE):
            end = min(begin + _PIECE, nbytes)
            ctypes.memmove(to + begin, at + begin, end - begin)
            for block in blocks:
                block.forget(at + begin, at + end)

    def forked(self) -> None:
        """A process has been forked while some thread may have been in here."""
        self._lock = threading.Lock()

    def _lend(self, lines: int) -> _Lent:
        self._sort_in()
        self._until_look -= 1
        if not self._until_look:
            self._look()
        for block in self._blocks:
            first = block.lend(lines)
            if first is not None:
                break
        else:
            nbytes = lines * _LINE
            block = _Pages(max(_BLOCK, nbytes + -nbytes % mmap.PAGESIZE))
            self._blocks.append(block)
            first = block.lend(lines)
            assert first is not None
        return _Lent(block, first, lines, self._back)

    def _sort_in(self) -> None:
        back = self._back
        while back:
            block, first, lines = back.popleft()
            block.sort_in(first, lines)

    def _look(self) -> None:
        """What nobody has asked for of late goes back."""
        self._until_look = _LOOK
        self._blocks[1:] = [block for block in self._blocks[1:] if block.highest]
        for block in self._blocks:
            block.give_back_pages()


shared: Final = MemoryPool()
"""That of the process."""

lasting: Final = MemoryPool()
"""Likewise, for what stays from run to run: it would keep large pieces of the other apart."""


def made(shape: Sequence[int], dtype: torch.dtype, within: MemoryPool = shared) -> Tensor:
    """A contiguous tensor on the host that a call makes, whose numbers have no meaning: lent if it
    is large. Of those that malloc has for a moment it keeps the pages, each between others."""
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    if nbytes >= LEAST:
        return within.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def made_words(shape: Sequence[int]) -> NDArray[np.int64]:
    """Likewise an array of int64."""
    return made(shape, torch.int64).numpy()


def copied(x: Tensor) -> Tensor:
    """A contiguous copy of a tensor, lent likewise if it is on the host."""
    if not x.is_cpu:
        return x.clone()
    return made(x.shape, x.dtype).copy_(x)


_uses: Final = getattr(torch._C, "_storage_Use_Count", None)  # torch does not document it


def _count(x: Tensor) -> int:
    """Tensors that have the memory of one, and whoever asks."""
    return 0 if _uses is None else int(_uses(x.untyped_storage()._cdata))


_ALONE: Final = _count(torch.empty(1))


def is_alone(x: Tensor, known: int = 0) -> bool:
    """Whether no other tensor has its memory, whole or in part, but for so many that are known;
    False if torch cannot be asked."""
    return _uses is not None and _uses(x.untyped_storage()._cdata) == _ALONE + known


os.register_at_fork(after_in_child=shared.forked)
os.register_at_fork(after_in_child=lasting.forked)
