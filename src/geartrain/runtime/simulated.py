"""One thread, a virtual clock: real mathematics, seeded order, machines that we do not own.

    heap of (time, number, event)      deliver ─► worker free? fire, busy until time + cost
                                       done    ─► effects travel: link latency, bandwidth, jitter

The same seed gives the same order, so the same weights to the last bit.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from geartrain.engine.engine import Engine
from geartrain.engine.router import Delivery, Outbox
from geartrain.engine.worker import Firing
from geartrain.errors import StuckError
from geartrain.ir.message import Backward
from geartrain.runtime.base import AbstractRuntime, Feeder, Watch
from geartrain.runtime.interrupt import Interruptible


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What things take, in virtual seconds.

    Args:
        firing_s: Every firing.
        row_s: Every row of it.
        nodes: Node name to its own (seconds a firing, seconds a row).
        backward: A backward costs so many forwards.
        latency_s: A batch between two workers.
        bytes_per_s: Bandwidth of a link between two workers; None: infinite.
    """

    firing_s: float = 100e-6
    row_s: float = 1e-6
    nodes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    backward: float = 2.0
    latency_s: float = 0.0
    bytes_per_s: float | None = None

    def firing(self, firing: Firing) -> float:
        fixed, per_row = self.nodes.get(firing.node, (self.firing_s, self.row_s))
        passes = (1.0 if firing.forward else 0.0) + (
            self.backward if firing.both or not firing.forward else 0.0
        )
        return fixed + per_row * firing.rows * passes

    def travel(self, delivery: Delivery) -> float:
        if self.bytes_per_s is None:
            return self.latency_s
        return self.latency_s + batch_bytes(delivery) / self.bytes_per_s


def batch_bytes(delivery: Delivery) -> int:
    """Bytes of a batch on a wire: payload or gradient, state, addresses."""
    batch = delivery.batch
    columns = (batch.gradient or ()) if isinstance(batch, Backward) else batch.payload
    n = len(batch) if batch.lengths is None else int(batch.lengths.sum())
    each = sum(c[:1].nelement() * c.element_size() for c in columns if c is not None)
    state = 0 if isinstance(batch, Backward) else batch.state.nbytes
    return n * each + state + 8 * len(batch)


@final
class Simulated(AbstractRuntime):
    """Virtual workers in one thread.

    Args:
        workers: How many.
        seed: Of everything that is left to chance.
        costs: What firings and links take.
        speeds: Speed of each worker; costs are divided by it. None: all 1.
        jitter: Costs and latencies are multiplied by a factor drawn from 1 ± jitter.
    """

    name = "simulated"
    virtual = True

    def __init__(
        self,
        workers: int = 1,
        seed: int = 0,
        costs: Costs | None = None,
        speeds: Sequence[float] | None = None,
        jitter: float = 0.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"Simulated(workers={workers}): give 1 or more")
        if not 0 <= jitter < 1:
            raise ValueError(f"Simulated(jitter={jitter}): give 0 <= jitter < 1")
        if speeds is not None and (len(speeds) != workers or min(speeds) <= 0):
            raise ValueError(f"Simulated(speeds={list(speeds)}): give {workers} positive numbers")
        self.workers, self.seed, self.jitter = workers, seed, jitter
        self.costs = costs or Costs()
        self.speeds = tuple(speeds or (1.0,) * workers)

    def run(self, engine: Engine, feeder: Feeder, watch: Watch) -> float:
        with Interruptible(feeder) as interrupt:
            return _Clockwork(self, engine, feeder, watch).run(interrupt)


@final
class _Clockwork:
    """One pass over the data."""

    def __init__(self, runtime: Simulated, engine: Engine, feeder: Feeder, watch: Watch) -> None:
        self._runtime, self._engine, self._feeder, self._watch = runtime, engine, feeder, watch
        self._random = random.Random(runtime.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now = 0.0
        self._busy = [False] * runtime.workers
        self._link_free: dict[tuple[int, int], float] = {}

    def run(self, interrupt: Interruptible) -> float:
        self._admit()
        while self._heap and not interrupt.abandoned:
            self._now, _, event = heapq.heappop(self._heap)
            event()
        if self._engine.controller.active and not interrupt.abandoned:
            raise StuckError(self._engine.story())
        return self._now

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, event))

    def _vary(self, seconds: float) -> float:
        jitter = self._runtime.jitter
        return seconds * self._random.uniform(1 - jitter, 1 + jitter) if jitter else seconds

    def _deliver(self, w: int, delivery: Delivery) -> None:
        self._engine.workers[w].deliver(delivery)
        self._turn(w)

    def _turn(self, w: int) -> None:
        """Let a worker fire if it is free and has something to do."""
        worker = self._engine.workers[w]
        if self._busy[w] or not worker.ready:
            return
        start = self._now
        firing = worker.fire()
        cost = self._vary(self._runtime.costs.firing(firing)) / self._runtime.speeds[w]
        self._busy[w] = True
        self._at(start + cost, lambda: self._done(w, firing, start))

    def _done(self, w: int, firing: Firing, start: float) -> None:
        self._watch.fired(w, firing, start, self._now)
        for step in firing.steps:
            self._watch.stepped(w, step, self._now)
        for part, holds in firing.held.items():
            self._engine.controller.hold(part, holds)
        self._settle(firing.outbox)
        for to, delivery in firing.elsewhere:
            self._send(w, to, delivery)
        self._busy[w] = False
        self._turn(w)

    def _send(self, w: int, to: int, delivery: Delivery) -> None:
        """A link keeps order: a batch arrives after those that were sent before it."""
        link = (w, to)
        arrives = self._now + self._vary(self._runtime.costs.travel(delivery))
        arrives = max(arrives, self._link_free.get(link, 0.0))
        self._link_free[link] = arrives
        self._at(arrives, lambda: self._deliver(to, delivery))

    def _settle(self, out: Outbox) -> None:
        self._count(out)
        self._admit()

    def _count(self, out: Outbox) -> None:
        """Let the controller count answers, and tell everybody of instances that have finished."""
        engine = self._engine
        if finished := engine.controller.settle(out):
            for worker in engine.workers:
                for step in worker.finished(finished, engine.controller.trained):
                    self._watch.stepped(worker.index, step, self._now)
            self._watch.finished(engine, self._now)

    def _admit(self) -> None:
        while (out := self._feeder.admit(self._engine)) is not None:
            for delivery in out.deliveries:
                w = self._engine.home[delivery.node]
                self._at(self._now, lambda w=w, d=delivery: self._deliver(w, d))  # type: ignore[misc]
            self._count(out)
