"""What the way back of calls that C makes needs before them, and what weights learn after them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import numpy as np
from torch import Tensor

from geartrain.native.rows import pointer
from geartrain.native.sums import GradientCall
from geartrain.nodes.loop.arenas import PassingMemory
from geartrain.nodes.loop.bound import CalledModules
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.module import NativeKept, by_module
from geartrain.nodes.loop.returning import Returning
from geartrain.nodes.loop.several import SeveralModule
from geartrain.nodes.loop.several_returning import SeveralReturning
from geartrain.nodes.loop.tables import Tables
from geartrain.nodes.loop.turn import Got, Turn
from geartrain.nodes.loop.updates import Updates


@final
class NativeReturn:
    """That of the calls of one turn, some calls at a time.

    Args:
        turn: The turn.
        held: Its tensors.
        tables: Of the loop.
        modules: Those that C has called.
        passing: Lends memory for what the way back makes.
    """

    def __init__(
        self,
        turn: Turn,
        held: FiringTensors,
        tables: Tables,
        modules: CalledModules,
        passing: PassingMemory,
    ) -> None:
        self._turn, self._held, self._tables = turn, held, tables
        self._modules, self._passing = modules, passing
        self._looks_back: bool | None = None  # is found out when it is asked for
        self._read_back: dict[int, set[int]] = {}  # likewise, by value which of its columns
        self._values: list[int] = []
        self._returning: list[Returning | SeveralReturning] = []

    def begin(self, records: Sequence[Sequence[int]], updates: Updates) -> None:
        """Write where everything lies that these calls read and write on their way back.

        Args:
            records: Theirs.
            updates: By part, of which update the gradient of each place is.
        """
        held, tables = self._held, self._tables
        values: dict[int, list[Tensor | None]] = {}
        wanted = np.empty(sum([record[1] for record in records]), np.uint8)
        at_wanted, begin = pointer(wanted), 0
        for number, mine in by_module(records).items():
            module = self._modules[number]
            for value in module.layout.values:
                if value not in values:
                    values[value] = tables.write_value(value, held, self._read(value))
            into = values[module.layout.into]
            local = self._turn.local
            one: Returning | SeveralReturning
            if isinstance(module, SeveralModule):
                one = SeveralReturning(module, mine, held, into, local, updates)
            else:
                end = begin + sum([record[1] for record in mine])
                into = [into[k] for k in module.layout.which]
                rest = wanted[begin:end], at_wanted + begin
                one = Returning(module, mine, held, into, local, updates, *rest)
                begin = end
            self._returning.append(one)
        self._passing.begin(sum([one.nbytes for one in self._returning]))
        for one in self._returning:
            tables.put(one.module.number, one.module.layout)
            tables.modules[one.module.number, -3:] = one.lie(self._passing)
        self._values = list(values)

    def end(self, got: Got) -> None:
        """These calls have been taken back: tell weights what has been found for them, products and
        sums of rows of all modules in one call, then what else there is.

        Args:
            got: By part, gets the places of the instances whose rows have come back.
        """
        for value in self._values:
            self._held.came(value, int(self._tables.values[value, 1]))
        returning, self._returning = self._returning, []
        assert self._modules.dtype is not None
        call = GradientCall(self._modules.dtype)
        columns = [int(self._tables.modules[one.module.number, -2]) for one in returning]
        came = [
            one.module.layout.came(bits) if isinstance(one, Returning) else bits
            for one, bits in zip(returning, columns, strict=True)
        ]
        for one, outputs in zip(returning, came, strict=True):
            if isinstance(one, Returning):
                one.multiply(outputs, call)
        call.run()
        for one, outputs in zip(returning, came, strict=True):
            one.learn(outputs, got)

    def _read(self, value: int) -> Collection[int] | None:
        """Columns of a value that are read from now on; None: it may be any, by calls that C has
        not made."""
        if self._looks_back is None:
            both = zip(self._turn.plan.calls, self._turn.kept, strict=True)
            self._looks_back = any(
                called.stage.source.looks_back or self._modules.recalls(called.stage)
                for called, kept in both
                if not isinstance(kept, NativeKept)
            )
            for layout in [module.layout for module in self._modules.callable]:
                self._read_back.setdefault(layout.into, set()).update(layout.read_back)
                for number, j in layout.looks_at:
                    self._read_back.setdefault(number, set()).add(j)
        return None if self._looks_back else self._read_back.get(value, ())


def equal_shares(sizes: Sequence[int], most: int) -> list[int]:
    """Where to cut what has these sizes, so that shares are as equal as may be, and as few as there
    have to be if each is to have about that much at the most."""
    cuts: list[int] = []
    total, before = sum(sizes), 0
    if total <= most:
        return cuts
    share = total / -(-total // most)
    for k, size in enumerate(sizes):
        if before and before + size > share * (len(cuts) + 1):
            cuts.append(k)
        before += size
    return cuts
