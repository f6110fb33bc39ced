"""What is known of the tensors of a ragged trace, and where their numbers lie.

A trace counts rows of several *kinds*: bundles (or rows that read a bundle each), their members,
edges, and what a memory holds. It is made twice, with other numbers of each; an axis that differs
counts what has those two numbers, or a multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, final

from torch import fx

from geartrain.nn.places import Refused

BUNDLES: Final = 0
MEMBERS: Final = 1
EDGES: Final = 2
HELD: Final = 3
KINDS: Final = 4
PADDED: Final = 2
"""The lead of what is padded."""
SWAPPED: Final = -1
"""Members come before bundles."""
NO_ROWS: Final = -1
"""Of what has no rows: weights."""

Role: TypeAlias = Literal[
    "room",
    "given",
    "operand",
    "weight",
    "turned",
    "held",
    "sums",
    "ints",
    "as_float",
    "ends",
    "cells",
]


@final
@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of a tensor.

    Args:
        kind, times: It has so many times the rows of that kind.
        tail: The other axes.
        lead: How many axes count rows: 2 where bundles are padded, and members have an axis of
            their own.
        at: How many of the other axes are before that of members, which is after that of bundles;
            or ``SWAPPED``. Where there is but one, those of one entry before it. Numbers of a row
            lie in the order of ``tail``, wherever that is.
        merged: Whether the first of these is one axis with that of bundles.
        alone: Whether it has the axis of members that all bundles have, and none of bundles.
    """

    kind: int
    times: int
    tail: tuple[int, ...]
    lead: int
    at: int = 0
    merged: bool = False
    alone: bool = False

    @property
    def width(self) -> int:
        return math.prod(self.tail)

    @property
    def before(self) -> int:
        """Numbers of a row before which all members come: numbers lie alike where it is equal."""
        return math.prod(self.tail[: max(self.at, 0)])

    @property
    def members(self) -> int:
        """The axis of members, or that of all rows."""
        if self.lead < PADDED:
            return self.at
        return 0 if self.at == SWAPPED else 1 + self.at - self.merged

    @property
    def place(self) -> tuple[int, int, bool, bool]:
        """Which axes count rows."""
        return self.lead, self.at, self.merged, self.alone

    def tail_axis(self, dim: int) -> int:
        """Which axis of the tail an axis is; -1: it counts rows."""
        if not self.lead:
            return dim
        if self.lead < PADDED:
            return -1 if dim == self.at else dim - (dim > self.at)
        if dim == self.members or dim == (1 if self.at == SWAPPED else 0):
            return -1
        if self.at == SWAPPED:
            return dim - 2
        return dim - 1 - (dim > self.members) + self.merged


@final
@dataclass(frozen=True, slots=True)
class TraceCounts:
    """Numbers of rows in two traces.

    Args:
        sizes: By kind.
        padded: Members of each bundle, where all have as many and an axis of their own counts
            them; None: members are rows one after the other.
    """

    sizes: tuple[tuple[int, int], ...]
    padded: tuple[int, int] | None

    def of(self, small: int, large: int) -> tuple[int, int] | None:
        """The kind that an axis counts, and how many times; None: it counts none."""
        for kind, (a, b) in enumerate(self.sizes):
            if small % a == 0 and small // a * b == large and small:
                return kind, small // a
        return None

    def like(self, small: Sequence[int], large: Sequence[int]) -> Axes:
        """What the axes of a tensor count.

        Raises:
            Refused: They are no rows followed by what each row has.
        """
        differ = [k for k, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
        if not differ:
            return Axes(NO_ROWS, 1, tuple(small), 0)
        found = self.of(small[0], large[0])
        if differ == [0] and found is not None:
            return Axes(*found, tuple(small[1:]), 1)
        first = differ[0]
        counted = self.of(small[first], large[first])
        if len(differ) == 1 and counted is not None and set(small[:first]) == {1}:
            return Axes(*counted, (*small[:first], *small[first + 1 :]), 1, first)
        others = (*small[:first], *small[first + 1 :])
        if len(differ) == 1 and (small[first], large[first]) == self.padded:
            return Axes(MEMBERS, 1, others, 1, first, alone=True)
        if self.padded is not None and len(differ) == 2 and differ[0] == 0:
            j = differ[1]
            tail = (*small[1:j], *small[j + 1 :])
            if found is not None and found[0] == BUNDLES and (small[j], large[j]) == self.padded:
                if found[1] == 1:
                    return Axes(MEMBERS, 1, tail, PADDED, j - 1)
                return Axes(MEMBERS, 1, (found[1], *tail), PADDED, j, merged=True)
            if j == 1 and (small[0], large[0]) == self.padded:
                if self.of(small[1], large[1]) == (BUNDLES, 1):
                    return Axes(MEMBERS, 1, tail, PADDED, SWAPPED)
        shapes = f"a tensor of shape {tuple(small)} in one trace and {tuple(large)} in another"
        pairs = list(zip(small, large, strict=True))
        met = self.padded is not None and pairs.count(self.padded) > 1
        raise Refused(f"members of a bundle meet one another: {shapes}" if met else shapes)


@final
@dataclass(slots=True, eq=False)
class Buffer:
    """Memory with so many numbers for each row of a kind.

    Args:
        kind: Of the rows.
        entries: For each.
        late: Whether the way back makes it.
        role: Who has it.
        number: Which of those with the role.
        node: What row numbers are computed by.
    """

    kind: int
    entries: int
    late: bool = False
    role: Role = "room"
    number: int = 0
    node: fx.Node | None = None


@final
@dataclass(frozen=True, slots=True)
class RaggedValue:
    """Where numbers lie: row i begins at ``at + i * row`` of a buffer.

    Args:
        one: Whether a row has one number, which is read for all of ``tail``.
    """

    buffer: Buffer
    at: int
    row: int
    kind: int
    times: int
    tail: tuple[int, ...]
    one: bool = False

    @property
    def width(self) -> int:
        """Numbers of a row that lie there."""
        return 1 if self.one else math.prod(self.tail)

    @property
    def dense(self) -> bool:
        """Whether it is all of its buffer."""
        whole = self.at == 0 and self.row == self.width
        return whole and self.buffer.entries == self.width * self.times and not self.one


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """The same number everywhere."""

    number: float


@final
@dataclass(frozen=True, slots=True)
class HeldValue:
    """A tensor of a memory, as members read it.

    Args:
        number: Of the inputs.
        tail: Of each member.
        whole: Whether it holds integers, which name entries of rows.
    """

    number: int
    tail: tuple[int, ...]
    whole: bool = False


@final
@dataclass(frozen=True, slots=True)
class MostOf:
    """Where the largest, or the least, are along an axis of a node, which are integers."""

    node: fx.Node
    dim: int
    least: bool


@final
@dataclass(frozen=True, slots=True)
class InFront:
    """What has an axis before those of rows.

    Args:
        parts: By entry of that axis what rows have; None: nothing.
    """

    parts: tuple[RaggedValue | None, ...]


@final
@dataclass(frozen=True, slots=True)
class CountedRows:
    """Integers that only integers have made."""

    node: fx.Node


@final
@dataclass(slots=True)
class DraftStep:
    """A step before its buffers have slots; see ``native.ragged.RaggedStep``."""

    way: int
    op: int
    out: RaggedValue
    reads: list[RaggedValue | None]
    width: int
    kind: int
    times: int
    many: int = 0
    inner: int = 0
    number: float = 0.0
    source: int = 0
    source_times: int = 1
    index: Buffer | None = None
    ends: Buffer | None = None
    cells: Buffer | None = None

    def read(self) -> list[Buffer]:
        """Buffers that are read."""
        found = [v.buffer for v in self.reads if v is not None]
        return found + [b for b in (self.index, self.ends, self.cells) if b is not None]


@final
@dataclass(slots=True)
class WayOfSteps:
    """The steps of one way, and what has been made for it already."""

    steps: list[DraftStep] = field(default_factory=list)
    spread: dict[RaggedValue, RaggedValue] = field(default_factory=dict)
    held: dict[int, RaggedValue] = field(default_factory=dict)
    place: RaggedValue | None = None
