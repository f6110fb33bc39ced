"""Tensors of a loop that runs whole, in a buffer for each value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.frames.counted import consecutive
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.native import pool
from geartrain.native.pool import is_alone
from geartrain.native.rows import Moves, add, take
from geartrain.nodes.loop.arenas import ENOUGH, MUCH_MORE, few_more, larger
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.tensors import AbstractTensors, require_alike

Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Dtype of a tensor, and its shape after the rows."""


@final
class OtherPartsError(Exception):
    """Rows of a value have not the parts that they were planned to have."""


class LeftBuffers(NamedTuple):
    """What a firing had that is over, for one that begins.

    Args:
        buffers: By value, those that it has made. They are used again where nobody else has what
            they hold, or a view of it.
        kinds: Of all values that there have been.
        moves: By value, how often its buffers have been made, or have moved, since there are any.
    """

    buffers: dict[int, list[Tensor]]
    kinds: dict[int, list[Kind]]
    moves: list[int]


@final
class FiringTensors(AbstractTensors):
    """Those of a firing in buffers, one for each value.

    Where a firing is planned, they have room for the rows that have been counted, and a few more
    that another one may have; else for those that are expected, and grow.

    Args:
        numbers: Of the plan.
        expected: By value, for how many places there is to be room at least; where it is planned,
            if it is not much more than there are (``arenas.few_more``).
        left: Of a firing that is over, to be used again.
        parts: By value, of how many parts its rows have been planned to be.

    Attributes:
        alike: Whether all values so far have dtypes and shapes as before.
        moves: How often a buffer of any value has been made, or has moved, in this firing.
    """

    __slots__ = (
        "_ahead",
        "_expected",
        "_gradients",
        "_kinds",
        "_left",
        "_made",
        "_moves",
        "_over",
        "_parts",
        "_reached",
        "_values",
        "_zeros",
        "alike",
        "moves",
    )

    def __init__(
        self,
        numbers: Numbers,
        expected: Mapping[int, int] | None = None,
        left: LeftBuffers | None = None,
        parts: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(numbers)
        self._expected, self._parts = expected or {}, parts or {}
        self._ahead = parts is not None
        self._values: dict[int, list[Tensor]] = {}
        self._moves = [0] * len(numbers.counts)
        self._made: set[int] = set()  # values whose buffers nobody else has
        self._left: dict[int, list[Tensor]] = {}
        self._kinds: dict[int, list[Kind]] = {}
        self.alike, self.moves = True, 0
        if left is not None:
            self._left, self._kinds, self._moves = left
        self._over: set[tuple[int, int]] = set()  # columns whose gradients lie where they lay
        self._reached: dict[int, NDArray[np.bool_]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._zeros: dict[int, list[Tensor | None]] = {}  # to which nothing has been added

    def leave(self) -> LeftBuffers:
        """What may be used again, as the firing is over."""
        mine = {number: self._values[number] for number in self._made}
        return LeftBuffers(mine, self._kinds, self._moves)

    def put(
        self,
        number: int,
        name: str,
        first: int,
        columns: Sequence[Tensor],
        rows: IntArray | None = None,
    ) -> None:
        n, first = self.numbers.size(number), self.numbers.begin(number, first)
        found = self._values.get(number)
        if found is None:
            whole = self._ahead or n >= self._expected.get(number, 0)
            alone = whole and rows is None and columns[0].shape[0] == n
            if alone and all(x.is_contiguous() for x in columns):
                self._look(number, columns)
                self._values[number] = list(columns)
                self._move(number)
                return
        write(self.reserve(number, name, columns), first, columns, rows)

    def reserve(
        self,
        number: int,
        name: str,
        columns: Sequence[Tensor],
        which: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The buffers of a value, with room for all rows that are known.

        Args:
            number: Of the value.
            name: Who puts rows there.
            columns: Tensors like those that are put.
            which: The tensors that these are, of a value that has rows; None: all.

        Raises:
            GraphError: They have another inner shape or dtype than those before.
            OtherPartsError: They have other parts than planned.
        """
        found = self._values.get(number)
        if found is None:
            alike = self._look(number, columns)
            self._made.add(number)
            found = self._left.pop(number, [])
            if not (found and alike and self._fit(number, found, columns[0])):
                self._move(number)
                found = []  # what they had is free before
                found = [self._empty(x, self._hoped(number)) for x in columns]
            self._values[number] = found
            return found
        require_alike(name, columns, found if which is None else [found[j] for j in which])
        return self.reserve_rows(number)

    def reserve_rows(self, number: int) -> list[Tensor]:
        """The buffers of a value that has some, with room for all rows that are known."""
        n, found = self.numbers.size(number), self._values[number]
        had = found[0].shape[0] if found else n
        if n > had:
            self._move(number)
            room = larger(had, n, self._expected.get(number, 0))
            for j, x in enumerate(found):
                found[j] = self._empty(x, room)
                if self._is_ours(number, x) and x.is_cpu:
                    pool.shared.move(x.data_ptr(), found[j].data_ptr(), x.nbytes)
                else:
                    found[j][:had] = x
        return found

    def _look(self, number: int, columns: Sequence[Tensor]) -> bool:
        """A value has its first rows; whether they are of kinds as before."""
        kinds: list[Kind] = [(x.dtype, x.shape[1:]) for x in columns]
        if (parts := self._parts.get(number)) is not None and kinds[0][1][:1] != (parts,):
            raise OtherPartsError(number)
        alike = self._kinds.get(number) == kinds
        if not alike:
            self._kinds[number], self.alike = kinds, False
        return alike

    def _fit(self, number: int, left: list[Tensor], like: Tensor) -> bool:
        """Whether the buffers that a value had before, of rows of the same kind, are used again."""
        n, rows = self.numbers.size(number), left[0].shape[0]
        hoped = self._hoped(number)
        if not max(n, int(hoped * ENOUGH)) <= rows <= MUCH_MORE * hoped:
            return False
        return all(map(is_alone, left)) and left[0].device == like.device

    def _hoped(self, number: int) -> int:
        """For how many rows there is to be room, as far as is known."""
        n, expected = self.numbers.size(number), self._expected.get(number, 0)
        return few_more(n, expected) if self._ahead else max(n, expected)

    def _move(self, number: int) -> None:
        """The buffers of a value are made, or move."""
        self.moves += 1
        moves = self._moves
        moves += [0] * (number + 1 - len(moves))
        moves[number] += 1

    def moved(self, values: Sequence[int]) -> int:
        """How often the buffers of these values have been made, or have moved."""
        return sum([self._moves[number] for number in values])

    def _empty(self, x: Tensor, n: int) -> Tensor:
        """Room for n rows like those of x."""
        shape = n, *x.shape[1:]
        return pool.shared.empty(shape, x.dtype) if x.is_cpu else x.new_empty(shape)

    def likes(self, number: int) -> Sequence[Tensor] | None:
        return self._values.get(number)

    def zeros(self, number: int, read: Collection[int] | None = None) -> list[Tensor | None]:
        """Buffers for the gradients of a value, to be added to; ``came`` says to which of them
        something has been added. None: that column has no gradient.

        Args:
            number: Of the value.
            read: Columns that somebody reads from now on; gradients of others may lie where these
                lay. None: all.
        """
        found = self._gradients.setdefault(number, [None] * len(self._values[number]))
        more = self._zeros.setdefault(number, [None] * len(found))
        for j, x in enumerate(self._values[number]):
            if found[j] is None and more[j] is None and x.is_floating_point():
                over = read is not None and j not in read and self._is_ours(number, x)
                n = self.numbers.size(number)
                more[j] = (x[:n] if over else self._empty(x, n)).zero_()
                if over:
                    self._over.add((number, j))
        return [g if g is not None else z for g, z in zip(found, more, strict=True)]

    def _is_ours(self, number: int, x: Tensor) -> bool:
        """Whether nobody has what a buffer holds, or a view of it."""
        return number in self._made and is_alone(x)

    def reach_places(self, number: int) -> NDArray[np.bool_]:
        """Which places of a value have got a gradient, to be written to until ``came``; of a bundle
        that has, all."""
        rows, lengths = self.touch(number), self.numbers.all_lengths(number)
        if lengths is None:
            return rows
        found = self._reached[number] = rows.repeat(lengths)
        return found

    def came(self, number: int, columns: int | None = None) -> int:
        """The columns of a value that have got gradients, as bits; from now on these, too."""
        found = self._gradients.get(number, [])
        if columns is not None:
            places = self._reached.pop(number, None)
            if places is not None:
                self.touch(number)[self.numbers.owners(number, np.flatnonzero(places))] = True
            for j, z in enumerate(self._zeros[number]):
                if found[j] is None and columns >> j & 1:
                    found[j], self._zeros[number][j] = z, None
        return sum([1 << j for j, g in enumerate(found) if g is not None])

    def width(self, number: int) -> int:
        return len(self._values[number])

    def gather_places(
        self, number: int, places: IntArray, which: Sequence[int] | None = None
    ) -> Payload:
        values = self._values[number]
        assert not self._over or all((number, j) not in self._over for j in range(len(values)))
        if which is not None:
            values = [values[j] for j in which]
        if not places.size:
            return tuple(x[:0] for x in values)
        first = consecutive(places)
        if first >= 0:
            return tuple(x[first : first + places.size] for x in values)
        return take(values, places)

    def _accumulate(
        self, number: int, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> bool:
        values = self._values[number]
        found = self._gradients.get(number)
        if found is None:
            found = self._gradients[number] = [None] * len(values)
        some = False
        for j, g in enumerate(gradient):
            if g is None or not values[j].is_floating_point():
                continue
            some = True
            buffer = found[j]
            if buffer is None and at is None and self._is_all(number, j, places, g):
                found[j] = pool.copied(g)
                continue
            if buffer is None:
                buffer = found[j] = self._nothing(number, j)
            if places.size:
                add(buffer, places, g.contiguous(), at)
        return some

    def _is_all(self, number: int, j: int, places: IntArray, g: Tensor) -> bool:
        """Whether these are the gradients of all rows of a column, in order, and nobody has been
        told where they are to lie."""
        x, n = self._values[number][j], self.numbers.size(number)
        if places.size != n or not n or consecutive(places) != 0:
            return False
        alike = g.dtype is x.dtype and g.is_cpu and x.is_cpu and g.shape == (n, *x.shape[1:])
        zeros = self._zeros.get(number)
        return alike and (zeros is None or zeros[j] is None)

    def _nothing(self, number: int, j: int) -> Tensor:
        """A gradient of zeros for all rows of a column."""
        zeros = self._zeros.get(number)
        if zeros is not None and (found := zeros[j]) is not None:
            zeros[j] = None
            return found
        x = self._values[number][j]
        return self._empty(x, self.numbers.size(number)).zero_()

    def gradient(self, number: int, first: int, n: int, which: IntArray | None) -> Gradient:
        columns, numbers = self._gradients[number], self.numbers
        if which is None:
            begin, end = numbers.begin(number, first), numbers.begin(number, first + n)
            return tuple(None if g is None else g[begin:end] for g in columns)
        at = numbers.at(number, which + first)
        return tuple(None if g is None else take([g], at)[0] for g in columns)

    def answered(self, number: int, first: int, n: int) -> None:
        """They lie in the buffer of all."""

    def whole(self, number: int) -> Sequence[Tensor] | None:
        found = self._values.get(number)
        return None if found is None else [x.detach() for x in found]  # who has them is counted

    def tensors(self) -> list[Tensor]:
        return [x for columns in self._values.values() for x in columns]

    def gradients(self) -> list[Tensor]:
        return [
            x
            for number, columns in self._gradients.items()
            for j, x in enumerate(columns)
            if x is not None and (number, j) not in self._over
        ]


def write(
    target: Sequence[Tensor], first: int, source: Sequence[Tensor], rows: IntArray | None
) -> None:
    """Rows of tensors into others, from row ``first`` on; None: all rows."""
    moves = Moves()
    for into, x in zip(target, source, strict=True):
        moves.add(into, None, x if x.is_contiguous() else x.contiguous(), rows, first)
    moves.run()
