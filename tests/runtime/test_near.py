"""Workers with no memory in common that are on the parent's host talk by socket files there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch

import geartrain as gt
from geartrain.errors import WorkerDiedError
from geartrain.runtime.hosts.hosts import Hosts
from geartrain.runtime.hosts.near import Meeting, Near, this_host
from geartrain.transport.link import Transport
from tests.rigs.killing import Killer
from tests.rigs.left import wait_until
from tests.rigs.pairs import graph_of_pairs, pairs


@cache
def near() -> Hosts:
    return Hosts(2, kernel_threads=1)


def session(runtime: object) -> gt.Session:
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)
    return gt.Session(graph_of_pairs(), rules=rules, runtime=runtime, max_active=1)  # type: ignore[arg-type]


def weights(of: gt.Session) -> list[torch.Tensor]:
    return [p.detach().clone() for part in of.parts.values() for p in part.parameters]


def test_a_run_over_socket_files_is_that_of_one_thread_to_the_last_bit(monkeypatch):
    places = []
    made = Transport.__init__

    def see(self, me, n, at, *more, **given):
        places.append(at)
        made(self, me, n, at, *more, **given)

    runs = session(near()), session(gt.Threads(1))
    monkeypatch.setattr(Transport, "__init__", see)
    for run in runs:
        run.fit(pairs(12), epochs=2)
    assert all(x.equal(y) for x, y in zip(*map(weights, runs), strict=True))
    folder = near()._pool._meeting.folder  # type: ignore[union-attr]
    passes = [at for at in places if isinstance(at, Path)]
    assert passes == [folder] * 2, "each pass is by socket files"
    assert folder.stat().st_mode & 0o777 == 0o700 and [*folder.iterdir()] == []


def test_a_death_leaves_no_socket_file_and_closing_no_folder():
    runtime = near()
    run = session(runtime)
    run.fit(pairs(4), epochs=1)
    folder = runtime._pool._meeting.folder  # type: ignore[union-attr]
    run.instruments.append(Killer(runtime, {3}))
    with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL"):
        run.fit(pairs(300), epochs=2)
    assert not folder.exists()
    session(runtime).fit(pairs(4), epochs=1)
    again = runtime._pool._meeting.folder  # type: ignore[union-attr]
    runtime.close()
    assert not again.exists()


@pytest.mark.parametrize("what", ["host", "mode", "gone", "user", "long"])
def test_whoever_is_elsewhere_or_finds_an_open_folder_is_not_near(what, monkeypatch, tmp_path):
    meeting = Meeting()
    try:
        found = meeting.near
        assert found.is_here
        if what == "host":
            found = Near(found.folder, "another boot")
        elif what == "mode":
            meeting.folder.chmod(0o750)
        elif what == "gone":
            found = Near(str(tmp_path / "nothing"), found.host)
        elif what == "user":
            uid = os.getuid() + 1
            monkeypatch.setattr(os, "getuid", lambda: uid)
            found = Near(found.folder, this_host())
        else:
            long = tmp_path / ("x" * 90)
            long.mkdir(mode=0o700)
            found = Near(str(long), found.host)
        assert not found.is_here
    finally:
        monkeypatch.undo()
        meeting.close()
    assert not meeting.folder.exists()


PROGRAM = """
import geartrain as gt
from tests.rigs.pairs import graph_of_pairs, pairs
runtime = gt.Hosts(1, kernel_threads=1)
session = gt.Session(graph_of_pairs(), runtime=runtime)
session.fit(pairs(4), epochs=1)
print(runtime._pool._meeting.folder, flush=True)
session.fit((p for _ in range(100_000) for p in pairs(4)), epochs=2)
"""


@pytest.mark.slow
def test_when_the_parent_is_killed_its_folder_is_removed():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        folder = Path(parent.stdout.readline().decode().strip())
        assert folder.is_dir()
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not folder.exists(), "the keeper has removed it")
