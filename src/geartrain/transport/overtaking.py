"""Messages that come by two ways, in the order of their numbers.

What a ring has no room for goes by a socket, and may be overtaken. A ring and a socket lose nothing
in between, so if both are ahead something is lost: then it is read, and so refused.
"""

from __future__ import annotations

from typing import NamedTuple, final

from geartrain.transport.causal import CausalOrder
from geartrain.transport.record import Envelope, Record


class Early(NamedTuple):
    """A message that has overtaken another one of its sender."""

    envelope: Envelope
    record: Record
    by_ring: bool


@final
class Overtaking:
    """What has overtaken others, on its way to one process.

    Args:
        me: Number of the process.
        order: Knows how many messages of each sender have been read.
    """

    __slots__ = ("_early", "_me", "_order")

    def __init__(self, me: int, order: CausalOrder[Record]) -> None:
        self._me, self._order = me, order
        # By number, of each sender.
        self._early: list[dict[int, Early]] = [{} for _ in order.arrived]

    @property
    def waits(self) -> bool:
        """Whether there is any."""
        return any(self._early)

    def forget(self, who: int) -> None:
        """A process is gone: nothing of it waits."""
        self._early[who].clear()

    def keep(self, envelope: Envelope, record: Record, *, by_ring: bool) -> bool:
        """Keep a message that has come, if it is to wait for others of its sender; whether it is.

        What is not kept is to be read at once, and then, one by one, what is ``behind`` it.
        """
        sender = envelope.sender
        number = int(envelope.stamp[sender, self._me])
        if number <= self._order.arrived[sender]:
            return False
        early = self._early[sender]
        if any(x.by_ring is not by_ring for x in early.values()):
            return False
        early[number] = Early(envelope, record, by_ring)
        return True

    def behind(self, sender: int) -> Early | None:
        """The next one of a sender, if it has come; it waits no longer."""
        early = self._early[sender]
        return early.pop(self._order.arrived[sender], None) if early else None
