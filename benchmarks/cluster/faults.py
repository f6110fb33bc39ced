"""Faults at random moments: of worker processes, of hosts, of links; each ends after its time.

    kill     SIGKILL to a worker
    stop     SIGSTOP to a worker, until the library ends it
    pause    SIGSTOP to a worker, and SIGCONT after half a second to three
    host     all that runs on a host is killed at once, no packet leaves it any more; three to ten
             seconds later it is there again, and nothing runs on it
    cut      nothing passes between two hosts for one to ten seconds

What may be struck is a ``Ground``: the worker processes of one host, or hosts in namespaces, where
programs are started over a connection (``login.py``).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, final

from benchmarks.cluster import login
from benchmarks.cluster.hosts import Host, Hosts

LEFT_S: Final = 5.0  # at the end of a run without a fault, so that each has its effect
PAUSE_S: Final = (0.5, 3.0)
DOWN_S: Final = (3.0, 10.0)
CUT_S: Final = (1.0, 10.0)
_WAIT_S: Final = 0.05
_ENDED_S: Final = 5.0

log: Final = logging.getLogger(__name__)

Strike = tuple[str, float, Callable[[], None]]
"""What has been done, after how many seconds it ends, and what ends it."""


class AbstractGround(ABC):
    """What faults may strike.

    Args:
        pids: Of the workers now.

    Attributes:
        kinds: Of faults, each drawn as often as it stands there.
    """

    kinds: Sequence[str]

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self.pids = pids

    def strike(self, draw: random.Random) -> Strike | None:
        """Do a fault; None: there is nothing to be struck at this moment."""
        kind, pids = draw.choice(self.kinds), self.pids()
        return None if not pids else self._do(kind, list(pids), draw)

    @abstractmethod
    def _do(self, kind: str, pids: Sequence[int], draw: random.Random) -> Strike | None:
        """Do a fault of this kind."""

    def left(self) -> list[str]:
        """What is there that should not be, when all workers have been ended."""
        return []


def _process(kind: str, pid: int, draw: random.Random) -> Strike | None:
    """A fault of one process."""
    try:
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    except ProcessLookupError:  # it has just been ended
        return None
    if kind != "pause":
        return kind, 0.0, _nothing
    return kind, draw.uniform(*PAUSE_S), lambda: _go_on(pid)


def _nothing() -> None:
    pass


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@final
class OneHost(AbstractGround):
    """The worker processes of this host."""

    kinds = ("kill", "kill", "stop", "pause")

    def _do(self, kind: str, pids: Sequence[int], draw: random.Random) -> Strike | None:
        return _process(kind, draw.choice(pids), draw)


@final
class ManyHosts(AbstractGround):
    """Workers on hosts in namespaces, the hosts, and the links between them.

    Args:
        hosts: The last one has the program whose workers these are, and is spared.
        pids: Of the workers now.
    """

    kinds = ("kill", "stop", "pause", "host", "cut")

    def __init__(self, hosts: Hosts, pids: Callable[[], Sequence[int]]) -> None:
        super().__init__(pids)
        self._hosts, self._program = hosts, len(hosts) - 1
        self._down: set[int] = set()
        self._cut: Counter[tuple[int, int]] = Counter()
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        for k in range(self._program):
            self._start(k)

    def _start(self, k: int) -> None:
        """Have a host take commands."""
        host: Host = self._hosts[k]
        command = (sys.executable, "-m", "benchmarks.cluster.login", "serve", host.address)
        server = host.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert server.stdout is not None
        with server.stdout:
            if not server.stdout.readline():
                raise RuntimeError(f"host {k} takes no commands: {server.wait(_ENDED_S)}")
        self._servers[k] = server

    def _do(self, kind: str, pids: Sequence[int], draw: random.Random) -> Strike | None:
        if kind in ("kill", "stop", "pause"):
            return _process(kind, draw.choice(pids), draw)
        used = [k for k in range(self._program) if {*self._hosts[k].pids} & {*pids}]
        if not used:
            return None
        if kind == "host":
            return self._kill_host(draw.choice(used), draw)
        a, b = sorted(draw.sample([*used, self._program], 2))
        self._cut[a, b] += 1
        self._hosts.cut(a, b)
        return kind, draw.uniform(*CUT_S), lambda: self._mend(a, b)

    def _kill_host(self, k: int, draw: random.Random) -> Strike:
        self._hosts.cut(k)  # first: the dead say nothing
        self._down.add(k)
        while pids := self._hosts[k].pids:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        self._servers.pop(k).wait(_ENDED_S)
        return "host", draw.uniform(*DOWN_S), lambda: self._revive(k)

    def _revive(self, k: int) -> None:
        self._down.remove(k)
        for other in range(len(self._hosts)):
            self._mend_if_whole(*sorted((k, other)))
        self._start(k)

    def _mend(self, a: int, b: int) -> None:
        self._cut[a, b] -= 1
        self._mend_if_whole(a, b)

    def _mend_if_whole(self, a: int, b: int) -> None:
        if a != b and not self._cut[a, b] and not {a, b} & self._down:
            self._hosts.mend(a, b)

    def left(self) -> list[str]:
        """Processes on hosts, besides those that take commands; they have some seconds to end."""
        until = time.monotonic() + _ENDED_S
        while True:
            found = [
                f"process {pid} on host {k}: {_name(pid)}"
                for k in range(self._program)
                for pid in self._hosts[k].pids
                if pid != self._servers[k].pid
            ]
            if not found or time.monotonic() > until:
                return found
            time.sleep(_WAIT_S)

    def close(self) -> None:
        """No host takes commands any more."""
        for server in self._servers.values():
            server.kill()
            server.wait(_ENDED_S)
        self._servers.clear()


def addresses(hosts: Hosts) -> list[tuple[str, tuple[str, ...]]]:
    """Address of each host but the last one, and what starts a command there."""
    return [(host.address, login.command(host.address)) for host in hosts[:-1]]


def _name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode().strip()
    return "it has ended"


@final
class Faults:
    """Strikes at random moments, from a thread of its own; at the end all faults are over.

    Args:
        ground: What is struck.
        seconds: Within which faults are done.
        n: How many.
        draw: Of moments, kinds and what is struck.

    Attributes:
        done: Faults by kind.
    """

    def __init__(self, ground: AbstractGround, seconds: float, n: int, draw: random.Random) -> None:
        self._ground, self._draw = ground, draw
        until = max(0.0, seconds - LEFT_S) if seconds > 3 * LEFT_S else 0.8 * seconds
        began = 0.05 * until
        self._numbers = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        for moment in sorted(draw.uniform(began, until) for _ in range(n)):
            self._agenda.append((moment, next(self._numbers), self._strike))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults")
        self._began = 0.0
        self.done: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def __enter__(self) -> Faults:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self.failure is not None:
            raise RuntimeError("faults could not be done") from self.failure

    def _run(self) -> None:
        try:
            while self._agenda:
                moment, _, action = self._agenda[0]
                over = self._over.wait(max(0.0, self._began + moment - time.monotonic()))
                heapq.heappop(self._agenda)
                if not (over and action == self._strike):
                    action()
        except BaseException as error:  # noqa: BLE001 - raised where the run ends
            self.failure = error

    def _strike(self) -> None:
        while (struck := self._ground.strike(self._draw)) is None:
            if self._over.wait(_WAIT_S):
                return
        kind, seconds, end = struck
        self.done[kind] += 1
        log.info("%s, for %.1f s", kind, seconds)
        if seconds:
            at = time.monotonic() - self._began + seconds
            heapq.heappush(self._agenda, (at, next(self._numbers), end))
