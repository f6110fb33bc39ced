"""What strangers do to a port: each attack connects, does one of these, and is gone.

    silence      connects and hangs up, or resets, or stays for a while without a word
    garbage      random bytes; a request of another protocol; the beginning of a handshake
    huge         a handshake that announces a frame of 2**62 bytes, or of a gigabyte
    drip         a handshake a byte at a time
    null, plain  whole handshakes of ZeroMQ without keys, and messages after them
    replay       what a real peer once said, as it was, cut, reordered, or with bits changed
    stranger     a whole CURVE handshake with a key of his own, and messages that look right
    wrong        the same for another server's key

Only what is public is used: addresses, public keys, and what went over the line before.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

import numpy as np
import zmq

from geartrain.transport.keys import Keys
from geartrain.transport.record import Record, encode

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
KINDS: Final = ("silence", "garbage", "huge", "drip", "null", "plain", "replay", "stranger")
_HELD_S: Final = 0.3
_CONNECT_S: Final = 0.5


def greeting(mechanism: bytes, *, server: bool = False) -> bytes:
    """The 64 bytes with which ZeroMQ begins."""
    return GREETING + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)


def command(name: bytes, body: bytes) -> bytes:
    """A command of ZMTP 3."""
    whole = bytes([len(name)]) + name + body
    if len(whole) < 256:
        return b"\x04" + bytes([len(whole)]) + whole
    return b"\x06" + struct.pack(">Q", len(whole)) + whole


def message(frames: Sequence[bytes]) -> bytes:
    """Frames of a message, as they go over a line without keys."""
    return b"".join(
        bytes([2 | (k < len(frames) - 1)]) + struct.pack(">Q", len(frame)) + frame
        for k, frame in enumerate(frames)
    )


def forged(sender: int, n: int, number: int, generation: int = 0) -> list[bytes]:
    """A message that is right in all but who has sent it."""
    stamp = np.full((n, n), number, np.int64)
    record = Record(16, (1, 0), arrays=(np.full(64, np.nan),))
    return [bytes(frame) for frame in encode(record, stamp, sender, generation)]


@final
class Relay:
    """Somebody in the middle, who keeps what clients have said to an address, by connection.

    Args:
        address: ``tcp://HOST:PORT``, where to.

    While ``tampers`` is set, a bit of all that clients say is changed; ``tampered`` says how often.
    """

    def __init__(self, address: str) -> None:
        self._to = endpoint(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.said: list[bytearray] = []
        self.tampers, self.tampered = False, 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._to)
            except OSError:
                return
            self.said.append(said := bytearray())
            self._sockets += (client, server)
            for source, sink, kept in ((client, server, said), (server, client, None)):
                thread = threading.Thread(target=self._carry, args=(source, sink, kept))
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with suppress(OSError):
            while some := source.recv(1 << 16):
                if kept is not None:
                    kept += some
                    if self.tampers:
                        some = some[:-1] + bytes([some[-1] ^ 1])
                        self.tampered += 1
                sink.sendall(some)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections."""
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def mutated(said: bytes, draw: random.Random) -> bytes:
    """What was said, with up to three changes."""
    found = bytearray(said)
    for _ in range(draw.randrange(4)):
        at, to = sorted((draw.randrange(len(found) + 1), draw.randrange(len(found) + 1)))
        part = found[at:to]
        match draw.randrange(5):
            case 0:
                del found[at:]
            case 1:
                del found[at:to]
            case 2:
                found[at:at] = part
            case 3:
                found[at:to] = part[::-1]
            case _ if part:
                found[at] ^= 1 << draw.randrange(8)
        if not found:
            return b"\0"
    return bytes(found)


def words(kind: str, said: Sequence[bytes], n: int, draw: random.Random) -> bytes:
    """What an attack of a kind says at once."""
    beginning = greeting(b"CURVE")
    hello = command(b"HELLO", bytes([1, 0]) + bytes(72) + draw.randbytes(120))
    message_ = message(forged(draw.randrange(n), n, draw.randrange(3)))
    match kind:
        case "garbage":
            whole = draw.choice(
                [b"", beginning[: draw.randrange(64)], beginning, beginning + hello]
            )
            other = draw.choice([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
            return draw.choice([whole + draw.randbytes(draw.randrange(2000)), other])
        case "huge":
            size = struct.pack(">Q", draw.choice([1 << 62, (1 << 64) - 1, 1 << 30, 1 << 20]))
            flag = draw.choice([b"\x06", b"\x02", b"\x03"])
            return beginning + draw.choice([b"", hello]) + flag + size + draw.randbytes(4096)
        case "drip":
            return beginning + hello
        case "null":
            return greeting(b"NULL") + command(b"READY", b"\x0bSocket-Type\0\0\0\4PUSH") + message_
        case "plain":
            return greeting(b"PLAIN") + command(b"HELLO", b"\x05admin\x05admin") + message_
        case "replay":
            return mutated(draw.choice(said), draw) if said else beginning
    return b""


@final
class Attack:
    """Strangers at ports, from some threads at once.

    Args:
        targets: Address and public key of each port.
        n: Processes of the group.
        said: What peers have said to one of them, as a ``Relay`` kept it.
        seed: Of what is done.
    """

    def __init__(
        self,
        targets: Sequence[tuple[str, bytes]],
        n: int,
        said: Sequence[bytes] = (),
        seed: int = 0,
    ) -> None:
        self._targets, self._n, self._said, self._seed = list(targets), n, said, seed
        self.done: Counter[str] = Counter()
        self.kept_out = 0
        self._lock = threading.Lock()

    def run(self, count: int, threads: int = 16) -> None:
        """So many attacks; returns when the last one is over."""
        order = iter(range(count))

        def work() -> None:
            with zmq.Context() as context:
                while True:
                    with self._lock:
                        number = next(order, None)
                    if number is None:
                        return
                    self._one(number, context)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()

    def _one(self, number: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        draw = random.Random(self._seed << 32 | number)
        kind = draw.choice(KINDS)
        address, public = draw.choice(self._targets)
        try:
            if kind == "stranger":
                self._by_zmq(context, address, public, draw)
            else:
                self._by_bytes(kind, address, draw)
        except TimeoutError:
            with self._lock:
                self.kept_out += 1
        except OSError:  # hung up on
            pass
        with self._lock:
            self.done[kind] += 1

    def _by_bytes(self, kind: str, address: str, draw: random.Random) -> None:
        with socket.create_connection(endpoint(address), timeout=_CONNECT_S) as me:
            said = words(kind, self._said, self._n, draw)
            if kind == "drip":
                for k in range(0, draw.randrange(len(said))):
                    me.sendall(said[k : k + 1])
            elif said:
                me.sendall(said)
            if draw.random() < 0.1:
                time.sleep(_HELD_S)
            elif kind != "silence" and draw.random() < 0.5:
                me.shutdown(socket.SHUT_WR)
                while me.recv(4096):
                    pass
            if draw.random() < 0.3:  # hang up by a reset
                me.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _by_zmq(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        public: bytes,
        draw: random.Random,
    ) -> None:
        server = public if draw.random() < 0.8 else Keys.make().public
        with context.socket(draw.choice([zmq.PUSH, zmq.DEALER, zmq.REQ])) as me:
            me.setsockopt(zmq.LINGER, 0)
            me.setsockopt(zmq.SNDTIMEO, 0)
            Keys.make().protect(me, server)
            me.connect(address)
            with suppress(zmq.ZMQError):  # there is no room, or it is not his turn
                for number in range(3):
                    me.send_multipart(forged(draw.randrange(self._n), self._n, number))
            me.poll(20 if draw.random() < 0.9 else 300, zmq.POLLIN)
