"""A loop that runs whole: the node that computes it, behind the door that rows pass.

    rows ─► LoopDoor ─► an instance, when all of its rows are there ─► LoopNode ─► rows that leave
    answers to those ─► LoopDoor ─► an instance, when all of them are there ─► LoopNode ─► answers

One firing of the node runs the loop for some instances: planned on their columns, or found out call
by call where payloads decide, and computed by the kernels that a loop by steps uses. On the way
back the calls are taken in reverse, for those instances that have been answered.

Messages of the node are instances. They see one version of the weights in all turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from operator import is_
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

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
    join_states,
    ragged_index,
)
from geartrain.frames.rows import RowStore
from geartrain.native.steady import steady
from geartrain.nodes.call import read_columns, require_rows, unsettled
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside, look_inside
from geartrain.nodes.kernel import AbstractKernel, AbstractKernels
from geartrain.nodes.loop.answers import answer_entry, tell
from geartrain.nodes.loop.buffers import FiringTensors, OtherPartsError
from geartrain.nodes.loop.door import Came, LoopDoor
from geartrain.nodes.loop.judging import Judged, judge
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.listing import Listing
from geartrain.nodes.loop.order import longest_first
from geartrain.nodes.loop.parting import Parting
from geartrain.nodes.loop.pieces import TapeTensors
from geartrain.nodes.loop.plan import Called, CallStage, JointCall, joined
from geartrain.nodes.loop.planner import Planner
from geartrain.nodes.loop.stories import blame, story_of
from geartrain.nodes.loop.tape import Taping
from geartrain.nodes.loop.tensors import AbstractTensors, detached, put_some, some_of
from geartrain.nodes.loop.turn import (
    Got,
    Inner,
    KeptCall,
    KeptJointCall,
    Turn,
    await_rows,
    wanted_of,
    zero_answers,
)
from geartrain.nodes.loop.updates import (
    Updates,
    are_apart,
    is_apart,
    of_one_update,
    updates_of,
)
from geartrain.nodes.loop.values import AbstractValue, Parted
from geartrain.nodes.loss import Objective
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.remembering import Remembering, RememberingRead
from geartrain.nodes.unrecorded import Unrecorded


@final
class LoopNode(AbstractNode):
    """Computes a loop for whole instances.

    Args:
        place: Number, name, frames.
        door: Has their rows.
        planner: Says what is called, and with which rows.
        inner: The modules.
        exits: What rows of each exit hold.
        ahead: Whether columns alone decide, so that all is planned before anything is computed, if
            it is known how many parts rows have.
        gathers: Whether groups or joins in it bring rows of many calls together, so that these are
            best in one buffer.
        holds: Whether bundles are held in it, which are to be in one buffer.
        tapes: Whether autograd can follow all that is between its modules.
        losses: Those in it.
        parted: Values in it whose rows are parts of others.
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
        gathers: bool = True,
        holds: bool = False,
        tapes: bool = False,
        losses: Sequence[Judged] = (),
        parted: Sequence[Parted] = (),
    ) -> None:
        super().__init__(place)
        self._parting = Parting(parted, entries)
        self._losses = losses
        if losses:
            self.loss_name = "', '".join(each.objective.name for each in losses)
        self._ahead = ahead
        self._tensors = FiringTensors if holds or (ahead and gathers) else TapeTensors
        self._door, self.planner, self._inner = door, planner, list(inner)
        self._entries, self._exits = entries, exits
        self._kernels = LoopKernels(self._inner)
        self._weights = {w.name: w for each in inner if (w := each.weights) is not None}
        self._instances = RowStore(place.name, ("turn", "local", "slot"))
        self._turns, self._next = dict[int, Turn](), 0
        self.calls = 0
        """Of modules, so far."""
        self._turned = 0  # firings forward
        self.together = 0
        """How often several of them were taken together."""
        self._apart: set[tuple[int, ...]] = set()  # modules that cannot
        self._beside: dict[tuple[int, ...], tuple[list[AbstractKernel], AbstractKernels]] = {}
        self.taping = Taping(place.name, inner, able=tapes and not place.spread)
        self.listing = Listing(self._inner, self._kernels, able=place.on_host)

    def take_over(self, before: LoopNode) -> None:
        """What the same loop of an engine knew that is no more: how C is called, how much memory
        is wanted, and what was made that would be made again."""
        if self.planner.order is before.planner.order:  # else values and modules may be others
            self.listing.take_over(before.listing)
        self._beside = before._beside  # of the same kernels, where those stay

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(self._weights)

    @property
    def ends(self) -> list[Objective]:
        """What its losses compute."""
        return [each.objective for each in self._losses]

    @property
    def bundled(self) -> bool:
        return True

    @property
    def calls_a_firing(self) -> int:
        return max(1, self.calls // max(self._turned, 1))

    @property
    def apart(self) -> bool:
        return all(is_apart(each) for each in self._inner)

    @property
    def keeps_graphs(self) -> bool:
        return any(
            isinstance(each.kernel, Remembering | RememberingRead) and not each.kernel.apart
            for each in self._inner
        )

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
        emission = Emission()
        with Unrecorded(), steady():
            turn = self._computed(slots, came, train)
            self._door.release(came)
            del came  # it may all go back now, and what came is wanted no more
            self.listing.end(turn)
            await_rows(turn)
            if train:
                self._note(turn)
            judge(turn, self._losses, train=train)
            self._leave(turn, emission)
            quiet = np.flatnonzero(turn.pending == 0)
            if quiet.size and train:  # by the weights of now
                self._answer(turn, quiet, emission)
        if quiet.size and not train:
            emission.backward += zero_answers(turn, quiet)
        if not train:
            turn.kept.clear()
        return emission

    def _computed(self, slots: IntArray, came: Sequence[Came], train: bool) -> Turn:
        """A turn of some instances, whose calls have been made."""
        native = train and not self.taping.gains and self.listing.pays
        parts = self._parting.count(came) if self._ahead else None
        if parts is not None and (native or not self._parting.made):
            with suppress(OtherPartsError):  # a module has been changed
                turn = self._turn(slots, came, parts, native=native)
                return self._planned(turn, came, train)
        turn = self._turn(slots, came, None, native=native)
        run, plan = self._runs(turn, train), turn.plan
        self._enter(turn, came)
        plan.look = partial(_read, turn)
        plan.run = run if turn.native is None else partial(self._found, turn, run)
        self.planner.finish(plan)
        plan.look = plan.run = None
        return turn

    def _planned(self, turn: Turn, came: Sequence[Came], train: bool) -> Turn:
        """Plan a turn ahead, and make its calls."""
        run, plan = self._runs(turn, train), turn.plan
        self.planner.finish(plan)
        if turn.tape is not None:
            ends = [each.source for each in self._losses]
            came = longest_first(plan, came, self._entries, self._exits, ends, turn.local)
            turn.entered = _entered_by(came)
        self._enter(turn, came)
        self._run_planned(turn, run)
        return turn

    def _runs(self, turn: Turn, train: bool) -> Callable[[int, Called], None]:
        """What runs a call."""
        turn.tape = self.taping.begin(turn) if train else None
        run: Callable[[int, Called], None] = partial(self._call, turn, train)
        return run if turn.tape is None else turn.tape.recording(run)

    def _run_planned(self, turn: Turn, run: Callable[[int, Called], None]) -> None:
        """Run all calls."""
        found, native, number = turn.plan.calls, turn.native, 0
        if native is not None:
            native.plan()
        while number < len(found):
            if native is not None and len(turn.kept) == number:
                begin, number = number, native.forward(number)
                made = [isinstance(c.stage, CallStage) for c in found[begin:number]]
                self.calls += sum(made)
            if number < len(found):
                run(number, found[number])
                number += 1

    def _found(
        self, turn: Turn, run: Callable[[int, Called], None], number: int, called: Called
    ) -> None:
        """Run a call that has been found while a turn is planned."""
        if number < len(turn.kept):
            return  # taken together with one before
        made = 0 if turn.native is None else turn.native.found(number, called)
        if not made:
            run(number, called)
        elif isinstance(called.stage, CallStage):
            self.calls += made

    def _turn(
        self,
        slots: IntArray,
        came: Sequence[Came],
        parts: Mapping[int, int] | None,
        *,
        native: bool,
    ) -> Turn:
        plan = self.planner.begin([(each.state, each.lengths) for each in came], parts)
        self._turned += 1
        local = np.full(int(slots.max()) + 1, -1, np.int64)
        local[slots] = np.arange(slots.size)
        pending = np.zeros(slots.size, np.int64)
        if not native:
            held = self._tensors(plan.numbers)
            return Turn(plan, held, slots, local, pending, _entered_by(came))
        buffers = self.listing.tensors(plan, slots.size)
        turn = Turn(plan, buffers, slots, local, pending, _entered_by(came))
        turn.native = self.listing.begin(turn, buffers)
        return turn

    def _enter(self, turn: Turn, came: Sequence[Came]) -> None:
        for value, first, each in zip(self._entries, turn.plan.entered, came, strict=True):
            if each.rows.size:
                turn.held.put(value.number, self.name, first, each.columns, each.at)
                if turn.tape is not None:
                    turn.tape.enter(value.number, first)

    def _call(self, turn: Turn, train: bool, number: int, called: Called) -> None:
        """Run one call, forward."""
        stage, rows, held = called.stage, called.rows, turn.held
        if number < len(turn.kept):
            return  # taken together with one before
        if not isinstance(stage, CallStage):
            found = stage.source.gather(held, rows.numbers)
            held.put(stage.into.number, self.name, called.first, found)
            if turn.tape is not None:
                turn.tape.note(found, None)
            turn.kept.append(None)
            return
        together = called.together if train and turn.tape is None and self.place.on_host else None
        if together is not None and number == together.number:
            if self._call_together(turn, together):
                return
        inner = self._inner[stage.number]
        self.calls += 1
        inputs: Payload = ()
        try:
            inputs = self._inputs(inner, stage.number, called, held)
            outputs, kept = self._compute(turn, stage.number, called, inputs, train)
            single = called.lengths is None or stage.pools
            require_rows(inner.name, outputs, len(rows) if single else inputs[0].shape[0])
        except GeartrainError as error:
            error.add_note(story_of(inner, "forward", inputs, rows.state[INSTANCE], number, turn))
            raise
        except Exception as error:
            story = story_of(inner, "forward", inputs, rows.state[INSTANCE], number, turn)
            raise WorkerError(f"{type(error).__name__} in node {story}: {error}") from error
        put_some(held, stage.into.number, inner.name, called.first, outputs, stage.which)
        turn.kept.append(kept if train else None)

    def _call_together(self, turn: Turn, together: JointCall) -> bool:
        """Run several calls, forward; False, and nothing has happened: each is to run by itself."""
        held, rows, stage = turn.held, together.rows, together.stages[0]
        numbers = together.numbers
        if numbers in self._apart or not all(map(self._kernels.known, numbers)):
            return False
        inner = [self._inner[k] for k in numbers]
        payload = inner[0].source.gather(held, rows.numbers)
        inputs = tuple(payload[j] for j in inner[0].call.taken(len(payload)))
        each = [self._kernels.recalled(turn, k, inputs) for k in numbers]
        found = [kernel for kernel in each if kernel is not None]
        if len(found) < len(each):
            return False
        before = self._beside.get(numbers)
        if before is None or not all(map(is_, before[0], found)):
            kernels = found[0].beside(found[1:])
            if kernels is None:
                self._apart.add(numbers)
                return False
            before = self._beside[numbers] = found, kernels
        kernels = before[1]
        try:
            outputs, residuals = kernels.forward(inputs, together.sizes)
        except Exception as error:
            blame(error, inner, "forward", inputs, together, turn)
            raise
        for one in inner:
            one.width = len(payload)
        into = stage.into.number
        put_some(held, into, inner[0].name, together.first, outputs, stage.which)
        turn.kept += [KeptJointCall(together, kernels, found, residuals)] * len(found)
        self.calls += len(found)
        self.together += 1
        return True

    def _inputs(self, inner: Inner, number: int, called: Called, held: AbstractTensors) -> Payload:
        """The arguments of a call."""
        rows, lengths, place = called.rows, called.lengths, inner.place
        source, take = inner.source, inner.call.take
        if take is None:
            inputs = source.gather(held, rows.numbers)
            inner.width = len(inputs)
        else:
            inputs = source.gather_some(held, rows.numbers, take)
            inner.width = source.width(held)
        inputs += tuple(read_columns(inner.call, place, rows.state, lengths, place.device))
        dry_run = self._kernels.dry_runs[number]
        if dry_run is not None:
            with torch.no_grad():
                tried = detached(inputs)
                dry_run.look(inner.call, place, tried, rows.state, lengths, place.device)
            self._kernels.dry_runs[number] = unsettled(inner.call)
        return inputs

    def _compute(
        self, turn: Turn, number: int, called: Called, inputs: Payload, train: bool
    ) -> tuple[Payload, KeptCall]:
        """Run a module."""
        inner, tape = self._inner[number], turn.tape
        pick = self._kernels.pick(number, inputs)
        if pick is not None:
            if tape is not None:
                tape.note(inputs, inner)
            return pick[0], KeptCall(pick[1], ())
        kernel = self._kernels.now(turn, number, inputs, train=train)
        inside = self._inside(turn, inner, called) if inner.call.inside else None
        if tape is not None:
            return tape.run(inner, kernel, inputs, called, inside)
        if isinstance(kernel, AbstractMemoryKernel):
            memory = inner.recalled(turn.held, called.rows.state, called.lengths)
            if train and isinstance(kernel, RememberingRead):
                outputs, recorded = kernel.record(inputs, memory)
                return outputs, KeptCall(kernel, inputs, memory, None, recorded)
            outputs, residuals = kernel.forward(inputs, memory)
            return outputs, KeptCall(kernel, residuals, memory)
        if not train:
            return kernel.evaluate(inputs, inside), KeptCall(kernel, ())
        if isinstance(kernel, Remembering):
            outputs, graph = kernel.record(inputs, inside)
            return outputs, KeptCall(kernel, inputs, None, inside, graph)
        outputs, residuals = kernel.forward(inputs, inside)
        return outputs, KeptCall(kernel, residuals, None, inside)

    def _inside(self, turn: Turn, inner: Inner, called: Called) -> Inside:
        """Of the bundles of a call; the same object where the same ones were looked into last."""
        slots, lengths = called.rows.state[INSTANCE], called.lengths
        before = turn.seen
        if before is not None and before[0].size == slots.size:
            same = lengths is not None and np.array_equal(before[1], lengths)
            if same and np.array_equal(before[0], slots):
                return before[2]
        found = look_inside(inner.place, slots, lengths, inner.place.device)
        if lengths is not None:
            turn.seen = slots, lengths, found
        return found

    def _note(self, turn: Turn) -> None:
        """Weights learn of what will be answered."""
        n = turn.slots.size
        came: dict[str, list[IntArray]] = {name: [] for name in self._weights}
        for called in turn.plan.calls:
            if isinstance(called.stage, CallStage):
                inner = self._inner[called.stage.number]
                weights = inner.weights
                if weights is not None and inner.counts:
                    slots, lengths = called.rows.state[INSTANCE], called.lengths
                    came[weights.name].append(slots if lengths is None else slots.repeat(lengths))
        turn.rows = {
            name: np.bincount(turn.local[join_arrays(slots)], minlength=n)
            if slots
            else np.zeros(n, np.int64)
            for name, slots in came.items()
        }
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
            rows = joined(came)
            value, held = self._exits[k], turn.held
            lengths = value.lengths(turn.plan.numbers, rows.numbers)
            stored = held.whole(value.number) if lengths is None else None
            index = None if stored is None else rows.numbers
            payload = tuple(stored) if stored is not None else value.gather(held, rows.numbers)
            payload = payload if turn.tape is None else detached(payload)
            origin = self._door.expect(k, rows)
            emission.forward.append((k, Forward(payload, rows.state, origin, lengths, index)))
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
        updates = updates_of(turn, which, self._weights)
        if not updates or are_apart(turn, self._inner):
            self._go_back(turn, which, updates, emission)
            return
        for some in of_one_update(which, updates):
            with ExitStack() as stack:
                for name, each in updates.items():
                    into = self._weights[name].gradient
                    stack.enter_context(into.of_updates(int(each[some[0]])))
                self._go_back(turn, some, updates, emission, apart=False)

    def _go_back(
        self,
        turn: Turn,
        which: IntArray,
        updates: Updates,
        emission: Emission,
        *,
        apart: bool = True,
    ) -> None:
        """Some instances go back.

        Args:
            turn: The turn.
            which: Places of the instances in it.
            updates: By part, of which update the gradient of each place is.
            emission: Gets the answers.
            apart: Whether gradients of the parts are told apart row by row.
        """
        mine = None
        if which.size < turn.slots.size:
            mine = np.zeros(turn.slots.size, np.bool_)
            mine[which] = True
        got: Got = {name: [] for name in self._weights}
        with Unrecorded(), steady():
            if not self._answer_taped(turn, mine, got):
                self._take_back(turn, mine, got, updates, apart=apart)
        for name, weights in self._weights.items():
            tell(turn, which, name, weights, got[name], updates.get(name))
        for k, (_, origin) in enumerate(turn.entered):
            if origin.size:
                answer_entry(turn, k, self._entries[k].number, mine, emission)
        addresses = turn.addresses
        assert addresses is not None
        gone = addresses[which] & ROW_MASK
        number = int(self._instances["turn"][gone[0]])
        self._instances.release(gone)
        turn.unanswered -= which.size
        if not turn.unanswered:
            self.listing.tidy(turn)
            turn.native = None  # each holds the other: their tensors go now, not as garbage
            del self._turns[number]

    def _take_back(
        self,
        turn: Turn,
        mine: NDArray[np.bool_] | None,
        got: Got,
        updates: Updates,
        *,
        apart: bool,
    ) -> None:
        """Take back all calls, the last one first."""
        native = turn.native if mine is None and (apart or not updates) else None
        number, rows_of = len(turn.plan.calls), updates if apart else {}
        while number:
            if native is not None and native.made(number - 1):
                number = native.backward(number, got, updates)
                continue
            number -= 1
            left = turn.kept[number]
            if isinstance(left, KeptJointCall):
                if self._back_together(turn, left, mine, got, rows_of):
                    number = left.together.number
                    continue
            self._back(turn, number, mine, got, rows_of)
            if mine is None:
                called = turn.plan.calls[number]
                turn.held.answered(called.stage.into.number, called.first, len(called.rows))

    def _answer_taped(self, turn: Turn, mine: NDArray[np.bool_] | None, got: Got) -> bool:
        """Take all instances back by the graph of the turn; False: call by call."""
        tape, turn.tape = turn.tape, None
        if tape is None:
            return False
        if mine is None and tape.answer(got):
            return True
        if mine is not None:
            tape.wasted()
        tape.forget()
        return False

    def _back(
        self,
        turn: Turn,
        number: int,
        mine: NDArray[np.bool_] | None,
        got: Got,
        updates: Updates,
    ) -> None:
        """The way back of one call."""
        called = turn.plan.calls[number]
        stage, held, rows = called.stage, turn.held, called.rows
        wanted = wanted_of(turn, called, mine)
        if not wanted.any():
            return
        which = None if wanted.all() else np.flatnonzero(wanted)
        gradient = held.gradient(stage.into.number, called.first, len(rows), which)
        read, state, lengths, at = rows.numbers, rows.state, called.lengths, which
        if which is not None:
            read, state = read[which], state[:, which]
            if lengths is not None:
                at, lengths = ragged_index(lengths, which), lengths[which]
        if not isinstance(stage, CallStage):
            stage.source.scatter(held, read, gradient)
            return
        gradient = some_of(gradient, stage.which)
        inner = self._inner[stage.number]
        into = GradientSum(()) if inner.weights is None else inner.weights.gradient
        left = turn.left(number)
        if mine is None:
            turn.kept[number] = None  # all have come: what it holds is free when it is answered
        slots = state[INSTANCE]
        local = turn.local[slots] if lengths is None else turn.local[slots].repeat(lengths)
        each = updates.get(inner.weights.name) if updates and inner.weights is not None else None
        try:
            with nullcontext() if each is None else into.of_updates(each[local]):
                found = left.backward(inner, held, gradient, state, lengths, at, into)
        except GeartrainError as error:
            error.add_note(story_of(inner, "backward", gradient, slots, number, turn))
            raise
        except Exception as error:
            story = story_of(inner, "backward", gradient, slots, number, turn)
            raise WorkerError(f"{type(error).__name__} in node {story}: {error}") from error
        found = inner.call.answer(found, inner.width)
        if any(g is not None for g in found):
            inner.source.scatter(held, read, found)
        if inner.weights is not None and inner.counts:
            got[inner.weights.name].append(local)

    def _back_together(
        self,
        turn: Turn,
        left: KeptJointCall,
        mine: NDArray[np.bool_] | None,
        got: Got,
        updates: Updates,
    ) -> bool:
        """The way back of calls that were taken together; False: some of their rows stay."""
        held, together = turn.held, left.together
        rows, first, into = together.rows, together.first, together.stages[0].into.number
        touched = held.touched.get(into)
        if mine is not None or touched is None or not touched[first : first + len(rows)].all():
            return False
        gradient = held.gradient(into, first, len(rows), None)
        gradient = some_of(gradient, together.stages[0].which)
        inner = [self._inner[number] for number in together.numbers]
        sums = [GradientSum(()) if i.weights is None else i.weights.gradient for i in inner]
        ends = np.cumsum(together.sizes)[:-1]
        local = np.split(turn.local[rows.state[INSTANCE]], ends)
        try:
            with ExitStack() as stack:
                for one, places, into_ in zip(inner, local, sums, strict=True) if updates else ():
                    each = None if one.weights is None else updates.get(one.weights.name)
                    if each is not None:
                        stack.enter_context(into_.of_updates(each[places]))
                found = left.backward(gradient, sums)
        except Exception as error:
            blame(error, inner, "backward", gradient, together, turn)
            raise
        for number in range(together.number, together.number + len(inner)):
            turn.kept[number] = None
        held.answered(into, first, len(rows))
        found = inner[0].call.answer(found, inner[0].width)
        if any(g is not None for g in found):
            inner[0].source.scatter(held, rows.numbers, found)
        for one, places in zip(inner, local, strict=True):
            if one.weights is not None:
                got[one.weights.name].append(places)
        return True

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._instances["slot"][rows]  # a slot is its own address
        return found

    def check_empty(self) -> None:
        self._instances.check_empty()
        self.listing.rest()
        for each in self._losses:
            each.objective.sums.check_finite()

    def story(self) -> list[str]:
        n = self._instances.waiting
        return [f"'{self.name}' waits for the gradients of {n} instances"] if n else []

    def nbytes(self) -> int:
        return sum(turn.nbytes() for turn in self._turns.values())


def _entered_by(came: Sequence[Came]) -> list[tuple[IntArray, IntArray]]:
    """Slots of the rows that have come in, and where to answer them."""
    return [(each.state[INSTANCE], each.origin) for each in came]


def _read(turn: Turn, source: AbstractValue, rows: IntArray) -> Payload:
    """What functions that decide are given."""
    payload = source.gather(turn.held, rows)
    return payload if turn.tape is None else detached(payload)
