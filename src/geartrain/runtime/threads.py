"""Workers as threads: batches pass by reference, nothing to start, nothing to clean up.

torch releases the interpreter lock inside its kernels, so workers compute at the same time. Whoever
brings an answer runs the controller's step under its lock, and admits what there is room for; the
calling thread only waits, and hears of signals.

The user's data may block. So the lock is not held while they are asked, and after a signal a thread
that they do not answer is left behind: another one does the work of its worker.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from geartrain.device import recorded
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Finished, Firing
from geartrain.engine.router import Delivery, Outbox
from geartrain.errors import StuckError
from geartrain.native.heap import heap
from geartrain.runtime.base import AbstractFeeder, AbstractRuntime, Watch, log, threads_each
from geartrain.runtime.interrupt import Interruptible
from geartrain.runtime.kernel_threads import cores_left_to_workers
from geartrain.sharing.letters import Letter


@final
class Threads(AbstractRuntime):
    """One thread per worker.

    Args:
        workers: How many.
        kernel_threads: Threads inside torch kernels, per worker; None shares out torch's
            own number (``torch.set_num_threads``, ``OMP_NUM_THREADS``).
        patience_s: How long a run that failed waits for the firings of that moment to end, and
            one that was interrupted twice, which waits no longer than two seconds.
    """

    name = "threads"
    kernel_threads: int
    lock = staticmethod(threading.Lock)

    def __init__(
        self, workers: int = 1, kernel_threads: int | None = None, patience_s: float = 60.0
    ) -> None:
        self.kernel_threads = threads_each("Threads", workers, kernel_threads, patience_s)
        self.workers = workers
        self.patience_s = patience_s

    def run(self, engine: Engine, feeder: AbstractFeeder, watch: Watch) -> float:
        run = _Run(engine, feeder, watch, self.kernel_threads)
        switch_s = sys.getswitchinterval()
        with Interruptible(feeder) as interrupt, cores_left_to_workers():
            try:
                if self.workers > 1:
                    sys.setswitchinterval(min(switch_s, _SWITCH_S))
                run.start()
                run.wait(interrupt)
            finally:
                run.stop()
                run.join(self.patience_s, interrupt)
                run.tell_waiting()
                sys.setswitchinterval(switch_s)
            run.raise_failure()  # inside, so that an interrupt does not hide it
        return run.seconds


_SWITCH_S = 2e-4
"""How long a worker may keep the interpreter while another wants it: about one firing's Python.

Python's own 5 ms make a worker that is back from a kernel wait; a few microseconds make workers
take it from each other. 15 % more sentiment trees a second with two workers than at 5 ms.
"""


_GRACE_S = 0.5
"""How long data that were asked before a signal may take to answer after it."""

_IMPATIENCE_S = 2.0
"""How long a run that was interrupted twice, or that failed, waits where it could wait for ever."""


_GOING_S = 0.05
"""How long a thread that has ended may take to go."""


class _LeftBehind(BaseException):
    """Ends a thread whose data have answered when nobody waited for them any more."""


@final
class _Outside:
    """Around the user's code that gives instances: others may have the controller meanwhile.

    Args:
        control: Held once by whoever enters, and again by who leaves.

    Attributes:
        thread: That is in there now, or None.
        since_s: Since when, by ``time.monotonic``.
    """

    def __init__(self, control: threading.RLock) -> None:
        self._control = control
        self.thread: threading.Thread | None = None
        self.since_s = 0.0

    def __enter__(self) -> None:
        self.thread, self.since_s = threading.current_thread(), time.monotonic()
        self._control.release()

    def __exit__(self, *raised: object) -> None:
        self._control.acquire()
        if self.thread is not threading.current_thread():
            raise _LeftBehind
        self.thread = None

    def forget(self, thread: threading.Thread) -> None:
        """What the data may still give to this thread is of no use any more."""
        if self._control.acquire(timeout=_GRACE_S):
            if self.thread is thread:
                self.thread = None
            self._control.release()


@final
class Going:
    """Threads that Python has done with, and the system perhaps not yet.

    malloc has memory for each thread, and keeps it for the next one when the thread has gone. Who
    begins before that gets memory of its own, and the process has that of both from then on.

    Args:
        tasks: A folder with an entry for each thread of the process.
    """

    def __init__(self, tasks: str = "/proc/self/task") -> None:
        self._tasks = tasks
        self._ended: list[int] = []

    def add(self, thread: threading.Thread) -> None:
        """One that has ended."""
        if thread.native_id is not None:
            self._ended.append(thread.native_id)

    def wait(self) -> None:
        """Until they have gone, for a moment at most."""
        until = time.monotonic() + _GOING_S
        while self._ended:
            if not os.path.exists(f"{self._tasks}/{self._ended[-1]}"):
                self._ended.pop()
            elif time.monotonic() < until:
                time.sleep(5e-5)
            else:
                self._ended.clear()


going = Going()
"""Those of the process."""


@final
class _Run:
    """One pass over the data."""

    def __init__(
        self, engine: Engine, feeder: AbstractFeeder, watch: Watch, kernel_threads: int
    ) -> None:
        self._engine, self._feeder, self._watch = engine, feeder, watch
        self._kernel_threads = kernel_threads
        n = len(engine.workers)
        self._lock = threading.Lock()  # inboxes, idleness, the end
        self._control = threading.RLock()  # the controller, the feeder, the watch
        self._inboxes: list[deque[Delivery | Finished | Letter]] = [deque() for _ in range(n)]
        self._bells = [threading.Condition(self._lock) for _ in range(n)]
        self._idle = 0
        self._waited_s = [0.0] * n  # each is written to by its worker alone
        self._generation = 0  # times that all were idle and were woken
        self._over = threading.Event()
        self._failures: list[BaseException] = []
        self._outside = _Outside(self._control)
        parts = {part.device for part in engine.parts.values()}
        self._gpus = [device for device in parts if device.type == "cuda"]
        self._threads: dict[threading.Thread, int] = {}  # to the worker of each
        self._began = time.perf_counter()
        self.seconds = 0.0

    def start(self) -> None:
        """Have the workers work; the first of them admits the first instances."""
        self._feeder.surround(self._outside)
        going.wait()
        for w in range(len(self._inboxes)):
            self._work_in_a_thread(w, admits=w == 0)

    def wait(self, interrupt: Interruptible) -> None:
        """Until the pass is over or abandoned; wakes now and then so that signals are seen."""
        while not self._over.wait(0.2) and not interrupt.abandoned:
            if interrupt.asked:
                self._give_up_data(interrupt)

    def join(self, patience_s: float, interrupt: Interruptible) -> None:
        """Wait for the threads, which have been told to stop; leave behind those that do not."""
        began = time.monotonic()
        for thread, w in self._threads.items():
            while thread.is_alive():
                asks = thread is self._outside.thread
                least = asks or interrupt.abandoned
                patience = min(patience_s, _IMPATIENCE_S) if least else patience_s
                left = began + patience - time.monotonic()
                if left <= 0:
                    what = "waits for the data" if asks else "is still in a firing"
                    log.warning("worker %d %s; its thread %r is left behind", w, what, thread.name)
                    self._outside.forget(thread)
                    break
                thread.join(min(left, 0.2))
            else:
                going.add(thread)

    def tell_waiting(self) -> None:
        """Say how long workers had nothing to do."""
        for w, seconds in enumerate(self._waited_s):
            self._watch.waited(w, seconds)

    def stop(self) -> None:
        with self._lock:
            self._over.set()
            for bell in self._bells:
                bell.notify_all()

    def raise_failure(self) -> None:
        if not self._failures:
            return
        first, *rest = self._failures
        for other in rest:
            first.add_note(f"also, in another worker: {type(other).__name__}: {other}")
        raise first

    def _work_in_a_thread(self, w: int, *, admits: bool) -> None:
        thread = threading.Thread(
            target=self._work, args=(w, admits), name=f"geartrain-{w}", daemon=True
        )
        thread.start()
        self._threads[thread] = w

    def _give_up_data(self, interrupt: Interruptible) -> None:
        """After a signal: have another thread do the work of the one whose data do not come."""
        assert interrupt.asked_s is not None
        if not self._control.acquire(timeout=0.2):
            return  # an instrument has it, perhaps for long; signals must be seen meanwhile
        try:
            thread = self._outside.thread
            waited_s = time.monotonic() - max(self._outside.since_s, interrupt.asked_s)
            if thread is None or waited_s < _GRACE_S:
                return
            self._outside.thread = None
            log.warning(
                "the data have not answered since the signal; their thread %r is left behind",
                thread.name,
            )
            interrupt.left = "; the data did not answer, and their thread is left behind"
            self._work_in_a_thread(self._threads.pop(thread), admits=True)
        finally:
            self._control.release()

    def _work(self, w: int, admits: bool) -> None:
        """A worker's life."""
        worker = self._engine.workers[w]
        try:
            self._enter()
            if admits:
                self._admit()
            while True:
                for item in self._receive(w, worker.ready):
                    if isinstance(item, Delivery):
                        worker.deliver(item)
                    elif isinstance(item, Letter):
                        worker.receive(item)
                    else:
                        self._say_finished(w, item)
                if self._over.is_set():
                    return
                if worker.ready:
                    start = self._now()
                    firing = worker.fire()
                    self._carry_out(w, firing, start)
        except _LeftBehind:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            self._failures.append(error)
            self.stop()
        finally:
            heap.give_back_tried()

    def _enter(self) -> None:
        """A worker's thread begins."""
        torch.set_num_threads(self._kernel_threads)
        for gpu in self._gpus:  # cuBLAS warns of a thread that has asked the device for nothing yet
            recorded(gpu)

    def _say_finished(self, w: int, item: Finished) -> None:
        worker = self._engine.workers[w]
        steps = worker.finished(item)
        letters = worker.take_letters()
        steps += worker.take_steps()
        if steps:
            with self._control:
                for step in steps:
                    self._watch.stepped(w, step, self._now())
        self._post_letters(letters)

    def _post_letters(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._post(self._engine.homes.of_letter(letter), letter)

    def _rest(self) -> None:
        """All workers are idle and nothing is under way; called under the lock.

        Where copies talk that is how a pass ends: when all letters are in, and nobody holds
        anything back for those that do not come. Nobody else is in the controller or the watch, as
        that needs a worker.
        """
        engine = self._engine
        released = engine.release()
        for w, worker in enumerate(engine.workers):
            for step in worker.take_steps():
                self._watch.stepped(w, step, self._now())
            for letter in worker.take_letters():
                to = engine.homes.of_letter(letter)
                self._inboxes[to].append(letter)
        for bell in self._bells:
            bell.notify()
        if released:
            self._generation += 1
            self._idle = 0  # each of them looks again whether it can fire
        elif self._feeder.exhausted and not engine.controller.active:
            self.seconds = self._now()
            self._over.set()
        else:
            raise StuckError(engine.story())

    def _receive(self, w: int, busy: bool) -> list[Delivery | Finished | Letter]:
        """What has come for a worker; waits if it has nothing else to do."""
        inbox = self._inboxes[w]
        if busy and not inbox:
            return []
        with self._lock:
            if not busy and not inbox:
                self._idle += 1
                seen = self._generation
                while not inbox and not self._over.is_set() and seen == self._generation:
                    if self._idle == len(self._inboxes) and not any(self._inboxes):
                        self._rest()
                    else:
                        began = self._now()
                        self._bells[w].wait(1.0)
                        # To be woken takes a while, in which the pass may have been over.
                        self._waited_s[w] += max(0.0, (self.seconds or self._now()) - began)
                self._idle -= seen == self._generation
            items = list(inbox)
            inbox.clear()
        return items

    def _carry_out(self, w: int, firing: Firing, start: float) -> None:
        out = firing.outbox
        with self._control:
            now = self._now()
            self._watch.fired(w, firing, start, now)
            for step in firing.steps:
                self._watch.stepped(w, step, now)
            for part, holds in firing.held.items():
                self._engine.controller.hold(part, holds)
            if settles := bool(out.answered or out.spawned or firing.held):
                self._count(out)
            elif out.rounds:
                self._engine.controller.rounds.add(out.rounds)
        for worker, delivery in firing.elsewhere:
            self._post(worker, delivery)
        self._post_letters(firing.letters)
        if settles:  # last, as the data may keep this thread
            self._admit()

    def _count(self, out: Outbox) -> None:
        """Let the controller count a worker's answers, and tell of instances that have finished."""
        if self._engine.controller.settle(out):
            for w, told in self._engine.tell_finished():
                self._post(w, told)
            self._watch.finished(self._engine, self._now())

    def _admit(self) -> None:
        """Fill up, unless another worker is asking the data: then that one will."""
        with self._control:
            if self._outside.thread is not None:
                return
            while (out := self._feeder.admit(self._engine)) is not None:
                self._count(out)
                for delivery in out.deliveries:
                    self._post(self._engine.homes.of_node[delivery.node], delivery)
            if self._engine.sharing.talks:
                return  # letters may be under way: see _rest
            if self._feeder.exhausted and not self._engine.controller.active:
                self.seconds = self._now()
                self.stop()

    def _post(self, w: int, item: Delivery | Finished | Letter) -> None:
        with self._lock:
            self._inboxes[w].append(item)
            self._bells[w].notify()

    def _now(self) -> float:
        return time.perf_counter() - self._began
