"""Whether those whom a process writes to by tcp are still there.

    ask      every second, when nothing else is said; no answer for four: the connection has ended
    else     what was sent, or a probe of the kernel, is not acknowledged for four seconds: likewise

Asking is ZeroMQ's (PING and PONG, ZMTP 3.1): its thread of input and output answers, with neither
Python nor its lock, so a worker in a long firing is there, one that is stopped is not, and
neither is one whose host or link is gone. An answer waits behind what is being sent: so those are
asked whose connection carries little; where rows go, the kernel is asked whether bytes get through.

A connection that ends is the end of a process for all others: what was under way is lost.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any, Final, final

import zmq

BEAT_S: Final = 1.0
DEAD_S: Final = 4.0
_REACHED_S: Final = 20.0
_NOW: Final = int(zmq.NOBLOCK)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_SHAKEN: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)


@final
@dataclass(slots=True)
class _Peer:
    events: Any
    since_s: float
    address: str
    reached: bool = False
    lost: bool = False


@final
class Pulse:
    """Watches the sockets that one process writes to others by.

    Args:
        asks: Whether the others are asked; else the kernel is.
        dead_s: After so many seconds without an answer a connection has ended.
    """

    def __init__(self, *, asks: bool, dead_s: float = DEAD_S) -> None:
        self._asks, self._dead_s = asks, dead_s
        self._peers: dict[int, _Peer] = {}

    def watch(self, who: int, push: zmq.Socket[bytes], address: str) -> None:
        """Watch a socket that is yet to be connected."""
        dead_ms, beat_s = round(self._dead_s * 1e3), max(1, round(self._dead_s / 4))
        push.setsockopt(zmq.TCP_KEEPALIVE, 1)
        push.setsockopt(zmq.TCP_KEEPALIVE_IDLE, beat_s)
        push.setsockopt(zmq.TCP_KEEPALIVE_INTVL, beat_s)
        push.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        push.setsockopt(zmq.TCP_MAXRT, dead_ms)
        if self._asks:
            push.setsockopt(zmq.HEARTBEAT_IVL, round(BEAT_S * 1e3))
            # From a question on, which is up to a beat after the last answer.
            push.setsockopt(zmq.HEARTBEAT_TIMEOUT, dead_ms - round(BEAT_S * 1e3))
        name = f"inproc://pulse-{who}"
        push.monitor(name, _DISCONNECTED | _SHAKEN)
        events = push.context.socket(zmq.PAIR)
        events.set_hwm(0)
        events.connect(name)
        self._peers[who] = _Peer(events, time.monotonic(), address)

    def lost(self) -> tuple[int, ...]:
        """Those whose connection was there and has ended."""
        for peer in self._peers.values():
            self._look(peer)
        return tuple(who for who, peer in self._peers.items() if peer.lost)

    def reached(self, who: int) -> bool:
        """Whether a connection has been there."""
        self._look(self._peers[who])
        return self._peers[who].reached

    def unreached(self) -> dict[int, str]:
        """Those that could not be connected with in twenty seconds, and where they were to be."""
        now = time.monotonic()
        return {
            who: peer.address
            for who, peer in self._peers.items()
            if not peer.reached and now - peer.since_s > _REACHED_S
        }

    def _look(self, peer: _Peer) -> None:
        while True:
            try:
                event, _ = struct.unpack("=HI", peer.events.recv_multipart(_NOW)[0])
            except zmq.Again:
                return
            if event == _SHAKEN:
                peer.reached = True
            elif peer.reached:  # else a handshake was not to be, and is tried again
                peer.lost = True

    def close(self) -> None:
        """Watch nobody any more."""
        for peer in self._peers.values():
            peer.events.close(linger=0)
