"""The channel between a parent and its workers on other hosts, on a transport of its own.

    launcher ── parent's address and public key ──► worker ── its own, by the launcher ──► parent
    parent ══ welcome ══► worker ══ here ══► parent
           ══ the public keys of all; what a pass is, cloudpickle ══►     ready, addresses, go

Pickles go over it, so nobody may have an end of it but these: each side knows the public key of the
other by the way that the worker was started, and speaks to the owner of that key alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from geartrain.errors import TransportError
from geartrain.runtime.processes.members import AbstractChannel, AbstractMember
from geartrain.runtime.processes.memory import SharedRegion, loads
from geartrain.transport.keys import Keys
from geartrain.transport.link import Transport
from geartrain.transport.pulse import Pulse
from geartrain.transport.record import Record

WAIT_S: Final = 0.2
CLOCK: Final = b"clock"
"""A parent asks a worker what time it is, some times; then it says something else."""
_PIECE: Final = 1 << 26  # bytes of a message; a model may be larger than one may be
_KIND: Final = 80
SILENT_S: Final = 30.0
"""So long a worker waits for a parent that says nothing, as one that was stopped for a moment, or
whose link was cut; a parent that has ended is noticed at once where its host says so."""


def to_records(content: bytes) -> Iterator[Record]:
    """A message in pieces."""
    whole = np.frombuffer(content, np.uint8)
    for start in range(0, max(1, whole.size), _PIECE):
        yield Record(_KIND, (whole.size, start), (), (whole[start : start + _PIECE],))


@final
class Pieces:
    """Messages of one sender, put together."""

    def __init__(self) -> None:
        self._whole = bytearray()
        self._at = 0
        self.messages: deque[bytes] = deque()

    def put(self, record: Record) -> None:
        """The next piece.

        Raises:
            TransportError: It is none.
        """
        if record.kind != _KIND or len(record.ints) != 2 or len(record.arrays) != 1:
            raise TransportError(f"a record of kind {record.kind} came where messages come")
        size, start = record.ints
        piece: Any = record.arrays[0]
        if start != self._at or start + piece.size > size:
            raise TransportError(f"bytes {start}.. of a message came, expected {self._at}..")
        if start == 0:
            self._whole = bytearray(size)
        self._whole[start : start + piece.size] = bytes(piece)
        self._at += piece.size
        if self._at == size:
            self.messages.append(bytes(self._whole))
            self._whole, self._at = bytearray(), 0


@final
class Switchboard:
    """The parent's end: one transport for all workers that were started together."""

    def __init__(self, transport: Transport, workers: int) -> None:
        self.transport = transport
        self._came = [Pieces() for _ in range(workers)]

    def send(self, to: int, content: bytes) -> None:
        if to in self.transport.lost():
            raise EOFError("the worker is gone")
        for record in to_records(content):
            self.transport.send(to, record)

    def take(self, worker: int, wait_s: float) -> bytes | None:
        """The next message of a worker; None: none has come so far."""
        came = self._came[worker].messages
        if not came:
            for sender, record in self.transport.poll(wait_s):
                self._came[sender].put(record)
        return came.popleft() if came else None


@final
class RemoteMember(AbstractMember):
    """A worker that is reached by tcp.

    Args:
        worker: Its number.
        pid: Of its process, on its host.
        where: Its host, for people.
        board: The parent's end.
        public: Keys of all, by number, which may change between passes.
    """

    def __init__(
        self, worker: int, pid: int, where: str, board: Switchboard, public: Mapping[int, str]
    ) -> None:
        self.pid, self.where, self.board = pid, where, board
        self._worker, self._public = worker, public

    def hand_over(self, content: bytes, own: bytes) -> None:
        self.send(json.dumps({"public": self._public}).encode())
        self.send(content)
        self.send(own)

    def send(self, content: bytes) -> None:
        self.board.send(self._worker, content)

    def hear(self) -> dict[str, Any]:
        while (content := self.board.take(self._worker, WAIT_S)) is None:
            if self._worker in self.board.transport.lost():
                raise EOFError("the worker is gone")
            if self.meanwhile is not None:
                self.meanwhile()
        told: dict[str, Any] = json.loads(content)
        return told

    def untaken(self) -> int:
        return self.board.transport.in_flight_bytes(self._worker)


@final
class RemoteChannel(AbstractChannel):
    """The worker's end.

    Args:
        transport: To the parent, connected.
        parent: Its number, that of the workers.
        bind: Address of this host for the sockets of passes.
        keys: Of this worker; None: tcp is plain.
    """

    regions: Mapping[int, SharedRegion]
    shares = False

    def __init__(self, transport: Transport, parent: int, bind: str, keys: Keys | None) -> None:
        self._transport, self._parent, self._bind, self._keys = transport, parent, bind, keys
        self._came = Pieces()
        self._public: dict[int, bytes] = {}
        self._imported: list[str] = []
        self._own = b""  # what came apart
        self.regions = {}

    def greet(self, connect: Callable[[], None]) -> None:
        """Wait until the parent knows this worker, and say that it is here.

        Args:
            connect: Connects with the parent; before it knew the key it would have refused.
        """
        until = time.monotonic() + SILENT_S
        while self._take(WAIT_S) is None:
            if time.monotonic() > until:
                raise EOFError("the parent has not called")
        connect()
        self.tell(here=True)
        while self.hear() == CLOCK:
            self.tell(clock=time.perf_counter())

    def await_pass(self) -> bytes:
        told = json.loads(self.hear())
        self._public = {int(k): key.encode() for k, key in told["public"].items()}
        content, self._own = self.hear(), self.hear()
        return content

    def loads(self, content: bytes) -> Any:
        before = {*sys.modules}
        found, self._own = loads(content, self.regions, self._own), b""
        self._imported = [name for name in sys.modules if name not in before]
        return found

    def transport(self, me: int, n: int, place: tuple[str | None, int]) -> Transport:
        folder, generation = place
        if folder is not None:
            return Transport(me, n, Path(folder), generation)
        transport = Transport(
            me,
            n,
            f"tcp://{self._bind}:*",
            generation,
            keys=self._keys,
            plain=self._keys is None,
            pulse=Pulse(asks=False),
        )
        transport.admit(self._public)
        return transport

    def about(self, transport: Transport) -> dict[str, Any]:
        return {"address": transport.address, "modules": self._imported}

    def join(self, transport: Transport, told: bytes) -> None:
        addresses = {int(k): x for k, x in json.loads(told)["addresses"].items()}
        if not addresses:
            return  # all are found by the names of their socket files
        transport.connect(addresses, self._public if self._keys is not None else None)

    def note(self, worker: int) -> memoryview:
        nothing: Any = np.zeros(1, np.int64)
        return memoryview(nothing)

    def tell(self, **what: Any) -> None:
        for record in to_records(json.dumps(what).encode()):
            self._transport.send(self._parent, record)

    def hear(self) -> bytes:
        while (content := self._take(WAIT_S)) is None:
            self.check()
        return content

    def check(self) -> None:
        if self._transport.lost():
            raise EOFError("the parent is gone")

    def _take(self, wait_s: float) -> bytes | None:
        came = self._came.messages
        if not came:
            for _, record in self._transport.poll(wait_s):
                self._came.put(record)
        return came.popleft() if came else None
