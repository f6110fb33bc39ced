"""A part as a worker has it: the part itself, or the worker's share of one that others have too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, final

from torch import nn

from geartrain.frames.message import IntArray
from geartrain.nodes.weights import AbstractWeights
from geartrain.parts.rules import Rules
from geartrain.parts.triggers import Trigger


@final
@dataclass(frozen=True, slots=True)
class StepTaken:
    """One optimiser step of a part."""

    part: str
    version: int
    rows: int


class AbstractPart(AbstractWeights):
    """What a worker asks of a part that its nodes compute with.

    Attributes:
        module: That the nodes run.
        rules: Those of the part.
        size: Its parameters' entries.
        trigger: When the part steps.
        once: Whether every instance comes by in exactly one message, which then counts for it.
        guard: What a firing of the part enters.
        copy, copies: It is one of so many copies, each of which gets every so-many-th instance.
        steppers: Workers that step it, each when it has gathered an update of its own; of those
            that take turns, as many as do so at a time.
        reserves: Whether it wants to be told, by ``reserve``, what a firing is going to add.
    """

    module: nn.Module
    rules: Rules
    size: int
    trigger: Trigger
    once: bool
    guard: AbstractContextManager[Any]
    copy: int
    copies: int
    steppers = 1
    reserves = False

    @property
    def guard_back(self) -> AbstractContextManager[Any]:
        """What one enters whose rows go back."""
        return self.guard

    @property
    @abstractmethod
    def lacking(self) -> int | None:
        """What one firing may add, in the unit of the trigger, 1 or more; None: any number."""

    @property
    @abstractmethod
    def outstanding(self) -> int:
        """Messages between their forward and their backward, as far as a window counts them."""

    @abstractmethod
    def begun(self, n: int) -> int:
        """Of an update of so many instances, those that have finished before this pass."""

    @abstractmethod
    def in_cohorts(
        self,
        ahead: Callable[[int], int] | None,
        updates: Callable[[IntArray], IntArray | None] | None,
    ) -> None:
        """In this pass gradients of later updates wait, or they do not (None).

        Args:
            ahead: From the number of an instance the updates before that which it is of.
            updates: The same, from slots of instances; None: none is of a later update.
        """

    takes_ahead = False
    """Whether gradients of later updates may be added, told apart, while the present one is
    waited for."""

    def next_update(self) -> bool:
        """The next update is the present one, with what has been added for it before; False: that
        is nothing."""
        return False

    def reserve(self, units: int) -> None:
        """The next firing is going to add so much, in the unit of the trigger."""

    def heard(self, progress: int) -> None:
        """So many instances have finished in training, anywhere."""

    @abstractmethod
    def finished(self, instances: int) -> None:
        """Instances have finished; called outside of any firing."""

    @abstractmethod
    def step_if_due(self, progress: int) -> StepTaken | None:
        """Take a step if one is due; or tell of the one that a firing has taken."""

    @abstractmethod
    def step(self, progress: int) -> StepTaken | None:
        """Take a step with the gradient so far; None if there is none.

        Args:
            progress: Instances finished in training, for the schedule.
        """

    def rest(self) -> StepTaken | None:
        """Nothing is in flight any more: a step that falls due by that."""
        return None

    @abstractmethod
    def note_holding(self) -> bool | None:
        """Whether a step is held back, where that has changed since the last call; else None."""


def guarded(parts: Sequence[AbstractPart], *, back: bool) -> AbstractContextManager[Any]:
    """What is entered, in this order, by who computes with some parts.

    Args:
        parts: They.
        back: Whether rows go back.
    """
    found = [part.guard_back if back else part.guard for part in parts]
    some = [guard for guard in found if type(guard) is not nullcontext]
    return (some[0] if some else _NOTHING) if len(some) < 2 else _each_of(some)


@contextmanager
def _each_of(guards: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as entered:
        for guard in guards:
            entered.enter_context(guard)
        yield


_NOTHING: Final = nullcontext()  # it may be entered by many at once
