"""Workers with nothing in common with the parent, by tcp: what comes back, deaths, hosts."""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.errors import GeartrainError, TransportError, WorkerDiedError
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.hosts import control, program
from geartrain.runtime.hosts.control import Pieces, to_records
from geartrain.runtime.hosts.hosts import Hosts
from geartrain.runtime.hosts.keeper import PROTOCOL
from geartrain.runtime.hosts.keepers import Keepers
from geartrain.runtime.hosts.program import Host
from geartrain.runtime.hosts.worker import Greeting
from geartrain.runtime.processes import handing
from geartrain.runtime.processes.memory import SharedTensors, dumps
from geartrain.transport.pulse import DEAD_S
from geartrain.transport.record import Record
from tests.rigs.killing import Killer
from tests.rigs.left import living, open_files, wait_until
from tests.rigs.pairs import graph_of_pairs, pairs
from tests.rigs.passes import Quiet, hosts, one_pass, processes
from tests.rigs.struck import Waiting

SLOW = pytest.mark.slow
VERSION = ".".join(map(str, sys.version_info[:2]))
ADAM = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)


def weights_of(session: gt.Session) -> list[Tensor]:
    return [p.detach().clone() for part in session.parts.values() for p in part.parameters]


def one_at_a_time(runtime: AbstractRuntime, **more: object) -> gt.Session:
    """A session whose order is the same on every runtime."""
    return gt.Session(graph_of_pairs(), rules=ADAM, runtime=runtime, max_active=1, **more)  # type: ignore[arg-type]


def same(a: gt.Session, b: gt.Session) -> bool:
    return all(x.equal(y) for x, y in zip(weights_of(a), weights_of(b), strict=True))


def test_a_run_goes_as_it_does_on_one_thread_to_the_last_bit():
    """Optimisers, versions, gradients that wait: all is there again in the next epoch."""
    found = []
    for runtime in (gt.Threads(1), hosts(2)):
        session = one_at_a_time(runtime)
        fit = session.fit(pairs(30), epochs=3, valid=pairs(7), evaluate_every=0.4)
        found.append((session, [e.loss for e in fit.history], fit.history[-1].valid))
    (a, losses, valid), (b, others, validated) = found
    assert same(a, b)
    assert losses == pytest.approx(others, rel=1e-12) and valid == pytest.approx(validated)


@pytest.mark.parametrize("way", ["there", pytest.param("back", marks=SLOW)])
def test_a_run_begun_on_processes_resumes_on_hosts_and_the_reverse(tmp_path, way):
    whole = one_at_a_time(gt.Threads(1))
    whole.fit(pairs(30), epochs=2)
    first, second = (processes(2), hosts(2)) if way == "there" else (hosts(2), processes(2))
    begun = one_at_a_time(first)
    begun.fit(pairs(30), epochs=1, folder=tmp_path / "b", checkpoint_every=7, keep_last=20)
    resumed = one_at_a_time(second)
    resumed.load(sorted((tmp_path / "b").glob("*-*.safetensors"))[1])
    resumed.fit(pairs(30), epochs=2)
    assert same(whole, resumed)


def test_a_worker_gets_the_weights_of_its_own_parts_alone():
    session = one_at_a_time(hosts(2))
    session.fit(pairs(8), epochs=1)
    member = type(hosts(2)._pool.members[0])
    sizes = []
    hand_over = member.hand_over

    def weighs(self, content, own):
        sizes.append((len(content), len(own)))
        hand_over(self, content, own)

    graph = gt.Graph()
    big = [nn.Linear(300, 300) for _ in range(2)]
    x = graph.input("x").through(big[0], name="a").through(big[1], name="b")
    x.loss(lambda y: y.square().sum(1))
    placed = gt.Schedule(placement={"a": 0, "b": 1})
    s = gt.Session(graph, rules=ADAM, runtime=hosts(2), schedule=placed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "hand_over", weighs)
        s.fit([gt.Instance({"x": torch.randn(1, 300)}) for _ in range(8)], epochs=2)
    whole = 4 * sum(p.numel() for p in big[0].parameters())
    assert len(sizes) == 4 and all(common < whole // 10 for common, _ in sizes)
    first, later = sizes[:2], sizes[2:]
    assert all(whole < own < 1.1 * whole for _, own in first)
    assert all(3 * whole < own < 3.1 * whole for _, own in later)  # with Adam's of one part


class Carried(Quiet):
    """Counts bytes to the parent."""

    def __init__(self) -> None:
        self.nbytes = 0

    def carried(self, sender, receiver, messages, nbytes):
        self.nbytes += nbytes if receiver == 2 else 0


def test_weights_that_have_not_changed_neither_travel_back_nor_are_written():
    graph = gt.Graph()
    map_ = nn.Linear(100, 100)
    graph.input("x").through(map_, name="a").loss(lambda y: y.square().sum(1))
    data = [gt.Instance({"x": torch.randn(1, 100)}) for _ in range(3)]
    runtime = hosts(2)
    for train, writes in ((False, False), (True, False)):
        seen, version = Carried(), map_.weight._version
        one_pass(graph, data, train=train, watch=seen, runtime=runtime)
        assert (map_.weight._version > version) == writes
        assert (seen.nbytes > 4 * map_.weight.numel()) == train


def test_a_worker_that_is_killed_is_told_with_its_signal_and_the_next_pass_works():
    runtime = hosts(2)
    session = one_at_a_time(runtime)
    session.fit(pairs(4), epochs=1)
    pids = runtime.pids
    killer = Killer(runtime, {3}, heard=True)
    session.instruments.append(killer)
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* was killed by SIGKILL \(9\)") as caught:
        session.fit(pairs(300), epochs=2)
    assert time.monotonic() - killer.sent_s < 5.0
    assert caught.value.worker == 1 and "last heard of" in str(caught.value)
    assert living(pids) == [] and runtime.pids == ()
    one_at_a_time(runtime).fit(pairs(4), epochs=1)
    assert set(runtime.pids).isdisjoint(pids)


@pytest.mark.slow
def test_a_worker_that_is_stopped_does_not_answer_and_is_ended():
    runtime = hosts(2)
    session = one_at_a_time(runtime)
    session.fit(pairs(4), epochs=1)
    pids = runtime.pids
    killer = Killer(runtime, {3}, signal.SIGSTOP)
    session.instruments.append(killer)
    with pytest.raises(WorkerDiedError, match=r"worker 1 .* does not answer .* stopped, or its"):
        session.fit(pairs(300), epochs=2)
    assert time.monotonic() - killer.sent_s < 3 * DEAD_S
    assert living(pids) == []


class Holding(nn.Module):
    """Holds the interpreter's lock for longer than a dead worker is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.held:
            self.held = True
            ctypes.PyDLL(None).usleep(round(1.5e6 * DEAD_S))
        return x


@SLOW
def test_a_worker_that_holds_the_interpreters_lock_for_long_answers_all_the_same():
    graph = gt.Graph()
    graph.input("x").through(nn.Linear(2, 2), name="a").through(Holding(), name="b").loss(
        lambda y: y.square().sum(1)
    )
    points = [gt.Instance({"x": torch.ones(1, 2)}) for _ in range(3)]
    gt.Session(graph, rules=ADAM, runtime=hosts(2)).fit(points, epochs=1)


def test_a_worker_is_waited_for_while_what_it_is_handed_is_under_way(monkeypatch):
    graph = gt.Graph()
    graph.input("x").through(Waiting(1.5), name="a").loss(lambda y: y.square().sum(1))
    session = gt.Session(graph, rules=ADAM, runtime=hosts(2))
    points = [gt.Instance({"x": torch.ones(1, 3)})]
    told, untaken = itertools.count(), control.RemoteMember.untaken
    seen: list[int] = []

    def moves(member: control.RemoteMember) -> int:
        seen.append(untaken(member))
        return next(told)

    monkeypatch.setattr(handing, "HANDED_S", 0.5)
    monkeypatch.setattr(control.RemoteMember, "untaken", moves)
    session.fit(points, epochs=1)
    assert seen and min(seen) > 0, "it has not said that it has it"
    monkeypatch.setattr(control.RemoteMember, "untaken", lambda member: 1)
    with pytest.raises(WorkerDiedError, match=r"worker 0 has said nothing for 0 s of what it was"):
        session.fit(points, epochs=2)


def test_a_fit_goes_on_after_a_death_and_ends_as_if_there_had_been_none(monkeypatch):
    runtime = hosts(2)
    monkeypatch.setattr(runtime, "most_deaths", 4)
    undisturbed, disturbed = one_at_a_time(gt.Threads(1)), one_at_a_time(runtime)
    disturbed.instruments.append(Killer(runtime, {6}))  # early, as events are told late
    undisturbed.fit(pairs(60), epochs=2)
    fit = disturbed.fit(pairs(60), epochs=2)
    assert fit.deaths == 1 and fit.repeated > 0
    assert same(undisturbed, disturbed)


@SLOW
def test_a_runtime_that_is_dropped_ends_its_workers_and_its_programs():
    runtime = Hosts(1, kernel_threads=1)
    session = one_at_a_time(runtime)
    session.fit(pairs(4), epochs=1)
    pids = [*runtime.pids, *map(parent_of, runtime.pids)]
    del runtime, session
    gc.collect()
    wait_until(lambda: not living(pids), "all have ended")


@SLOW
def test_a_keeper_that_is_killed_takes_its_workers_along_and_another_one_is_started():
    runtime = Hosts(1, kernel_threads=1)
    one_at_a_time(runtime).fit(pairs(4), epochs=1)
    pids = runtime.pids
    (keeper,) = {parent_of(pid) for pid in pids}
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not living(pids), "the kernel has ended its workers")
    one_at_a_time(runtime).fit(pairs(4), epochs=1)
    pids = runtime.pids
    keeper = parent_of(pids[0])
    runtime.close()
    assert living([*pids, keeper]) == []


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


PROGRAM = """
import os, sys
import torch
import geartrain as gt
from tests.rigs.pairs import graph_of_pairs, pairs
runtime = gt.Hosts(1, kernel_threads=1)
session = gt.Session(graph_of_pairs(), runtime=runtime)
session.fit(pairs(4), epochs=1)
print(*runtime.pids, flush=True)
session.fit((p for _ in range(100_000) for p in pairs(4)), epochs=2)
"""


@SLOW
def test_when_the_parent_is_killed_workers_and_keepers_end_within_two_seconds():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=env
    ) as program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        all_of_them = [*pids, *{parent_of(pid) for pid in pids}]
        program.kill()
    took_s = wait_until(lambda: not living(all_of_them), "all have ended")
    assert took_s < 2.0


def test_a_host_that_cannot_be_reached_is_passed_over_for_a_spare_one(caplog):
    said = {"ready": 1, "protocol": PROTOCOL, "python": VERSION, "host": "h"}
    here = Host("127.0.0.1", command=("sh", "-c", 'echo "$0"; cat >/dev/null', json.dumps(said)))
    gone = Host("127.0.0.2", command=("false",))
    launcher = Keepers([gone, here], 1)
    try:
        assert launcher.binds() == ["127.0.0.1"]
    finally:
        launcher.close()
    assert "host 127.0.0.2: 'false " in caplog.text and "exited with status 1" in caplog.text


def test_a_host_that_does_not_answer_gives_way_to_a_spare_one(caplog, monkeypatch):
    """One that was suspected, and answers, keeps its program and its place."""
    monkeypatch.setattr(program, "_PONG_S", 0.5)
    said = {"ready": 1, "protocol": PROTOCOL, "python": VERSION, "host": "h"}
    script = 'echo "$0"; while read line; do echo "{\\"pong\\": 1}"; done'
    answers = Host("127.0.0.1", command=("sh", "-c", script, json.dumps(said)))
    silent = Host("127.0.0.2", command=("sh", "-c", 'echo "$0"; cat >/dev/null', json.dumps(said)))
    launcher = Keepers([answers, silent, Host("127.0.0.3", command=answers.command)], 2)
    try:
        assert launcher.binds() == ["127.0.0.1", "127.0.0.2"]
        launcher.suspect(0)
        assert launcher.binds() == ["127.0.0.1", "127.0.0.2"] and not caplog.text
        launcher.suspect(1)
        assert launcher.binds() == ["127.0.0.1", "127.0.0.3"]
        assert "host 127.0.0.2 does not answer" in caplog.text
    finally:
        launcher.close()


def test_hosts_that_cannot_be_reached_are_named():
    runtime = Hosts([Host("127.0.0.2", command=("/nowhere/ssh",))])
    with pytest.raises(GeartrainError, match=r"1 of them have none: 127\.0\.0\.2 could not"):
        one_at_a_time(runtime).fit(pairs(4), epochs=1)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b'{"ready": 1, "protocol": 99, "python": "3.11", "host": "h"}\n', "another version"),
        (
            b'{"ready": 1, "protocol": %d, "python": "2.7", "host": "h"}\n' % PROTOCOL,
            "has Python 2.7",
        ),
        (b"Welcome to Linux\n", "says b'Welcome to Linux' on stdout"),
    ],
)
def test_a_host_with_another_version_or_a_chatty_shell_is_refused(said, why):
    speaks = Host("127.0.0.1", command=("printf", said.decode().replace("\n", "\\n")))
    with pytest.raises(GeartrainError, match="could not be reached"):
        Keepers([speaks], 1).binds()
    keeper = program.Keeper(speaks)
    with pytest.raises(GeartrainError, match=why):
        for _ in range(100):
            keeper.listen()
            time.sleep(0.01)
    keeper.close()


def test_a_command_that_does_not_pass_stdin_through_is_named_with_the_remedy(caplog):
    """As ssh -n and -f do not: what is started there would never hear a word, nor the end."""
    deaf = Host("127.0.0.1", command=("sh", "-c", 'exec "$@" </dev/null', "sh"))
    with pytest.raises(GeartrainError, match=r"127\.0\.0\.1 could not be reached"):
        Keepers([deaf], 1).binds()
    assert "has /dev/null or a file for stdin" in caplog.text
    assert "without -n and -f of ssh" in caplog.text


def test_shared_weights_learn_on_hosts():
    session = gt.Session(
        graph_of_pairs(), rules=ADAM, runtime=hosts(2), sharing=gt.SharedWeights(in_flight="each")
    )
    fit = session.fit(pairs(60), epochs=4)
    assert fit.history[-1].loss < fit.history[0].loss


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hosts(0), "name hosts"),
        (lambda: Hosts(2, workers=3), r"3 workers, and room for 2 on 1 hosts"),
        (lambda: Hosts([Host("10.0.0.2")]), r"workers on 10\.0\.0\.2 have to reach this process"),
        (lambda: Host("0.0.0.0"), "by which other hosts reach it"),
        (lambda: Host("10.0.0.2", workers=0), r"Host\(workers=0\)"),
        (lambda: Host("10.0.0.2", command="ssh b"), "give words"),
        (lambda: Hosts(1, on_worker_death="pray"), r"Hosts\(on_worker_death='pray'\)"),
        (lambda: Hosts(1, wait_s=-1.0), r"Hosts\(wait_s=-1\.0\): give seconds, 0 or more"),
    ],
)
def test_arguments_that_cannot_be_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_messages_come_together_from_pieces(monkeypatch):
    monkeypatch.setattr(control, "_PIECE", 10)
    came = Pieces()
    for content in (b"", b"short", b"0123456789", b"0123456789" * 3 + b"4"):
        for record in to_records(content):
            came.put(record)
        assert came.messages.popleft() == content and not came.messages
    pieces = [*to_records(b"0123456789" * 3)]
    came.put(pieces[0])
    with pytest.raises(TransportError, match=r"bytes 20\.\. of a message came, expected 10"):
        came.put(pieces[2])
    with pytest.raises(TransportError, match="a record of kind 66"):
        came.put(Record(66))


@pytest.mark.slow
def test_a_death_that_is_told_late_is_not_taken_for_another_workers():
    launcher = Keepers([Host("127.0.0.1")], 1)
    launcher.binds()
    greeting = Greeting(0, 1, "127.0.0.1", "tcp://127.0.0.1:1", None, tuple(sys.path))
    try:
        (first,) = launcher.start([greeting])
        launcher.forget()
        wait_until(lambda: not living([first.pid]), "the first has ended")  # as is to be told
        launcher.binds()
        (second,) = launcher.start([greeting])
        assert second.pid != first.pid
        assert launcher.deaths() == {}
    finally:
        launcher.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_only_the_worker_that_died_is_started_anew_and_the_others_learn_its_key(number):
    """With keys by tcp: those that stayed have to let the new one in, and it them."""
    runtime = Hosts(2, None, 1, socket_files=False, on_worker_death="restore", most_deaths=4)
    try:
        undisturbed, disturbed = one_at_a_time(gt.Threads(1)), one_at_a_time(runtime)
        for session in (undisturbed, disturbed):
            session.fit(pairs(4), epochs=1)
        for at, stays, goes in ((3, 0, 1), (6, 1, 0)):
            pids = runtime.pids
            disturbed.instruments[:] = [Killer(runtime, {at}, number)]
            epochs = 2 + stays
            assert disturbed.fit(pairs(30), epochs=epochs).deaths == 1
            undisturbed.fit(pairs(30), epochs=epochs)
            assert runtime.pids[stays] == pids[stays] and runtime.pids[goes] != pids[goes]
            assert living(pids) == [pids[stays]]
        assert same(undisturbed, disturbed)
        pool = runtime._pool
        assert len(pool._controls) == 2, "connections that nobody has any more are closed"
    finally:
        runtime.close()


@pytest.mark.slow
def test_however_often_workers_are_made_anew_there_is_one_channel_a_worker_at_most():
    """A newcomer has one of its own; one is closed when the last that had it has gone."""

    def bells() -> list[str]:
        return [file for file in open_files() if "eventfd" in file]  # a channel has some ten

    runtime = Hosts(2, None, 1, socket_files=False, on_worker_death="restore")
    session = one_at_a_time(runtime)
    try:
        session.fit(pairs(4), epochs=1)
        pool = runtime._pool
        before = len(bells())
        for k, w in enumerate((0, 0, 1, 1, 0, 1)):
            pool.bury(w)
            assert pool.renew()
            session.fit(pairs(2), epochs=2 + k)
            assert runtime._pool is pool and len(pool._controls) == 2
            wait_until(lambda: len(bells()) <= before + 15, "no more than those of a channel")
    finally:
        runtime.close()


@pytest.mark.slow
@pytest.mark.parametrize("max_active", [8, 1])  # with one, nothing is in flight after each
def test_the_others_train_on_until_a_newcomer_is_there(max_active):
    """As where no host has room for it: the pass goes on without, and ends when there is one."""
    runtime = Hosts(2, None, 1, on_worker_death="go_on", most_deaths=4)
    exchange = gt.Neighbours(copies=2, exchange="weights", shards="pull")
    session = gt.Session(
        graph_of_pairs(), rules=ADAM, runtime=runtime, sharing=exchange, max_active=max_active
    )
    try:
        session.fit(pairs(8), epochs=1)
        pool, killer, late = runtime._pool, Killer(runtime, {20}), AfterSteps(60)
        session.instruments[:] = [killer, late]
        ready = pool.ready_to_renew
        pool.ready_to_renew = lambda: late.over and ready()  # type: ignore[method-assign]
        fit = session.fit(pairs(400), epochs=2)
        assert (fit.deaths, fit.instances) == (1, 400)
        assert late.joined_after is not None and late.joined_after >= 60
        assert not pool._coming and not pool.gone and len(pool._controls) == 2
    finally:
        runtime.close()


class AfterSteps(gt.AbstractInstrument):
    """Whether so many steps were taken, and after how many a newcomer came."""

    def __init__(self, steps: int) -> None:
        self.steps, self.wanted, self.joined_after = 0, steps, None

    @property
    def over(self) -> bool:
        return self.steps >= self.wanted

    def on_updated(self, event: object) -> None:
        self.steps += 1

    def on_joined(self, event: object) -> None:
        self.joined_after = self.steps


@pytest.mark.slow
def test_a_newcomer_imports_what_others_had_to_before_it_says_that_it_is_there(tmp_path):
    """So a pass does not wait for it; one that cannot be imported is left to the pass."""
    seen = tmp_path / "seen"
    (tmp_path / "wanted_there.py").write_text(f"open({str(seen)!r}, 'w').close()\n")
    more = (str(tmp_path), *sys.path), None, ("nowhere_at_all", "wanted_there")
    launcher = Keepers([Host("127.0.0.1")], 1)
    launcher.binds()
    try:
        launcher.start([Greeting(0, 1, "127.0.0.1", "tcp://127.0.0.1:1", None, *more)])
        assert seen.exists()
    finally:
        launcher.close()


def test_what_a_pass_had_to_import_is_told_once(tmp_path, monkeypatch):
    (tmp_path / "met_in_a_pass.py").write_text("def function(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    content = dumps(importlib.import_module("met_in_a_pass").function, SharedTensors())
    channel = control.RemoteChannel(None, 0, "127.0.0.1", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "met_in_a_pass")
    assert channel.loads(content)() == 1
    assert channel.about(At("a"))["modules"] == ["met_in_a_pass"]  # type: ignore[arg-type]
    channel.loads(content)
    assert channel.about(At("a")) == {"address": "a", "modules": []}  # type: ignore[arg-type]


@dataclass
class At:
    address: str
