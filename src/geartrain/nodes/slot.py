"""The sum of one parameter's gradients: a buffer, and what waits to be added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from geartrain.native import operations, sums
from geartrain.nodes.products import matrix, outer, outer_suits, whole_rows

ALONE: Final = 128
"""So many rows are multiplied at once: waiting would cost a copy and gain little."""

Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Columns: first and end of those that are neighbours."""


@final
class Slot:
    """The sum for one parameter: a buffer, and what waits to be added to it."""

    __slots__ = (
        "_place",
        "buffer",
        "fresh",
        "parameter",
        "parts",
        "products",
        "rows",
        "sums",
        "waiting",
    )

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.buffer: Tensor | None = None
        self.parts: dict[Runs, Slot] = {}
        self.fresh = True
        self.rows: Pairs = []
        self.products: Pairs = []
        self.sums: list[Tensor] = []
        self.waiting = 0
        self._place: tuple[Tensor, sums.GradientPlace] | None = None

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Without a buffer that means nothing, which may be as large as a table: a copy makes its
        own."""
        state = {name: getattr(self, name) for name in self.__slots__} | {"_place": None}
        return None, state | ({"buffer": None} if self.fresh else {})

    @property
    def holds(self) -> bool:
        """Whether it may have what was added and has not been taken."""
        return not self.fresh or bool(self.rows or self.products or self.sums or self.parts)

    def forget(self) -> None:
        """Nothing has been added."""
        self.rows, self.products, self.sums = [], [], []
        self.fresh, self.waiting = True, 0
        self.parts = {}

    def part(self, columns: Runs) -> Slot:
        """The sum for these columns, which is added to the whole when that is taken."""
        found = self.parts.get(columns)
        if found is None:
            width = sum(end - first for first, end in columns)
            like = self.parameter.new_empty((self.parameter.shape[0], width))
            found = self.parts[columns] = Slot(like)
        return found

    def begun(self) -> Tensor:
        """The buffer, to be added to."""
        found = self.written()
        if self.fresh:
            found.zero_()
            self.fresh = False
        return found

    def add_part(self, columns: Runs, sums_: Tensor) -> None:
        """Add what a part has."""
        self.begun()
        whole, at = self.matrix(), 0
        for first, end in columns:
            whole[:, first:end].add_(sums_[:, at : at + end - first])
            at += end - first

    def written(self) -> Tensor:
        """The buffer; it has no meaning as long as the slot is fresh."""
        if self.buffer is None:
            like = self.parameter
            self.buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
            self.buffer.requires_grad_(False)
        return self.buffer

    def matrix(self) -> Tensor:
        """``written`` as products see it."""
        whole = self.written()
        if whole.ndim > 2 and not whole.is_contiguous():
            whole = self.buffer = whole.contiguous()
        return matrix(whole)

    def place(self) -> sums.GradientPlace:
        """Where ``matrix`` lies."""
        known = self._place
        if known is None or known[0] is not self.buffer:
            found = sums.GradientPlace(self.matrix())
            assert self.buffer is not None
            known = self._place = self.buffer, found
        return known[1]

    def add(self, value: Tensor, *, given: bool) -> None:
        """Add a gradient of the parameter's shape, which may become the sum itself if ``given``."""
        if not self.fresh:
            self.written().add_(value)
            return
        if given and value.dtype is self.parameter.dtype:
            self.buffer = value
        else:
            self.written().copy_(value)
        self.fresh = False

    def add_at(self, indices: Tensor, rows: Tensor) -> None:
        """Add rows at these of as many entries."""
        begun = self.begun()
        begun = begun if begun.shape[1:] == rows.shape[1:] else begun.view(-1, *rows.shape[1:])
        begun.index_add_(0, indices, rows)

    def multiply_at(self, indices: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product of row i of both to row ``indices[i]``, seen as a matrix."""
        begun = self.begun().view(-1, left.shape[1], right.shape[1])
        order = indices.argsort()
        left, right, start = left[order], right[order], 0
        for k, n in enumerate(indices.bincount().tolist()):
            if n:
                begun[k].addmm_(left[start : start + n].t(), right[start : start + n])
                start += n

    def give(self, other: Slot) -> None:
        """Another, which is fresh, gets the buffer and what is in it; this one is to forget."""
        other.buffer, self.buffer = self.buffer, other.buffer
        other._place, self._place = self._place, other._place
        other.fresh = False

    def multiply(self, left: Tensor, right: Tensor) -> None:
        """Add a product."""
        dtype = self.parameter.dtype
        # Few rows are left to torch: a checkpoint may come between them, and a resumed run is to be
        # the same bit by bit. So are those that somebody counts, as C would count them twice.
        if left.shape[0] >= ALONE and sums.may_sum(dtype) and not operations.listening:
            one = sums.Unsummed(self.matrix(), not self.fresh, [left], [right])
            if sums.suits(one, dtype):
                sums.sum_gradients([one])
                self.fresh = False
                return
        if outer_suits(left, right):
            product = outer(left, right).to(self.parameter.dtype)
            if self.fresh:
                self.buffer, self.fresh = product.view(self.parameter.shape), False
            else:
                self.matrix().add_(product)
            return
        buffer = self.matrix()
        if self.fresh:
            torch.mm(left.t(), right, out=buffer)
            self.fresh = False
        else:
            buffer.addmm_(left.t(), right)

    def add_up(self, rows: Tensor) -> None:
        """Add a sum of rows."""
        dtype = self.parameter.dtype
        if self.fresh:
            torch.sum(rows, 0, dtype=dtype, out=self.written())
            self.fresh = False
        else:
            self.written().add_(rows.sum(0, dtype=dtype))

    def add_up_waiting(self) -> None:
        """Add the sums that wait."""
        if self.sums:
            waiting, self.sums, self.waiting = self.sums, [], 0
            self.add_up(joined(waiting))


def summed(slots: Sequence[Slot]) -> float | None:
    """Add up what waits, in one call, as far as C is for it; torch does the rest.

    Returns:
        The sum of the squares of all entries; None: not all have been looked at.
    """
    return summed_each([slots])[0]


def summed_each(groups: Sequence[Sequence[Slot]]) -> list[float | None]:
    """The same of several groups of slots of one dtype, in one call.

    Returns:
        Squares of each.
    """
    first = next((slot for slots in groups for slot in slots), None)
    if first is None or not sums.may_sum(first.parameter.dtype):
        return [None] * len(groups)
    done: list[Slot] = []
    some: list[sums.Unsummed | sums.GradientPlace] = []
    counts: list[int] = []  # negative: others have not been looked at
    for slots in groups:
        mine, whole = _unsummed(slots, first.parameter.dtype, done)
        if not whole:
            mine = [one for one in mine if isinstance(one, sums.Unsummed)]
        some += mine
        counts.append(len(mine) if whole else -len(mine))
    squares = sums.sum_gradients(some) if some else []
    for slot in done:
        slot.products, slot.sums, slot.waiting = [], [], 0
        slot.fresh = False
    found: list[float | None] = []
    at = 0
    for count in counts:
        found.append(_total(squares[at : at + count]) if count > 0 else None)
        at += abs(count)
    return found


def _unsummed(
    slots: Sequence[Slot], dtype: torch.dtype, done: list[Slot]
) -> tuple[list[sums.Unsummed | sums.GradientPlace], bool]:
    """What C is to look at; and whether that is all. done: what is then added up is put there."""
    some: list[sums.Unsummed | sums.GradientPlace] = []
    whole = True
    for slot in slots:
        if slot.parts:
            whole = False  # they are added to it later
        if slot.products or slot.sums or slot.rows:
            one = _waiting(slot, dtype)
            if one is None:
                whole = False
            else:
                done.append(slot)
                some.append(one)
        elif not slot.fresh:
            place = slot.place()
            whole = whole and place.plain and place.dtype is dtype
            some.append(place)
    return some, whole


def _total(some: Sequence[float]) -> float:
    """One after the other: ``sum`` rounds otherwise from one Python to the next."""
    total = 0.0
    for x in some:
        total += x
    return total


def _waiting(slot: Slot, dtype: torch.dtype) -> sums.Unsummed | None:
    """What waits for it; None: it is not for C."""
    products, rows = slot.products, slot.sums
    if slot.rows or (products and rows):
        return None
    lefts, rights = [x for x, _ in products], [x for _, x in products]
    one = sums.Unsummed(slot.matrix(), not slot.fresh, lefts or rows, rights)
    return one if sums.suits(one, dtype) else None


def joined(parts: list[Tensor]) -> Tensor:
    """One below the other, and zeros below them to as many rows as products want."""
    if any(x.dtype is not parts[0].dtype for x in parts):
        parts = [x.float() for x in parts]
    n = sum(x.shape[0] for x in parts)
    rows = whole_rows(n) if parts[0].is_cpu else n
    if rows == n:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    whole = parts[0].new_empty((rows, *parts[0].shape[1:]))
    torch.cat(parts, out=whole[:n])
    whole[n:].zero_()
    return whole
