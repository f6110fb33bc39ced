"""Stream sockets between processes of one host, read and written by the threads that use them.

    send(to, frames) ─► [ sizes | frame | frame | ... ] ═══ socket file ═══► take() ─► frames

ZeroMQ has a thread of its own in each process, which a message wakes at both ends. Where as many
workers compute as there are cores, these take turns with threads that compute. Here a message is
one call of the kernel's at either end.

A send never blocks: what the kernel has no room for, or whose receiver has not bound yet, waits in
memory, and goes with later sends and takes of this process. So this is for messages that are small
and for processes that look for others often; a large tensor lies in common memory (`common.py`).

What was on its way to a process that died is lost in silence, as with ZeroMQ: numbers on messages
tell (`causal.py`).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn, final

from geartrain.errors import TransportError
from geartrain.transport.record import Frame

WANTED: Final = os.environ.get("GEARTRAIN_DIRECT") == "1"
"""Whether worker processes of one host use it: where little else runs it may save time; where
others have the cores it loses some."""
_SIZES: Final = struct.Struct("<II")
"""Bytes of the first frame, and how many follow, whose bytes are then told in 64 bits each."""
_ROOM_BYTES: Final = 1 << 17
"""That are read at once; what is larger by itself is read to where it stays."""
_KERNEL_BYTES: Final = 1 << 20
"""Room in the kernel for what one process has sent to another; it grants what it may."""
_MOST_READS: Final = 32
"""Of one connection in a row: who is faster than this process must not keep it from going on."""
_BACKLOG: Final = 128
_MOST_BUFFERS: Final = 512  # of one call of the kernel's
RETRY_S: Final = 0.01
"""Between two attempts to reach a process that has not bound yet."""
_GONE: Final = (BrokenPipeError, ConnectionResetError)
_NOT_THERE: Final = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)


@final
class _Coming:
    """A connection by which somebody writes here."""

    __slots__ = ("filled", "rest", "socket", "whole")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.rest = b""  # the beginning of a message
        self.whole: bytearray | None = None  # a large one, as far as it has come
        self.filled = 0


@final
class _Going:
    """What is written to another process."""

    __slots__ = ("socket", "waiting")

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.waiting: deque[memoryview] = deque()


@final
class Direct:
    """The sockets of one process.

    Args:
        at: Its socket file, which is not there yet.
        others: Those of all processes, by number; they need not be there yet.
        most_bytes: Of one message.

    Raises:
        OSError: Nothing can be bound there.

    To be read only: ``fd``, which a poll finds readable when there is something to ``take``;
    ``unreached``, whether something waits for a process that has not bound yet.
    """

    def __init__(self, at: str, others: Sequence[str], most_bytes: int) -> None:
        self._others, self._most_bytes = list(others), most_bytes
        self._listener = _stream()
        try:
            self._listener.bind(at)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._at = at
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        self._listens = self._listener.fileno()
        self._epoll.register(self._listens, select.EPOLLIN)
        self._coming: dict[int, _Coming] = {}
        self._going: list[_Going | None] = [None] * len(others)
        self._full: dict[int, int] = {}  # who is written to by a descriptor that has no room
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self.unreached = False
        self._tried_s = 0.0

    def send(self, to: int, frames: Sequence[Any]) -> None:
        """Send the frames of a message to another process; returns at once.

        Args:
            to: Its number.
            frames: Buffers; they are copied, and the first of them is below 4 GiB.
        """
        going = self._going[to]
        if going is None:
            going = self._going[to] = _Going()
        buffers = [_sizes(frames), *frames]
        if len(buffers) > _MOST_BUFFERS:
            buffers = [b"".join(buffers)]
        if not going.waiting:
            for _ in range(2):  # once more to whoever is there in place of one who has gone
                if going.socket is None and not self._reach(to, going):
                    break
                assert going.socket is not None
                try:
                    sent = going.socket.sendmsg(buffers)
                except BlockingIOError:
                    sent = 0
                except _GONE:
                    self._drop(to, going)
                    continue
                if sent == sum(map(_nbytes, buffers)):
                    return
                going.waiting.append(memoryview(b"".join(buffers))[sent:])
                self._await_room(to, going)
                return
        going.waiting.append(memoryview(b"".join(buffers)))
        self._push(to, going)

    def take(self) -> list[list[Frame]]:
        """The frames of messages that have come, as far as they are whole; waits for nothing.

        Raises:
            TransportError: What has come is no message, or too large.
        """
        found: list[list[Frame]] = []
        for fd, _ in self._epoll.poll(0.0):
            coming = self._coming.get(fd)
            if coming is not None:
                self._read(fd, coming, found)
            elif fd == self._listens:
                self._accept(found)
            elif fd in self._full:
                to = self._full[fd]
                going = self._going[to]
                assert going is not None
                self._push(to, going)
        if self.unreached and time.monotonic() - self._tried_s > RETRY_S:
            self._try_again()
        return found

    def _accept(self, found: list[list[Frame]]) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            accepted.setblocking(False)
            fd = accepted.fileno()
            self._coming[fd] = coming = _Coming(accepted)
            self._epoll.register(fd, select.EPOLLIN)
            self._read(fd, coming, found)

    def _read(self, fd: int, coming: _Coming, found: list[list[Frame]]) -> None:
        """Take what one process has sent, as far as it is there."""
        for _ in range(_MOST_READS):
            whole = coming.whole
            into = self._room if whole is None else memoryview(whole)[coming.filled :]
            try:
                n = coming.socket.recv_into(into)
            except BlockingIOError:
                return
            except ConnectionResetError:
                n = 0
            if not n:  # nobody writes here any more
                self._epoll.unregister(fd)
                coming.socket.close()
                del self._coming[fd]
                return
            if whole is not None:
                coming.filled += n
                if coming.filled == len(whole):
                    coming.whole = None
                    found.append(self._frames(memoryview(whole), 0)[0])
            elif coming.rest:
                self._cut(coming, memoryview(coming.rest + into[:n]), found)
            else:
                self._cut(coming, into[:n], found)
            if n < len(into):
                return

    def _cut(self, coming: _Coming, data: memoryview, found: list[list[Frame]]) -> None:
        """Cut what has come into messages."""
        at, end = 0, len(data)
        coming.rest = b""
        while at < end:
            size = self._size(data, at)
            if size > end - at:
                if size > _ROOM_BYTES:
                    coming.whole = bytearray(size)
                    coming.whole[: end - at] = data[at:]
                    coming.filled = end - at
                else:
                    coming.rest = bytes(data[at:])
                return
            frames, at = self._frames(data, at)
            found.append([bytearray(frame) for frame in frames])

    def _size(self, data: memoryview, at: int) -> int:
        """Bytes of the message that begins there; if that cannot be told yet, one too many."""
        here = len(data) - at
        if here < _SIZES.size:
            return here + 1
        first, more = _SIZES.unpack_from(data, at)
        if first > self._most_bytes or 8 * more > self._most_bytes:
            _refuse(f"a first frame of {first:,} bytes, {more:,} more", self._most_bytes)
        head = _SIZES.size + 8 * more
        if not more:
            return int(head + first)
        if here < head:
            return here + 1
        total = first + sum(struct.unpack_from(f"<{more}Q", data, at + _SIZES.size))
        if total > self._most_bytes:
            _refuse(f"frames of {total:,} bytes", self._most_bytes)
        return int(head + total)

    def _frames(self, data: memoryview, at: int) -> tuple[list[Frame], int]:
        """The frames of a message that is whole, and where the next one begins."""
        first, more = _SIZES.unpack_from(data, at)
        at += _SIZES.size
        sizes = [first]
        if more:
            sizes += struct.unpack_from(f"<{more}Q", data, at)
            at += 8 * more
        frames: list[Frame] = []
        for size in sizes:
            frames.append(data[at : at + size])
            at += size
        return frames, at

    def _reach(self, to: int, going: _Going) -> bool:
        """Connect with a process, if it has bound."""
        found = _stream()
        try:
            found.connect(self._others[to])
        except _NOT_THERE:
            found.close()
            return False
        going.socket = found
        return True

    def _drop(self, to: int, going: _Going) -> None:
        """Its receiver is gone; what was on its way is lost."""
        if going.socket is None:
            return
        fd = going.socket.fileno()
        if self._full.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        going.socket.close()
        going.socket = None
        going.waiting.clear()

    def _await_room(self, to: int, going: _Going) -> None:
        assert going.socket is not None
        fd = going.socket.fileno()
        if fd not in self._full:
            self._full[fd] = to
            self._epoll.register(fd, select.EPOLLOUT)

    def _push(self, to: int, going: _Going) -> None:
        """Send of what waits as much as there is room for."""
        if going.socket is None and not self._reach(to, going):
            self.unreached = True
            return
        assert going.socket is not None
        waiting = going.waiting
        while waiting:
            try:
                sent = going.socket.send(waiting[0])
            except BlockingIOError:
                self._await_room(to, going)
                return
            except _GONE:
                self._drop(to, going)
                return
            if sent < len(waiting[0]):
                waiting[0] = waiting[0][sent:]
            else:
                waiting.popleft()
        fd = going.socket.fileno()
        if self._full.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _try_again(self) -> None:
        self.unreached, self._tried_s = False, time.monotonic()
        for to, going in enumerate(self._going):
            if going is not None and going.waiting and going.socket is None:
                self._push(to, going)

    def forget(self, who: int) -> None:
        """A process is gone: nothing more is sent to it."""
        going = self._going[who]
        if going is not None:
            self._drop(who, going)
            going.waiting.clear()

    def close(self, linger_s: float, to: int | None = None) -> None:
        """Close the sockets; the socket file is gone afterwards.

        Args:
            linger_s: How long to try and send what has not been sent yet.
            to: To this process alone.
        """
        Path(self._at).unlink(missing_ok=True)
        end = time.monotonic() + linger_s
        while any(
            going is not None and going.waiting and to in (None, k)
            for k, going in enumerate(self._going)
        ):
            left = end - time.monotonic()
            if left <= 0.0:
                break
            self._epoll.poll(min(left, RETRY_S))
            for k, going in enumerate(self._going):
                if going is not None and going.waiting:
                    self._push(k, going)
        self.close_here()

    def close_here(self) -> None:
        """Close the sockets alone: in a fork these are its parent's as well."""
        for going in self._going:
            if going is not None and going.socket is not None:
                going.socket.close()
        for coming in self._coming.values():
            coming.socket.close()
        self._listener.close()
        self._epoll.close()


def _stream() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.setblocking(False)
    with suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
    return found


def _sizes(frames: Sequence[Any]) -> bytes:
    head = _SIZES.pack(len(frames[0]), len(frames) - 1)
    if len(frames) == 1:
        return head
    return head + struct.pack(f"<{len(frames) - 1}Q", *map(_nbytes, frames[1:]))


def _nbytes(buffer: Any) -> int:
    return len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes


def _refuse(what: str, most: int) -> NoReturn:
    raise TransportError(
        f"a message that cannot be read: it begins with {what}, and {most:,} are the most. It was "
        "not sent by this version of geartrain, or was damaged on its way"
    )
