"""What processes leave behind: other processes, files, open files, memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

BOUND_S = 30.0
"""So long a condition may take to come true on a busy machine, before a test fails."""
_LOOK_S = 0.01


def wait_until(condition: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> float:
    """Poll; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < bound_s, f"not so within {bound_s} s: {what}"
        time.sleep(_LOOK_S)
    return time.monotonic() - began


def lives(pid: int) -> bool:
    """Whether it is a process that has not ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def living(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if lives(pid)]


def children(pid: int) -> list[int]:
    """Processes that it has forked and that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if int(parent) == pid and state not in ("Z", "X"):
                found.append(int(entry.name))
    return found


def open_files() -> list[str]:
    """What this process has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(fd))
        except OSError:
            continue  # that of the folder itself
    return sorted(found)


def shared_bytes(pid: int | None = None) -> int:
    """Bytes of shared memory that are mapped: of regions that processes share."""
    total = 0
    for line in Path(f"/proc/{pid or 'self'}/maps").read_text().splitlines():
        if "/memfd:geartrain" in line:
            start, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total
