"""Programs over rows of several kinds in C: one call for all of their steps.

rows of a module ─► steps of ``fused`` ─► rows
      │ ▲
spread, │ summed over, by number
      ▼ │
members of bundles, edges ─► steps ─► ...
      │ ▲
      ▼ │
pairs of members
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from struct import Struct, pack
from typing import Final, final

import numpy as np
import torch

from geartrain.errors import ProtocolError
from geartrain.native import library
from geartrain.native.fused import ENDLESS, NEVER_ENDS, Op, Step
from geartrain.native.sums import GradientPlace, may_sum, most_work

_ENTRIES: Final = 4096
_MOST_MEMBERS: Final = 256
"""As ragged.inc has it."""
_MEMBERS: Final = 1
_PAIRS: Final = 4
"""The kinds of rows that members of bundles, and pairs of them, are, as ragged.inc has it."""
_NO_BUNDLES: Final = 2
"""What C says of bundles that do not end where they should."""


class Way(IntEnum):
    """How a step leads from rows to rows; in the order of ragged.inc."""

    PLAIN = 0
    TAKE = auto()
    ADD_AT = auto()
    TAKE_INSIDE = auto()
    ADD_INSIDE = auto()
    SPREAD = auto()
    SUM_OVER = auto()
    SOFT = auto()
    SOFT_BACK = auto()
    LOG_SOFT = auto()
    LOG_SOFT_BACK = auto()
    DOT = auto()
    SUM_TIMES = auto()
    MOVE = auto()
    MOST_OVER = auto()
    MOST_OVER_BACK = auto()
    PLACE = auto()
    ADD_NAMED = auto()
    TAKE_NAMED = auto()
    RAISE_AT = auto()
    TIMES_CHOSEN = auto()
    DRAW_PAIRS = auto()
    DRAW_BUNDLE = auto()
    WINDOWS = auto()
    WINDOWS_BACK = auto()
    SUM_SO_FAR = auto()
    LOOK_UP = auto()
    ADD_UP_BY = auto()
    TIMES_NAMED = auto()
    TIMES_NAMED_BACK = auto()
    SUM_PRODUCTS = auto()
    TIMES_MATRIX = auto()
    PAIR_SECOND = auto()
    PAIR_ADD_UP = auto()
    PAIR_TURN = auto()
    PAIR_DOT = auto()
    PAIR_SUM = auto()
    PAIR_SUM_BACK = auto()
    PAIR_TOP = auto()
    PAIR_TAKE = auto()
    PAIR_PUT = auto()
    TAKE_OTHER = auto()
    ADD_OTHER = auto()
    TIMES_PARTS = auto()
    ADD_TIMES_PARTS = auto()
    DOT_NAMED = auto()


UNNAMED: Final = (0, 1, 0, 1)
"""Of rows that are wholly read: where numbers lie that name some parts of rows; parts of each row;
the kind of the rows that have these numbers, and how many times its rows."""
ENDS_OF_PAIRS: Final = -2
"""In place of the slot of where bundles begin and end: where the pairs of members do."""


@final
@dataclass(frozen=True, slots=True)
class RaggedStep:
    """One step.

    Args:
        way: How it leads from rows to rows.
        step: What it reads and writes.
        kind, times: It is done for so many times the rows of that kind.
        source, source_times: Whose rows the index names.
        index: Slot of row numbers, or -1.
        ends: Slot of where bundles begin and end, or -1; or ``ENDS_OF_PAIRS``.
        cells: Slot of where members lie in a memory, or of row numbers more, or -1.
        other, other_times: Whose rows those name.
    """

    way: Way
    step: Step
    kind: int
    times: int = 1
    source: int = 0
    source_times: int = 1
    index: int = -1
    ends: int = -1
    cells: int = -1
    other: int = 0
    other_times: int = 1

    def packed(self) -> bytes:
        """As C has it."""
        words = (self.way, self.kind, self.times, self.source, self.source_times, self.index)
        named = self.ends, self.cells, self.other, self.other_times
        return pack("10q", *words, *named) + self.step.packed()


@final
class RowsToLearn:
    """Products and sums of rows that weights learn as soon as a program has been there.

    Args:
        dtype: Of all of them.
    """

    __slots__ = ("_count", "_dtype", "_most", "_words", "_work")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._most = dtype, most_work() if may_sum(dtype) else -1
        self._words: list[int] = []
        self._count = self._work = 0

    def may_add(self, place: GradientPlace, n: int) -> bool:
        """Whether it is for this gradient and n rows."""
        return place.plain and n * place.size <= self._most and place.dtype is self._dtype

    def add(self, place: GradientPlace, pieces: Sequence[tuple[int, ...]], *, add: bool) -> None:
        """A product or a sum, for one weight.

        Args:
            place: Of the gradient.
            pieces: One: where rows of its height lie and those of its width that they are
                multiplied with, or 0 if rows of all its entries are added up; their kind, how
                many times its rows, as ``UNNAMED`` says what names their parts, and how many rows.
            add: Whether something is there already.
        """
        ((left, right, kind, times, *naming, n),) = pieces
        height, width = (place.height, place.width) if right else (place.size, 0)
        self._words += (height, width, add, kind, times, place.at, left, right)
        self._words += naming
        self._count += 1
        self._work += n * place.size

    def words(self) -> tuple[bytes, int, int]:
        """As C has them; how many; and multiplications."""
        return pack(f"{len(self._words)}q", *self._words), self._count, self._work


@final
class RaggedSteps:
    """A program.

    Args:
        steps: In order.
        room: By slot the entries that it has in between for a row of its kind; 0: the call says
            where it lies.
        kinds: By slot, the kind.
        dtype: Of all but row numbers.
        ends: The slot of where bundles begin and end, if their rows (kind 0) and members (kind 1)
            may be connected by nothing else but rows that are named by number, as edges do; else
            -1. Where these are the same bundle's, some bundles are done at a time.
        apart: Whether nothing else connects rows.
    """

    def __init__(
        self,
        steps: Sequence[RaggedStep],
        room: Sequence[int],
        kinds: Sequence[int],
        dtype: torch.dtype,
        ends: int,
        *,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        """Whether nothing but bundles connects rows."""
        self._steps, self._count = b"".join(s.packed() for s in steps), len(steps)
        self._room, self._slots = pack(f"{len(room)}q", *room), len(room)
        self._kinds, self._dtype, self._ends = pack(f"{len(kinds)}q", *kinds), dtype, ends
        self._widths = [0, 0, 0, 0, 0]
        for width, kind in zip(room, kinds, strict=True):
            self._widths[kind] += width
        self._bases = Struct(f"{len(room)}q").pack
        self._work = [0, 0, 0, 0, 0]
        for each in steps:
            step, kind = each.step, each.kind
            product = step.op in (Op.PRODUCT, Op.MATRICES) or each.way is Way.TIMES_CHOSEN
            entries = step.width * (step.many if product else 4) * each.times
            if each.way in (Way.TIMES_NAMED, Way.TIMES_NAMED_BACK):
                entries = step.width * step.many * step.inner
            if each.way in (Way.SUM_PRODUCTS, Way.TIMES_MATRIX):
                entries, kind = step.width * max(step.many, 1) * step.inner, _MEMBERS
            paired = Way.PAIR_SECOND <= each.way < Way.TIMES_PARTS
            self._work[_PAIRS if paired else kind] += entries
        plain = [s.step for s in steps if s.way is Way.PLAIN and s.step.op is not Op.PRODUCT]
        self._block = max(1, _ENTRIES // max((s.width for s in plain), default=1))

        at = [np.frombuffer(x or b"\0", np.uint8).ctypes.data for x in (self._steps, self._room)]
        self.words = [self._count, self._block, self._slots, 1, 0, *at]
        """As calls.inc has it: sizes, then where steps and room lie."""
        self.kinds = np.array(kinds, np.int64)
        """By slot, the kind of its rows."""

    def between(self, bundles: int, longest: int) -> int:
        """Numbers that are computed in between at most, of a program whose bundles are apart.

        Args:
            bundles: How many.
            longest: Members of the longest of them.
        """
        of_bundles, of_members, *_, of_pairs = self._widths
        members, of_each = max(longest, _MOST_MEMBERS), of_members + of_pairs * longest
        return of_bundles * min(bundles, _MOST_MEMBERS) + of_each * members

    def work(self, sizes: Sequence[int]) -> int:
        """Multiplications, or what takes as long, of so many rows of each kind."""
        return sum([n * each for n, each in zip(sizes, self._work, strict=True)])

    def run(
        self, sizes: Sequence[int], addresses: Sequence[int], learnt: RowsToLearn | None = None
    ) -> None:
        """Take rows through it.

        Args:
            sizes: How many of each kind.
            addresses: By slot; 0 where there is room.
            learnt: What weights learn of the rows then; None: nothing here.

        Raises:
            IndexError: A row number is beyond its rows.
            ProtocolError: There are no native kernels; or bundles are not those of the members; or
                a step would take no entries at a time, for ever.
            MemoryError: There is none.
        """
        native = library.current()
        if native is None:
            raise ProtocolError("a derived kernel has steps in C, and there are no native kernels")
        if not self._count and learnt is None:
            return
        terms, count, work = (b"", 0, 0) if learnt is None else learnt.words()
        much = self.work(sizes) + work > library.SMALL_WORK
        bad = native.typed[self._dtype]["ragged_run"][much](
            self._count,
            self._steps,
            self._block,
            len(sizes),
            pack(f"{len(sizes)}q", *sizes),
            self._slots,
            self._bases(*addresses),
            self._room,
            self._kinds,
            self._ends,
            terms,
            count,
        )
        if bad == _NO_BUNDLES:
            raise ProtocolError(
                f"{sizes[0]} bundles came whose lengths do not add up to their {sizes[1]} members"
            )
        if bad == ENDLESS:
            raise ProtocolError(NEVER_ENDS)
        if bad > 0:
            raise IndexError("index out of range: a row is asked for that is not there")
        if bad:
            raise MemoryError("no memory for what a derived kernel computes in between")
