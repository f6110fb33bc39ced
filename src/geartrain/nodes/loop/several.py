"""How C calls a module of a loop that reads a memory or looks inside bundles: it has rows of two
kinds, those of the module and the members of what each of them reads.

    SeveralLayout   where tensors lie, who reads and writes them; the words that C reads
    SeveralModule   the module in one turn: its rows, their members, row numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from geartrain.frames.message import INSTANCE, IntArray, Payload, join_arrays, write_ranges
from geartrain.native import calls
from geartrain.native.calls import (
    MEMBERS,
    ROWS,
    Home,
    Lies,
    RowsOf,
    SeveralForm,
)
from geartrain.native.pool import made_words
from geartrain.native.rows import pointer
from geartrain.nodes.held import Recalled
from geartrain.nodes.inside import look_inside
from geartrain.nodes.loop.arenas import MUCH_MORE, NO_MEMORY, Block, RowMemory, few_more, larger
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.layout import Table, key_of, kinds_of, read_words
from geartrain.nodes.loop.plan import RowNumbers
from geartrain.nodes.loop.reads import Read, ReadTensor
from geartrain.nodes.loop.routine_slots import VALUES, RoutineSlots
from geartrain.nodes.loop.turn import Inner, KeptCall
from geartrain.nodes.remembering import Remembering, RememberingRead
from geartrain.nodes.weights import AbstractWeights


@final
class SeveralLayout:
    """How C calls one such module of a loop.

    Args:
        form: The module's programs.
        tensors: What its payload is made of, in the first of its calls.
        columns: Tensors like the columns that it reads besides.
        into: The value that it makes rows of.
        held: Where the rows lie that it reads.
        memory: The value that they read besides; -1: none, or it is held outside.
        as_asked: Whether all of it is rows of a stored value with the numbers that are asked for.

    Attributes:
        possible: Whether C can call it.
        outputs: Each with no row.
        blocks: Of the memory of a turn, by kind of rows: inputs, row numbers, what is kept.
        back_blocks: Of that of the way back.
        block: Where each tensor lies among these.
        most: Members that a turn has had.
    """

    def __init__(
        self,
        form: SeveralForm,
        tensors: Sequence[ReadTensor],
        columns: Sequence[Tensor],
        into: int,
        held: FiringTensors,
        memory: int,
        *,
        as_asked: bool,
    ) -> None:
        self._memory = memory
        self.form, self.into, self.as_asked = form, into, as_asked and not form.inside
        self.payload, self.key = len(tensors), key_of(tensors)
        self.kinds = kinds_of(tensors, columns)
        self.columns = [*range(self.payload, len(self.kinds))]
        counted = all(i >= self.payload for i in form.numbering)  # before C brings the payload
        self._copied = {j: y for j, y in enumerate(form.outputs) if isinstance(y, int)}
        self.most = 0
        self.possible = (
            counted
            and all(i < self.payload for i in self._copied.values())
            and len(self.kinds) == form.inputs
            and all(self.kinds[i][0] is form.dtype for i in form.gradients)
        )
        self.blocks: tuple[list[Block], list[Block]] = ([], [])
        self.back_blocks: tuple[list[Block], list[Block]] = ([], [])
        self.block: dict[Lies, tuple[int, int]] = {}
        if self.possible:
            self._lay_out(tensors, held)
        self.rows = [
            sum([block.row for blocks in (self.blocks, self.back_blocks) for block in blocks[kind]])
            for kind in (ROWS, MEMBERS)
        ]
        """Bytes of a row, and of a member, of both memories."""

    @property
    def own_kind(self) -> int:
        """Of the rows of inputs."""
        return MEMBERS if self.form.inside else ROWS

    def _add(self, blocks: Sequence[list[Block]], lies: Lies, kind: int, block: Block) -> None:
        self.block[lies] = kind, len(blocks[kind])
        blocks[kind].append(block)

    def _lay_out(self, tensors: Sequence[ReadTensor], held: FiringTensors) -> None:
        form, samples = self.form, self.samples
        self.outputs = [samples[y] if isinstance(y, int) else y for y in form.outputs]
        for i, (dtype, tail) in enumerate(self.kinds):
            self._add(self.blocks, ("input", i), self.own_kind, Block(dtype, tail))
        for k, (kind, entries) in enumerate(form.ints):
            self._add(self.blocks, ("ints", k), kind, Block(torch.int64, (entries,)))
            if k in form.floats:
                self._add(self.blocks, ("float", k), kind, Block(form.dtype, (entries,)))
        for k, (kind, entries) in enumerate(form.own):
            self._add(self.blocks, ("own", k), kind, Block(form.dtype, (entries,)))
        for k, (kind, entries) in enumerate(form.made):
            self._add(self.back_blocks, ("made", k), kind, Block(form.dtype, (entries,)))
        rows = [y.shape[1:].numel() * y.itemsize for y in self.outputs]
        routines = form.forward, form.backward, form.without
        self._forward, self._back, self._without = (RoutineSlots(form, r, rows) for r in routines)
        self._lay_out_reads(tensors, held)
        lying = [*form.backward.slots.values(), *form.without.slots.values()]
        lying += [lies for _, lies in form.gradients.values()]
        self.read_back = frozenset(j for how, j in lying if how == "output")
        """Columns of the value that it makes which the way back reads."""
        own = [self._memory] if self._memory >= 0 else []
        numbers = [self.into, *[r.number for r, _ in self._pairs], *own]
        self.values = list(dict.fromkeys(numbers))
        """Whose gradients the way back reads, or adds to."""

    def _lay_out_reads(self, tensors: Sequence[ReadTensor], held: FiringTensors) -> None:
        form = self.form
        self._pairs = self.arranged(tensors)
        inputs = [*range(self.payload), *self._copied.values()]
        self.told = [(i, j) for i in inputs for j in range(len(tensors[i].reads))]
        """By read, the tensor that it is for, and which of that."""
        self.many = [read.many for read, _ in self._pairs]
        """By read, the rows that lie side by side in a row."""
        self.looks_at = {(read.number, read.column) for read, _ in self._pairs if read.how == "max"}
        """Columns of values in which the way back looks for the largest members, or which it reads
        as a memory."""
        if self._memory >= 0:
            self._lay_out_memory(held)
        self.reads = np.zeros((len(self._pairs), calls.READ_WORDS), np.int64)
        self._targets: list[Lies] = []
        for words, (read, (how, k)) in zip(self.reads, self._pairs, strict=True):
            asked, i = how == "input", k if how == "input" else self._copied[k]
            row = self.blocks[self.own_kind][self.block["input", i][1]].row
            came, lies = form.gradients.get(i, (frozenset(), ("ends", 0)))
            learns = asked and read.learns and bool(came)  # once
            source = (held.likes(read.number) or ())[read.column]
            mask = sum([1 << form.tangents[t] for t in came]) if learns else 0
            into = RowsOf.OF_MODULE if asked else RowsOf.OF_VALUE
            kind = RowsOf.OF_VALUE if lies[0] in VALUES else RowsOf.OF_MODULE
            words[:] = read_words(read, source, row, into, kind, mask)
            self._targets.append(("input", k) if asked else ("output", k))

    def _lay_out_memory(self, held: FiringTensors) -> None:
        """Of a value that rows read: which outputs its gradients come from."""
        n, outputs = len(held.likes(self._memory) or ()), len(self.form.outputs)
        came = [self.form.touched(1 << j) for j in range(outputs)]
        masks = [sum([1 << j for j in range(outputs) if came[j][k]]) for k in range(n)]
        self._masks = np.array(masks, np.int64)
        self.looks_at |= {(self._memory, k) for k in range(n)}

    @cached_property
    def samples(self) -> tuple[Tensor, ...]:
        """Tensors like its arguments, without a row."""
        return tuple([torch.empty((0, *tail), dtype=dtype) for dtype, tail in self.kinds])

    def arranged(self, tensors: Sequence[ReadTensor]) -> list[tuple[Read, Home]]:
        """What inputs, and outputs that are inputs, are made of, in the order of the table."""
        found: list[tuple[Read, Home]] = []
        for i, t in enumerate(tensors):
            found += [(read, ("input", i)) for read in t.reads]
        for j, i in self._copied.items():
            found += [(read, ("output", j)) for read in tensors[i].reads]
        return found

    def holds(
        self, form: SeveralForm, tensors: Sequence[ReadTensor], columns: Sequence[Tensor]
    ) -> bool:
        """Whether it is as it would be made now."""
        if self.form is not form or self.kinds != kinds_of(tensors, columns):
            return False
        return self.as_asked or self.key == key_of(tensors)

    def write(self, words: Table) -> None:
        """Write what stays of a module's words."""
        n = calls.ROUTINE_WORDS
        self._words = words
        words[:n] = self._forward.words
        apart = 0 if self.as_asked else 2
        words[2 * n :] = (self.into, len(self.reads), apart, pointer(self.reads), 0, 0, 0)

    def place(self, at: dict[Lies, int], memory: Payload, held: FiringTensors) -> None:
        """Write where everything lies that the forward reads and writes.

        Args:
            at: Addresses of the module's own.
            memory: What rows read, or nothing.
            held: The tensors of the turn.
        """
        outputs = held.likes(self.into) or ()
        at |= {("output", j): x.data_ptr() for j, x in enumerate(outputs)}
        self._forward.place(at, memory[0].shape[0] if memory else 0)
        sources = self._sources(held)
        self.reads[:, calls.READ_LIMIT] = [
            x.shape[0] * r.parts for x, (r, _) in zip(sources, self._pairs, strict=True)
        ]
        self.reads[:, calls.READ_FROM] = [x.data_ptr() for x in sources]
        self.reads[:, calls.READ_INTO] = [at[lies] for lies in self._targets]

    def _sources(self, held: FiringTensors) -> list[Tensor]:
        return [(held.likes(r.number) or ())[r.column] for r, _ in self._pairs]

    def place_back(
        self, at: dict[Lies, int], memory: Payload, held: FiringTensors, *, wanted: bool
    ) -> None:
        """The same for the way back.

        Args:
            at: Addresses of all.
            memory: What rows read, or nothing.
            held: The tensors of the turn.
            wanted: Whether anybody wants the gradient of that.
        """
        slots = self._back if wanted else self._without
        slots.place(at, memory[0].shape[0] if memory else 0)
        if self._memory >= 0:
            slots.reach(self._memory, at["cells", 0], self._masks)
        n = calls.ROUTINE_WORDS
        self._words[n : 2 * n] = slots.words
        found: dict[Lies, int] = {}
        found |= {("input", i): at[lies] for i, (_, lies) in self.form.gradients.items()}
        self.reads[:, calls.READ_BACK] = [found.get(lies, 0) for lies in self._targets]
        if self.looks_at:  # which members hold the most; buffers may have moved
            self.reads[:, calls.READ_FROM] = [x.data_ptr() for x in self._sources(held)]


@final
class SeveralModule:
    """Such a module in one turn.

    Args:
        number: Of it.
        inner: It.
        kernel: Computes it.
        layout: How C calls it.
    """

    __slots__ = (
        "_cells",
        "_ends",
        "_next",
        "_seen",
        "arenas",
        "inner",
        "kernel",
        "layout",
        "number",
        "size",
        "slots",
        "states",
    )

    def __init__(
        self,
        number: int,
        inner: Inner,
        kernel: Remembering | RememberingRead,
        layout: SeveralLayout,
    ) -> None:
        self.number, self.inner, self.kernel, self.layout = number, inner, kernel, layout
        self.arenas = [NO_MEMORY, NO_MEMORY]
        self.size = 0
        """Rows so far."""
        self.slots: list[IntArray] = []
        """Of the instances of its rows."""
        self.states: list[IntArray] = []
        self._seen = -1  # when its addresses were written
        self._ends, self._cells = np.zeros(1, np.int64), np.zeros(0, np.int64)
        self._next: tuple[IntArray, IntArray] | None = None

    def renew(self, inner: Inner, kernel: Remembering | RememberingRead) -> None:
        """Begin another turn, with the memory of the one before as far as nobody else has it."""
        self.inner, self.kernel = inner, kernel
        sizes = self.size, self.members
        for kind, (arena, used) in enumerate(zip(self.arenas, sizes, strict=True)):
            if arena.rows > MUCH_MORE * used or not arena.is_alone:
                self.arenas[kind] = NO_MEMORY
        self.size, self.slots, self.states, self._seen = 0, [], [], -1

    @property
    def name(self) -> str:
        """For errors."""
        return self.inner.name

    @property
    def weights(self) -> AbstractWeights | None:
        """Its part, or None."""
        return self.inner.weights

    @property
    def members(self) -> int:
        """Of its rows so far."""
        return int(self._ends[self.size])

    @property
    def ends(self) -> IntArray:
        """int64 ``(size + 1,)``, where the members of its rows begin and end."""
        return self._ends[: self.size + 1]

    def recalled(self, first: int, n: int, held: FiringTensors) -> Recalled | None:
        """What n of its rows read of a memory, or None: it looks inside bundles."""
        if self.layout.form.inside:
            return None
        state = self.states[0] if len(self.states) == 1 else np.concatenate(self.states, 1)
        if len(self.states) > 1:
            self.states = [state]
        return self.inner.recalled(held, state[:, first : first + n], None)

    def accepts(self, rows: RowNumbers, lengths: IntArray | None, held: FiringTensors) -> bool:
        """Whether C can call it with these rows next: who reads, reads something."""
        if lengths is None:
            memory = self.inner.recalled(held, rows.state, None)
            self._next = memory.starts, memory.lengths
            return bool(memory.lengths.all())
        self._next = lengths, lengths
        return True

    def reserve(self, n: int, more: int, most: int) -> None:
        """Make room for the rows that were accepted last; if need be, for so many in all if they
        are more."""
        assert self._next is not None
        _, lengths = self._next
        end, members = self.size + lengths.size, self.members + int(lengths.sum())
        layout = self.layout
        layout.most = max(layout.most, members)
        of_members = few_more(members, layout.most)
        if end + 1 > self._ends.size:
            self._ends = _grown(self._ends, max(end + 1, n + 1, 2 * self._ends.size))
            self._seen = -1
        if not layout.form.inside and members > self._cells.size:
            room = larger(self._cells.size if self.members else 0, members, of_members)
            self._cells = _grown(self._cells[: self.members], room)
            self._seen = -1
        for kind, (used, asked, hoped) in enumerate(
            ((self.size, end, n), (self.members, members, of_members))
        ):
            arena = self.arenas[kind]
            if asked > arena.rows:
                room = larger(arena.rows if used else 0, asked, hoped)
                if not used:
                    arena = self.arenas[kind] = NO_MEMORY  # so that it may lie there
                blocks = self.layout.blocks[kind]
                self.arenas[kind] = arena.grown(room, used) if used else RowMemory(blocks, room)
                self._seen = -1

    def add(self, rows: RowNumbers, columns: Sequence[Tensor]) -> None:
        """Rows more, for which there is room, and the columns that it reads of them."""
        assert self._next is not None
        layout, form, (starts, lengths) = self.layout, self.layout.form, self._next
        n, before = rows.numbers.size, self.members
        ends = self._ends[self.size + 1 : self.size + 1 + n]
        np.cumsum(lengths, out=ends)
        ends += before
        count = int(ends[-1]) - before if n else 0
        if not form.inside:
            write_ranges(self._cells[before : before + count], starts, lengths)
        here = ((self.size, n), (before, count))
        for i in layout.columns:
            self._view(("input", i), here).copy_(columns[i - layout.payload])
        if form.ints:
            given = [self._view(("input", i), here) for i in range(form.inputs)]
            for k, x in enumerate(form.counted(given, torch.from_numpy(lengths))):
                at = self._view(("ints", k), here)
                at.copy_(x.view(at.shape))
                if k in form.floats:
                    self._view(("float", k), here).copy_(at)
        self.slots.append(rows.state[INSTANCE])
        self.states.append(rows.state)
        self.size += n

    def _view(self, lies: Lies, here: Sequence[tuple[int, int]]) -> Tensor:
        kind, k = self.layout.block[lies]
        return self.arenas[kind].view(k, *here[kind])

    def rows_of(self, lies: Lies, first: int, n: int) -> Tensor:
        """A tensor of the module's own, of n of its rows, or of their members."""
        begin, end = int(self._ends[first]), int(self._ends[first + n])
        return self._view(lies, ((first, n), (begin, end - begin)))

    def addresses(self, held: FiringTensors, *, back: bool = False) -> dict[Lies, int]:
        """Of what is the module's own, and of what its rows read.

        Args:
            held: The tensors of the turn.
            back: Whether gradients are added up there.
        """
        at: dict[Lies, int] = {
            lies: self.arenas[kind].pointers[k]
            for lies, (kind, k) in self.layout.block.items()
            if lies[0] != "made"
        }
        at["ends", 0], at["cells", 0] = pointer(self._ends), pointer(self._cells)
        if self.inner.reads is not None:
            memory = self.inner.reads.memory(held)
            at |= {("held", k): x.data_ptr() for k, x in enumerate(memory.payload())}
            sums = enumerate(memory.sums() if back else ())
            at |= {("sums", k): 0 if x is None else x.data_ptr() for k, x in sums}
        return at

    def memory(self, held: FiringTensors) -> Payload:
        """What its rows read, or nothing."""
        return () if self.inner.reads is None else self.inner.reads.memory(held).payload()

    def place(self, held: FiringTensors) -> None:
        """Write where everything lies that the forward reads and writes, unless it is written."""
        moved = held.moved(self.layout.values)
        if self._seen != moved:
            self.layout.place(self.addresses(held), self.memory(held), held)
            self._seen = moved

    def tensors(self) -> list[Tensor]:
        """The memory of its rows."""
        return [x for arena in self.arenas for x in arena.tensors()]

    def inputs(self, first: int, n: int) -> Payload:
        """Its arguments of n of its rows."""
        return tuple([self.rows_of(("input", i), first, n) for i in range(self.layout.form.inputs)])

    def nbytes_back(self, first: int, n: int) -> int:
        """Bytes that the way back of n of its rows goes through."""
        row, member = self.layout.rows
        return n * row + int(self._ends[first + n] - self._ends[first]) * member

    def extent(self, records: Sequence[Sequence[int]], *, forward: bool) -> tuple[int, int]:
        """Numbers that any of some calls computes in between at most, and how much work all are."""
        form, most, work = self.layout.form, 0, 0
        steps = (form.forward if forward else form.backward).steps
        for _, n, first, *_ in records:
            ends = self._ends[first : first + n + 1]
            lengths = ends[1:] - ends[:-1]
            longest = int(lengths.max(initial=0))
            sizes = n, int(ends[-1] - ends[0]), 0, 0, int(lengths @ lengths)
            most = max(most, steps.between(n, longest))
            work += steps.work(sizes)
        return most, work

    def kept(self, first: int, into: int, n: int, held: FiringTensors) -> KeptCall:
        """What a call has left, as if it had been called by itself: it is computed again."""
        inside, inner = None, self.inner
        if self.layout.form.inside:
            ends = self._ends[first : first + n + 1]
            slots = join_arrays(self.slots)[first : first + n]
            inside = look_inside(inner.place, slots, ends[1:] - ends[:-1], None)
        return KeptCall(self.kernel, self.inputs(first, n), None, inside)


def _grown(x: IntArray, n: int) -> IntArray:
    found = made_words((n,))
    found[: x.size], found[x.size :] = x, 0
    return found
