"""Causal delivery: what was said first is heard first, also by way of others.

    A ──── "spawned" ────────────────► C      sent first, came late
    A ─► B ──── "answered" ──────────► C      held back until A's has come

On every message travels what its sender knew to have been sent: a matrix, entry (k, l) how many
messages from k to l. A receiver j delivers it once it has delivered, of every k, as many as column
j says. Nobody waits for an acknowledgement, and where nothing overtakes nothing is held.

Entry (sender, receiver) of a message is also its number on that edge, so what was lost or came
twice shows at once; the sender's own row tells what it has had of the receiver's.

Source: Raynal, Schiper and Toueg 1991, "The causal ordering abstraction and a simple way to
implement it", Information Processing Letters 39(6).
"""

from __future__ import annotations

from collections import deque
from operator import gt
from typing import Final, Generic, TypeVar, final

import numpy as np

from geartrain.errors import TransportError
from geartrain.frames.message import IntArray

T = TypeVar("T")
_ALL: Final = 1 << 62


@final
class CausalOrder(Generic[T]):
    """The order of one process among n.

    Args:
        n: Processes.
        me: Number of this one, below n.

    To be read only: ``sent``, int64 ``(n, n)``, the next stamp; ``arrived`` and ``delivered``,
    messages by sender; ``held``, how many came and wait for others; ``gone``, who is forgotten.
    """

    __slots__ = ("_me", "_n", "_waiting", "arrived", "delivered", "gone", "held", "sent")

    def __init__(self, n: int, me: int) -> None:
        if not 0 <= me < n:
            raise ValueError(f"CausalOrder(n={n}, me={me}): me is one of 0..{n - 1}")
        self._n, self._me = n, me
        self.sent: IntArray = np.zeros((n, n), np.int64)
        self.arrived = [0] * n
        self.delivered = [0] * n
        self._waiting: list[deque[tuple[IntArray, list[int], T]]] = [deque() for _ in range(n)]
        self.held = 0
        self.gone: set[int] = set()

    def stamp(self, to: int) -> IntArray:
        """What goes with the next message to another process; counts it as sent.

        Returns:
            int64 ``(n, n)``, a copy.
        """
        found = self.sent.copy()
        self.count(to)
        return found

    def count(self, to: int) -> None:
        """A message to another process has been sent."""
        self.sent[self._me, to] += 1

    def receive(self, sender: int, stamp: IntArray, item: T) -> list[tuple[int, T]]:
        """What may be delivered now that a message has come, with its senders, in causal order.

        Args:
            sender: Who has sent it.
            stamp: int64 ``(n, n)``, what came with it.
            item: The message, whatever it is.

        Raises:
            TransportError: It is not the next one of its sender: others were lost, or it came
                twice; names the edge and both numbers.
        """
        told: list[int] = stamp[:, self._me].tolist()
        number, expected = told[sender], self.arrived[sender]
        if number != expected:
            self._refuse(sender, number, expected)
        self.arrived[sender] = expected + 1
        # The first of its edge to wait stands before what comes later on it.
        if self._waiting[sender] or any(map(gt, told, self.delivered)):
            self._waiting[sender].append((stamp, told, item))
            self.held += 1
            return []
        self._deliver(sender, stamp)
        found = [(sender, item)]
        if self.held:
            self._release(found)
        return found

    def forget(self, sender: int) -> list[tuple[int, T]]:
        """A process is gone: nothing more of it is waited for, or delivered if it comes.

        What it has sent is not spoken of any more either, or others would wait for it.

        Returns:
            What may be delivered by that, as from ``receive``.
        """
        self.held -= len(self._waiting[sender])
        self._waiting[sender].clear()
        self.delivered[sender] = _ALL
        self.gone.add(sender)
        self.sent[sender] = 0
        found: list[tuple[int, T]] = []
        if self.held:
            self._release(found)
        return found

    def missing(self) -> list[str]:
        """What those that are held wait for, for errors: ``2 of 5 messages from 1 to 0``."""
        most = [
            max((told[k] for queue in self._waiting for _, told, _ in queue), default=0)
            for k in range(self._n)
        ]
        return [
            f"{most[k] - self.arrived[k]} of {most[k]} messages from {k} to {self._me}"
            for k in range(self._n)
            if most[k] > self.arrived[k]
        ]

    def _deliver(self, sender: int, stamp: IntArray) -> None:
        sent = self.sent
        np.maximum(sent, stamp, out=sent)
        for gone in self.gone:
            sent[gone] = 0
        self.delivered[sender] = count = self.delivered[sender] + 1
        sent[sender, self._me] = count

    def _release(self, found: list[tuple[int, T]]) -> None:
        """Deliver what waited for those that have been delivered, as long as there is any."""
        moved = True
        while moved and self.held:
            moved = False
            for sender, queue in enumerate(self._waiting):
                while queue and not any(map(gt, queue[0][1], self.delivered)):
                    stamp, _, item = queue.popleft()
                    self.held -= 1
                    self._deliver(sender, stamp)
                    found.append((sender, item))
                    moved = True

    def _refuse(self, sender: int, number: int, expected: int) -> None:
        what = "were lost" if number > expected else "came twice"
        raise TransportError(
            f"messages from process {sender} to process {self._me} {what}: number {number} came, "
            f"expected number {expected}; the processes have to begin anew, under a new generation"
        )
