"""Where other processes come in: a tcp socket that admits the owners of known keys and no others.

    stranger ──✗                                   shut: everybody who is expected is inside
    stranger ──► CURVE ──✗                         open: no handshake, no key, garbage, too slow
    any key  ──► CURVE ──► ZAP: is it known? ──✗   open: a key that nobody has named here
    a peer   ──► CURVE ──► ZAP ──► the socket      its messages bear the number of its key

CURVE alone encrypts and lets in everybody who knows the public key of this process, so each
handshake asks the door (ZAP, RFC 27), which answers whenever its owner polls; there is no thread. A
socket that could not ask would refuse all. Messages have the number on them that the key was
admitted with, whatever is written in them.

Whoever connects costs a descriptor and memory before he is known to be a stranger. So the door is
open only as long as somebody is expected and few strangers are in it: otherwise the kernel drops
whatever comes to the listening socket (a socket filter that passes nothing; those who are inside
have sockets of their own). A peer's connection that ends opens it again.

Refusals are counted, and logged at most every ``_LOG_S`` seconds, with how many were left out.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import time
from socket import SOL_SOCKET, socket
from typing import Final, final

import zmq
from zmq.utils import z85

from geartrain.errors import TransportError
from geartrain.transport.keys import Keys, require_public

log = logging.getLogger("geartrain.transport")

_DOMAIN: Final = b"geartrain"
_ZAP: Final = "inproc://zeromq.zap.01"
_MONITOR: Final = "inproc://door"
_VERSION: Final = b"1.0"
_CURVE: Final = (_VERSION, _DOMAIN, b"CURVE")
_NOW: Final = int(zmq.NOBLOCK)
_HANDSHAKE_MS: Final = 5000
"""As long as a handshake may take; it is five ways there and back, and a poll of the owner."""
_BACKLOG: Final = 64
_MOST_STRANGERS: Final = 128
"""Connections that nobody has admitted, at a time, before the door is shut for a while."""
_LOG_S: Final = 10.0
_USER: Final = "User-Id"
_ATTACH_FILTER: Final = 26  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_DETACH_FILTER: Final = 27
_NOTHING: Final = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of the kernel's packet filter: return 0, which passes no byte."""

_LISTENING: Final = int(zmq.EVENT_LISTENING)
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_FAILED: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "no handshake in time, or an unknown key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "what is no handshake, or was changed on its way",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "another key",
}
_EVENTS: Final = _LISTENING | _ACCEPTED | _DISCONNECTED | sum(_FAILED)


@final
class Door:
    """Admits peers to one socket.

    The owner polls ``fds`` together with what else it waits for and calls ``answer`` when one of
    them is ready; both belong to the thread that uses the socket.

    Args:
        socket: PULL or ROUTER, not bound yet. The door is the only one of its context.
        keys: Of this process.
        address: To bind, ``tcp://HOST:PORT`` or ``tcp://HOST:*``.

    Raises:
        TransportError: The context has a door already.
        zmq.ZMQError: Nothing can be bound there.

    To be read only: ``address``, as it was bound; ``refused``, connections so far.
    """

    def __init__(self, socket: zmq.Socket[bytes], keys: Keys, address: str) -> None:
        self._socket = socket
        self._known: dict[bytes, bytes] = {}
        self._live: set[int] = set()  # descriptors of connections, of whomever
        self._came: set[bytes] = set()
        self._inside = 0  # of these, those that were admitted; may be too large for a while
        self._open = True
        self._failed = False
        self.refused = 0
        self._asking: list[tuple[float, list[bytes]]] = []
        self._left_out = 0
        self._quiet_until = -_LOG_S
        context = socket.context
        self._zap: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        try:
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.set_hwm(0)
            self._events.set_hwm(0)  # a full queue of events would stop the socket
            try:
                self._zap.bind(_ZAP)
            except zmq.ZMQError as error:
                raise TransportError(
                    f"there is a door in this ZeroMQ context already ({error}): give each socket "
                    "that admits peers a context of its own"
                ) from error
            socket.monitor(_MONITOR, _EVENTS)
            self._events.connect(_MONITOR)
            self._protect(keys)
            socket.bind(address)
            self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._listener = self._keep_listener()
        except BaseException:
            self._close_sockets()
            raise
        self.fds: tuple[int, int] = (
            int(self._zap.getsockopt(zmq.FD)),
            int(self._events.getsockopt(zmq.FD)),
        )
        self.answer()  # a descriptor of ZeroMQ tells only of what comes after nothing was there

    def _protect(self, keys: Keys) -> None:
        socket = self._socket
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else nobody is asked if nobody can be
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)

    def _keep_listener(self) -> socket:
        """What was bound, by a descriptor of our own."""
        while True:
            event, value = struct.unpack("=HI", self._events.recv_multipart(_NOW)[0])
            if event == _LISTENING:
                return socket(fileno=os.dup(value))

    def admit(self, who: int, public: bytes) -> None:
        """Let in the owner of a key, as a number.

        Raises:
            ValueError: It is no key, or somebody else's.
        """
        require_public("public", public)
        key, told = z85.decode(public), str(who).encode()
        if self._known.setdefault(key, told) != told:
            raise ValueError(
                f"process {who} has the key of process {self._known[key].decode()}: each process "
                "makes its own, by Keys.make()"
            )
        self._asking = [each for each in self._asking if not self._welcome(each[1])]
        self._take_questions()  # an answer that is sent takes the signal of those that came since
        self._adjust()

    def dismiss(self, who: int) -> None:
        """Somebody is gone: he is not waited for, and let in no more."""
        told = str(who).encode()
        self._known = {key: each for key, each in self._known.items() if each != told}
        self._came.discard(told)
        self._adjust()

    def missing(self) -> list[int]:
        """Those who may come in and have not done so yet."""
        return sorted(int(who) for who in set(self._known.values()) - self._came)

    def answer(self) -> bool:
        """Admit or refuse those who ask; returns at once, whether a peer has come in."""
        before = len(self._came)
        self._take_events()
        self._take_questions()
        self._adjust()
        return len(self._came) > before

    def _take_questions(self) -> None:
        """Answer for the keys that are known.

        An unknown one may be told in a moment, so the question waits: to refuse it would have a
        peer give up for ever, and tell a stranger something. His handshake ends when its time is
        over.
        """
        while True:
            try:
                asked = self._zap.recv_multipart(_NOW)
            except zmq.Again:
                break
            # [route, empty, version, request, domain, address, identity, mechanism, key]
            right = len(asked) == 9 and (asked[2], asked[4], asked[7]) == _CURVE
            if right and not self._welcome(asked):
                self._asking.append((time.monotonic() + _HANDSHAKE_MS / 1e3, asked))
        if self._asking:
            now = time.monotonic()
            self._asking = [each for each in self._asking if each[0] > now]

    def _welcome(self, asked: list[bytes]) -> bool:
        """Admit somebody whose key is known; False: it is not."""
        who = self._known.get(asked[8])
        if who is None:
            return False
        self._inside += 1
        self._came.add(who)
        self._zap.send_multipart([*asked[:2], _VERSION, asked[3], b"200", b"", who, b""], _NOW)
        return True

    def _take_events(self) -> None:
        while True:
            try:
                frames = self._events.recv_multipart(_NOW)
            except zmq.Again:
                return
            event, value = struct.unpack("=HI", frames[0])
            if event == _ACCEPTED:
                self._live.add(value)
            elif event == _DISCONNECTED:
                self._live.discard(value)
                if not self._failed and self._inside <= len(self._live):
                    self._refuse("what is no handshake")
                self._failed = False
                self._inside = min(self._inside, len(self._live))
            else:  # what ends the connection, which is the next event, if it is in its handshake
                self._failed = True
                self._refuse(_FAILED[event])

    def _adjust(self) -> None:
        """Listen, or not.

        That a peer has gone is only known for sure when no stranger is left, whose handshakes end
        in time: so the door may be shut too early, and is then opened again.
        """
        strangers = len(self._live) - self._inside
        most = _MOST_STRANGERS if self._open else _MOST_STRANGERS // 2
        wanted = self._inside < len(self._known) and strangers < most
        wanted = wanted or not self._known
        if wanted == self._open:
            return
        self._open = wanted
        if wanted:
            self._listener.setsockopt(SOL_SOCKET, _DETACH_FILTER, 0)
        else:
            program = ctypes.create_string_buffer(_NOTHING)
            told = struct.pack("HP", 1, ctypes.addressof(program))
            self._listener.setsockopt(SOL_SOCKET, _ATTACH_FILTER, told)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now < self._quiet_until:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        self._quiet_until = now + _LOG_S
        log.warning(
            "%s: a stranger was refused: %s (%d before it were left out here, %d in all)",
            self.address,
            why,
            left_out,
            self.refused,
        )

    def close(self) -> None:
        """Close what belongs to the door, once the socket has been closed."""
        self._listener.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._zap.close(linger=0)
        self._events.close(linger=0)


def who_sent(frame: zmq.Frame) -> int:
    """The number that the sender of a message was admitted with.

    Raises:
        TransportError: It was not admitted by a door.
    """
    try:
        return int(frame.get(_USER))
    except (zmq.ZMQError, ValueError) as error:
        raise TransportError(
            "a message came from a connection that no door has admitted"
        ) from error
