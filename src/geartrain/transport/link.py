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
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import zmq

from geartrain.errors import TransportError
from geartrain.frames.message import IntArray
from geartrain.transport.causal import CausalOrder
from geartrain.transport.common import LENT, Common
from geartrain.transport.door import Door, who_sent
from geartrain.transport.keys import Keys
from geartrain.transport.pulse import Pulse
from geartrain.transport.record import (
    GONE,
    HEARD,
    MOST_BYTES,
    SEVERAL,
    Bounds,
    Envelope,
    Frame,
    Record,
    decode,
    encode,
    joined,
    parted,
)
from geartrain.transport.sockets import (
    IPC,
    prepare_pull,
    prepare_push,
    require_closed_to_others,
    socket_file,
)
from geartrain.transport.traffic import Counters, Traffic

_NOW: Final = int(zmq.NOBLOCK)  # enumerations cost more than what is done with them
_MORE: Final = int(zmq.SNDMORE)
_send: Final = zmq.backend.Socket.send  # of the socket itself: what zmq.Socket adds is not needed
# Arrays are copied into the socket, also large ones. To lend them costs as much up to 128 KiB and a
# tenth less at 1 MiB, needs a thread that takes them back, and whoever writes to one too early
# changes what the other side gets.
_MOST_A_POLL: Final = 256
_MOST_TOGETHER: Final = 1 << 20
"""Bytes of arrays in one message of several records; a larger record has one of its own."""
_MANY_TOGETHER: Final = 64
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
    ) -> None:
        if generation < 0:
            raise ValueError(f"Transport(generation={generation}): give 0 or more")
        require_closed_to_others(at, keys, plain)
        self._order: CausalOrder[Record] = CausalOrder(n, me)
        self._me, self._n, self._generation = me, n, generation
        self._bounds = Bounds(n, most_bytes)
        self._keys, self._pulse, self._common = keys, pulse, common
        self._door: Door | None = None
        self._folder = at if isinstance(at, Path) else None
        self._pid = os.getpid()
        self._closed = False
        self._pushes: list[zmq.Socket[bytes] | None] = [None] * n
        self._context = zmq.Context(io_threads=1)
        self._pull: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        try:
            self.address = self._bind(at)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._pair = [(self._pull, zmq.POLLIN)]
        self._fd = int(self._pull.getsockopt(zmq.FD))
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)
        self._inner = {self._fd}
        if self._door is not None:
            self._inner.update(self._door.fds)
            for fd in self._door.fds:
                self._poller.register(fd, select.POLLIN)
        self._watched: set[int] = set()
        for fd in watch:
            self.watch(fd)
        self.ready: tuple[int, ...] = ()
        self._own: list[tuple[int, Record]] = []
        self._gathers = False
        self._gathered: dict[int, list[Record]] = {}  # of whom is written to, in that order
        self._counters = Counters(n)
        self._dropped = 0

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

    def _bind(self, at: Path | str) -> str:
        pull = self._pull
        address = at if isinstance(at, str) else socket_file(at, self._me, self._generation)
        prepare_pull(pull, address, self._bounds.most_bytes)
        if isinstance(at, Path):
            self._require_new(address)
        try:
            if self._keys is not None:
                self._door = Door(pull, self._keys, address)
                return self._door.address
            pull.bind(address)
        except zmq.ZMQError as error:
            raise self._unbound(address, error) from error
        return pull.getsockopt_string(zmq.LAST_ENDPOINT)

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
        if self._keys is not None and (missing := sorted(others.keys() - keys.keys())):
            raise ValueError(
                f"Transport.connect: no public key of the processes {missing}; give public_keys, "
                "what Keys.public is there"
            )
        if self._keys is None and public_keys:
            raise ValueError("Transport.connect(public_keys=...): give Transport keys of its own")
        for k, address in others.items():
            self._connect(k, address, keys.get(k))
            if self._door is not None:
                self._door.admit(k, keys[k])

    def admit(self, public_keys: Mapping[int, bytes]) -> None:
        """Let in the owners of these keys ahead of ``connect``, as those who are told of this
        process before may knock before.

        Raises:
            ValueError: A key is none, or another process's.
        """
        self._require_open()
        if self._door is not None:
            for k, key in public_keys.items():
                if k != self._me:
                    self._door.admit(k, key)

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
        door = self._door
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

    def _connect(self, to: int, address: str, key: bytes | None = None) -> zmq.Socket[bytes]:
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
        if self._gathers and record.kind not in (HEARD, GONE):
            self._gathered.setdefault(to, []).append(record)
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
        if self._gathers:
            yield
            return
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            self.flush()

    def flush(self) -> None:
        """Send what has been said ``together`` so far.

        Raises:
            TransportError: As ``send``; what is not refused has gone.
        """
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, {}
        order, me = self._order, self._me
        lots = [
            (to, joined(lot))
            for to, records in gathered.items()
            for lot in _lots(records)
            if to not in order.gone
        ]
        left = [0] * self._n
        for to, _ in lots:
            order.count(to)
            left[to] += 1
        failure: TransportError | None = None
        for to, record in lots:
            stamp = order.sent.copy()
            stamp[me, to] -= left[to]
            left[to] -= 1
            try:
                self._send(to, record, stamp)
            except TransportError as error:
                failure = failure or error
                self._send(to, Record(HEARD), stamp)  # others have its number in their stamps
        if failure is not None:
            raise failure

    def _send(self, to: int, record: Record, stamp: IntArray) -> None:
        """Send a message with a stamp, which has the messages to that process before it."""
        push = self._pushes[to] or self._connect_later(to)
        order, lent = self._order, 0
        if self._common is not None:
            record, lent = self._common.put(to, record)
        frames = encode(record, stamp, self._me, self._generation)
        nbytes = len(frames[0])
        if len(frames) > 1:
            nbytes += sum(array.nbytes for array in frames[1:])
        if nbytes > self._bounds.most_bytes:
            raise TransportError(
                f"a record of kind {record.kind} for process {to} has {nbytes:,} bytes, and "
                f"{self._bounds.most_bytes:,} are the most; send fewer rows at a time"
            )
        try:
            for frame in frames[:-1]:
                _send(push, frame, _NOW | _MORE, True, False)
            _send(push, frames[-1], _NOW, True, False)
        except zmq.ZMQError as error:
            raise TransportError(
                f"{nbytes:,} bytes for process {to} could not be sent ({error}); the processes "
                "have to begin anew, under a new generation"
            ) from error
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
        came = self._take(found) or bool(found)
        if self._watched or self._door is not None or (timeout_s and not came):
            self._wait(0.0 if came else timeout_s, found)
        return found

    def _wait(self, timeout_s: float, found: list[tuple[int, Record]]) -> None:
        """Wait until something has come, at most so long, and look at the watched descriptors."""
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            events = self._poller.poll(math.ceil(max(0.0, left) * 1e3))
            # The descriptor of ZeroMQ says that something may have changed, not that a message
            # is there, and only once: it is asked itself before each wait.
            self.ready = tuple(fd for fd, _ in events if fd not in self._inner)
            entered = False
            if self._door is not None and any(fd in self._door.fds for fd, _ in events):
                entered = self._door.answer()
            if found or self._take(found) or entered or self.ready or left <= 0.0:
                return

    def _take(self, found: list[tuple[int, Record]]) -> bool:
        """Take what has come, and say whether anything has."""
        pair, pull = self._pair, self._pull
        taken = 0
        # A sender that is faster than this process must not keep the poll from returning.
        while taken < _MOST_A_POLL and zmq.zmq_poll(pair, 0):
            try:
                frame = first = pull.recv(_NOW, False)
            except zmq.Again:  # what was there is only whom a new connection belongs to
                continue
            taken += 1
            frames: list[Frame] = [bytearray(frame.buffer)]
            while frame.more:
                frame = pull.recv(_NOW, False)
                frames.append(frame.buffer)
            self._accept(frames, None if self._door is None else who_sent(first), found)
        return taken > 0

    def _accept(
        self, frames: Sequence[Frame], known_as: int | None, found: list[tuple[int, Record]]
    ) -> None:
        envelope, record = decode(frames, self._bounds)
        sender, stamp = envelope.sender, envelope.stamp
        if known_as is not None and sender != known_as:
            raise TransportError(
                f"a message that says it is from process {sender} came by the key of process "
                f"{known_as}: its record of kind {record.kind} was not read; end that process"
            )
        if envelope.generation != self._generation:
            self._pass_over(envelope)
            return
        if sender == self._me:
            raise TransportError(f"process {sender} has two transports: one wrote to the other")
        order = self._order
        if sender in order.gone:
            self._dropped += 1
            return
        lent = 0
        if record.kind == LENT:
            record, lent = self._borrowed(sender, record)
        if record.kind == GONE:  # now: it may itself wait for what is lost
            found += self._forgotten(record.ints[0])
        released = order.receive(sender, stamp, record)
        counters = self._counters
        counters.received(sender, envelope.nbytes + lent, int(stamp[self._me, sender]))
        self._deliver(released, found)
        if counters.owes_word(sender, order.delivered[sender]) and self._reaches(sender):
            self.send(sender, Record(HEARD))

    def _deliver(
        self, released: Sequence[tuple[int, Record]], found: list[tuple[int, Record]]
    ) -> None:
        for each in released:
            if each[1].kind == SEVERAL:
                found += [(each[0], record) for record in parted(each[1])]
            elif each[1].kind != HEARD:
                found.append(each)

    def _borrowed(self, sender: int, record: Record) -> tuple[Record, int]:
        if self._common is None:
            raise TransportError(
                f"process {sender} has left tensors in common memory, and process {self._me} has "
                "none: both are to be given the same"
            )
        return self._common.take(sender, record)

    def forget(self, who: int) -> None:
        """A process is gone: nothing more of it is waited for, nor sent to it.

        Others that hear of it by a record ``GONE`` of whoever forgets it forget it as it arrives.
        """
        self._own += self._forgotten(who)

    def _forgotten(self, who: int) -> list[tuple[int, Record]]:
        if who == self._me or not 0 <= who < self._n:
            raise TransportError(f"process {self._me} was told that process {who} is gone")
        if who in self._order.gone:
            return []
        found: list[tuple[int, Record]] = []
        self._deliver(self._order.forget(who), found)
        self._gathered.pop(who, None)
        if (push := self._pushes[who]) is not None:
            push.close(linger=0)
            self._pushes[who] = None
        if self._door is not None:
            self._door.dismiss(who)
        if self._common is not None:
            self._common.forget(who)
        self._counters.forget(who)
        return found

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

    def _reaches(self, to: int) -> bool:
        return self._folder is not None or self._pushes[to] is not None

    def _pass_over(self, envelope: Envelope) -> None:
        if envelope.generation > self._generation:
            raise TransportError(
                f"process {envelope.sender} is of generation {envelope.generation}, process "
                f"{self._me} of {self._generation}; a restart has to end the old processes first"
            )
        self._dropped += 1

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
            self._dropped,
            0 if self._door is None else self._door.refused,
        )

    def watch(self, fd: int) -> None:
        """Have polls wait for a file descriptor, too."""
        self._poller.register(fd, select.POLLIN)
        self._watched.add(fd)

    def unwatch(self, fd: int) -> None:
        """Wait for it no longer."""
        self._poller.unregister(fd)
        self._watched.discard(fd)

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
        if self.address.startswith(IPC):  # ZeroMQ leaves the file
            Path(self.address.removeprefix(IPC)).unlink(missing_ok=True)
        for k, push in enumerate(self._pushes):
            if push is not None:
                push.close(linger=round(linger_s * 1e3) if to in (None, k) else 0)
        self._pull.close(linger=0)
        if self._pulse is not None:
            self._pulse.close()
        if self._door is not None:
            self._door.close()
        self._context.term()

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect_later(self, to: int) -> zmq.Socket[bytes]:
        if self._folder is None:
            raise TransportError(f"process {to} is not connected: call connect with its address")
        return self._connect(to, socket_file(self._folder, to, self._generation))

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of process {self._me} is closed")
        if self._pid != os.getpid():
            raise TransportError(
                f"the transport of process {self._me} belongs to pid {self._pid}, and this is pid "
                f"{os.getpid()}: make one after the fork"
            )


def _lots(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Records to one process, cut into those of one message each."""
    lot: list[Record] = []
    total = 0
    for record in records:
        nbytes = sum(x.nbytes for x in record.arrays if x is not None)
        if lot and (total + nbytes > _MOST_TOGETHER or len(lot) == _MANY_TOGETHER):
            yield lot
            lot, total = [], 0
        lot.append(record)
        total += nbytes
    yield lot
