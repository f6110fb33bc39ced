"""A whole run on worker processes of hosts while strangers attack every port that it has.

    sudo PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.cluster.besieged --attacks 10000

    run         a network of two parts on ``gt.Hosts``, one instance after the other, epoch by epoch
                until the attacks are over: each epoch has sockets of its own, whose doors are open
                until the workers are in; those of the parent stay
    strangers   hostile.py; they look for ports again and again, know all public keys, and play
                back what they have overheard on the line
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
from benchmarks.cluster.strangers import MOST_FDS, MOST_GROWTH_MIB
from benchmarks.peers.figures import Document, machine

WIDTH: Final = 64
INSTANCES: Final = 100
LOT: Final = 200
"""Attacks until strangers look for ports again."""
WARM_EPOCHS: Final = 2
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
class Siege:
    """Strangers at all ports of a run, from a thread of its own.

    Args:
        runtime: Of the run; public keys are asked of it.
        attacks: How many.
        threads: At a time.
        seed: Of what is done.

    Attributes:
        over: Whether all has been done.
    """

    def __init__(self, runtime: gt.Hosts, attacks: int, threads: int, seed: int = 0) -> None:
        self._runtime, self._left, self._threads, self._seed = runtime, attacks, threads, seed
        self.done: Counter[str] = Counter()
        self.kept_out, self.ports = 0, set[int]()
        self.over = False
        self._ears = Eavesdropper()
        self._thread = threading.Thread(target=self._attack)

    def start(self) -> None:
        """Begin; the workers are there."""
        self._thread.start()

    def close(self) -> None:
        """Wait for the last lot, and hear no more."""
        self._left = 0
        if self._thread.ident is not None:
            self._thread.join()
        self._ears.close()

    def _attack(self) -> None:
        lot = 0
        while self._left > 0:
            targets = self._targets()
            said = self._ears.said_to([*targets])
            each = Attack([*targets.values()], 3, said, self._seed + lot)
            each.run(min(LOT, self._left), self._threads)
            self.done += each.done
            self.kept_out += each.kept_out
            self.ports |= targets.keys()
            self._left -= LOT
            lot += 1
        self.over = True

    def _targets(self) -> Mapping[int, tuple[str, bytes]]:
        """Address and public key by port."""
        pool: Any = self._runtime._pool
        keys = {os.getpid(): pool._keys.public}
        keys |= {pid: pool._publics[w] for w, pid in enumerate(self._runtime.pids)}
        return {
            port: (f"tcp://127.0.0.1:{port}", key)
            for pid, key in keys.items()
            for port in listening(pid)
        }


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


def siege(attacks: int, threads: int, seed: int = 0) -> Document:
    """The run that is attacked, and one of as many epochs that is not."""
    runtime = gt.Hosts(2, socket_files=False, kernel_threads=1)
    strangers = Siege(runtime, attacks, threads, seed)
    began, quiet = time.perf_counter(), 0

    def besieged(epochs: int) -> bool:
        nonlocal quiet
        if epochs == WARM_EPOCHS:
            strangers.start()
        quiet += strangers.over  # a last epoch without them, after which no connection is left
        return quiet < 2

    try:
        attacked = trained(runtime, besieged)
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
        "attacks": dict(strangers.done),
        "kept_out": strangers.kept_out,
        "ports": len(strangers.ports),
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
    given = parser.parse_args()
    found = siege(given.attacks, given.threads)
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    print("\n".join(told(found)))


if __name__ == "__main__":
    from benchmarks.cluster import besieged

    besieged.main()  # of the module that workers import
