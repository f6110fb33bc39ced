"""Memory that malloc holds for nobody, and gives back to the system if it is asked to."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Final, final

SOON_S: Final = 0.1
"""Seconds since the last time, where something is over that leaves much: calls were tried."""

LATER_S: Final = 1.0
"""Where nothing of the kind is, and the heap has pieces all the same. Pages that are wanted again
come more slowly than they go."""


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
        self._now_s, self._last_s = now_s, float("-inf")
        self._lock = threading.Lock()

    def give_back(self, pause_s: float) -> None:
        """Do so, unless that was done not so many seconds ago, or another thread is doing it."""
        if self._trim is None or not self._lock.acquire(blocking=False):
            return
        try:
            if self._now_s() >= self._last_s + pause_s:
                self._trim(0)
                self._last_s = self._now_s()
        finally:
            self._lock.release()


heap: Final = Heap()
"""That of the process."""
