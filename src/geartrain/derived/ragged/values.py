"""What is known of the tensors of a ragged trace, and where their numbers lie.

A trace counts rows of several *kinds*: bundles (or rows that read a bundle each), their members,
edges, what a memory holds, and pairs of members of one bundle: n * n of n members. It is made
twice, with other numbers of each; an axis that differs counts what has those two numbers, or a
multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, final

from torch import fx

from geartrain.derived.steps.places import Refused

BUNDLES: Final = 0
MEMBERS: Final = 1
EDGES: Final = 2
HELD: Final = 3
PAIRS: Final = 4
"""Of members of a bundle: all that the first has, with whom it may be, come before the second's."""
PADDED: Final = 2
"""The lead of what is padded."""
PAIRED: Final = 3
"""The lead of pairs of what is padded."""
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
    "pairs",
    "seeds",
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
        second: Of pairs that have an axis for either member, as ``at`` for the second.
    """

    kind: int
    times: int
    tail: tuple[int, ...]
    lead: int
    at: int = 0
    merged: bool = False
    alone: bool = False
    second: int = -1

    @property
    def width(self) -> int:
        return math.prod(self.tail)

    @property
    def before(self) -> tuple[int, int]:
        """Numbers of a row before which all members come, and second ones of pairs: numbers lie
        alike where these are equal."""
        return math.prod(self.tail[: max(self.at, 0)]), math.prod(self.tail[: max(self.second, 0)])

    @property
    def is_padded(self) -> bool:
        """Whether bundles have an axis, and their members one behind it."""
        return (self.kind, self.lead) == (MEMBERS, PADDED) and self.at >= 0

    @property
    def rank(self) -> int:
        """How many axes there are."""
        return self.lead + len(self.tail) - self.merged

    @property
    def pair(self) -> tuple[int, int]:
        """The axes of both members of pairs."""
        ahead = self.lead - PADDED - self.merged
        return ahead + self.at, ahead + self.second + 1

    @property
    def rows(self) -> tuple[int, ...]:
        """All axes that count rows."""
        if self.second >= 0:
            return (0, *self.pair) if self.lead == PAIRED else self.pair
        if self.lead < PADDED:
            return (self.at,) if self.lead else ()
        return tuple(sorted((self.members, 1 if self.at == SWAPPED else 0)))

    @property
    def members(self) -> int:
        """The axis of members, or that of all rows."""
        if self.lead < PADDED:
            return self.at
        return 0 if self.at == SWAPPED else 1 + self.at - self.merged

    @property
    def place(self) -> tuple[int, int, bool, bool, int]:
        """Which axes count rows."""
        return self.lead, self.at, self.merged, self.alone, self.second

    def tail_axis(self, dim: int) -> int:
        """Which axis of the tail an axis is; -1: it counts rows."""
        rows = self.rows
        return -1 if dim in rows else dim - sum([k < dim for k in rows]) + self.merged

    def behind_rows(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of what has no rows, as it is read for these, without those of rows."""
        tail = (1,) * (self.rank - len(tail)) + tail
        if len(tail) > self.rank or any(tail[k] != 1 for k in self.rows):
            raise Refused("axes that do not fit")
        found = tuple(n for k, n in enumerate(tail) if k not in self.rows)
        return (1, *found) if self.merged else found


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
        for kind, (a, b) in enumerate([*self.sizes, *self._pairs]):
            if small % a == 0 and small // a * b == large and small:
                return kind, small // a
        return None

    @property
    def _pairs(self) -> Sequence[tuple[int, int]]:
        """How many pairs of members there are."""
        if self.padded is None:
            return ()
        (a, b), (m, n) = self.sizes[BUNDLES], self.padded
        return ((a * m * m, b * n * n),)

    def like(self, small: Sequence[int], large: Sequence[int]) -> Axes:
        """What the axes of a tensor count.

        Raises:
            Refused: They are no rows followed by what each row has.
        """
        differ = [k for k, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
        if not differ:
            return Axes(NO_ROWS, 1, tuple(small), 0)
        rows = self.of(small[0], large[0])
        if differ == [0] and rows is not None:
            return Axes(*rows, tuple(small[1:]), 1)
        first = differ[0]
        counted = self.of(small[first], large[first])
        if len(differ) == 1 and counted is not None and set(small[:first]) == {1}:
            return Axes(*counted, (*small[:first], *small[first + 1 :]), 1, first)
        others = (*small[:first], *small[first + 1 :])
        if len(differ) == 1 and (small[first], large[first]) == self.padded:
            return Axes(MEMBERS, 1, others, 1, first, alone=True)
        found = self._of_padded(small, large, differ) or self._of_pairs(small, large, differ)
        if found is None:
            several = f"shape {tuple(small)} in one trace and {tuple(large)} in another"
            raise Refused(f"a tensor of {several}")
        return found

    def _of_padded(
        self, small: Sequence[int], large: Sequence[int], differ: Sequence[int]
    ) -> Axes | None:
        """Of what has an axis of bundles and one of their members."""
        if self.padded is None or len(differ) != 2 or differ[0] != 0:
            return None
        j, found = differ[1], self.of(small[0], large[0])
        tail = (*small[1:j], *small[j + 1 :])
        if found is not None and found[0] == BUNDLES and (small[j], large[j]) == self.padded:
            if found[1] == 1:
                return Axes(MEMBERS, 1, tail, PADDED, j - 1)
            return Axes(MEMBERS, 1, (found[1], *tail), PADDED, j, merged=True)
        if j == 1 and (small[0], large[0]) == self.padded:
            if self.of(small[1], large[1]) == (BUNDLES, 1):
                return Axes(MEMBERS, 1, tail, PADDED, SWAPPED)
        return None

    def _of_pairs(
        self, small: Sequence[int], large: Sequence[int], differ: Sequence[int]
    ) -> Axes | None:
        """Of what has an axis for either member of pairs, or one of all members and another."""
        *ahead, first, second = differ if len(differ) > 1 else (0, 0)
        tail = tuple([n for k, n in enumerate(small) if k not in differ])
        if self.padded is None or (small[second], large[second]) != self.padded:
            return None
        if (small[first], large[first]) != self.padded:
            found = self.of(small[first], large[first])
            flat = (found, first, ahead) == ((MEMBERS, 1), 0, [])
            return Axes(PAIRS, 1, tail, PADDED, 0, second=second - 1) if flat else None
        if not ahead:
            return Axes(PAIRS, 1, tail, PADDED, first, alone=True, second=second - 1)
        found = self.of(small[0], large[0])
        if ahead != [0] or found is None or found[0] != BUNDLES:
            return None
        if found[1] == 1:
            return Axes(PAIRS, 1, tail, PAIRED, first - 1, second=second - 2)
        many = found[1], *tail
        return Axes(PAIRS, 1, many, PAIRED, first, merged=True, second=second - 1)


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
        parts: Of a weight, that many shares of its rows are packed one by one.
    """

    kind: int
    entries: int
    late: bool = False
    role: Role = "room"
    number: int = 0
    node: fx.Node | None = None
    parts: int = 1


@final
@dataclass(frozen=True, slots=True)
class NamedParts:
    """Which parts of rows are read or written, where others are not or are zero.

    Args:
        numbers: Of the parts, among those of all rows.
        parts: Of each row.
        kind, times: Numbers are so many times the rows of that kind.
    """

    numbers: Buffer
    parts: int
    kind: int
    times: int


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
class Beyond:
    """What has an axis of some entries more than members, or fewer: zeros but for some parts.

    Args:
        parts: What members have, and at which place the first of each bundle is; all is added up.
    """

    parts: tuple[tuple[RaggedValue, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Backwards:
    """What members have, the last of each bundle first.

    Args:
        value: The same, the first one first.
    """

    value: RaggedValue


@final
@dataclass(frozen=True, slots=True)
class NamedMembers:
    """Integers that name members of the bundle of each member.

    Args:
        value: Their numbers in the bundle; -1 is none.
        whole: Whether they count among all members instead.
    """

    value: RaggedValue
    whole: bool = False


@final
@dataclass(frozen=True, slots=True)
class ChosenMatrices:
    """A matrix of a table for each row, which is not made.

    Args:
        table: It.
        numbers: Of the row of the table, for each row.
        turned: Whether the axes of the matrix are the other way round.
    """

    table: RaggedValue
    numbers: fx.Node
    turned: bool = False


@final
@dataclass(frozen=True, slots=True)
class OuterProducts:
    """Sums of products of all entries of two vectors for each row, which are not made.

    Args:
        pairs: The vectors.
        turned: Whether the axes of the matrix are the other way round.
    """

    pairs: tuple[tuple[fx.Node, fx.Node], ...]
    turned: bool = False


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
    other: int = 0
    other_times: int = 1

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
    paired: dict[tuple[RaggedValue, bool], RaggedValue] = field(default_factory=dict)
    """What members have, for the pairs in which they are the first, or the second."""
    turned: dict[Buffer, RaggedValue] = field(default_factory=dict)
    """By numbers of pairs, the same with the members of each the other way round."""


Known: TypeAlias = (
    RaggedValue
    | Constant
    | HeldValue
    | CountedRows
    | NamedMembers
    | MostOf
    | InFront
    | Beyond
    | Backwards
    | list[Any]
    | None
)
"""What is known of a node."""
