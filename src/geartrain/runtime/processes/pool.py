"""Worker processes of one runtime: made when they are first wanted, watched, ended.

ForkServer ── fork ──► workers, each with a channel      told of deaths by the server
                          └─ a note of what it is at, in memory that both have
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import torch

from geartrain.errors import WorkerDiedError
from geartrain.runtime.processes.control import Control
from geartrain.runtime.processes.memory import BEGINNING, BETWEEN, NOTE_BYTES, SharedTensors
from geartrain.runtime.processes.server import ForkServer

_LOOK_S: Final = 0.5  # between two looks at whether workers are stopped
_STOPPED_LOOKS: Final = 8  # a worker may be so long, as when somebody looks at it
_END_S: Final = 2.0  # for a process to end


@final
@dataclass(slots=True)
class WorkerProcess:
    """One worker process."""

    pid: int
    control: Control
    regions: set[int] = field(default_factory=set)  # that it has been given


@final
class Pool:
    """So many worker processes.

    Args:
        workers: How many.

    Attributes:
        nodes: Names by number, of the pass that runs.
    """

    def __init__(self, workers: int) -> None:
        self.server = ForkServer.of_this_process()
        self.shared = SharedTensors()
        self._notes = self.shared.add(NOTE_BYTES * workers).bytes.view(torch.int64)
        self.nodes: Mapping[int, str] = {}
        self.members = [WorkerProcess(*self.server.fork(w)) for w in range(workers)]
        self._stopped: dict[int, int] = {}  # looks in a row, by process
        self._looked_s = 0.0
        self._end = weakref.finalize(self, _end, self.members, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether it can work: it has not been closed, and nobody has died."""
        if not (self._end.alive and self.server.lives):
            return False
        try:
            self.server.listen()
        except (EOFError, OSError):
            return False
        # A death shows in the kernel before it is told.
        return not any(m.pid in self.server.deaths or _has_ended(m.pid) for m in self.members)

    def fileno(self) -> int:
        """Something is to be read from it when a worker has died."""
        return self.server.control.socket.fileno()

    def begin(self, nodes: Mapping[int, str]) -> None:
        """A pass of these nodes begins."""
        self.nodes = nodes
        self._notes.fill_(BEGINNING)

    def check(self, wait_s: float = 0.0) -> None:
        """Look whether all live and move.

        Args:
            wait_s: Somebody has died, and it may be so long until that is told.

        Raises:
            WorkerDiedError: A worker has died, or the server, or one has been stopped for some
                seconds.
        """
        until = time.monotonic() + wait_s
        while True:
            left = until - time.monotonic()
            try:
                self.server.listen(max(0.0, left))
            except (EOFError, OSError) as error:
                self.server.kill()
                raise _death(
                    f"the process that forks workers (process {self.server.pid}) has died, and "
                    "the workers with it"
                ) from error
            for w, member in enumerate(self.members):
                if member.pid in self.server.deaths:
                    how, more = _how(self.server.deaths[member.pid])
                    who = f"worker {w} (process {member.pid})"
                    raise _death(f"{who} {how} {self._doing(w)}{more}", w)
            if left <= 0.0:
                break
        self._look()

    def look(self) -> None:
        """As ``check``, but only now and then."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self.check()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        for w, pid in enumerate([*(member.pid for member in self.members), self.server.pid]):
            # Looks are counted, not seconds: this process may have been stopped itself.
            looks = self._stopped.get(pid, 0) + 1 if _state_of(pid) in ("T", "t") else 0
            self._stopped[pid] = looks
            if looks <= _STOPPED_LOOKS:
                continue
            how = f"has been stopped, as by SIGSTOP, for {looks * _LOOK_S:.0f} s"
            if pid == self.server.pid:
                self.server.kill()
                raise _death(f"the process that forks workers (process {pid}) {how}, and is ended")
            raise _death(f"worker {w} (process {pid}) {how}, {self._doing(w)}, and is ended", w)

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
        """End the processes, and see that they have; the next pass makes new ones.

        Args:
            busy: They may be in the middle of something, and are killed.
        """
        self._end()
        if busy:
            self._kill()
        if not self._have_ended():
            self._kill()
            self._have_ended()

    def _kill(self) -> None:
        for member in self.members:
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


_AGAIN: Final = (
    "the weights are those of the last steps, and a call goes on with new processes: load a "
    "checkpoint to go back, or have gt.Processes(..., on_worker_death='restore') do so"
)


def _death(how: str, worker: int | None = None) -> WorkerDiedError:
    return WorkerDiedError(f"{how}; {_AGAIN}", worker, how)


def _end(members: list[WorkerProcess], owner: int) -> None:
    """Idle workers end as their channel is closed; others are killed, and have died before."""
    if os.getpid() == owner:  # and not a process that has been forked from it
        for member in members:
            member.control.end()


def _how(status: int) -> tuple[str, str]:
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
