"""Compilers as processes: side by side, watched, and killed with all that they have started.

commands ─► one for each core, in groups of their own ─► they end ─► the next ones
            one complains, takes too long, or does nothing ─► all are killed, and it is said why
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

IDLE_SECONDS: Final = 30.0
"""A compiler that has not used the processor for so long hangs (where the system tells)."""
SILENT_SECONDS: Final = 1.0
"""What takes longer is told of."""
STEP_SECONDS: Final = 0.01
"""Between two looks at them."""


class Unavailable(Exception):
    """Why there are no native kernels."""


def run_all(commands: Sequence[Sequence[str]], folder: Path, patience: CompilersPatience) -> None:
    """Run commands side by side, one for each core.

    Raises:
        Unavailable: One failed, with the line of its complaint.
        TimeoutError: They take too long.
    """
    waiting = list(commands)
    running: list[tuple[subprocess.Popen[bytes], Sequence[str], Path]] = []
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                command, said = waiting.pop(0), folder / f"{len(waiting)}.said"
                running.append((_started(command, said, patience.left), command, said))
            for each in list(running):
                process, command, said = each
                if (status := process.poll()) is not None:
                    running.remove(each)
                    if status:
                        raise _failure(command, status, said)
            patience.look([process.pid for process, _, _ in running])
            time.sleep(STEP_SECONDS)
    finally:
        for process, _, _ in running:
            _kill(process)


@final
class CompilersPatience:
    """How long compilers may take: so much time, and not without working for much of it.

    Args:
        seconds: For all of them.
        told: Says that it takes a while.
    """

    def __init__(self, seconds: float, told: ToldOnce) -> None:
        self._seconds, self._told = seconds, told
        self._began = self._worked_at = self._looked = time.monotonic()
        self._worked = 0

    @property
    def left(self) -> float:
        """Seconds."""
        return self._began + self._seconds - time.monotonic()

    def look(self, groups: Sequence[int]) -> None:
        """Raises:
        TimeoutError: It is over.
        """
        now = time.monotonic()
        self._told.look()
        if self.left < 0:
            raise TimeoutError(f"it took more than {self._seconds:.0f} s")
        if now < self._looked + IDLE_SECONDS / 10:
            return
        self._looked = now
        worked = _ticks(groups)
        if worked is None or worked != self._worked:
            self._worked, self._worked_at = worked or 0, now
        elif now > self._worked_at + IDLE_SECONDS:
            raise TimeoutError(f"it did nothing for {IDLE_SECONDS:.0f} s")


def _ticks(groups: Sequence[int]) -> int | None:
    """What the processes of these groups have used of the processor; None: the system is silent."""
    proc, total = Path("/proc"), 0
    if not (proc / "self" / "stat").exists():
        return None
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[2]) in groups:
                    total += sum(map(int, fields[11:15]))  # its own, and of children that ended
    return total


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _started(command: Sequence[str], said: Path, seconds: float) -> subprocess.Popen[bytes]:
    # If this process is killed, nobody looks at the clock any more: hence the processor's time.
    most = str(max(1, math.ceil(seconds)))
    bounded = ["/bin/sh", "-c", 'ulimit -t "$0" 2>/dev/null; exec "$@"', most]
    with said.open("wb") as file:
        return subprocess.Popen(
            [*(bounded if os.path.exists(bounded[0]) else []), *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # A group of its own, so that all of it can be killed: compilers start others.
            start_new_session=True,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(command: Sequence[str], status: int, said: Path) -> Unavailable:
    lines = said.read_text(errors="replace").strip().splitlines() or ["no message"]
    told = next((line for line in lines if re.search(r"\berror\b", line)), lines[-1])
    return Unavailable(f"{shlex.join(command)} ended with {status}: {told}")


@final
class ToldOnce:
    """A line on standard error about what takes its time, once it has."""

    def __init__(self, line: str) -> None:
        self._line: str | None = f"geartrain: {line}\n"
        self._began = time.monotonic()

    def look(self) -> None:
        if self._line is None or time.monotonic() - self._began < SILENT_SECONDS:
            return
        line, self._line = self._line, None
        if sys.stderr is not None:
            with suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
                sys.stderr.write(line)
                sys.stderr.flush()
