"""One thread, a virtual clock: real mathematics, seeded order, machines that we do not own.

    heap of (time, number, event)      deliver ─► worker free? fire, busy until time + cost
                                       done    ─► effects travel: link latency, bandwidth, jitter

The same seed gives the same order, so the same weights to the last bit.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, final

from geartrain.bounds import MOST_WORKERS, WORKERS, require_at_most, require_number, require_whole
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Finished, Firing
from geartrain.engine.router import Delivery, Outbox
from geartrain.errors import StuckError, WorkerDiedError
from geartrain.kinds import require_each, require_kind
from geartrain.runtime.base import AbstractFeeder, AbstractRuntime, Watch
from geartrain.runtime.costs import CostModel, Costs
from geartrain.runtime.events import Die, Event, Join, Leave, Pause, require_event
from geartrain.runtime.interrupt import Interruptible
from geartrain.runtime.links import Links
from geartrain.sharing.letters import SHARE, Letter
from geartrain.sharing.sharing import AbstractSharingState

_ROUNDING: Final = 1e-12
"""Of seconds, which are added up pass by pass."""


@final
class Simulated(AbstractRuntime):
    """Virtual workers in one thread.

    Args:
        workers: How many.
        seed: Of everything that is left to chance.
        costs: What firings and links take: ``Costs``, or what has all that it has.
        speeds: Speed of each worker; costs are divided by it. None: all 1.
        jitter: Costs and latencies are multiplied by a factor drawn from 1 ± jitter.
        events: Workers that pause, leave, die and join, where they have copies of the model. When
            one goes or comes, what is in flight finishes, and all are linked anew.
        parent: Where the program is that counts answers and admits instances: the number of the
            worker whose host it shares, or that of workers, for a host of its own. What it is told
            and what it sends goes by links. None: it is everywhere, and nothing passes.
    """

    name = "simulated"
    virtual = True

    def __init__(
        self,
        workers: int = 1,
        seed: int = 0,
        costs: CostModel | None = None,
        speeds: Sequence[float] | None = None,
        jitter: float = 0.0,
        events: Sequence[Event] = (),
        parent: int | None = None,
    ) -> None:
        require_whole(f"Simulated(workers={workers!r})", workers, 1)
        require_at_most(f"Simulated(workers={workers})", workers, MOST_WORKERS, WORKERS)
        require_whole(f"Simulated(seed={seed!r})", seed, 0)
        what = f"Simulated(jitter={jitter!r})"
        require_number(what, jitter, "0 <= jitter < 1", least=0, below=1)
        wanted = "what costs: Costs(firing_s=...), or None"
        require_kind("Simulated", CostModel | None, wanted, costs=costs)
        wanted = "a list of Pause(...), Leave(...), Join(...) or Die(...)"
        require_each("Simulated", Pause | Leave | Join | Die, wanted, events=events)
        if speeds is not None:
            require_each("Simulated", object, f"{workers} positive numbers", speeds=speeds)
            what, wanted = f"Simulated(speeds={list(speeds)})", f"{workers} positive numbers"
            if len(speeds) != workers:
                raise ValueError(f"{what}: give {wanted}")
            for speed in speeds:
                require_number(what, speed, wanted, above=0)
        for event in events:
            require_event(event, workers)
        if parent is not None:
            what = f"Simulated(parent={parent!r})"
            wanted = f"a worker, {workers} for a host of its own, or None"
            require_whole(what, parent, 0, wanted, most=workers)
        self.workers, self.seed, self.jitter, self.parent = workers, seed, jitter, parent
        self.events = tuple(sorted(events, key=lambda e: e.at_s))
        self.most_deaths = sum(isinstance(event, Die) for event in events)
        self.costs: CostModel = costs or Costs()
        self.speeds = tuple(speeds or (1.0,) * workers)

    def run(self, engine: Engine, feeder: AbstractFeeder, watch: Watch) -> float:
        with Interruptible(feeder) as interrupt:
            engine.sharing.live_apart(self.costs.collective == "star")
            try:
                return _Clockwork(self, engine, feeder, watch).run(interrupt)
            finally:
                engine.sharing.live_apart(False)


@final
class _Clockwork:
    """One pass over the data."""

    def __init__(
        self, runtime: Simulated, engine: Engine, feeder: AbstractFeeder, watch: Watch
    ) -> None:
        self._runtime, self._engine, self._feeder, self._watch = runtime, engine, feeder, watch
        self._random = random.Random(runtime.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now = 0.0
        self._last = 0.0  # when something was last done: a pause may end later
        self._busy = [False] * runtime.workers
        self._worked_s = [0.0] * runtime.workers
        self._apart, self._parent = runtime.parent is not None, runtime.workers
        there = {} if runtime.parent is None else {self._parent: runtime.parent}
        self._links = Links(runtime.costs, self._vary, there)
        self._paused_until = [0.0] * runtime.workers
        self._coming: deque[Event] = deque()

    def run(self, interrupt: Interruptible) -> float:
        self._plan_events()
        self._sharing.regroup()
        if any(isinstance(event, Die) for event in self._coming):
            self._engine.controller.keep_packed()
        self._admit()
        while not interrupt.abandoned:
            if self._event_is_next():
                self._happen(self._coming.popleft())
            elif self._heap:
                self._now, _, event = heapq.heappop(self._heap)
                event()
            elif not self._release():
                break
        if not interrupt.abandoned:
            if self._engine.controller.active:
                raise StuckError(self._engine.story())
            if not self._over:
                least = self._sharing.least
                few = f"fewer than least={least} copies" if least > 1 else "no copy"
                raise StuckError(f"{few} of the model take part any more, and data are left")
        self._tell()
        return self._last

    @property
    def _sharing(self) -> AbstractSharingState:
        return self._engine.sharing

    def _tell(self) -> None:
        """Who has waited, and what went over links."""
        for w, seconds in enumerate(self._worked_s):
            self._watch.waited(w, max(0.0, self._last - seconds))
        for (w, to), (messages, nbytes) in sorted(self._links.carried.items()):
            self._watch.carried(w, to, messages, nbytes)

    def _event_is_next(self) -> bool:
        if not self._coming:
            return False
        if not self._heap:
            return not self._over
        return self._coming[0].at_s - self._engine.began_s <= self._heap[0][0]

    @property
    def _over(self) -> bool:
        """Whether nothing is left to admit."""
        return self._feeder.exhausted and not self._engine.controller.again

    def _plan_events(self) -> None:
        """What has happened in earlier segments is so; the rest will come."""
        if not (self._engine.sharing.talks and self._engine.controller.training):
            return
        began = self._engine.began_s * (1 + _ROUNDING)
        here: dict[int, bool] = {}
        for event in self._runtime.events:
            if not isinstance(event, Pause) and event.at_s <= began:
                here[self._first_of(event.worker)] = isinstance(event, Join)
            elif not isinstance(event, Pause):
                here.setdefault(self._first_of(event.worker), not isinstance(event, Join))
        for worker, is_here in here.items():
            self._set_present(worker, is_here)
        for event in self._runtime.events:
            over = event.at_s + event.for_s if isinstance(event, Pause) else event.at_s
            if isinstance(event, Pause) and event.at_s <= began < over:
                self._pause(event.worker, over - began)
            elif event.at_s > began:
                self._coming.append(event)

    def _first_of(self, w: int) -> int:
        """The first of the workers that a copy has to itself, which come and go together."""
        copies = self._engine.homes.copies_on(w)
        return self._engine.homes.of_copy(copies[0])[0] if copies else w

    def _set_present(self, w: int, present: bool) -> bool:
        """Whether copies take part or do not that did not or did."""
        before = self._sharing.present()
        self._engine.set_present(w, present)
        changed = self._sharing.present() != before
        if changed and present:
            self._watch.joined(w, self._engine.homes.copies_on(w), self._now)
        return changed

    def _happen(self, event: Event) -> None:
        self._now = max(self._now, event.at_s - self._engine.began_s)
        if isinstance(event, Pause):
            self._pause(event.worker, self._now + event.for_s)
            return
        self._last = max(self._last, self._now)  # or it would come again in the next pass
        if isinstance(event, Die):
            changed = self._die(event.worker)
        elif isinstance(event, Join) and event.worker in self._engine.gone:
            changed = True  # it is another one, and begins with a pass
        else:
            changed = self._set_present(event.worker, isinstance(event, Join))
        if changed:
            self._feeder.pause()
        self._after_exchange()
        self._admit()

    def _die(self, w: int) -> bool:
        """What a worker had is gone; whether it had copies that took part."""
        engine, sharing = self._engine, self._sharing
        copies = [k for k in engine.homes.copies_on(w) if sharing.present()[k]]
        if not copies:
            return False
        unfinished = engine.lose(w)
        for k in copies:
            sharing.lose(k)
        how = f"worker {w} has died"
        if sum(sharing.present()) < sharing.least:
            raise WorkerDiedError(
                f"{how}, and fewer than least={sharing.least} copies of the model are left",
                *(w, how, self._now),
            )
        self._watch.left(w, how, unfinished, self._now)
        return True

    def _pause(self, w: int, until: float) -> None:
        self._paused_until[w] = max(self._paused_until[w], until)
        self._at(until, lambda: self._turn(w))

    def _release(self) -> bool:
        """Nothing moves: let exchanges that wait for letters go on without. Whether any did."""
        if not self._engine.release():
            return False
        self._after_exchange()
        return True

    def _after_exchange(self) -> None:
        """Carry what exchanges have sent and done outside of a firing."""
        for w, worker in enumerate(self._engine.workers):
            for step in worker.take_steps():
                self._watch.stepped(w, step, self._now)
            self._send_letters(w, worker.take_letters())
            self._turn(w)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, event))

    def _vary(self, seconds: float) -> float:
        jitter = self._runtime.jitter
        return seconds * self._random.uniform(1 - jitter, 1 + jitter) if jitter else seconds

    def _deliver(self, w: int, delivery: Delivery) -> None:
        if w not in self._engine.gone:
            self._engine.workers[w].deliver(delivery)
            self._turn(w)

    def _turn(self, w: int) -> None:
        """Let a worker fire if it is free and has something to do."""
        worker = self._engine.workers[w]
        if (
            w in self._engine.gone
            or self._busy[w]
            or self._now < self._paused_until[w]
            or not worker.ready
        ):
            return
        start = self._now
        firing = worker.fire()
        cost = self._vary(self._runtime.costs.firing(firing)) / self._runtime.speeds[w]
        self._busy[w] = True
        self._at(start + cost, lambda: self._done(w, firing, start))

    def _done(self, w: int, firing: Firing, start: float) -> None:
        if w in self._engine.gone:  # it has died meanwhile
            for letter in firing.letters:
                self._sharing.mislay(letter)
            return
        self._last = self._now
        self._worked_s[w] += self._now - start
        self._watch.fired(w, firing, start, self._now)
        for step in firing.steps:
            self._watch.stepped(w, step, self._now)
        for part, holds in firing.held.items():
            self._engine.controller.hold(part, holds)
        self._report(w, firing.outbox)
        for to, delivery in firing.elsewhere:
            self._send(w, to, delivery)
        self._send_letters(w, firing.letters)
        self._busy[w] = False
        self._turn(w)

    def _send(self, w: int, to: int, delivery: Delivery) -> None:
        """A link keeps order: a batch leaves, and arrives, after those that were sent before it."""
        arrives = self._links.batch(w, to, self._runtime.costs.nbytes(delivery), self._now)
        self._at(arrives, lambda: self._deliver(to, delivery))

    def _send_letters(self, w: int, letters: Sequence[Letter]) -> None:
        for letter in letters:
            to = self._engine.homes.of_letter(letter)
            if to != w or letter.collective:
                self._links.carry((w, to), self._links.nbytes(letter))
            arrives = self._links.letter(w, to, letter, self._now)
            self._at(arrives, lambda to=to, x=letter: self._hand(to, x))  # type: ignore[misc]

    def _hand(self, w: int, letter: Letter) -> None:
        self._last = self._now
        self._engine.workers[w].receive(letter)
        if letter.kind == SHARE:  # the last of them completes a collective
            self._after_exchange()
        self._turn(w)

    def _report(self, w: int, out: Outbox) -> None:
        """Have the controller know what a firing has answered."""
        if self._apart and (out.answered or out.spawned or out.rounds):
            arrives = self._links.batch(w, self._parent, 0, self._now)
            self._at(arrives, lambda: self._heard_of(w, out))
        elif not self._apart:
            self._settle(out)

    def _heard_of(self, w: int, out: Outbox) -> None:
        if w not in self._engine.gone:  # else these instances are fed again
            self._last = self._now  # it is over when the program knows
            self._settle(out)

    def _settle(self, out: Outbox) -> None:
        self._count(out)
        self._admit()

    def _count(self, out: Outbox) -> None:
        """Let the controller count a worker's answers, and tell of instances that have finished."""
        engine = self._engine
        if not engine.controller.settle(out):
            return
        news = engine.tell_finished()
        if self._apart:
            for w, told in news:
                arrives = self._links.batch(self._parent, w, 0, self._now)
                self._at(arrives, lambda w=w, told=told: self._told(w, told))  # type: ignore[misc]
            self._watch.finished(engine, self._now)
            return
        for w, told in news:
            self._hear(w, told)
        self._watch.finished(engine, self._now)
        for w, _ in news:
            self._turn(w)  # what has waited for these may go on

    def _told(self, w: int, told: Finished) -> None:
        if w not in self._engine.gone:
            self._hear(w, told)
            self._turn(w)

    def _hear(self, w: int, told: Finished) -> None:
        """A worker hears of instances that have finished."""
        worker = self._engine.workers[w]
        for step in (*worker.finished(told), *worker.take_steps()):
            self._watch.stepped(w, step, self._now)
        self._send_letters(w, worker.take_letters())

    def _next(self) -> Outbox | None:
        """What is to be fed: first what was lost with a worker."""
        if sum(self._sharing.present()) < self._sharing.least:
            return None
        again = self._engine.controller.admit_again()
        return self._feeder.admit(self._engine) if again is None else again

    def _admit(self) -> None:
        while (out := self._next()) is not None:
            for delivery in out.deliveries:
                w, arrives = self._engine.homes.of_node[delivery.node], self._now
                if self._apart:
                    nbytes = self._runtime.costs.nbytes(delivery)
                    arrives = self._links.batch(self._parent, w, nbytes, self._now)
                self._at(arrives, lambda w=w, d=delivery: self._deliver(w, d))  # type: ignore[misc]
            self._count(out)
