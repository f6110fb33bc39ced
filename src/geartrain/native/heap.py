"""Memory that malloc holds for nobody, and gives back to the system if it is asked to."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from mmap import PAGESIZE
from typing import Final, final

SOON_S: Final = 0.1
"""Seconds since the last time, where something is over that leaves much: calls were tried."""

LATER_S: Final = 1.0
"""Where nothing of the kind is, and the heap has pieces all the same. Pages that are wanted again
come more slowly than they go."""

_PIECE: Final = 120 << 10
"""Bytes that malloc takes from those that a thread has, never from the system for themselves."""

_ENDS: Final = (8 << 20, 16 << 20, 32 << 20)
"""Bytes of so much that malloc may give back the end of what a thread has."""


@final
class Heap:
    """That of the process.

    glibc keeps what lies between pieces that stay for as long as the process lives. Ways to compute
    that were tried once leave tens of megabytes so, beside those of what was chosen.

    Args:
        trim: Gives back what is free; None: glibc's, if malloc is glibc's.
        now_s: A clock.
        end: Gives back what is free behind all pieces of this thread; None: glibc's likewise.
    """

    def __init__(
        self,
        trim: Callable[[int], object] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        end: Callable[[], object] | None = None,
    ) -> None:
        self._trim = trim or getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._now_s, self._last_s = now_s, float("-inf")
        self._end = end or _give_back_end
        self._lock = threading.Lock()
        self._here = threading.local()

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

    def tried(self) -> None:
        """This thread has computed something in a way that it will not again."""
        self._here.tried = True

    def give_back_tried(self) -> None:
        """What that has left; called by the thread when it has nothing to do for a while."""
        if self._trim is not None and getattr(self._here, "tried", False):
            self._here.tried = False
            self.give_back(0.0)
            self._end()


def _give_back_end() -> None:
    """What is free behind all pieces of this thread.

    ``malloc_trim`` leaves that to threads that are not the first. ``free`` gives it back where it
    is more than twice the largest piece that was the system's; so malloc is asked for more.
    """
    libc = ctypes.CDLL(None)
    malloc, free, mincore = libc.malloc, libc.free, libc.mincore
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    seen = ctypes.create_string_buffer(1)
    for nbytes in _ENDS:
        # A list would grow meanwhile, to lie behind some of them.
        pieces = (ctypes.c_void_p * (nbytes // _PIECE))()
        for k in range(len(pieces)):
            pieces[k] = malloc(_PIECE)
        for piece in pieces:
            free(piece)
        last = max([piece or 0 for piece in pieces])
        there = mincore(last - last % PAGESIZE, PAGESIZE, seen) == 0 and seen.raw[0] & 1
        if not there:
            return


heap: Final = Heap()
"""That of the process."""
