"""One process's end of the connections between n processes, on ZeroMQ.

    send(to, record) ─► PUSH ═══ socket file or tcp ═══► PULL ─► causal order ─► poll()

Every process has one socket where it is written to, and one for each other process that it writes
to. A send never blocks: what cannot travel yet waits in memory, and who admits work bounds that by
``in_flight_bytes``. What a process sends to itself is delivered by its next poll.

ZeroMQ loses in silence what was under way to a process that died. So processes of a restart have a
new generation, which is part of the sockets' names; what an older one sent is dropped, and a
message that is missing on an edge is an error.

Who may write here: in a folder, the user whom it belongs to, as nobody else may enter it. By tcp,
the owners of the keys that ``connect`` was told (`door.py`), and as themselves alone: the number of
a key and the sender that is written on a message have to agree.

A transport belongs to the process that made it and is used by one thread.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from geartrain.errors import TransportError
from geartrain.frames.message import IntArray
from geartrain.transport.causal import CausalOrder
from geartrain.transport.common import Common
from geartrain.transport.ends import Ends
from geartrain.transport.incoming import Incoming
from geartrain.transport.keys import Keys
from geartrain.transport.pulse import Pulse
from geartrain.transport.record import (
    GONE,
    HEARD,
    MOST_BYTES,
    Bounds,
    Frame,
    Record,
    encode,
)
from geartrain.transport.rings import Rings
from geartrain.transport.sockets import require_closed_to_others
from geartrain.transport.together import SaidTogether
from geartrain.transport.traffic import Counters, Traffic

_MOST_A_POLL: Final = 256
_RARELY: Final = 8
"""Where there are rings, one poll in so many looks at the sockets, if it is not to wait."""
_LOOK_S: Final = 0.1


@final
class Transport:
    """Sends records to processes and receives theirs, in causal order.

    Args:
        me: Number of this process, below n.
        n: Processes that write to one another.
        at: A folder for socket files, the same for all processes and open to this user alone; or
            an address to bind, such as ``tcp://127.0.0.1:*``: then ``connect`` is told those of the
            others.
        generation: Of these processes, 0 or more; larger for those of a restart.
        watch: Further file descriptors that a poll waits for, such as those of child processes.
        most_bytes: Of one message.
        keys: Of this process, for tcp: all that is sent is encrypted, and nobody else is heard.
        plain: Tcp without keys: whoever reaches the port can read, change and end the run.
        pulse: Watches who is connected by tcp; None: nobody does, but for the kernel.
        common: Memory that all processes have, for large tensors; None: they go in messages.
        rings: Memory that all processes have, for small messages; None: all go by sockets.

    Raises:
        ValueError: A number out of range, a folder whose path is too long for sockets, or tcp with
            neither keys nor ``plain``.
        TransportError: Nothing can be bound there, or others may enter the folder.
    """

    def __init__(
        self,
        me: int,
        n: int,
        at: Path | str,
        generation: int = 0,
        *,
        watch: Sequence[int] = (),
        most_bytes: int = MOST_BYTES,
        keys: Keys | None = None,
        plain: bool = False,
        pulse: Pulse | None = None,
        common: Common | None = None,
        rings: Rings | None = None,
    ) -> None:
        if generation < 0:
            raise ValueError(f"Transport(generation={generation}): give 0 or more")
        require_closed_to_others(at, keys, plain)
        self._order: CausalOrder[Record] = CausalOrder(n, me)
        self._me, self._generation = me, generation
        self._most_bytes = most_bytes
        self._pulse, self._common, self._rings = pulse, common, rings
        self._pid = os.getpid()
        self._closed = False
        self._ends = Ends(me, n, at, generation, most_bytes, keys, pulse)
        self.address = self._ends.address
        if rings is not None:
            self._ends.listen(rings.bell)
        self._looks = 0  # for messages, without one at the sockets
        for fd in watch:
            self.watch(fd)
        self.ready: tuple[int, ...] = ()
        self._own: list[tuple[int, Record]] = []
        self._together = SaidTogether(me, self._order)
        self._counters = Counters(n)
        self._incoming = Incoming(
            me,
            generation,
            Bounds(n, most_bytes),
            self._order,
            self._counters,
            self._ends,
            self._together,
            common,
            overtakes=rings is not None,
        )

    def connect(
        self, addresses: Mapping[int, str], public_keys: Mapping[int, bytes] | None = None
    ) -> None:
        """Say where others are, before anything is sent to them; not needed with a folder.

        Who is connected is heard, too, and nobody else: what was sent here before waits there.

        Args:
            addresses: By number; of this process itself is passed over.
            public_keys: Theirs, by number, if this process has keys.

        Raises:
            ValueError: A process that is connected already, or is not there; a key that is missing,
                is none, or is another process's.
        """
        self._require_open()
        others = {k: address for k, address in addresses.items() if k != self._me}
        keys = public_keys or {}
        if self._ends.keyed and (missing := sorted(others.keys() - keys.keys())):
            raise ValueError(
                f"Transport.connect: no public key of the processes {missing}; give public_keys, "
                "what Keys.public is there"
            )
        if not self._ends.keyed and public_keys:
            raise ValueError("Transport.connect(public_keys=...): give Transport keys of its own")
        for k, address in others.items():
            self._ends.connect(k, address, keys.get(k))
            if self._ends.door is not None:
                self._ends.door.admit(k, keys[k])

    def admit(self, public_keys: Mapping[int, bytes]) -> None:
        """Let in the owners of these keys ahead of ``connect``, as those who are told of this
        process before may knock before.

        Raises:
            ValueError: A key is none, or another process's.
        """
        self._require_open()
        if self._ends.door is not None:
            for k, key in public_keys.items():
                if k != self._me:
                    self._ends.door.admit(k, key)

    def lost(self) -> tuple[int, ...]:
        """Processes whose connection has ended, if a pulse watches: nothing reaches them."""
        if self._pulse is None or self._closed:
            return ()
        return tuple(k for k in self._pulse.lost() if k not in self._order.gone)

    def reached(self, who: int) -> bool:
        """Whether the connection to a process that a pulse watches has been there."""
        return self._pulse is not None and self._pulse.reached(who)

    def unreached(self) -> Mapping[int, str]:
        """Processes that could not be connected with in time, if a pulse watches, and where."""
        if self._pulse is None or self._closed:
            return {}
        gone = self._order.gone
        return {k: at for k, at in self._pulse.unreached().items() if k not in gone}

    def gather(self, timeout_s: float) -> None:
        """Wait until all that are connected have come in, if there are keys.

        Before work that takes long: only a process that polls admits others, and once all are in
        nobody else is let near. What comes meanwhile is for the next poll.

        Raises:
            TransportError: Some have not come in that time; says which, and how many strangers did.
        """
        self._require_open()
        door = self._ends.door
        if door is None:
            return
        kept: list[tuple[int, Record]] = []
        end = time.monotonic() + timeout_s
        try:
            while missing := door.missing():
                left = end - time.monotonic()
                if left <= 0.0:
                    raise TransportError(
                        f"the processes {missing} have not connected to process {self._me} at "
                        f"{self.address} in {timeout_s:g} s, and {door.refused} connections were "
                        "refused: do they run, do they know this address and this public key, does "
                        "a firewall let them through?"
                    )
                kept += self.poll(min(left, 1.0))
        finally:
            self._own[:0] = kept

    def send(self, to: int, record: Record) -> None:
        """Send a record; returns at once, whatever the receiver does.

        Args:
            to: Number of the process, of this one too.
            record: Its arrays are copied, and may be written to afterwards; but not those that go
                to this process itself.

        Raises:
            TransportError: It is too large or cannot be encoded, or the transport is closed.
        """
        self._require_open()
        if to == self._me:
            self._own.append((to, record))
            return
        if to in self._order.gone:
            return
        if self._together.gathers and record.kind not in (HEARD, GONE):
            self._together.add(to, record)
            return
        if record.kind == GONE:
            self.flush()
        self._send(to, record, self._order.sent)
        self._order.count(to)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is sent inside of this goes when it is over: to each process in one message.

        Whatever any of them says stands in the stamps of all: a receiver that writes to another one
        by what it is told is heard there after what that one is told. Arrays are copied as it goes.
        """
        if self._together.gathers:
            yield
            return
        self._together.gathers = True
        try:
            yield
        finally:
            self._together.gathers = False
            self.flush()

    def flush(self) -> None:
        """Send what has been said ``together`` so far.

        Raises:
            TransportError: As ``send``; what is not refused has gone.
        """
        failure: TransportError | None = None
        for to, record, stamp in self._together.messages():
            try:
                self._send(to, record, stamp)
            except TransportError as error:
                failure = failure or error
                self._send(to, Record(HEARD), stamp)  # others have its number in their stamps
        if failure is not None:
            raise failure

    def _send(self, to: int, record: Record, stamp: IntArray) -> None:
        """Send a message with a stamp, which has the messages to that process before it."""
        order, lent = self._order, 0
        if self._common is not None:
            record, lent = self._common.put(to, record)
        frames = encode(record, stamp, self._me, self._generation)
        nbytes = len(frames[0])
        if len(frames) > 1:
            nbytes += sum(array.nbytes for array in frames[1:])
        if nbytes > self._most_bytes:
            raise TransportError(
                f"a record of kind {record.kind} for process {to} has {nbytes:,} bytes, and "
                f"{self._most_bytes:,} are the most; send fewer rows at a time"
            )
        rings = self._rings
        if rings is None or len(frames) > 1 or not rings.put(to, frames[0]):
            self._ends.send(to, frames)
        self._counters.sent(to, nbytes, lent, order.delivered[to])

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Record]]:
        """What has come and may be delivered, with its senders, in causal order.

        Waits until something has come, which need not be delivered: it may be held back, or say
        only what was heard, or be a peer who has come in. ``ready`` then holds the watched file
        descriptors that have something to be read.

        Args:
            timeout_s: The longest wait, finite; 0: none.

        Raises:
            TransportError: Messages are missing, came twice, cannot be read, or are of a newer
                generation than this process.
        """
        self._require_open()
        if not 0 <= timeout_s < math.inf:
            raise ValueError(f"Transport.poll({timeout_s}): give seconds, 0 or more and finite")
        found, self._own = self._own, []
        self.ready = ()
        came = self._take(found, waits=timeout_s > 0.0) or bool(found)
        ends = self._ends
        if ends.watches or ends.door is not None or (timeout_s and not came):
            self._wait(0.0 if came else timeout_s, found)
        return found

    def _wait(self, timeout_s: float, found: list[tuple[int, Record]]) -> None:
        """Wait until something has come, at most so long, and look at the watched descriptors."""
        ends, rings = self._ends, self._rings
        end = time.monotonic() + timeout_s
        while True:
            left = max(0.0, end - time.monotonic())
            if left and rings is not None:
                entered = ends.wait(left if rings.doze() else 0.0)
                rings.wake(rung=ends.heard)
            else:
                entered = ends.wait(left)
            self.ready = ends.ready
            if found or self._take(found, waits=True) or entered or self.ready or left <= 0.0:
                return

    def _take(self, found: list[tuple[int, Record]], *, waits: bool) -> bool:
        """Take what has come, and say whether anything has.

        Args:
            found: Gets it.
            waits: Whether the next thing is to wait: then all is looked at.
        """
        taken, rings = 0, self._rings
        # A sender that is faster than this process must not keep the poll from returning.
        if rings is not None:
            while taken < _MOST_A_POLL and (message := rings.next()) is not None:
                taken += 1
                self._accept([message[1]], message[0], found, by_ring=True)
            self._looks += 1
            if not waits and self._looks < _RARELY and not self._incoming.waits:
                return taken > 0
            self._looks = 0
        while taken < _MOST_A_POLL and (came := self._ends.take()) is not None:
            taken += 1
            self._accept(*came, found)
        return taken > 0

    def _accept(
        self,
        frames: Sequence[Frame],
        known_as: int | None,
        found: list[tuple[int, Record]],
        *,
        by_ring: bool = False,
    ) -> None:
        """Take a message in, and tell its sender if much has come since it was last told."""
        sender = self._incoming.accept(frames, known_as, found, by_ring=by_ring)
        if sender is None or not self._counters.owes_word(sender, self._order.delivered[sender]):
            return
        if self._ends.reaches(sender):
            self.send(sender, Record(HEARD))

    def forget(self, who: int) -> None:
        """A process is gone: nothing more of it is waited for, nor sent to it.

        Others that hear of it by a record ``GONE`` of whoever forgets it forget it as it arrives.
        """
        self._own += self._incoming.forget(who)

    def confirm(self, to: int) -> None:
        """Tell a process, if it is by tcp, that what it has sent is here: it may wait for that."""
        if self._pulse is not None and to not in self._order.gone:
            self.send(to, Record(HEARD))

    def await_heard(self, by: int, timeout_s: float) -> bool:
        """Before it is closed: wait until another process has had all that was sent to it.

        By tcp, and where that one confirms. A connection that is closed while something is on its
        way is aborted if the other side says a word meanwhile, and ZeroMQ's own threads do: then
        what is on its way is lost, which nobody would notice.

        Args:
            by: Its number.
            timeout_s: The longest wait; a connection that has ended is not waited for.

        Returns:
            Whether it has.
        """
        self._require_open()
        end, kept = time.monotonic() + timeout_s, list[tuple[int, Record]]()
        while self._pulse is not None and self._counters.flying_bytes[by] and by not in self.lost():
            left = end - time.monotonic()
            if left <= 0.0:
                break
            kept += self.poll(min(left, _LOOK_S))
        self._own[:0] = kept
        return not self._counters.flying_bytes[by]

    def in_flight_bytes(self, to: int) -> int:
        """Bytes sent to a process and not yet known to have been delivered there.

        It is told with every message from there, and by itself after 64 messages or 1 MiB.
        """
        return self._counters.flying_bytes[to]

    @property
    def held(self) -> int:
        """Messages that came and wait for others that were sent before them."""
        return self._order.held

    def waits_for(self) -> list[str]:
        """What those that are held wait for: ``2 of 5 messages from 1 to 0``, for errors."""
        return self._order.missing()

    @property
    def flying_bytes(self) -> int:
        """Sent to others, and not yet known to have been delivered."""
        return sum(self._counters.flying_bytes)

    def monitor(self) -> Traffic:
        """The counters, as they are now."""
        return Traffic(
            tuple(self._order.sent[self._me].tolist()),
            tuple(self._counters.sent_bytes),
            tuple(self._order.arrived),
            tuple(self._counters.received_bytes),
            tuple(self._counters.flying_bytes),
            self._order.held,
            self._incoming.dropped,
            0 if self._ends.door is None else self._ends.door.refused,
        )

    def watch(self, fd: int) -> None:
        """Have polls wait for a file descriptor, too."""
        self._ends.watch(fd)

    def unwatch(self, fd: int) -> None:
        """Wait for it no longer."""
        self._ends.unwatch(fd)

    def close(self, linger_s: float = 0.0, *, to: int | None = None) -> None:
        """Close the sockets; the socket file is gone afterwards. May be called again.

        Args:
            linger_s: How long to try and send what has not been sent yet.
            to: To this process alone; others may be gone, and are then waited for in vain.
        """
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return  # the sockets of a fork are its parent's
        self._ends.close(linger_s, to)

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of process {self._me} is closed")
        if self._pid != os.getpid():
            raise TransportError(
                f"the transport of process {self._me} belongs to pid {self._pid}, and this is pid "
                f"{os.getpid()}: make one after the fork"
            )
