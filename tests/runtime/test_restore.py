"""``on_worker_death="restore"``: a call goes on after deaths, and says what is repeated."""

from __future__ import annotations

import io
import os
import random
import signal
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument, Restored, RunEnded
from geartrain.errors import WorkerDiedError
from geartrain.observe.jsonlog import JsonLog, read_json_log
from geartrain.observe.progress import ProgressLine
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.processes import pool
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.processes.server import ForkServer
from tests.rigs import struck
from tests.rigs.left import children, living, wait_until
from tests.rigs.struck import Struck

SLOW = pytest.mark.slow
INSTANCES = 40
BOUND_S = 60.0


@cache
def restoring() -> Processes:
    """One for all tests: cheaper."""
    return Processes(2, kernel_threads=1, on_worker_death="restore", most_deaths=4)


@cache
def raising() -> Processes:
    return Processes(2, kernel_threads=1)


def data(n: int = INSTANCES) -> list[gt.Instance]:
    drawn = torch.Generator().manual_seed(0)
    return [gt.Instance({"x": torch.randn(2, 2, generator=drawn)}, key=i) for i in range(n)]


def session(runtime: AbstractRuntime, *more: nn.Module, **given: object) -> gt.Session:
    """Three parts; whatever more is between the second and the third."""
    torch.manual_seed(0)
    graph = gt.Graph()
    x = graph.input("x")
    modules = (nn.Linear(2, 3), nn.Dropout(0.25), nn.Linear(3, 3), *more, nn.Linear(3, 1))
    for k, module in enumerate(modules):
        x = x.through(module, name=f"map {k}")
    x.loss(lambda y: y.square().sum(1), name="loss")
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=3)
    # By hand, as it is by measured times otherwise: dropout draws other numbers elsewhere.
    schedule = gt.Schedule(placement={f"map {k}": k % 2 for k in range(len(modules))})
    given = {"max_active": 1, "schedule": schedule, **given}
    return gt.Session(graph, rules=rules, runtime=runtime, **given)


def weights(of: gt.Session) -> list[torch.Tensor]:
    """Weights, and what Adam has of them."""
    found = []
    for part in of.parts.values():
        found += [p.detach().clone() for p in part.module.parameters()]
        if part.optimizer is not None:
            found += [x.clone() for s in part.optimizer.state.values() for x in s.values()]
    return found


def same(a: gt.Session, b: gt.Session) -> bool:
    both = zip(weights(a), weights(b), strict=True)
    return all(x.equal(y) for x, y in both)


class Killer(AbstractInstrument):
    """Sends a signal to a worker at these steps of a part, and keeps what it is told."""

    def __init__(
        self,
        at: set[int],
        number: int = signal.SIGKILL,
        pids: Callable[[], tuple[int, ...]] = lambda: restoring().pids,
    ) -> None:
        self.at, self.number, self.pids, self.steps = at, number, pids, 0
        self.restored: list[Restored] = []
        self.ended: RunEnded | None = None

    def on_updated(self, event):
        if event.part == "map 0":
            self.steps += 1
            if self.steps in self.at:
                pids = self.pids()
                os.kill(pids[self.steps % len(pids)], self.number)

    def on_restored(self, event):
        self.restored.append(event)

    def on_run_ended(self, event):
        self.ended = event


class Pulled:
    """Converts nothing, and keeps the keys of what was asked for."""

    def __init__(self) -> None:
        self.keys: list[object] = []

    def __call__(self, instance: gt.Instance) -> gt.Instance:
        self.keys.append(instance.key)
        return instance


@pytest.mark.parametrize(
    ("folder", "every", "at"),
    [
        (False, None, {20}),
        pytest.param(True, 10, {19}, marks=SLOW),  # 57 instances: not at the end of ten
        pytest.param(True, None, {3}, marks=SLOW),
        pytest.param(False, None, {17, 33}, marks=SLOW),
    ],
    ids=["memory", "file", "before the first file", "twice"],
)
def test_a_run_that_lost_workers_ends_as_one_that_did_not(folder, every, at, tmp_path):
    killer = Killer(at)
    mine = session(restoring(), instruments=[killer])
    given = {"folder": tmp_path, "checkpoint_every": every} if folder else {}
    fit = mine.fit(data(), epochs=2, **given)
    plain = session(raising())
    # A checkpoint drains the graph, and another run without one would step otherwise.
    there = {"folder": tmp_path / "plain", "checkpoint_every": every} if folder else {}
    expected = plain.fit(data(), epochs=2, **there)
    assert same(mine, plain)
    assert [e.loss for e in fit.history] == [e.loss for e in expected.history]
    assert [e.updates for e in fit.history] == [e.updates for e in expected.history]
    assert fit.instances == expected.instances == 2 * INSTANCES
    assert (fit.deaths, expected.deaths, expected.repeated) == (len(at), 0, 0)
    assert [e.deaths for e in killer.restored] == list(range(1, len(at) + 1))
    assert fit.repeated == sum(e.repeated for e in killer.restored) == killer.ended.repeated
    assert killer.ended.outcome == "done" and killer.ended.deaths == len(at)


def test_what_is_repeated_is_what_was_taken_since_the_last_checkpoint(tmp_path):
    pulled, killer = Pulled(), Killer({17})
    mine = session(
        restoring(), instruments=[killer], reading=gt.Reading(convert=pulled, shuffle=False)
    )
    fit = mine.fit(data(), epochs=1, folder=tmp_path, checkpoint_every=10)
    (event,) = killer.restored
    assert event.mode == "train" and event.worker == 1 and event.epoch == 1
    assert "was killed by SIGKILL (9)" in event.message and "load a checkpoint" not in event.message
    assert event.source == str(tmp_path / "latest.safetensors")
    # Two rows an instance, three a step: the 17th is of the 26th; checkpoints are at 10, 20, 30.
    assert event.taken == 20 and 5 <= event.repeated <= 9 and event.unfinished <= 1
    again = event.taken + event.repeated + event.unfinished
    keys = pulled.keys[1:] if pulled.keys[:2] == [0, 0] else pulled.keys  # one was looked at
    first = keys.index(20, keys.index(20) + 1)
    assert keys[:first] == list(range(len(keys[:first]))) and len(keys[:first]) >= again
    assert keys[first:] == list(range(20, INSTANCES))
    assert fit.repeated == event.repeated and event.seconds > 0
    assert fit.history[0].instances == INSTANCES and fit.history[0].seconds >= event.seconds


@pytest.mark.parametrize(
    "how",
    [
        struck.kill,
        pytest.param(struck.leave, marks=SLOW),
        pytest.param(struck.stop, marks=SLOW),
    ],
)
def test_whatever_a_worker_dies_of_the_call_goes_on(how, monkeypatch):
    monkeypatch.setattr(pool, "_STOPPED_LOOKS", 1)
    module = Struck(how, rows=25)
    mine = session(restoring(), module, max_active=4)

    class Mending(AbstractInstrument):
        def on_restored(self, event):
            module.harmless()

    mine.instruments.append(Mending())
    fit = mine.fit(data(), epochs=1)
    assert fit.deaths == 1 and fit.instances == INSTANCES


@pytest.mark.parametrize(
    ("sharing", "active"),
    [
        (gt.SharedWeights(), 8),
        pytest.param(gt.PartCopies({"map 2": 2}), 8, marks=SLOW),
        pytest.param(None, "auto", marks=SLOW),
    ],
    ids=["shared weights", "part copies", "auto"],
)
def test_whoever_has_the_weights_the_call_goes_on(sharing, active):
    killer = Killer({20})
    mine = session(
        restoring(), instruments=[killer], sharing=sharing, schedule=None, max_active=active
    )
    fit = mine.fit(data(300), epochs=2)
    assert fit.deaths == 1 and [e.instances for e in fit.history] == [300, 300]
    assert mine.statistics()["trained"] == fit.instances == 600
    assert all(bool(x.isfinite().all()) for x in weights(mine))


def test_a_death_in_every_attempt_is_raised_with_the_story_of_all():
    module = Struck(struck.kill, rows=25)
    killer = Killer(set())
    runtime = Processes(2, kernel_threads=1, on_worker_death="restore", most_deaths=2)
    mine = session(runtime, module, instruments=[killer])
    with pytest.raises(WorkerDiedError, match=r"died 3 times in this call") as caught:
        mine.fit(data(), epochs=1)
    told = str(caught.value)
    assert told.count("was killed by SIGKILL (9) while firing 'map 3'") == 3
    assert "1: worker" in told and "3: worker" in told and "most_deaths=2" in told
    assert caught.value.worker is not None
    assert len(killer.restored) == 2 and killer.ended.outcome == "failed"
    assert killer.ended.deaths == 2
    module.harmless()
    assert mine.fit(data(), epochs=1).deaths == 0  # each call counts anew
    runtime.close()
    assert runtime.pids == ()


def test_without_restore_the_first_death_is_raised():
    killer = Killer({5}, pids=lambda: raising().pids)
    mine = session(raising(), instruments=[killer])
    with pytest.raises(WorkerDiedError, match=r"on_worker_death='restore'"):
        mine.fit(data(), epochs=1)
    assert killer.restored == [] and killer.ended.deaths == 0


class InEvaluation(AbstractInstrument):
    """Kills a worker in the middle of the first pass of this mode."""

    wants_firings = True

    def __init__(self, mode: str) -> None:
        self.mode, self.armed, self.done = mode, False, False
        self.restored: list[Restored] = []

    def on_progress(self, event):
        if event.mode == self.mode and not self.done:
            self.done = True
            os.kill(restoring().pids[0], signal.SIGKILL)

    def on_restored(self, event):
        self.restored.append(event)


def test_a_validation_that_loses_a_worker_is_done_again_and_nothing_is_trained_again():
    watch = InEvaluation("evaluate")
    mine = session(restoring(), instruments=[watch])
    fit = mine.fit(data(), epochs=2, valid=data(60))
    assert [e.mode for e in watch.restored] == ["evaluate"]
    assert (fit.deaths, fit.repeated) == (1, 0)
    assert fit.valid == mine.evaluate(data(60)).metrics
    assert mine.statistics()["trained"] == 2 * INSTANCES


@pytest.mark.parametrize("mode", [pytest.param("evaluate", marks=SLOW), "predict"])
def test_a_call_that_only_looks_begins_anew(mode):
    watch = InEvaluation(mode)
    mine = session(restoring(), instruments=[watch])
    looked = getattr(mine, mode)(data(60))
    again = getattr(mine, mode)(data(60))
    assert [(e.mode, e.deaths, e.repeated) for e in watch.restored] == [(mode, 1, 0)]
    if mode == "evaluate":
        assert looked.metrics == again.metrics and looked.instances == 60
    else:
        assert all(a.equal(b) for a, b in zip(looked, again, strict=True))


@pytest.mark.slow
def test_a_fork_server_that_dies_takes_no_run_with_it():
    def server(killed: list[int] = []) -> tuple[int, ...]:  # noqa: B006
        killed.append(ForkServer.of_this_process().pid)
        return (killed[-1],)

    killer = Killer({9}, pids=server)
    mine = session(restoring(), instruments=[killer])
    fit = mine.fit(data(), epochs=1)
    assert fit.deaths == 1 and fit.instances == INSTANCES
    assert killer.restored[0].worker is None


def test_a_death_after_an_interrupt_is_raised():
    class Leaving(Killer):
        def on_updated(self, event):
            if event.part == "map 0" and not self.steps:
                os.kill(os.getpid(), signal.SIGINT)
            super().on_updated(event)

    killer = Leaving({1})
    mine = session(restoring(), instruments=[killer], max_active=8)
    with pytest.raises(WorkerDiedError):
        mine.fit(data(4000), epochs=1)
    assert killer.restored == []


def test_log_and_progress_line_tell_of_it(tmp_path, caplog):
    screen = io.StringIO()
    line, log = ProgressLine(screen, plain=True), JsonLog(tmp_path / "log")
    mine = session(restoring(), instruments=[Killer({9}), line, log])
    fit = mine.fit(data(), epochs=1)
    events = read_json_log(tmp_path / "log")
    (told,) = [e for e in events if e["event"] == "Restored"]
    assert told["mode"] == "train" and told["source"] == "memory" and told["taken"] == 0
    assert told["repeated"] == fit.repeated > 0
    assert (events[-1]["deaths"], events[-1]["repeated"]) == (1, fit.repeated)
    assert f"died       1 worker process, {fit.repeated} instances trained again" in (
        screen.getvalue()
    )
    (said,) = [r.getMessage() for r in caplog.records if "was killed" in r.getMessage()]
    assert f"{fit.repeated} that were trained since are trained again" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on_worker_death": "ignore"}, r"on_worker_death='ignore'.*'raise', 'restore' or 'go_on'"),
        ({"on_worker_death": "restore", "most_deaths": 0}, r"most_deaths=0.*1 or more"),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Processes(2, **given)


def soak(tmp_path: Path, kills: int, servers: int) -> int:
    """Fits in which somebody is killed at random moments; returns how many were gone on after."""
    draw = random.Random(kills)
    others = {*children(ForkServer.of_this_process().pid)}  # of other tests
    runtime = Processes(2, kernel_threads=1, on_worker_death="restore", most_deaths=kills)
    which = [True] * servers + [False] * (kills - servers)
    draw.shuffle(which)
    seen: set[int] = set()
    stopped, killed = threading.Event(), []

    def strike() -> None:
        while which and not stopped.wait(draw.uniform(0.0, 0.4)):
            pids = runtime.pids
            if not pids:
                continue
            server = which.pop()
            pid = ForkServer.of_this_process().pid if server else draw.choice(pids)
            try:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            except ProcessLookupError:
                which.append(server)
            seen.update(pids)

    thread = threading.Thread(target=strike, name="killer")
    thread.start()
    deaths = runs = 0
    try:
        while thread.is_alive():
            folder = tmp_path / str(runs) if runs % 2 else None
            shared = {"sharing": gt.Neighbours(copies=3, exchange="weights"), "schedule": None}
            mine = session(runtime, max_active=8, **(shared if runs % 3 == 2 else {}))
            every = {} if folder is None else {"folder": folder, "checkpoint_every": 20}
            fit = mine.fit(data(200), epochs=3, **every)
            assert [e.instances for e in fit.history] == [200] * 3 and fit.instances == 600
            assert mine.statistics()["trained"] == 600
            assert all(bool(x.isfinite().all()) for x in weights(mine))
            deaths, runs = deaths + fit.deaths, runs + 1
    finally:
        stopped.set()
        thread.join(BOUND_S)
    assert not thread.is_alive() and len(killed) == kills
    runtime.close()
    server = ForkServer.of_this_process()
    assert living(seen) == []
    wait_until(lambda: {*children(server.pid)} <= others, "all workers have ended")
    assert list(server.folder.iterdir()) == []
    assert deaths > 0
    return deaths


def test_who_has_died_is_not_made_anew_by_a_server_that_has_died_too():
    """Else a call would ask the same server for workers until its deaths are used up."""
    made = pool.Pool(2)
    made.gone.add(0)
    made.server.kill()
    assert not made.renew()
    made.close(busy=True)
    runtime = restoring()
    fresh = session(runtime)
    fresh.fit(data(4), epochs=1)
    held = runtime._pool
    held.gone.add(1)
    ForkServer.of_this_process().kill()
    fit = fresh.fit(data(4), epochs=2)
    assert fit.history[-1].instances == 4 and runtime._pool is not held


@pytest.mark.slow
def test_runs_go_on_through_three_kills_at_random_moments(tmp_path):
    assert soak(tmp_path, 3, servers=0) <= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_go_on_through_a_hundred_kills_at_random_moments(tmp_path):
    assert soak(tmp_path, 100, servers=5) >= 50


def test_only_the_worker_that_died_is_made_anew():
    """The others drop what they held; what comes of it is what comes without a death."""
    disturbed, killer = session(restoring()), Killer({9})
    disturbed.fit(data(4), epochs=1)
    first, second = restoring().pids
    disturbed.instruments.append(killer)
    assert disturbed.fit(data(), epochs=2).deaths == 1
    assert restoring().pids[0] == first and restoring().pids[1] != second
    undisturbed = session(raising())
    undisturbed.fit(data(4), epochs=1)
    undisturbed.fit(data(), epochs=2)
    assert same(undisturbed, disturbed)
