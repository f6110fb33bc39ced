"""The sums of several parameters, and what waits to be added to them.

operands that wait ─► one product     rows of a bias that are also the left side of a product
rows that wait     ─► one sum         are put together once, for both
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from operator import is_
from typing import Final, final

import torch
from torch import Tensor

from geartrain.native import operations
from geartrain.nodes.slot import Slot, joined, summed

MOST_WAITING: Final = 2048
"""Rows of operands after which they are multiplied without waiting for the step."""


@final
class Slots(dict[torch.nn.Parameter, Slot]):
    """A sum for each of some parameters, by parameter object."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__((p, Slot(p)) for p in parameters)
        self._asked: tuple[Sequence[torch.nn.Parameter], list[Slot]] = (), []

    @property
    def hold(self) -> bool:
        """Whether they may have what was added and has not been taken."""
        return any(slot.holds for slot in self.values())

    def forget(self) -> None:
        """Nothing has been added."""
        for slot in self.values():
            slot.forget()

    def multiply_waiting(self, slot: Slot) -> None:
        """Multiply the operands that wait, and join the rows of biases that share them."""
        pairs, slot.products, slot.waiting = slot.products, [], 0
        if not pairs:
            return
        lefts = [left for left, _ in pairs]
        left, right = joined(lefts), joined([right for _, right in pairs])
        for other in self.values():
            if len(other.sums) == len(lefts) and all(map(is_, other.sums, lefts)):
                other.sums = [left]
        with operations.told_before() if operations.listening else nullcontext():
            slot.multiply(left, right)

    def multiply(self) -> float | None:
        """Multiply and add up what waits; the sum of the squares of all entries, if it is known."""
        slots = [*self.values()]
        if any(slot.parts for slot in slots):
            slots = [each for slot in slots for each in (*slot.parts.values(), slot)]
        squares = None if operations.listening else summed(slots)
        for each in slots:
            if each.products:
                self.multiply_waiting(each)
            if each.sums:
                each.add_up_waiting()
        return squares

    def absorb(self, own: Slot, its: Slot) -> None:
        """Add to one of these what another one holds, which starts anew."""
        for columns, part in its.parts.items():
            self.absorb(own.part(columns), part)
        own.products += its.products
        own.rows += its.rows
        own.sums += its.sums
        own.waiting += its.waiting
        if own.waiting >= MOST_WAITING:
            self.multiply_waiting(own)
            own.add_up_waiting()
        if not its.fresh and own.fresh:
            its.give(own)
        elif not its.fresh:
            own.written().add_(its.written())
        its.forget()

    def ready(self, parameters: Sequence[torch.nn.Parameter]) -> Sequence[Slot]:
        """What is to be added up before these are ``taken``."""
        if parameters is not self._asked[0]:  # hashes of tensors are slow
            self._asked = parameters, [self[parameter] for parameter in parameters]
        slots = self._asked[1]
        for slot in slots:
            if slot.parts:
                return [*(part for slot in slots for part in slot.parts.values()), *slots]
        return slots

    def taken(self) -> list[Tensor | None]:
        """The sums of those that are ready; the next additions start anew."""
        return [self.take(slot) for slot in self._asked[1]]

    def take(self, slot: Slot) -> Tensor | None:
        """Its sum, None if nothing came; the next additions start anew."""
        if slot.products:
            self.multiply_waiting(slot)
        if slot.sums:
            slot.add_up_waiting()
        for columns, part in slot.parts.items():
            some = self.take(part)
            if some is not None:
                slot.add_part(columns, some)
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


@cache
def _say_that_checks_are_off() -> None:
    """torch warns of unchecked sparse tensors, in an optimiser too, unless it has been told.

    Who has asked for the checks keeps them.
    """
    checks = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():  # type: ignore[no-untyped-call]
        checks.disable()  # type: ignore[no-untyped-call]
