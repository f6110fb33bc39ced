"""What a turn of a loop leaves for the next one: memory, and what was found out to call modules.

    a turn has come back ─► its buffers, the memory of its modules, row numbers ─► the next turn

So addresses stay the same, and what C reads of them need not be written anew. Somebody may still
read there: an output that a user keeps, a gradient that waits for a step, rows on their way to
another worker. Whoever does has a tensor of that memory, which is asked how many there are when
the next turn takes it; where there are more than its owner's, the next turn has memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np

from geartrain.frames.message import IntArray
from geartrain.nodes.loop.arenas import NO_MEMORY, PassingMemory
from geartrain.nodes.loop.buffers import FiringTensors, LeftBuffers
from geartrain.nodes.loop.module import TurnModule
from geartrain.nodes.loop.several import SeveralModule

AnyModule: TypeAlias = TurnModule | SeveralModule


@final
class CallInputs:
    """Inputs of calls that no way back reads, of all modules of a turn: as calls are made one after
    the other, they lie in one memory.

    Args:
        memory: In which.
    """

    __slots__ = ("_memory", "modules")

    def __init__(self, memory: PassingMemory) -> None:
        self._memory = memory
        self.modules: dict[int, TurnModule] = {}
        """Those that have such inputs, by number."""

    def lie(self, module: TurnModule, held: FiringTensors) -> None:
        """Have those of a module lie there; where the memory is another one then, those of the
        others lie there, too, and that is written."""
        self.modules[module.number] = module
        if module.lie(self._memory):
            for one in self.modules.values():
                one.lie(self._memory)
                one.place(held)

    def place(self, module: AnyModule, held: FiringTensors) -> None:
        """Write where everything lies that a module's forward reads and writes."""
        if isinstance(module, TurnModule) and module.layout.fleeting_blocks:
            self.lie(module, held)
        module.place(held)

    def rest(self) -> PassingMemory:
        """All calls have been made: nobody has such inputs any more. The memory, for the turn that
        is next."""
        for module in self.modules.values():
            module.fleeting = NO_MEMORY
        self._memory.rest()
        return self._memory


@final
@dataclass(slots=True)
class TurnRoom:
    """Of one turn, at any time.

    Args:
        buffers: Of values.
        modules: As C called them, by number.
        words: Row numbers and where they lie, as C has read them.
        passing: What the way back makes, until it is added up; how much that was.
        inputs: Likewise those of one call that no way back reads.
    """

    buffers: LeftBuffers | None = None
    modules: dict[int, AnyModule] = field(default_factory=dict)
    words: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    passing: PassingMemory = field(default_factory=PassingMemory)
    inputs: PassingMemory = field(default_factory=PassingMemory)

    def without_memory(self) -> TurnRoom:
        """What was found out alone: how modules are called, and the kinds of values."""
        kinds = None if self.buffers is None else self.buffers._replace(buffers={})
        return TurnRoom(kinds, {k: _anew(module) for k, module in self.modules.items()})


def _anew(module: AnyModule) -> AnyModule:
    """One that is called so, and has had no rows."""
    if isinstance(module, TurnModule):
        return TurnModule(module.number, module.inner, module.kernel, module.layout)
    return SeveralModule(module.number, module.inner, module.kernel, module.layout)
