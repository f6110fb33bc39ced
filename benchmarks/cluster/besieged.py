"""A whole run on worker processes of hosts while strangers attack every port that it has.

    sudo PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.cluster.besieged --attacks 10000

    run         a network of two parts on ``gt.Hosts``, one instance after the other, epoch by epoch
                until the attacks are over: each epoch has sockets of its own, whose doors are open
                until the workers are in; those of the parent stay
    strangers   hostile.py, in a process of their own; they look for ports again and again, know
                all public keys, and play back what they have overheard on the line
    beside it   the same number of epochs without strangers

Claims: nothing fails or ends, memory and descriptors of parent and workers do not grow, and the
weights are equal to the bit. Wants root, to listen on the line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.cluster.hostile import Attack
from benchmarks.cluster.strangers import MOST_FDS, MOST_GROWTH_MIB, hear, say
from benchmarks.peers.figures import Document, machine

WIDTH: Final = 64
INSTANCES: Final = 100
LOT: Final = 200
"""Attacks until strangers look for ports again."""
WARM_EPOCHS: Final = 2
_REST_S: Final = 5.0  # the longest wait for sockets of an epoch that has ended to be closed
_LISTENS: Final = "0A"
_KEPT: Final = 20_000
_OUTGOING: Final = 4  # PACKET_OUTGOING: on the loopback each packet is seen twice
_ALL: Final = 0x0003  # ETH_P_ALL


@final
class Eavesdropper:
    """Keeps the beginning of what is said to each port on the loopback, by connection."""

    def __init__(self) -> None:
        self._line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        self._line.bind(("lo", 0))
        self._line.settimeout(0.1)
        self._said: dict[tuple[int, int], bytearray] = {}
        self._over = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over:
            with suppress(TimeoutError):
                packet, (_, _, way, *_) = self._line.recvfrom(1 << 17)
                if way == _OUTGOING:
                    self._keep(packet[14:])

    def _keep(self, packet: bytes) -> None:
        if len(packet) < 40 or packet[9] != socket.IPPROTO_TCP:
            return
        segment = packet[4 * (packet[0] & 15) :]
        ports: tuple[int, int] = struct.unpack(">HH", segment[:4])
        said = self._said.setdefault(ports, bytearray())
        if len(said) < _KEPT:
            said += segment[4 * (segment[12] >> 4) :]

    def said_to(self, ports: Sequence[int]) -> list[bytes]:
        """What was said to these ports."""
        return [bytes(said) for (_, to), said in [*self._said.items()] if to in ports and said]

    def close(self) -> None:
        """Hear no more."""
        self._over = True
        self._thread.join()
        self._line.close()


def listening(pid: int) -> list[int]:
    """Ports of tcp on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(fd))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == _LISTENS and f"socket:[{rest[5]}]" in inodes:
            found.append(int(local.partition(":")[2], 16))
    return found


@final
class Strangers:
    """Those who attack all ports of some processes; they live in a process of their own.

    Args:
        keys: Public key by process.
        seed: Of what is done.
    """

    def __init__(self, keys: Mapping[int, bytes], seed: int = 0) -> None:
        self._keys, self._seed = keys, seed
        self._done: Counter[str] = Counter()
        self._kept_out, self._ports = 0, set[int]()

    def attack(self, count: int, threads: int) -> Document:
        """So many attacks, so many at a time; what was done, and to how many ports."""
        ears = Eavesdropper()
        try:
            for lot in range(-(-count // LOT)):
                targets = self._targets()
                said = ears.said_to([*targets])
                each = Attack([*targets.values()], 3, said, self._seed + lot)
                each.run(min(LOT, count - lot * LOT), threads)
                self._done += each.done
                self._kept_out += each.kept_out
                self._ports |= targets.keys()
        finally:
            ears.close()
        return {
            "attacks": dict(self._done),
            "kept_out": self._kept_out,
            "ports": len(self._ports),
        }

    def _targets(self) -> Mapping[int, tuple[str, bytes]]:
        """Address and public key by port."""
        return {
            port: (f"tcp://127.0.0.1:{port}", key)
            for pid, key in self._keys.items()
            for port in listening(pid)
        }


@final
class Siege:
    """A process of strangers at all ports of a run.

    Args:
        runtime: Of the run; public keys are asked of it.
        attacks: How many.
        threads: At a time.
    """

    def __init__(self, runtime: gt.Hosts, attacks: int, threads: int) -> None:
        self._runtime = runtime
        words = ["--attacks", str(attacks), "--threads", str(threads), "--strangers"]
        self._strangers = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cluster.besieged", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        """Begin; the workers are there."""
        pool: Any = self._runtime._pool
        keys = {os.getpid(): pool._keys.public.decode()}
        keys |= {pid: pool._publics[w].decode() for w, pid in enumerate(self._runtime.pids)}
        assert self._strangers.stdin is not None
        say([*keys.items()], to=self._strangers.stdin)

    @property
    def over(self) -> bool:
        """Whether all has been done."""
        return self._strangers.poll() is not None

    def told(self) -> Document:
        """What was done; waits until all has been."""
        assert self._strangers.stdout is not None
        (found,) = hear(self._strangers.stdout)
        return dict(found)

    def close(self) -> None:
        """End the strangers, whatever they do."""
        self._strangers.kill()
        self._strangers.wait()
        for pipe in (self._strangers.stdin, self._strangers.stdout):
            assert pipe is not None
            pipe.close()


def graph() -> gt.Graph:
    """Two parts; the same each time."""
    torch.manual_seed(0)
    made = gt.Graph()
    x = made.input("x").through(nn.Linear(WIDTH, WIDTH), name="a").through(nn.Tanh(), name="tanh")
    x.through(nn.Linear(WIDTH, WIDTH), name="b").loss(_square)
    return made


def _square(y: Tensor) -> Tensor:
    return y.square().sum(1)


def trained(runtime: gt.Hosts, goes_on: Callable[[int], bool]) -> Document:
    """Epoch after epoch, as long as it goes on; what became of weights and processes."""
    draw = torch.Generator().manual_seed(1)
    data = [gt.Instance({"x": torch.randn(1, WIDTH, generator=draw)}) for _ in range(INSTANCES)]
    session = gt.Session(
        graph(),
        rules=gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-3), update_every=1),
        runtime=runtime,
        max_active=1,
        schedule=gt.Schedule(placement={"a": 0, "tanh": 0, "b": 1}),
    )
    epochs, looks, pids = 0, [], ()
    while goes_on(epochs):
        epochs += 1
        fit = session.fit(data, epochs=epochs)
        if fit.deaths or (pids and runtime.pids != pids):
            raise RuntimeError(f"in epoch {epochs} workers died, or others took their place")
        pids = runtime.pids
        if epochs >= WARM_EPOCHS:
            looks.append([_of(pid) for pid in (os.getpid(), *pids)])
    looks.append([_at_rest(pid) for pid in (os.getpid(), *pids)])
    said = hashlib.sha256()
    for part in session.parts.values():
        for each in part.parameters:
            said.update(each.detach().numpy().tobytes())
    first, last = looks[0], looks[-1]
    return {
        "weights": said.hexdigest(),
        "epochs": epochs,
        "rss_mib": [[a[0], b[0]] for a, b in zip(first, last, strict=True)],
        "fds": [[a[1], b[1]] for a, b in zip(first, last, strict=True)],
    }


def _of(pid: int) -> tuple[float, int]:
    """Memory in MiB and open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


def _at_rest(pid: int) -> tuple[float, int]:
    """The same when it has closed what it had opened for an epoch, or does not for long."""
    found = _of(pid)
    until = time.monotonic() + _REST_S
    while time.monotonic() < until:
        time.sleep(0.2)
        before, found = found, _of(pid)
        if found[1] >= before[1]:
            break
    return found


def siege(attacks: int, threads: int) -> Document:
    """The run that is attacked, and one of as many epochs that is not."""
    runtime = gt.Hosts(2, socket_files=False, kernel_threads=1)
    strangers = Siege(runtime, attacks, threads)
    began, quiet = time.perf_counter(), 0

    def besieged(epochs: int) -> bool:
        nonlocal quiet
        if epochs == WARM_EPOCHS:
            strangers.start()
        quiet += strangers.over  # a last epoch without them, after which no connection is left
        return quiet < 2

    try:
        attacked = trained(runtime, besieged)
        done = strangers.told()
    finally:
        strangers.close()
        runtime.close()
    seconds = time.perf_counter() - began
    runtime = gt.Hosts(2, socket_files=False, kernel_threads=1)
    try:
        calm = trained(runtime, lambda epochs: epochs < attacked["epochs"])
    finally:
        runtime.close()
    return {
        **done,
        "seconds": seconds,
        "attacked": attacked,
        "undisturbed": calm,
    }


def failures(found: Document) -> Iterator[str]:
    """Claims that do not hold."""
    attacked = found["attacked"]
    if attacked["weights"] != found["undisturbed"]["weights"]:
        yield "the weights are others"
    names = ("parent", "worker 0", "worker 1")
    for name, (first, last) in zip(names, attacked["rss_mib"], strict=True):
        if last - first > MOST_GROWTH_MIB:
            yield f"{name}: memory grew, from {first:.1f} to {last:.1f} MiB"
    for name, (first, last) in zip(names, attacked["fds"], strict=True):
        if last - first > MOST_FDS:
            yield f"{name}: descriptors grew, from {first} to {last}"


def told(found: Document) -> Iterator[str]:
    """For people."""
    attacked, done = found["attacked"], sum(found["attacks"].values())
    yield f"{done:,} attacks, {found['kept_out']:,} kept out by the kernel; {found['ports']} ports"
    yield f"{attacked['epochs']} epochs, {found['seconds']:.0f} s; {attacked['weights'][:12]}"
    for name, of in (("memory, MiB", "rss_mib"), ("descriptors", "fds")):
        yield f"{name}, of parent and workers: " + "; ".join(
            f"{first:.0f} before, {last:.0f} after" for first, last in attacked[of]
        )
    yield "; ".join(failures(found)) or "all claims hold"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attacks", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--strangers", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.strangers:
        (keys,) = hear(sys.stdin)
        strangers = Strangers({pid: key.encode() for pid, key in keys})
        say(strangers.attack(given.attacks, given.threads))
        return
    found = siege(given.attacks, given.threads)
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    print("\n".join(told(found)))


if __name__ == "__main__":
    from benchmarks.cluster import besieged

    besieged.main()  # of the module that workers import
