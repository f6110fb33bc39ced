"""Kills at random moments, over fits with checkpoints: nothing is lost, nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.errors import WorkerDiedError
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.processes.server import ForkServer
from tests.rigs.left import children, living, wait_until

EPOCHS, INSTANCES, EVERY = 3, 60, 20
BOUND_S = 60.0


class Killer(threading.Thread):
    """Kills a process, after so many seconds or when it is told to stop."""

    def __init__(self, runtime: Processes, after_s: float, *, server: bool, which: int) -> None:
        super().__init__(name="killer")
        self.runtime, self.after_s, self.server, self.which = runtime, after_s, server, which
        self.stopped = threading.Event()
        self.killed: int | None = None

    def run(self) -> None:
        self.stopped.wait(self.after_s)
        pids = self.runtime.pids
        if not pids or self.stopped.is_set():
            return
        pid = ForkServer.of_this_process().pid if self.server else pids[self.which % len(pids)]
        try:
            os.kill(pid, signal.SIGKILL)
            self.killed = pid
        except ProcessLookupError:
            pass


def session(runtime: Processes) -> gt.Session:
    torch.manual_seed(0)
    graph = gt.Graph()
    x = graph.input("x")
    for k, (n, m) in enumerate(((2, 8), (8, 8), (8, 1))):
        x = x.through(nn.Sequential(nn.Linear(n, m), nn.Tanh()), name=f"map {k}")
    x.loss(lambda y: y.square().sum(1), name="loss")
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-3), update_every=8)
    return gt.Session(graph, rules=rules, runtime=runtime, max_active=8)


def data() -> list[gt.Instance]:
    drawn = torch.Generator().manual_seed(0)
    return [gt.Instance({"x": torch.randn(2, 2, generator=drawn)}, key=i) for i in range(INSTANCES)]


def until_done(
    runtime: Processes, folder: Path, draw: random.Random, kills: list[bool], late: set[int]
) -> int:
    """A run that goes on from its last checkpoint after each death; returns how many there were.

    ``late`` has who was killed as a fit had come to its end: the next one hears of that.
    """
    deaths, latest = 0, folder / "latest.safetensors"
    while True:
        mine = session(runtime)
        if latest.exists():
            mine.load(latest)
        server = kills.pop() if kills else None
        killer = Killer(
            runtime, draw.uniform(0.0, 0.4), server=bool(server), which=draw.randrange(2)
        )
        if server is not None:
            killer.start()
        try:
            mine.fit(data(), epochs=EPOCHS, folder=folder, checkpoint_every=EVERY)
        except WorkerDiedError as error:
            deaths += 1
            killer.stopped.set()
            killer.join(BOUND_S)  # it may be told of sooner than the killer has come back
            assert killer.killed is not None or any(f"process {p})" in str(error) for p in late)
            continue
        finally:
            killer.stopped.set()
            if server is not None:
                killer.join(BOUND_S)
                assert not killer.is_alive()
            late.clear()
        late |= {killer.killed} - {None}
        # Every instance once an epoch, however often some were repeated on the way there.
        assert mine.statistics()["trained"] == EPOCHS * INSTANCES
        assert [event.instances for event in mine.state.position.history] == [INSTANCES] * EPOCHS
        for part in mine.parts.values():
            assert all(bool(p.isfinite().all()) for p in part.module.parameters())
        return deaths


def soak(tmp_path: Path, n: int, servers: int) -> Counter[str]:
    """So many kills, some of them of the fork server."""
    draw = random.Random(n)
    runtime = Processes(2, kernel_threads=1)
    kills = [True] * servers + [False] * (n - servers)
    draw.shuffle(kills)
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    late: set[int] = set()
    while kills:
        folder = tmp_path / str(counts["runs"])
        left = len(kills)
        counts["deaths"] += until_done(runtime, folder, draw, kills, late)
        counts["kills"] += left - len(kills)
        counts["runs"] += 1
        seen |= set(runtime.pids)
    runtime.close()
    server = ForkServer.of_this_process()
    assert living(seen) == []
    wait_until(lambda: not children(server.pid), "all workers have ended")
    assert list(server.folder.iterdir()) == []
    return counts


def test_a_run_goes_on_after_five_kills(tmp_path):
    counts = soak(tmp_path, 5, servers=0)
    assert counts["kills"] == 5 and counts["deaths"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_go_on_after_two_hundred_kills(tmp_path):
    counts = soak(tmp_path, 200, servers=8)
    assert counts["kills"] == 200 and counts["deaths"] >= 100
