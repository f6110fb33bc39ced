"""Ray's head and nodes on hosts of their own: where workers are, and when a host is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import geartrain as gt
from benchmarks.cluster import hosts as bench
from benchmarks.cluster.hosts import Host, Hosts, Link
from tests.rigs.on_ray import RAY
from tests.rigs.pairs import pairs
from tests.runtime.test_ray import one_at_a_time, weights_of

MISSING = bench.unavailable()
pytestmark = [
    *RAY,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(MISSING is not None, reason=f"no hosts on this machine: {MISSING}"),
]
PORT = 6379
EPOCHS, PAIRS = 2, 60
ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import json, sys
import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument
from tests.rigs.pairs import pairs
from tests.runtime.test_ray import one_at_a_time, weights_of

class Steps(AbstractInstrument):
    told = False

    def on_updated(self, event):
        if not self.told:
            self.told = True
            print(json.dumps({{"began": list(runtime.pids)}}), flush=True)

runtime = gt.Ray(
    2, sys.argv[1], resources={{"CPU": 1}}, strategy="STRICT_SPREAD", kernel_threads=1,
    wait_s=120.0, on_worker_death="restore",
)
session = one_at_a_time(runtime)
session.instruments.append(Steps())
fit = session.fit(pairs({PAIRS}), epochs={EPOCHS})
pids = list(runtime.pids)
weights = [x.tolist() for x in weights_of(session)]
print(json.dumps({{"weights": weights, "deaths": fit.deaths, "pids": pids}}), flush=True)
sys.stdin.readline()
runtime.close()
"""


class Cluster:
    """A head on the first host, which takes no workers, and a node with two CPUs on each other."""

    def __init__(self, hosts: Hosts, folder: str) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000",
        }
        self.hosts = hosts
        self.address = f"{hosts[0].address}:{PORT}"
        first = ("--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false")
        self.heads = [self._start(hosts[0], 0, *first)]
        for host in hosts[1:]:
            self.heads.append(self._start(host, 2, f"--address={self.address}"))

    def _start(self, host: Host, cpus: int, *words: str) -> subprocess.Popen[Any]:
        command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words)
        more = (f"--node-ip-address={host.address}", f"--num-cpus={cpus}", "--num-gpus=0")
        process = host.popen(
            [*command, *more, f"--object-store-memory={100 << 20}"],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in process.stdout:
            if "Ray runtime started" in line:
                return process
        raise AssertionError(f"Ray has not started on {host.address}")

    def run(self) -> subprocess.Popen[str]:
        """The program that trains, on the first host."""
        return self.hosts[0].popen(
            [sys.executable, "-c", PROGRAM, self.address],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        for host in self.hosts:
            kill_all(host)
        for process in self.heads:
            process.wait(30)
            process.stdout.close()


def kill_all(host: Host) -> None:
    """What runs on a host ends as when its power goes."""
    for pid in host.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))
        hosts = stack.enter_context(Hosts(4, Link(latency_s=0.001)))
        made = Cluster(hosts, folder)
        stack.callback(made.close)
        yield made


def said(source: IO[str]) -> Mapping[str, Any]:
    """The next line of the program that is its own; Ray prints what it likes."""
    for line in source:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("the program has ended")


def of(hosts: Hosts, pids: list[int]) -> list[int]:
    """Numbers of the hosts on which these processes are."""
    return [next(h.number for h in hosts if pid in h.pids) for pid in pids]


def test_workers_are_on_hosts_of_their_own_and_one_whose_host_goes_begins_again_on_another(cluster):
    hosts, program = cluster.hosts, cluster.run()
    try:
        where = of(hosts, said(program.stdout)["began"])
        assert len(set(where)) == 2 and 0 not in where
        gone = hosts[where[1]]
        hosts.cut(gone.number)
        kill_all(gone)
        told = said(program.stdout)
        after = of(hosts, told["pids"])
        assert len(set(after)) == 2 and not {0, gone.number} & set(after)
        assert told["deaths"] >= 1
        assert hosts.counts(after[0], after[1]).nbytes > 0
    finally:
        program.communicate("\n", timeout=60)
    undisturbed = one_at_a_time(gt.Threads(1))
    undisturbed.fit(pairs(PAIRS), epochs=EPOCHS)
    weights = [torch.tensor(x, dtype=torch.float64) for x in told["weights"]]
    assert all(x.equal(y) for x, y in zip(weights, weights_of(undisturbed), strict=True))
    assert program.returncode == 0
