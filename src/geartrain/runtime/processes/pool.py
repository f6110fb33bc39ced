"""Worker processes of one runtime: made when they are first wanted, watched, ended.

ForkServer ── fork ──► workers, each with a channel      told of deaths by the server
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from geartrain.errors import WorkerDiedError
from geartrain.runtime.processes.control import Control
from geartrain.runtime.processes.memory import SharedTensors
from geartrain.runtime.processes.server import ForkServer

_LOOK_S: Final = 0.5  # between two looks at whether workers are stopped
_STOPPED_S: Final = 4.0  # a worker may be so long, as when somebody looks at it


@final
@dataclass(slots=True)
class Member:
    """One worker process."""

    pid: int
    control: Control
    regions: int = 0  # that it has been given


@final
class Pool:
    """So many worker processes.

    Args:
        workers: How many.
    """

    def __init__(self, workers: int) -> None:
        self.server = ForkServer.of_this_process()
        self.shared = SharedTensors()
        self.members = [Member(*self.server.fork(w)) for w in range(workers)]
        self._stopped_s: dict[int, float] = {}
        self._looked_s = 0.0
        self._end = weakref.finalize(self, _end, self.members, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether it has not been closed."""
        return self._end.alive and self.server.lives

    def fileno(self) -> int:
        """Something is to be read from it when a worker has died."""
        return self.server.control.socket.fileno()

    def hear(self) -> None:
        """Read what the server has told.

        Raises:
            WorkerDiedError: A worker has died, or the server.
        """
        try:
            self.server.hear()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(
                "the process that forks workers has died, and the workers with it; call again: "
                "new ones are made"
            ) from error
        for w, member in enumerate(self.members):
            if member.pid in self.server.deaths:
                how = _how(self.server.deaths[member.pid])
                raise WorkerDiedError(f"worker {w} (process {member.pid}) {how}", worker=w)

    def look(self) -> None:
        """Look, now and then, whether a worker is stopped.

        Raises:
            WorkerDiedError: One has been for some seconds.
        """
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        for w, member in enumerate(self.members):
            if _state_of(member.pid) not in ("T", "t"):
                self._stopped_s.pop(w, None)
                continue
            since = self._stopped_s.setdefault(w, now)
            if now - since > _STOPPED_S:
                raise WorkerDiedError(
                    f"worker {w} (process {member.pid}) has been stopped, as by SIGSTOP, for "
                    f"{now - since:.0f} s; it is ended",
                    worker=w,
                )

    def close(self, *, busy: bool = False) -> None:
        """End the processes; the next pass makes new ones.

        Args:
            busy: They may be in the middle of something, and are killed.
        """
        for member in self.members if busy else ():
            if member.pid not in self.server.deaths:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        self._end()


def _end(members: list[Member], owner: int) -> None:
    """Idle workers end as their channel is closed; others are killed, and have died before."""
    if os.getpid() == owner:  # and not a process that has been forked from it
        for member in members:
            member.control.close()


def _how(status: int) -> str:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "a signal"
        more = "; is there too little memory?" if -status == signal.SIGKILL else ""
        return f"was killed by {name} ({-status}){more}"
    return f"has exited with status {status}"


def _state_of(pid: int) -> str:
    """As the kernel calls it: R, S, T and so on; empty: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
