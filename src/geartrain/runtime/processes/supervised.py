"""Runtimes whose workers are processes: they are made for the first pass, serve all, and are ended.

    AbstractSupervised ── makes ──► pool of workers ── a pass ──► Parent
                       ◄── WorkerDiedError: those that live drop what they hold, and the next pass
                           makes the dead ones anew; or the pool is dropped as a whole

What becomes of a call in which a worker dies is decided above (``train.deaths``), in one way for
all of these runtimes.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any, Literal, TypeAlias

from geartrain.bounds import require_whole
from geartrain.engine.engine import Engine
from geartrain.errors import BusyError, WorkerDiedError
from geartrain.runtime.base import AbstractFeeder, AbstractRuntime, Watch, threads_each
from geartrain.runtime.interrupt import Interruptible
from geartrain.runtime.kernel_threads import cores_left_to_workers
from geartrain.runtime.processes.members import AbstractPool
from geartrain.runtime.processes.parent import Parent

OnWorkerDeath: TypeAlias = Literal["raise", "restore", "go_on"]


class AbstractSupervised(AbstractRuntime):
    """One process per worker, wherever these are.

    Args:
        workers: How many.
        kernel_threads, patience_s, on_worker_death, most_deaths: See ``Processes``.

    Raises:
        ValueError: A value is none of these.
    """

    kernel_threads: int
    lock = None

    def __init__(
        self,
        workers: int,
        kernel_threads: int | None,
        patience_s: float,
        on_worker_death: OnWorkerDeath,
        most_deaths: int,
    ) -> None:
        kind = type(self).__name__
        self.kernel_threads = threads_each(kind, workers, kernel_threads, patience_s)
        if on_worker_death not in ("raise", "restore", "go_on"):
            raise ValueError(
                f"{kind}(on_worker_death={on_worker_death!r}): give 'raise', 'restore' or 'go_on'"
            )
        what = f"{kind}(most_deaths={most_deaths!r})"
        require_whole(what, most_deaths, 1, "1 or more, or on_worker_death='raise'")
        self.workers = workers
        self.patience_s = patience_s
        self.on_worker_death = on_worker_death
        self.most_deaths = 0 if on_worker_death == "raise" else most_deaths
        self._pool: AbstractPool | None = None
        self._used = threading.Lock()

    @abstractmethod
    def _make_pool(self) -> AbstractPool:
        """Start the workers."""

    def _prepare(self, engine: Engine) -> None:
        """A pass with this engine begins."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the worker processes, where they are; empty while there are none."""
        pool = self._pool
        if pool is None:
            return ()
        return tuple(m.pid for w, m in enumerate(pool.members) if w not in pool.gone)

    def run(self, engine: Engine, feeder: AbstractFeeder, watch: Watch) -> float:
        kind = type(self).__name__
        if not self._used.acquire(blocking=False):
            raise BusyError(
                f"runtime={kind}(...): its workers are in the middle of a pass of another "
                "session; wait until that has returned, or give each session a runtime of its own"
            )
        try:
            return self._run(kind, engine, feeder, watch)
        finally:
            self._used.release()

    def _run(self, kind: str, engine: Engine, feeder: AbstractFeeder, watch: Watch) -> float:
        if not engine.sharing.by_letters:
            raise ValueError(
                f"runtime={kind}(...): {type(engine.sharing).__name__} needs workers with one "
                "memory; use runtime=gt.Threads(...) for this sharing, or leave sharing out"
            )
        if engine.settings.meter is not None:
            raise ValueError(
                f"runtime={kind}(...): {type(engine.settings.meter).__name__} counts in one "
                "process; measure with runtime=gt.Threads(...), or leave Compute(meter=...) out"
            )
        self._prepare(engine)
        with Interruptible(feeder) as interrupt, cores_left_to_workers():
            while True:
                pool = self._alive()
                self._come(engine, watch)
                run = Parent(
                    *(pool, engine, feeder, watch, interrupt, self.kernel_threads),
                    goes_on=self.on_worker_death == "go_on",
                )
                try:
                    run.go()
                    return run.seconds
                except BaseException as error:
                    patience_s = 2.0 if interrupt.abandoned else self.patience_s
                    keeps = self.on_worker_death != "raise"
                    if not run.give_up(patience_s, error, keeps=keeps):
                        self._drop(busy=True)
                    if not (isinstance(error, WorkerDiedError) and run.may_begin_anew):
                        raise
                    watch.left(error.worker, error.how, 0, 0.0)  # it raises if too many have died
                finally:
                    run.close()

    def _alive(self) -> AbstractPool:
        """A pool in which nobody is missing."""
        pool = self._pool
        if pool is not None and pool.gone and not pool.renew():
            self._drop(busy=True)
        if self._pool is not None and not self._pool.alive:  # of a death between two passes
            self._drop(busy=True)
        if self._pool is None:
            self._pool = self._make_pool()
        return self._pool

    def _come(self, engine: Engine, watch: Watch) -> None:
        """Copies of the model whose workers had died have others, and take part."""
        sharing = engine.sharing
        if not (sharing.talks and engine.controller.training):
            return
        for w in range(self.workers):
            absent = [k for k in engine.homes.copies_on(w) if not sharing.present()[k]]
            if absent:
                engine.set_present(w, True)
                watch.joined(w, absent, 0.0)
        sharing.regroup()

    def close(self) -> None:
        """End the worker processes; a later pass makes new ones."""
        self._drop(busy=False)

    def _drop(self, *, busy: bool) -> None:
        if self._pool is not None:
            self._pool.close(busy=busy)
            self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes: a copy makes its own."""
        return {**self.__dict__, "_pool": None, "_used": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._used = threading.Lock()
