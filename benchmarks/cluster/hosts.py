"""Several hosts on one machine: network namespaces, and links between them of given quality.

    with Hosts(3, Link(latency_s=0.010, bits_per_s=1e8)) as hosts:
        worker = hosts[1].popen([sys.executable, "-m", ...])     a process on a host
        with hosts[2].inside(): ...                              sockets of this thread on a host
        hosts.cut(0, 1); hosts.mend(0, 1)                        while all of it runs

A host has one address, ``eth0``, with one way out and one way in, of a rate and a buffer each; what
it talks to at the same time shares them. Latency is one way, so a question and its answer take two.
A relay in C (``relay.c``, compiled at first use) carries the packets, in this machine's time: what
it was late by is counted (``late``), and is to be looked at where timing matters.

Wants Linux, root, ``ip``, ``nsenter`` and a C compiler; ``unavailable`` says what is missing; no
module but Python's own, so that a small program may own hosts, too. When the owner
ends, be it killed, the relay ends what still runs on the hosts and removes them. What both left is
removed by the next one that makes hosts.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, final

FOLDER: Final = Path("/run/netns")
NETWORK: Final = "10.77.0"
MTU: Final = 1500
SYSCTL: Final = {"net.ipv6.conf.all.disable_ipv6": "1"}
"""What every host is told: no packets that nobody asked for. All else is as on this machine."""
MOST_HOSTS: Final = 250
_SOURCE: Final = Path(__file__).with_name("relay.c")
_NAME: Final = re.compile(r"gt-(\d+)-(\d+)-\d+-\d+")
_LEAST_BUFFER: Final = 1 << 18  # bytes: four of the largest packets
_NEWNET: Final = 0x40000000
_TOLD_S: Final = 10.0
_numbers: Final = itertools.count()


class NoHostsError(RuntimeError):
    """Hosts cannot be made on this machine; the message says why."""


@final
@dataclass(frozen=True, slots=True)
class Link:
    """What a host is connected by.

    Args:
        latency_s: One way, between any two.
        bits_per_s: Of IP packets; each way by itself.
        loss: Share of packets that do not arrive, drawn by a seed.
        buffer_bytes: What may wait at either end before packets are dropped. None: what the link
            carries in a round trip, 256 KiB at least.

    Raises:
        ValueError: A value is out of range.
    """

    latency_s: float = 0.0
    bits_per_s: float = 1e9
    loss: float = 0.0
    buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"Link(latency_s={self.latency_s}): give seconds, 0 or more")
        if not 0 < self.bits_per_s < math.inf:
            raise ValueError(f"Link(bits_per_s={self.bits_per_s}): give more than 0, such as 1e9")
        if not 0 <= self.loss < 1:
            raise ValueError(f"Link(loss={self.loss}): give a share of packets, 0 or more, below 1")
        if self.buffer_bytes is not None and self.buffer_bytes < 1:
            raise ValueError(f"Link(buffer_bytes={self.buffer_bytes}): give 1 or more, or None")

    @property
    def room(self) -> int:
        """Bytes of the buffers."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        return max(_LEAST_BUFFER, math.ceil(2 * self.latency_s * self.bits_per_s / 8))


@final
@dataclass(frozen=True, slots=True)
class Counts:
    """Packets from one host to another; a large one that the kernel has not cut counts once.

    Args:
        came: Sent by the first host.
        delivered, nbytes: To the second one, and their bytes, headers of all segments included.
        lost: By chance.
        full: Where a buffer had no room.
        cut: While the path was cut.
    """

    came: int
    delivered: int
    nbytes: int
    lost: int
    full: int
    cut: int


@final
@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Args:
        number: From 0.
        name: Of its namespace.
        address: By which the others reach it.
    """

    number: int
    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What makes of a command one that runs here: the process is the command's own."""
        return ("nsenter", f"--net={FOLDER / self.name}", "--")

    def popen(self, command: Sequence[str], **given: Any) -> subprocess.Popen[Any]:
        """Start a process here; what is given is for ``subprocess.Popen``."""
        return subprocess.Popen([*self.prefix, *command], **given)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is on the host: its new sockets and threads are, and stay there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.open(FOLDER / self.name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _set_namespace(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _set_namespace(home)
        finally:
            os.close(home)

    @property
    def pids(self) -> tuple[int, ...]:
        """What runs here."""
        told = _call("ip", "netns", "pids", self.name)
        return tuple(int(word) for word in told.split())


@final
class Hosts(Sequence[Host]):
    """So many hosts, until they are closed.

    Args:
        n: How many.
        link: What each is connected by.
        seed: Of losses.
        sysctl: Further settings of the kernel on each host, or others than ``SYSCTL``.

    Raises:
        NoHostsError: This machine or user cannot have any.
        ValueError: ``n`` is out of range.
    """

    def __init__(
        self,
        n: int,
        link: Link = Link(),
        *,
        seed: int = 0,
        sysctl: Mapping[str, str] | None = None,
    ) -> None:
        if not 1 <= n <= MOST_HOSTS:
            raise ValueError(f"Hosts({n}): give 1 to {MOST_HOSTS}")
        self._program = program()
        sweep()
        group = f"gt-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
        self._hosts = [Host(k, f"{group}-{k}", f"{NETWORK}.{k + 1}") for k in range(n)]
        self._relay: subprocess.Popen[str] | None = None
        try:
            for host in self._hosts:
                _call("ip", "netns", "add", host.name)
            names = [host.name for host in self._hosts]
            self._relay = subprocess.Popen(
                [self._program, "carry", str(os.getpid()), *names],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._hear("carry")
            for host in self._hosts:
                _set_up(host, SYSCTL | dict(sysctl or {}))
            self._tell_links(link, seed)
        except BaseException:
            self.close()
            raise

    def _tell_links(self, link: Link, seed: int) -> None:
        n = len(self)
        for a in range(n):
            self._ask(f"rate {a} {link.bits_per_s!r} {link.room}")
            for b in range(n):
                self._tell_path(a, b, link.latency_s, link.loss, seed)

    def _tell_path(self, a: int, b: int, latency_s: float, loss: float, seed: int) -> None:
        number = (seed << 16) + a * MOST_HOSTS + b
        self._ask(f"path {a} {b} {round(latency_s * 1e9)} {loss!r} {number}")

    def become(self, link: Link, *, seed: int = 0) -> None:
        """All are connected by other links from now on."""
        self._tell_links(link, seed)

    def change(self, a: int, b: int, link: Link, *, seed: int = 0) -> None:
        """Latency and loss between two hosts, both ways, from now on; rates belong to hosts."""
        for one, other in ((a, b), (b, a)):
            self._tell_path(one, other, link.latency_s, link.loss, seed)

    def cut(self, a: int, b: int | None = None) -> None:
        """Nothing passes between two hosts any more, nor does what is on its way.

        Args:
            a: One of them.
            b: The other; None: all others.
        """
        self._both_ways("cut", a, b)

    def mend(self, a: int, b: int | None = None) -> None:
        """Take a cut back."""
        self._both_ways("mend", a, b)

    def _both_ways(self, word: str, a: int, b: int | None) -> None:
        for other in range(len(self)) if b is None else [b]:
            if other != a:
                self._ask(f"{word} {a} {other}")
                self._ask(f"{word} {other} {a}")

    def counts(self, a: int, b: int) -> Counts:
        """What became of packets from a to b."""
        return Counts(*map(int, self._ask(f"counts {a} {b}").split()))

    def busy_s(self, k: int) -> tuple[float, float]:
        """Seconds that packets took on the wire out of a host, and into it, by its rate."""
        out, into = self._ask(f"host {k}").split()
        return int(out) * 1e-9, int(into) * 1e-9

    def late(self) -> tuple[int, float]:
        """Packets that were 1 ms or more behind their time, and seconds of the latest."""
        number, most = self._ask("late").split()
        return int(number), int(most) * 1e-9

    @property
    def relay_pid(self) -> int:
        """Of the process that carries the packets."""
        assert self._relay is not None
        return self._relay.pid

    def _ask(self, command: str) -> str:
        relay = self._relay
        if relay is None:
            raise NoHostsError(f"these hosts are closed, and were asked for '{command}'")
        assert relay.stdin is not None
        try:
            relay.stdin.write(f"{command}\n")
            relay.stdin.flush()
        except BrokenPipeError:
            pass  # its end is told by what it says
        return self._hear(command)

    def _hear(self, command: str) -> str:
        assert self._relay is not None and self._relay.stdout is not None
        told = self._relay.stdout.readline().rstrip("\n")
        if not told:
            assert self._relay.stderr is not None
            raise NoHostsError(
                f"the relay between hosts has ended at '{command}': "
                f"{self._relay.stderr.read().strip() or self._relay.wait(_TOLD_S)}"
            )
        if told.startswith("error"):
            raise ValueError(f"the relay between hosts does not know '{command}'")
        return told

    def close(self) -> None:
        """End what runs on the hosts, and remove them. May be called again."""
        relay, self._relay = self._relay, None
        if relay is not None:
            for pipe in (relay.stdin, relay.stdout, relay.stderr):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            relay.wait()
        _remove(self._program, [h.name for h in self._hosts if (FOLDER / h.name).exists()])

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, k: Any) -> Any:
        return self._hosts[k]


@lru_cache(1)
def unavailable() -> str | None:
    """Why there can be no hosts here; None: there can. Two are tried, once."""
    try:
        with Hosts(2) as hosts, hosts[0].inside():
            return None
    except (NoHostsError, OSError) as error:
        return str(error)


def left() -> list[str]:
    """Namespaces of hosts whose owner is gone."""
    if not FOLDER.is_dir():
        return []
    found = []
    for path in sorted(FOLDER.iterdir()):
        named = _NAME.fullmatch(path.name)
        if named and _started(int(named[1])) != int(named[2]):
            found.append(path.name)
    return found


def sweep() -> None:
    """Remove what owners and relays that were killed have left."""
    _remove(program(), left())


def _remove(relay: str, names: Sequence[str]) -> None:
    if names:
        subprocess.run([relay, "remove", *names], check=True)


@lru_cache(1)
def program() -> str:
    """The relay's path; compiled if it is not there.

    Raises:
        NoHostsError: It cannot be compiled.
    """
    source = _SOURCE.read_bytes()
    path = _cache() / f"relay-{hashlib.sha256(source).hexdigest()[:16]}"
    if not path.exists():
        command = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or "gcc"]
        if shutil.which(command[0]) is None:
            raise NoHostsError(f"the relay between hosts wants a C compiler, not '{command[0]}'")
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / "relay"
            words = [*command, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
            told = subprocess.run(
                [*words, str(_SOURCE), "-o", str(made)], capture_output=True, text=True
            )
            if told.returncode:
                raise NoHostsError(f"the relay between hosts cannot be compiled:\n{told.stderr}")
            made.replace(path)
    return str(path)


def _cache() -> Path:
    """Where compiled programs lie, as with kernels of the library; nobody else writes there."""
    given, shared = os.environ.get("GEARTRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    path = Path(given or Path(shared or Path.home() / ".cache") / "geartrain")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise NoHostsError(f"others may write to {path}; set GEARTRAIN_CACHE to a folder of yours")
    return path


def _set_up(host: Host, sysctl: Mapping[str, str]) -> None:
    """Address and settings of a host."""
    with host.inside():
        for key, value in sysctl.items():
            Path("/proc/sys", *key.split(".")).write_text(value)
    commands = (
        "link set lo up",
        f"link set eth0 mtu {MTU}",
        f"addr add {host.address}/24 dev eth0",
        "link set eth0 up",
    )
    _call("ip", "-n", host.name, "-batch", "-", given="\n".join(commands))


def _call(*command: str, given: str | None = None) -> str:
    """What a command prints.

    Raises:
        NoHostsError: It is not there or fails; names it and what it said.
    """
    if shutil.which(command[0]) is None:
        raise NoHostsError(f"hosts want the command '{command[0]}', and there is none; install it")
    told = subprocess.run(command, input=given, capture_output=True, text=True)
    if told.returncode:
        raise NoHostsError(f"'{' '.join(command)}': {told.stderr.strip()}; hosts want to be root")
    return told.stdout


def _started(pid: int) -> int:
    """When a process was started, in ticks; -1 if there is none."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(told.rpartition(")")[2].split()[19])


def _set_namespace(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")
