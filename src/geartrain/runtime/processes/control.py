"""The private channel between parent and child: messages over a pair of sockets, with open files.

Nobody else can have an end of it, so pickles may go over it.
"""

from __future__ import annotations

import array
import errno
import json
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, final

_HEAD: Final = struct.Struct("<QI")
_MOST_FDS: Final = 250  # Linux takes 253 in one message

T = TypeVar("T")


@final
class Control:
    """One end of the channel.

    Args:
        end: Of a ``socket.socketpair()``.

    Attributes:
        meanwhile: Called whenever nothing has moved for as long as the socket's timeout; without
            it that is an error.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.meanwhile: Callable[[], None] | None = None

    def send(self, content: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message; the other end gets open files of its own.

        Raises:
            OSError: The other end is gone.
        """
        head = _HEAD.pack(len(content), len(fds))
        for start in range(0, max(1, len(fds)), _MOST_FDS):
            some = array.array("i", fds[start : start + _MOST_FDS])
            more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)] if some else []
            self._patiently(self.socket.sendmsg, [head if start == 0 else b"\0"], more)
        view = memoryview(content)
        while view:
            view = view[self._patiently(self.socket.send, view) :]

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message; as long as the other end lives.

        Raises:
            EOFError: The other end is gone.
            OSError: Open files came for which this process has no room.
        """
        fds: list[int] = []
        head = self._some(_HEAD.size, fds)
        size, count = _HEAD.unpack(head)
        while len(fds) < count:
            self._some(1, fds)
        content = bytearray(size)
        view, at = memoryview(content), 0
        while at < size:
            n = self._patiently(self.socket.recv_into, view[at:])
            if not n:
                raise EOFError("the other end is gone")
            at += n
        return bytes(content), fds

    def tell(self, **what: Any) -> None:
        """Send something that JSON can hold."""
        self.send(json.dumps(what).encode())

    def hear(self) -> dict[str, Any]:
        """Wait for what ``tell`` sends."""
        told: dict[str, Any] = json.loads(self.receive()[0])
        return told

    def close(self) -> None:
        """Close this process's end; it lives on in a process that was forked meanwhile."""
        self.socket.close()

    def end(self) -> None:
        """Close the channel: the other end hears of it, whoever was forked meanwhile."""
        end(self.socket)

    def _patiently(self, call: Callable[..., T], *given: object) -> T:
        """Call again for as long as nothing moves."""
        while True:
            try:
                return call(*given)
            except TimeoutError:
                if self.meanwhile is None:
                    raise
            self.meanwhile()

    def _some(self, n: int, fds: list[int]) -> bytes:
        """Exactly n bytes; open files that come with them are added."""
        found = b""
        while len(found) < n:
            room = socket.CMSG_SPACE(_MOST_FDS * 4)
            part, more, flags, _ = self._patiently(self.socket.recvmsg, n - len(found), room)
            if not part:
                raise EOFError("the other end is gone")
            if flags & socket.MSG_CTRUNC:  # those that are missing do not come any more
                raise OSError(errno.EMFILE, "no room for the open files of a message: ulimit -n")
            found += part
            for level, kind, data in more:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    got = array.array("i")
                    got.frombytes(data[: len(data) // got.itemsize * got.itemsize])
                    fds += got
        return found


def end(channel: socket.socket) -> None:
    """Close a channel that forks may have, too: shut it down before."""
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()
