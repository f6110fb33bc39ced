"""What rows of a loop that runs whole hold, and where their gradients go.

    Stored         rows of a buffer: what entered, what modules made
    Grouped        some rows of another value, made one: stacked, summed, ..., or a bundle
    Parted         a row of another value, of k parts, made k rows
    Unbundled      a bundle of another value made rows

Others have columns or tensors of these (``columns``).

What bundles hold lies side by side in the rows of a buffer, from where a bundle begins.

Rows are numbers. Only a module that computes gathers what they hold, and what it answers is
scattered to where it was gathered from: a row may be read any number of times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np
import torch

from geartrain.errors import ProtocolError
from geartrain.frames.message import Gradient, IntArray, Payload, distinct, ends_of
from geartrain.native.rows import add, take
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.reads import (
    Read,
    ReadHow,
    ReadTensor,
    Whence,
    added_up,
    stacked,
)
from geartrain.nodes.loop.tensors import AbstractTensors
from geartrain.nodes.reductions import How, reduced, share_of_max, shared_out

_READ_AS: Final[Mapping[How, ReadHow]] = {
    "stack": "row",
    "sum": "sum",
    "mean": "mean",
    "max": "max",
    "bundle": "member",
}


class AbstractValue(ABC):
    """What rows of one kind hold.

    Args:
        number: Among the values of the loop.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    @abstractmethod
    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        """What these rows hold, ``(rows.size, ...)`` each, or ``(places, ...)`` of bundles; nobody
        may write to it."""

    def gather_some(self, held: AbstractTensors, rows: IntArray, which: Sequence[int]) -> Payload:
        """``gather`` of these tensors of the payload."""
        payload = self.gather(held, rows)
        return tuple([payload[j] for j in which])

    @abstractmethod
    def width(self, held: AbstractTensors) -> int:
        """Tensors of the payload, of which a row has been made."""

    def lengths(self, numbers: Numbers, rows: IntArray) -> IntArray | None:
        """How many places each of these rows has, if they are bundles."""
        return None

    @abstractmethod
    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        """Add gradients to those of these rows; a row may be named several times.

        Args:
            held: Gets them.
            rows: int64 ``(n,)``.
            gradient: A tensor for each of the payload, or None.
            at: Which rows of the gradient they get; None: 0, 1, ...
        """

    def places(self, numbers: Numbers, rows: IntArray) -> IntArray:
        """Which places these rows have, if they are bundles, bundle by bundle."""
        raise ProtocolError(f"{type(self).__name__} has no bundles")

    def gather_places(self, held: AbstractTensors, places: IntArray) -> Payload:
        """What these places hold."""
        raise ProtocolError(f"{type(self).__name__} has no bundles")

    def scatter_places(
        self, held: AbstractTensors, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> None:
        """Add gradients to those of these places, as ``scatter`` does for rows."""
        raise ProtocolError(f"{type(self).__name__} has no bundles")

    def owners(self, numbers: Numbers, places: IntArray) -> IntArray:
        """Which rows, that are bundles, have these places."""
        raise ProtocolError(f"{type(self).__name__} has no bundles")

    def reach(self, held: AbstractTensors, rows: IntArray, given: Sequence[bool | None]) -> None:
        """Note that rows get a gradient which somebody else adds up.

        Args:
            held: Is told which stored rows these are made of.
            rows: int64 ``(n,)``.
            given: By tensor of the payload, whether it gets one.

        Raises:
            ProtocolError: What they hold is not made of rows in a way that autograd follows.
        """
        raise ProtocolError(f"{type(self).__name__} is not taped")

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        """What these rows are made of, by tensor of the payload; None: C cannot be told.

        Args:
            held: Has rows of what they are made of, some at least.
            rows: int64 ``(n,)``.
        """
        return None

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        """The stored rows that ``reads`` tells of, by tensor and by read, for who knows all else of
        rows like these; None: ``reads`` is to be asked.

        Args:
            held, rows: As for ``reads``.
        """
        return None

    def beneath(self, numbers: Numbers, places: IntArray) -> tuple[AbstractValue, IntArray] | None:
        """A value of single rows, and those of it that lie in these places of bundles; None: there
        is no such value."""
        return None

    def as_asked(self, numbers: Numbers) -> bool:
        """Whether its rows are rows of a stored value, of the same numbers."""
        return False

    @property
    def looks_back(self) -> bool:
        """Whether ``scatter`` reads what rows hold."""
        return any(each.looks_back for each in self.made_of)

    @property
    def made_of(self) -> Sequence[AbstractValue]:
        """Values whose rows its own are made of."""
        source: AbstractValue | None = getattr(self, "source", None)
        return () if source is None else (source,)


@final
class Stored(AbstractValue):
    """Rows that entered, or that modules made."""

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        return held.gather(self.number, rows)

    def gather_some(self, held: AbstractTensors, rows: IntArray, which: Sequence[int]) -> Payload:
        return held.gather(self.number, rows, which)

    def width(self, held: AbstractTensors) -> int:
        return held.width(self.number)

    def lengths(self, numbers: Numbers, rows: IntArray) -> IntArray | None:
        return numbers.lengths(self.number, rows)

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        held.scatter(self.number, rows, gradient, at)

    def places(self, numbers: Numbers, rows: IntArray) -> IntArray:
        return numbers.at(self.number, rows)

    def gather_places(self, held: AbstractTensors, places: IntArray) -> Payload:
        return held.gather_places(self.number, places)

    def scatter_places(
        self, held: AbstractTensors, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> None:
        held.scatter_places(self.number, places, gradient, at)

    def owners(self, numbers: Numbers, places: IntArray) -> IntArray:
        return numbers.owners(self.number, places)

    def reach(self, held: AbstractTensors, rows: IntArray, given: Sequence[bool | None]) -> None:
        if any(given):
            held.touch(self.number)[rows] = True

    def as_asked(self, numbers: Numbers) -> bool:
        return self.number not in numbers.places

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        likes = held.likes(self.number)
        if likes is None:
            return None
        places, starts = self._lie(held.numbers, rows)
        how: ReadHow = "row" if starts is None else "member"
        return [
            ReadTensor(
                x.dtype, tail, [Read(self.number, j, places, tail.numel(), how=how, starts=starts)]
            )
            for j, x in enumerate(likes)
            for tail in (x.shape[1:],)
        ]

    def _lie(self, numbers: Numbers, rows: IntArray) -> tuple[IntArray, IntArray | None]:
        """Where these rows lie; and where each begins among that, if they are bundles."""
        lengths = numbers.lengths(self.number, rows)
        starts = None if lengths is None else ends_of(lengths)
        return np.ascontiguousarray(numbers.at(self.number, rows)), starts

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        likes = held.likes(self.number)
        if likes is None:
            return None
        places, starts = self._lie(held.numbers, rows)
        return [[Whence.of(places, starts=starts)]] * len(likes)

    def place_reads(self, held: AbstractTensors, places: IntArray) -> list[ReadTensor] | None:
        """What these places hold, as ``reads`` says it of rows."""
        likes = held.likes(self.number)
        if likes is None:
            return None
        rows = np.ascontiguousarray(places)
        return [
            ReadTensor(x.dtype, tail, [Read(self.number, j, rows, tail.numel())])
            for j, x in enumerate(likes)
            for tail in (x.shape[1:],)
        ]


@final
class Grouped(AbstractValue):
    """Rows of a value, several made one."""

    def __init__(self, number: int, source: AbstractValue, how: How) -> None:
        super().__init__(number)
        self.source, self.how = source, how

    @property
    def looks_back(self) -> bool:
        return self.how == "max" or super().looks_back

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        members, sizes = self._members(held, rows)
        columns = self.source.gather(held, members)
        if self.how == "bundle":
            return columns
        n = rows.size
        if self.how == "stack":
            k = int(sizes[0])
            return tuple(x.reshape(n, k, *x.shape[1:]) for x in columns)
        return tuple(reduced(self.how, x, sizes) for x in columns)

    def width(self, held: AbstractTensors) -> int:
        return self.source.width(held)

    def lengths(self, numbers: Numbers, rows: IntArray) -> IntArray | None:
        return numbers.members(self.number, rows)[1] if self.how == "bundle" else None

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        members, sizes = self._members(held, rows)
        if self.how == "bundle":
            self.source.scatter(held, members, gradient, at)
            return
        if at is not None:
            gradient = tuple(None if g is None else take([g.contiguous()], at)[0] for g in gradient)
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

    def places(self, numbers: Numbers, rows: IntArray) -> IntArray:
        return numbers.member_places(self.number, rows)

    def beneath(self, numbers: Numbers, places: IntArray) -> tuple[AbstractValue, IntArray] | None:
        return self.source, numbers.members_at(self.number, places)

    def gather_places(self, held: AbstractTensors, places: IntArray) -> Payload:
        return self.source.gather(held, held.numbers.members_at(self.number, places))

    def scatter_places(
        self, held: AbstractTensors, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> None:
        self.source.scatter(held, held.numbers.members_at(self.number, places), gradient, at)

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        how = _READ_AS.get(self.how)
        if how is None or not rows.size:
            return None
        members, sizes = self._members(held, rows)
        found: list[ReadTensor] = []
        for each in self.source.reads(held, members) or ():
            if how == "row":
                one = stacked(each, int(sizes[0]))
            else:
                one = added_up(each, sizes, how)
            if one is None:
                return None
            found.append(one)
        return found or None

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        how = _READ_AS.get(self.how)
        if how is None or not rows.size:
            return None
        members, sizes = self._members(held, rows)
        below = self.source.whence(held, members)
        if below is None:
            return None
        starts = None if how == "row" else ends_of(sizes)
        many = int(sizes[0]) if how == "row" else 1
        made: dict[int, list[Whence]] = {}  # tensors that lie together have their rows in common
        for some in below:
            if len(some) > 1 or some[0].many > 1 or some[0].starts is not None:
                return None
            made.setdefault(id(some), [Whence.of(some[0].rows, many, starts)])
        return [made[id(some)] for some in below]

    def _members(self, held: AbstractTensors, rows: IntArray) -> tuple[IntArray, IntArray]:
        return held.numbers.members(self.number, rows)


@final
class Parted(AbstractValue):
    """Rows ``(n, k, ...)`` of a value, their parts rows: part p of row r has number r k + p.

    Args:
        number: Among the values of the loop.
        source: The other value.
        parts: k, as far as it is known; rows that are seen say it again.
    """

    def __init__(self, number: int, source: AbstractValue, parts: int) -> None:
        super().__init__(number)
        self.source, self.parts = source, parts

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        k, whose = self.parts, rows // self.parts
        if self._are_whole(rows, whose):
            columns = self.source.gather(held, whose[::k])
            return tuple(x.flatten(0, 1) for x in columns)
        flat = [x.flatten(0, 1).contiguous() for x in self.source.gather(held, whose)]
        return take(flat, np.arange(rows.size) * k + rows % k)

    def width(self, held: AbstractTensors) -> int:
        return self.source.width(held)

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        if at is not None:
            gradient = tuple(None if g is None else take([g.contiguous()], at)[0] for g in gradient)
        k, whose = self.parts, rows // self.parts
        if self._are_whole(rows, whose):
            n = rows.size // k
            whole = tuple(None if g is None else g.reshape(n, k, *g.shape[1:]) for g in gradient)
            self.source.scatter(held, whose[::k], whole)
            return
        owners = distinct(whose)
        places = owners.searchsorted(whose) * k + rows % k
        found: list[torch.Tensor | None] = []
        for g in gradient:
            if g is None:
                found.append(None)
                continue
            total = g.new_zeros((owners.size * k, *g.shape[1:]))
            add(total, places, g.contiguous(), None)
            found.append(total.view(owners.size, k, *g.shape[1:]))
        self.source.scatter(held, owners, tuple(found))

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        if not isinstance(self.source, Stored):
            return None
        return [
            ReadTensor(
                each.dtype,
                each.tail[1:],
                [
                    Read(
                        self.source.number,
                        j,
                        np.ascontiguousarray(rows),
                        each.width // self.parts,
                        parts=self.parts,
                    )
                ],
            )
            for j, each in enumerate(self.source.reads(held, rows[:0]) or ())
        ] or None

    def _are_whole(self, rows: IntArray, whose: IntArray) -> bool:
        """Whether these are all parts of some rows, in order."""
        k = self.parts
        if rows.size % k:
            return False
        return bool((rows.reshape(-1, k) == whose[::k, None] * k + np.arange(k)).all())


@final
class Unbundled(AbstractValue):
    """What bundles of another value hold, as rows: they are numbered as places are."""

    def __init__(self, number: int, source: AbstractValue) -> None:
        super().__init__(number)
        self.source = source

    def gather(self, held: AbstractTensors, rows: IntArray) -> Payload:
        return self.source.gather_places(held, rows)

    def width(self, held: AbstractTensors) -> int:
        return self.source.width(held)

    def scatter(
        self, held: AbstractTensors, rows: IntArray, gradient: Gradient, at: IntArray | None = None
    ) -> None:
        self.source.scatter_places(held, rows, gradient, at)

    def reach(self, held: AbstractTensors, rows: IntArray, given: Sequence[bool | None]) -> None:
        self.source.reach(held, self.source.owners(held.numbers, rows), given)

    def as_asked(self, numbers: Numbers) -> bool:
        return isinstance(self.source, Stored)

    def reads(self, held: AbstractTensors, rows: IntArray) -> list[ReadTensor] | None:
        if isinstance(self.source, Stored):
            return self.source.place_reads(held, rows)
        found = self.source.beneath(held.numbers, rows)
        return None if found is None else found[0].reads(held, found[1])

    def whence(self, held: AbstractTensors, rows: IntArray) -> list[list[Whence]] | None:
        if isinstance(self.source, Stored):
            return [[Whence.of(np.ascontiguousarray(rows))]] * self.width(held)
        found = self.source.beneath(held.numbers, rows)
        return None if found is None else found[0].whence(held, found[1])
