"""Worker processes of one runtime: made when they are first wanted, watched, ended.

ForkServer ── fork ──► workers, each with a channel      told of deaths by the server
                          └─ a note of what it is at, in memory that both have
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch

from geartrain.errors import WorkerDiedError
from geartrain.runtime.processes.control import Control, end
from geartrain.runtime.processes.members import AbstractMember, AbstractPool, death
from geartrain.runtime.processes.memory import (
    BEGINNING,
    BETWEEN,
    NOTE_BYTES,
    Apart,
    SharedTensors,
    common_of,
    dumps,
)
from geartrain.runtime.processes.server import ForkServer
from geartrain.transport.common import AREA_BYTES
from geartrain.transport.link import Transport
from geartrain.transport.rings import Bells, Rings, bytes_of_rings, clear_rings

_LOOK_S: Final = 0.25  # between two looks at whether workers are stopped
_STOPPED_LOOKS: Final = 12
"""A worker may be so long, as when somebody looks at it: about what its death costs, made anew and
gone back to a state kept before, so that waiting costs at most as much again."""
_END_S: Final = 2.0  # for a process to end


_WAIT_S: Final = 0.2  # without anything that moves, until somebody else is looked after
_PRINTS_S: Final = 0.2  # for a process to print where it is
_TIMES: Final = slice(10, 12)  # of the processor, in what follows the state
_STATES: Final = {
    "R": "ready to run",
    "S": "waiting",
    "D": "waiting for a disk",
    "T": "stopped",
    "t": "held by a debugger",
}


@final
class WorkerProcess(AbstractMember):
    """One worker process, a fork of the server.

    Args:
        pid: Its number.
        control: The channel to it.
        shared: What may be given to it.
        bells: By which processes wake one another, of all of them.
    """

    def __init__(self, pid: int, control: Control, shared: SharedTensors, bells: Bells) -> None:
        self.pid, self.control, self._shared = pid, control, shared
        self._bells = bells.fds  # that it has not been given
        self._regions: set[int] = set()  # that it has been given
        control.socket.settimeout(_WAIT_S)
        mine = weakref.ref(self)  # a cycle would keep memory and open files of a pool that is gone

        def wait() -> None:
            if (member := mine()) is not None and member.meanwhile is not None:
                member.meanwhile()

        control.meanwhile = wait

    def hand_over(self, content: bytes, own: bytes) -> None:
        here = self._shared.regions
        fresh = [k for k in here if k not in self._regions]
        said = {"fresh": fresh, "gone": sorted(self._regions - here.keys())}
        self._regions = {*here}
        fds = [*(here[k].fd for k in fresh), *self._bells]
        self.control.send(json.dumps(said).encode(), fds)
        self._bells = ()
        self.control.send(content)

    def send(self, content: bytes) -> None:
        self.control.send(content)

    def hear(self) -> dict[str, Any]:
        return self.control.hear()

    def last_words(self) -> str:
        state, *more = _stat_of(self.pid) or [""]
        if not state:
            return ""
        used_s = sum(map(int, more[_TIMES])) / os.sysconf("SC_CLK_TCK")
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)  # see child.live
        time.sleep(_PRINTS_S)
        return f" (its process, {self.pid}, is {_STATES.get(state, state)}, {used_s:.2f} s used)"


@final
class Pool(AbstractPool):
    """So many worker processes, forked on this host.

    Args:
        workers: How many.

    Attributes:
        nodes: Names by number, of the pass that runs.
    """

    members: list[WorkerProcess]
    shares = True

    def __init__(self, workers: int) -> None:
        self.server = ForkServer.of_this_process()
        self.shared = SharedTensors()
        self._notes = self.shared.add(NOTE_BYTES * workers).bytes.view(torch.int64)
        n = workers + 1
        self._common = self.shared.add(AREA_BYTES * n).bytes
        self._rings = self.shared.add(bytes_of_rings(n)).bytes.numpy()
        self._bells = Bells.make(n)
        self.nodes: Mapping[int, str] = {}
        # Bare sockets: members know their pass, and by it the pool, which would never be dropped.
        self._channels: list[socket.socket] = []
        self._end = weakref.finalize(self, _end, self._channels, self._bells, os.getpid())
        self.members = []
        try:
            for w in range(workers):
                self.members.append(self._fork(w))
        except BaseException:
            self._end()
            raise
        self._stopped: dict[int, int] = {}  # looks in a row, by process
        self._looked_s = 0.0
        self.gone: set[int] = set()

    def _fork(self, w: int) -> WorkerProcess:
        pid, control = self.server.fork(w)
        self._channels.append(control.socket)
        return WorkerProcess(pid, control, self.shared, self._bells)

    @property
    def alive(self) -> bool:
        if not (self._end.alive and self.server.lives):
            return False
        try:
            self.server.listen()
        except (EOFError, OSError):
            return False
        # A death shows in the kernel before it is told.
        return not any(m.pid in self.server.deaths or _has_ended(m.pid) for m in self.members)

    def fileno(self) -> int:
        return self.server.control.socket.fileno()

    def begin(self, nodes: Mapping[int, str]) -> None:
        self.nodes = nodes
        self._notes.fill_(BEGINNING)

    def place(self) -> tuple[str | None, int]:
        return str(self.server.folder), self.server.generation()

    def transport(self, place: tuple[str | None, int]) -> Transport:
        n = len(self.members)
        common = common_of(self._common, n, n + 1)
        clear_rings(self._rings, n + 1)  # of the pass before, which is over in all workers
        rings = Rings.if_possible(self._rings, n, n + 1, self._bells)
        return Transport(n, n + 1, self.server.folder, place[1], common=common, rings=rings)

    def join(self, transport: Transport, told: Sequence[Mapping[str, Any]]) -> bytes:
        return b"go"  # socket files have names that all know

    def tidy(self, place: tuple[str | None, int]) -> None:
        for w in range(len(self.members)):  # a worker may be killed before it has come to that
            (self.server.folder / f"{w}.{place[1]}").unlink(missing_ok=True)

    def dumps(self, thing: object, apart: Apart | None = None) -> bytes:
        return dumps(thing, self.shared, apart)

    def check(self, wait_s: float = 0.0) -> None:
        until = time.monotonic() + wait_s
        while True:
            left = until - time.monotonic()
            try:
                self.server.listen(max(0.0, left))
            except (EOFError, OSError) as error:
                self.server.kill()
                raise death(
                    f"the process that forks workers (process {self.server.pid}) has died, and "
                    "the workers with it"
                ) from error
            for w, member in enumerate(self.members):
                if member.pid in self.server.deaths and w not in self.gone:
                    how, more = how_ended(self.server.deaths[member.pid])
                    who = f"worker {w} (process {member.pid})"
                    raise death(f"{who} {how} {self._doing(w)}{more}", w)
            if left <= 0.0:
                break
        self._look()

    def look(self) -> None:
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self.check()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        for w, pid in enumerate([*(member.pid for member in self.members), self.server.pid]):
            if w in self.gone:
                continue
            # Looks are counted, not seconds: this process may have been stopped itself.
            looks = self._stopped.get(pid, 0) + 1 if _state_of(pid) in ("T", "t") else 0
            self._stopped[pid] = looks
            if looks <= _STOPPED_LOOKS:
                continue
            how = f"has been stopped, as by SIGSTOP, for {looks * _LOOK_S:.0f} s"
            if pid == self.server.pid:
                self.server.kill()
                raise death(f"the process that forks workers (process {pid}) {how}, and is ended")
            raise death(f"worker {w} (process {pid}) {how}, {self._doing(w)}, and is ended", w)

    def _doing(self, w: int) -> str:
        """What a worker is at, or was when it died."""
        note = int(self._notes[w * NOTE_BYTES // 8])
        if note == BEGINNING:
            return "as it made its part of the graph"
        if note == BETWEEN:
            return "between two firings"
        node, backward = divmod(note - 1, 2)
        name = self.nodes.get(node, "?")
        return f"while firing '{name}' {'backward' if backward else 'forward'}"

    def close(self, *, busy: bool = False) -> None:
        self._end()
        if busy:
            self._kill()
        if not self._have_ended():
            self._kill()
            self._have_ended()

    def bury(self, worker: int) -> None:
        self.gone.add(worker)
        member = self.members[worker]
        self._kill_one(member)
        until = time.monotonic() + _END_S  # it writes to weights that somebody may now load
        while not _has_ended(member.pid) and time.monotonic() < until:
            time.sleep(0.001)

    def renew(self) -> bool:
        for w in sorted(self.gone):
            self.members[w].control.end()
            try:
                self.members[w] = self._fork(w)
            except WorkerDiedError:  # the server has died meanwhile, and all that it has forked
                return False
            self._stopped.clear()
        self.gone.clear()
        return True

    def _kill(self) -> None:
        for member in self.members:
            self._kill_one(member)

    def _kill_one(self, member: WorkerProcess) -> None:
        # Another process may have got the number, if nobody was there to tell of a death.
        if _stat_of(member.pid)[1:2] == [str(self.server.pid)]:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)

    def _have_ended(self) -> bool:
        """Wait until they have, at most some seconds."""
        until = time.monotonic() + _END_S
        while time.monotonic() < until:
            try:
                self.server.listen(0.01)
            except (EOFError, OSError, ValueError):
                time.sleep(0.01)  # the server is gone as well; the kernel ends its children
            if all(m.pid in self.server.deaths or _has_ended(m.pid) for m in self.members):
                return True
        return False


def _end(channels: Sequence[socket.socket], bells: Bells, owner: int) -> None:
    """Idle workers end as their channel is closed; others are killed, and have died before."""
    if os.getpid() == owner:  # and not a process that has been forked from it
        for channel in channels:
            end(channel)
        bells.close()


def how_ended(status: int) -> tuple[str, str]:
    """How somebody has ended, and what that may come of."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "a signal"
        more = " (is there too little memory?)" if -status == signal.SIGKILL else ""
        return f"was killed by {name} ({-status})", more
    return f"has exited with status {status}", ""


def _stat_of(pid: int) -> list[str]:
    """State and parent of a process, and what more the kernel says; empty: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _state_of(pid: int) -> str:
    """As the kernel calls it: R, S, T and so on; empty: it is gone."""
    return (_stat_of(pid) or [""])[0]


def _has_ended(pid: int) -> bool:
    return _state_of(pid) in ("", "X", "Z")
