"""What rows of a loop that runs whole hold, and where their gradients go.

    Stored         rows of a buffer: what entered, what modules made
    Grouped        some rows of another value, made one: stacked, summed, ...
    Joined         rows of several values side by side
    SomeColumns    some columns of another value
    Detached       another value whose gradient goes no further

Rows are numbers. Only a module that computes gathers what they hold, and what it answers is
scattered to where it was gathered from: a row may be read any number of times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.frames.message import Gradient, IntArray, Payload, join_arrays, ranges
from geartrain.native.rows import Moves, add, take
from geartrain.nodes.gather import How, reduced, share_of_max, shared_out


@final
class Numbers:
    """What a plan knows of the rows of values, by the values' numbers.

    Args:
        counts: Rows of each.
        members: Of grouped rows: where each one's members begin, how many they are, and the rows
            of the value beneath, row by row.
        sides: Of joined rows: the row of each value beneath.
    """

    __slots__ = ("_grouped", "_joined", "counts", "members", "sides")

    def __init__(self, values: int) -> None:
        self.counts = [0] * values
        self.members: dict[int, tuple[IntArray, IntArray, IntArray]] = {}
        self.sides: dict[int, list[IntArray]] = {}
        self._grouped: dict[int, list[tuple[IntArray, IntArray]]] = {}
        self._joined: dict[int, list[list[IntArray]]] = {}

    def more(self, number: int, n: int) -> IntArray:
        """So many rows more of a value; their numbers."""
        first = self.counts[number]
        self.counts[number] = first + n
        return np.arange(first, first + n)

    def group(self, number: int, members: IntArray, sizes: IntArray) -> IntArray:
        """Grouped rows more, of these members of the value beneath; their numbers."""
        self._grouped.setdefault(number, []).append((members, sizes))
        return self.more(number, sizes.size)

    def join(self, number: int, sides: list[IntArray]) -> IntArray:
        """Joined rows more, of these rows of the values beneath; their numbers."""
        self._joined.setdefault(number, []).append(sides)
        return self.more(number, sides[0].size)

    def settle(self) -> None:
        """No more rows come."""
        for number, grouped in self._grouped.items():
            sizes = join_arrays([sizes for _, sizes in grouped])
            members = join_arrays([members for members, _ in grouped])
            self.members[number] = np.cumsum(sizes) - sizes, sizes, members
        for number, joined in self._joined.items():
            self.sides[number] = [join_arrays(list(side)) for side in zip(*joined, strict=True)]


@final
class FiringTensors:
    """Tensors of one firing.

    Args:
        numbers: Of the plan.

    Attributes:
        values: Of stored values, ``(rows, ...)`` each, by number.
        gradients: Of stored values, as far as any came.
        touched: Which rows have got a gradient, by number.
    """

    __slots__ = ("gradients", "numbers", "touched", "values")

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.values: dict[int, list[Tensor]] = {}
        self.gradients: dict[int, list[Tensor | None]] = {}
        self.touched: dict[int, NDArray[np.bool_]] = {}

    def room(self, number: int, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """Buffers for all rows of a stored value, of the inner shapes of ``like``.

        Raises:
            GraphError: They are others than those of the rows before.
        """
        found = self.values.get(number)
        if found is None:
            n = self.numbers.counts[number]
            found = self.values[number] = [x.new_empty((n, *x.shape[1:])) for x in like]
        if [(x.shape[1:], x.dtype) for x in found] != [(x.shape[1:], x.dtype) for x in like]:
            raise GraphError(
                f"'{name}': rows of {_shapes(like)} come where rows of {_shapes(found)} came first;"
                " all rows of a stream have one shape and dtype: cast or pad them"
            )
        return found

    def nbytes(self) -> int:
        """Bytes of the tensors."""
        kept = [x for columns in self.values.values() for x in columns]
        kept += [x for columns in self.gradients.values() for x in columns if x is not None]
        return sum(x.nbytes for x in kept)


class AbstractValue(ABC):
    """What rows of one kind hold.

    Args:
        number: Among the values of the loop.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    @abstractmethod
    def gather(self, held: FiringTensors, rows: IntArray) -> Payload:
        """What these rows hold, ``(rows.size, ...)`` each; nobody may write to it."""

    @abstractmethod
    def scatter(
        self, held: FiringTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        """Add gradients to those of these rows; a row may be named several times.

        Args:
            held: Gets them.
            rows: int64 ``(n,)``.
            gradient: A tensor for each of the payload, or None.
            at: Which rows of the gradient they get; None: 0, 1, ...
        """


@final
class Stored(AbstractValue):
    """Rows of a buffer."""

    def gather(self, held: FiringTensors, rows: IntArray) -> Payload:
        values, n = held.values[self.number], rows.size
        first = int(rows[0])
        if int(rows[-1]) - first == n - 1 and (n == 1 or bool((np.diff(rows) == 1).all())):
            return tuple(x[first : first + n] for x in values)
        return take(values, rows)

    def scatter(
        self, held: FiringTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        values, number = held.values[self.number], self.number
        found = held.gradients.get(number)
        if found is None:
            found = held.gradients[number] = [None] * len(values)
            held.touched[number] = np.zeros(held.numbers.counts[number], np.bool_)
        some = False
        for j, g in enumerate(gradient):
            if g is None or not values[j].is_floating_point():
                continue
            some = True
            buffer = found[j]
            if buffer is None:
                buffer = found[j] = torch.zeros_like(values[j])
            add(buffer, rows, g.contiguous(), at)
        if some:
            held.touched[number][rows] = True


@final
class Grouped(AbstractValue):
    """Rows of a value, several made one."""

    def __init__(self, number: int, source: AbstractValue, how: How) -> None:
        super().__init__(number)
        self.source, self.how = source, how

    def gather(self, held: FiringTensors, rows: IntArray) -> Payload:
        members, sizes = self._members(held, rows)
        columns = self.source.gather(held, members)
        n = rows.size
        if self.how == "stack":
            k = int(sizes[0])
            return tuple(x.reshape(n, k, *x.shape[1:]) for x in columns)
        return tuple(reduced(self.how, x, sizes) for x in columns)

    def scatter(
        self, held: FiringTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        if at is not None:
            gradient = tuple(None if g is None else take([g.contiguous()], at)[0] for g in gradient)
        members, sizes = self._members(held, rows)
        if self.how == "stack":
            flat = tuple(None if g is None else g.flatten(0, 1) for g in gradient)
            self.source.scatter(held, members, flat)
            return
        owner = np.repeat(np.arange(sizes.size), sizes)
        if self.how == "max":
            columns = self.source.gather(held, members)
            flat = tuple(
                None if g is None else share_of_max(columns[j], owner, sizes.size, g)
                for j, g in enumerate(gradient)
            )
            self.source.scatter(held, members, flat)
            return
        self.source.scatter(held, members, shared_out(self.how, gradient, sizes), owner)

    def _members(self, held: FiringTensors, rows: IntArray) -> tuple[IntArray, IntArray]:
        starts, sizes, members = held.numbers.members[self.number]
        mine = sizes[rows]
        return members[ranges(starts[rows], mine)], mine


@final
class Joined(AbstractValue):
    """Rows of several values side by side."""

    def __init__(
        self, number: int, sources: Sequence[AbstractValue], how: Literal["features", "tuple"]
    ) -> None:
        super().__init__(number)
        self.sources, self.how = list(sources), how
        self._widths: list[int] = []

    def gather(self, held: FiringTensors, rows: IntArray) -> Payload:
        sides = held.numbers.sides[self.number]
        parts = [s.gather(held, side[rows]) for s, side in zip(self.sources, sides, strict=True)]
        if self.how == "tuple":
            self._widths = [len(p) for p in parts]
            return tuple(x for p in parts for x in p)
        self._widths = [int(p[0].shape[-1]) if p[0].ndim > 1 else 1 for p in parts]
        return (torch.cat([p[0] for p in parts], -1),)

    def scatter(
        self, held: FiringTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        sides, begin = held.numbers.sides[self.number], 0
        for source, side, width in zip(self.sources, sides, self._widths, strict=True):
            if self.how == "tuple":
                piece = gradient[begin : begin + width]
            else:
                whole = gradient[0]
                piece = (None if whole is None else whole[..., begin : begin + width],)
            begin += width
            if any(g is not None for g in piece):
                source.scatter(held, side[rows], piece, at)


@final
class SomeColumns(AbstractValue):
    """Some columns of another value; its rows have the same numbers."""

    def __init__(self, number: int, source: AbstractValue, sizes: Sequence[int], k: int) -> None:
        super().__init__(number)
        self.source, self._all = source, sum(sizes)
        self._first, self._size = sum(sizes[:k]), sizes[k]

    def gather(self, held: FiringTensors, rows: IntArray) -> Payload:
        (x,) = self.source.gather(held, rows)
        return (x.narrow(-1, self._first, self._size).contiguous(),)

    def scatter(
        self, held: FiringTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        (g,) = gradient
        if g is not None:
            after = self._all - self._first - self._size
            padded = torch.nn.functional.pad(g, (self._first, after))
            self.source.scatter(held, rows, (padded,), at)


@final
class Detached(AbstractValue):
    """Another value whose gradient goes no further; its rows have the same numbers."""

    def __init__(self, number: int, source: AbstractValue) -> None:
        super().__init__(number)
        self.source = source

    def gather(self, held: FiringTensors, rows: IntArray) -> Payload:
        return self.source.gather(held, rows)

    def scatter(
        self, held: FiringTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        """No gradient crosses here."""


def write(
    target: Sequence[Tensor], first: int, source: Sequence[Tensor], rows: IntArray | None
) -> None:
    """Rows of tensors into others, from row ``first`` on; None: all rows."""
    moves = Moves()
    for into, x in zip(target, source, strict=True):
        moves.add(into, None, x if x.is_contiguous() else x.contiguous(), rows, first)
    moves.run()


def _shapes(payload: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}" for x in payload)
