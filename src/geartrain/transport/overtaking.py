"""Messages that come by two ways, in the order of their numbers.

What a ring has no room for goes by a socket, and may be overtaken. A ring and a socket lose nothing
in between, so if both are ahead something is lost: then it is read, and so refused.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def in_turn(
        self, envelope: Envelope, record: Record, *, by_ring: bool
    ) -> Iterator[tuple[Envelope, Record]]:
        """What is to be read now that a message has come: nothing yet, or it, and those behind it.

        Each is to be read before the next one is asked for.
        """
        sender, arrived = envelope.sender, self._order.arrived
        number, early = int(envelope.stamp[sender, self._me]), self._early[sender]
        if number > arrived[sender] and all(x.by_ring is by_ring for x in early.values()):
            early[number] = Early(envelope, record, by_ring)
            return
        yield envelope, record
        while (behind := early.pop(arrived[sender], None)) is not None:
            yield behind.envelope, behind.record
