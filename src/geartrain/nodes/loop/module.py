"""A module of a loop in one turn, where C makes its calls, and what a call has left there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from geartrain.frames.message import INSTANCE, IntArray, Payload
from geartrain.native.calls import SEEDS, Home
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.arenas import (
    ENOUGH,
    MUCH_MORE,
    NO_MEMORY,
    PassingMemory,
    RowMemory,
    larger,
)
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.layout import CallLayout
from geartrain.nodes.loop.plan import RowNumbers
from geartrain.nodes.loop.several import SeveralModule
from geartrain.nodes.loop.turn import Inner, KeptCall
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.weights import AbstractWeights


@final
class TurnModule:
    """A module in one turn.

    Args:
        number: Of it.
        inner: It; None: rows are copied to where a module reads them.
        kernel: Computes it, or None.
        layout: How C calls it.
    """

    __slots__ = (
        "_at",
        "_begins",
        "_lay",
        "_moved",
        "arena",
        "call_rows",
        "fleeting",
        "inner",
        "kernel",
        "layout",
        "number",
        "size",
        "slots",
    )

    def __init__(
        self, number: int, inner: Inner | None, kernel: AbstractKernel | None, layout: CallLayout
    ) -> None:
        self.number, self.inner, self.kernel, self.layout = number, inner, kernel, layout
        self.arena, self.fleeting = NO_MEMORY, NO_MEMORY
        self.call_rows = 0
        """For so many rows of one call there is to be room."""
        self.size = 0
        """Rows so far."""
        self.slots: list[IntArray] = []
        """Of the instances of its rows."""
        self._at: object = None  # stands for its addresses, as they were written last
        self._moved, self._begins = -1, True
        self._lay: list[int] = []  # where the inputs lay that no way back reads

    def renew(self, inner: Inner | None, kernel: AbstractKernel | None) -> None:
        """Begin another turn, with the memory of the one before as far as nobody else has it."""
        self.inner, self.kernel = inner, kernel
        if self.arena.rows > MUCH_MORE * self.size or not self.arena.is_alone:
            self.arena, self._at = NO_MEMORY, None
        self.size, self.slots, self._begins = 0, [], True

    @property
    def name(self) -> str:
        """For errors."""
        return "a copy" if self.inner is None else self.inner.name

    @property
    def weights(self) -> AbstractWeights | None:
        """Its part, or None."""
        return None if self.inner is None else self.inner.weights

    @property
    def counts(self) -> bool:
        """Whether its rows are gradient rows of its part."""
        return self.inner is None or self.inner.counts

    def accepts(self, rows: RowNumbers, lengths: IntArray | None, held: FiringTensors) -> bool:
        """Whether C can call it with these rows next."""
        return lengths is None

    def reserve(self, n: int, more: int, most: int) -> None:
        """Make room for some rows more.

        Args:
            n: For so many in all if they are more, if need be.
            more: How many.
            most: Of one call.
        """
        room, end = self.arena.rows, self.size + more
        if most > self.call_rows:
            self.call_rows = most + (most >> 2) if self.call_rows else most
        if self.size and end > room:
            self.arena, self._at = self.arena.grown(larger(room, end, n), self.size), None
        elif not self.size and max(end, int(n * ENOUGH)) > room:
            self.arena, self._at = NO_MEMORY, None
            self.arena = RowMemory(self.layout.blocks, max(end, n))

    def has_room(self, n: int) -> bool:
        """Whether there is room for one call more, of n rows, and there has been one."""
        end = self.size + n
        return self.size > 0 and end <= self.arena.rows and n <= self.call_rows

    def lie(self, passing: PassingMemory) -> bool:
        """Have inputs that no way back reads where those of any call lie; whether they have lain
        elsewhere."""
        before, blocks = self.fleeting, self.layout.fleeting_blocks
        self.fleeting = passing.of_call(blocks, self.call_rows, before)
        if self.fleeting is before:
            return False
        if self.fleeting.pointers != self._lay:
            self._at, self._lay = None, self.fleeting.pointers
        return True

    def place(self, held: FiringTensors) -> None:
        """Write where everything lies that the forward reads and writes, unless it is written."""
        layout, moved = self.layout, held.moved(self.layout.values)
        there = self._at is not None and self._at is layout.at and moved == self._moved
        if self._begins:
            self._begins, there = False, there and layout.operands_stay
        if not there:
            self._at, self._moved = layout.place(self.arena, self.fleeting, held), moved

    def tensors(self) -> list[Tensor]:
        """The memory of its rows."""
        return self.arena.tensors()

    def inputs(self, first: int, n: int) -> Payload:
        """Its arguments of n of its rows, as far as they are kept, and others like those that are
        not."""
        block, fleeting = self.layout.block.items(), self.layout.fleeting.items()
        found = {i: self.arena.view(k, first, n) for (how, i), k in block if how == "input"}
        if self.fleeting.rows:
            found |= {i: self.fleeting.view(k, 0, n) for (_, i), k in fleeting}
        kinds = self.layout.kinds
        found |= {
            i: torch.empty((n, *kinds[i][1]), dtype=kinds[i][0])
            for i in [*[i for _, i in fleeting], *self.layout.form.lies]
            if i not in found
        }
        return tuple([found[i] for i in sorted(found)])

    def nbytes_back(self, first: int, n: int) -> int:
        """Bytes that the way back of n of its rows goes through."""
        return n * self.layout.row

    @property
    def work(self) -> int:
        """How much work a row is, forward."""
        return self.layout.form.forward.steps.work(1)

    def extent(self, records: Sequence[Sequence[int]], *, forward: bool) -> tuple[int, int]:
        """Numbers that any of some calls computes in between at most, and how much work all are."""
        form, sizes = self.layout.form, [record[1] for record in records]
        steps = (form.forward if forward else form.backward).steps
        between, _ = steps.extent(max(sizes))  # more rows take no less
        return between, steps.work(sum(sizes))

    def kept(self, first: int, into: int, n: int, held: FiringTensors) -> KeptCall:
        """What a call has left, as if it had been called by itself."""
        homes = self.layout.form.residuals
        rows = tuple([self.rows_of(home, held, first, into, n) for home in homes])
        assert self.kernel is not None
        return KeptCall(self.kernel, rows)

    def add(self, rows: RowNumbers, columns: Sequence[Tensor]) -> None:
        """Rows more, for which there is room, and the columns that it reads of them."""
        layout, n = self.layout, rows.numbers.size
        for i in layout.columns:
            self.arena.write(layout.block["input", i], self.size, n, columns[i - layout.payload])
        self.slots.append(rows.state[INSTANCE])
        self.size += n

    @property
    def draws(self) -> bool:
        """Whether its rows have seeds."""
        return self.layout.form.draws

    def seed(self, first: int, seeds: Tensor) -> None:
        """Seeds of rows from the first on."""
        self.arena.view(self.layout.block[SEEDS], first, seeds.numel()).copy_(seeds)

    def rows_of(self, home: Home, held: FiringTensors, first: int, into: int, n: int) -> Tensor:
        """n rows of a tensor that the forward has left."""
        how, number = home
        if how == "output":
            return self.layout.outputs(held)[number][into : into + n]
        return self.arena.view(self.layout.block[home], first, n)


@final
class NativeKept:
    """What one call has left for its way back, in the memory of its module.

    Args:
        module: It.
        held: The tensors of the turn.
        first, into, n: Its rows among those of the module, and of the value that it makes.
    """

    __slots__ = ("_held", "_module", "first", "into", "n")

    def __init__(
        self,
        module: TurnModule | SeveralModule,
        held: FiringTensors,
        first: int,
        into: int,
        n: int,
    ) -> None:
        self._module, self._held = module, held
        self.first, self.into, self.n = first, into, n

    @property
    def kernel(self) -> AbstractKernel | AbstractMemoryKernel | None:
        """That has computed it; None: rows were copied."""
        return self._module.kernel

    @property
    def residuals(self) -> Payload:
        """Memory that it has rows in."""
        return tuple(self._module.tensors())

    def of(self, number: int) -> KeptCall:
        """The same, as if it had been called by itself."""
        return self._module.kept(self.first, self.into, self.n, self._held)


def by_module(records: Sequence[Sequence[int]]) -> dict[int, list[Sequence[int]]]:
    """Records of calls, by number of the module."""
    found: dict[int, list[Sequence[int]]] = {}
    for record in records:
        mine = found.get(record[0])
        if mine is None:
            found[record[0]] = [record]
        else:
            mine.append(record)
    return found
