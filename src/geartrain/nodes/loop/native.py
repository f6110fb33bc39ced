"""Calls of derived programs in a loop that runs whole, made by C, many at a time.

    calls that follow upon one another, of modules with such programs ─► tables ─► one call of C
    all instances answered ─► the same tables, the last call first ─► one call of C for some
                              thousand rows, and then one product for each weight

What a module reads is told as stored rows (``reads.py``), so C gathers it from where it is held and
adds gradients there. Each module of a turn has memory for the rows of all of its calls
(``tables.py``); those that read a memory or look inside bundles also for the members of what each
row reads (``several.py``). Whatever is not to be had so (modules that run again, bundles that are
answered with bundles) is called one by one, as ever, between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import ProtocolError, WorkerError
from geartrain.frames.message import INSTANCE, IntArray, Payload
from geartrain.native import calls, library, pool
from geartrain.native.calls import CallForm, Home, SeveralForm
from geartrain.native.fused import LACKING
from geartrain.native.rows import pointer
from geartrain.native.sums import GradientCall
from geartrain.nodes.call import read_columns
from geartrain.nodes.chance import row_seeds
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.hoisting import Hoists, call_in_two, shared_rows
from geartrain.nodes.loop.layout import CallLayout
from geartrain.nodes.loop.module import NativeKept, TurnModule
from geartrain.nodes.loop.plan import Called, CallStage, RowNumbers, StoreStage, joined
from geartrain.nodes.loop.reads import Read, ReadTensor, Whence
from geartrain.nodes.loop.returning import Returning
from geartrain.nodes.loop.rooms import AnyModule, TurnRoom
from geartrain.nodes.loop.several import SeveralLayout, SeveralModule
from geartrain.nodes.loop.several_returning import SeveralReturning
from geartrain.nodes.loop.stories import story_of
from geartrain.nodes.loop.tables import Tables
from geartrain.nodes.loop.turn import Got, Inner, Turn
from geartrain.nodes.loop.updates import Updates
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.remembering import Remembering, RememberingRead

Chosen: TypeAlias = Callable[[int, Payload], AbstractKernel | None]
"""The kernel of a module, by number, for rows like these; None: it is not known, or not for C."""
Stage: TypeAlias = CallStage | StoreStage
AnyKernel: TypeAlias = AbstractKernel | AbstractMemoryKernel

BYTES_BACK: Final = 8 << 20
"""Of what rows have kept, and find for weights, that goes back in one call of C: it is multiplied
then, while a cache has it."""
STORES: Final = 16
"""Places of a loop at which rows are copied; at more, they are copied one by one."""

MANY: Final = 6
"""So many modules that may be taken together are called as one: tables of each would cost more."""

_POOL: Final = 1 << 13
"""Words of row numbers, and of where they lie, that there is room for at first."""

_MUCH: Final = 1 << 16
"""Bytes that calls want in between from which on they have them in common."""

_WHY: Final = {
    1: IndexError(LACKING),
    2: MemoryError("no memory for what a kernel computes in between"),
    3: ProtocolError("a row is read that is not there, or a step would never end"),
}


@final
class NativeCalls:
    """Those of one turn.

    Args:
        turn: The turn.
        held: Its tensors, which are buffers.
        tables: Of the loop.
        inner: The modules of the loop.
        able: Of each whether it may be called so.
        chosen: Gives their kernels.
        expected: By module, how many rows it is expected to have, where that is not planned.
        hoists: Modules of the loop that are called in two.
        room: What a turn has left that is over; it is used up.
    """

    def __init__(
        self,
        turn: Turn,
        held: FiringTensors,
        tables: Tables,
        inner: Sequence[Inner],
        able: list[bool],
        chosen: Chosen,
        expected: Mapping[int, int],
        hoists: Hoists,
        room: TurnRoom | None = None,
    ) -> None:
        self._turn, self._held, self._tables, self._inner = turn, held, tables, inner
        self._able, self._chosen, self._expected = able, chosen, expected
        self._hoists = hoists
        self._modules: dict[int, AnyModule | None] = {}
        self._given_up: set[int] = set()
        self._records = np.zeros((0, calls.CALL_WORDS), np.int64)
        self._at_records = 0
        room = TurnRoom() if room is None else room
        self._left, self._passing, self._room = room.modules, room.passing, room.between
        self._pool, self._at_pool, self._used = room.words, pointer(room.words), 0
        self._alive: list[Any] = []
        self._planned: dict[int, IntArray] = {}
        self._dtype: torch.dtype | None = None
        self._width = 1  # of the payload of what was looked at last
        self._looks_back: bool | None = None  # is found out when it is asked for
        self._read_back: dict[int, set[int]] = {}  # likewise, by value which of its columns
        self.count = 0
        """Calls made so far."""

    @property
    def rows(self) -> Mapping[int, int]:
        """Of each module that has been called."""
        return {number: m.size for number, m in self._modules.items() if m is not None}

    def leave(self) -> TurnRoom:
        """What the next turn may use again, as this one is over."""
        modules = {number: m for number, m in self._modules.items() if m is not None}
        self._passing.rest()
        return TurnRoom(self._held.leave(), modules, self._pool, self._room, self._passing)

    def _may(self, called: Called) -> bool:
        stage = called.stage
        if isinstance(stage, CallStage):
            inside = self._inner[stage.number].call.inside
            bundles = called.lengths is not None and stage.pools and inside
            return self._able[stage.number] and (bundles or (called.lengths is None and not inside))
        if called.lengths is not None:
            return False
        return self._number(stage) < self._hoists.most + STORES

    def _number(self, stage: Stage) -> int:
        """Of a module; copies have numbers behind those."""
        if isinstance(stage, CallStage):
            return stage.number
        return self._hoists.most + stage.number

    def _made_of(self, stage: Stage, rows: RowNumbers) -> list[ReadTensor] | None:
        """What the arguments are made of that rows bring to a module; None: C cannot be told."""
        if not isinstance(stage, CallStage):
            return stage.source.reads(self._held, rows.numbers)
        inner = self._inner[stage.number]
        payload = inner.source.reads(self._held, rows.numbers)
        if payload is None:
            return None
        self._width = len(payload)
        return [payload[j] for j in inner.call.taken(len(payload))]

    def _columns(self, stage: Stage, rows: RowNumbers) -> list[Tensor]:
        """What it reads of their columns."""
        if not isinstance(stage, CallStage):
            return []
        inner = self._inner[stage.number]
        lengths = stage.source.lengths(self._turn.plan.numbers, rows.numbers)
        return read_columns(inner.call, inner.place, rows.state, lengths, None)

    def _shaped(
        self, stage: Stage, tensors: Sequence[ReadTensor], columns: Sequence[Tensor], rows: int
    ) -> AnyModule | None:
        """A module whose rows, so many, are made of such; None: C cannot call it."""
        number, kernel = self._number(stage), None
        form: CallForm | SeveralForm | None = None
        if isinstance(stage, CallStage):
            samples = self._tables.samples(number, tensors, columns)
            kernel, form = self._form_of(number, samples, rows)
        else:
            floating = [t.dtype for t in tensors if t.dtype.is_floating_point]
            dtype = self._dtype or next(iter(floating), torch.float32)
            usual = set(floating) <= {dtype} and calls.available(dtype)
            form = self._tables.copying(number, tensors, dtype) if usual else None
        layout = self._laid_out(stage, form, tensors, columns)
        if layout is None:
            return None
        if isinstance(stage, CallStage):
            self._inner[number].width = self._width
        return self._begun(number, kernel, layout)

    def _form_of(
        self, number: int, samples: Payload, rows: int
    ) -> tuple[AnyKernel | None, CallForm | SeveralForm | None]:
        """The kernel of a module and its programs, for rows like these, so many; None: it has
        none."""
        inner = self._inner[number]
        kernel: AnyKernel | None = inner.kernel
        if isinstance(kernel, RememberingRead) and inner.reads is not None:
            return kernel, kernel.listed(samples, inner.reads.held.payload())
        if isinstance(kernel, Remembering) and inner.call.inside:
            return kernel, kernel.listed_inside(samples)
        if inner.call.inside or inner.reads is not None:
            return kernel, None
        kernel = self._chosen(number, samples)
        return kernel, None if kernel is None else kernel.listed(rows)

    def _begun(
        self, number: int, kernel: AnyKernel | None, layout: CallLayout | SeveralLayout
    ) -> AnyModule:
        """A module that C calls so, with the memory of the turn before if that called it so."""
        left = self._left.pop(number, None)
        inner = self._inner[number] if number < self._hoists.most else None
        module: AnyModule
        if isinstance(layout, SeveralLayout):
            assert inner is not None
            assert isinstance(kernel, Remembering | RememberingRead)
            if isinstance(left, SeveralModule) and left.layout is layout:
                module = left
                module.renew(inner, kernel)
            else:
                module = SeveralModule(number, inner, kernel, layout)
        else:
            assert kernel is None or isinstance(kernel, AbstractKernel)
            if isinstance(left, TurnModule) and left.layout is layout:
                module = left
                module.renew(inner, kernel)
            else:
                module = TurnModule(number, inner, kernel, layout)
        self._held.reserve(layout.into, module.name, layout.form.outputs)
        return module

    def _laid_out(
        self,
        stage: Stage,
        form: CallForm | SeveralForm | None,
        tensors: Sequence[ReadTensor],
        columns: Sequence[Tensor],
    ) -> CallLayout | SeveralLayout | None:
        """How C calls what has these programs; None: it cannot, beside what it has called."""
        if form is None or self._dtype not in (None, form.dtype):
            return None
        number, into = self._number(stage), stage.into.number
        asked = stage.source.as_asked(self._turn.plan.numbers)
        rest = number, form, tensors, columns, into, self._held
        layout: CallLayout | SeveralLayout | None
        if isinstance(form, SeveralForm):
            layout = self._tables.layout(SeveralLayout, *rest, as_asked=asked)
        else:
            layout = self._tables.layout(CallLayout, *rest, as_asked=asked)
        if layout is not None:
            self._dtype = form.dtype
        return layout

    # Forward, where all calls are known before

    def plan(self) -> None:
        """All calls are known."""
        found = self._turn.plan.calls
        self._records = np.zeros((len(found), calls.CALL_WORDS), np.int64)
        self._at_records = pointer(self._records)
        planned: dict[int, list[int]] = {}
        for number, called in enumerate(found):
            if self._may(called):
                planned.setdefault(self._number(called.stage), []).append(number)
        self._planned = {k: np.array(each) for k, each in planned.items()}

    def forward(self, number: int) -> int:
        """Make the calls from this one on that C can make, of those that are planned.

        Returns:
            The call after them.
        """
        found, end = self._turn.plan.calls, number
        while end < len(found) and self._is_ready(end):
            end += 1
        if end > number:
            end = self._make(number, end)
            self.count += end - number
            kept, held = self._turn.kept, self._held
            for k, n, begin, into, _ in self._records[number:end].tolist():
                module = self._modules[k]
                assert module is not None
                kept.append(NativeKept(module, held, begin, into, n))
        return end

    def _is_ready(self, number: int) -> bool:
        """Whether C can make a call; its module is bound, with which another may take its place."""
        called = self._turn.plan.calls[number]
        if not self._may(called):
            return False
        k = self._number(called.stage)
        if k not in self._modules:
            self._bind(called.stage, self._planned[k])
            if k not in self._modules:
                return self._is_ready(number)
        return self._modules[k] is not None and k not in self._given_up

    def _bind(self, stage: Stage, numbers: IntArray) -> None:
        """Find out how C makes all calls of a module, None if it cannot; or have other modules
        called in its place."""
        k, found = self._number(stage), [self._turn.plan.calls[n] for n in numbers.tolist()]
        rows = joined([called.rows for called in found])
        tensors = self._made_of(stage, rows)
        if tensors is None:
            self._modules[k] = None
            return
        columns = self._columns(stage, rows)
        if self._hoist(stage, numbers, rows, tensors, columns):
            return
        module = self._shaped(stage, tensors, columns, len(rows))
        lengths = stage.source.lengths(self._turn.plan.numbers, rows.numbers)
        if module is None or not module.accepts(rows, lengths):
            self._modules[k] = None
            return
        self._modules[k] = module
        module.reserve(0, len(rows), max([len(called.rows) for called in found]))
        module.add(rows, columns)
        module.place(self._held)
        self._enlist(module, numbers, found, tensors)

    def _hoist(
        self,
        stage: Stage,
        numbers: IntArray,
        rows: RowNumbers,
        tensors: Sequence[ReadTensor],
        columns: Sequence[Tensor],
    ) -> bool:
        """Have a module called in two where that is less work; whether it is."""
        plan, hoists = self._turn.plan, self._hoists
        if not isinstance(stage, CallStage) or not hoists.may(stage.number):
            return False
        shared = shared_rows(tensors, plan.numbers.counts)
        if shared is None or any(plan.calls[n].together is not None for n in numbers.tolist()):
            return False
        self._inner[stage.number].width = self._width
        samples = self._tables.samples(stage.number, tensors, columns)
        kernel = self._chosen(stage.number, samples)
        module = None if kernel is None else hoists.find(stage, kernel, shared, samples)
        if module is None:
            return False
        now, made = call_in_two(module, shared, plan, numbers, rows)
        self._able += [True] * (len(self._inner) - len(self._able))
        records = np.zeros((len(plan.calls), calls.CALL_WORDS), np.int64)
        records[now[:-1]] = self._records
        self._records = records
        self._at_records = pointer(self._records)
        self._planned = {k: now[each] for k, each in self._planned.items()}
        self._planned |= made
        return True

    def _enlist(
        self,
        module: AnyModule,
        numbers: IntArray,
        found: Sequence[Called],
        tensors: Sequence[ReadTensor],
    ) -> None:
        """Write the records of all calls of a module."""
        reads = module.layout.arranged(tensors)[: 1 if module.layout.as_asked else None]
        sizes = np.array([len(called.rows) for called in found])
        offsets = sizes.cumsum() - sizes
        into = [called.first for called in found]
        at = self._indexed(reads, offsets)
        own = np.full(sizes.size, module.number)
        self._records[numbers] = np.stack([own, sizes, offsets, into, at], 1)

    def _indexed(self, reads: Sequence[tuple[Read, Home]], offsets: IntArray) -> IntArray:
        """Write where the rows of reads begin, from each offset on; the addresses of that.

        Raises:
            ProtocolError: Members begin behind their end. C sees what one call reads, and to it
                the end of its last members is where those of the next call begin.
        """
        index = np.zeros((offsets.size, 2 * max(len(reads), 1)), np.int64)
        for k, (read, _) in enumerate(reads):
            if read.starts is None:
                index[:, 2 * k] = pointer(read.rows) + 8 * read.many * offsets
            else:
                if not _rise(read.starts, read.rows.size):
                    raise _WHY[3]
                index[:, 2 * k] = pointer(read.rows) + 8 * read.starts[offsets]
                index[:, 2 * k + 1] = pointer(read.starts) + 8 * offsets
            self._alive.append(read)
        self._alive.append(index)
        return pointer(index) + index.strides[0] * np.arange(offsets.size)

    # Forward, where calls are found one by one

    def found(self, number: int, called: Called) -> int:
        """Make a call as soon as it is found, with those that it may be taken together with.

        Returns:
            How many calls have been made; 0: C cannot make this one.
        """
        together = called.together
        if together is not None and len(together.sizes) >= MANY:
            return 0
        if together is not None and number == together.number:
            several = self._turn.plan.calls[number : together.end]
            made = self._find(number, several, together.rows)
            if made:
                return made
        return self._find(number, [called], called.rows)

    def _find(self, number: int, found: Sequence[Called], rows: RowNumbers) -> int:
        modules = self._modules_of(found, rows)
        if not modules:
            return 0
        end = number + len(found)
        if end > len(self._records):
            more = np.zeros((max(64, 2 * end), calls.CALL_WORDS), np.int64)
            more[: len(self._records)] = self._records
            self._records, self._at_records = more, pointer(more)
        for module, _ in modules:
            self._held.reserve_rows(module.layout.into)
        at = self._pooled(rows.numbers) if any(some is None for _, some in modules) else 0
        offset, kept = 0, self._turn.kept
        for called, (module, some) in zip(found, modules, strict=True):
            n, begin = called.rows.numbers.size, module.size
            words = [at + 8 * offset, 0] if some is None else self._words_of(some, offset)
            index = self._written(words)
            self._records[number] = module.number, n, begin, called.first, index
            self._add(module, called)
            kept.append(NativeKept(module, self._held, begin, called.first, n))
            offset, number = offset + n, number + 1
        begin = end - len(found)
        made = self._make(begin, end) - begin
        del kept[begin + made :]
        self.count += made
        return made

    def _modules_of(
        self, found: Sequence[Called], rows: RowNumbers
    ) -> list[tuple[AnyModule, list[Whence] | None]]:
        """The modules of calls that read these rows, one call after the other, and which stored
        rows each reads; None: those that it is asked for. Nothing: C cannot make some of them."""
        modules: list[tuple[AnyModule, list[Whence] | None]] = []
        tensors: list[ReadTensor] | None = None
        whence: list[list[Whence]] | None = None
        for called in found:
            k, some = self._number(called.stage), None
            known = k in self._modules
            module = self._modules[k] if known else self._left.get(k)
            if module is not None and not module.layout.as_asked:
                whence = whence or self._whence(called.stage, rows)
                some = None if whence is None else _picked(whence, module)
            told = module is not None and (module.layout.as_asked or some is not None)
            if not known and told:
                told = self._is_called_again(called, k)
            if not told and not (known and module is None):
                if tensors is None:
                    tensors = self._made_of(called.stage, rows) if self._may(called) else None
                module = None if tensors is None else self._fitting(called, k, tensors)
                if module is not None and tensors is not None and not module.layout.as_asked:
                    some = _told(module, tensors)
            if module is None or k in self._given_up:
                return []
            if not module.accepts(called.rows, called.lengths):
                return []
            modules.append((module, some))
        return modules

    def _is_called_again(self, called: Called, k: int) -> bool:
        """Whether C calls a module as in the turn before, of rows that are told in the same way; if
        so it begins."""
        left, held, stage = self._left[k], self._held, called.stage
        layout = left.layout
        if not held.alike or not self._may(called):
            return False
        kernel: AnyKernel | None = left.kernel
        form: CallForm | SeveralForm | None = layout.form
        if isinstance(stage, CallStage):
            rows = max(len(called.rows), self._expected.get(k, 0))
            kernel, form = self._form_of(k, layout.samples, rows)
        if form is not layout.form or self._dtype not in (None, layout.form.dtype):
            return False
        self._dtype = layout.form.dtype
        self._tables.put(k, layout)
        self._modules[k] = self._begun(k, kernel, layout)
        return True

    def _whence(self, stage: Stage, rows: RowNumbers) -> list[list[Whence]] | None:
        """Which stored rows the arguments are made of that rows bring to a module."""
        payload = stage.source.whence(self._held, rows.numbers)
        if payload is None or not isinstance(stage, CallStage):
            return payload
        return [payload[j] for j in self._inner[stage.number].call.taken(len(payload))]

    def _words_of(self, some: Sequence[Whence], row: int) -> list[int]:
        """Where the rows lie that some reads read from this row on, as C reads it.

        Raises:
            ProtocolError: Members begin behind their end.
        """
        self._alive.append(some)
        risen: set[int] = set()
        words: list[int] = []
        for one in some:
            if one.starts is not None and id(one.starts) not in risen:
                if not _rise(one.starts, one.rows.size):
                    raise _WHY[3]
                risen.add(id(one.starts))
            words += one.from_(row)
        return words

    def _written(self, words: Sequence[int]) -> int:
        """Write some words to where they stay; their address."""
        begin, end = self._used, self._used + len(words)
        if end > self._pool.size:
            self._renew(len(words))
            begin, end = 0, len(words)
        self._pool[begin:end] = words
        self._used = end
        return self._at_pool + 8 * begin

    def _fitting(self, called: Called, k: int, tensors: Sequence[ReadTensor]) -> AnyModule | None:
        """The module of a call whose arguments are made of such; None: C cannot make it."""
        if k not in self._modules:
            columns = self._columns(called.stage, called.rows)
            n = max(len(called.rows), self._expected.get(k, 0))
            self._modules[k] = self._shaped(called.stage, tensors, columns, n)
        module = self._modules[k]
        if module is None or module.layout.payload != len(tensors):
            return None
        kinds = module.layout.kinds
        mine = [(t.dtype, t.tail) for t in tensors]
        return module if mine == kinds[: len(mine)] else None

    def _pooled(self, rows: IntArray) -> int:
        """Copy row numbers to where they stay; their address."""
        n = rows.size
        if self._used + n > self._pool.size:
            self._renew(n)
        begin = self._used
        self._used = begin + n
        self._pool[begin : begin + n] = rows
        return self._at_pool + 8 * begin

    def _renew(self, least: int) -> None:
        """A pool with room for so many words at least; the one before stays where it is."""
        self._alive.append(self._pool)
        self._pool = np.empty(max(_POOL, 2 * self._pool.size, 2 * least), np.int64)
        self._at_pool, self._used = pointer(self._pool), 0

    def _add(self, module: AnyModule, called: Called) -> None:
        """Rows more of a module, and its addresses as they are then."""
        rows, layout = called.rows, module.layout
        n = rows.numbers.size
        module.reserve(self._expected.get(module.number, 0), n, n)
        module.add(rows, self._columns(called.stage, rows) if layout.columns else ())
        module.place(self._held)

    def _make(self, first: int, end: int) -> int:
        """Make calls.

        Returns:
            The first that is not made: its program does not know what it is asked for.
        """
        assert self._dtype is not None
        self._seed(first, end)
        at = self._at_records + 8 * calls.CALL_WORDS * first
        room, much = self._extent(first, end, forward=True)
        where = 0 if room is None else room.data_ptr()
        modules = self._tables.at_modules
        bad = calls.forward(self._dtype, end - first, at, modules, where, much=much)
        if not bad:
            return end
        module = self._modules[int(self._records[first + bad // 4, 0])]
        if bad % 4 != 1 or not isinstance(module, SeveralModule):
            self._blame(bad, first, "forward")
        assert isinstance(module, SeveralModule)
        module.kernel.give_up("it asks for rows in another way")
        self._given_up.add(module.number)
        return first + bad // 4

    def _seed(self, first: int, end: int) -> None:
        """Seeds for the rows of some calls, as if each were made by itself."""
        runs: list[tuple[TurnModule, int, int]] = []
        for k, n, begin, *_ in self._records[first:end].tolist():
            module = self._modules[k]
            if not isinstance(module, TurnModule) or not module.draws:
                continue
            before, its, had = runs[-1] if runs else (None, 0, 0)
            if before is module and its + had == begin:
                runs[-1] = module, its, had + n
            else:
                runs.append((module, begin, n))
        if runs:
            sizes = [n for _, _, n in runs]
            seeds = row_seeds(sum(sizes)).split_with_sizes(sizes)
            for (module, begin, _), mine in zip(runs, seeds, strict=True):
                module.seed(begin, mine)

    def _extent(self, first: int, end: int, *, forward: bool) -> tuple[Tensor | None, bool]:
        """Memory for what any of some calls computes in between, or None, where each had better ask
        for its own; and whether all of them are so much work that the lock is given back."""
        assert self._dtype is not None
        most = work = 0
        for k, n, begin, *_ in self._records[first:end].tolist():
            module = self._modules[k]
            assert module is not None
            between, more = module.extent(begin, n, forward=forward)
            most, work = max(most, between), work + more
        nbytes = most * self._dtype.itemsize
        if nbytes >= _MUCH and (self._room is None or self._room.nbytes < nbytes):
            self._room = None
            self._room = pool.shared.empty((nbytes,), torch.uint8)
        return None if nbytes < _MUCH else self._room, work > library.SMALL_WORK

    def _blame(self, bad: int, first: int, way: str) -> None:
        number, why = first + bad // 4, _WHY[bad % 4]
        called = self._turn.plan.calls[number]
        module = self._modules[self._number(called.stage)]
        assert module is not None
        slots, inner = called.rows.state[INSTANCE], module.inner
        if inner is None:
            raise why
        begin, n = int(self._records[number, 2]), len(called.rows)
        inputs = module.inputs(begin, n)
        story = story_of(inner, way, inputs, slots, number, self._turn)
        raise WorkerError(f"{type(why).__name__} in node {story}: {why}") from why

    # Backward

    def made(self, number: int) -> bool:
        """Whether C has made this call."""
        return isinstance(self._turn.kept[number], NativeKept)

    def backward(self, end: int, got: Got, updates: Updates) -> int:
        """Take back calls before ``end`` that C has made, and that follow upon one another.

        Args:
            end: The call after the last of them.
            got: By part, gets the places of the instances whose rows have come back.
            updates: By part, of which update the gradient of each place is.

        Returns:
            The first of the calls that have been taken back.
        """
        begin, nbytes = end, 0
        while begin and self.made(begin - 1):
            number, n, first = self._records[begin - 1, :3].tolist()
            module = self._modules[number]
            assert module is not None
            more = module.nbytes_back(first, n)
            if nbytes and nbytes + more > BYTES_BACK:
                break
            nbytes, begin = nbytes + more, begin - 1
        self._back(begin, end, got, updates)
        return begin

    def _back(self, begin: int, end: int, got: Got, updates: Updates) -> None:
        held, tables, records = self._held, self._tables, self._records[begin:end]
        self._passing.begin()
        by_module: dict[int, list[list[int]]] = {}
        for record in records.tolist():
            by_module.setdefault(record[0], []).append(record)
        values: dict[int, list[Tensor | None]] = {}
        returning: list[Returning | SeveralReturning] = []
        for number, mine in by_module.items():
            module = self._modules[number]
            assert module is not None
            for value in module.layout.values:
                if value not in values:
                    values[value] = tables.write_value(value, held, self._read(value))
            into = values[module.layout.into]
            rest = mine, held, into, self._turn.local, updates, self._passing
            one: Returning | SeveralReturning
            if isinstance(module, SeveralModule):
                one = SeveralReturning(module, *rest)
            else:
                one = Returning(module, *rest)
            returning.append(one)
            tables.put(number, module.layout)
            tables.modules[number, -3:] = one.words
        assert self._dtype is not None
        room, much = self._extent(begin, end, forward=False)
        bad = calls.backward(
            self._dtype,
            end - begin,
            self._at_records + 8 * calls.CALL_WORDS * begin,
            tables.at_modules,
            tables.at_values,
            0 if room is None else room.data_ptr(),
            much=much,
        )
        if bad:
            self._blame(bad, begin, "backward")
        for value in values:
            held.came(value, int(tables.values[value, 1]))
        self._learn(returning, got)
        self._turn.kept[begin:end] = [None] * (end - begin)

    def _read(self, value: int) -> Collection[int] | None:
        """Columns of a value that are read from now on; None: it may be any, by calls that C has
        not made."""
        if self._looks_back is None:
            both = zip(self._turn.plan.calls, self._turn.kept, strict=True)
            self._looks_back = any(
                called.stage.source.looks_back
                for called, kept in both
                if not isinstance(kept, NativeKept)
            )
            for module in self._modules.values():
                if module is not None:
                    layout = module.layout
                    self._read_back.setdefault(layout.into, set()).update(layout.read_back)
                    for number, j in layout.looks_at:
                        self._read_back.setdefault(number, set()).add(j)
        return None if self._looks_back else self._read_back.get(value, ())

    def _learn(self, returning: Sequence[Returning | SeveralReturning], got: Got) -> None:
        """Tell weights what has been found for them: products and sums of rows of all modules in
        one call, then what else there is."""
        assert self._dtype is not None
        call = GradientCall(self._dtype)
        came = [int(self._tables.modules[one.module.number, -2]) for one in returning]
        for one, outputs in zip(returning, came, strict=True):
            if isinstance(one, Returning):
                one.multiply(outputs, call)
        call.run()
        for one, outputs in zip(returning, came, strict=True):
            one.learn(outputs, got)


def _picked(whence: Sequence[Sequence[Whence]], module: AnyModule) -> list[Whence] | None:
    """Those of all reads of a module, in order; None: other rows lie side by side than before."""
    layout = module.layout
    found = [whence[i][j] for i, j in layout.told]
    return found if [one.many for one in found] == layout.many else None


def _told(module: AnyModule, tensors: Sequence[ReadTensor]) -> list[Whence]:
    """The rows of all reads of a module, in order."""
    reads = [read for read, _ in module.layout.arranged(tensors)]
    return [Whence.of(read.rows, read.many, read.starts) for read in reads]


def _rise(starts: IntArray, rows: int) -> bool:
    """Whether no members begin before others end, and none behind so many rows."""
    return bool(0 <= starts[0] and starts[-1] <= rows and (starts[1:] >= starts[:-1]).all())
