"""A program with worker processes ends, in whatever way: nothing of it is left."""

from __future__ import annotations

import os
import signal
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geartrain.runtime.processes import server
from tests.rigs.left import lives, living, wait_until
from tests.rigs.programs import Nursery, Program

GONE_S = 5.0
"""Two seconds, on a machine that does nothing else."""

SLOW = pytest.mark.slow

PRELUDE = """
import os, signal, socket, sys, time
from functools import partial
import torch
import geartrain as gt
from geartrain.runtime.processes import server
from torch import nn

class Forked:
    \"\"\"A fork server without an import of torch: it is forked from here, and knows all.\"\"\"
    def __init__(self, fd, folder):
        parent = os.getpid()
        self.pid, self.status = os.fork(), None
        if self.pid == 0:
            os.setsid()
            os.closerange(3, fd)
            os.closerange(fd + 1, 1024)
            try:
                server.serve(server.Control(socket.socket(fileno=fd)), folder, parent)
            finally:
                os._exit(0)
    def poll(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status
    def wait(self, timeout=None):
        until = time.monotonic() + (timeout or 60)
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        return self.status
    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

server.start = Forked
os.setsid()
torch.set_num_threads(1)
torch.manual_seed(0)
runtime = gt.Processes(2, kernel_threads=1)

def say(*words):
    print(*words, flush=True)

class Twice(nn.Module):
    \"\"\"Of a script: in no file that could be imported.\"\"\"
    def forward(self, x):
        return 2 * x

class Does(gt.AbstractInstrument):
    \"\"\"Says who works, and then does something, once.\"\"\"
    def __init__(self, act=None):
        self.act, self.updates = act, 0
    def on_updated(self, event):
        self.updates += 1
        if self.updates == 4:
            at = server.ForkServer.of_this_process()
            say("works", at.folder, at.pid, *runtime.pids)
            if self.act:
                self.act()

def session(instrument):
    graph = gt.Graph()
    x = graph.input("x").through(nn.Linear(3, 4), name="first").through(Twice(), name="twice")
    x.through(nn.Linear(4, 2), name="last").loss(lambda y: y.square().sum(1))
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=4)
    return gt.Session(graph, rules=rules, runtime=runtime, max_active=8, instruments=[instrument])

drawn = torch.Generator().manual_seed(0)
rows = [gt.Instance({"x": torch.randn(2, 3, generator=drawn)}, key=i) for i in range(100)]
"""

Start = Callable[[str], Program]


@pytest.fixture
def program(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Start a program of the prelude and a script."""
    running: list[Program] = []

    def start(script: str) -> Program:
        whole = PRELUDE + textwrap.dedent(script)
        running.append(Program(nursery, tmp_path / str(len(running)), whole, whole=True))
        return running[-1]

    yield start
    for each in running:
        each.close()


def who_works(run: Program) -> tuple[Path, list[int]]:
    """The folder of its sockets, and its server and workers."""
    folder, *pids = run.until("works").split()[1:]
    found = [int(pid) for pid in pids]
    assert len(found) == 3
    return Path(folder), found


def nothing_is_left(folder: Path, pids: list[int]) -> None:
    wait_until(lambda: not living(pids), f"{living(pids)} have ended", GONE_S)
    wait_until(lambda: not folder.exists(), f"{folder} is removed", GONE_S)


def test_a_parent_that_is_killed_takes_all_with_it(program):
    run = program("session(Does()).fit(rows, epochs=100_000)")
    folder, pids = who_works(run)
    assert living(pids) == pids and folder.is_dir()
    run.send(signal.SIGKILL)
    nothing_is_left(folder, pids)


@pytest.mark.slow
def test_a_parent_that_is_killed_takes_all_with_it_though_a_fork_of_it_lives_on(program):
    """Such as one that loads data: it has the parent's end of the channels."""
    run = program("""
        def fork():
            other = os.fork()
            if other == 0:
                time.sleep(60)
                os._exit(0)
            say("forked", other)
        session(Does(fork)).fit(rows, epochs=100_000)
    """)
    folder, pids = who_works(run)
    other = int(run.until("forked").split()[1])
    try:
        run.send(signal.SIGKILL)
        nothing_is_left(folder, pids)
        assert lives(other)
    finally:
        os.kill(other, signal.SIGKILL)


@pytest.mark.slow
def test_a_whole_group_that_is_killed_leaves_nothing(program):
    run = program("session(Does()).fit(rows, epochs=100_000)")
    folder, pids = who_works(run)
    os.killpg(run.pid, signal.SIGKILL)
    nothing_is_left(folder, pids)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("session(Does()).fit(rows, epochs=1)", 0),
        ("session(Does(lambda: sys.exit(5))).fit(rows, epochs=100_000)", 5),
        pytest.param("session(Does(lambda: 1 / 0)).fit(rows, epochs=100_000)", 1, marks=SLOW),
        pytest.param(
            "session(Does(lambda: os._exit(6))).fit(rows, epochs=100_000)",
            6,
            marks=SLOW,
        ),
        pytest.param(
            "kept = session(Does()); kept.fit(rows, epochs=1); runtime.close()",
            0,
            marks=SLOW,
        ),
    ],
    ids=["ends", "exits", "raises", "leaves at once", "closes"],
)
def test_a_program_that_ends_leaves_nothing(program, script, status):
    run = program(script)
    folder, pids = who_works(run)
    ended, errors = run.end()
    assert ended == status, errors
    nothing_is_left(folder, pids)


HELD = """
class Twice(nn.Module):
    def forward(self, x):
        while os.path.exists(HOLD):
            open(HOLD + ".held", "w").close()
            time.sleep(0.01)
        return 2 * x
"""


def test_folders_that_nobody_uses_any_more_are_swept_away(tmp_path, monkeypatch):
    """As when parent, server and workers were all killed at once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("sockets-old", "sockets-held", "sockets-fresh", "else"):
        (tmp_path / f"geartrain-{name}").mkdir()
        (tmp_path / f"geartrain-{name}" / "0.1").touch()
        if name != "sockets-fresh":
            os.utime(tmp_path / f"geartrain-{name}", (0, 0))
    (tmp_path / "geartrain-sockets-link").symlink_to(tmp_path / "geartrain-else")
    held = server.hold(tmp_path / "geartrain-sockets-held")
    server.sweep()
    os.close(held)
    left = {path.name.removeprefix("geartrain-") for path in tmp_path.iterdir()}
    assert left == {"sockets-held", "sockets-fresh", "sockets-link", "else"}
    assert (tmp_path / "geartrain-else" / "0.1").exists()


INTERRUPTED = """
    mine = session(Does())
    try:
        mine.fit(rows, epochs=100_000)
    except KeyboardInterrupt as error:
        say("ended:", error)
    pids = runtime.pids
    trained = mine.statistics()["trained"]
    say("then", mine.fit(rows, epochs=mine.state.position.epoch).instances + trained)
    say("same", pids == runtime.pids and len(pids))
"""


def test_ctrl_c_to_all_processes_finishes_what_is_in_flight(program):
    run = program(INTERRUPTED)
    folder, pids = who_works(run)
    os.killpg(run.pid, signal.SIGINT)
    assert "everything that was in flight has finished" in run.until("ended:")
    assert int(run.until("then").split()[1]) % 100 == 0
    assert run.until("same") == "same 2"
    assert run.end()[0] == 0
    nothing_is_left(folder, pids)


def test_ctrl_c_twice_abandons_what_is_in_flight(program, tmp_path):
    hold = tmp_path / "hold"  # as long as it is there no firing of one node ends
    run = program(f"HOLD = {str(hold)!r}\n" + HELD + textwrap.dedent(INTERRUPTED))
    folder, pids = who_works(run)
    hold.touch()
    wait_until(Path(f"{hold}.held").exists, "something is held")
    os.killpg(run.pid, signal.SIGINT)
    wait_until(lambda: "once more" in run.errors(), "heard")
    os.killpg(run.pid, signal.SIGINT)
    wait_until(lambda: "interrupted again" in run.errors(), "heard again")
    hold.unlink()
    assert "what was in flight is abandoned" in run.until("ended:")
    run.until("same")
    assert run.end()[0] == 0
    nothing_is_left(folder, pids)
