"""Small messages between processes of one host, through memory that all of them have.

    put(to, bytes) ─► a ring for each pair of processes ─► next()
                 └──► a bell, if the reader dozes        ─► the poll that it waits in

A message costs a copy on either side, and no call of the kernel's while its reader is at work: who
is awake looks for messages between two things to do. A bell (an ``eventfd``) wakes without the hint
that its ringer is about to sleep, which pipes and sockets give: by that the kernel would put the
reader on the core of a writer that goes on to compute.

What has no room goes another way; each message has a number, so the two ways are told into one
order by whoever reads them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import TransportError
from geartrain.native import library

_LINE: Final = 64
_ROOM: Final = 1 << 16
"""Bytes of a ring. Tensors of 32 KiB and more lie in memory of their own (`common.py`)."""
_MOST: Final = _ROOM // 4
"""Bytes of a message in a ring; few of them are larger, and one has not to fill it."""


def bytes_of_rings(n: int) -> int:
    """Bytes of the memory that n processes need for their rings."""
    return _LINE * n + n * n * (2 * _LINE + _ROOM)


@final
class Bells:
    """By which processes wake one another.

    Args:
        fds: A descriptor of an ``eventfd`` for each of them; they are closed with this.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)

    @classmethod
    def make(cls, n: int) -> Bells:
        """Fresh ones for n processes."""
        return cls([os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(n)])

    def ring(self, who: int) -> None:
        """Wake a process; nothing, if they are closed."""
        if self.fds:
            with suppress(BlockingIOError):  # it has been rung often enough
                os.eventfd_write(self.fds[who], 1)

    def close(self) -> None:
        """Nobody is woken by them from here any more; may be called again."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


def clear_rings(memory: NDArray[np.uint8], n: int) -> None:
    """Nothing is in any ring, and nobody reads one; while nobody has a transport there.

    Args:
        memory: ``bytes_of_rings(n)`` of them.
        n: Processes.
    """
    memory[: _LINE * n] = 0
    rings = memory[_LINE * n : bytes_of_rings(n)].reshape(n * n, -1)
    rings[:, : 2 * _LINE] = 0


@final
class Rings:
    """One process's view of all rings; from now on it reads its own.

    Args:
        memory: uint8, ``bytes_of_rings(n)``, the same for all processes.
        me: Number of this process, below n.
        n: Processes.
        bells: Of each process.

    Attributes:
        bell: This process's: readable when it has been woken.
    """

    def __init__(self, memory: NDArray[np.uint8], me: int, n: int, bells: Bells) -> None:
        native = library.current()
        if native is None or memory.size < bytes_of_rings(n):
            raise ValueError("Rings: native kernels and memory for all rings are wanted")
        self._memory, self._bytes = memory, memoryview(memory.data)
        self._at, self._n, self._me, self._bells = memory.ctypes.data, n, me, bells
        self.bell = bells.fds[me]
        self._found = np.zeros(3, np.int64)
        self._found_at = self._found.ctypes.data
        calls = native.rings
        self._put, self._next, self._drop = (
            calls["ring_put"],
            calls["ring_next"],
            calls["ring_drop"],
        )
        self._doze, self._awake = calls["ring_doze"], calls["ring_awake"]
        self._awake(self._at, me)

    @classmethod
    def if_possible(cls, memory: NDArray[np.uint8], me: int, n: int, bells: Bells) -> Rings | None:
        """Those of a process; None: without native kernels there are none."""
        return None if library.current() is None else cls(memory, me, n, bells)

    def put(self, to: int, message: bytes) -> bool:
        """Leave a message for a process, and wake it; False: it has to go another way."""
        size = len(message)
        if size > _MOST:
            return False
        done = self._put(self._at, self._n, _ROOM, self._me, to, message, size)
        if done == 2:
            self._bells.ring(to)
        return done > 0

    def next(self) -> tuple[int, bytearray] | None:
        """A message that has come, and whose ring it was in; None: there is none.

        Raises:
            TransportError: Somebody has written into a ring what is no message.
        """
        found = self._next(self._at, self._n, _ROOM, self._me, self._found_at)
        if not found:
            return None
        if found < 0:
            raise TransportError(
                f"a ring of messages to process {self._me} that cannot be read: sizes are beyond "
                "it; a process has written there that is none of this run"
            )
        sender, start, size = self._found.tolist()
        message = bytearray(self._bytes[start : start + size])
        self._drop(self._at, self._n, _ROOM, self._me, self._found_at)
        return sender, message

    def doze(self) -> bool:
        """About to wait for the bell: whether nothing is there that is to be read before."""
        return bool(self._doze(self._at, self._n, _ROOM, self._me))

    def wake(self, *, rung: bool) -> None:
        """Awake again.

        Args:
            rung: Whether the bell has been; else the wait was over by something else.
        """
        self._awake(self._at, self._me)
        if rung:
            with suppress(BlockingIOError):
                os.eventfd_read(self.bell)
