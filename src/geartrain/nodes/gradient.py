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
from typing import Final, Protocol, TypeAlias, final

import torch
from torch import Tensor

from geartrain.frames.message import Payload
from geartrain.native import operations
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
class GradientSum:
    """Sum of gradients for a fixed set of parameters, by parameter object.

    Args:
        parameters: The parameters of one part. Others are refused with ``KeyError``.

    Every ``add_*`` call adds; a parameter that got nothing since the last ``take`` has no gradient
    (an optimiser skips it). Dense sums live in buffers that are reused from step to step. What
    ``add_product``, ``add_sum`` and ``add_rows`` are given must not change before the step: it is
    kept, not copied.
    """

    __slots__ = (
        *("_buffers", "_fresh", "_later", "_later_rows"),
        *("_products", "_rows", "_sums", "_waiting"),
    )

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._buffers: dict[torch.nn.Parameter, Tensor | None] = {p: None for p in parameters}
        self._fresh: dict[torch.nn.Parameter, bool] = dict.fromkeys(self._buffers, True)
        self._rows: dict[torch.nn.Parameter, Pairs] = {}
        self._products: dict[torch.nn.Parameter, Pairs] = {}
        self._sums: dict[torch.nn.Parameter, list[Tensor]] = {}
        self._waiting: dict[torch.nn.Parameter, int] = dict.fromkeys(self._buffers, 0)
        self._later: dict[AbstractSource, list[Payload]] = {}
        self._later_rows = 0

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._buffers

    def add(self, parameter: torch.nn.Parameter, value: Tensor, *, given: bool = False) -> None:
        """Add a gradient of the parameter's shape (dense, or sparse COO for an embedding).

        Args:
            parameter: Whose it is.
            value: The gradient.
            given: Whether nobody else uses the value, so that it may become the sum itself.
        """
        if value.is_sparse:
            self.add_rows(parameter, value._indices()[0], value._values())
        elif given and self._fresh[parameter] and value.dtype is parameter.dtype:
            self._buffers[parameter], self._fresh[parameter] = value, False
        elif self._fresh[parameter]:
            self._buffer(parameter).copy_(value)
            self._fresh[parameter] = False
        else:
            self._buffer(parameter).add_(value)

    def add_product(self, parameter: torch.nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``; left ``(n, a)``, right ``(n, b)``, the parameter ``(a, b)``."""
        n = left.shape[0]
        if n >= _ALONE or (n >= _FEW and parameter.numel() <= _LITTLE):
            self._multiply(parameter, left, right)
            return
        if operations.listening:
            operations.tell(left.shape[1], n, right.shape[1])
        self._waiting[parameter] += n
        self._products.setdefault(parameter, []).append((left, right))
        if self._waiting[parameter] >= _MOST_WAITING:
            self._multiply_waiting(parameter)

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
        self._waiting[parameter] += sum([left.shape[0] for left, _ in pairs])
        self._products.setdefault(parameter, []).extend(pairs)
        if self._waiting[parameter] >= _MOST_WAITING:
            self._multiply_waiting(parameter)

    def add_sums(self, parameter: torch.nn.Parameter, rows: Sequence[Tensor]) -> None:
        """``add_sum`` of several that wait together."""
        self._waiting[parameter] += sum([x.shape[0] for x in rows])
        self._sums.setdefault(parameter, []).extend(rows)
        if self._waiting[parameter] >= _MOST_WAITING:
            self._add_up_waiting(parameter)

    def _sort(self) -> None:
        """Add what was kept."""
        later, self._later, self._later_rows = self._later, {}, 0
        for source, found in later.items():
            source.add_all(found, self)

    def add_sum(self, parameter: torch.nn.Parameter, rows: Tensor) -> None:
        """Add ``rows.sum(0)``; rows ``(n, d)``, the parameter ``(d,)``: a bias."""
        n = rows.shape[0]
        if n >= _ALONE:
            self._add_up(parameter, rows)
            return
        self._waiting[parameter] += n
        self._sums.setdefault(parameter, []).append(rows)
        if self._waiting[parameter] >= _MOST_WAITING:
            self._add_up_waiting(parameter)

    def add_rows(self, parameter: torch.nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]``; kept as lists, handed over as one sparse tensor.

        indices int64 ``(n,)``, rows ``(n, d)``, the parameter ``(v, d)``.
        """
        if parameter not in self._buffers:
            raise KeyError(parameter)
        self._rows.setdefault(parameter, []).append((indices, rows))

    def add_at(self, parameter: torch.nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]`` of a dense gradient, where it lies.

        indices ``(n,)`` integers, rows ``(n, d)``, the parameter ``(v, d)``.
        """
        table = self._buffer(parameter)
        if self._fresh[parameter]:
            table.zero_()
            self._fresh[parameter] = False
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
        for mine, theirs in (
            (self._products, other._products),
            (self._rows, other._rows),
            (self._sums, other._sums),
        ):
            for parameter, waiting in theirs.items():
                own = parameter if names is None else names[parameter]
                mine.setdefault(own, []).extend(waiting)  # type: ignore[arg-type]
            theirs.clear()
        for parameter, fresh in other._fresh.items():
            own = parameter if names is None else names[parameter]
            if other._waiting[parameter]:
                self._waiting[own] += other._waiting[parameter]
                other._waiting[parameter] = 0
                if self._waiting[own] >= _MOST_WAITING:
                    self._multiply_waiting(own)
                    self._add_up_waiting(own)
            if not fresh:
                other._fresh[parameter] = True
                if self._fresh[own]:
                    mine_too = self._buffers[own]
                    self._buffers[own] = other._buffers[parameter]
                    other._buffers[parameter], self._fresh[own] = mine_too, False
                else:
                    self._buffer(own).add_(other._buffer(parameter))

    def forget(self) -> None:
        """Drop what has been added."""
        self._later, self._later_rows = {}, 0
        self._products.clear()
        self._rows.clear()
        self._sums.clear()
        for parameter in self._buffers:
            self._fresh[parameter], self._waiting[parameter] = True, 0

    @torch.no_grad()
    def take(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """The sum so far (None if nothing came); the next addition starts anew.

        A dense result is a reused buffer: use it before adding again. It is sparse COO
        (uncoalesced) if only ``add_rows`` or sparse gradients came.
        """
        if self._later:
            self._sort()
        self._multiply_waiting(parameter)
        self._add_up_waiting(parameter)
        parts = self._rows.pop(parameter, None)
        dense = None if self._fresh[parameter] else self._buffers[parameter]
        self._fresh[parameter] = True
        if parts is None:
            return dense
        indices = torch.cat([i for i, _ in parts])
        rows = torch.cat([r for _, r in parts]).to(parameter.dtype)
        if dense is not None:
            return dense.index_add_(0, indices, rows)
        _say_that_checks_are_off()
        return torch.sparse_coo_tensor(
            indices[None], rows, tuple(parameter.shape), check_invariants=False
        )

    def _multiply_waiting(self, parameter: torch.nn.Parameter) -> None:
        """Multiply the operands that wait, and join the rows of biases that share them."""
        pairs = self._products.pop(parameter, None)
        if pairs is None:
            return
        self._waiting[parameter] = 0
        lefts = [left for left, _ in pairs]
        left, right = _joined(lefts), _joined([right for _, right in pairs])
        for bias, rows in list(self._sums.items()):
            if len(rows) == len(lefts) and all(a is b for a, b in zip(rows, lefts, strict=True)):
                self._sums[bias] = [left]
        with operations.told_before() if operations.listening else nullcontext():
            self._multiply(parameter, left, right)

    def _multiply(self, parameter: torch.nn.Parameter, left: Tensor, right: Tensor) -> None:
        if outer_suits(left, right):
            product = outer(left, right).to(parameter.dtype)
            if self._fresh[parameter]:
                self._buffers[parameter], self._fresh[parameter] = product, False
            else:
                self._buffer(parameter).add_(product)
            return
        buffer = self._buffer(parameter)
        if self._fresh[parameter]:
            torch.mm(left.t(), right, out=buffer)
            self._fresh[parameter] = False
        else:
            buffer.addmm_(left.t(), right)

    def _add_up_waiting(self, parameter: torch.nn.Parameter) -> None:
        waiting = self._sums.pop(parameter, None)
        if waiting is not None:
            self._waiting[parameter] = 0
            self._add_up(parameter, _joined(waiting))

    def _add_up(self, parameter: torch.nn.Parameter, rows: Tensor) -> None:
        if self._fresh[parameter]:
            torch.sum(rows, 0, dtype=parameter.dtype, out=self._buffer(parameter))
            self._fresh[parameter] = False
        else:
            self._buffer(parameter).add_(rows.sum(0, dtype=parameter.dtype))

    def _buffer(self, parameter: torch.nn.Parameter) -> Tensor:
        buffer = self._buffers[parameter]
        if buffer is None:
            buffer = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            buffer.requires_grad_(False)
            self._buffers[parameter] = buffer
        return buffer


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
