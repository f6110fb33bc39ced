"""Calls of derived programs in a loop that runs whole, made by C, many at a time.

    calls that follow upon one another, of modules with such programs ─► tables ─► one call of C
    all instances answered ─► the same tables, the last call first ─► one call of C for some
                              thousand rows, and then one product for each weight

What a module reads is told as stored rows (``reads.py``), so C gathers it from where it is held and
adds gradients there. Each module of a turn has memory for the rows of all of its calls
(``tables.py``); those that read a memory or look inside bundles also for the members of what each
row reads (``several.py``). Rows of bundles are known by their places. Which modules C calls says
``bound.py``, how calls wait that are found one by one ``finding.py``, what else it reads
``words.py``, what it needs to go back ``back.py``; what the turn before had is used again where
nobody has it any more (``rooms.py``). Whatever is not to be had so (modules that run again, or in
which edges connect rows) is called one by one, as ever, between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import ProtocolError, WorkerError
from geartrain.frames.counted import consecutive, counted
from geartrain.frames.message import INSTANCE, IntArray, ends_of
from geartrain.native import calls, library, pool
from geartrain.native.fused import LACKING
from geartrain.native.rows import pointer
from geartrain.nodes.loop.arenas import few_more
from geartrain.nodes.loop.back import NativeReturn, equal_shares
from geartrain.nodes.loop.bound import CalledModules, Chosen, Stage
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.finding import FoundCalls
from geartrain.nodes.loop.hoisting import Hoists, call_in_two, shared_rows
from geartrain.nodes.loop.module import NativeKept, TurnModule, by_module
from geartrain.nodes.loop.plan import Called, CallStage, RowNumbers, joined
from geartrain.nodes.loop.reads import ReadTensor, Whence
from geartrain.nodes.loop.rooms import CallInputs, TurnRoom
from geartrain.nodes.loop.several import SeveralModule
from geartrain.nodes.loop.stories import story_of
from geartrain.nodes.loop.tables import Tables
from geartrain.nodes.loop.turn import Got, Inner, Turn
from geartrain.nodes.loop.updates import Updates
from geartrain.nodes.loop.words import NOT_THERE, CallWords

BYTES_BACK: Final = 4 << 20
"""Of what rows have kept, and find for weights, that goes back in one call of C, about at
most: it is multiplied then, while a cache has it. Calls have equal shares, as there is memory for
the largest."""

_MUCH: Final = 1 << 16
"""Bytes that calls want in between from which on they have them in common."""

_WHY: Final = {
    1: IndexError(LACKING),
    2: MemoryError("no memory for what a kernel computes in between"),
    3: ProtocolError(NOT_THERE),
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
        expected: By module, how many rows it is expected to have; where that is planned, how many
            any turn had.
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
        room = TurnRoom() if room is None else room
        self._turn, self._held, self._tables, self._inner = turn, held, tables, inner
        self._expected, self._hoists = expected, hoists
        rest = able, chosen, expected, hoists.most, room.modules
        self._modules = CalledModules(turn, held, tables, inner, *rest)
        self._passing = room.passing
        self._room: Tensor | None = None  # what calls compute in between, on the same way
        self._inputs = CallInputs(room.inputs)
        self._return = NativeReturn(turn, held, tables, self._modules, room.passing)
        self._words = CallWords(room.words)
        self._found = FoundCalls(turn, self._modules, held, self._words, self._inputs, expected)
        self._records = np.zeros((0, calls.CALL_WORDS), np.int64)
        self._at_records = 0
        self._listed: list[list[int]] | None = None  # all records, when calls go back
        self._ends_at, self._begins = -1, list[int]()  # where those end that are next, and begin
        self._of: list[int] = []  # by call that is planned, its module; -1: it is not for C
        self._planned: dict[int, IntArray] = {}
        self.count = 0
        """Calls made so far."""

    @property
    def rows(self) -> Mapping[int, int]:
        """Of each module that has been called."""
        return {module.number: module.size for module in self._modules.callable}

    def leave(self) -> TurnRoom:
        """What the next turn may use again, as this one is over."""
        modules = {module.number: module for module in self._modules.callable}
        words, passing = self._words.leave(), self._passing
        inputs = self._inputs.rest()
        passing.rest()
        return TurnRoom(self._held.leave(), modules, words, passing, inputs)

    # Forward, where all calls are known before

    def plan(self) -> None:
        """All calls are known."""
        found, self._modules.ahead = self._turn.plan.calls, True
        self._records = np.zeros((len(found), calls.CALL_WORDS), np.int64)
        self._at_records = pointer(self._records)
        self._number_calls()

    def _number_calls(self) -> None:
        """Which module each call is of, as far as C may make it; and the calls of each."""
        modules, known = self._modules, dict[tuple[Stage, bool], int]()
        of: list[int] = []
        for called in self._turn.plan.calls:
            stage = called.stage
            key = stage, called.lengths is None
            k = known.get(key)
            if k is None:
                k = known[key] = modules.number(stage) if modules.may(called) else -1
            of.append(k)
        each, self._of = np.array(of, np.int64), of
        self._planned = {k: (each == k).nonzero()[0] for k in {*known.values()} if k >= 0}

    def forward(self, number: int) -> int:
        """Make the calls from this one on that C can make, of those that are planned.

        Returns:
            The call after them.
        """
        end, ready = number, set[int]()
        while end < len(self._of) and (self._of[end] in ready or self._is_ready(end, ready)):
            end += 1
        if end > number:
            records = self._records[number:end].tolist()
            if self._modules.draws:
                self._modules.seed(records)
            end = self._make(number, records)
            self.count += end - number
            held, its = self._held, {k: self._modules[k] for k in ready}
            self._turn.kept += [
                NativeKept(its[k], held, begin, into, n)
                for k, n, begin, into, _ in records[: end - number]
            ]
        return end

    def _is_ready(self, number: int, ready: set[int]) -> bool:
        """Whether C can make a call, whose module is among the ready ones then; it is bound, with
        which another may take its place."""
        k, modules = self._of[number], self._modules
        if k < 0:
            return False
        if k not in modules.found:
            self._bind(self._turn.plan.calls[number].stage, self._planned[k])
            if k not in modules.found:
                return self._is_ready(number, ready)
        if modules.found[k] is None or k in modules.given_up:
            return False
        ready.add(k)
        return True

    def _bind(self, stage: Stage, numbers: IntArray) -> None:
        """Find out how C makes all calls of a module, None if it cannot; or have other modules
        called in its place."""
        modules, found = self._modules, [self._turn.plan.calls[n] for n in numbers.tolist()]
        k = modules.number(stage)
        rows = joined([called.rows for called in found])
        sizes = [called.rows.numbers.size for called in found]
        lengths = stage.source.lengths(self._turn.plan.numbers, rows.numbers)
        in_two = lengths is None and self._may_hoist(stage, rows)
        if lengths is None and not in_two:
            as_before = modules.again(stage, rows)
            if as_before is not None:
                self._enlist(k, numbers, found, rows, *as_before, sizes)
                return
        tensors = modules.made_of(stage, rows)
        columns = [] if tensors is None else modules.columns(stage, rows)
        if lengths is not None and tensors is not None and not modules.looks_inside(stage):
            # What bundles hold are rows to it.
            tensors = _members_of(tensors)
            sizes = np.diff(ends_of(lengths)[ends_of(np.array(sizes))]).tolist()
            state = rows.state.repeat(lengths, axis=1)
            rows, lengths = RowNumbers(counted(0, state.shape[1]), state), None
        elif in_two and tensors and self._hoist(stage, numbers, rows, tensors, columns):
            return
        module = None if tensors is None else modules.shaped(stage, tensors, columns, len(rows))
        if module is None or tensors is None or not module.accepts(rows, lengths, self._held):
            modules.found[k] = None
            return
        modules.found[k] = module
        if isinstance(module, TurnModule):
            self._hoists.know(k, module.work)
        reads = module.layout.arranged(tensors)[: 1 if module.layout.as_asked else None]
        some = [Whence.of(read.rows, read.many, read.starts) for read, _ in reads]
        self._enlist(k, numbers, found, rows, some, columns, sizes)

    def _may_hoist(self, stage: Stage, rows: RowNumbers) -> bool:
        """Whether a module may be called in two where it has these rows."""
        alone = isinstance(stage, CallStage) and stage.which is None
        if not alone or not self._hoists.may(stage.number, len(rows)):
            return False
        # Stored rows that follow upon one another are all different.
        stored = stage.source.as_asked(self._turn.plan.numbers)
        return not (stored and consecutive(rows.numbers) >= 0)

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
        assert isinstance(stage, CallStage)
        shared = shared_rows(tensors, plan.numbers.counts)
        if shared is None or shared.read.number in plan.numbers.places:
            return False
        if any(plan.calls[n].together is not None for n in numbers.tolist()):
            return False
        self._inner[stage.number].width = self._modules.width
        samples = self._tables.samples(stage.number, tensors, columns)
        kernel = self._modules.chosen(stage.number, samples)
        module = None if kernel is None else hoists.find(stage, kernel, shared, samples)
        if module is None or not module.pays(shared):
            return False
        now = call_in_two(module, shared, plan, numbers, rows)
        self._modules.more()
        records = np.zeros((len(plan.calls), calls.CALL_WORDS), np.int64)
        records[now[:-1]] = self._records
        self._records = records
        self._at_records = pointer(self._records)
        self._number_calls()
        return True

    def _enlist(
        self,
        k: int,
        numbers: IntArray,
        found: Sequence[Called],
        rows: RowNumbers,
        some: Sequence[Whence],
        columns: Sequence[Tensor],
        sizes: Sequence[int],
    ) -> None:
        """Make room for the rows of all calls of a module, and write their records.

        Args:
            k: Of the module.
            numbers: Of the calls.
            found: They.
            rows: Theirs, call by call.
            some: The stored rows of each of its reads.
            columns: That it reads besides.
            sizes: How many rows each call has.
        """
        module, plan, n = self._modules[k], self._turn.plan.numbers, len(rows)
        module.reserve(few_more(n, self._expected.get(k, 0)), n, max(sizes))
        module.add(rows, columns)
        self._inputs.place(module, self._held)
        made = module.layout.into
        if len(sizes) == 1:
            at = self._words.written(self._words.told(some, 0))
            self._records[numbers[0]] = k, n, 0, plan.begin(made, found[0].first), at
            return
        each = np.array(sizes)
        offsets = each.cumsum() - each
        records = np.empty((each.size, calls.CALL_WORDS), np.int64)
        records[:, 0], records[:, 1], records[:, 2] = k, each, offsets
        records[:, 3] = [plan.begin(made, called.first) for called in found]
        records[:, 4] = self._words.indexed(some, offsets)
        self._records[numbers] = records

    # Forward, where calls are found one by one

    def found(self, number: int, called: Called) -> int:
        """A call is found, with those that it may be taken together with.

        Returns:
            How many calls wait to be made now; 0: C cannot make this one.
        """
        return self._found.find(number, called)

    def make(self) -> int:
        """Make the calls that wait.

        Returns:
            How many of them, the last ones, C has not made: they are to be found anew.
        """
        waiting = self._found.take()
        if not waiting:
            return 0
        kept = self._turn.kept
        end = len(kept)
        first = end - len(waiting)
        if end > len(self._records):
            more = np.zeros((max(64, 2 * end), calls.CALL_WORDS), np.int64)
            more[: len(self._records)] = self._records
            self._records, self._at_records = more, pointer(more)
        self._records[first:end] = waiting
        made = self._make(first, waiting)
        del kept[made:]
        self.count += made - first
        return end - made

    def _make(self, first: int, records: Sequence[Sequence[int]]) -> int:
        """Make calls.

        Args:
            first: The first of them.
            records: Theirs, as they are written.

        Returns:
            The first that is not made: its program does not know what it is asked for.
        """
        dtype = self._modules.dtype
        assert dtype is not None
        at = self._at_records + 8 * calls.CALL_WORDS * first
        room, much = self._extent(records, forward=True)
        where = 0 if room is None else room.data_ptr()
        tables = self._tables.at_modules
        bad = calls.forward(dtype, len(records), at, tables, where, much=much)
        if not bad:
            return first + len(records)
        module = self._modules[records[bad // 4][0]]
        if bad % 4 != 1 or not isinstance(module, SeveralModule):
            self._blame(bad, first, "forward")
        assert isinstance(module, SeveralModule)
        module.kernel.give_up("it asks for rows in another way")
        self._modules.given_up.add(module.number)
        return first + bad // 4

    def _extent(
        self, records: Sequence[Sequence[int]], *, forward: bool
    ) -> tuple[Tensor | None, bool]:
        """Memory for what any of some calls computes in between, or None, where each had better ask
        for its own; and whether all of them are so much work that the lock is given back."""
        dtype, found, most, work = self._modules.dtype, self._modules.found, 0, 0
        assert dtype is not None
        for k, mine in by_module(records).items():
            module = found[k]
            assert module is not None
            between, more = module.extent(mine, forward=forward)
            most = between if between > most else most
            work += more
        nbytes = most * dtype.itemsize
        if nbytes >= _MUCH and (self._room is None or self._room.nbytes < nbytes):
            self._room = None
            self._room = pool.shared.empty((nbytes,), torch.uint8)
        return None if nbytes < _MUCH else self._room, work > library.SMALL_WORK

    def _blame(self, bad: int, first: int, way: str) -> None:
        number, why = first + bad // 4, _WHY[bad % 4]
        called = self._turn.plan.calls[number]
        module = self._modules[self._modules.number(called.stage)]
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
        if self._listed is None:
            self._listed = self._records.tolist()
        if not self._begins or self._ends_at != end:
            self._begins = self._shares(end, self._listed)
        begin = self._ends_at = self._begins.pop()
        self._back(begin, end, got, updates)
        if not begin:
            self._listed = None
        return begin

    def _shares(self, end: int, listed: Sequence[Sequence[int]]) -> list[int]:
        """The first of the calls before ``end`` that go back in one call of C, and of those that go
        back after them, the last to go first."""
        begin, kept = end, self._turn.kept
        while begin and isinstance(kept[begin - 1], NativeKept):
            begin -= 1
        back = {
            module.number: module.layout.row if isinstance(module, TurnModule) else None
            for module in self._modules.callable
        }
        sizes = [
            self._modules[k].nbytes_back(first, n) if (row := back[k]) is None else n * row
            for k, n, first, *_ in reversed(listed[begin:end])
        ]
        return [begin, *[end - k for k in reversed(equal_shares(sizes, BYTES_BACK))]]

    def _back(self, begin: int, end: int, got: Got, updates: Updates) -> None:
        assert self._listed is not None
        records, tables = self._listed[begin:end], self._tables
        self._inputs.rest()
        self._room = None  # it lies between what is free now, and the larger one comes first
        self._return.begin(records, updates)
        room, much = self._extent(records, forward=False)
        assert self._modules.dtype is not None
        bad = calls.backward(
            self._modules.dtype,
            end - begin,
            self._at_records + 8 * calls.CALL_WORDS * begin,
            tables.at_modules,
            tables.at_values,
            0 if room is None else room.data_ptr(),
            much=much,
        )
        if bad:
            self._blame(bad, begin, "backward")
        self._return.end(got)
        self._turn.kept[begin:end] = [None] * (end - begin)


def _members_of(tensors: Sequence[ReadTensor]) -> list[ReadTensor] | None:
    """What is in bundles, as rows; None: they are other than stored rows."""
    found = [each for t in tensors if (each := t.members()) is not None]
    return found if len(found) == len(tensors) else None
