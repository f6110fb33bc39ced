"""Workers that are more than cores take turns at these."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast, final

import pytest

import geartrain as gt
from geartrain.engine.worker import WorkerState
from geartrain.runtime.processes import turns as under_test
from geartrain.runtime.processes.child import _Work
from geartrain.runtime.processes.pace import CoreClock
from geartrain.runtime.processes.turns import LATE_S, SOON_S, CoreTurns
from geartrain.sharing.locks import AbstractLock
from tests.rigs import turns as lists
from tests.rigs.passes import processes
from tests.rigs.sessions import session_of


@final
class Lock:
    """One of all of a test; who would wait for it fails."""

    def __init__(self) -> None:
        self.held = False
        self.taken = 0

    def acquire(self, blocking: bool = True) -> bool:
        if self.held:
            assert not blocking, "waits for ever"
            return False
        self.held = True
        self.taken += 1
        return True

    def release(self) -> None:
        assert self.held
        self.held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self.release()


@final
class Rig:
    """Workers of one host, each with a part and clocks that are set by hand."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, workers: int, cores: int, steppers: int = 9
    ) -> None:
        self.locks: dict[int, Lock] = {}
        self.part = SimpleNamespace(outstanding=0, steppers=steppers)
        self.wall_s = self.core_s = 0.0
        self.waits = 0
        clock = SimpleNamespace(seconds=lambda: self.core_s, reached=lambda due: due(self.core_s))
        monkeypatch.setattr(under_test, "time", SimpleNamespace(perf_counter=lambda: self.wall_s))
        monkeypatch.setattr(under_test, "_waits", lambda: self.waits)
        lock = cast("Callable[[int], AbstractLock]", self._lock)
        self.workers = [
            CoreTurns(lock, self.state(k), workers, cores, cast("CoreClock", clock))
            for k in range(workers)
        ]

    def _lock(self, number: int) -> Lock:
        return self.locks.setdefault(number, Lock())

    def state(self, worker: int) -> WorkerState:
        return cast("WorkerState", SimpleNamespace(index=worker, parts={"a part": self.part}))

    def go_on(self, seconds: float) -> None:
        """All clocks."""
        self.wall_s += seconds
        self.core_s += seconds

    @property
    def held(self) -> int:
        return sum(lock.held for lock in self.locks.values())

    def has(self, worker: int) -> bool:
        """Whether it has a turn: to take one takes nothing then."""
        before = [lock.taken for lock in self.locks.values()]
        try:
            self.workers[worker].take()
        except AssertionError:
            return False
        return before == [lock.taken for lock in self.locks.values()]


def test_as_many_workers_as_cores_take_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 3, 3)
    for worker in rig.workers:
        worker.take()
        rig.go_on(1.0)
        worker.fired()
        worker.leave()
    assert not rig.locks and rig.part.steppers == 9
    rig = Rig(monkeypatch, 3, 2, steppers=1)  # another worker steps, and tells by letters
    rig.workers[0].take()
    assert not rig.held and rig.part.steppers == 1
    alone = CoreTurns(None, rig.state(0), 9, 1, CoreClock())  # nothing in common
    alone.take()
    alone.fired()
    alone.leave()


def test_each_core_is_had_by_one_worker_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 5, 2)
    rig.workers[0].take()
    rig.workers[3].take()
    assert rig.has(0) and rig.has(3) and rig.held == 2
    with pytest.raises(AssertionError, match="waits"):
        rig.workers[2].take()
    rig.workers[0].leave()
    rig.workers[0].leave()  # once is enough
    assert rig.held == 1
    rig.workers[2].take()
    assert rig.has(2) and not rig.has(4) and rig.held == 2


def test_a_turn_ends_where_nothing_is_under_way_if_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 2, 1)
    first, (core, queue) = rig.workers[0], ((1 << 40), (1 << 40) + 1)

    def after(seconds: float, *, under_way: int, waits: bool) -> bool:
        """Whether it still has its turn."""
        rig.locks[queue].held = waits
        rig.part.outstanding = under_way
        rig.go_on(seconds)
        first.fired()
        rig.locks[queue].held = False
        return rig.locks[core].held

    first.take()
    assert after(0.9 * SOON_S, under_way=0, waits=True)
    assert after(0.2 * SOON_S, under_way=3, waits=True)
    assert not after(0.0, under_way=0, waits=True)
    assert not rig.has(0)  # it is taken anew
    assert after(0.9 * LATE_S, under_way=3, waits=True)
    assert not after(0.2 * LATE_S, under_way=3, waits=True)
    first.take()
    assert after(2 * LATE_S, under_way=0, waits=False)
    assert after(0.9 * SOON_S, under_way=0, waits=True)  # another one has begun
    assert not after(0.2 * SOON_S, under_way=0, waits=True)
    first.take()
    assert after(0.4 * LATE_S, under_way=20, waits=True)
    assert after(0.09 * LATE_S, under_way=1, waits=True)
    assert after(0.25 * LATE_S, under_way=10, waits=True)
    assert not after(0.02 * LATE_S, under_way=10, waits=True)  # half of what it had


@pytest.mark.parametrize(
    ("waits", "core", "goes_on"), [(14, 0.1, True), (15, 0.9, True), (15, 0.1, False)]
)
def test_who_waits_in_firings_goes_without_turns(
    monkeypatch: pytest.MonkeyPatch, waits: int, core: float, goes_on: bool
) -> None:
    """Half of them, and half of the time: a lock that another worker has is no reason. As long as
    they take turns, as many step a part at a time as there are cores."""
    rig = Rig(monkeypatch, 2, 1)
    assert rig.part.steppers == 1
    rig.part.outstanding = 1
    first = rig.workers[0]
    first.take()
    for k in range(20):
        rig.wall_s += SOON_S / 19
        rig.core_s += core * SOON_S / 20
        rig.waits += k < waits
        first.fired()
    assert rig.held == goes_on and rig.part.steppers == (1 if goes_on else 9)
    first.take()
    assert rig.held == goes_on and rig.has(0)


def test_who_has_nothing_to_fire_leaves_its_core_before_it_waits() -> None:
    done: list[str] = []
    worker: Any = SimpleNamespace(
        _state=SimpleNamespace(ready=False),
        _turns=SimpleNamespace(leave=lambda: done.append("leaves")),
        transport=SimpleNamespace(poll=lambda _=0: done.append("waits") or [(0, "record")]),
        _looks=None,
        _is_to_tell=lambda: False,
        _idle=SimpleNamespace(seconds=0.0),
        _waiting=SimpleNamespace(add=lambda *_: None),
        _tell_flying=lambda: None,
        _had=[0],
        _over=False,
        _take=lambda _, works: None,
    )
    _Work._hear(worker)
    assert done == ["leaves", "waits"]


def test_who_gives_a_pass_up_leaves_its_core_to_the_others() -> None:
    """It may have been in the middle of its turn, and they are to hear of the end, too."""
    done: list[str] = []
    worker: Any = SimpleNamespace(
        _turns=SimpleNamespace(leave=lambda: done.append("leaves")),
        _counts=dict[str, Any],
        _send=lambda *_: done.append("says so"),
        _parent=1,
        transport=SimpleNamespace(
            await_heard=lambda *_: done.append("waits"), close=lambda *_, to: None
        ),
    )
    _Work._leave(worker)
    assert done == ["leaves", "says so", "waits"] and worker._over


@pytest.mark.slow
def test_gradients_of_more_workers_than_cores_are_as_young_as_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without turns they are as many updates old as workers have under way together; in the
    first epoch others hear of steps by letters, as nothing is remembered yet."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    found = []
    for workers in (1, 6):
        session = session_of(
            lists.graph_of(lists.model(), run="steps"),
            rules=gt.Rules(optimizer=partial(gt.FusedAdam, lr=1e-3), update_every=gt.Instances(10)),
            runtime=processes(workers),
            sharing=gt.SharedWeights("each"),
            max_active=20,
            ramp=gt.Ramp(over=0),
        )
        last = session.fit(lists.data(2000), epochs=2).history[-1]
        assert all(200 - workers + 1 <= n <= 200 for n in last.updates.values())
        found.append(max(age.mean for age in last.staleness.values()))
    assert found[1] < 2 * found[0] + 0.5, found
