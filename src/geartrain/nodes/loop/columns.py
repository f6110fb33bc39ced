"""Values of a loop that runs whole which are columns or tensors of others.

    SideBySide     rows of several values side by side
    SomeColumns    some columns of another value
    Picked         some tensors of another value
    Detached       another value whose gradient goes no further

They hold nothing: what is gathered of them is gathered of the others, and so is what is scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.picking import put_back
from geartrain.nodes.loop.reads import ReadTensor, Whence, narrowed, side_by_side
from geartrain.nodes.loop.tensors import AbstractTensors
from geartrain.nodes.loop.values import AbstractValue


@final
class SideBySide(AbstractValue):
    """Rows of several values side by side."""

    def __init__(
        self, number: int, sources: Sequence[AbstractValue], how: Literal["features", "tuple"]
    ) -> None:
        super().__init__(number)
        self.sources, self.how = list(sources), how
        self._widths: list[int] = []

    @property
    def made_of(self) -> Sequence[AbstractValue]:
        return self.sources

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        sides = held.numbers.sides(self.number, rows)
        parts = [s.gather(held, side) for s, side in zip(self.sources, sides, strict=True)]
        if self.how == "tuple":
            self._widths = [len(p) for p in parts]
            return tuple(x for p in parts for x in p)
        self._widths = [int(p[0].shape[-1]) if p[0].ndim > 1 else 1 for p in parts]
        return (torch.cat([p[0] for p in parts], -1),)

    def width(self, held: AbstractTensors) -> int:
        return sum([s.width(held) for s in self.sources]) if self.how == "tuple" else 1

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        sides, begin = held.numbers.sides(self.number, rows), 0
        for source, side, width in zip(self.sources, sides, self._widths, strict=True):
            if self.how == "tuple":
                piece = gradient[begin : begin + width]
            else:
                whole = gradient[0]
                piece = (None if whole is None else whole[..., begin : begin + width],)
            begin += width
            if any(g is not None for g in piece):
                source.scatter(held, side, piece, at)

    def reach(self, held: AbstractTensors, rows: IntArray, given: Sequence[bool | None]) -> None:
        sides, begin = held.numbers.sides(self.number, rows), 0
        for source, side, width in zip(self.sources, sides, self._widths, strict=True):
            if self.how == "tuple":
                source.reach(held, side, given[begin : begin + width])
            else:
                source.reach(held, side, given)
            begin += width

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        sides = held.numbers.sides(self.number, rows)
        found = [s.reads(held, side) for s, side in zip(self.sources, sides, strict=True)]
        some = [each for each in found if each is not None]
        if len(some) < len(found):
            return None
        if self.how == "tuple":
            self._widths = [len(each) for each in some]
            return [t for each in some for t in each]
        self._widths = [each[0].tail[-1] if each[0].tail else 1 for each in some]
        one = side_by_side([each[0] for each in some])
        return None if one is None else [one]

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        if not self._widths:  # what reads it may be known from a fit before
            self.reads(held, rows)
        sides = held.numbers.sides(self.number, rows)
        found: list[list[Whence]] = []
        for source, side in zip(self.sources, sides, strict=True):
            some = source.whence(held, side)
            if some is None:
                return None
            found += some if self.how == "tuple" else some[:1]
        return found if self.how == "tuple" else [[one for some in found for one in some]]


@final
class SomeColumns(AbstractValue):
    """Some columns of another value; its rows have the same numbers."""

    def __init__(self, number: int, source: AbstractValue, sizes: Sequence[int], k: int) -> None:
        super().__init__(number)
        self.source, self._all = source, sum(sizes)
        self._first, self._size = sum(sizes[:k]), sizes[k]

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        (x,) = self.source.gather(held, rows)
        return (x.narrow(-1, self._first, self._size).contiguous(),)

    def width(self, held: AbstractTensors) -> int:
        return 1

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        (g,) = gradient
        if g is not None:
            after = self._all - self._first - self._size
            padded = torch.nn.functional.pad(g, (self._first, after))
            self.source.scatter(held, rows, (padded,), at)

    def reach(self, held: AbstractTensors, rows: IntArray, given: Sequence[bool | None]) -> None:
        self.source.reach(held, rows, given)

    def as_asked(self, numbers: Numbers) -> bool:
        return self.source.as_asked(numbers)

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        found = self.source.reads(held, rows)
        one = None if found is None else narrowed(found[0], self._first, self._size)
        return None if one is None else [one]

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        found = self.source.whence(held, rows)
        return None if found is None else found[:1]


@final
class Detached(AbstractValue):
    """Another value whose gradient goes no further; its rows have the same numbers."""

    def __init__(self, number: int, source: AbstractValue) -> None:
        super().__init__(number)
        self.source = source

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        return tuple([x.detach() for x in self.source.gather(held, rows)])

    def lengths(self, numbers: Numbers, rows: IntArray) -> IntArray | None:
        return self.source.lengths(numbers, rows)

    def width(self, held: AbstractTensors) -> int:
        return self.source.width(held)

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        """No gradient crosses here."""

    def places(self, numbers: Numbers, rows: IntArray) -> IntArray:
        return self.source.places(numbers, rows)

    def owners(self, numbers: Numbers, places: IntArray) -> IntArray:
        return self.source.owners(numbers, places)

    def gather_places(self, held: AbstractTensors, places: IntArray) -> Payload:
        return tuple([x.detach() for x in self.source.gather_places(held, places)])

    def scatter_places(
        self, held: AbstractTensors, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> None:
        """Nor here."""

    def reach(self, held: AbstractTensors, rows: IntArray, given: Sequence[bool | None]) -> None:
        """Nor here."""

    def as_asked(self, numbers: Numbers) -> bool:
        return self.source.as_asked(numbers)

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        found = self.source.reads(held, rows)
        return None if found is None else [each.detached() for each in found]

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        return self.source.whence(held, rows)


@final
class Picked(AbstractValue):
    """Some tensors of another value; its rows have the same numbers.

    Args:
        number: Among the values of the loop.
        source: The other value.
        which: For each tensor, the one of the source that it is.
    """

    def __init__(self, number: int, source: AbstractValue, which: Sequence[int]) -> None:
        super().__init__(number)
        self.source, self.which = source, which

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        return self.source.gather_some(held, rows, self.which)

    def gather_some(self, held: AbstractTensors, rows: IntArray, which: Sequence[int]) -> Payload:
        return self.source.gather_some(held, rows, [self.which[j] for j in which])

    def width(self, held: AbstractTensors) -> int:
        return len(self.which)

    def lengths(self, numbers: Numbers, rows: IntArray) -> IntArray | None:
        return self.source.lengths(numbers, rows)

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        found = put_back(gradient, self.which, self.source.width(held))
        if any(g is not None for g in found):
            self.source.scatter(held, rows, found, at)

    def places(self, numbers: Numbers, rows: IntArray) -> IntArray:
        return self.source.places(numbers, rows)

    def owners(self, numbers: Numbers, places: IntArray) -> IntArray:
        return self.source.owners(numbers, places)

    def gather_places(self, held: AbstractTensors, places: IntArray) -> Payload:
        payload = self.source.gather_places(held, places)
        return tuple([payload[j] for j in self.which])

    def scatter_places(
        self, held: AbstractTensors, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> None:
        found = put_back(gradient, self.which, self.source.width(held))
        if any(g is not None for g in found):
            self.source.scatter_places(held, places, found, at)

    def reach(self, held: AbstractTensors, rows: IntArray, given: Sequence[bool | None]) -> None:
        found: list[bool | None] = [None] * self.source.width(held)
        for j, each in zip(self.which, given, strict=True):
            found[j] = bool(found[j] or each)
        self.source.reach(held, rows, found)

    def as_asked(self, numbers: Numbers) -> bool:
        return self.source.as_asked(numbers)

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        found = self.source.reads(held, rows)
        return None if found is None else [found[j] for j in self.which]

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        found = self.source.whence(held, rows)
        return None if found is None else [found[j] for j in self.which]
