"""What comes to one process: read, refused or passed over, and given on in causal order.

frames ─► envelope, record ─► of this run? ─► its turn? ─► causal order ─► what may be delivered
                                 dropped        kept           held
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from geartrain.errors import TransportError
from geartrain.transport.causal import CausalOrder
from geartrain.transport.common import LENT, Common
from geartrain.transport.ends import Ends
from geartrain.transport.overtaking import Overtaking
from geartrain.transport.record import (
    GONE,
    HEARD,
    SEVERAL,
    Bounds,
    Envelope,
    Frame,
    Record,
    decode,
    parted,
)
from geartrain.transport.together import SaidTogether
from geartrain.transport.traffic import Counters


@final
class Incoming:
    """What comes to one process.

    Args:
        me, generation: Of this process.
        bounds: Of one message.
        order: Of all messages.
        counters: Are told what has come.
        ends, together: Are told of processes that are gone.
        common: Where records may lie that are too large for messages; None: nowhere.
        overtakes: Whether messages come by two ways.

    Attributes:
        dropped: Messages of older generations, and of processes that are gone.
    """

    __slots__ = (
        "_bounds",
        "_common",
        "_counters",
        "_ends",
        "_generation",
        "_me",
        "_order",
        "_overtaking",
        "_together",
        "dropped",
    )

    def __init__(
        self,
        me: int,
        generation: int,
        bounds: Bounds,
        order: CausalOrder[Record],
        counters: Counters,
        ends: Ends,
        together: SaidTogether,
        common: Common | None,
        *,
        overtakes: bool,
    ) -> None:
        self._me, self._generation, self._bounds = me, generation, bounds
        self._order, self._counters, self._common = order, counters, common
        self._ends, self._together = ends, together
        self._overtaking = Overtaking(me, order) if overtakes else None
        self.dropped = 0

    @property
    def waits(self) -> bool:
        """Whether a message waits that has overtaken another one of its sender."""
        return self._overtaking is not None and self._overtaking.waits

    def accept(
        self,
        frames: Sequence[Frame],
        known_as: int | None,
        found: list[tuple[int, Record]],
        *,
        by_ring: bool,
    ) -> int | None:
        """Take a message in.

        Args:
            frames: The message.
            known_as: The sender, if it is known by the way that the message has come.
            found: Gets what may be delivered now.
            by_ring: Whether it has come by a ring.

        Returns:
            The sender, if anything of it has been read.

        Raises:
            TransportError: It cannot be read, or is not of that sender or of this run.
        """
        envelope, record = decode(frames, self._bounds)
        sender = envelope.sender
        if known_as is not None and sender != known_as:
            way = "ring" if by_ring else "key"
            raise TransportError(
                f"a message that says it is from process {sender} came by the {way} of process "
                f"{known_as}: its record of kind {record.kind} was not read; end that process"
            )
        if envelope.generation > self._generation:
            raise TransportError(
                f"process {sender} is of generation {envelope.generation}, process {self._me} of "
                f"{self._generation}; a restart has to end the old processes first"
            )
        if envelope.generation < self._generation:
            self.dropped += 1
            return None
        if sender == self._me:
            raise TransportError(f"process {sender} has two transports: one wrote to the other")
        if sender in self._order.gone:
            self.dropped += 1
            return None
        overtaking = self._overtaking
        if overtaking is None:
            self._read(envelope, record, found)
        elif overtaking.keep(envelope, record, by_ring=by_ring):
            return None
        else:
            self._read(envelope, record, found)
            while (behind := overtaking.behind(sender)) is not None:
                self._read(behind.envelope, behind.record, found)
        return sender

    def _read(self, envelope: Envelope, record: Record, found: list[tuple[int, Record]]) -> None:
        """Take in the next message of its sender."""
        sender, lent = envelope.sender, 0
        if record.kind == LENT:
            record, lent = self._borrowed(sender, record)
        if record.kind == GONE:  # now: it may itself wait for what is lost
            found += self.forget(record.ints[0])
        released = self._order.receive(sender, envelope.stamp, record)
        had = int(envelope.stamp[self._me, sender])
        self._counters.received(sender, envelope.nbytes + lent, had)
        _deliver(released, found)

    def _borrowed(self, sender: int, record: Record) -> tuple[Record, int]:
        if self._common is None:
            raise TransportError(
                f"process {sender} has left tensors in common memory, and process {self._me} has "
                "none: both are to be given the same"
            )
        return self._common.take(sender, record)

    def forget(self, who: int) -> list[tuple[int, Record]]:
        """A process is gone: nothing more of it is waited for, nor sent to it.

        Returns:
            What others have sent, and may be delivered now that nothing of it is waited for.
        """
        if who == self._me or not 0 <= who < self._bounds.n:
            raise TransportError(f"process {self._me} was told that process {who} is gone")
        if who in self._order.gone:
            return []
        found: list[tuple[int, Record]] = []
        _deliver(self._order.forget(who), found)
        self._together.forget(who)
        if self._overtaking is not None:
            self._overtaking.forget(who)
        self._ends.dismiss(who)
        if self._common is not None:
            self._common.forget(who)
        self._counters.forget(who)
        return found


def _deliver(released: Sequence[tuple[int, Record]], found: list[tuple[int, Record]]) -> None:
    for each in released:
        if each[1].kind == SEVERAL:
            found += [(each[0], record) for record in parted(each[1])]
        elif each[1].kind != HEARD:
            found.append(each)
