"""Hosts on one machine: what their links do to packets, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.cluster import hosts as bench
from benchmarks.cluster.hosts import FOLDER, Host, Hosts, Link

PORT = 5000
MISSING = bench.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no hosts on this machine: {MISSING}")


def until(holds: Callable[[], bool], bound_s: float = 20.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + bound_s
    while not holds():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.002)


@contextmanager
def datagrams(hosts: Hosts) -> Iterator[list[socket.socket]]:
    """A socket on each host, with room for what the tests send."""
    with ExitStack() as stack:
        found = []
        for host in hosts:
            with host.inside():
                one = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            one.bind((host.address, PORT))
            one.settimeout(20.0)
            found.append(one)
        yield found


def received(one: socket.socket) -> list[bytes]:
    """What has come until now."""
    one.setblocking(False)
    found = []
    while True:
        try:
            found.append(one.recv(2000))
        except BlockingIOError:
            return found


def settled(hosts: Hosts, a: int, b: int, sent: int) -> bench.Counts:
    """Counts, when so many packets have come to an end."""
    until(lambda: (c := hosts.counts(a, b)).delivered + c.lost + c.full + c.cut >= sent)
    return hosts.counts(a, b)


def transfer(one: Host, other: Host, content: bytes) -> tuple[bytes, float]:
    """Send by tcp; what came, and seconds from the first byte sent until the last was there."""
    with other.inside(), socket.create_server((other.address, PORT)) as server:
        with one.inside():
            program = (
                "import socket, sys\n"
                f"with socket.create_connection(('{other.address}', {PORT})) as s:\n"
                "    s.sendall(sys.stdin.buffer.read())"
            )
            sender = one.popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE)
        server.settimeout(20.0)
        assert sender.stdin is not None
        sender.stdin.write(content)
        sender.stdin.close()
        connection, _ = server.accept()
        began = time.perf_counter()
        with connection:
            connection.settimeout(20.0)
            parts = []
            while part := connection.recv(1 << 20):
                parts.append(part)
        seconds = time.perf_counter() - began
        assert sender.wait(20.0) == 0
    return b"".join(parts), seconds


def test_a_question_and_its_answer_take_two_latencies_and_not_much_more() -> None:
    with Hosts(2, Link(latency_s=0.020)) as hosts, datagrams(hosts) as (a, b):
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            a.sendto(b"?", (hosts[1].address, PORT))
            _, sender = b.recvfrom(10)
            assert sender == (hosts[0].address, PORT)
            b.sendto(b"!", sender)
            a.recv(10)
            best = min(best, time.perf_counter() - began)
    assert 0.040 <= best < 0.120


def test_bytes_take_what_the_rate_says_and_share_the_way_out_and_the_way_in() -> None:
    with Hosts(3, Link(bits_per_s=1e7)) as hosts, datagrams(hosts) as (a, b, _):
        for one, to in ((a, 1), (a, 2), (b, 2), (b, 2)):
            one.sendto(bytes(972), (hosts[to].address, PORT))  # 1000 bytes with headers
        for one, to, sent in ((0, 1, 1), (0, 2, 1), (1, 2, 2)):
            assert settled(hosts, one, to, sent).nbytes == 1000 * sent
        found = [hosts.busy_s(k) for k in range(3)]
    each = 1000 * 8 / 1e7
    assert found[0] == pytest.approx((2 * each, 0.0))
    assert found[1] == pytest.approx((2 * each, each))
    assert found[2] == pytest.approx((0.0, 3 * each))


def test_a_connection_carries_all_bytes_in_order_and_no_faster_than_the_rate() -> None:
    content = bytes(range(256)) * 1000
    with Hosts(2, Link(latency_s=0.002, bits_per_s=2e7)) as hosts:
        came, seconds = transfer(hosts[0], hosts[1], content)
        counts = hosts.counts(0, 1)
        late, _ = hosts.late()
    assert came == content
    # What waited in buffers before the clock began is 64 KiB at most.
    assert seconds >= (len(content) - 65536) * 8 / 2e7
    assert counts.nbytes > len(content)
    assert late >= 0


def test_a_connection_carries_all_bytes_over_a_link_that_loses_packets() -> None:
    content = os.urandom(200_000)
    with Hosts(2, Link(loss=0.05), seed=3) as hosts:
        came, _ = transfer(hosts[0], hosts[1], content)
        counts = hosts.counts(0, 1)
    assert came == content
    assert counts.lost > 0
    assert counts.nbytes / counts.delivered <= bench.MTU  # cut before it was lost


def numbers_that_arrive(seed: int) -> set[int]:
    """Of 1000 datagrams, a tenth of which is lost."""
    with Hosts(2, Link(loss=0.1), seed=seed) as hosts, datagrams(hosts) as (a, b):
        for k in range(1000):
            a.sendto(k.to_bytes(2, "big"), (hosts[1].address, PORT))
            if k % 100 == 99:
                settled(hosts, 0, 1, k + 1)
        counts = hosts.counts(0, 1)
        assert (counts.came, counts.lost + counts.delivered) == (1000, 1000)
        found = {int.from_bytes(x, "big") for x in received(b)}
    assert len(found) == counts.delivered
    return found


def test_losses_are_as_many_as_asked_for_and_follow_from_the_seed() -> None:
    found = numbers_that_arrive(0)
    assert 860 < len(found) < 940
    assert numbers_that_arrive(0) == found != numbers_that_arrive(1)


def test_a_buffer_that_is_full_drops_and_what_was_before_arrives() -> None:
    with (
        Hosts(2, Link(bits_per_s=1e5, buffer_bytes=5000)) as hosts,
        datagrams(hosts) as (a, b),
    ):
        for k in range(20):
            a.sendto(bytes([k]) * 972, (hosts[1].address, PORT))
        until(lambda: hosts.counts(0, 1).came == 20)
        full = hosts.counts(0, 1).full
        assert 10 <= full < 20
        assert settled(hosts, 0, 1, 20).delivered == 20 - full
        assert [x[0] for x in received(b)] == [*range(20 - full)]


def test_a_cut_path_passes_nothing_and_a_mended_one_passes_again() -> None:
    with Hosts(3, Link(latency_s=0.2)) as hosts, datagrams(hosts) as (a, b, c):
        a.sendto(b"under way", (hosts[1].address, PORT))
        until(lambda: hosts.counts(0, 1).came == 1)
        hosts.cut(0, 1)
        a.sendto(b"too late", (hosts[1].address, PORT))
        b.sendto(b"nor back", (hosts[0].address, PORT))
        a.sendto(b"elsewhere", (hosts[2].address, PORT))
        assert settled(hosts, 0, 1, 2).cut == 2
        assert settled(hosts, 1, 0, 1).cut == 1
        assert c.recv(20) == b"elsewhere"
        hosts.cut(2)
        c.sendto(b"to nobody", (hosts[1].address, PORT))
        assert settled(hosts, 2, 1, 1).cut == 1
        hosts.mend(0, 1)
        a.sendto(b"again", (hosts[1].address, PORT))
        assert b.recv(20) == b"again"
        assert received(a) == []


def test_a_path_changes_while_it_runs() -> None:
    with Hosts(2) as hosts, datagrams(hosts) as (a, b):
        hosts.change(0, 1, Link(latency_s=0.030))
        began = time.perf_counter()
        a.sendto(b"later", (hosts[1].address, PORT))
        b.recv(20)
        assert time.perf_counter() - began >= 0.030


def test_a_process_runs_on_its_host_and_ends_with_it() -> None:
    with Hosts(2) as hosts:
        process = hosts[1].popen(["sleep", "1000"])
        until(lambda: process.pid in hosts[1].pids)
        assert hosts[0].pids == ()
        names, relay = [host.name for host in hosts], hosts.relay_pid
        assert all((FOLDER / name).exists() for name in names)
    assert process.wait(20.0) == -signal.SIGKILL
    assert not any((FOLDER / name).exists() for name in names)
    assert bench._started(relay) == -1
    with pytest.raises(bench.NoHostsError, match="closed"):
        hosts.cut(0, 1)
    hosts.close()


OWNER = """
import time
from benchmarks.cluster.hosts import Hosts
hosts = Hosts(2)
process = hosts[1].popen(["sleep", "1000"])
print(hosts[0].name, hosts[1].name, process.pid, hosts.relay_pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("struck", ["owner", "relay and owner"])
def test_nothing_is_left_of_hosts_whose_owner_was_killed(struck: str) -> None:
    owner = subprocess.Popen([sys.executable, "-S", "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    one, other, *pids = owner.stdout.readline().split()
    process, relay = map(int, pids)
    assert bench._started(process) > 0
    if struck == "owner":
        owner.kill()
        owner.wait()
        until(lambda: bench._started(relay) == -1)
    else:
        os.kill(relay, signal.SIGKILL)
        owner.kill()
        owner.wait()
        until(lambda: bench._started(relay) == -1)
        assert {one, other} <= {*bench.left()}
        bench.sweep()
    assert not (FOLDER / one).exists()
    assert not (FOLDER / other).exists()
    until(lambda: bench._started(process) == -1)
    owner.stdout.close()


def test_what_an_owner_that_lives_has_made_is_not_swept() -> None:
    with Hosts(1) as hosts:
        bench.sweep()
        assert bench.left() == []
        assert (FOLDER / hosts[0].name).exists()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Link(latency_s=-1), "latency_s=-1"),
        (lambda: Link(bits_per_s=0), "more than 0"),
        (lambda: Link(loss=1.0), "below 1"),
        (lambda: Link(buffer_bytes=0), "or None"),
        (lambda: Hosts(0), "1 to 250"),
    ],
)
def test_what_no_link_can_be_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_command_that_fails_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SYSCTL", {"net.ipv4.no_such_thing": "1"})
    with pytest.raises(FileNotFoundError, match="no_such_thing"):
        Hosts(1)
    with pytest.raises(bench.NoHostsError, match="no-such-namespace"):
        bench._call("ip", "netns", "pids", "no-such-namespace")
    with pytest.raises(bench.NoHostsError, match="install it"):
        bench._call("no-such-command")
