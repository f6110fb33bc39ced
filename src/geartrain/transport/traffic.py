"""What has gone over the connections of one process, and what of it the others are known to have.

sent ─► under way ─► heard: the other side says with each message how many it has had
received ─► told: with whatever is sent there next; or by itself, when it has become much
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, final

from geartrain.errors import TransportError

_HEARD_MESSAGES: Final = 64
_HEARD_BYTES: Final = 1 << 20
"""After so many messages or bytes from a process that was not written to since, it is told."""


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """What has gone over the connections; tuples have an entry for each process.

    Args:
        sent_messages, sent_bytes: By receiver.
        received_messages, received_bytes: By sender.
        in_flight_bytes: Sent, and not yet known to have been delivered, by receiver; those in
            common memory, which is bounded by itself, are left out.
        held: Came, and wait for messages that were sent before them.
        dropped: Of older generations.
        refused: Connections of strangers.
    """

    sent_messages: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    received_messages: tuple[int, ...]
    received_bytes: tuple[int, ...]
    in_flight_bytes: tuple[int, ...]
    held: int
    dropped: int
    refused: int


@final
class Counters:
    """Of one process among n; lists have an entry for each process.

    To be read only: ``sent_bytes`` and ``received_bytes``, those in common memory among them;
    ``flying_bytes``, sent in messages and not known to have been delivered.
    """

    __slots__ = (
        "_flying",
        "_heard",
        "_told_bytes",
        "_told_messages",
        "flying_bytes",
        "received_bytes",
        "sent_bytes",
    )

    def __init__(self, n: int) -> None:
        self.sent_bytes, self.received_bytes, self.flying_bytes = [0] * n, [0] * n, [0] * n
        self._flying: list[deque[int]] = [deque() for _ in range(n)]
        self._heard = [0] * n  # of what was sent to each, messages it is known to have
        self._told_messages, self._told_bytes = [0] * n, [0] * n  # had when last written to

    def sent(self, to: int, nbytes: int, lent: int, delivered: int) -> None:
        """A message has been sent.

        Args:
            to: The receiver.
            nbytes, lent: That travel, and that lie in common memory.
            delivered: Messages of the receiver's that have been delivered here, which it says.
        """
        self.sent_bytes[to] += nbytes + lent
        self._flying[to].append(nbytes)
        self.flying_bytes[to] += nbytes
        self._told_messages[to] = delivered
        self._told_bytes[to] = self.received_bytes[to]

    def received(self, sender: int, nbytes: int, had: int) -> None:
        """A message has come.

        Args:
            sender: Who has sent it.
            nbytes: All of it.
            had: Messages of this process that the sender says it has had.

        Raises:
            TransportError: There are not so many.
        """
        self.received_bytes[sender] += nbytes
        heard = self._heard[sender]
        if had > heard:
            flying = self._flying[sender]
            if had - heard > len(flying):
                raise TransportError(
                    f"process {sender} has had {had} messages of this process, which has sent "
                    f"{heard + len(flying)}; is it one of another run?"
                )
            self.flying_bytes[sender] -= sum(flying.popleft() for _ in range(had - heard))
            self._heard[sender] = had

    def owes_word(self, to: int, delivered: int) -> bool:
        """Whether much has come from a process since it was last written to.

        Args:
            to: The process.
            delivered: Messages of it that have been delivered here.
        """
        return (
            delivered - self._told_messages[to] >= _HEARD_MESSAGES
            or self.received_bytes[to] - self._told_bytes[to] >= _HEARD_BYTES
        )

    def forget(self, who: int) -> None:
        """A process is gone: nothing is under way to it."""
        self._flying[who].clear()
        self.flying_bytes[who] = 0
