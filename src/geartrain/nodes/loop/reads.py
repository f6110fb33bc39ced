"""What rows of a value are made of, as stored rows: so C is told what to gather and to scatter.

rows of a value ─► for each tensor of its payload: dtype, shape, and reads
a read: rows of one column of a stored value; as they are, several side by side, or added up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple, TypeAlias, final

import torch

from geartrain.frames.message import IntArray, ends_of
from geartrain.native.rows import pointer

ReadHow: TypeAlias = Literal["row", "sum", "mean", "max", "member"]


@final
@dataclass(frozen=True, slots=True)
class Read:
    """How rows of a tensor, or some entries of them, are made of stored rows.

    Args:
        number, column: Of the stored value.
        rows: int64, contiguous: ``many`` of them for each row, or as ``starts`` says.
        width, at: Entries of a stored row that are read, and how many lie before them.
        into: Entries before them in the row that is made.
        how: What becomes of several; "member": a row each, of a bundle.
        many: Rows that lie side by side in a row.
        starts: int64 ``(n + 1,)``, where the members of each row begin among ``rows``; of several.
        parts: Rows are parts of those of the value, so many of one.
        learns: Whether gradients go there.
    """

    number: int
    column: int
    rows: IntArray
    width: int
    at: int = 0
    into: int = 0
    how: ReadHow = "row"
    many: int = 1
    starts: IntArray | None = None
    parts: int = 1
    learns: bool = True

    def moved(self, by: int) -> Read:
        """The same, so many entries further in the row that is made."""
        return replace(self, into=self.into + by)


@final
@dataclass(frozen=True, slots=True)
class ReadTensor:
    """A tensor of a payload.

    Args:
        dtype: Of it.
        tail: Its shape after the rows.
        reads: What it is made of.
    """

    dtype: torch.dtype
    tail: tuple[int, ...]
    reads: Sequence[Read]

    @property
    def width(self) -> int:
        """Entries of a row."""
        return prod(self.tail)

    def members(self) -> ReadTensor | None:
        """Of bundles: what they hold, a row each; None: it is other than stored rows."""
        if any(r.how != "member" for r in self.reads):
            return None
        return replace(self, reads=[replace(r, how="row", starts=None) for r in self.reads])

    def detached(self) -> ReadTensor:
        """The same, and no gradient goes there."""
        return replace(self, reads=[replace(r, learns=False) for r in self.reads])

    @property
    def plain(self) -> Read | None:
        """Its read, if it is stored rows as they are."""
        one = self.reads[0]
        whole = len(self.reads) == 1 and one.how == "row" and one.many == 1
        return one if whole and one.width == self.width else None


class Whence(NamedTuple):
    """The stored rows of a read alone: what is told anew where all else is known.

    Args:
        rows, many, starts: As of a ``Read``.
        at, at_starts: Where the first of either lies.
    """

    rows: IntArray
    many: int
    starts: IntArray | None
    at: int
    at_starts: int

    @classmethod
    def of(cls, rows: IntArray, many: int = 1, starts: IntArray | None = None) -> Whence:
        """These rows, contiguous."""
        return cls(rows, many, starts, pointer(rows), 0 if starts is None else pointer(starts))

    def from_(self, row: int) -> tuple[int, int]:
        """Where the rows of this row and of those behind it lie, as C reads it."""
        if self.starts is None:
            return self.at + 8 * self.many * row, 0
        return self.at + 8 * int(self.starts[row]), self.at_starts + 8 * row


def stacked(tensor: ReadTensor, k: int) -> ReadTensor | None:
    """k rows side by side, each a row; None: it is not stored rows."""
    one = tensor.plain
    if one is None:
        return None
    return ReadTensor(tensor.dtype, (k, *tensor.tail), [replace(one, many=k)])


def added_up(tensor: ReadTensor, sizes: IntArray, how: ReadHow) -> ReadTensor | None:
    """Sums, means or maxima of so many rows each, or bundles of them; None: it is not stored rows,
    or no numbers."""
    one = tensor.plain
    if one is None or not (tensor.dtype.is_floating_point or how == "member"):
        return None
    with_starts = replace(one, how=how, starts=ends_of(sizes))
    return ReadTensor(tensor.dtype, tensor.tail, [with_starts])


def side_by_side(tensors: Sequence[ReadTensor]) -> ReadTensor | None:
    """Rows of several, of one dimension each, put together; None: they are not such."""
    first = tensors[0]
    if any(len(t.tail) != 1 or t.dtype is not first.dtype for t in tensors):
        return None
    reads: list[Read] = []
    width = 0
    for t in tensors:
        reads += [r.moved(width) for r in t.reads]
        width += t.width
    return ReadTensor(first.dtype, (width,), reads)


def narrowed(tensor: ReadTensor, at: int, size: int) -> ReadTensor | None:
    """Some entries of a row of one dimension; None: it is not stored rows."""
    one = tensor.plain
    if one is None or len(tensor.tail) != 1:
        return None
    return ReadTensor(tensor.dtype, (size,), [replace(one, at=one.at + at, width=size)])
