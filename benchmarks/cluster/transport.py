"""Records between two hosts by the transport of worker processes, beside a bare tcp connection.

    sudo PYTHONPATH=src python -m benchmarks.cluster.transport

    answered  one record at a time, there and back: half of it, beside the link's latency
    one way   as fast as they go: Mbit/s, once the window of tcp has opened, by bytes in flight
    bare      the same bytes through a tcp connection without anything

Both ends are threads of this program, as sockets and threads stay on the host on which they are
made; keys as worker processes on hosts have them.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.cluster.hosts import Hosts, Link
from benchmarks.cluster.pipelines import SYSCTL
from geartrain.transport.keys import Keys
from geartrain.transport.link import Transport
from geartrain.transport.record import Record

RESULTS: Final = Path(__file__).parent / "results" / "transport.json"
SIZES: Final = (512, 8 << 10, 128 << 10, 1 << 20)
TAKEN, ANSWER, LAST, END = 20, 21, 22, 23
"""Kinds: is taken; is answered; is taken, and its answer says that all before it are there; the
end."""
PORT: Final = 7000
BLOCK: Final = 1 << 16


def ends(hosts: Hosts) -> tuple[Transport, Transport]:
    """A transport on each host, connected."""
    keys = [Keys.make(), Keys.make()]
    found = []
    for k in range(2):
        with hosts[k].inside():
            found.append(Transport(k, 2, f"tcp://{hosts[k].address}:*", keys=keys[k]))
    for k, one in enumerate(found):
        with hosts[k].inside():  # ZeroMQ's thread is of the host on which it was begun
            one.connect({1 - k: found[1 - k].address}, {1 - k: keys[1 - k].public})
    return found[0], found[1]


def serve(me: Transport) -> None:
    """The other end, until it is told to end."""
    while True:
        for _, record in me.poll(0.2):
            if record.kind == END:
                return
            if record.kind in (ANSWER, LAST):
                me.send(0, Record(ANSWER, (), (), record.arrays if record.kind == ANSWER else ()))


def answered_ms(me: Transport, nbytes: int, count: int) -> float:
    """Half of the way there and back; the best of so many."""
    record = Record(ANSWER, (), (), (torch.zeros(nbytes, dtype=torch.uint8),))
    best = float("inf")
    for _ in range(count):
        began = time.perf_counter()
        me.send(1, record)
        _until_answered(me)
        best = min(best, time.perf_counter() - began)
    return 1e3 * best / 2


def _until_answered(me: Transport) -> None:
    while not any(record.kind == ANSWER for _, record in me.poll(1.0)):
        pass


def one_way_mbit(me: Transport, nbytes: int, in_flight: int, seconds: float) -> float:
    """Mbit/s with at most so many bytes in flight, in the second half of a time.

    A receiver that has nothing to say is heard of after each MiB, so it is to be more than that.
    """
    record = Record(TAKEN, (), (), (torch.zeros(nbytes, dtype=torch.uint8),))
    began = time.perf_counter()
    at, sent = began, 0
    while (now := time.perf_counter()) < began + seconds:
        if at == began and now > began + seconds / 2:
            at, sent = now, me.in_flight_bytes(1)
        if me.in_flight_bytes(1) > in_flight:
            me.poll(0.01)
            continue
        me.send(1, record)
        sent += nbytes
    me.send(1, Record(LAST))
    sent -= me.in_flight_bytes(1)
    rate = 8e-6 * sent / (now - at)
    _until_answered(me)
    return rate


def bare_mbit(hosts: Hosts, seconds: float) -> float:
    """What a tcp connection carries, in the second half of a time."""
    with hosts[1].inside(), socket.create_server((hosts[1].address, PORT)) as server:
        with hosts[0].inside():
            sender = socket.create_connection((hosts[1].address, PORT))
        receiver, _ = server.accept()
    had: list[tuple[float, int]] = []

    def take() -> None:
        total = 0
        while some := receiver.recv(1 << 20):
            total += len(some)
            had.append((time.perf_counter(), total))

    other = threading.Thread(target=take)
    other.start()
    began, block = time.perf_counter(), bytes(BLOCK)
    with sender:
        while time.perf_counter() < began + seconds:
            sender.sendall(block)
    other.join()
    receiver.close()
    late = [(at, total) for at, total in had if began + seconds / 2 <= at <= began + seconds]
    return 8e-6 * (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


def measure(
    link: Link, window: int, in_flight: Sequence[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """All of one kind of link.

    Args:
        link: Its kind.
        window: Bytes that a connection's buffer for sending may grow to, net.ipv4.tcp_wmem.
        in_flight: Bytes that the sender lets travel.
        seconds: For each rate.
    """
    about = {"latency_s": link.latency_s, "bits_per_s": link.bits_per_s, "window": window}
    with Hosts(2, link, sysctl=SYSCTL | {"net.ipv4.tcp_wmem": f"4096 16384 {window}"}) as hosts:
        yield about | {"what": "bare", "mbit": bare_mbit(hosts, seconds)}
        me, there = ends(hosts)
        other = threading.Thread(target=serve, args=(there,))
        other.start()
        try:
            for nbytes in SIZES:
                ms = answered_ms(me, nbytes, 10)
                yield about | {"what": "answered", "nbytes": nbytes, "ms": ms}
            for most in in_flight:
                for nbytes in (8 << 10, 128 << 10):
                    mbit = one_way_mbit(me, nbytes, most, seconds)
                    line = {"what": "one way", "nbytes": nbytes, "in_flight": most, "mbit": mbit}
                    yield about | line | {"held": there.held, "late": hosts.late()}
        finally:
            me.send(1, Record(END))
            other.join()
            me.close()
            there.close()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[1, 10, 50], help="one way")
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000, 100])
    parser.add_argument("--in-flight-mib", type=float, nargs="+", default=[4, 16])
    parser.add_argument(
        "--window-mib", type=float, nargs="+", default=[4, 32], help="tcp_wmem; Linux has 4"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="for each rate")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    lines = []
    for latency in given.latency_ms:
        for rate in given.mbit:
            link = Link(latency * 1e-3, rate * 1e6)
            in_flight = [round(x * (1 << 20)) for x in given.in_flight_mib]
            for window in given.window_mib:
                for line in measure(link, round(window * (1 << 20)), in_flight, given.seconds):
                    print(json.dumps(line), flush=True)
                    lines.append(line)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
