"""How C calls one module of a loop: where its rows lie, who reads and writes them; its words.

What the way back reads and makes is in `back_layout`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from math import prod
from typing import Final, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.native import calls
from geartrain.native.calls import SEEDS, CallForm, Home, RowsOf
from geartrain.native.rows import pointer
from geartrain.nodes.loop.arenas import Block, RowMemory
from geartrain.nodes.loop.back_layout import BackLayout, row_of
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.reads import Read, ReadTensor

Table: TypeAlias = NDArray[np.int64]
Like: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Dtype, and shape after the rows."""

_HOWS: Final = {"row": 0, "sum": 1, "mean": 2, "member": 3, "max": 4}
MOST_COLUMNS: Final = 63
"""Tensors of a payload: which of them have got gradients are the bits of a number."""


def _row_bytes(x: Tensor) -> int:
    found: int = x.stride(0) * x.itemsize if x.ndim > 1 else x.itemsize
    return found


def read_words(
    read: Read, source: Tensor, row: int, kind: RowsOf, back: RowsOf, mask: int
) -> tuple[int, ...]:
    """A read as C has it, but for what is written anew.

    Args:
        read: It.
        source: Where the rows lie that it reads.
        row: Bytes from row to row of what is made.
        kind, back: Whose rows these are, and those of its gradient.
        mask: The outputs that the gradient comes from, as bits; 0: it has none.
    """
    size = source.itemsize
    return (
        *(_HOWS[read.how], read.number if mask else -1, read.column),
        *(read.many, read.parts, read.width * size, _row_bytes(source) // read.parts),
        *(read.at * size, 0, 0, row, read.into * size, kind, 0, back, mask, 0),
    )


@final
class CallLayout:
    """How C calls one module of a loop.

    Args:
        form: The module's programs.
        tensors: What its payload is made of, in the first of its calls.
        columns: Tensors like the columns that it reads besides.
        into: The value that it makes rows of.
        which: For each output the tensor of that value that it is; None: they are all.
        held: Where the rows lie that it reads.
        as_asked: Whether all of it is rows of a stored value with the numbers that are asked for.

    Attributes:
        possible: Whether C can call it.
        blocks: Of the arena of a turn: inputs, and what the forward makes for itself.
        fleeting_blocks: Of one call: inputs that no way back reads.
        back: Where everything lies on the way back.
    """

    def __init__(
        self,
        form: CallForm,
        tensors: Sequence[ReadTensor],
        columns: Sequence[Tensor],
        into: int,
        which: Sequence[int] | None,
        held: FiringTensors,
        *,
        as_asked: bool,
    ) -> None:
        self.form, self.into, self.as_asked = form, into, as_asked
        self.which = range(len(form.outputs)) if which is None else which
        self.payload = len(tensors)
        self.key = key_of(tensors)
        self.kinds = kinds_of(tensors, columns)
        self.at: object = None
        """Stands for what has been written last of where everything lies for the forward."""
        self._copied = dict(form.copies)
        self._operands: list[int] | None = None
        self.possible = self._fits() and self._is_told(tensors, held)
        if self.possible:
            self._lay_out(tensors, held)

    def _fits(self) -> bool:
        form, kinds = self.form, self.kinds
        if len(kinds) != form.inputs or any(i >= self.payload for i in self._copied.values()):
            return False
        for k, _, width, dtype in form.forward.given:
            if self._home(k) == SEEDS:
                continue
            mine, tail = kinds[k - form.operands]
            if mine is not dtype or prod(tail) != width:
                return False
        return all(kinds[i][0] is form.dtype for i in form.gradients)

    def _home(self, k: int) -> Home:
        """Of an argument of the forward, behind the operands."""
        i = k - self.form.operands
        return self.form.of_input(i) if i < self.form.inputs else SEEDS

    def _is_told(self, tensors: Sequence[ReadTensor], held: FiringTensors) -> bool:
        """Whether C can be told what is read: columns are bits, and it adds up one dtype."""
        widths = [len(self.form.outputs)]
        for t in tensors:
            widths += [len(held.likes(r.number) or ()) for r in t.reads]
            if t.dtype is not self.form.dtype and any(r.how != "row" for r in t.reads):
                return False
        return max(widths) <= MOST_COLUMNS

    def _lay_out(self, tensors: Sequence[ReadTensor], held: FiringTensors) -> None:
        form = self.form
        asked = {k - form.operands for k, *_ in form.forward.given}
        asked |= {i for how, i in form.residuals if how == "input"}
        asked |= set(form.gradients)
        self._asked = [i for i in range(self.payload) if i in asked and i not in form.lies]
        self.columns = [i for i in range(self.payload, len(self.kinds)) if i in asked]
        own = sorted({m for how, m in form.homes if how == "own"})
        kept = {i for how, i in form.residuals if how == "input"}
        self.block: dict[Home, int] = {}
        self.blocks: list[Block] = []
        self.fleeting: dict[Home, int] = {}
        self.fleeting_blocks: list[Block] = []
        for i in (*self._asked, *self.columns):
            if i in kept or i in self.columns:
                self.block["input", i] = len(self.blocks)
                self.blocks.append(Block(*self.kinds[i]))
            else:
                self.fleeting["input", i] = len(self.fleeting_blocks)
                self.fleeting_blocks.append(Block(*self.kinds[i]))
        if form.draws:
            self.block[SEEDS] = len(self.blocks)
            self.blocks.append(Block(torch.int64, ()))
        for m in own:
            self.block["own", m] = len(self.blocks)
            _, tail, _, dtype = form.forward.made[m]
            self.blocks.append(Block(dtype, tail))
        self._lay_out_forward()
        self._lay_out_reads(tensors, held)
        self.back = BackLayout(form, self.blocks, self.block)
        self.row = sum([block.row for block in (*self.blocks, *self.back.of_rows)])
        """Bytes of a row of all memories."""
        self._back_answers = [self.back.answer(i) for i in self._answered]
        for words, i in zip(self.reads, self._answered, strict=True):
            if words[1] >= 0:
                words[14] = self.back.whose_answer(i)

    def _static(self, home: Home) -> tuple[RowsOf, int]:
        """Whose rows a tensor has, and bytes from row to row."""
        how, number = home
        if how == "output":
            return RowsOf.OF_VALUE, row_of(self.form.outputs[number])
        if home in self.fleeting:
            return RowsOf.OF_CALL, self.fleeting_blocks[self.fleeting[home]].row
        return RowsOf.OF_MODULE, self.blocks[self.block[home]].row

    def _lay_out_forward(self) -> None:
        form = self.form
        slots: dict[int, Home] = {slot: self._home(k) for k, slot, *_ in form.forward.given}
        for home, result in zip(form.homes, form.forward.results, strict=True):
            if result < 0:
                slots[form.forward.made[~result][0]] = home
        self._slots = list(slots.items())
        self._bases = np.zeros(form.forward.slots, np.int64)
        self._strides, self._whose = np.zeros_like(self._bases), np.zeros_like(self._bases)
        for slot, home in self._slots:
            self._whose[slot], self._strides[slot] = self._static(home)

    def _lay_out_reads(self, tensors: Sequence[ReadTensor], held: FiringTensors) -> None:
        pairs = self.arranged(tensors)
        self._targets = [home for _, home in pairs]
        self._sources = [(read.number, read.column, read.parts) for read, _ in pairs]
        inputs = [*self._asked, *self._copied.values()]
        self.told = [(i, j) for i in inputs for j in range(len(tensors[i].reads))]
        """By read, the tensor that it is for, and which of that."""
        self.many = [read.many for read, _ in pairs]
        """By read, the rows that lie side by side in a row."""
        self.looks_at = {(read.number, read.column) for read, _ in pairs if read.how == "max"}
        """Columns of values in which the way back looks for the largest members."""
        self.reads = np.zeros((len(pairs), calls.READ_WORDS), np.int64)
        form, answers = self.form, self.form.gradients
        for words, (read, home) in zip(self.reads, pairs, strict=True):
            source = (held.likes(read.number) or ())[read.column]
            kind, row = self._static(home)
            how, i = home
            first = how == "input"
            if how == "output":  # the first output that an input is gets its gradient
                j, i = i, self._copied[i]
                first = self.form.lies[i] == j
            learns = read.learns and i in answers and first
            columns = [self.which[form.tangents[t]] for t in answers[i]] if learns else []
            mask = sum([1 << k for k in columns])
            words[:] = read_words(read, source, row, kind, RowsOf.FIXED, mask)
        self.read_back = frozenset(
            self.which[j] for how, j in self.form.residuals if how == "output"
        )
        """Columns of the value that it makes which the way back reads."""
        self.values = list(dict.fromkeys([self.into, *[v for v, _, _ in self._sources]]))
        """Whose gradients the way back reads, or adds to."""
        self._answered = [i if how == "input" else self._copied[i] for how, i in self._targets]

    @cached_property
    def samples(self) -> tuple[Tensor, ...]:
        """Tensors like its arguments, without a row."""
        return tuple([torch.empty((0, *tail), dtype=dtype) for dtype, tail in self.kinds])

    def arranged(self, tensors: Sequence[ReadTensor]) -> list[tuple[Read, Home]]:
        """What inputs, and outputs that are inputs, are made of, in the order of the table."""
        found: list[tuple[Read, Home]] = []
        for i in self._asked:
            found += [(read, ("input", i)) for read in tensors[i].reads]
        for j, i in self._copied.items():
            found += [(read, ("output", j)) for read in tensors[i].reads]
        return found

    def holds(
        self, form: CallForm, tensors: Sequence[ReadTensor], columns: Sequence[Tensor]
    ) -> bool:
        """Whether it is as it would be made now; if so it is of this form from now on."""
        if not self.form.alike(form) or self.kinds != kinds_of(tensors, columns):
            return False
        self.form = form
        if self.possible:
            self.back.form = form
        return self.as_asked or self.key == key_of(tensors)

    def write(self, words: Table) -> None:
        """Write what stays of a module's words."""
        form, n = self.form, calls.ROUTINE_WORDS
        both = (self._bases, self._strides, self._whose)
        words[:n] = (*form.forward.steps.words, *map(pointer, both), 0)
        words[n : 2 * n] = (*form.backward.steps.words, *map(pointer, self.back.places), 0)
        apart = 0 if self.as_asked else 2
        words[2 * n :] = (self.into, len(self.reads), apart, pointer(self.reads), 0, 0, 0)

    @property
    def operands_stay(self) -> bool:
        """Whether operands lie where they lay when addresses were written; they are as they are
        now, then."""
        return self.form.addresses(True) is self._operands

    def place(self, arena: RowMemory, fleeting: RowMemory, held: FiringTensors) -> object:
        """Write where everything lies that the forward reads and writes.

        Args:
            arena: Of the rows of this turn.
            fleeting: Of those of one call.
            held: The tensors of the turn.

        Returns:
            What stands for it.
        """
        outputs, pointers, block = self.outputs(held), arena.pointers, self.block
        self._operands = self.form.addresses(True)
        bases = self._operands.copy()

        def at(home: Home) -> int:
            how, number = home
            if how == "output":
                return outputs[number].data_ptr()
            if home in self.fleeting:
                return fleeting.pointers[self.fleeting[home]]
            return pointers[block[home]]

        for slot, home in self._slots:
            bases[slot] = at(home)
        self._bases[:] = bases
        if self._targets:
            sources = self._now(held)
            self.reads[:, calls.READ_LIMIT] = [
                x.shape[0] * parts for x, (*_, parts) in zip(sources, self._sources, strict=True)
            ]
            self.reads[:, calls.READ_FROM] = [x.data_ptr() for x in sources]
            self.reads[:, calls.READ_INTO] = [at(home) for home in self._targets]
        self.at = object()
        return self.at

    def outputs(self, held: FiringTensors) -> list[Tensor]:
        """Where its outputs lie."""
        likes = held.likes(self.into) or ()
        return [likes[k] for k in self.which]

    def came(self, columns: int) -> int:
        """The outputs that have got gradients, as bits; of the columns of the value that have."""
        return sum([1 << j for j, k in enumerate(self.which) if columns >> k & 1])

    def _now(self, held: FiringTensors) -> list[Tensor]:
        """What its reads read, where it lies now."""
        return [(held.likes(value) or ())[column] for value, column, _ in self._sources]

    def place_back(
        self,
        arena: RowMemory,
        back: RowMemory,
        passing: RowMemory,
        sums: RowMemory,
        first: int,
        held: FiringTensors,
        gradients: Sequence[Tensor | None],
    ) -> list[int]:
        """The same for the way back.

        Args:
            arena: Of the rows of this turn.
            back: Of the rows from ``first`` on that go back now.
            passing: Of those of any one call.
            sums: Of what rows are added up in.
            first: Their first.
            held: The tensors of the turn.
            gradients: Of its outputs.

        Returns:
            Where all of it lies.
        """
        outputs = self.outputs(held)
        own = zip(back.pointers, self.back.blocks, strict=True)
        where = [
            *arena.pointers,
            *[x.data_ptr() for x in outputs],
            *[0 if g is None else g.data_ptr() for g in gradients],
            *[at - first * block.row for at, block in own],
            *passing.pointers,
            *sums.pointers,
            0,
        ]
        if self.back.write(where) and self._targets:
            self.reads[:, calls.READ_BACK] = [where[k] for k in self._back_answers]
        if self.looks_at:  # which members hold the most; buffers may have moved
            self.at = None
            self.reads[:, calls.READ_FROM] = [x.data_ptr() for x in self._now(held)]
        return where


def kinds_of(tensors: Sequence[ReadTensor], columns: Sequence[Tensor]) -> list[Like]:
    """Dtypes and shapes, after the rows, of what a module is given."""
    found = [(t.dtype, t.tail) for t in tensors]
    return found + [(x.dtype, x.shape[1:]) for x in columns] if columns else found


def key_of(tensors: Sequence[ReadTensor]) -> Hashable:
    """What a layout takes as constant of what a module reads."""
    return tuple(
        [
            (t.dtype, t.tail, r.number, r.column, r.width, r.at, r.into, r.how, r.many, r.parts)
            for t in tensors
            for r in t.reads
        ]
    )
