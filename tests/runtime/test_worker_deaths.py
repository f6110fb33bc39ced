"""Workers that are killed, stopped or leave: it is told, the next pass works, nothing is left."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.errors import GeartrainError, WorkerDiedError, WorkerError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.native import library
from geartrain.parts.rules import Rules
from geartrain.runtime.base import Feeder
from geartrain.runtime.processes import handing, pool
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.processes.server import ForkServer
from tests.rigs import struck
from tests.rigs.left import children, living, open_files, shared_bytes, wait_until
from tests.rigs.passes import AT_ONCE, Quiet
from tests.rigs.struck import Homesick, Locked, Struck, Waiting

SLOW = pytest.mark.slow

TOLD_S = 2.0
"""From a death until it is told."""


@cache
def processes() -> Processes:
    """One for all tests: cheaper."""
    return Processes(3, kernel_threads=1)


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def chain(*more: nn.Module) -> Graph:
    torch.manual_seed(0)
    graph = Graph(vertex=("slot",))
    x = graph.input("x")
    for k, module in enumerate((nn.Linear(2, 3), *more, nn.Linear(3, 2))):
        x = x.through(module, name=f"map {k}")
    x.loss(squares)
    return graph


def rows(n: int, each: int = 4) -> list[Instance]:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((n, each, 2)).astype(np.float32))
    return [Instance({"x": x[i]}, {"slot": np.arange(each)}, key=i) for i in range(n)]


def run(graph: Graph, watch: Quiet | None = None, n: int = 100) -> Engine:
    """One pass of training."""
    runtime = processes()
    parts = make_parts(graph, Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=7))
    settings = Settings(max_active=8, ramp=AT_ONCE, max_rows=16)
    engine = Engine(graph, parts, settings, runtime.workers)
    engine.begin(train=True)
    runtime.run(engine, Feeder(iter(rows(n))), watch or Quiet())
    engine.check_empty()
    assert engine.controller.finished == n
    return engine


def told(graph: Graph, watch: Quiet | None = None) -> WorkerDiedError:
    """The error of a pass in which somebody dies; all have ended then, and a next pass works."""
    runtime = processes()
    run(chain())
    pids = runtime.pids
    with pytest.raises(WorkerDiedError) as caught:
        run(graph, watch, n=100_000)
    assert living(pids) == []
    assert list(ForkServer.of_this_process().folder.iterdir()) == []
    assert all(bool(p.isfinite().all()) for m in graph.modules() for p in m.parameters())
    run(chain())
    assert set(runtime.pids).isdisjoint(pids)
    assert "a call goes on with new processes" in str(caught.value)
    if caught.value.worker is not None:
        assert f"worker {caught.value.worker} (process {pids[caught.value.worker]})" in str(
            caught.value
        )
    return caught.value


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (struck.kill, r"was killed by SIGKILL \(9\) while firing .map 1. .*memory"),
        pytest.param(
            struck.segfault,
            r"was killed by SIGSEGV \(11\) while firing 'map 1' ",
            marks=SLOW,
        ),
        pytest.param(
            struck.terminate,
            r"was killed by SIGTERM \(15\) while firing 'map 1' ",
            marks=SLOW,
        ),
        pytest.param(struck.leave, r"has exited with status 3 while firing 'map 1' ", marks=SLOW),
    ],
    ids=["kill", "segfault", "terminate", "exit"],
)
def test_a_worker_that_dies_in_a_firing_is_told_with_node_and_reason(how, said):
    module = Struck(how)
    error = told(chain(module))
    assert error.worker is not None
    error.add_note("")
    with pytest.raises(WorkerDiedError, match=said):
        raise error


def test_it_is_told_within_two_seconds_and_says_which_way_it_went():
    module = Struck(struck.kill, backward=True)
    runtime = processes()
    with pytest.raises(WorkerDiedError, match="while firing 'map 1' backward"):
        run(chain(module), n=100_000)
    assert 0 < float(module.struck_s) and time.monotonic() - float(module.struck_s) < TOLD_S
    assert runtime.pids == ()


class Killing(Quiet):
    """Sends a signal after ten instances."""

    def __init__(self, pid: int, number: int = signal.SIGKILL) -> None:
        self.pid, self.number, self.sent = pid, number, False

    def finished(self, engine, now_s):
        if engine.controller.finished >= 10 and not self.sent:
            self.sent = True
            os.kill(self.pid, self.number)


@pytest.mark.parametrize("worker", [0, pytest.param(2, marks=SLOW)])
def test_a_worker_that_is_killed_from_outside_is_told(worker):
    run(chain())
    error = told(chain(), Killing(processes().pids[worker]))
    assert error.worker == worker
    assert "was killed by SIGKILL (9)" in str(error)
    assert "between two firings" in str(error) or "while firing 'map" in str(error)


def test_a_worker_that_is_killed_between_two_passes_is_not_missed():
    run(chain())
    pids = processes().pids
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not living(pids[1:2]), "it has ended")
    run(chain())
    assert set(processes().pids).isdisjoint(pids)
    assert living(pids) == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            struck.leave_politely,
            "^SystemExit in worker [012], in node 'map 1' of part .* rows.*: 4",
        ),
        (struck.interrupt, "^KeyboardInterrupt in worker [012], in node 'map 1' of part .* rows"),
        (struck.run_out_of_memory, r"MemoryError in node 'map 1' .*no room for 3 rows"),
    ],
    ids=["sys.exit", "interrupt", "memory"],
)
def test_a_module_that_leaves_by_an_exception_does_not_end_its_process(how, said):
    run(chain())
    pids = processes().pids
    with pytest.raises(WorkerError, match=said) as caught:
        run(chain(Struck(how)))
    assert not isinstance(caught.value, WorkerDiedError)
    run(chain())
    assert processes().pids == pids


def test_errors_come_with_cause_notes_and_the_traceback_of_the_worker():
    with pytest.raises(WorkerError, match="RuntimeError in node 'map 1'") as caught:
        run(chain(Struck(struck.raise_with_notes)))
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError) and isinstance(cause.__cause__, OSError)
    text = "\n".join(caught.value.__notes__)
    assert "in worker process" in text and "in raise_with_notes" in text
    assert "the disk is gone" in text and "it was table 7" in text


def test_a_worker_that_is_stopped_is_told_and_ended():
    module = Struck(struck.stop)
    error = told(chain(module))
    assert "has been stopped, as by SIGSTOP, for 3 s, while firing 'map 1' " in str(error)
    assert time.monotonic() - float(module.struck_s) < 60


@pytest.mark.slow
def test_a_worker_that_is_stopped_before_a_pass_is_told_and_ended(monkeypatch):
    monkeypatch.setattr(pool, "_STOPPED_LOOKS", 1)
    run(chain())
    pids = processes().pids
    os.kill(pids[2], signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match=r"worker 2 .* has been stopped"):
        run(chain())
    assert living(pids) == []
    run(chain())


def test_a_process_that_stops_itself_for_a_while_blames_nobody(monkeypatch):
    """As by Ctrl-Z and fg: what counts is how often a worker is found stopped, not how long."""
    run(chain())
    mine = processes()._pool
    pid = processes().pids[0]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: pool._state_of(pid) == "T", "it is stopped")
    monkeypatch.setattr(pool, "_LOOK_S", 0.0)
    mine.check()
    monkeypatch.setattr(mine, "_looked_s", -3600.0)
    mine.check()
    os.kill(pid, signal.SIGCONT)
    run(chain())
    assert processes().pids[0] == pid


def test_a_graph_that_cannot_be_pickled_is_refused_with_the_place_and_the_remedy():
    run(chain())
    pids = processes().pids
    with pytest.raises(ValueError, match=r"in part 'map 1': Locked.lock, a lock.*gt.Threads"):
        run(chain(Locked()))
    with pytest.raises(ValueError, match=r"in part 'map 1', its module '1': Locked.lock"):
        run(chain(nn.Sequential(nn.Tanh(), Locked())))
    run(chain())
    assert set(processes().pids).isdisjoint(pids) or processes().pids == pids


def test_a_module_that_cannot_be_made_again_in_a_worker_is_told_at_once():
    began = time.monotonic()
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_nowhere") as caught:
        run(chain(Homesick()))
    assert time.monotonic() - began < processes().patience_s / 2
    assert any("importable there" in note for note in caught.value.__notes__)
    run(chain())


def test_a_worker_that_says_nothing_of_what_it_was_handed_is_told_and_ended(monkeypatch):
    monkeypatch.setattr(handing, "HANDED_S", 0.5)
    kill, sent = os.kill, []

    def noted(pid: int, number: int) -> None:
        sent.append((pid, number))
        kill(pid, number)

    monkeypatch.setattr(os, "kill", noted)
    with pytest.raises(
        WorkerDiedError, match=r"worker \d has said nothing for 0 s of what"
    ) as told:
        run(chain(Waiting()))
    found = re.search(
        r"its process, (\d+), is (waiting|ready to run), \d+\.\d\d s", str(told.value)
    )
    assert found is not None
    assert (int(found[1]), signal.SIGUSR1) in sent, "it prints where it is"
    monkeypatch.undo()
    run(chain())


def test_a_worker_that_does_not_take_what_it_is_handed_is_told_and_ended(monkeypatch):
    run(chain())
    monkeypatch.setattr(handing, "HANDED_S", 0.5)
    monkeypatch.setattr(pool, "_STOPPED_LOOKS", 1000)  # it lives, and nothing tells why it waits
    heavy = nn.Linear(3, 3)
    heavy.more = bytes(1 << 22)  # than there is room for on the way
    os.kill(processes().pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match=r"worker 1 has said nothing for 0 s of what it was"):
        run(chain(heavy))
    monkeypatch.undo()
    run(chain())


def test_passes_leave_no_files_open_and_no_memory():
    for _ in range(2):
        run(chain(), n=5)
    gc.collect()
    files, mapped = open_files(), shared_bytes()
    theirs = [shared_bytes(pid) for pid in processes().pids]
    for _ in range(20):
        run(chain(), n=5)
        gc.collect()
    assert len(open_files()) <= len(files) + 1, set(open_files()) - set(files)
    assert shared_bytes() <= 2 * mapped
    for pid, before in zip(processes().pids, theirs, strict=True):
        assert shared_bytes(pid) <= 2 * before


def test_fits_of_one_session_add_no_memory():
    session = gt.Session(
        chain(), rules=Rules(optimizer=partial(torch.optim.Adam, lr=0.01)), runtime=processes()
    )
    for epoch in (1, 2):
        session.fit(rows(9), epochs=epoch)
    regions = len(processes()._pool.shared.regions)
    for epoch in (3, 4, 5):
        session.fit(rows(9), epochs=epoch)
    assert len(processes()._pool.shared.regions) == regions


@pytest.mark.slow
def test_fresh_sessions_on_one_runtime_add_no_memory():
    def fit() -> None:
        optimizer = partial(torch.optim.Adam, lr=0.01)
        session = gt.Session(chain(), rules=Rules(optimizer=optimizer), runtime=processes())
        session.fit(rows(9), epochs=2)

    for _ in range(2):
        fit()
        gc.collect()
    here, theirs = shared_bytes(), [shared_bytes(pid) for pid in processes().pids]
    regions = len(processes()._pool.shared.regions)
    for _ in range(5):
        fit()
        gc.collect()
    assert shared_bytes() <= 2 * here
    assert all(
        shared_bytes(pid) <= 2 * before
        for pid, before in zip(processes().pids, theirs, strict=True)
    )
    assert len(processes()._pool.shared.regions) == regions


@pytest.mark.slow
def test_weights_outlive_the_worker_processes():
    graph = chain()
    run(graph)
    before = [p.detach().clone() for m in graph.modules() for p in m.parameters()]
    processes().close()
    gc.collect()
    after = [p for m in graph.modules() for p in m.parameters()]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    after[0].data.add_(1.0)


def test_a_closed_runtime_has_no_processes_and_goes_on_when_asked():
    run(chain())
    pids = processes().pids
    processes().close()
    assert living(pids) == [] and processes().pids == ()
    run(chain())


def test_a_runtime_that_is_dropped_ends_its_workers():
    runtime = Processes(1, kernel_threads=1)
    parts = make_parts(graph := chain(), Rules())
    engine = Engine(graph, parts, Settings(max_active=8, ramp=AT_ONCE))
    engine.begin(train=True)
    runtime.run(engine, Feeder(iter(rows(3))), Quiet())
    pids = runtime.pids
    assert living(pids) == list(pids)
    del runtime, engine, parts, graph
    gc.collect()
    wait_until(lambda: not living(pids), "its workers have ended")


def test_a_fork_that_fails_leaves_no_channel_of_the_forks_before_it(monkeypatch):
    server = ForkServer.of_this_process()
    made, fork = [], ForkServer.fork

    def second_fails(self, worker):
        if worker == 1:
            raise GeartrainError("no worker process more can be made")
        made.append(fork(self, worker))
        return made[-1]

    monkeypatch.setattr(ForkServer, "fork", second_fails)
    with pytest.raises(GeartrainError, match="no worker process more"):
        pool.Pool(2)
    assert made[0][1].socket.fileno() == -1
    wait_until(lambda: made[0][0] not in children(server.pid), "the first one has ended")


@pytest.mark.slow
def test_a_fork_server_that_is_stopped_is_told_and_another_one_made(monkeypatch):
    monkeypatch.setattr(pool, "_STOPPED_LOOKS", 1)
    run(chain())
    server = ForkServer.of_this_process()
    pids = [server.pid, *processes().pids]
    with pytest.raises(WorkerDiedError, match=r"forks workers .* has been stopped"):
        run(chain(), Killing(server.pid, signal.SIGSTOP), n=100_000)
    wait_until(lambda: not living(pids), "all have ended")
    assert not server.folder.exists()


@pytest.mark.slow
def test_a_fork_server_that_is_killed_is_told_and_another_one_made():
    run(chain())
    server = ForkServer.of_this_process()
    pids = [server.pid, *processes().pids]
    assert sorted(children(server.pid)) == sorted(pids[1:])
    with pytest.raises(WorkerDiedError, match=r"forks workers .* has died"):
        run(chain(), Killing(server.pid), n=100_000)
    wait_until(lambda: not living(pids), "all have ended")
    assert not server.folder.exists()
    run(chain())
    assert ForkServer.of_this_process().pid != server.pid


def test_who_forks_workers_has_loaded_the_kernels_and_runs_one_thread():
    run(chain())
    pid = ForkServer.of_this_process().pid
    found = library.current()
    maps = (Path("/proc") / str(pid) / "maps").read_text()
    assert all(str(path) in maps for path in (() if found is None else found.paths))
    assert len(os.listdir(f"/proc/{pid}/task")) == 1


def test_workers_have_no_open_file_of_who_forked_them_but_the_folder():
    """An end of a channel that somebody else has would keep its end from being heard."""
    run(chain())
    server = ForkServer.of_this_process()

    def files(pid: int) -> list[str]:
        found = []
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has been closed meanwhile
                found.append(os.readlink(fd))
        return found

    inherited = [os.readlink(f"/proc/{server.pid}/fd/{number}") for number in range(3)]
    for pid in processes().pids:
        wait_until(lambda pid=pid: "anon_inode:[eventpoll]" not in files(pid), "sockets are closed")
        found = [file for file in files(pid) if file not in inherited]
        assert len([file for file in found if file.startswith("socket:")]) == 1
        assert not [file for file in found if file.startswith("pipe:") or "pidfd" in file]
