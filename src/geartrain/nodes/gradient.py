"""The running sum of one part's parameter gradients.

    firing 1   d₁ᵀ x₁ ┐
    firing 2   d₂ᵀ x₂ ├─►  [d₁ d₂ d₃]ᵀ [x₁ x₂ x₃]     one product a step, not one a firing
    firing 3   d₃ᵀ x₃ ┘

A product of few rows costs what it takes to read and write the weight's gradient, whatever the
rows; so operands wait, and are multiplied together when the step comes or there are enough of them.

A firing may bring rows of later updates too. Those of products and sums wait in sums of their own
until the update before theirs is done; where they do not lie in order they are put apart first:

    rows of updates 0 1 1 2 0 2  ─►  0 0 │ 1 1 │ 2 2        the sum, and those ahead of it

Operands may be bfloat16 for a float32 parameter: sums, of rows and of products, are in the
parameter's dtype, and only the product of one pair is rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol, final

import numpy as np
import torch
from torch import Tensor

from geartrain.frames.message import Payload, distinct
from geartrain.native import operations, sums
from geartrain.native.rows import take
from geartrain.nodes.apart import Piece, PutApart, RowsOfUpdates, cut, for_rows
from geartrain.nodes.by_update import AbstractByUpdate
from geartrain.nodes.computed import AbstractComputed, ComputedSums
from geartrain.nodes.looked_up import LookedUpSums, Lookup
from geartrain.nodes.slot import ALONE, Pairs, Runs, Slot, summed, summed_each
from geartrain.nodes.slots import MOST_WAITING, Slots
from geartrain.nodes.unrecorded import Unrecorded

_FEW: Final = 32
_LITTLE: Final = 4096
"""As for ``ALONE``, of a parameter with no more entries: its gradient costs nothing to read."""


class AbstractSource(Protocol):
    """What knows which parameters its results are for."""

    def add_all(self, found: Sequence[Payload], into: GradientSum) -> None:
        """Add the gradients of several calls, by ``add_products`` and ``add_sums``."""


@final
class GradientSum(AbstractByUpdate):
    """Sum of gradients for a fixed set of parameters, by parameter object.

    Args:
        parameters: The parameters of one part. Others are refused with ``KeyError``.

    Every ``add_*`` call adds; a parameter that got nothing since the last ``take`` has no gradient
    (an optimiser skips it). Dense sums live in buffers that are reused from step to step. What
    ``add_product``, ``add_sum`` and ``add_rows`` are given must not change before the step: it is
    kept, not copied.
    """

    __slots__ = (
        "_apart",
        "_computed",
        "_later",
        "_later_rows",
        "_looked_up",
        "_slots",
        "_squares",
    )

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._slots = Slots(parameters)
        self._later: dict[AbstractSource, list[Payload]] = {}
        self._later_rows = 0
        self._apart = PutApart()
        self._looked_up = LookedUpSums()
        self._computed: ComputedSums[GradientSum] = ComputedSums(GradientSum)
        # Of all entries, where that is known, as long as nothing is added to what is multiplied.
        self._squares: tuple[float | None] | None = None

    def _made_alike(self) -> GradientSum:
        return GradientSum(self._slots)

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._slots

    def add(self, parameter: torch.nn.Parameter, value: Tensor, *, given: bool = False) -> None:
        """Add a gradient of the parameter's shape (dense, or sparse COO for an embedding).

        Args:
            parameter: Whose it is.
            value: The gradient.
            given: Whether nobody else uses the value, so that it may become the sum itself.

        Raises:
            ProtocolError: It is of rows of several updates.
        """
        if self._updates is not None:
            self._whole().add(parameter, value, given=given)
            return
        if value.is_sparse:
            self.add_rows(parameter, value._indices()[0], value._values())
            return
        self._slots[parameter].add(value, given=given)

    def add_product(
        self,
        parameter: torch.nn.Parameter,
        left: Tensor,
        right: Tensor,
        *,
        columns: Runs | None = None,
    ) -> None:
        """Add ``left.T @ right``; left ``(n, a)``, right ``(n, b)``, the parameter ``(a, b)``.

        A parameter of more axes, ``(a, ...)``, is seen as a matrix.

        Args:
            parameter, left, right: As above.
            columns: The parameter's that the product has, side by side; None: all.
        """
        if self._updates is not None:
            self._put_apart(parameter, left, right, columns)
            return
        n, slot = left.shape[0], self._slots[parameter]
        if columns is not None:
            slot = slot.part(columns)
        if n >= ALONE or (n >= _FEW and slot.parameter.numel() <= _LITTLE):
            slot.multiply(left, right)
            return
        if operations.listening and not operations.is_told_before():
            operations.tell(left.shape[1], n, right.shape[1])
        slot.waiting += n
        slot.products.append((left, right))
        if slot.waiting >= MOST_WAITING:
            self._slots.multiply_waiting(slot)

    def add_later(self, source: AbstractSource, found: Payload, n: int) -> bool:
        """Keep what a call has found for its parameters, of n rows, to be sorted with others.

        Returns:
            Whether it is kept; many rows are not, and are to be added at once.
        """
        if n >= ALONE or operations.listening or self._updates is not None:
            return False
        self._later.setdefault(source, []).append(found)
        self._later_rows += n
        if self._later_rows >= MOST_WAITING:
            self._sort()
        return True

    def add_products(
        self, parameter: torch.nn.Parameter, pairs: Pairs, *, columns: Runs | None = None
    ) -> None:
        """``add_product`` of several that wait together."""
        slot = self._slots[parameter]
        if columns is not None:
            slot = slot.part(columns)
        slot.waiting += sum([left.shape[0] for left, _ in pairs])
        slot.products += pairs
        if slot.waiting >= MOST_WAITING:
            self._slots.multiply_waiting(slot)

    def add_sums(self, parameter: torch.nn.Parameter, rows: Sequence[Tensor]) -> None:
        """``add_sum`` of several that wait together."""
        slot = self._slots[parameter]
        slot.waiting += sum([x.shape[0] for x in rows])
        slot.sums += rows
        if slot.waiting >= MOST_WAITING:
            slot.add_up_waiting()

    def _sort(self) -> None:
        """Add what was kept."""
        later, self._later, self._later_rows = self._later, {}, 0
        for source, found in later.items():
            source.add_all(found, self)

    def add_sum(self, parameter: torch.nn.Parameter, rows: Tensor) -> None:
        """Add ``rows.sum(0)``; rows ``(n, d)``, the parameter ``(d,)``: a bias."""
        if self._updates is not None:
            self._put_apart(parameter, rows, None, None)
            return
        n, slot = rows.shape[0], self._slots[parameter]
        if n >= ALONE:
            slot.add_up(rows)
            return
        slot.waiting += n
        slot.sums.append(rows)
        if slot.waiting >= MOST_WAITING:
            slot.add_up_waiting()

    def add_sum_of_axes(self, parameter: torch.nn.Parameter, rows: Tensor) -> None:
        """Add ``rows.sum(0)``; rows ``(n, d)``, the parameter of any axes, with d entries."""
        if self._updates is not None:
            self._add_each(GradientSum.add_sum_of_axes, parameter, rows)
            return
        total = rows.sum(0, dtype=parameter.dtype)
        self._slots[parameter].begun().add_(total.view(parameter.shape))

    def add_products_at(
        self, parameter: torch.nn.Parameter, indices: Tensor, left: Tensor, right: Tensor
    ) -> None:
        """Add the product of row i of both, ``left[i][:, None] * right[i]``, to row ``indices[i]``.

        indices int64 ``(n,)``, left ``(n, a)``, right ``(n, b)``, the parameter ``(v, ...)`` of
        a * b entries in each row.
        """
        if self._updates is not None:
            self._add_each(GradientSum.add_products_at, parameter, indices, left, right)
            return
        self._slots[parameter].multiply_at(indices, left, right)

    @property
    def adds_lying(self) -> bool:
        """Whether products and sums may be added by a call that makes them from where rows lie,
        which is to run before anything else is added."""
        return self._updates is None and not operations.listening

    def slot(self, parameter: torch.nn.Parameter) -> Slot:
        """What such a call adds to, of a parameter; the same one always."""
        return self._slots[parameter]

    @staticmethod
    def add_all_in(
        call: sums.AbstractGradientCall,
        some: Sequence[tuple[GradientSum, torch.nn.Parameter, tuple[int, ...]]],
    ) -> bool:
        """Have a call add a piece to each of several parameters of sums, of which the last number
        is that of its rows, if that is for all of them; False, and nothing has happened."""
        if not all(into.adds_lying for into, _, _ in some):
            return False
        slots = [into._slots[parameter] for into, parameter, _ in some]
        places = [slot.place() for slot in slots]
        for place, (_, _, piece) in zip(places, some, strict=True):
            if not call.may_add(place, piece[-1]):
                return False
        for slot, place, (_, _, piece) in zip(slots, places, some, strict=True):
            call.add(place, [piece], add=not slot.fresh)
            slot.fresh = False
        return True

    def add_rows(self, parameter: torch.nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]``; kept as lists, handed over as one sparse tensor.

        indices int64 ``(n,)``, rows ``(n, ...)``, the parameter ``(v, ...)``.
        """
        if self._updates is not None:
            self._add_each(GradientSum.add_rows, parameter, indices, rows)
            return
        self._slots[parameter].rows.append((indices, rows))

    def add_at(self, parameter: torch.nn.Parameter, indices: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]`` of a dense gradient, seen as such rows.

        indices ``(n,)`` integers, rows ``(n, ...)``, the parameter ``(v, ...)`` or as many entries.
        """
        if self._updates is not None:
            self._add_each(GradientSum.add_at, parameter, indices, rows)
            return
        self._slots[parameter].add_at(indices, rows.to(parameter.dtype))

    def begun(self, parameter: torch.nn.Parameter) -> Tensor:
        """The dense sum so far, zeros if nothing came, to be added to."""
        return self._slots[parameter].begun()

    def add_looked_up(self, lookup: Lookup, pieces: Pairs) -> None:
        """Add the gradients of a table and of what its rows meet.

        They are made when they are asked for, of the weights of then: ``settle`` before others
        come.

        Args:
            lookup: Which.
            pieces: Rows ``(n, lookup.width)`` of the gradient, and the table's rows that they are
                of, int64 ``(n,)``.
        """
        self._looked_up.add(lookup, pieces, self._updates, self._settle_one)

    def of_computed(self, computed: AbstractComputed) -> GradientSum:
        """The sum for weights that are computed of the parameters; what is added to it is of the
        updates that are told here. It becomes theirs when they are settled."""
        found = self._computed.of(computed)
        found._updates = self._updates
        return found

    def settle(self) -> None:
        """Make what was looked up, or is of computed weights, gradients of the weights of now,
        before there are others."""
        if self._later:
            self._sort()
        if self._computed:
            updates, self._updates = self._updates, None
            self._computed.settle(lambda k, parameter, d: self.of_update(k).add(parameter, d))
            self._updates = updates
        if self._looked_up:
            self._looked_up.settle(self._settle_one)

    def take_by_update(self, parameters: Sequence[torch.nn.Parameter]) -> list[list[Tensor | None]]:
        """``take_each`` of the present update, and of each after it; then there are none ahead."""
        self._updates = None
        self.settle()
        self._sort_apart()
        sums, self._ahead = [self.of_update(k) for k in range(1 + len(self._ahead))], []
        return [each.take_each(parameters)[0] for each in sums]

    def _settle_one(self, lookup: Lookup, found: sums.SumsById) -> None:
        updates, self._updates = self._updates, None
        try:
            with operations.told_before() if operations.listening else nullcontext():
                lookup.add_all(found, self.of_update)
        finally:
            self._updates = updates

    @property
    def ahead(self) -> bool:
        """Whether something of later updates has been added."""
        return bool(self._ahead or self._apart) or self._looked_up.ahead or self._computed.ahead

    def next_update(self) -> None:
        """The update after the present one is the present one: what was added for it is added."""
        self.settle()
        self._sort_apart()
        if self._ahead:
            self.absorb(self._ahead[0])
            self._spare.append(self._ahead.pop(0))

    def _put_apart(
        self,
        parameter: torch.nn.Parameter,
        left: Tensor,
        right: Tensor | None,
        columns: Runs | None,
    ) -> None:
        updates, n = self._updates, left.shape[0]
        if operations.listening and right is not None:
            operations.tell(left.shape[1], n, right.shape[1])
        each: Iterable[Piece]
        if updates is None or isinstance(updates, int):
            each = [(updates or 0, left, right)]
        elif not n:
            return
        elif many := self._side_by_side(updates, n):
            each = cut(left, right, many)
        else:
            rows = RowsOfUpdates(left, right, for_rows(updates, n))
            if self._apart.put(parameter, columns, rows):
                return
            each = rows.by_update()
        self._add_by_update(parameter, columns, each)

    def _add_each(
        self, add: Callable[..., None], parameter: torch.nn.Parameter, *rows: Tensor
    ) -> None:
        """Have rows added, by one of the methods above, to the sums of the updates that they are
        of; nothing is put apart."""
        updates, self._updates = self._updates, None
        try:
            if isinstance(updates, int):
                add(self.of_update(updates), parameter, *rows)
            elif updates is not None and (n := rows[0].shape[0]):
                each = for_rows(updates, n)
                for k in distinct(each).tolist():
                    at = np.flatnonzero(each == k)
                    its = rows if at.size == n else take(rows, at)
                    add(self.of_update(k), parameter, *its)
        finally:
            self._updates = updates

    @property
    def holds(self) -> bool:
        """Whether it may have what was added and has not been taken."""
        waits = self._later or self._apart or self._ahead or self._looked_up or self._computed
        return bool(waits) or self._slots.hold

    def _sort_apart(self) -> None:
        """Add rows that were put apart to the sums of their updates."""
        if self._apart:
            with Unrecorded():
                for parameter, columns, rows in self._apart.take():
                    self._add_by_update(parameter, columns, rows.by_update())

    def _add_by_update(
        self, parameter: torch.nn.Parameter, columns: Runs | None, rows: Iterable[Piece]
    ) -> None:
        """Add rows, which have been told of, to the sums of their updates."""
        updates, self._updates = self._updates, None
        with operations.told_before() if operations.listening else nullcontext():
            for update, left, right in rows:
                into = self.of_update(update)
                if right is None:
                    into.add_sum(parameter, left)
                else:
                    into.add_product(parameter, left, right, columns=columns)
        self._updates = updates

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
        with Unrecorded():
            other.settle()
            other._sort_apart()
            for parameter, slot in other._slots.items():
                own = self._slots[parameter if names is None else names[parameter]]
                self._slots.absorb(own, slot)

    def forget(self) -> None:
        """Drop what has been added."""
        self._later, self._later_rows = {}, 0
        self._apart, self._ahead, self._looked_up = PutApart(), [], LookedUpSums()
        self._computed = ComputedSums(GradientSum)
        self._slots.forget()

    def multiplied(self) -> AbstractContextManager[None]:
        """What waits is multiplied and added up, and nothing is added meanwhile: a ``take`` has
        nothing to do but to hand over."""
        return _Multiplied(self)

    def multiply(self) -> float | None:
        """Multiply and add up what waits; the sum of the squares of all entries, if it is known."""
        with Unrecorded():
            self.settle()
            self._sort_apart()
            return self._slots.multiply()

    def take(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """The sum so far (None if nothing came); the next addition starts anew.

        A dense result is a reused buffer: use it before adding again. It is sparse COO
        (uncoalesced) if only ``add_rows`` or sparse gradients came.
        """
        return self.take_each([parameter])[0][0]

    def take_each(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[list[Tensor | None], float | None]:
        """``take`` of several, and the sum of the squares of all entries where it is known."""
        with Unrecorded():
            self._settle_for_taking()
            slots = self._slots.ready(parameters)
            known, self._squares = self._squares, None
            if known is None:
                squares = None if operations.listening else summed(slots)
            else:
                squares = known[0] if len(slots) == len(self._slots) else None
            return self._slots.taken(), squares

    def _settle_for_taking(self) -> None:
        """Add to the slots what is kept beside them."""
        if self._later or self._looked_up or self._computed:
            self.settle()
        if self._apart:
            self._sort_apart()


@final
class _Multiplied:
    """A generator would be three calls more at every step of weights that are shared."""

    def __init__(self, of: GradientSum) -> None:
        self._of = of

    def __enter__(self) -> None:
        self._of._squares = (self._of.multiply(),)

    def __exit__(self, *raised: object) -> None:
        self._of._squares = None


def take_together(
    some: Sequence[tuple[GradientSum, Sequence[torch.nn.Parameter]]],
) -> list[tuple[list[Tensor | None], float | None]]:
    """``take_each`` of several sums, each of some parameters."""
    with Unrecorded():
        kinds: dict[torch.dtype, list[int]] = {}
        for total, _ in some:
            total._settle_for_taking()
        ready = [total._slots.ready(parameters) for total, parameters in some]
        for k, slots in enumerate(ready):
            kinds.setdefault(slots[0].parameter.dtype, []).append(k)
        squares: list[float | None] = [None] * len(some)
        for numbers in kinds.values():
            found = summed_each([ready[k] for k in numbers])
            for k, its in zip(numbers, found, strict=True):
                squares[k] = its
        return [(total._slots.taken(), its) for (total, _), its in zip(some, squares, strict=True)]
