"""Memory for rows of several tensors, in one piece."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Final, final

import torch
from torch import Tensor

from geartrain.native import pool

MUCH_MORE: Final = 2
"""Memory for so many times the rows that come is not used again."""
ENOUGH: Final = 0.85
"""Of the rows that are expected: memory for fewer is not used again. Those who expect rows expect
an eighth more than came last."""

_LINE: Final = 64
"""Bytes: each tensor of an arena begins at a multiple."""

_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


def larger(rows: int, least: int, expected: int) -> int:
    """For how many rows there is to be room where that for some is not enough.

    Args:
        rows: For so many there is.
        least: So many are wanted now.
        expected: So many were thought to come in all; 0: nobody knew. If that were nearly right,
            few more will come.
    """
    more = rows // 4 if expected else rows
    return max(least, expected, rows + more)


def few_more(rows: int, most: int) -> int:
    """For how many rows there is to be room where it is known how many there are.

    Memory that has room for the next turn's too need not be lent anew, larger by a few rows, while
    what it had is as much too small for all that comes.

    Args:
        rows: So many.
        most: Of any turn so far.
    """
    return max(rows, min(most, rows + rows // 4))


@final
class Block:
    """A tensor of an arena.

    Args:
        dtype, tail: Its dtype, and its shape after the rows.
    """

    __slots__ = ("dtype", "entries", "row", "strides", "tail")

    def __init__(self, dtype: torch.dtype, tail: tuple[int, ...]) -> None:
        self.dtype, self.tail = dtype, tail
        self.strides = torch.empty((0, *tail)).stride()
        self.entries = prod(tail)
        self.row = self.entries * dtype.itemsize
        """Bytes."""


@final
class PassingMemory:
    """Memory that is lent in ranges, until all of them are done with; then it is lent anew.

    Between turns there is none of the pool's.
    """

    __slots__ = ("_memory", "_most", "_used")

    def __init__(self) -> None:
        self._memory = _NOTHING
        self._used = self._most = 0

    def begin(self, nbytes: int) -> None:
        """What has been lent is done with, but for what somebody still has a view of; so many bytes
        will be asked for."""
        self._used, self._most = 0, max(self._most, nbytes)
        if self._memory.nbytes < nbytes or not pool.is_alone(self._memory):
            self._memory = _NOTHING
            self._memory = pool.shared.empty((few_more(nbytes, self._most),), torch.uint8)

    def rest(self) -> None:
        """A turn is over. So little that it is malloc's stays, and with it where all of it lies."""
        self._used = 0
        if self._memory.nbytes >= pool.LEAST:
            self._memory = _NOTHING

    def lend(self, nbytes: int) -> tuple[Tensor, int]:
        """So many bytes: of which memory, and the first of them there."""
        first, end = self._used, self._used + nbytes + -nbytes % _LINE
        if end > self._memory.nbytes:
            return pool.shared.empty((nbytes,), torch.uint8), 0
        self._used = end
        return self._memory, first

    def of_call(self, blocks: Sequence[Block], rows: int, before: RowMemory) -> RowMemory:
        """Memory for rows of one call, which is over before another one begins: that of all lies in
        the same place.

        Args:
            blocks: What has rows.
            rows: For so many.
            before: What the same module had; if that still lies there, it is used again.
        """
        if rows <= before.rows and before.lies_in(self._memory):
            return before
        self.begin(nbytes_of(blocks, rows))
        return RowMemory(blocks, rows, self)


def nbytes_of(blocks: Sequence[Block], rows: int) -> int:
    """Bytes that memory for so many rows takes."""
    return sum(_each_nbytes(blocks, rows))


def _each_nbytes(blocks: Sequence[Block], rows: int) -> list[int]:
    return [rows * block.row + -rows * block.row % _LINE for block in blocks]


def _copy(at: int, to: int, nbytes: int) -> None:
    ctypes.memmove(to, at, nbytes)


@final
class RowMemory:
    """Memory for some rows of several tensors.

    Args:
        blocks: They.
        rows: How many each has room for.
        within: Lends it; None: it has memory of its own.
    """

    __slots__ = (
        "_blocks",
        "_first",
        "_memory",
        "_nbytes",
        "_typed",
        "begins",
        "pointers",
        "rows",
    )

    def __init__(
        self, blocks: Sequence[Block], rows: int, within: PassingMemory | None = None
    ) -> None:
        self._blocks, self.rows, self._first = blocks, rows, 0
        *self.begins, total = accumulate(_each_nbytes(blocks, rows), initial=0)
        if within is None:
            self._memory = pool.shared.empty((total,), torch.uint8)
        else:
            self._memory, self._first = within.lend(total)
        self._typed = {torch.uint8: self._memory}
        self._nbytes = total
        at = self._memory.data_ptr() + self._first
        self.pointers = [at + begin for begin in self.begins]
        """Of each tensor."""

    def view(self, k: int, first: int, n: int) -> Tensor:
        """n rows of a tensor."""
        block = self._blocks[k]
        typed = self._typed.get(block.dtype)
        if typed is None:
            typed = self._typed[block.dtype] = self._memory.view(block.dtype)
        begin = (self._first + self.begins[k]) // block.dtype.itemsize + first * block.entries
        return typed.as_strided((n, *block.tail), block.strides, begin)

    def write(self, k: int, first: int, n: int, x: Tensor) -> None:
        """Let n rows of a tensor be those of x."""
        block = self._blocks[k]
        nbytes, as_here = n * block.row, x.dtype is block.dtype and x.is_contiguous()
        if as_here and x.nbytes == nbytes:
            ctypes.memmove(self.pointers[k] + first * block.row, x.data_ptr(), nbytes)
        else:
            self.view(k, first, n).copy_(x)

    def clear(self) -> None:
        """Let all of it be zeros."""
        ctypes.memset(self._memory.data_ptr() + self._first, 0, self._nbytes)

    def grown(self, rows: int, used: int) -> RowMemory:
        """A larger one, with the rows that have been used; what nobody else has is not there
        twice."""
        found = RowMemory(self._blocks, rows)
        move = pool.shared.move if self.is_alone else _copy
        for block, at, to in zip(self._blocks, self.pointers, found.pointers, strict=True):
            move(at, to, used * block.row)
        return found

    @property
    def is_alone(self) -> bool:
        """Whether nobody has a view of it; False if nobody can tell."""
        return pool.is_alone(self._memory, len(self._typed) - 1)

    def lies_in(self, memory: Tensor) -> bool:
        """Whether that is the memory it was lent."""
        return self._memory is memory

    def nbytes(self) -> int:
        """Of all."""
        return self._memory.nbytes

    def tensors(self) -> list[Tensor]:
        """The memory."""
        return [self._memory]


NO_MEMORY: Final = RowMemory((), 0)
