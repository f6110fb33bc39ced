"""Which kernel a module of a loop has in a turn: that which it began with, or one found better.

known      nothing is left to be tried, and who chooses has chosen, now or in another fit
chosen     the kernel for rows of some kind, if it is known
programmed the kernel as C calls it with others: its own, or one derived in place of one that
           was written by hand
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final, final

import torch

from geartrain.frames.message import Payload
from geartrain.nodes.call import unsettled
from geartrain.nodes.chance import generators_kept
from geartrain.nodes.kernel import AbstractKernel, derived_kernel
from geartrain.nodes.loop.picking import Picking, may_pick, picked
from geartrain.nodes.loop.tensors import detached
from geartrain.nodes.loop.turn import Inner, Turn
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.remembering import AbstractRemembering

_SAMPLE: Final = 3
"""Rows that stand for those to come, where a kernel is looked up that may have to be traced."""


@final
class LoopKernels:
    """Those of the modules of a loop.

    Args:
        inner: The modules.

    Attributes:
        dry_runs: Of each what is still to be found out by trying it, or None.
        may_pick: Of each whether it may turn out to do nothing but pick some of its arguments.
    """

    def __init__(self, inner: Sequence[Inner]) -> None:
        self._inner = inner
        self.dry_runs = [unsettled(each.call) for each in inner]
        self.may_pick = [
            each.reads is None
            and not each.call.inside
            and may_pick(each.call.function, each.weights is None)
            for each in inner
        ]
        self._picks: set[int] = set()  # those that have done nothing else
        self._twins: dict[int, AbstractKernel] = {}
        self._traced: set[int] = set()

    def add(self) -> None:
        """The modules have become one more, of which nothing is to be found out."""
        self.dry_runs.append(None)
        self.may_pick.append(False)

    def take_over(self, before: LoopKernels) -> None:
        """Who was found to do more than to pick by the same loop of an engine that is no more, and
        what it has made that would be made again."""
        for number, may in enumerate(before.may_pick[: len(self.may_pick)]):
            self.may_pick[number] = self.may_pick[number] and may
        for number, (mine, its) in enumerate(zip(self._inner, before._inner, strict=False)):
            if mine.call.function is not its.call.function:
                continue
            if mine.choice is not None and its.choice is not None:
                mine.choice.take_over(its.choice)
            for now, then in ((mine.kernel, its.kernel), (mine.twin, its.twin)):
                if isinstance(now, AbstractRemembering) and isinstance(then, AbstractRemembering):
                    now.take_over(then)
            twin = before._twins.get(number)
            if twin is not None and twin.begin_anew():
                self._twins[number] = twin

    def pick(self, number: int, inputs: Payload) -> tuple[Payload, Picking] | None:
        """What a module picks of its arguments; None: it does more.

        It is called to find that out, and once more if it does more: generators stand as before,
        as a later fit does not call it.
        """
        if not self.may_pick[number]:
            return None
        first = number not in self._picks
        with generators_kept(inputs[0].device) if first else nullcontext():
            found = picked(self._inner[number].call.function, inputs)
        self.may_pick[number] = found is not None
        if found is not None:
            self._picks.add(number)
        return found

    def _is_tried(self, number: int) -> bool:
        return self.dry_runs[number] is None and not self.may_pick[number]

    def decided(self, number: int) -> bool:
        """Whether it is known how a module computes, and nothing is left to be tried."""
        choice = self._inner[number].choice
        return self._is_tried(number) and (choice is None or choice.decided)

    def known(self, number: int) -> bool:
        """The same, or it was known in another fit."""
        choice = self._inner[number].choice
        recalled = choice is not None and choice.recalls
        return self._is_tried(number) if recalled else self.decided(number)

    def chosen(self, turn: Turn, number: int, inputs: Payload) -> AbstractKernel | None:
        """The kernel of a module for rows of this kind, if it is known."""
        inner = self._inner[number]
        if inner.choice is None:
            own = inner.kernel
            return None if isinstance(own, AbstractMemoryKernel) else own.for_rows(inputs)
        kernel = turn.kernels.get(number) or inner.choice.chosen(inputs)
        if kernel is not None and kernel is not inner.kernel:
            turn.kernels[number] = kernel
        return kernel

    def now(
        self, turn: Turn, number: int, inputs: Payload, *, train: bool
    ) -> AbstractKernel | AbstractMemoryKernel:
        """What computes a module in this turn: nothing changes within a firing."""
        inner = self._inner[number]
        if not train or inner.choice is None:
            return inner.kernel
        kernel = turn.kernels.get(number) or inner.choice.kernel(detached(inputs))
        if kernel is not inner.kernel:
            turn.kernels[number] = kernel
        return kernel

    def recalled(self, turn: Turn, number: int, inputs: Payload) -> AbstractKernel | None:
        """That which is chosen, or was in another fit."""
        choice = self._inner[number].choice
        if choice is not None and choice.recalls:
            choice.recall(_samples(inputs))
        return self.chosen(turn, number, inputs)

    def programmed(self, turn: Turn, number: int, inputs: Payload) -> AbstractKernel | None:
        """The kernel of a module as C may call it, for rows like these; None: it is not known."""
        inner, kernel = self._inner[number], self.recalled(turn, number, inputs)
        if inner.choice is not None or isinstance(inner.kernel, AbstractMemoryKernel):
            return kernel
        if kernel is not None and kernel.derivable:
            return self._found_by(self._twin(number), number, inputs)
        if kernel is None and inner.kernel.traces:
            return self._found_by(inner.kernel, number, inputs)
        return kernel

    def _twin(self, number: int) -> AbstractKernel:
        """A derived kernel beside one that was written by hand."""
        found = self._twins.get(number)
        if found is None:
            inner = self._inner[number]
            found = self._twins[number] = derived_kernel(inner.name, inner.call.function)
        return found

    def _found_by(
        self, kernel: AbstractKernel, number: int, inputs: Payload
    ) -> AbstractKernel | None:
        """What a kernel that traces has found for rows of this kind, or finds now."""
        found = kernel.for_rows(inputs)
        if found is None and number not in self._traced:
            self._traced.add(number)
            with torch.no_grad(), generators_kept(None):
                kernel.forward(_samples(inputs))
            found = kernel.for_rows(inputs)
        return found


def _samples(inputs: Payload) -> Payload:
    """Rows like these, whose numbers have no meaning."""
    return tuple([x.new_zeros((_SAMPLE, *x.shape[1:])) for x in inputs])
