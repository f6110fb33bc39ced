"""The sockets of one process: where it is written to, and one for each process that it writes to.

    send(to, frames) ─► PUSH ═══ socket file or tcp ═══► PULL ─► take()

A wait is for all of them, and for whatever else is watched or listened to.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import zmq

from geartrain.errors import TransportError
from geartrain.transport.door import Door, who_sent
from geartrain.transport.keys import Keys
from geartrain.transport.pulse import Pulse
from geartrain.transport.record import Frame
from geartrain.transport.sockets import IPC, prepare_pull, prepare_push, socket_file

_NOW: Final = int(zmq.NOBLOCK)  # enumerations cost more than what is done with them
_MORE: Final = int(zmq.SNDMORE)
_send: Final = zmq.backend.Socket.send  # of the socket itself: what zmq.Socket adds is not needed
# Arrays are copied into the socket, also large ones. To lend them costs as much up to 128 KiB and a
# tenth less at 1 MiB, needs a thread that takes them back, and whoever writes to one too early
# changes what the other side gets.


@final
class Ends:
    """Of one process among n.

    Args:
        me, n, at, generation, most_bytes, keys, pulse: As of ``Transport``.

    Attributes:
        address: Where it is bound.
        keyed: Whether there are keys.
        door: Who is let in, where there are keys.
        ready: Of the watched descriptors, those that had something to be read in the last wait.
        heard: Whether one that is listened to had.

    Raises:
        TransportError: Nothing can be bound there.
    """

    def __init__(
        self,
        me: int,
        n: int,
        at: Path | str,
        generation: int,
        most_bytes: int,
        keys: Keys | None,
        pulse: Pulse | None,
    ) -> None:
        self._me, self._n, self._generation = me, n, generation
        self._keys, self._pulse = keys, pulse
        self.keyed = keys is not None
        self.door: Door | None = None
        self._folder = at if isinstance(at, Path) else None
        self._pushes: list[zmq.Socket[bytes] | None] = [None] * n
        self._context = zmq.Context(io_threads=1)
        self._pull: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        try:
            self.address = self._bind(at, most_bytes)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._pair = [(self._pull, zmq.POLLIN)]
        self._poller = select.poll()
        self._inner: set[int] = set()
        self._watched: set[int] = set()
        self._listened: set[int] = set()
        self.ready: tuple[int, ...] = ()
        self.heard = False
        self._register(int(self._pull.getsockopt(zmq.FD)))
        if self.door is not None:
            for fd in self.door.fds:
                self._register(fd)

    def _register(self, fd: int) -> None:
        self._poller.register(fd, select.POLLIN)
        self._inner.add(fd)

    def _require_new(self, address: str) -> None:
        if os.path.lexists(address.removeprefix(IPC)):
            raise TransportError(
                f"{address} is there already: process {self._me} of generation "
                f"{self._generation} runs, or was killed; take a new folder or generation"
            )

    def _unbound(self, address: str, error: Exception) -> TransportError:
        return TransportError(
            f"process {self._me} cannot be reached at {address} ({error}); give a folder that "
            "is there and may be written to, or a free address"
        )

    def _bind(self, at: Path | str, most_bytes: int) -> str:
        pull = self._pull
        address = at if isinstance(at, str) else socket_file(at, self._me, self._generation)
        prepare_pull(pull, address, most_bytes)
        if isinstance(at, Path):
            self._require_new(address)
        try:
            if self._keys is not None:
                self.door = Door(pull, self._keys, address)
                return self.door.address
            pull.bind(address)
        except zmq.ZMQError as error:
            raise self._unbound(address, error) from error
        return pull.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, to: int, address: str, key: bytes | None = None) -> zmq.Socket[bytes]:
        """Say where another process is.

        Args:
            to: Its number.
            address: Where it is bound.
            key: Its public one, if there are keys.

        Raises:
            ValueError: It is connected already, or is not one of n; or the key is none.
        """
        if not 0 <= to < self._n or self._pushes[to] is not None:
            raise ValueError(
                f"Transport: process {to} is connected already, or is not one of 0..{self._n - 1}"
            )
        push: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        prepare_push(push, address, beats=self._pulse is None)
        if self._pulse is not None:
            self._pulse.watch(to, push, address)
        if self._keys is not None and key is not None:
            self._keys.protect(push, key)
        push.connect(address)
        self._pushes[to] = push
        return push

    def reaches(self, to: int) -> bool:
        """Whether a process can be written to now."""
        return self._folder is not None or self._pushes[to] is not None

    def send(self, to: int, frames: Sequence[Any]) -> None:
        """Send a message; returns at once.

        Args:
            to: Number of the process.
            frames: Bytes, and buffers, which are copied.

        Raises:
            TransportError: It is not connected, or cannot be written to.
        """
        push = self._pushes[to] or self._connect_later(to)
        try:
            for frame in frames[:-1]:
                _send(push, frame, _NOW | _MORE, True, False)
            _send(push, frames[-1], _NOW, True, False)
        except zmq.ZMQError as error:
            raise TransportError(
                f"{len(frames)} frames for process {to} could not be sent ({error}); the processes "
                "have to begin anew, under a new generation"
            ) from error

    def _connect_later(self, to: int) -> zmq.Socket[bytes]:
        if self._folder is None:
            raise TransportError(f"process {to} is not connected: call connect with its address")
        return self.connect(to, socket_file(self._folder, to, self._generation))

    def take(self) -> tuple[list[Frame], int | None] | None:
        """The frames of a message that has come, and by whose key; None: there is none."""
        pull = self._pull
        while zmq.zmq_poll(self._pair, 0):
            try:
                frame = first = pull.recv(_NOW, False)
            except zmq.Again:  # what was there is only whom a new connection belongs to
                continue
            frames: list[Frame] = [bytearray(frame.buffer)]
            while frame.more:
                frame = pull.recv(_NOW, False)
                frames.append(frame.buffer)
            return frames, None if self.door is None else who_sent(first)
        return None

    def wait(self, timeout_s: float) -> bool:
        """Wait until something may have come, at most so long; whether somebody has come in.

        The descriptor of ZeroMQ says that something may have changed, not that a message is there,
        and only once: ``take`` is to be called until there is none before each wait.
        """
        events = self._poller.poll(math.ceil(timeout_s * 1e3))
        self.ready = tuple(fd for fd, _ in events if fd in self._watched)
        self.heard = any(fd in self._listened for fd, _ in events)
        door = self.door
        return door is not None and any(fd in door.fds for fd, _ in events) and door.answer()

    @property
    def watches(self) -> bool:
        """Whether there are watched descriptors."""
        return bool(self._watched)

    def watch(self, fd: int) -> None:
        """Have waits end, too, when something is to be read from it."""
        self._poller.register(fd, select.POLLIN)
        self._watched.add(fd)

    def unwatch(self, fd: int) -> None:
        """Wait for it no longer."""
        self._poller.unregister(fd)
        self._watched.discard(fd)

    def listen(self, fd: int) -> None:
        """Have waits end when something is to be read from it, which is a message elsewhere."""
        self._register(fd)
        self._listened.add(fd)

    def dismiss(self, who: int) -> None:
        """A process is gone."""
        if (push := self._pushes[who]) is not None:
            push.close(linger=0)
            self._pushes[who] = None
        if self.door is not None:
            self.door.dismiss(who)

    def close(self, linger_s: float, to: int | None) -> None:
        """Close all sockets; the socket file is gone afterwards.

        Args:
            linger_s: How long to try and send what has not been sent yet.
            to: To this process alone; None: to all.
        """
        if self.address.startswith(IPC):  # ZeroMQ leaves the file
            Path(self.address.removeprefix(IPC)).unlink(missing_ok=True)
        for k, push in enumerate(self._pushes):
            if push is not None:
                push.close(linger=round(linger_s * 1e3) if to in (None, k) else 0)
        self._pull.close(linger=0)
        if self._pulse is not None:
            self._pulse.close()
        if self.door is not None:
            self.door.close()
        self._context.term()
