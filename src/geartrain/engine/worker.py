"""One worker: batches in, a firing, an outbox. No thread, no clock.

    deliver(delivery)  ─► a queue            fire() ─► the policy picks a queue, its node runs,
    finished(n)        ─► the parts                    eager nodes behind it run at once

Whoever calls carries the outbox on; see ``runtime``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, final

from geartrain.engine.cohorts import Cohorts
from geartrain.engine.firing import Finished, Firing, cells_of, nbytes_of, story_of, taking
from geartrain.engine.instrument import AbstractMeter
from geartrain.engine.mailbox import AbstractPolicy, Queue
from geartrain.engine.order import Standing
from geartrain.engine.portion import AbstractPortion
from geartrain.engine.router import BACKWARD, Delivery, Router
from geartrain.engine.waves import Waves
from geartrain.errors import GeartrainError, WorkerError, said
from geartrain.frames.frame import Arena
from geartrain.frames.message import Backward, Forward
from geartrain.native import steady
from geartrain.nodes.node import AbstractNode, Emission
from geartrain.parts.together import StepsTogether
from geartrain.parts.trained import AbstractPart, StepTaken, guarded
from geartrain.parts.triggers import Instances
from geartrain.sharing.communicator import AbstractCommunicator, Silent, Taken
from geartrain.sharing.letters import Letter


@final
@dataclass(frozen=True, slots=True)
class _Group:
    """Parts whose updates are of the same instances: they step one after the other.

    Args:
        copy: The copy of the graph that they are of.
        cohorts: Of their updates; None: their updates are none of instances that come in parts.
        steps: Of the parts.
    """

    copy: int
    cohorts: Cohorts | None
    steps: StepsTogether = field(default_factory=StepsTogether)


@final
class WorkerState:
    """The nodes and parts of one worker.

    Args:
        index: Its number.
        nodes: Those that live here.
        parts: Those that nodes here compute with, by name.
        copies: Part name to the copy of the graph that it is of.
        home: Node number to worker, for all nodes.
        router: Follows the wires.
        policy: What fires next.
        portion: How much a firing takes.
        max_rows: Most rows in one firing.
        standings: Node number to where it stands in the graph, as ``engine.order`` gives it.
        meter: Measures what nodes compute, or None.
        communicator: What copies that live here send and receive.

    Attributes:
        note: Told which node is about to compute, and whether backward; or None.
        ahead: Given a firing before its parts step, where it has batches for other workers or
            answers for the controller, to carry these on; it takes out what it has carried. None:
            they are carried on when the firing is over.
    """

    def __init__(
        self,
        index: int,
        nodes: Sequence[AbstractNode],
        parts: Mapping[str, AbstractPart],
        copies: Mapping[str, int],
        home: Mapping[int, int],
        router: Router,
        policy: AbstractPolicy,
        portion: AbstractPortion,
        max_rows: int,
        standings: Mapping[int, tuple[Standing, Standing]],
        meter: AbstractMeter | None = None,
        communicator: AbstractCommunicator | None = None,
    ) -> None:
        self.index = index
        self._meter = meter
        self.train = True
        self.progress = 0
        self._nodes = {n.id: n for n in nodes}
        self.parts, self._copies = dict(parts), copies
        self._weights = sum(part.size for part in self.parts.values())
        windowed = {name for name, part in parts.items() if part.rules.window is not None}
        self._bounded = {n.id for n in nodes if not windowed.isdisjoint(n.part_names)}
        self._home, self._router, self._policy, self._portions = home, router, policy, portion
        self._max_rows, self._standings = max_rows, standings
        self._queues: dict[tuple[int, int], Queue] = {}
        self._ready: dict[Queue, None] = {}
        self._eager: list[Delivery] = []
        self._clock = 0
        self.communicator = communicator or Silent()
        self._free = not self._bounded and not self.communicator.may_wait
        self._cohorts: dict[str, Cohorts] = {}  # parts that step together have the same
        self._groups: list[_Group] = []
        self._sorted_by: dict[int, list[tuple[Cohorts, list[AbstractPart]]]] = {}  # by node
        self.note: Callable[[int, bool], None] | None = None
        self.ahead: Callable[[Firing], None] | None = None

    def begin(self, arena: Arena, trained: int, turn: Callable[[int], int], *, train: bool) -> None:
        """A pass begins.

        Args:
            arena: The frames.
            trained: Instances finished in training so far.
            turn: Copy of the graph to the turn of the first instance that may come by.
            train: Whether it is for training.
        """
        self.train, self.progress = train, trained
        self._cohorts, self._groups, self._sorted_by = {}, [], {}
        if not train:
            return
        groups: dict[tuple[int, ...], _Group] = {}
        for name, part in self.parts.items():
            trigger, of = part.trigger, self._copies[name]
            # With a window, rows that wait might keep out those that they wait for.
            if isinstance(trigger, Instances) and not part.once and part.rules.window is None:
                begun, first = part.begun(trigger.n), turn(of)
                key: tuple[int, ...] = of, trigger.n, first, begun, part.copy, part.copies
                group = groups.get(key)
                cohorts = None if group is None else group.cohorts
                if cohorts is None:
                    cohorts = Cohorts(arena, trigger.n, first, begun, part.copy, part.copies)
                self._cohorts[name] = cohorts
                part.in_cohorts(cohorts.ahead, cohorts.updates)
            else:
                key, cohorts = (of,), None
                part.in_cohorts(None, None)
            groups.setdefault(key, _Group(of, cohorts)).steps.parts.append(part)
        self._groups = [*groups.values()]

    def waves(self) -> Waves | None:
        """Instances come in parts to updates of so many: how many begin together; None: to none."""
        several = [*self._cohorts.values()]
        if not several:
            return None
        largest = max(several, key=lambda cohorts: cohorts.n)
        return Waves(largest.n, largest.begun)

    def deliver(self, delivery: Delivery) -> None:
        """A batch has come for a node that lives here."""
        node = self._nodes[delivery.node]
        if node.eager:
            self._eager.append(delivery)
            return
        if self._cohorts and self._adds_gradients(node, delivery.port):
            self._sort(node, delivery, 0)
        else:
            self._enqueue(delivery)

    def _sort(self, node: AbstractNode, delivery: Delivery, k: int) -> None:
        """Queue what may be added now to all parts of a node, from the k-th cohorts on; the rest
        waits at one of these."""
        several = self._cohorts_of(node)
        if k == len(several):
            self._enqueue(delivery)
            return
        (cohorts, parts), batch, ahead = several[k], delivery.batch, 0
        if cohorts.none_waits:
            self._sort(node, delivery, k + 1)
            return
        if self._takes_ahead(node):
            lengths = node.lengths(batch)
            rows = 1.0 if lengths is None else float(lengths.mean())
            ahead = self._portions.together(node, rows * cohorts.n, parts) - 1
        for now in cohorts.sort(delivery, node.slots(batch), ahead):
            self._sort(node, now, k + 1)

    def _cohorts_of(self, node: AbstractNode) -> list[tuple[Cohorts, list[AbstractPart]]]:
        """Those of its parts, in their order, each once, and whose they are."""
        found = self._sorted_by.get(node.id)
        if found is None:
            its: dict[Cohorts, list[AbstractPart]] = {}
            for name in node.part_names:
                if name in self._cohorts:
                    its.setdefault(self._cohorts[name], []).append(self.parts[name])
            found = self._sorted_by[node.id] = [*its.items()]
        return found

    def _enqueue(self, delivery: Delivery) -> None:
        self._clock += 1
        key = (delivery.node, delivery.port)
        queue = self._queues.get(key)
        if queue is None:
            alone = self._nodes[delivery.node].alone
            standing = self._standings[delivery.node][delivery.port == BACKWARD]
            queue = Queue(*key, alone, standing.place, standing.loops)
            self._queues[key] = queue
        queue.put(delivery.batch, self._clock)
        self._ready[queue] = None

    def receive(self, letter: Letter) -> None:
        """A letter has come for a copy that lives here."""
        self.communicator.receive(letter)

    def take_letters(self) -> list[Letter]:
        """What copies that live here have sent outside of a firing."""
        return self.communicator.take_letters()

    def take_steps(self) -> list[StepTaken]:
        """Steps that exchanges have taken outside of a firing."""
        return self.communicator.take_steps()

    def finished(self, told: Finished) -> list[StepTaken]:
        """Instances have finished; in training, steps that count them fall due."""
        self.progress = told.trained
        if not self.train:
            return []
        steps: list[StepTaken] = []
        for group in self._groups:
            if told.copy is not None and group.copy != told.copy:
                continue
            parts, cohorts = group.steps.parts, group.cohorts
            for part in parts:
                part.heard(self.progress)
            finished = [told.turns.size] if cohorts is None else cohorts.finished(told.turns)
            for number, instances in enumerate(finished):
                for part in parts:
                    if number:
                        part.next_update()
                    part.finished(instances)
                steps += group.steps.step_if_due(self.progress)
                if cohorts is not None:
                    for delivery in cohorts.take():
                        node = self._nodes[delivery.node]
                        its = [each for each, _ in self._cohorts_of(node)]
                        self._sort(node, delivery, its.index(cohorts) + 1)
        return steps

    def flush(self) -> list[StepTaken]:
        """Step with whatever gradients are left."""
        return StepsTogether(self.parts.values()).step(self.progress)

    def rest(self) -> list[StepTaken]:
        """Nothing is in flight any more: steps that fall due by that."""
        return [step for part in self.parts.values() if (step := part.rest()) is not None]

    @property
    def ready(self) -> bool:
        """Whether ``fire`` has something to do."""
        if self._free:
            return bool(self._eager or self._ready or self.communicator.ready)
        return bool(self._eager or self._choices() or self.communicator.ready)

    def _choices(self) -> list[Queue]:
        """Queues that may fire now."""
        if self._free:
            return list(self._ready)
        return [q for q in self._ready if self._is_open(q)]

    def _is_open(self, queue: Queue) -> bool:
        """Whether its part waits for no letters, and in training its window has room for rows."""
        node = self._nodes[queue.node]
        if any(self.communicator.waits(name) for name in node.part_names or (None,)):
            return False
        bounded = self.train and queue.port != BACKWARD and queue.node in self._bounded
        return not bounded or node.open

    def _collect(self, part: str, firing: Firing) -> Firing:
        """Add what an exchange has sent and done."""
        firing.letters += self.communicator.take_letters(part)
        firing.steps += self.communicator.take_steps(part)
        return firing

    def fire(self) -> Firing:
        """Run one node on what waits for it, and the eager nodes behind.

        Raises:
            WorkerError: The node raised; names node, part, shapes and instances.
            GeartrainError: The graph or the data are wrong.
        """
        steady.firing.of_pass = steady.this_pass.number
        try:
            return self._fire()
        finally:
            steady.firing.of_pass = 0

    def _fire(self) -> Firing:
        if not self._eager:
            if (taken := self.communicator.take()) is not None:
                return self._exchange(taken)
            queue = self._choose()
            node = self._nodes[queue.node]
            adds = self._adds_gradients(node, queue.port)
            limit = min(self._policy.limit(queue, self._max_rows), queue.rows)
            most = queue.portion
            if most is None and adds and not queue.alone:
                most = self._most_adding(queue, node)
            if most is not None:
                limit = min(limit, most)
            # Rounded where rows stay behind anyway: a few that were kept back would hold up their
            # instances, and be a firing of their own. What completes an update goes at once.
            if 2 * node.grain < limit < queue.rows and limit != most:
                limit -= limit % node.grain
            batches = _taken(queue, node, limit)
            if not queue.rows:
                del self._ready[queue]
            forward, rows = queue.port >= 0, sum(map(len, batches))
            if adds:
                self._reserve(node, batches)
            firing = Firing(node.name, node.part_name, forward, rows, forward and adds)
            bundled = forward and batches[0].lengths is not None
            firing.cells = cells_of(batches) if bundled else rows
            firing.nbytes = nbytes_of(batches[0], rows)
            self._run(node, queue.port, batches, firing)
        else:
            node = self._nodes[self._eager[0].node]
            firing = Firing(node.name, None, self._eager[0].port >= 0, len(self._eager[0].batch))
        while self._eager:
            eager, self._eager = self._eager, []
            for delivery in eager:
                self._run(self._nodes[delivery.node], delivery.port, [delivery.batch], firing)
        return firing

    def _exchange(self, taken: Taken) -> Firing:
        """A copy of a part has had letters."""
        firing = self._collect(taken.part, taking(taken))
        if taken.part in self.parts:
            self._note_holding(self.parts[taken.part], firing)
        return firing

    def _run(
        self,
        node: AbstractNode,
        port: int,
        batches: Sequence[Forward | Backward],
        firing: Firing,
    ) -> None:
        out = firing.outbox
        names = node.part_names
        try:
            parts = [self.parts[name] for name in sorted(names)]  # in one order everywhere
            with guarded(parts, back=port == BACKWARD):
                emission = self._compute(node, port, batches)
            self._router.emit(node.id, emission, out)
            if names and self._adds_gradients(node, port):
                self._carry_ahead(names, firing)
                for name in names:
                    self._step(self.parts[name], firing)
        except GeartrainError as error:
            error.add_note(story_of(node, port, batches, self._router))
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            error.add_note(f"in node {story_of(node, port, batches, self._router)}")
            raise
        except Exception as error:
            story = story_of(node, port, batches, self._router)
            raise WorkerError(f"{type(error).__name__} in node {story}: {said(error)}") from error
        self._set_apart(firing)
        for delivery in out.deliveries:
            self.deliver(delivery)
        out.deliveries.clear()

    def _set_apart(self, firing: Firing) -> None:
        """Take deliveries for other workers out of the outbox."""
        here: list[Delivery] = []
        for delivery in firing.outbox.deliveries:
            home = self._home[delivery.node]
            if home == self.index:
                here.append(delivery)
            else:
                firing.elsewhere.append((home, delivery))
        firing.outbox.deliveries[:] = here

    def _carry_ahead(self, names: Sequence[str], firing: Firing) -> None:
        """Others need not wait for a step of these parts; but where one may be held back, the
        controller is to know of that before it hears of anything that follows."""
        if self.ahead is None or any(
            self.parts[name].rules.max_staleness is not None for name in names
        ):
            return
        self._set_apart(firing)
        if firing.elsewhere or firing.outbox.answered:
            self.ahead(firing)

    def _step(self, part: AbstractPart, firing: Firing) -> None:
        """Gradients have been added to a part."""
        if (step := part.step_if_due(self.progress)) is not None:
            firing.steps.append(step)
        while part.once and part.next_update():
            if (step := part.step_if_due(self.progress)) is not None:
                firing.steps.append(step)
        if self.communicator.talks:
            self._collect(part.name, firing)
        self._note_holding(part, firing)

    def _takes_ahead(self, node: AbstractNode) -> bool:
        """Whether it may add gradients of several updates in one firing."""
        if not node.apart:
            return False
        return all(self.parts[name].takes_ahead for name in node.part_names)

    def _note_holding(self, part: AbstractPart, firing: Firing) -> None:
        holds = part.note_holding()
        if holds is not None:
            firing.held[part.name] = holds

    def _adds_gradients(self, node: AbstractNode, port: int) -> bool:
        return port == BACKWARD or (node.loss_name is not None and self.train)

    def _choose(self) -> Queue:
        """What fires next; queues of bundles are told first what one firing may take of them."""
        choices = self._choices()
        if self.train:
            for queue in choices:
                node = self._nodes[queue.node]
                if queue.changed or self._adds_gradients(node, queue.port):
                    bundled = (queue.bundled or node.bundled) and not queue.alone
                    queue.portion = self._portion(queue, node) if bundled else None
                    queue.changed = False
        else:
            for queue in choices:
                queue.portion, queue.changed = None, True
        return self._policy.choose(choices)

    def _most_adding(self, queue: Queue, node: AbstractNode) -> int | None:
        """Most messages of one firing that adds gradients; None: any number."""
        if not self.train:
            return None
        found = (self._portions.adding(queue, node, self.parts[n]) for n in node.part_names)
        return min((most for most in found if most is not None), default=None)

    def _reserve(self, node: AbstractNode, batches: Sequence[Forward | Backward]) -> None:
        """Tell others that share the part what a firing is going to add."""
        if not self.train:
            return
        for name in node.part_names:
            part = self.parts[name]
            if not part.reserves:
                continue
            units = sum(map(len, batches))
            if part.trigger.unit == "rows":
                lengths = ((node.rows_of(batch, name), len(batch)) for batch in batches)
                units = sum(n if each is None else int(each.sum()) for each, n in lengths)
            part.reserve(units)

    def _portion(self, queue: Queue, node: AbstractNode) -> int:
        """Most bundles of one firing in training."""
        if self._adds_gradients(node, queue.port):
            most = self._most_adding(queue, node)
        else:
            own = [self.parts[name] for name in node.part_names] or self.parts.values()
            most = self._portions.computing(queue, node, own, self._weights)
        return self._max_rows if most is None else most

    def _compute(
        self, node: AbstractNode, port: int, batches: Sequence[Forward | Backward]
    ) -> Emission:
        if self.note is not None:
            self.note(node.id, port == BACKWARD)
        if self._meter is not None:
            return self._metered(self._meter, node, port, batches)
        if port == BACKWARD:
            return node.backward(cast("Sequence[Backward]", batches))
        return node.forward(port, cast("Sequence[Forward]", batches), self.train)

    def _metered(
        self,
        meter: AbstractMeter,
        node: AbstractNode,
        port: int,
        batches: Sequence[Forward | Backward],
    ) -> Emission:
        if not self.train:
            return node.forward(port, cast("Sequence[Forward]", batches), False)
        with meter.firing(node.name, forward=port != BACKWARD):
            if port == BACKWARD:
                return node.backward(cast("Sequence[Backward]", batches))
            emission = node.forward(port, cast("Sequence[Forward]", batches), True)
        if emission.spared is not None:
            meter.spared(node.name, emission.spared)
        return emission


def _taken(queue: Queue, node: AbstractNode, limit: int) -> list[Forward | Backward]:
    """What a firing takes: answers to the latest firing first, portions as they were admitted."""
    if queue.port == BACKWARD:
        return queue.take_latest(limit, node.left_by)
    if queue.portion is None:
        return queue.take(limit)
    turn = node.place.arena.turn
    return queue.take_earliest(limit, lambda batch: turn[node.slots(batch)])
