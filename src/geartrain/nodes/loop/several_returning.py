"""The way back of calls that C makes of a module that reads a memory or looks inside bundles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, final

import numpy as np
from torch import Tensor

from geartrain.frames.message import IntArray, join_arrays, ragged_index
from geartrain.native.calls import MEMBERS, ROWS, AbstractSeveralFound, Lies
from geartrain.native.rows import pointer, take
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.loop.arenas import PassingMemory, RowMemory, nbytes_of
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.returning import rows_of_calls
from geartrain.nodes.loop.several import SeveralModule
from geartrain.nodes.loop.turn import Got
from geartrain.nodes.loop.updates import Updates
from geartrain.nodes.slot import ALONE

_OF_VALUES: Final = ("tangent", "output")


@final
class SeveralReturning:
    """Some calls of such a module on their way back.

    Args:
        module: It.
        records: Theirs.
        held: The tensors of the turn.
        gradients: Of the value that it makes.
        local: Slot to its place in the turn.
        updates: By part, of which update the gradient of each place is.

    Attributes:
        nbytes: That are asked for when it gets memory for what the way back makes.
    """

    def __init__(
        self,
        module: SeveralModule,
        records: Sequence[Sequence[int]],
        held: FiringTensors,
        gradients: Sequence[Tensor | None],
        local: IntArray,
        updates: Updates,
    ) -> None:
        self.module, self._records = module, records
        self._gradients, self._outputs = gradients, held.likes(module.layout.into) or ()
        first = self._first = records[0][2]
        n = self._n = records[-1][2] + records[-1][1] - first
        ends = module.ends[first : first + n + 1]
        self._begin, self._lengths = int(ends[0]), np.diff(ends)
        self._lying = self._records
        if module.layout.form.answers:  # with members, which lie in the value
            every = module.ends
            self._lying = [
                (k, int(every[begin + m] - every[begin]), begin, *rest)
                for k, m, begin, *rest in records
            ]
        weights, layout = module.weights, module.layout
        self._local = local[join_arrays(module.slots)[first : first + n]]
        of = None if weights is None else updates.get(weights.name)
        self._updates = None if of is None else of[self._local]
        self._memory = module.recalled(first, n, held)
        self._gets = self._memory is not None and self._memory.wanted
        self._sizes = n, int(ends[-1]) - self._begin
        # What waits for a step stays: it would hold what all others are lent, too.
        self._waits = [of is not None or rows < ALONE for rows in self._sizes]
        rest = zip(layout.back_blocks, self._sizes, self._waits, strict=True)
        self.nbytes = sum([nbytes_of(blocks, rows) for blocks, rows, waits in rest if not waits])
        self._held = held
        self._wanted = np.zeros(n, np.uint8)

    def lie(self, passing: PassingMemory) -> tuple[int, int, int]:
        """Lie in memory that is lent, and write where everything is; as the table of modules
        ends."""
        module, layout, first = self.module, self.module.layout, self._first
        self._arenas = [
            RowMemory(blocks, rows, None if waits else passing)
            for blocks, rows, waits in zip(
                layout.back_blocks, self._sizes, self._waits, strict=True
            )
        ]
        at = module.addresses(self._held, back=True)
        at |= {("output", j): x.data_ptr() for j, x in enumerate(self._outputs)}
        for t, j in enumerate(layout.form.tangents):
            g = self._gradients[j]
            at["tangent", t] = 0 if g is None else g.data_ptr()
        for k in range(len(layout.form.made)):
            kind, block = layout.block["made", k]
            away = (first, self._begin)[kind] * layout.back_blocks[kind][block].row
            at["made", k] = self._arenas[kind].pointers[block] - away
        layout.place_back(at, module.memory(self._held), self._held, wanted=self._gets)
        # Where it would lie if it began with the first row of the module.
        return pointer(self._wanted) - first, 0, 0

    def learn(self, came: int, got: Got) -> None:
        """Tell the memory, and weights, what has been found for them.

        Args:
            came: Of which outputs gradients have come, as bits.
            got: By part, gets the places of the instances whose rows have come back.
        """
        wanted, module = self._wanted.view(np.bool_), self.module
        if not wanted.any():
            return
        some = None if wanted.all() else np.flatnonzero(wanted)
        self._touch(came, some)
        weights = module.weights
        if weights is None:
            return
        found = _Found(self, some)
        local, each = self._local, self._updates
        if some is not None:
            local, each = local[some], None if each is None else each[some]
        if module.layout.form.inside:
            local = local.repeat(found.lengths)
            each = None if each is None else each.repeat(found.lengths)
        got[weights.name].append(local)
        into: GradientSum = weights.gradient
        with nullcontext() if each is None else into.of_updates(each):
            module.layout.form.learn(found, came, into)

    def _touch(self, came: int, some: IntArray | None) -> None:
        memory = self._memory
        if memory is None or not self._gets:
            return
        touched = self.module.layout.form.touched(came)
        gets = tuple([x if yes else None for x, yes in zip(memory.sums, touched, strict=True)])
        handles = memory.handles if some is None else memory.handles[some]
        memory.held.touch(handles, gets)

    def rows_of(self, lies: Lies) -> Tensor:
        """A tensor, of all of the rows, or of their members."""
        where, number = lies
        if where in _OF_VALUES:
            j = number if where == "output" else self.module.layout.form.tangents[number]
            x = self._outputs[j] if where == "output" else self._gradients[j]
            assert x is not None
            return rows_of_calls(x, self._lying)
        if where != "made":
            return self.module.rows_of(lies, self._first, self._n)
        kind, k = self.module.layout.block[lies]
        return self._arenas[kind].view(k, 0, (self._n, int(self._lengths.sum()))[kind])

    def kind_of(self, lies: Lies) -> int:
        """Of the rows of a tensor."""
        layout = self.module.layout
        if lies[0] in _OF_VALUES:
            return MEMBERS if layout.form.answers else ROWS
        return layout.block[lies][0]

    @property
    def lengths(self) -> IntArray:
        """Members of each row."""
        found: IntArray = self._lengths
        return found


@final
class _Found(AbstractSeveralFound):
    """What has been found for the rows that have got a gradient.

    Args:
        calls: Some calls.
        some: Which of their rows; None: all.
    """

    def __init__(self, calls: SeveralReturning, some: IntArray | None) -> None:
        self._calls, self._some = calls, some
        every = calls.lengths
        self._of_members = None if some is None else ragged_index(every, some)
        self.lengths: Any = every if some is None else every[some]

    def rows_of(self, lies: Lies) -> Tensor:
        found = self._calls.rows_of(lies)
        if self._some is None:
            return found
        which = self._some if self._calls.kind_of(lies) == ROWS else self._of_members
        assert which is not None
        return take([found.contiguous()], which)[0]

    def count(self, kind: int) -> int:
        return int(self.lengths.size if kind == ROWS else self.lengths.sum())

    def owners(self, kind: int) -> IntArray:
        n: int = self.lengths.size
        if kind == ROWS:  # updates are told for members: one of each bundle
            ends = self.lengths.cumsum()
            first: IntArray = np.minimum(ends - self.lengths, max(int(ends[-1]) - 1, 0))
            return first
        owners: IntArray = np.arange(n).repeat(self.lengths)
        return owners
