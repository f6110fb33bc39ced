"""The life of a worker process: it waits for a pass, makes its engine, fires, gives back its parts.

    parent ── a pass ──► engine of the same graph; of its workers this one works
           ◄─ ready ──── sockets are bound
           ── go ──────►
           ◄═ records ═► messages.py; rows go to other workers without the parent
           ── END ─────►
           ◄─ parts, memories, outputs, sums ── and it waits for the next pass

It decides nothing: ``WorkerState`` does, as on every runtime.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import torch

from geartrain.device import cores
from geartrain.engine.engine import MadeOf, Passing
from geartrain.engine.firing import Firing
from geartrain.engine.parts import original_name
from geartrain.engine.router import Delivery
from geartrain.engine.stock import PartialStock
from geartrain.errors import GeartrainError, TransportError
from geartrain.generators import seed_all
from geartrain.native.pool import shared
from geartrain.nodes.node import Memory
from geartrain.parts.trained import StepTaken
from geartrain.runtime.processes.failures import error_to_json
from geartrain.runtime.processes.flying import Unread
from geartrain.runtime.processes.given_back import meanwhile, what_lives_here
from geartrain.runtime.processes.letters import Expected, letter_to_record, record_to_letter
from geartrain.runtime.processes.lived import Lived
from geartrain.runtime.processes.looks import Looks
from geartrain.runtime.processes.members import AbstractChannel
from geartrain.runtime.processes.memory import BETWEEN
from geartrain.runtime.processes.messages import (
    Kind,
    Names,
    Report,
    named_to_record,
    record_to_admitted,
    record_to_finished,
    record_to_lot,
    record_to_named,
)
from geartrain.runtime.processes.pace import Pace
from geartrain.runtime.processes.patience import Patience
from geartrain.runtime.processes.turns import CoreTurns
from geartrain.runtime.processes.waiting import Waiting
from geartrain.sharing.letters import SHARE, Letter
from geartrain.transport.batches import BACKWARD, FORWARD, Accepted, to_delivery_parts, to_record
from geartrain.transport.record import GONE, Record

_WORDS: Final = frozenset({Kind.ASK, Kind.REST, Kind.RESTING, Kind.STORY, Kind.END})
_WAIT_S: Final = 0.5  # the longest wait for a message; then it looks again
_GATHER_S: Final = 20.0


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """What a worker must know of a pass.

    Args:
        made_of: Of the engine.
        passing: What it is for.
        trained: Instances finished in training before.
        memories: Of nodes, by name.
        place: Of the sockets, as ``AbstractPool.place`` has it.
        kernel_threads: Inside of torch's kernels.
        seed: Of random numbers, for dropout and the like; each worker adds its number.
        nodes: Names in order, to see that both sides have the same graph.
        most_flying: Bytes that may be under way between all processes.
        ahead: Whether workers are given rows ahead of time of instances that live on several.
        cores: That the parent may use.
    """

    made_of: MadeOf
    passing: Passing
    trained: int
    memories: Mapping[str, Memory]
    place: tuple[str | None, int]
    kernel_threads: int
    seed: int
    nodes: tuple[str, ...]
    most_flying: int
    ahead: bool = False
    cores: int = field(default_factory=cores)


def live(worker: int, channel: AbstractChannel) -> None:
    """Work until the parent is gone."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1 says where it is
    # What torch marks an optimiser with that has a scheduler is in no pickle.
    warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
    try:
        while True:
            _live_through_a_pass(worker, channel)
    except (EOFError, ConnectionError):
        return


def _live_through_a_pass(worker: int, channel: AbstractChannel) -> None:
    content = channel.await_pass()
    try:
        work = _Work(worker, channel.loads(content), channel)
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        channel.tell(failed=error_to_json(error))
        return
    with work.transport:
        channel.tell(ready=os.getpid(), **channel.about(work.transport))
        channel.join(work.transport, channel.hear())
        work.run()


@final
class _Work:
    """One pass."""

    def __init__(self, worker: int, given: Pass, channel: AbstractChannel) -> None:
        torch.set_num_threads(given.kernel_threads)
        seed_all(given.seed + worker)
        self._channel, self._regions = channel, channel.regions
        sharing = given.made_of.sharing
        workers, common = given.made_of.workers, channel.shares
        lock = channel.lock if common else None
        sharing.live_on(worker, workers, in_common=common, lock=lock)
        engine = self._engine = given.made_of.engine(given.trained)
        nodes = tuple(n.name for n in engine.wiring.nodes.values())
        if nodes != given.nodes:
            raise GeartrainError(
                f"worker {worker} has made other nodes of the graph, {nodes[:5]}, than the parent, "
                f"{given.nodes[:5]}: names depend on something that is not in the graph"
            )
        engine.recall(given.memories)
        self._lived = Lived(given.made_of.graph)
        how = given.passing
        engine.begin(train=how.train, judge=how.judge, collect=how.collect)
        self._state = engine.workers[worker]
        engine.sharing.hold(self._state.parts.keys())
        self._state.note, self._notes = self._note, channel.note(worker)
        self._nodes = engine.nodes_of(worker)
        engine.router.here = {node.id for node in self._nodes}
        self._names = Names(nodes, list(engine.parts))
        self._accepted = Accepted(engine.router.here, len(engine.wiring.schema.state))
        self._me, self._parent = worker, len(engine.workers)
        self._expected = Expected(
            {
                original_name(name): {tuple(p.shape) for p in part.module.parameters()}
                for name, part in engine.parts.items()
                if name in self._state.parts
            },
            engine.sharing.copies,
            engine.homes.copies_on(worker),
        )
        stock = self._stock = engine.stock(worker, ahead=given.ahead)
        self._whole = stock is not None and stock.whole
        if not self._whole:
            self._state.ahead = self._carry_on
        self._report, self._pace = Report(), Pace(self._stock, workers)
        turns = lock if self._whole and given.kernel_threads == 1 else None
        self._turns = CoreTurns(turns, self._state, workers, given.cores, self._pace.core)
        self._pulsed_s = 0.0
        self._waiting = Waiting(time.perf_counter())
        self._looks = Looks() if self._whole else None
        self._sent = np.zeros(self._parent + 1, np.int64)  # records, by receiver
        self._had = np.zeros(self._parent + 1, np.int64)  # by sender
        self._over = False
        self._gone: set[int] = set()
        self._idle = Patience()
        self._unread = Unread(given.most_flying)
        self.transport = channel.transport(worker, self._parent + 1, given.place)

    def _note(self, node: int, backward: bool) -> None:
        """Have the parent see what this process is at, should it die."""
        self._notes[0] = 2 * node + backward + 1

    def run(self) -> None:
        """Until the pass ends or is given up."""
        self._notes[0] = BETWEEN
        try:
            self._gather()
            self._waiting, self._pulsed_s = Waiting(time.perf_counter()), self._pace.now()
            self._pace.told(self._pulsed_s)  # there is nothing to tell of yet
            while not self._over:
                self._hear()
                if not self._over and self._state.ready:
                    self._turns.take()
                    self._fire()
        except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
            self._send_report()
            self._send(named_to_record("failed", error_to_json(error), {}))
            while not self._over:
                self._hear(works=False)

    def _gather(self) -> None:
        """Let all others in before anything is fired: who fires hears no one who knocks."""
        try:
            self.transport.gather(_GATHER_S)
        except TransportError:
            self._look_around()  # whoever is missing says whom it does not reach

    def _hear(self, *, works: bool = True) -> None:
        """Take what has come; wait if there is nothing else to do."""
        looks = self._looks
        if works and self._state.ready:
            if looks is not None and not self._pace.reached(looks.due):
                return
            found = self.transport.poll()
            if looks is not None and self._stock is not None:
                wants = bool(found) or not self._stock.waiting
                looks.looked(self._pace.now(), wants=wants)
        else:
            self._turns.leave()
            began = time.perf_counter()
            if self._is_to_tell():
                self._send_report()
            found = self.transport.poll(self._idle.seconds)
            if not found:
                self._send_report()
                if works:
                    self._say_idle()
                found = self.transport.poll(_WAIT_S)
                if not found:
                    self._look_around()
            self._waiting.add(began, time.perf_counter())
            self._tell_flying()
        for sender, record in found:
            self._had[sender] += 1
            self._take(record, works=works)
            if self._over:  # all is given back; what came behind the word for it is of no use
                return

    def _is_to_tell(self) -> bool:
        """Whether the controller is to hear of what was done before others are waited for.

        With a stock that is used up by and by it need not hear of each instance at once.
        """
        report = self._report
        if self._stock is None or self._whole:
            return report.matters
        return report.presses or self._is_due()

    def _is_due(self) -> bool:
        """Whether it is time to tell the controller of what was done."""
        report, due = self._report, self._pace.due
        matters, firings = report.matters, len(report.firings)
        return self._pace.reached(lambda now: due(now, matters=matters, firings=firings))

    def _look_around(self) -> None:
        """Nothing has come for a while: are all others there?"""
        self._channel.check()
        lost, unreached = self.transport.lost(), self.transport.unreached()
        if lost or unreached:
            self._send(named_to_record("lost", [lost, list(unreached.items())], {}))

    def _take(self, record: Record, *, works: bool) -> None:
        kind = record.kind
        if kind in _WORDS:
            self._idle.asked()
        if kind == Kind.ABANDON:
            self._give_back(abandoned=True)
        elif kind == Kind.DROP:
            self._leave()
        elif not works:
            return
        elif kind not in _WORDS:
            self._take_work(record)
        elif kind == Kind.REST:
            self._after_exchange(self._state.rest())
        elif kind == Kind.RESTING:
            said = self._engine.sharing.resting()
            self._send(named_to_record("resting", [record.ints[0], said], {}))
        elif kind == Kind.STORY:
            lines = self._engine.waiting(self._me)
            self._send(named_to_record("story", lines, {}))
        elif kind == Kind.END:
            self._give_back(abandoned=False)

    def _take_work(self, record: Record) -> None:
        kind = record.kind
        if kind in (FORWARD, BACKWARD):
            node, port, batch = to_delivery_parts(record, self._accepted)
            self._state.deliver(Delivery(node, port, batch))
        elif kind in (Kind.ADMITTED, Kind.LOT):
            self._admitted(record)
        elif kind == Kind.FINISHED:
            self._finished(record)
        elif kind == Kind.LETTER:
            letter = record_to_letter(record, self._expected)
            self._state.receive(letter)
            if letter.kind == SHARE:  # the last of them completes a collective
                self._after_exchange([])
        elif kind == Kind.NAMED:
            self._release(record_to_named(record)[1])
        elif kind == GONE:
            self._go_on_without(record.ints[0])

    def _admitted(self, record: Record) -> None:
        arena = self._engine.wiring.arena
        if self._stock is None or record.kind == Kind.ADMITTED:
            arena.adopt(record_to_admitted(record))
        else:
            told, lot = record_to_lot(record, self._accepted)
            arena.adopt(told)
            self._stock.put(lot)
            self._begin_some()

    def _begin_some(self) -> None:
        """Begin with instances that are in stock, as far as there is room."""
        if self._stock is not None and self._stock.waiting:
            for delivery in self._stock.begin(idle=not self._state.ready):
                self._state.deliver(delivery)

    def _finished(self, record: Record) -> None:
        told, slots = record_to_finished(record)
        self._engine.wiring.arena.forget(slots)
        self._after_exchange(self._state.finished(told))
        if isinstance(self._stock, PartialStock):
            self._stock.over(slots, told.trained)
            self._begin_some()

    def _go_on_without(self, worker: int) -> None:
        """Another worker is gone, and the copies of the model that lived there."""
        self._gone.add(worker)
        for k in self._engine.homes.copies_on(worker):
            self._engine.sharing.set_present(k, False)
        self._after_exchange([])

    def _release(self, told: Any) -> None:
        """Let those that wait for letters go on without, as nothing moves anywhere."""
        sharing, (number, said) = self._engine.sharing, told
        sharing.heard(said)
        found = sharing.release()
        self._after_exchange([])
        self._send(named_to_record("released", [number, found], {}))

    def _after_exchange(self, steps: Sequence[StepTaken]) -> None:
        """Tell of steps, and carry letters, that came of something else than a firing."""
        now = time.perf_counter()
        steps = [*steps, *self._state.take_steps()]
        self._report.steps += [(step, now) for step in steps]
        self._post(self._state.take_letters())

    def _post(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            to = self._engine.homes.of_letter(letter)
            if to == self._me:
                self._state.receive(letter)
            elif to in self._gone:
                if letter.kind != SHARE:
                    self._engine.sharing.lost(letter)
            else:
                self._send(letter_to_record(letter), to)

    def _fire(self) -> None:
        start = time.perf_counter()
        firing = self._state.fire()
        self._idle.fired(letters=bool(firing.taken))
        self._notes[0] = BETWEEN
        end = time.perf_counter()
        self._add(firing, start, end)
        told = None if (stock := self._stock) is None else stock.settle(firing.outbox)
        # What it says to the controller goes before what others can go on with; else it waits for
        # company, as a message costs as much as a small firing.
        if firing.elsewhere and self._goes_first():
            self._send_report()
        elif self._is_due():
            self._send_report()
        self._send_rows(firing)
        self._post(firing.letters)
        if firing.letters:
            self._tell_flying()
        if told is not None:
            self._after_exchange(self._state.finished(told))
        self._turns.fired()
        if stock is not None:
            self._begin_some()  # after steps, as more may be ready by these

    def _carry_on(self, firing: Firing) -> None:
        """Send what others wait for before this worker's parts step."""
        report, news = self._report, firing.outbox.take_news()
        report.out.add(news)
        if self._stock is not None:
            self._stock.settle(news)
        if report.matters and ((firing.elsewhere and self._goes_first()) or self._is_due()):
            self._send_report()
        self._send_rows(firing)

    def _goes_first(self) -> bool:
        """Whether the report is to go before a firing's batches.

        Answers alone may be counted late: by a stock the next instances are begun without it.
        """
        return self._report.matters if self._stock is None else self._report.presses

    def _send_rows(self, firing: Firing) -> None:
        """Send a firing's batches to the workers that they are for."""
        for worker, delivery in firing.elsewhere:
            self._send(to_record(delivery.node, delivery.port, delivery.batch), worker)
        if firing.elsewhere:
            firing.elsewhere.clear()
            self._tell_flying()

    def _tell_flying(self) -> None:
        """Have the parent know what others have not read, where that is much."""
        if (news := self._unread.news(self.transport.flying_bytes)) is not None:
            self._send(named_to_record("flying", news, {}))

    def _add(self, firing: Firing, start: float, end: float) -> None:
        report, out = self._report, firing.outbox
        report.firings.append((firing, start, end))
        report.steps += [(step, end) for step in firing.steps]
        report.held |= firing.held
        report.out.add(out)

    def _send_report(self) -> None:
        if not self._report:
            return
        self._report.busy_s, now = self._pace.core.seconds(), self._pace.now()
        report, self._report = self._report.to_record(self._names), Report()
        self._pace.told(now)
        if now - self._pulsed_s <= self._pace.progress_s:
            self._send(report)
            return
        self._pulsed_s = now
        with self.transport.together():  # the parent is woken once
            self._send(report)
            self._send(self._pulse())

    def _send(self, record: Record, to: int | None = None) -> None:
        to = self._parent if to is None else to
        self._sent[to] += 1
        self.transport.send(to, record)

    def _say_idle(self) -> None:
        """Nothing is left to do until something comes."""
        self._sent[self._parent] += 1
        counts = (self._sent.copy(), self._had.copy())
        self.transport.send(self._parent, Record(Kind.IDLE, (), (), counts))

    def _pulse(self) -> Record:
        """Sums of losses, and how old gradients were, since the beginning."""
        return meanwhile(self._engine, self._nodes, self._me, self._state.parts)

    def _give_back(self, *, abandoned: bool) -> None:
        """Send the state of what lives here; the pass is over."""
        engine = self._engine
        keeps = engine.sharing.keeps
        here = self._state.parts.keys()
        parts = {n: p for n, p in engine.parts.items() if n in here and keeps(self._me, n)}
        engine.sharing.leave_pass()
        try:
            if abandoned:
                for part in parts.values():
                    part.abandon()
            else:
                for node in self._nodes:
                    node.check_empty()
                for part in parts.values():
                    part.check_finite()
            self._send_report()
            self._send(self._pulse())
            for record in what_lives_here(engine, self._nodes, parts, self._regions):
                self._send(record)
            if engine.passing.train:
                self._send(named_to_record("lived", self._lived.document(), {}))
            for tensors, said in engine.sharing.give_back(abandoned=abandoned):
                self._send(named_to_record("member", said, tensors))
        except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
            self._send(named_to_record("failed", error_to_json(error), {}))
        self._leave()

    def _leave(self) -> None:
        """The pass is over here; what has not been given back is of no use to anybody."""
        self._turns.leave()
        self._send(named_to_record("done", self._counts(), {}))
        self._over = True
        shared.rest()
        self.transport.await_heard(self._parent, _LINGER_S)
        self.transport.close(_LINGER_S, to=self._parent)

    def _counts(self) -> Any:
        """How long it has waited, and what it has sent to whom before this is told."""
        traffic = self.transport.monitor()
        sent = list(zip(traffic.sent_messages, traffic.sent_bytes, strict=True))
        return {**self._waiting.document(), "sent": sent}


_LINGER_S: Final = 30.0  # for what it gives back to be read
