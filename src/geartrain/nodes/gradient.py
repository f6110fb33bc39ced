"""The running sum of one part's parameter gradients.

    firing 1   d₁ᵀ x₁ ┐
    firing 2   d₂ᵀ x₂ ├─►  [d₁ d₂ d₃]ᵀ [x₁ x₂ x₃]     one product a step, not one a firing
    firing 3   d₃ᵀ x₃ ┘

A product of few rows costs what it takes to read and write the weight's gradient, whatever the
rows; so operands wait, and are multiplied together when the step comes or there are enough of them.

Operands may be bfloat16 for a float32 parameter: sums, of rows and of products, are in the
parameter's dtype, and only the product of one pair is rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from operator import is_
from typing import Final, Protocol, TypeAlias, final

import torch
from torch import Tensor

from geartrain.frames.message import Payload
from geartrain.native import operations, sums
from geartrain.nodes.products import outer, outer_suits, whole_rows

_ALONE: Final = 128
"""So many rows are multiplied at once: waiting would cost a copy and gain little."""

_FEW: Final = 32
_LITTLE: Final = 4096
"""As for ``_ALONE``, of a parameter with no more entries: its gradient costs nothing to read."""

_MOST_WAITING: Final = 2048
"""Rows of operands after which they are multiplied without waiting for the step."""

Pairs: TypeAlias = list[tuple[Tensor, Tensor]]


class AbstractSource(Protocol):
    """What knows which parameters its results are for."""

    def add_all(self, found: Sequence[Payload], into: GradientSum) -> None:
        """Add the gradients of several calls, by ``add_products`` and ``add_sums``."""


@final
class _Slot:
    """The sum for one parameter: a buffer, and what waits to be added to it."""

    __slots__ = ("buffer", "fresh", "parameter", "products", "rows", "sums", "waiting")

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.buffer: Tensor | None = None
        self.fresh = True
        self.rows: Pairs = []
        self.products: Pairs = []
        self.sums: list[Tensor] = []
        self.waiting = 0

    def forget(self) -> None:
        """Nothing has been added."""
        self.rows, self.products, self.sums = [], [], []
        self.fresh, self.waiting = True, 0

    def written(self) -> Tensor:
        """The buffer; it has no meaning as long as the slot is fresh."""
        if self.buffer is None:
            like = self.parameter
            self.buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
            self.buffer.requires_grad_(False)
        return self.buffer

    def multiply(self, left: Tensor, right: Tensor) -> None:
        """Add a product."""
        if outer_suits(left, right):
            product = outer(left, right).to(self.parameter.dtype)
            if self.fresh:
                self.buffer, self.fresh = product, False
            else:
                self.written().add_(product)
            return
        buffer = self.written()
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
            self.add_up(_joined(waiting))


@final
class GradientSum:
    """Sum of gradients for a fixed set of parameters, by parameter object.

    Args:
        parameters: The parameters of one part. Others are refused with ``KeyError``.

    Every ``add_*`` call adds; a parameter that got nothing since the last ``take`` has no gradient
    (an optimiser skips it). Dense sums live in buffers that are reused from step to step. What
    ``add_product``, ``add_sum`` and ``add_rows`` are given must not change before the step: it is
    kept, not copied.
    """

    __slots__ = ("_asked", "_later", "_later_rows", "_slots")

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._slots = {p: _Slot(p) for p in parameters}
        self._later: dict[AbstractSource, list[Payload]] = {}
        self._later_rows = 0
        self._asked: tuple[Sequence[torch.nn.Parameter], list[_Slot]] = (), []

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._slots

    def add(self, parameter: torch.nn.Parameter, value: Tensor, *, given: bool = False) -> None:
        """Add a gradient of the parameter's shape (dense, or sparse COO for an embedding).

        Args:
            parameter: Whose it is.
            value: The gradient.
            given: Whether nobody else uses the value, so that it may become the sum itself.
        """
        if value.is_sparse:
            self.add_rows(parameter, value._indices()[0], value._values())
            return
        slot = self._slots[parameter]
        if not slot.fresh:
            slot.written().add_(value)
            return
        if given and value.dtype is parameter.dtype:
            slot.buffer = value
        else:
            slot.written().copy_(value)
        slot.fresh = False

    def add_product(self, parameter: torch.nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``; left ``(n, a)``, right ``(n, b)``, the parameter ``(a, b)``."""
        n, slot = left.shape[0], self._slots[parameter]
        if n >= _ALONE or (n >= _FEW and parameter.numel() <= _LITTLE):
            slot.multiply(left, right)
            return
        if operations.listening:
            operations.tell(left.shape[1], n, right.shape[1])
        slot.waiting += n
        slot.products.append((left, right))
        if slot.waiting >= _MOST_WAITING:
            self._multiply_waiting(slot)

    def add_later(self, source: AbstractSource, found: Payload, n: int) -> bool:
        """Keep what a call has found for its parameters, of n rows, to be sorted with others.

        Returns:
            Whether it is kept; many rows are not, and are to be added at once.
        """
        if n >= _ALONE or operations.listening:
            return False
        self._later.setdefault(source, []).append(found)
        self._later_rows += n
        if self._later_rows >= _MOST_WAITING:
            self._sort()
        return True

    def add_products(self, parameter: torch.nn.Parameter, pairs: Pairs) -> None:
        """``add_product`` of several that wait together."""
        slot = self._slots[parameter]
        slot.waiting += sum([left.shape[0] for left, _ in pairs])
        slot.products += pairs
        if slot.waiting >= _MOST_WAITING:
            self._multiply_waiting(slot)

    def add_sums(self, parameter: torch.nn.Parameter, rows: Sequence[Tensor]) -> None:
        """``add_sum`` of several that wait together."""
        slot = self._slots[parameter]
        slot.waiting += sum([x.shape[0] for x in rows])
        slot.sums += rows
        if slot.waiting >= _MOST_WAITING:
            slot.add_up_waiting()

    def _sort(self) -> None:
        """Add what was kept."""
        later, self._later, self._later_rows = self._later, {}, 0
        for source, found in later.items():
            source.add_all(found, self)

    def add_sum(self, parameter: torch.nn.Parameter, rows: Tensor) -> None:
        """Add ``rows.sum(0)``; rows ``(n, d)``, the parameter ``(d,)``: a bias."""
        n, slot = rows.shape[0], self._slots[parameter]
        if n >= _ALONE:
            slot.add_up(rows)
            return
        slot.waiting += n
        slot.sums.append(rows)
        if slot.waiting >= _MOST_WAITING:
            slot.add_up_waiting()

    def add_rows(self, parameter: torch.nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]``; kept as lists, handed over as one sparse tensor.

        indices int64 ``(n,)``, rows ``(n, d)``, the parameter ``(v, d)``.
        """
        self._slots[parameter].rows.append((indices, rows))

    def add_at(self, parameter: torch.nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]`` of a dense gradient, where it lies.

        indices ``(n,)`` integers, rows ``(n, d)``, the parameter ``(v, d)``.
        """
        slot = self._slots[parameter]
        table = slot.written()
        if slot.fresh:
            table.zero_()
            slot.fresh = False
        table.index_add_(0, indices, rows.to(parameter.dtype))

    @torch.no_grad()
    def absorb(
        self,
        other: GradientSum,
        names: Mapping[torch.nn.Parameter, torch.nn.Parameter] | None = None,
    ) -> None:
        """Add all that ``other`` holds; it starts anew.

        Args:
            other: Of the same parameters, or of others that stand for them.
            names: What those of ``other`` stand for; None: themselves.
        """
        other._sort()
        for parameter, its in other._slots.items():
            own = self._slots[parameter if names is None else names[parameter]]
            own.products += its.products
            own.rows += its.rows
            own.sums += its.sums
            own.waiting += its.waiting
            if own.waiting >= _MOST_WAITING:
                self._multiply_waiting(own)
                own.add_up_waiting()
            if not its.fresh and own.fresh:
                own.buffer, its.buffer, own.fresh = its.buffer, own.buffer, False
            elif not its.fresh:
                own.written().add_(its.written())
            its.forget()

    def forget(self) -> None:
        """Drop what has been added."""
        self._later, self._later_rows = {}, 0
        for slot in self._slots.values():
            slot.forget()

    def take(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """The sum so far (None if nothing came); the next addition starts anew.

        A dense result is a reused buffer: use it before adding again. It is sparse COO
        (uncoalesced) if only ``add_rows`` or sparse gradients came.
        """
        return self.take_each([parameter])[0][0]

    @torch.no_grad()
    def take_each(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[list[Tensor | None], float | None]:
        """``take`` of several, and the sum of the squares of all entries where it is known."""
        if self._later:
            self._sort()
        if parameters is not self._asked[0]:  # hashes of tensors are slow
            self._asked = parameters, [self._slots[parameter] for parameter in parameters]
        slots = self._asked[1]
        squares = None if operations.listening else _summed(slots)
        return [self._take(slot) for slot in slots], squares

    def _take(self, slot: _Slot) -> Tensor | None:
        if slot.products:
            self._multiply_waiting(slot)
        if slot.sums:
            slot.add_up_waiting()
        dense = None if slot.fresh else slot.buffer
        slot.fresh = True
        if not slot.rows:
            return dense
        parts, slot.rows = slot.rows, []
        parameter = slot.parameter
        indices = torch.cat([i for i, _ in parts])
        rows = torch.cat([r for _, r in parts]).to(parameter.dtype)
        if dense is not None:
            return dense.index_add_(0, indices, rows)
        _say_that_checks_are_off()
        return torch.sparse_coo_tensor(
            indices[None], rows, tuple(parameter.shape), check_invariants=False
        )

    def _multiply_waiting(self, slot: _Slot) -> None:
        """Multiply the operands that wait, and join the rows of biases that share them."""
        pairs, slot.products, slot.waiting = slot.products, [], 0
        if not pairs:
            return
        lefts = [left for left, _ in pairs]
        left, right = _joined(lefts), _joined([right for _, right in pairs])
        for other in self._slots.values():
            if len(other.sums) == len(lefts) and all(map(is_, other.sums, lefts)):
                other.sums = [left]
        with operations.told_before() if operations.listening else nullcontext():
            slot.multiply(left, right)


def _summed(slots: Sequence[_Slot]) -> float | None:
    """Add up what waits, in one call, as far as C is for it; torch does the rest.

    Returns:
        The sum of the squares of all entries; None: not all have been looked at.
    """
    if not slots or not sums.may_sum(slots[0].parameter.dtype):
        return None
    dtype, whole = slots[0].parameter.dtype, True
    done: list[_Slot] = []
    some: list[sums.Waiting] = []
    for slot in slots:
        products, rows = slot.products, slot.sums
        if slot.fresh and not products and not rows and not slot.rows:
            continue
        lefts, rights = [x for x, _ in products], [x for _, x in products]
        one = sums.Waiting(slot.written(), not slot.fresh, lefts or rows, rights)
        if slot.rows or (products and rows) or not sums.suits(one, dtype):
            whole = False
        else:
            done.append(slot)
            some.append(one)
    if not some:
        return None
    squares = sums.sum_gradients(some)
    for slot in done:
        if slot.waiting:
            slot.products, slot.sums, slot.waiting = [], [], 0
            slot.fresh = False
    return squares if whole else None


@cache
def _say_that_checks_are_off() -> None:
    """torch warns of unchecked sparse tensors, in an optimiser too, unless it has been told.

    Who has asked for the checks keeps them.
    """
    checks = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():  # type: ignore[no-untyped-call]
        checks.disable()  # type: ignore[no-untyped-call]


def _joined(parts: list[Tensor]) -> Tensor:
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
