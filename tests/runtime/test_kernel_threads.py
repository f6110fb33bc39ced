"""Kernel threads of the thread that waits for a pass, while others compute."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from geartrain.frames.instance import Instance
from geartrain.runtime.base import AbstractRuntime, Feeder
from geartrain.runtime.kernel_threads import cores_left_to_workers
from geartrain.runtime.processes.processes import Processes
from geartrain.runtime.threads import Threads
from tests.rigs.passes import Quiet
from tests.rigs.programs import Nursery, Program
from tests.runtime.test_contract import chain, engine_of, rows

LARGE = 1 << 20  # elements, which several threads share out

BY_OPENMP = torch.backends.openmp.is_available()
WITHOUT = "torch has no OpenMP here"

# By a signal: C would print threads from one of its own, which is counted here.
pytestmark = pytest.mark.timeout(120, method="signal")

needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="threads are counted where Linux has them"
)


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def falls_to(most: int) -> bool:
    """Whether that many threads are left; those that end take a moment."""
    until = time.monotonic() + 5.0
    while tasks() > most and time.monotonic() < until:
        os.sched_yield()
    return tasks() <= most


@pytest.fixture
def team() -> Iterator[int]:
    """The calling thread has computed with three threads; how many there are without them."""
    if not BY_OPENMP:
        pytest.skip(WITHOUT)
    faulthandler.cancel_dump_traceback_later()  # of the test before
    until, alone = time.monotonic() + 5.0, tasks()
    while tasks() != alone + 2 and time.monotonic() < until:  # a thread of a test before may leave
        with cores_left_to_workers():
            alone = tasks()
        torch.set_num_threads(3)
        torch.ones(LARGE).mul_(2.0)
    assert tasks() == alone + 2
    yield alone
    torch.set_num_threads(1)


@needs_linux
def test_whoever_waits_has_no_kernel_threads_and_has_them_again_afterwards(team: int) -> None:
    with cores_left_to_workers():
        assert torch.get_num_threads() == 1
        assert falls_to(team)
    assert torch.get_num_threads() == 3
    torch.ones(LARGE).mul_(2.0)
    assert tasks() == team + 2


@needs_linux
@pytest.mark.parametrize("make", [Threads, Processes])
def test_the_cores_are_left_to_the_workers_of_a_pass(
    team: int, make: type[Threads] | type[Processes]
) -> None:
    seen: list[bool] = []
    there = 1 if make is Threads else 2  # a worker, or threads of ZeroMQ

    def watched() -> Iterator[Instance]:
        for row in rows(5):
            seen.append(falls_to(team + there))
            yield row

    runtime: AbstractRuntime = make(1, kernel_threads=1)
    engine = engine_of(chain(), 1)
    engine.begin(train=True)
    runtime.run(engine, Feeder(watched()), Quiet())
    assert all(seen) and len(seen) == 5
    assert torch.get_num_threads() == 3
    if isinstance(runtime, Processes):
        runtime.close()


FORKS = f"""
import os, signal, torch
from geartrain.runtime.processes.forking import get_ready

def computed_with() -> int:
    torch.set_num_threads(3)
    torch.ones({LARGE}).mul_(2.0)
    return len(os.listdir("/proc/self/task"))

before = computed_with()
get_ready()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    os._exit(computed_with())
print(before, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@needs_linux
def test_who_forks_workers_has_no_team_that_they_would_wait_for(
    nursery: Nursery, tmp_path: Path
) -> None:
    if not BY_OPENMP:
        pytest.skip(WITHOUT)
    before, inside = map(int, str(Program(nursery, tmp_path / "run", FORKS).line()).split())
    assert before >= 3 and inside == 3
