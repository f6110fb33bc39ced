"""What a loop knows of the calls that C makes for it, from firing to firing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, final

from geartrain.native.heap import LATER_S, SOON_S, heap
from geartrain.nodes.loop.bound import STORES
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.hoisting import Hoists
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.native import NativeCalls
from geartrain.nodes.loop.plan import CallStage, LoopPlan
from geartrain.nodes.loop.rooms import TurnRoom
from geartrain.nodes.loop.tables import Tables
from geartrain.nodes.loop.turn import Inner, Turn
from geartrain.nodes.remembering import AbstractRemembering

AGAIN: Final = 16
"""After so many firings C is asked again, where it made no call of modules with programs."""

LOOKED: Final = 256
"""In evaluations C is asked from so many calls on: to trace a module takes as long as some hundred
of them."""

_SPARE: Final = 1.125
"""So many times the rows that the last firing had for an instance there is room at first."""


@final
class RowsSeen:
    """How many rows turns of a loop have had, by value or by module."""

    def __init__(self) -> None:
        self._share: dict[int, float] = {}  # for each instance, in the last turn that found calls
        self._most: dict[int, int] = {}  # in a turn that was planned

    def note(self, rows: Mapping[int, int], instances: int, *, ahead: bool) -> None:
        """A turn of so many instances had these; whether it was planned."""
        if ahead:
            self._most |= {k: max(n, self._most.get(k, 0)) for k, n in rows.items()}
        else:
            self._share = {k: n / instances for k, n in rows.items()}

    def expected(self, instances: int, *, ahead: bool) -> dict[int, int]:
        """For how many there is to be room. A turn that is planned knows how many it has; the next
        ones have the same memory if there is room for as many as any of them had."""
        if ahead:
            return self._most
        many = instances * _SPARE
        return {k: int(share * many) for k, share in self._share.items()}


@final
class Listing:
    """That of one loop.

    Args:
        inner: Its modules; gets those that are called in two.
        kernels: Theirs.
        able: Whether C can read its rows.
        train: Whether its turns are of training.

    Attributes:
        firings: In which C has made calls.
    """

    def __init__(
        self, inner: list[Inner], kernels: LoopKernels, *, able: bool, train: bool = True
    ) -> None:
        self._inner, self._kernels, self._able = inner, kernels, able
        self._train, self._looked = train, 0  # calls of evaluations so far
        self._places, self._rows = RowsSeen(), RowsSeen()  # by value, and by module
        self._tables: Tables | None = None
        self._hoists: Hoists | None = None
        self.firings = 0
        self._now: list[bool] = []  # modules that had programs when a turn began
        self._callable: list[bool] = []  # that C may call, found as the turn was asked for
        self._in_vain: list[bool] | None = None  # the same as ``_now`` when C made no call
        self._asked = 0  # firings since then
        self._room: TurnRoom | None = None  # of a turn that is over
        self._by_itself: int | None = None  # calls of the last turn that C has not made

    @property
    def pays(self) -> bool:
        """Whether some module with weights has a program, now or since another fit, and C makes
        calls of such modules: rows that nobody but Python reads best stay where they are made."""
        if not self._able or (not self._train and self._looked < LOOKED):
            return False
        able = self._now = self._programs()
        if not any(able):
            return False
        self._asked += 1
        return able != self._in_vain or self._asked % AGAIN == 0

    def _programs(self) -> list[bool]:
        self._callable = self._known()
        return [
            inner.weights is not None and able and self._has_program(inner)
            for inner, able in zip(self._inner, self._callable, strict=True)
        ]

    def _known(self) -> list[bool]:
        """Of each module whether C may be asked to call it."""
        return [
            self._kernels.known(number)
            and (_is_plain(each) or (self._train and self._has_program(each)))
            for number, each in enumerate(self._inner)
        ]

    def take_over(self, before: Listing) -> None:
        """What the same loop of an engine knew that is no more; it says nothing of the sums."""
        self._places, self._rows, self._tables = before._places, before._rows, before._tables
        self._room, self._looked = before._room, before._looked

    def _has_program(self, inner: Inner) -> bool:
        """Whether a module has been found to be faster by a program."""
        if _is_plain(inner):
            choice = inner.choice
            return choice is None or choice.replaced or choice.recalls
        if inner.twin is not None:
            return True
        return isinstance(inner.kernel, AbstractRemembering) and inner.kernel.replaced

    def tensors(self, plan: LoopPlan, instances: int) -> FiringTensors:
        """For a turn of so many instances."""
        values = len(plan.numbers.counts)
        if self._hoists is None:
            self._hoists = Hoists(self._inner, self._kernels, values)
        if self._tables is None:
            most = self._hoists.most
            self._tables = Tables(most + STORES, values + most)
        left = None if self._room is None else self._room.buffers
        expected = self._places.expected(instances, ahead=plan.parts is not None)
        return FiringTensors(plan.numbers, expected, left, plan.parts)

    def begin(self, turn: Turn, held: FiringTensors) -> NativeCalls:
        """The calls of a turn that begins."""
        self.firings += 1
        assert self._tables is not None
        assert self._hoists is not None
        able, self._callable = self._callable or self._known(), []
        expected = self._rows.expected(turn.slots.size, ahead=turn.plan.parts is not None)
        chosen = partial(self._kernels.programmed, turn)
        room, self._room = self._room, None
        return NativeCalls(
            turn, held, self._tables, self._inner, able, chosen, expected, self._hoists, room
        )

    def rest(self) -> None:
        """Nothing is in flight, and maybe no turn comes soon: memory that is kept for one goes."""
        if self._room is not None:
            self._room = self._room.without_memory()

    def _called_in_vain(self, turn: Turn) -> list[bool] | None:
        """Modules that had programs, if any of these was called; None: none was. What has been
        found to have one since then C has not been asked for."""
        able = self._now
        stages = [called.stage for called in turn.plan.calls]
        some = any(isinstance(stage, CallStage) and able[stage.number] for stage in stages)
        return able if some else None

    def tidy(self, turn: Turn) -> None:
        """A turn has come back: the next one may have its memory. Where fewer of its calls were
        made one by one than of the turn before, what those had of the heap goes back to the system;
        now and then, where none was."""
        self._room = None if turn.native is None else turn.native.leave()
        made = 0 if turn.native is None else turn.native.count
        before, self._by_itself = self._by_itself, len(turn.plan.calls) - made
        if before is not None and self._by_itself < before:
            heap.give_back(SOON_S)
            heap.tried()
        elif not self._by_itself:
            heap.give_back(LATER_S)

    def end(self, turn: Turn) -> None:
        """All calls of a turn have been made: remember whether C has made any, and how many rows it
        had, for the next one."""
        if not self._train:
            self._looked += len(turn.plan.calls)
        if turn.native is None:
            return
        self._in_vain = None if turn.native.count else self._called_in_vain(turn)
        n, ahead, numbers = turn.slots.size, turn.plan.parts is not None, turn.plan.numbers
        self._places.note({k: numbers.size(k) for k in range(len(numbers.counts))}, n, ahead=ahead)
        self._rows.note(turn.native.rows, n, ahead=ahead)


def _is_plain(inner: Inner) -> bool:
    """Whether a module sees rows apart."""
    return inner.reads is None and not inner.call.inside
