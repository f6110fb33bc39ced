"""The parent of a pass whose workers are processes: it counts, admits, and takes back the parts.

    parent    controller, data, watch          a worker    its nodes and parts, a queue
       │  frames, rows, who has finished  ─────►  │
       │  ◄───── firings, answers, steps          │ ◄═══ rows, gradients ═══► other workers

How the workers were made, and where they are, is the pool's affair (``members``).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from geartrain.engine.engine import Engine
from geartrain.engine.router import Outbox
from geartrain.errors import GeartrainError, WorkerDiedError
from geartrain.runtime.base import AbstractFeeder, Watch, log
from geartrain.runtime.interrupt import Interruptible
from geartrain.runtime.processes.child import Pass
from geartrain.runtime.processes.contents import tensors_written
from geartrain.runtime.processes.ending import Ending
from geartrain.runtime.processes.failures import error_of_json
from geartrain.runtime.processes.flying import MOST_FLYING, Flying
from geartrain.runtime.processes.handing import TOLD_S, Handing
from geartrain.runtime.processes.members import AbstractPool, raise_missing
from geartrain.runtime.processes.messages import (
    Kind,
    Names,
    Report,
    admitted_to_record,
    finished_to_record,
    record_to_named,
)
from geartrain.runtime.processes.quiet import Quiet
from geartrain.runtime.processes.returned import Returned
from geartrain.runtime.processes.stocking import Stocking
from geartrain.runtime.processes.waiting import waited_of
from geartrain.transport.batches import to_record
from geartrain.transport.link import Transport
from geartrain.transport.record import GONE, Record

DROPPED_S: Final = 1.0
"""So long a worker may take to end its firing and drop what it holds after another one's death; one
that is made anew costs about as much."""
_SLOW_S: Final = 0.002
"""What is said to workers goes with instances that are admitted by it, where these are of a list
and the last of them took no longer."""
_WAIT_S: Final = 0.2  # the longest wait, so that signals and stopped workers are seen


@final
class Parent:
    """One pass over the data."""

    def __init__(
        self,
        pool: AbstractPool,
        engine: Engine,
        feeder: AbstractFeeder,
        watch: Watch,
        interrupt: Interruptible,
        kernel_threads: int,
        *,
        goes_on: bool = False,
    ) -> None:
        self._goes_on = goes_on and engine.sharing.talks and engine.controller.training
        self._interrupt, self._kernel_threads = interrupt, kernel_threads
        self._pool, self._engine = pool, engine
        self._feeder, self._watch = feeder, watch
        self._me = len(pool.members)
        self._there = [*range(self._me)]  # workers that live
        self._lost: list[int] = []  # copies of the model that have died with theirs
        if self._goes_on:
            engine.controller.keep_packed()
        self._stock = Stocking(engine, feeder, self._me)
        self._busy_s = [0.0] * self._me  # of a core, by worker
        self._place = pool.place()
        nodes = tuple(n.name for n in engine.wiring.nodes.values())
        self._names = Names(nodes, list(engine.parts))
        self._returned = Returned(engine)
        self._quiet = Quiet(self._me)
        self._ending = Ending(engine, self._there, self._quiet)
        self._done: set[int] = set()
        self._gave_up = self._short = False
        self._dismissed = False  # workers have been told to end the pass, and may leave
        self._cut: WorkerDiedError | None = None  # what a worker has said of others
        self._failure: BaseException | None = None
        self._transport: Transport | None = None
        self._flying = Flying(MOST_FLYING)
        self._handing = Handing(pool, engine, self._leave_if_abandoned)
        self._began = time.perf_counter()
        self._slow = True  # whether the data were, when they were last asked
        self._apart_s = 0.0  # until all had what they were handed
        self.seconds = 0.0

    @property
    def _link(self) -> Transport:
        """To the workers, as soon as they have been handed the pass."""
        assert self._transport is not None
        return self._transport

    def go(self) -> None:
        """Until the pass is over; signals are heard meanwhile."""
        self._hand_over()
        self._apart_s = time.perf_counter() - self._began
        self._engine.wiring.arena.news = []
        with self._link.together():
            self._admit()
        while not self._done.issuperset(self._there):
            self._leave_if_abandoned()
            self._hear()
            if self._failure is not None:
                raise self._failure
        for k in self._lost:
            self._engine.sharing.lose(k)
            self._engine.sharing.balance(k)
        traffic = self._link.monitor()
        self._tell_sent(self._me, zip(traffic.sent_messages, traffic.sent_bytes, strict=True))

    def _go_on_without(self, death: WorkerDiedError) -> None:
        """A worker has died: the copies of the model that live elsewhere go on, if that may be.

        Raises:
            WorkerDiedError: It may not be, or too few are left.
        """
        engine, worker = self._engine, death.worker
        if not self._goes_on or worker is None or self._gave_up or worker not in self._there:
            raise death
        lost = [k for k in engine.homes.copies_on(worker) if worker not in self._done]
        left = sum(engine.sharing.present()) - len({*self._lost, *lost})
        if left < max(1, engine.sharing.least):
            raise death
        self._part_from(
            {worker, *(w for k in lost for w in engine.homes.of_copy(k))} & {*self._there}
        )
        self._lost += lost
        unfinished = engine.lose(worker) if lost else 0
        self._ending.ask_anew()
        self._short = True
        self._watch.left(worker, death.how, unfinished, time.perf_counter() - self._began)
        self._end_if_ready()
        if not self._ending.begun:
            self._admit()

    def _end_if_ready(self) -> bool:
        """Somebody is missing: where he can be anew, this pass ends; the others go on until then.

        Also if nothing is in flight and nothing can be fed, as where what is left is for those who
        are missing.
        """
        controller = self._engine.controller
        if not self._pool.ready_to_renew():
            if controller.over:
                self._admit()
            if not controller.over:
                return False
        self._short = False
        self._feeder.pause()
        return True

    def _part_from(self, dead: Collection[int]) -> None:
        """Workers are gone: they are ended if they live, and nobody waits for what they sent."""
        for w in dead:
            self._pool.bury(w)
            self._link.forget(w)
            self._there.remove(w)
            self._quiet.busy(w)
            self._flying.told(w, 0)
        for w in dead:
            self.send_all(GONE, w)

    @property
    def may_begin_anew(self) -> bool:
        """Whether it has failed before any worker did anything, and copies are to go on."""
        return self._goes_on and self._handing.phase == "handing over"

    def _tell_sent(self, sender: int, sent: Iterable[tuple[int, int]]) -> None:
        for receiver, (messages, nbytes) in enumerate(sent):
            if messages:
                self._watch.carried(sender, receiver, messages, nbytes)

    def give_up(self, patience_s: float, error: BaseException, *, keeps: bool = False) -> bool:
        """After a failure: let the firings of this moment end and take the parts back.

        Args:
            patience_s: As long as that may take.
            error: The failure.
            keeps: If it is a death, parts are of no use, and the workers that live are.

        Returns:
            Whether all workers have answered; else they are to be killed.
        """
        if self._handing.phase == "apart":
            return True
        if self._handing.phase == "handing over":
            return False
        if isinstance(error, WorkerDiedError):
            return keeps and self._clear(error)
        self._gave_up = True
        until = time.monotonic() + patience_s
        try:
            self.send_all(Kind.ABANDON)
            while not self._done.issuperset(self._there) and time.monotonic() < until:
                self._hear()
        except (GeartrainError, KeyboardInterrupt) as another:
            error.add_note(f"also: {type(another).__name__}: {another}")
        if left := sorted(set(self._there) - self._done):
            told = ", ".join(map(str, left))
            log.warning("workers %s are still in a firing; the worker processes are ended", told)
        return not left

    def _clear(self, death: WorkerDiedError) -> bool:
        """After a death: have those that live drop what they hold; they serve the next pass.

        Returns:
            Whether they have; else they are to be killed.
        """
        self._gave_up = True
        until = time.monotonic() + DROPPED_S
        dead: WorkerDiedError | None = death
        try:
            while dead is not None or not self._done.issuperset(self._there):
                if dead is not None:
                    if dead.worker is None or dead.worker not in self._there:
                        return False
                    self._part_from([dead.worker])
                    self.send_all(Kind.DROP)
                    dead = None
                elif time.monotonic() > until:
                    return False
                else:
                    try:
                        self._hear()
                    except WorkerDiedError as another:
                        dead = another
        except (GeartrainError, KeyboardInterrupt) as another:
            death.add_note(f"also: {type(another).__name__}: {another}")
            return False
        return True

    def close(self) -> None:
        self._engine.wiring.arena.news = None
        if self._transport is not None:
            self._transport.close()
        self._pool.tidy(self._place)
        for member in self._pool.members:
            member.meanwhile = None
        self._handing.forget()

    def _hand_over(self) -> None:
        """Give the workers the pass, and begin it."""
        engine, pool = self._engine, self._pool
        tensors = tensors_written(engine)
        if pool.shares:
            pool.shared.move(tensors)
        self._transport = pool.transport(self._place)
        if (fd := pool.fileno()) is not None:
            self._transport.watch(fd)
        seed = int(torch.randint(1 << 62, ()))
        given = Pass(
            engine.made_of,
            engine.passing,
            engine.controller.trained,
            engine.memories(),
            self._place,
            self._kernel_threads,
            seed,
            tuple(self._returned.nodes),
            MOST_FLYING,
            self._stock.ahead,
        )
        self._handing.over(given, self._transport, lambda: self._feeder.look_ahead(engine))

    def _leave_if_abandoned(self) -> None:
        if self._interrupt.abandoned:
            self._interrupt.check()

    def _hear(self) -> None:
        """Take what has come, waiting for it for a moment."""
        found = self._link.poll(_WAIT_S)
        with self._link.together():
            self._take_all(found)

    def _take_all(self, found: Sequence[tuple[int, Record]]) -> None:
        """Take what has come, and answer it."""
        died = self._look(quiet=not found)
        settled = False
        for sender, record in found:
            if sender not in self._there:
                continue
            self._quiet.had(sender)
            settled |= self._take(sender, record)
        died, self._cut = died or self._cut, None
        if died is not None:
            self._go_on_without(died)
        if self._gave_up:
            return
        settled |= self._short and self._end_if_ready()
        if (settled or self._flying.limits) and not self._ending.begun:
            self._admit()
        elif self._quiet.may_be(self._there):
            self._ending.look(self)

    def _look(self, *, quiet: bool) -> WorkerDiedError | None:
        """Whether a worker has died without which the others may go on.

        What has come is taken first: nobody would say it again.

        Raises:
            WorkerDiedError: One has, and they may not.
        """
        try:
            if quiet:
                link = self._link
                self._require_all(self._me, link.lost(), link.unreached())
            if self._link.ready:
                self._pool.check()
            self._pool.look()
        except WorkerDiedError as death:
            if not self._goes_on:
                raise
            return death
        return None

    def _take(self, sender: int, record: Record) -> bool:
        """Whether there may be room for more."""
        if record.kind == Kind.REPORT:
            self._quiet.busy(sender)
            return self._take_report(sender, Report.of_record(record, self._names))
        if record.kind == Kind.IDLE:
            self._quiet.idle(sender, *record.arrays)
        elif record.kind == Kind.NAMED:
            self._take_named(sender, *record_to_named(record))
        return False

    def _take_report(self, w: int, report: Report) -> bool:
        watch, engine, began = self._watch, self._engine, self._began - self._pool.ahead_s(w)
        if report.firings:
            self._pool.reported(w, report.firings[-1][0])
        self._busy_s[w] = report.busy_s
        for firing, start, end in report.firings:
            watch.fired(w, firing, max(0.0, start - began), max(0.0, end - began))
        for step, at in report.steps:
            watch.stepped(w, step, at - began)
        if self._gave_up:
            return False
        for part, holds in report.held.items():
            engine.controller.hold(part, holds)
        if not (report.matters or report.out.rounds):
            return False
        self._count(report.out, tells=not self._stock.whole)  # workers with a stock know
        return report.matters

    def _count(self, out: Outbox, *, tells: bool = True) -> None:
        """Let the controller count answers, and tell of instances that have finished."""
        controller = self._engine.controller
        if controller.settle(out):
            slots = controller.finished_slots
            if self._stock.whole:
                self._stock.finished(controller.finished_copies)
            if tells:
                for w, told in self._engine.tell_finished():
                    self.send(w, finished_to_record(told, slots))
            self._watch.finished(self._engine, time.perf_counter() - self._began)

    def _next(self) -> Outbox | None:
        """What is to be fed: first what was lost with a worker."""
        again = self._engine.controller.admit_again()
        if again is not None:
            return again
        if self._slow or not self._feeder.waits_for_nobody:
            self._link.flush()  # workers go on by it while the data are waited for
        if self._stock.whole:
            self._stock.size(sum(self._busy_s), len(self._there))
        began = time.perf_counter()
        found = self._feeder.admit(self._engine)
        # Who has nothing yet gets its first lot at once, and not with those of all.
        self._slow = self._stock.gives_a_first() or time.perf_counter() - began > _SLOW_S
        return found

    def _admit(self) -> None:
        """Fill up; when nothing is left, have the workers give back what they have."""
        engine = self._engine
        while self._has_room() and (out := self._next()) is not None:
            if self._stock.whole or self._stock.ahead:
                self._stock_up(out)
                continue
            for told in engine.wiring.arena.take_news():
                record = admitted_to_record(told)
                for w in self._there:
                    self.send(w, record)
            for delivery in out.deliveries:
                record = to_record(delivery.node, delivery.port, delivery.batch)
                self.send(engine.homes.of_node[delivery.node], record)
            out.deliveries.clear()
            self._count(out)
        if self._feeder.exhausted and engine.controller.over:
            self.seconds = time.perf_counter() - self._began
            self._ending.begin(self)

    def _has_room(self) -> bool:
        """Whether what is under way allows for more."""
        return self._flying.has_room(self._link.flying_bytes, self._engine.controller.active)

    def send_all(self, word: int, *ints: int) -> None:
        """Say a word to all workers that live."""
        self._dismissed |= word in (Kind.END, Kind.ABANDON, Kind.DROP)
        for w in self._there:
            self.send(w, Record(word, ints))

    def _stock_up(self, out: Outbox) -> None:
        """Give workers instances ahead of time; they begin them."""
        deliveries, out.deliveries = out.deliveries, []
        whole = self._stock.whole
        if whole:
            self._count(out)
        for w, record in self._stock.lots(deliveries, self._there):
            self.send(w, record)
        if not whole:  # it tells of those that have finished as they were admitted
            self._count(out)

    def send(self, to: int, record: Record) -> None:
        """Send a record to a worker."""
        self._quiet.sent(to)
        self._link.send(to, record)

    def _take_named(self, w: int, what: str, document: Any, tensors: Mapping[str, Tensor]) -> None:
        match what:
            case "pulse":
                self._returned.pulse(document)
            case "flying":
                self._flying.told(w, document)
            case "story":
                self._ending.told_story(w, document)
            case "resting" | "released":
                self._ending.told_of_letters(self, w, what, *document)
            case "lost":
                self._take_lost(w, document[0], dict(document[1]))
            case "failed":
                self._fail(error_of_json(document, w))
            case "done":
                self._done.add(w)
                self._link.confirm(w)  # it leaves when it knows that nothing of it is lost
                ahead_s = self._pool.ahead_s(w) - self._began
                waited_s = waited_of(
                    document, ahead_s=ahead_s, apart_s=self._apart_s, over_s=self.seconds
                )
                self._watch.waited(w, waited_s)
                self._tell_sent(w, document["sent"])
            case _:
                try:
                    self._returned.take(what, document, tensors)
                except Exception as error:  # noqa: BLE001 - raised when the others have been heard
                    self._fail(error)

    def _take_lost(self, w: int, lost: Sequence[int], unreached: Mapping[int, str]) -> None:
        """A worker says whom it has no connection with any more."""
        try:
            self._require_all(w, lost, unreached)
        except WorkerDiedError as death:
            if not self._goes_on:
                raise
            self._cut = death

    def _require_all(self, who: int, lost: Sequence[int], unreached: Mapping[int, str]) -> None:
        """Whether a process has connections with all others that are not over with the pass.

        Raises:
            WorkerDiedError: One is missing: of it, if it has died, or of the link between two that
                live.
            GeartrainError: One could not be made.
        """
        here = {*self._there, self._me}
        if self._dismissed:  # who is done may leave; of who is not, something is lost
            here, unreached = here - self._done if who == self._me else set(), {}
        lost = [k for k in lost if k in here]
        unreached = {k: at for k, at in unreached.items() if k in here}
        if lost or unreached:
            self._pool.check(TOLD_S)
            raise_missing(self._pool, who, lost, unreached, reached=self._place[1] > 1)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        else:
            self._failure.add_note(f"also, in another worker: {type(error).__name__}: {error}")
