"""Memory that malloc holds for nobody, and gives back to the system if it is asked to."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Final, final

PAUSE_S: Final = 0.1
"""Seconds from one time to the next: it takes half a millisecond and more, and pages that are
wanted again come more slowly than they go, which who fits for a moment each time would feel."""


@final
class Heap:
    """That of the process.

    glibc keeps what lies between pieces that stay for as long as the process lives. Ways to compute
    that were tried once leave tens of megabytes so, beside those of what was chosen.

    Args:
        trim: Gives back what is free; None: glibc's, if malloc is glibc's.
        now_s: A clock.
    """

    def __init__(
        self,
        trim: Callable[[int], object] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim = trim or getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._now_s, self._due_s = now_s, 0.0
        self._lock = threading.Lock()

    def give_back(self) -> None:
        """Do so, unless it has been done a moment ago, or another thread is doing it."""
        if self._trim is None or not self._lock.acquire(blocking=False):
            return
        try:
            if self._now_s() >= self._due_s:
                self._trim(0)
                self._due_s = self._now_s() + PAUSE_S
        finally:
            self._lock.release()


heap: Final = Heap()
"""That of the process."""
