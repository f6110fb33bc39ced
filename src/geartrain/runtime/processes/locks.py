"""Locks between processes that have a region of memory in common."""

from __future__ import annotations

import fcntl
from typing import Any, final

from geartrain.runtime.processes.memory import SharedRegion


@final
class RegionLock:
    """A lock that all processes with a region have; the kernel takes it from one that ends.

    It is one of the byte ranges of the region's file: to take and to leave it is a system call
    each, and whoever has taken it sees all that was written before it was left.

    Args:
        region: It has to stay.
        number: Which of its locks.
    """

    def __init__(self, region: SharedRegion, number: int) -> None:
        self._region, self._number = region, number

    def acquire(self, blocking: bool = True) -> bool:
        how = fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(self._region.fd, how, 1, self._number)
        except (BlockingIOError, PermissionError):  # POSIX lets a system say either
            return False
        return True

    def release(self) -> None:
        fcntl.lockf(self._region.fd, fcntl.LOCK_UN, 1, self._number)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self.release()
