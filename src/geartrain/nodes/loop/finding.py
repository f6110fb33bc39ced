"""Calls that are found one by one, where payloads decide: C makes them when somebody looks.

    a call is found ─► its rows are told to C, and it waits ─► a function reads a payload, a call is
                                                               made without C, all are found:
                                                               one call of C makes all that wait

Between two looks the plan goes on with numbers alone. What a module is, and how C calls it, is
found out at its first call of a turn (``bound.py``); later ones write a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from geartrain.nodes.loop.bound import CalledModules, Stage
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.module import NativeKept, TurnModule
from geartrain.nodes.loop.plan import Called, RowNumbers
from geartrain.nodes.loop.rooms import AnyModule, CallInputs
from geartrain.nodes.loop.turn import Turn
from geartrain.nodes.loop.words import CallWords

CallRecord: TypeAlias = tuple[int, int, int, int, int]
"""Of a call: module, rows, the first of these there, and of the value that it makes, and where it
is told what it reads."""


@final
class FoundCalls:
    """Those of one turn that wait, or have been made.

    Args:
        turn: The turn.
        modules: Those that C calls.
        held: The tensors of the turn, which are buffers.
        words: Gets what calls read.
        inputs: Where inputs lie that no way back reads.
        expected: By module, how many rows it is expected to have.
    """

    def __init__(
        self,
        turn: Turn,
        modules: CalledModules,
        held: FiringTensors,
        words: CallWords,
        inputs: CallInputs,
        expected: Mapping[int, int],
    ) -> None:
        self._turn, self._modules, self._held = turn, modules, held
        self._words, self._inputs, self._expected = words, inputs, expected
        self._waiting: list[CallRecord] = []
        self._again: dict[Stage, TurnModule] = {}
        """Modules of calls that C makes of single rows, one call at a time."""
        self._placed, self._moves = set[int](), held.moves
        """Modules of which it is written where all lies, and how often buffers had moved then."""

    def find(self, number: int, called: Called) -> int:
        """A call is found, with those that it may be taken together with.

        Returns:
            How many calls wait now; 0: C cannot make this one.
        """
        together = called.together
        if together is not None and number == together.number:
            several = self._turn.plan.calls[number : together.end]
            if self._find(several, together.rows):
                return len(several)
        if called.lengths is not None:
            called = called.by_members(self._turn.plan.numbers)
        before = self._again.get(called.stage) if called.lengths is None else None
        if before is not None and self._find_again(before, called):
            return 1
        if not self._find([called], called.rows):
            return 0
        module = self._modules[self._modules.number(called.stage)]
        if isinstance(module, TurnModule):
            self._again[called.stage] = module
        return 1

    def _find_again(self, module: TurnModule, called: Called) -> bool:
        """A call is found of a module that C has been told of; whether C can make it."""
        rows, modules, layout = called.rows, self._modules, module.layout
        words = self._words
        if module.number in modules.given_up:
            return False
        if layout.as_asked:
            told = [words.pooled(rows.numbers), 0]
        else:
            some = modules.whence_of(module, called.stage, rows)
            if some is None:
                return False
            told = words.told(some, 0)
        self._held.reserve_rows(layout.into)
        n = rows.numbers.size
        if not module.has_room(n):
            self._reserve(module, n)
        self._add(module, called, words.written(told))
        return True

    def _find(self, found: Sequence[Called], rows: RowNumbers) -> bool:
        """Calls are found that read these rows, one after the other; whether C can make them."""
        modules, words = self._modules.of(found, rows), self._words
        if not modules:
            return False
        asked = None in [some for _, some in modules]
        at = words.pooled(rows.numbers) if asked else 0
        offset = 0
        for called, (module, some) in zip(found, modules, strict=True):
            told = [at + 8 * offset, 0] if some is None else words.told(some, offset)
            n = called.rows.numbers.size
            self._reserve(module, n)
            self._add(module, called, words.written(told))
            offset += n
        return True

    def _reserve(self, module: AnyModule, n: int) -> None:
        """Make room for a call of so many rows."""
        module.reserve(self._expected.get(module.number, 0), n, n)
        self._placed.discard(module.number)

    def _add(self, module: AnyModule, called: Called, at: int) -> None:
        """A call waits, of rows that C is told of there."""
        rows, begin = called.rows, module.size
        n, columns = rows.numbers.size, module.layout.columns
        module.add(rows, self._modules.columns(called.stage, rows) if columns else ())
        record = module.number, n, begin, called.first, at
        if self._modules.draws:
            self._modules.seed([record])
        self._waiting.append(record)
        self._turn.kept.append(NativeKept(module, self._held, begin, called.first, n))

    def take(self) -> list[CallRecord]:
        """Those that wait, which are made now: where their modules read and write is written."""
        waiting, self._waiting = self._waiting, []
        held, placed = self._held, self._placed
        if self._moves != held.moves:
            self._moves = held.moves
            placed.clear()
        for k in [record[0] for record in waiting]:
            if k not in placed:
                placed.add(k)
                self._inputs.place(self._modules[k], held)
        return waiting
