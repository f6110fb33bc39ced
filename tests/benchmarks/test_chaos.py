"""The chaos soak: faults strike, nothing is lost, nothing is left; short here, long by hand."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest

from benchmarks.cluster import hosts as namespaces
from benchmarks.cluster.chaos import Work, chaos
from benchmarks.cluster.faults import Faults, OneHost
from benchmarks.cluster.hosts import Link
from tests.rigs.left import lives, wait_until

MISSING = namespaces.unavailable()


def test_faults_strike_at_moments_of_a_seed_and_a_pause_ends() -> None:
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(program) as other:
        with Faults(OneHost(lambda: [other.pid]), 1.0, 3, random.Random(2)) as faults:
            wait_until(lambda: sum(faults.done.values()) == 3 or not lives(other.pid), "all done")
        assert 0 < sum(faults.done.values()) <= 3
        os.kill(other.pid, signal.SIGKILL)
    assert not lives(other.pid)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["neighbours", "split", "pipeline"])
def test_nothing_is_lost_and_nothing_left_by_faults(way) -> None:
    workers = 2 if way == "pipeline" else 4
    found = chaos(Work(way, workers, seed=3, instances=100), 20.0, 4)
    assert found["lost"] == 0 and found["left"] == []
    (rough,) = found["disturbed"]
    assert rough["deaths"] > 0 and sum(rough["faults"].values()) == found["faults"] > 0
    if way == "neighbours":
        assert rough["joined"] > 0
    assert found["grown"]["open_files"] <= 8
    assert 0 < found["kept"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(MISSING is not None, reason=f"no hosts on this machine: {MISSING}")
@pytest.mark.parametrize("way", ["neighbours", "pipeline"])
def test_hosts_and_links_fail_and_nothing_is_lost_or_left_on_any_host(way) -> None:
    work = Work(way, 2, seed=5, instances=60, device_ms=60.0, hosts=Link(0.001, 1e9))
    found = chaos(work, 30.0, 4)
    assert found["lost"] == 0 and found["left"] == []
    assert found["faults"] == 4 and {"host", "cut"} & found["disturbed"][0]["faults"].keys()
    assert found["disturbed"][0]["deaths"] > 0
