"""A loop that runs whole: the node that computes it, and the door that rows pass.

    rows ─► LoopDoor ─► an instance, when all of its rows are there ─► LoopNode ─► rows that leave
    answers to those ─► LoopDoor ─► an instance, when all of them are there ─► LoopNode ─► answers

One firing of the node runs the loop for some instances: planned on their columns, or found out call
by call where payloads decide, and computed by the kernels that a loop by steps uses. On the way
back the calls are taken in reverse, for those instances that have been answered.

Messages of the node are instances. They see one version of the weights in all turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import GeartrainError, WorkerError
from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    Payload,
    address,
    distinct,
    join_arrays,
    join_gradient,
    join_origins,
    join_states,
)
from geartrain.frames.rows import RowStore
from geartrain.native.rows import Moves
from geartrain.native.steady import steady
from geartrain.nodes.call import Call, read_columns, require_rows, unsettled
from geartrain.nodes.choice import AbstractChoice
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.picking import may_pick, picked
from geartrain.nodes.loop.plan import Called, CallStage, LoopPlan, Planner, RowNumbers
from geartrain.nodes.loop.values import (
    AbstractTensors,
    AbstractValue,
    FiringTensors,
    TapeTensors,
)
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.weights import AbstractWeights


@final
@dataclass(slots=True)
class Inner:
    """A module of the loop.

    Args:
        name: Of its operator.
        place: Of it, for columns and errors.
        call: How it is called.
        kernel: Computes it.
        choice: Chooses other kernels while it works; None: it keeps this one.
        weights: Its part, or None.
        source: The value that it reads.
        width: Payload tensors of that, seen last.
    """

    name: str
    place: Place
    call: Call
    kernel: AbstractKernel
    choice: AbstractChoice | None
    weights: AbstractWeights | None
    source: AbstractValue
    width: int = 1


@final
@dataclass(slots=True)
class Turn:
    """Some instances that go through the loop together.

    Args:
        plan: What happens to them.
        held: Its tensors.
        slots: int64 ``(n,)``, of the instances.
        local: Slot to its place among these; -1 elsewhere.
        pending: Answers that each one awaits.
        entered: By entry, the rows that came: their slots and where to answer them.
        addresses: Of the instances at the node, in training.
        kept: The kernel of each call and its residuals, in training; None where nothing is kept.
        rows: By part, the rows of its calls of each instance.
        versions: By part, that of its weights in the forward.
        awaited: Instances of which rows that have left are unanswered.
        kernels: Those that were chosen in place of the first ones, by module.
        unanswered: Instances that are unanswered themselves, in training.
    """

    plan: LoopPlan
    held: AbstractTensors
    slots: IntArray
    local: IntArray
    pending: IntArray
    entered: list[tuple[IntArray, IntArray]]
    addresses: IntArray | None = None
    kept: list[tuple[AbstractKernel, Payload] | None] = field(default_factory=list)
    rows: dict[str, IntArray] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    kernels: dict[int, AbstractKernel] = field(default_factory=dict)
    awaited: int = 0
    unanswered: int = 0

    def nbytes(self) -> int:
        """Bytes of its tensors; what several hold is counted once."""
        seen = {x.untyped_storage().data_ptr(): x for call in self.kept if call for x in call[1]}
        mine = {x.data_ptr() for x in self.held.tensors()}
        return self.held.nbytes() + sum(x.nbytes for at, x in seen.items() if at not in mine)


@final
class LoopDoor(AbstractNode):
    """Lets instances in when all of their rows are there, and out when all answers are.

    Args:
        place: Number, name, frames.
        inputs: Input name to how many rows enter for each of the instance's there.
        entries: By how many ways rows enter.
        exits: What rows of each exit hold.
    """

    eager = True

    def __init__(
        self,
        place: Place,
        inputs: Mapping[str, int],
        entries: int,
        exits: Sequence[AbstractValue],
    ) -> None:
        super().__init__(place)
        self._inputs, self._exits = dict(inputs), exits
        states = len(place.schema.state)
        self._stores = [RowStore(place.name, ("origin",), states) for _ in range(entries)]
        self._widths = [0] * entries
        self._missing = np.zeros(64, np.int64)  # by slot, while some of its rows are here
        self._begun = np.zeros(64, np.bool_)
        self._awaited = RowStore(place.name, ("turn", "exit", "at", "slot"))
        self._turns: dict[int, Turn] = {}
        self._next = 0

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        state, origin = join_states(batches), join_origins(batches)
        store = self._stores[port]
        first, n = store.allocate(origin.size), origin.size
        store["origin"][first : first + n] = origin
        store.state[:, first : first + n] = state
        moves, at = Moves(), first
        self._widths[port] = len(batches[0].payload)
        for batch in batches:
            for j, x in enumerate(batch.payload):
                moves.add(store.buffer(j, x, len(batch)), None, x, batch.index, at)
            at += len(batch)
        moves.run()
        slots, counts = np.unique(state[INSTANCE], return_counts=True)
        self._grow(int(slots[-1]) + 1)
        new = slots[~self._begun[slots]]
        if new.size:
            self._missing[new] = self._expected(new)
            self._begun[new] = True
        self._missing[slots] -= counts
        ready = slots[self._missing[slots] == 0]
        if not ready.size:
            return Emission()
        self._begun[ready] = False
        states = np.zeros((state.shape[0], ready.size), np.int64)
        states[INSTANCE] = ready
        return Emission([(0, Forward((), states, ready))])

    def take(self, slots: IntArray) -> list[tuple[Payload, IntArray, IntArray, IntArray]]:
        """The rows of instances that are ready, by entry; they wait here no more.

        Returns:
            Buffers, the rows of them, their columns, and where to answer each.
        """
        found = []
        mine = np.zeros(self._missing.size, np.bool_)
        mine[slots] = True
        for store, width in zip(self._stores, self._widths, strict=True):
            live = store.live_rows()
            rows = live[mine[store.state[INSTANCE, live]]]
            buffers = store.buffers()[:width] if rows.size else ()
            found.append((buffers, rows, store.state.take(rows, 1), store["origin"][rows]))
        return found

    def release(self, rows: Sequence[IntArray]) -> None:
        """Rows that ``take`` gave, by entry, have been copied."""
        for store, mine in zip(self._stores, rows, strict=True):
            if mine.size:
                store.release(mine)

    def expect(self, k: int, rows: RowNumbers) -> IntArray:
        """Addresses for rows that leave by exit k."""
        n = len(rows)
        first = self._awaited.allocate(n)
        store, end = self._awaited, first + n
        store["turn"][first:end], store["exit"][first:end] = self._next, k
        store["at"][first:end], store["slot"][first:end] = rows.numbers, rows.state[INSTANCE]
        return address(self.id, first, n)

    def open_turn(self, turn: Turn) -> None:
        """The rows that are to be expected next are of this one."""
        self._next += 1
        self._turns[self._next] = turn

    def close_turn(self) -> None:
        """All rows of the last turn are expected, and it may be that there are none."""
        if not self._turns[self._next].awaited:
            del self._turns[self._next]

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        for batch in batches:
            rows = batch.rows & ROW_MASK
            store = self._awaited
            key = store["turn"][rows] * len(self._exits) + store["exit"][rows]
            for each in distinct(key).tolist():
                mine = batch
                if (key != each).any():
                    mine = batch.take(np.flatnonzero(key == each))
                number, k = divmod(each, len(self._exits))
                self._answered(number, k, mine, emission)
            store.release(rows)
        return emission

    def _answered(self, number: int, k: int, batch: Backward, emission: Emission) -> None:
        turn, rows = self._turns[number], batch.rows & ROW_MASK
        if batch.gradient is not None:
            with torch.no_grad():
                gradient = join_gradient([batch])
                self._exits[k].scatter(turn.held, self._awaited["at"][rows], gradient)
        local, counts = np.unique(turn.local[self._awaited["slot"][rows]], return_counts=True)
        turn.pending[local] -= counts
        done = local[turn.pending[local] == 0]
        if not done.size:
            return
        turn.awaited -= done.size
        if not turn.awaited:
            del self._turns[number]
        if turn.addresses is None:
            emission.backward += zero_answers(turn, done)
        else:
            emission.backward.append(Backward(turn.addresses[done], ()))

    def _expected(self, slots: IntArray) -> IntArray:
        """Rows that enter of these instances."""
        fed = self.place.arena.fed
        total = np.zeros(slots.size, np.int64)
        for name, times in self._inputs.items():
            total += times * fed[name][slots]
        return total

    def _grow(self, slots: int) -> None:
        if slots > self._missing.size:
            more = max(slots, 2 * self._missing.size) - self._missing.size
            self._missing = np.concatenate([self._missing, np.zeros(more, np.int64)])
            self._begun = np.concatenate([self._begun, np.zeros(more, np.bool_)])

    def entering(self, slots: IntArray) -> IntArray:
        """How many rows each of these instances has here, when it is ready."""
        return self._expected(slots)

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._awaited["slot"][rows]  # a slot is its own address
        return found

    def check_empty(self) -> None:
        for store in (*self._stores, self._awaited):
            store.check_empty()

    def story(self) -> list[str]:
        slots = np.flatnonzero(self._begun & (self._missing > 0))
        told = [
            f"'{self.name}' waits for {int(self._missing[s])} more rows of "
            f"{self.place.arena.describe(int(s))} to enter"
            for s in slots[:5].tolist()
        ]
        n = self._awaited.waiting
        return [*told, f"'{self.name}' waits for the gradients of {n} rows"] if n else told

    def nbytes(self) -> int:
        return sum(store.nbytes() for store in self._stores)


@final
class LoopNode(AbstractNode):
    """Computes a loop for whole instances.

    Args:
        place: Number, name, frames.
        door: Has their rows.
        planner: Says what is called, and with which rows.
        inner: The modules.
        exits: What rows of each exit hold.
        ahead: Whether columns alone decide, so that all is planned before anything is computed.
    """

    def __init__(
        self,
        place: Place,
        door: LoopDoor,
        planner: Planner,
        inner: Sequence[Inner],
        entries: Sequence[AbstractValue],
        exits: Sequence[AbstractValue],
        *,
        ahead: bool = True,
    ) -> None:
        super().__init__(place)
        self._ahead = ahead
        self._door, self.planner, self._inner = door, planner, inner
        self._entries, self._exits = entries, exits
        self._dry_runs = [unsettled(each.call) for each in inner]
        self._may_pick = [may_pick(each.call.function, each.weights is None) for each in inner]
        self._weights = {w.name: w for each in inner if (w := each.weights) is not None}
        self._instances = RowStore(place.name, ("turn", "local", "slot"))
        self._turns: dict[int, Turn] = {}
        self._next = 0
        self.calls = 0
        """Of modules, so far."""

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(self._weights)

    @property
    def bundled(self) -> bool:
        return True

    def lengths(self, batch: Forward | Backward) -> IntArray | None:
        if isinstance(batch, Forward):
            return self._door.entering(batch.state[INSTANCE])
        turns, local = (self._instances[c][batch.rows & ROW_MASK] for c in ("turn", "local"))
        found = np.zeros(local.size, np.int64)
        for number in distinct(turns).tolist():
            mine, rows = turns == number, self._turns[number].rows
            found[mine] = sum(each[local[mine]] for each in rows.values())
        return found

    def rows_of(self, batch: Forward | Backward, part: str) -> IntArray | None:
        if isinstance(batch, Forward):
            return self.lengths(batch)
        rows = batch.rows & ROW_MASK
        found = np.zeros(rows.size, np.int64)
        turns = self._instances["turn"][rows]
        for number in distinct(turns).tolist():
            mine = turns == number
            found[mine] = self._turns[number].rows[part][self._instances["local"][rows[mine]]]
        return found

    def slots(self, batch: Forward | Backward) -> IntArray:
        if isinstance(batch, Forward):
            return super().slots(batch)
        found: IntArray = self._instances["slot"][batch.rows & ROW_MASK]
        return found

    @property
    def open(self) -> bool:
        return all(w.open for w in self._weights.values())

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        slots = join_states(batches)[INSTANCE]
        came = self._door.take(slots)
        plan = self.planner.begin([state for _, _, state, _ in came])
        turn = self._turn(plan, slots, came)
        with torch.no_grad(), steady():
            if self._ahead:
                self.planner.finish(plan)
                self._enter(turn, came)
                for number, called in enumerate(plan.calls):
                    self._call(turn, number, called, train)
            else:
                self._enter(turn, came)
                held = turn.held
                plan.look = lambda source, rows: source.gather(held, rows)
                plan.run = lambda number, called: self._call(turn, number, called, train)
                self.planner.finish(plan)
                plan.look = plan.run = None
        _await(turn)
        emission = Emission()
        if train:
            self._note(turn)
        self._leave(turn, emission)
        quiet = np.flatnonzero(turn.pending == 0)
        if quiet.size and train:
            self._answer(turn, quiet, emission)
        elif quiet.size:
            emission.backward += zero_answers(turn, quiet)
        if not train:
            turn.kept.clear()
        return emission

    def _turn(
        self,
        plan: LoopPlan,
        slots: IntArray,
        came: Sequence[tuple[Payload, IntArray, IntArray, IntArray]],
    ) -> Turn:
        local = np.full(int(slots.max()) + 1, -1, np.int64)
        local[slots] = np.arange(slots.size)
        entered = [(state[INSTANCE], origin) for _, _, state, origin in came]
        held = (FiringTensors if self._ahead else TapeTensors)(plan.numbers)
        return Turn(plan, held, slots, local, np.zeros(slots.size, np.int64), entered)

    def _enter(
        self, turn: Turn, came: Sequence[tuple[Payload, IntArray, IntArray, IntArray]]
    ) -> None:
        for value, first, (buffers, rows, _, _) in zip(
            self._entries, turn.plan.entered, came, strict=True
        ):
            if rows.size:
                turn.held.put(value.number, self.name, first, buffers, rows)
        self._door.release([rows for _, rows, _, _ in came])

    def _call(self, turn: Turn, number: int, called: Called, train: bool) -> None:
        """Run one call, forward."""
        stage, rows, held = called.stage, called.rows, turn.held
        if not isinstance(stage, CallStage):
            found = stage.source.gather(held, rows.numbers)
            held.put(stage.into.number, self.name, called.first, found)
            turn.kept.append(None)
            return
        inner = self._inner[stage.number]
        self.calls += 1
        inputs: Payload = ()
        try:
            payload = inner.source.gather(held, rows.numbers)
            inner.width = len(payload)
            inputs = tuple(payload[j] for j in inner.call.taken(len(payload)))
            inputs += tuple(read_columns(inner.call, inner.place, rows.state, None, None))
            dry_run = self._dry_runs[stage.number]
            if dry_run is not None:
                dry_run.look(inner.call, inner.place, inputs, rows.state, None, None)
                self._dry_runs[stage.number] = unsettled(inner.call)
            kernel: AbstractKernel = inner.kernel
            kept: Payload = ()
            pick = None
            if self._may_pick[stage.number]:
                pick = picked(inner.call.function, inputs)
                self._may_pick[stage.number] = pick is not None
            if pick is not None:
                outputs, kernel = pick
            else:
                if train and inner.choice is not None:
                    kernel = turn.kernels.get(stage.number) or inner.choice.kernel(inputs)
                    if kernel is not inner.kernel:
                        turn.kernels[stage.number] = kernel  # nothing changes within a firing
                outputs, kept = kernel.forward(inputs)
            require_rows(inner.name, outputs, len(rows))
        except GeartrainError as error:
            error.add_note(_story(inner, "forward", inputs, rows.state[INSTANCE], number, turn))
            raise
        except Exception as error:
            story = _story(inner, "forward", inputs, rows.state[INSTANCE], number, turn)
            raise WorkerError(f"{type(error).__name__} in node {story}: {error}") from error
        held.put(stage.into.number, inner.name, called.first, outputs)
        turn.kept.append((kernel, kept) if train else None)

    def _note(self, turn: Turn) -> None:
        """Weights learn of what will be answered."""
        n = turn.slots.size
        turn.rows = {name: np.zeros(n, np.int64) for name in self._weights}
        for called in turn.plan.calls:
            if isinstance(called.stage, CallStage):
                weights = self._inner[called.stage.number].weights
                if weights is not None:
                    local = turn.local[called.rows.state[INSTANCE]]
                    turn.rows[weights.name] += np.bincount(local, minlength=n)
        for name, weights in self._weights.items():
            turn.versions[name] = weights.version
            sent = int((turn.rows[name] > 0).sum())
            if sent:
                weights.sent(sent)
        first = self._instances.allocate(n)
        self._next += 1
        store, end = self._instances, first + n
        store["turn"][first:end], store["slot"][first:end] = self._next, turn.slots
        store["local"][first:end] = np.arange(n)
        turn.addresses, turn.unanswered = address(self.id, first, n), n
        self._turns[self._next] = turn

    def _leave(self, turn: Turn, emission: Emission) -> None:
        """Send what leaves."""
        self._door.open_turn(turn)
        for k, came in enumerate(turn.plan.exits):
            if not came:
                continue
            rows = came[0]
            if len(came) > 1:
                state = np.concatenate([r.state for r in came], axis=1)
                rows = RowNumbers(join_arrays([r.numbers for r in came]), state)
            value, held = self._exits[k], turn.held
            stored = held.whole(value.number)
            index = None if stored is None else rows.numbers
            payload = tuple(stored) if stored is not None else value.gather(held, rows.numbers)
            origin = self._door.expect(k, rows)
            emission.forward.append((k, Forward(payload, rows.state, origin, None, index)))
        self._door.close_turn()

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        rows = join_arrays([b.rows for b in batches]) & ROW_MASK
        turns = self._instances["turn"][rows]
        for number in distinct(turns).tolist():
            mine = rows[turns == number]
            self._answer(self._turns[number], self._instances["local"][mine], emission)
        return emission

    def _answer(self, turn: Turn, which: IntArray, emission: Emission) -> None:
        """All rows of these instances that left have been answered: go back."""
        mine = None
        if which.size < turn.slots.size:
            mine = np.zeros(turn.slots.size, np.bool_)
            mine[which] = True
        got: dict[str, list[IntArray]] = {name: [] for name in self._weights}
        with torch.no_grad(), steady():
            for number in range(len(turn.plan.calls) - 1, -1, -1):
                self._back(turn, number, mine, got)
        for name, weights in self._weights.items():
            self._count(turn, which, name, weights, got[name])
        for k, (slots, origin) in enumerate(turn.entered):
            if origin.size:
                self._answer_entry(turn, k, slots, origin, mine, emission)
        addresses = turn.addresses
        assert addresses is not None
        gone = addresses[which] & ROW_MASK
        number = int(self._instances["turn"][gone[0]])
        self._instances.release(gone)
        turn.unanswered -= which.size
        if not turn.unanswered:
            del self._turns[number]

    def _back(
        self,
        turn: Turn,
        number: int,
        mine: NDArray[np.bool_] | None,
        got: dict[str, list[IntArray]],
    ) -> None:
        """The way back of one call."""
        called = turn.plan.calls[number]
        stage, held, rows = called.stage, turn.held, called.rows
        touched = held.touched.get(stage.into.number)
        if touched is None:
            return
        first, n = called.first, len(rows)
        wanted = touched[first : first + n]
        if mine is not None:
            wanted = wanted & mine[turn.local[rows.state[INSTANCE]]]
        which = None if wanted.all() else np.flatnonzero(wanted)
        if which is not None and not which.size:
            return
        gradient = held.gradient(stage.into.number, first, n, which)
        read, slots = rows.numbers, rows.state[INSTANCE]
        if which is not None:
            read, slots = read[which], slots[which]
        if not isinstance(stage, CallStage):
            stage.source.scatter(held, read, gradient)
            return
        inner = self._inner[stage.number]
        into = GradientSum(()) if inner.weights is None else inner.weights.gradient
        left = turn.kept[number]
        assert left is not None
        kernel, kept = left
        try:
            found = kernel.backward(gradient, kept, which, into, None)
        except GeartrainError as error:
            error.add_note(_story(inner, "backward", gradient, slots, number, turn))
            raise
        except Exception as error:
            story = _story(inner, "backward", gradient, slots, number, turn)
            raise WorkerError(f"{type(error).__name__} in node {story}: {error}") from error
        found = inner.call.answer(found, inner.width)
        if any(g is not None for g in found):
            inner.source.scatter(held, read, found)
        if inner.weights is not None:
            got[inner.weights.name].append(turn.local[slots])

    def _count(
        self,
        turn: Turn,
        which: IntArray,
        name: str,
        weights: AbstractWeights,
        got: Sequence[IntArray],
    ) -> None:
        """Tell a part whose gradients it has got."""
        sent = which[turn.rows[name][which] > 0]
        if not sent.size:
            return
        version = turn.versions[name]
        each = np.zeros(turn.slots.size, np.int64)
        if got:
            each = np.bincount(join_arrays(list(got)), minlength=turn.slots.size)
        some = each[sent][each[sent] > 0]
        if some.size:
            weights.received(int(some.sum()), np.full(some.size, version, np.int64), some)
        if some.size < sent.size:
            weights.dropped(np.full(sent.size - some.size, version, np.int64))

    def _answer_entry(
        self,
        turn: Turn,
        k: int,
        slots: IntArray,
        origin: IntArray,
        mine: NDArray[np.bool_] | None,
        emission: Emission,
    ) -> None:
        first, number, n = turn.plan.entered[k], self._entries[k].number, origin.size
        rows = np.arange(first, first + n)
        if mine is not None:
            chosen = np.flatnonzero(mine[turn.local[slots]])
            rows, origin = rows[chosen], origin[chosen]
        if not rows.size:
            return
        touched = turn.held.touched.get(number)
        some = np.zeros(rows.size, np.bool_) if touched is None else touched[rows]
        if not some.all():
            emission.backward.append(Backward(origin[~some], None))
            rows, origin = rows[some], origin[some]
        if rows.size:
            gradient = turn.held.gradient(number, first, n, None)
            emission.backward.append(Backward(origin, gradient, None, rows - first))

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._instances["slot"][rows]  # a slot is its own address
        return found

    def check_empty(self) -> None:
        self._instances.check_empty()

    def story(self) -> list[str]:
        n = self._instances.waiting
        return [f"'{self.name}' waits for the gradients of {n} instances"] if n else []

    def nbytes(self) -> int:
        return sum(turn.nbytes() for turn in self._turns.values())


def _await(turn: Turn) -> None:
    """Count the rows that leave."""
    n = turn.slots.size
    for rows in turn.plan.exits:
        for each in rows:
            turn.pending += np.bincount(turn.local[each.state[INSTANCE]], minlength=n)
    turn.awaited = int((turn.pending > 0).sum())


def zero_answers(turn: Turn, which: IntArray) -> list[Backward]:
    """What tells those who sent the rows of some instances that no gradient will come."""
    mine = np.zeros(turn.slots.size, np.bool_)
    mine[which] = True
    found = []
    for slots, origin in turn.entered:
        chosen = origin[mine[turn.local[slots]]]
        if chosen.size:
            found.append(Backward(chosen, None))
    return found


def _story(
    inner: Inner,
    way: str,
    tensors: Sequence[Tensor | None],
    slots: IntArray,
    number: int,
    turn: Turn,
) -> str:
    """Module, part, direction, which call, shapes, instances."""
    part = f" of part '{inner.weights.name}'" if inner.weights is not None else ""
    of = "" if turn.plan.run is not None else f" of {len(turn.plan.calls)}"
    shapes = [
        f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors if x is not None
    ]
    return (
        f"'{inner.name}'{part}, {way}, call {number + 1}{of} of its loop, "
        f"{slots.size} rows, payload {', '.join(shapes) or 'none'}, "
        f"{inner.place.arena.describe_several(slots)}"
    )
