"""Faults of hosts and links, and programs that are started on hosts over a connection."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from benchmarks.cluster import faults as bench
from benchmarks.cluster import hosts as namespaces
from benchmarks.cluster import login
from benchmarks.cluster.faults import Faults, ManyHosts, addresses
from benchmarks.cluster.hosts import Host, Hosts, Link
from tests.rigs.left import lives, wait_until

MISSING = namespaces.unavailable()
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=f"no hosts on this machine: {MISSING}"),
    pytest.mark.slow,
]


@contextmanager
def three() -> Iterator[tuple[Hosts, ManyHosts, list[int]]]:
    """Two hosts and that of a program; processes that stand for its workers are put into a list."""
    pids: list[int] = []
    with Hosts(3, Link()) as hosts:
        ground = ManyHosts(hosts, lambda: [pid for pid in pids if lives(pid)])
        try:
            yield hosts, ground, pids
        finally:
            ground.close()


def on(hosts: Hosts, k: int, *words: str) -> subprocess.Popen[bytes]:
    """A command on a host, from that of the program."""
    here: Host = hosts[-1]
    address, command = addresses(hosts)[k]
    assert address == hosts[k].address
    return here.popen([*command, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def strikes(ground: ManyHosts, kind: str, draw: random.Random) -> bench.Strike:
    ground.kinds = (kind,)
    struck = ground.strike(draw)
    assert struck is not None
    return struck


def reaches(a: Host, b: Host) -> bool:
    """Whether a host answers another one: somebody takes commands there."""
    with a.inside(), socket.socket() as one:
        one.settimeout(0.3)
        return one.connect_ex((b.address, login.PORT)) == 0


def ended(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def test_a_command_on_a_host_has_its_stdin_and_stdout_here_and_ends_with_them():
    with three() as (hosts, ground, _):
        one = on(hosts, 0, "sh", "-c", "read line; echo $line; ip -br addr; cat >/dev/null")
        assert one.stdin is not None and one.stdout is not None
        one.stdin.write(b"hello\n")
        one.stdin.flush()
        assert one.stdout.readline() == b"hello\n"
        wait_until(lambda: hosts[0].address.encode() in one.stdout.readline(), "it is there")
        assert ground.left(), "what runs on a host besides is told"
        one.stdin.close()
        assert one.wait(10.0) == 0
        assert ground.left() == []
        one.stdout.close()


def test_a_host_that_is_gone_says_nothing_and_comes_back_with_nothing_on_it():
    with three() as (hosts, ground, pids):
        one = on(hosts, 1, "sleep", "60")
        wait_until(lambda: len(hosts[1].pids) == 2, "it runs")
        pids += [pid for pid in hosts[1].pids if pid != ground._servers[1].pid]
        kind, seconds, end = strikes(ground, "host", random.Random(0))
        assert kind == "host" and bench.DOWN_S[0] <= seconds <= bench.DOWN_S[1]
        assert not hosts[1].pids and not reaches(hosts[2], hosts[1])
        assert reaches(hosts[2], hosts[0]) and one.poll() is None, "nobody has told that it died"
        began = time.monotonic()
        another = on(hosts, 1, "true")
        assert another.wait(10.0) == 255
        assert time.monotonic() - began < 3 * login.CONNECT_S
        end()
        assert reaches(hosts[2], hosts[1]) and hosts[1].pids == (ground._servers[1].pid,)
        ended([one, another])


def test_a_cut_is_between_two_hosts_and_outlives_what_else_mends_links_there():
    with three() as (hosts, ground, pids):
        some = [on(hosts, k, "sleep", "60") for k in (0, 1)]
        wait_until(lambda: all(len(hosts[k].pids) == 2 for k in (0, 1)), "they run")
        pids += [pid for k in (0, 1) for pid in hosts[k].pids if pid != ground._servers[k].pid]
        draw = random.Random(1)
        draw.sample = lambda among, n: [0, 2]  # type: ignore[method-assign, assignment]
        kind, seconds, end = strikes(ground, "cut", draw)
        assert kind == "cut" and bench.CUT_S[0] <= seconds <= bench.CUT_S[1]
        assert not reaches(hosts[2], hosts[0]) and reaches(hosts[1], hosts[0])
        draw.choice = lambda among: among[0]  # type: ignore[method-assign, assignment]
        _, _, revive = strikes(ground, "host", draw)
        revive()
        assert not reaches(hosts[2], hosts[0]) and reaches(hosts[1], hosts[0])
        end()
        assert reaches(hosts[2], hosts[0])
        ended(some)


def test_all_faults_are_over_when_a_run_is():
    """A pause that would last for seconds more ends, and the process goes on."""
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(program) as other:
        ground = bench.OneHost(lambda: [other.pid])
        ground.kinds = ("pause",)
        with Faults(ground, 0.5, 1, random.Random(2)) as faults:
            wait_until(lambda: faults.done["pause"] == 1, "it is paused")
        with open(f"/proc/{other.pid}/stat") as file:
            assert file.read().rpartition(")")[2].split()[0] != "T"
        other.send_signal(signal.SIGKILL)
