"""Calls of derived programs in a loop that runs whole, made by C, many at a time.

    calls that follow upon one another, of modules with such programs ─► tables ─► one call of C
    all instances answered ─► the same tables, the last call first ─► one call of C a few thousand
                              rows, and one product for each weight

What a module reads is told as stored rows (``reads.py``), so C gathers it from where it is held and
adds gradients there. Each module of a turn has buffers for the rows of all of its calls. Whatever is
not to be had so (memories, bundles, kernels written by hand) is called one by one, as ever, between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import ProtocolError, WorkerError
from geartrain.frames.message import INSTANCE, IntArray, Payload, distinct, join_arrays
from geartrain.native import calls, library
from geartrain.native.calls import CallForm, Home, Kind, pointer
from geartrain.native.rows import take
from geartrain.nodes.call import read_columns
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.plan import Called, CallStage, RowNumbers, StoreStage
from geartrain.nodes.loop.reads import Read, ReadTensor
from geartrain.nodes.loop.stories import story_of
from geartrain.nodes.loop.tensors import FiringTensors
from geartrain.nodes.loop.turn import Got, Inner, KeptCall, Turn
from geartrain.nodes.loop.updates import Updates

Chosen: TypeAlias = Callable[[int, Payload], AbstractKernel | None]
"""The kernel of a module, by number, for rows like these; None: it is not known, or not to be used."""

ROWS_BACK: Final = 2048
"""Rows of calls that go back in one call of C: what they find for weights is multiplied then."""

_HOWS: Final = {"row": 0, "sum": 1, "mean": 2}
_WHY: Final = {
    1: IndexError("index out of range: a row of a table is asked for that it lacks"),
    2: MemoryError("no memory for what a kernel computes in between"),
    3: ProtocolError("a row is read that is not there"),
}


@final
class _Module:
    """A module in one turn: buffers for the rows of all its calls.

    Args:
        number: Of it.
        inner: It; None: rows are copied to where a module reads them.
        kernel: Computes it, or None.
        form: As C wants it.
        into: Number of the value that it makes rows of.
    """

    def __init__(
        self,
        number: int,
        inner: Inner | None,
        kernel: AbstractKernel | None,
        form: CallForm,
        into: int,
    ) -> None:
        self.number, self.inner, self.kernel, self.form = number, inner, kernel, form
        self.into = into
        self.size = 0
        """Rows so far."""
        self.room = 0
        self.likes: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self.inputs: list[Tensor] = []
        self.own: dict[int, Tensor] = {}
        self.reads: list[tuple[Read, Home]] = []
        self.local: list[IntArray] = []
        self.table = np.zeros((0, calls.READ_WORDS), np.int64)
        self.bases: list[NDArray[np.int64]] = []
        self.wanted = np.zeros(0, np.uint8)

    def lay_out(self, tensors: Sequence[ReadTensor], columns: Sequence[Tensor]) -> bool:
        """Find out what it reads, from what its first rows are made of; False: C cannot."""
        form = self.form
        likes = [(t.dtype, t.tail) for t in tensors]
        likes += [(x.dtype, tuple(x.shape[1:])) for x in columns]
        if len(likes) != form.inputs:
            return False
        for k, _, width, dtype in form.forward.given:
            mine, tail = likes[k - form.operands]
            if mine is not dtype or int(np.prod(tail, dtype=np.int64)) != width:
                return False
        copied = dict(form.copies)
        if any(i >= len(tensors) for i in copied.values()):
            return False
        asked = {k - form.operands for k, *_ in form.forward.given}
        asked |= {i for how, i in form.residuals if how == "input"}
        asked |= set(form.gradients) - set(copied.values())
        self.likes, self.payload = likes, len(tensors)
        self.asked = [i for i in range(len(tensors)) if i in asked]
        self.copied = list(copied.items())
        return True

    def grow(self, n: int, columns: Sequence[Tensor] | None) -> None:
        """Make room for n rows; columns are taken as they are where they are of all rows."""
        before, own = self.inputs, self.own
        self.room, payload = n, len(self.likes) - (len(columns) if columns is not None else 0)
        self.inputs = []
        for i, (dtype, tail) in enumerate(self.likes):
            if columns is not None and i >= payload:
                self.inputs.append(columns[i - payload].contiguous())
            else:
                rows = n if i in self.asked or i >= self.payload else 0
                self.inputs.append(torch.empty((rows, *tail), dtype=dtype))
        homes = {number for how, number in self.form.homes if how == "own"}
        made = self.form.forward.made
        self.own = {
            m: torch.empty((n, *made[m][1]), dtype=self.form.dtype) for m in sorted(homes)
        }
        if self.size:
            for old, new in zip(before, self.inputs, strict=True):
                if new.shape[0]:
                    new[: self.size] = old[: self.size]
            for m, x in own.items():
                self.own[m][: self.size] = x[: self.size]

    def where(self, home: Home, held: FiringTensors) -> tuple[int, Kind, int]:
        """Address, whose rows, and bytes from row to row."""
        how, number = home
        if how == "output":
            x = (held.likes(self.into) or ())[number]
            return x.data_ptr(), Kind.OF_VALUE, _row_bytes(x)
        x = self.inputs[number] if how == "input" else self.own[number]
        return x.data_ptr(), Kind.OF_MODULE, _row_bytes(x)

    def rows_of(self, home: Home, held: FiringTensors, first: int, into: int, n: int) -> Tensor:
        """n rows of a tensor that the forward has left."""
        how, number = home
        if how == "output":
            return (held.likes(self.into) or ())[number][into : into + n]
        x = self.inputs[number] if how == "input" else self.own[number]
        return x[first : first + n]


    def some(self, found: Sequence[Tensor | None], which: IntArray) -> tuple[Tensor | None, ...]:
        """Results of its backward, of some of their rows."""
        results, made = self.form.backward.results, self.form.backward.made
        return tuple(
            [
                x if x is None or (k < 0 and not made[~k][2]) else take([x.contiguous()], which)[0]
                for k, x in zip(results, found, strict=True)
            ]
        )


def _row_bytes(x: Tensor) -> int:
    found: int = x.stride(0) * x.itemsize if x.ndim > 1 else x.itemsize
    return found


@final
class NativeKept:
    """What one call has left for its way back, in the buffers of its module.

    Args:
        module: It.
        held: The tensors of the turn.
        first, into, n: Its rows among those of the module, and of the value that it makes.
    """

    __slots__ = ("_held", "_module", "first", "into", "n")

    def __init__(
        self, module: _Module, held: FiringTensors, first: int, into: int, n: int
    ) -> None:
        self._module, self._held = module, held
        self.first, self.into, self.n = first, into, n

    @property
    def kernel(self) -> AbstractKernel | None:
        """That has computed it; None: rows were copied."""
        return self._module.kernel

    @property
    def residuals(self) -> Payload:
        """Tensors that it has rows in."""
        return (*self._module.inputs, *self._module.own.values())

    def of(self, number: int) -> KeptCall:
        """The same, as if it had been called by itself."""
        module = self._module
        rows = [
            module.rows_of(home, self._held, self.first, self.into, self.n)
            for home in module.form.residuals
        ]
        assert module.kernel is not None
        return KeptCall(module.kernel, tuple(rows))


@final
class NativeCalls:
    """Those of one turn.

    Args:
        turn: The turn; its tensors are buffers.
        held: They.
        inner: The modules of the loop.
        able: Of each whether it may be called so.
        chosen: Gives their kernels.
        expected: By module, how many rows it is expected to have, where that is not planned.
    """

    def __init__(
        self,
        turn: Turn,
        held: FiringTensors,
        inner: Sequence[Inner],
        able: Sequence[bool],
        chosen: Chosen,
        expected: Mapping[int, int],
    ) -> None:
        self._turn, self._held, self._inner = turn, held, inner
        self._able, self._chosen, self._expected = able, chosen, expected
        self._modules: dict[int, _Module | None] = {}
        self._table = np.zeros((0, calls.MODULE_WORDS), np.int64)
        self._stores: dict[int, int] = {}
        self._records = np.zeros((0, calls.CALL_WORDS), np.int64)
        self._alive: list[Any] = []
        self._planned: dict[int, list[int]] = {}
        self._dtype: torch.dtype | None = None
        self._work = 0

    @property
    def apart(self) -> bool:
        """Whether rows of several updates may go back together."""
        return all(m.form.apart for m in self._modules.values() if m is not None)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Rows of each module that has been called."""
        return {number: m.size for number, m in self._modules.items() if m is not None}

    # Forward

    def plan(self) -> None:
        """All calls are known."""
        found = self._turn.plan.calls
        self._records = np.zeros((len(found), calls.CALL_WORDS), np.int64)
        for number, called in enumerate(found):
            if self._may(called):
                self._planned.setdefault(self._number(called.stage), []).append(number)
        more = len(self._inner) + len(self._stores)
        self._table = np.zeros((more, calls.MODULE_WORDS), np.int64)

    def _may(self, called: Called) -> bool:
        stage = called.stage
        if called.lengths is not None or stage.pools:
            return False
        return not isinstance(stage, CallStage) or self._able[stage.number]

    def _number(self, stage: CallStage | StoreStage) -> int:
        """Of a module; copies have numbers behind those."""
        if isinstance(stage, CallStage):
            return stage.number
        return len(self._inner) + self._stores.setdefault(id(stage), len(self._stores))

    def forward(self, number: int) -> int:
        """Make the calls from this one on that C can make, of those that are planned.

        Returns:
            The call after them.
        """
        found, end = self._turn.plan.calls, number
        while end < len(found) and self._is_ready(found[end]):
            end += 1
        if end > number:
            self._make(number, end)
        return end

    def _is_ready(self, called: Called) -> bool:
        if not self._may(called):
            return False
        number = self._number(called.stage)
        if number not in self._modules:
            self._modules[number] = self._bind(called.stage, self._planned[number])
        return self._modules[number] is not None

    def _bind(self, stage: CallStage | StoreStage, numbers: Sequence[int]) -> _Module | None:
        """Lay out a module and all of its calls; None: C cannot make them."""
        found = [self._turn.plan.calls[number] for number in numbers]
        rows = _joined([called.rows for called in found])
        known = self._known(stage, rows) if isinstance(stage, CallStage) else self._copied(stage, rows)
        if known is None:
            return None
        module, tensors, columns = known
        n = len(rows)
        module.grow(n, columns)
        self._place(module, tensors)
        sizes = np.array([len(called.rows) for called in found])
        offsets = sizes.cumsum() - sizes
        self._enlist(module, numbers, found, sizes, offsets, offsets)
        module.size = n
        module.local.append(self._turn.local[rows.state[INSTANCE]])
        return module

    def _copied(
        self, stage: StoreStage, rows: RowNumbers
    ) -> tuple[_Module, list[ReadTensor], list[Tensor]] | None:
        """The same of rows that are copied to where a module reads them."""
        tensors = stage.source.reads(self._held, rows.numbers)
        if tensors is None:
            return None
        dtype = self._dtype or next(
            (t.dtype for t in tensors if t.dtype.is_floating_point), torch.float32
        )
        floating = {t.dtype for t in tensors if t.dtype.is_floating_point}
        if floating - {dtype} or not calls.available(dtype):
            return None
        likes = [torch.empty((0, *t.tail), dtype=t.dtype) for t in tensors]
        form = calls.copying(likes, dtype)
        module = _Module(self._number(stage), None, None, form, stage.into.number)
        if not module.lay_out(tensors, ()):
            return None
        self._dtype = dtype
        self._held.reserve(module.into, "a copy", likes)
        return module, tensors, []

    def _known(
        self, stage: CallStage, rows: RowNumbers
    ) -> tuple[_Module, list[ReadTensor], list[Tensor]] | None:
        """A module that is laid out, and what these rows of it are made of."""
        inner = self._inner[stage.number]
        tensors = self._made_of(inner, rows)
        if tensors is None:
            return None
        columns = read_columns(inner.call, inner.place, rows.state, None, None)
        samples = tuple([torch.empty((0, *t.tail), dtype=t.dtype) for t in tensors])
        kernel = self._chosen(stage.number, (*samples, *[x[:0] for x in columns]))
        form = None if kernel is None else kernel.listed()
        if kernel is None or form is None or self._dtype not in (None, form.dtype):
            return None
        module = _Module(stage.number, inner, kernel, form, stage.into.number)
        if not module.lay_out(tensors, columns):
            return None
        inner.width = self._width
        self._dtype = form.dtype
        self._held.reserve(module.into, inner.name, form.outputs)
        return module, tensors, columns

    def _made_of(self, inner: Inner, rows: RowNumbers) -> list[ReadTensor] | None:
        """What the payload of a module's rows is made of; None: C cannot be told."""
        payload = inner.source.reads(self._held, rows.numbers)
        if payload is None:
            return None
        self._width = len(payload)
        return [payload[j] for j in inner.call.taken(len(payload))]

    def _place(self, module: _Module, tensors: Sequence[ReadTensor]) -> None:
        """Write the words of a module: where everything lies."""
        form, held = module.form, self._held
        bases = np.array(form.addresses(True), np.int64)
        strides, kinds = np.zeros_like(bases), np.zeros_like(bases)

        def put(slot: int, at: tuple[int, Kind, int]) -> None:
            bases[slot], kinds[slot], strides[slot] = at

        for k, slot, _, _ in form.forward.given:
            put(slot, module.where(("input", k - form.operands), held))
        for home, result in zip(form.homes, form.forward.results, strict=True):
            if result < 0:
                put(form.forward.made[~result][0], module.where(home, held))
        module.reads = [
            (read, ("input", i)) for i in module.asked for read in tensors[i].reads
        ] + [(read, ("output", j)) for j, i in module.copied for read in tensors[i].reads]
        module.table = np.zeros((len(module.reads), calls.READ_WORDS), np.int64)
        for words, (read, (how, k)) in zip(module.table, module.reads, strict=True):
            source = (held.likes(read.number) or ())[read.column]
            size, wide = source.itemsize, read.width * source.itemsize
            row = _row_bytes(source) // read.parts
            at, kind, stride = module.where((how, k), held)
            words[:] = (
                *(_HOWS[read.how], -1, read.column, read.many, read.parts),
                *(wide, row, read.at * size, source.shape[0] * read.parts),
                *(source.data_ptr(), stride, read.into * size, kind, at, 0, 0, 0),
            )
        module.bases = [bases, strides, kinds]
        self._table[module.number] = (
            *form.forward.steps.words,
            *map(pointer, module.bases),
            *[0] * calls.ROUTINE_WORDS,
            *(0, len(module.reads), pointer(module.table), 0, 0),
        )

    def _enlist(
        self,
        module: _Module,
        numbers: Sequence[int],
        found: Sequence[Called],
        sizes: IntArray,
        first: IntArray,
        offsets: IntArray,
    ) -> None:
        """Write the records of calls.

        Args:
            module: Of all of them.
            numbers, found: They.
            sizes, first: Their rows, and where these begin among those of the module.
            offsets: And where among the rows that its reads are of.
        """
        index = np.zeros((len(found), 2 * len(module.reads)), np.int64)
        for k, (read, _) in enumerate(module.reads):
            if read.starts is None:
                index[:, 2 * k] = pointer(read.rows) + 8 * read.many * offsets
            else:
                index[:, 2 * k] = pointer(read.rows) + 8 * read.starts[offsets]
                index[:, 2 * k + 1] = pointer(read.starts) + 8 * offsets
            self._alive += (read.rows, read.starts)
        self._alive.append(index)
        at = pointer(index) + index.strides[0] * np.arange(len(found))
        records = self._records
        where = np.asarray(numbers)
        records[where, 0], records[where, 1], records[where, 2] = module.number, sizes, first
        records[where, 3] = [called.first for called in found]
        records[where, 4] = at
        self._work += module.form.forward.steps.work(int(sizes.sum()))

    def _make(self, first: int, end: int) -> None:
        """Make calls, and note what they have left."""
        turn = self._turn
        records = self._records[first:end]
        much = self._work > library.SMALL_WORK
        dtype = self._dtype
        assert dtype is not None
        bad = calls.forward(dtype, end - first, pointer(records), pointer(self._table), much=much)
        if bad:
            self._blame(bad, first, "forward")
        for number, n, at, into, _ in records.tolist():
            module = self._modules[number]
            assert module is not None
            turn.kept.append(NativeKept(module, self._held, at, into, n))

    def _blame(self, bad: int, first: int, way: str) -> None:
        number, why = first + bad // 4, _WHY[bad % 4]
        called = self._turn.plan.calls[number]
        module = self._modules[self._number(called.stage)]
        assert module is not None
        slots, one = called.rows.state[INSTANCE], module.inner
        if one is None:
            raise why
        inputs = [x[: len(called.rows)] for x in module.inputs]
        story = story_of(one, way, inputs, slots, number, self._turn)
        raise WorkerError(f"{type(why).__name__} in node {story}: {why}") from why

    # Backward

    def made(self, number: int) -> bool:
        """Whether C has made this call."""
        return isinstance(self._turn.kept[number], NativeKept)

    def backward(self, end: int, got: Got, updates: Updates) -> int:
        """Take back the calls before ``end`` that C has made, as far as they follow upon one another.

        Args:
            end: The call after the last of them.
            got: By part, gets the places of the instances whose rows have come back.
            updates: By part, of which update the gradient of each place is.

        Returns:
            The first of the calls that have been taken back.
        """
        begin, rows, records = end, 0, self._records
        while begin and self.made(begin - 1):
            n = int(records[begin - 1, 1])
            if rows and rows + n > ROWS_BACK:
                break
            rows, begin = rows + n, begin - 1
        self._back(begin, end, got, updates)
        return begin

    def _back(self, begin: int, end: int, got: Got, updates: Updates) -> None:
        turn, held = self._turn, self._held
        records = self._records[begin:end]
        numbers = np.unique(records[:, 0]).tolist()
        modules = [m for number in numbers if (m := self._modules[number]) is not None]
        places: dict[int, int] = {}
        for module in modules:
            for value in (module.into, *(read.number for read, _ in module.reads)):
                places.setdefault(value, len(places))
        values = np.zeros((len(places), calls.VALUE_WORDS), np.int64)
        alive: list[Any] = []
        gradients: dict[int, list[Tensor | None]] = {}
        for value, at in places.items():
            gradients[value] = held.zeros(value)
            columns = np.array(
                [0 if g is None else g.data_ptr() for g in gradients[value]], np.int64
            )
            alive.append(columns)
            values[at] = pointer(held.touch(value)), held.came(value), pointer(columns)
        found = [
            self._prepare(m, records[records[:, 0] == m.number], places, gradients)
            for m in modules
        ]
        dtype = self._dtype
        assert dtype is not None
        much = self._work > library.SMALL_WORK
        bad = calls.backward(
            dtype,
            end - begin,
            pointer(records),
            pointer(self._table),
            pointer(values),
            much=much,
        )
        if bad:
            self._blame(bad, begin, "backward")
        for value, at in places.items():
            held.came(value, int(values[at, 1]))
        for module, (first, n, results) in zip(modules, found, strict=True):
            self._learn(module, first, n, results, got, updates)
        for number in range(begin, end):
            turn.kept[number] = None

    def _prepare(
        self,
        module: _Module,
        records: IntArray,
        places: Mapping[int, int],
        gradients: Mapping[int, Sequence[Tensor | None]],
    ) -> tuple[int, int, Callable[[], list[Any]]]:
        """Write the words of a module for the way back of some of its calls.

        Returns:
            The first of its rows, how many, and what gives the results of the backward.
        """
        form, held = module.form, self._held
        routine = form.backward
        first = int(records[0, 2])
        n = int(records[-1, 2] + records[-1, 1]) - first
        bases = np.array(form.addresses(False), np.int64)
        strides, kinds = np.zeros_like(bases), np.zeros_like(bases)
        residuals, mine = form.residuals, gradients[module.into]

        def put(slot: int, at: tuple[int, Kind, int]) -> None:
            bases[slot], kinds[slot], strides[slot] = at

        def argument(k: int) -> tuple[int, Kind, int]:
            k -= form.operands
            if k < len(residuals):
                return module.where(residuals[k], held)
            g = mine[form.tangents[k - len(residuals)]]
            assert g is not None
            return g.data_ptr(), Kind.OF_VALUE, _row_bytes(g)

        for k, slot, _, _ in routine.given:
            put(slot, argument(k))
        made: list[Tensor] = []
        where: list[tuple[int, Kind, int]] = []
        for slot, tail, rows in routine.made:
            if rows:
                x = torch.empty((n, *tail), dtype=form.dtype)
                stride = _row_bytes(x)
                where.append((x.data_ptr() - first * stride, Kind.OF_MODULE, stride))
            else:
                x = torch.zeros(tail, dtype=form.dtype)
                where.append((x.data_ptr(), Kind.FIXED, 0))
            made.append(x)
            put(slot, where[-1])
        answers = {}
        for k, (i, of) in enumerate(form.gradients.items()):
            result = routine.results[k]
            at = argument(result) if result >= 0 else where[~result]
            answers[i] = (at, sum([1 << form.tangents[t] for t in of]))
        for words, (read, (how, i)) in zip(module.table, module.reads, strict=True):
            words[1] = -1
            if how == "output":  # an input that is nothing but copied has no other read
                i = dict(module.copied)[i]
                if i in module.asked:
                    continue
            if read.learns and i in answers and module.likes[i][0].is_floating_point:
                (at, kind, _), mask = answers[i]
                words[1], words[14], words[15], words[16] = places[read.number], kind, mask, at
        module.bases = [bases, strides, kinds]
        module.wanted = np.zeros(module.size, np.uint8)
        own = self._table[module.number]
        own[calls.ROUTINE_WORDS : 2 * calls.ROUTINE_WORDS] = (
            *routine.steps.words,
            *map(pointer, module.bases),
        )
        own[2 * calls.ROUTINE_WORDS :] = (
            *(places[module.into], len(module.reads), pointer(module.table)),
            *(pointer(module.wanted), 0),
        )

        def results() -> list[Any]:
            return [self._result(module, k, records, made, mine) for k in routine.results]

        return first, n, results

    def _result(
        self,
        module: _Module,
        k: int,
        records: IntArray,
        made: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> Tensor | None:
        """A result of the backward, of the rows of some calls."""
        form = module.form
        if k < 0:
            return made[~k]
        k -= form.operands
        if k < 0:
            return None
        if k < len(form.residuals):
            how, number = form.residuals[k]
            if how != "output":
                first, end = int(records[0, 2]), int(records[-1, 2] + records[-1, 1])
                return (module.inputs[number] if how == "input" else module.own[number])[first:end]
            x = (self._held.likes(module.into) or ())[number]
        else:
            found = gradients[form.tangents[k - len(form.residuals)]]
            assert found is not None
            x = found
        pieces = [x[into : into + n] for _, n, _, into, _ in records.tolist()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _learn(
        self,
        module: _Module,
        first: int,
        n: int,
        results: Callable[[], list[Any]],
        got: Got,
        updates: Updates,
    ) -> None:
        """Weights get what has been found for them."""
        weights = None if module.inner is None else module.inner.weights
        wanted = module.wanted[first : first + n].view(np.bool_)
        if not wanted.any():
            return
        if weights is None:
            return
        local = join_arrays(module.local)[first : first + n]
        some = None if wanted.all() else np.flatnonzero(wanted)
        if some is not None:
            local = local[some]
        found = tuple(results())
        if some is not None:
            found = module.some(found, some)
        into: GradientSum = weights.gradient
        of = updates.get(weights.name)
        came, each = int(self._table[module.number, -1]), None if of is None else of[local]
        got[weights.name].append(local)
        if each is None or not module.form.split:
            with nullcontext() if each is None else into.of_updates(each):
                module.form.learn(found, came, local.size, into)
            return
        for update in distinct(each).tolist():
            mine = np.flatnonzero(each == update)
            with into.of_updates(update):
                module.form.learn(module.some(found, mine), came, mine.size, into)


def _joined(rows: Sequence[RowNumbers]) -> RowNumbers:
    if len(rows) == 1:
        return rows[0]
    return RowNumbers(
        np.concatenate([r.numbers for r in rows]),
        np.concatenate([r.state for r in rows], axis=1),
    )
