"""A loop that runs whole: the node that computes it, behind the door that rows pass.

    rows ─► LoopDoor ─► an instance, when all of its rows are there ─► LoopNode ─► rows that leave
    answers to those ─► LoopDoor ─► an instance, when all of them are there ─► LoopNode ─► answers

One firing of the node runs the loop for some instances: planned on their columns, or found out call
by call where payloads decide, and computed by the kernels that a loop by steps uses. On the way
back the calls are taken in reverse, for those instances that have been answered (``calls.py``).

Messages of the node are instances. They see one version of the weights in all turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray

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
)
from geartrain.frames.rows import RowStore
from geartrain.native.steady import steady
from geartrain.nodes.loop.answers import answer_entry, count, tell
from geartrain.nodes.loop.buffers import FiringTensors, OtherPartsError
from geartrain.nodes.loop.calls import LoopCalls
from geartrain.nodes.loop.door import Came, LoopDoor
from geartrain.nodes.loop.judging import Judged, judge
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.listing import Listing
from geartrain.nodes.loop.order import longest_first
from geartrain.nodes.loop.parting import Parting
from geartrain.nodes.loop.pieces import TapeTensors
from geartrain.nodes.loop.plan import Called, joined
from geartrain.nodes.loop.planner import Planner
from geartrain.nodes.loop.tape import Taping
from geartrain.nodes.loop.tensors import detached
from geartrain.nodes.loop.turn import (
    Got,
    Inner,
    Turn,
    await_rows,
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
        self._turned = 0  # firings forward
        self._calls = LoopCalls(place.name, self._inner, self._kernels)
        self.taping = Taping(place.name, inner, able=tapes and not place.spread)
        self.listing = Listing(self._inner, self._kernels, able=place.on_host)
        self._looking = Listing(self._inner, self._kernels, able=place.on_host, train=False)

    def take_over(self, before: LoopNode) -> None:
        """What the same loop of an engine knew that is no more: how C is called, how much memory
        is wanted, and what was made that would be made again."""
        if self.planner.order is before.planner.order:  # else values and modules may be others
            self.listing.take_over(before.listing)
            self._looking.take_over(before._looking)
            self._kernels.take_over(before._kernels)
        self._calls.take_over(before._calls)

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
    def calls(self) -> int:
        """Of modules, so far."""
        return self._calls.made

    @property
    def together(self) -> int:
        """How often several of them were taken together."""
        return self._calls.together

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
        came, listing = self._door.take(slots), self.listing if train else self._looking
        emission = Emission()
        with Unrecorded(), steady():
            turn = self._computed(slots, came, train)
            self._door.release(came)
            del came  # it may all go back now, and what came is wanted no more
            listing.end(turn)
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
            listing.tidy(turn)
            turn.native = None
        return emission

    def _computed(self, slots: IntArray, came: Sequence[Came], train: bool) -> Turn:
        """A turn of some instances, whose calls have been made."""
        listing = self.listing if train else self._looking
        native = listing if not (train and self.taping.gains) and listing.pays else None
        parts = self._parting.count(came) if self._ahead else None
        if parts is not None and (native or not self._parting.made):
            with suppress(OtherPartsError):  # a module has been changed
                turn = self._turn(slots, came, parts, native)
                return self._planned(turn, came, train)
        turn = self._turn(slots, came, None, native)
        run, plan = self._runs(turn, train), turn.plan
        self._enter(turn, came)
        make = partial(self._calls.make, turn, run)
        plan.look = partial(_read, turn, make)
        plan.run = run if turn.native is None else partial(self._calls.found, turn, run)
        self.planner.finish(plan)
        make()
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
        self._calls.planned(turn, run)
        return turn

    def _runs(self, turn: Turn, train: bool) -> Callable[[int, Called], None]:
        """What runs a call."""
        turn.tape = self.taping.begin(turn) if train else None
        run: Callable[[int, Called], None] = partial(self._calls.run, turn, train)
        return run if turn.tape is None else turn.tape.recording(run)

    def _turn(
        self,
        slots: IntArray,
        came: Sequence[Came],
        parts: Mapping[int, int] | None,
        native: Listing | None,
    ) -> Turn:
        plan = self.planner.begin([(each.state, each.lengths) for each in came], parts)
        self._turned += 1
        local = np.full(int(slots.max()) + 1, -1, np.int64)
        local[slots] = np.arange(slots.size)
        pending = np.zeros(slots.size, np.int64)
        if native is None:
            held = self._tensors(plan.numbers)
            return Turn(plan, held, slots, local, pending, _entered_by(came))
        buffers = native.tensors(plan, slots.size)
        turn = Turn(plan, buffers, slots, local, pending, _entered_by(came))
        turn.native = native.begin(turn, buffers)
        return turn

    def _enter(self, turn: Turn, came: Sequence[Came]) -> None:
        for value, first, each in zip(self._entries, turn.plan.entered, came, strict=True):
            if each.rows.size:
                turn.held.put(value.number, self.name, first, each.columns, each.at)
                if turn.tape is not None:
                    turn.tape.enter(value.number, first)

    def _note(self, turn: Turn) -> None:
        """Weights learn of what will be answered."""
        n = turn.slots.size
        count(turn, self._inner, self._weights)
        for name, weights in self._weights.items():
            turn.versions[name] = weights.version
            _, sent = turn.totals[name]
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
                self._calls.take_back(turn, mine, got, updates, apart=apart)
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

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._instances["slot"][rows]  # a slot is its own address
        return found

    def check_empty(self) -> None:
        self._instances.check_empty()
        self.listing.rest()
        self._looking.rest()
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


def _read(turn: Turn, make: Callable[[], None], source: AbstractValue, rows: IntArray) -> Payload:
    """What functions that decide are given, when calls that wait have been made."""
    make()
    payload = source.gather(turn.held, rows)
    return payload if turn.tape is None else detached(payload)
