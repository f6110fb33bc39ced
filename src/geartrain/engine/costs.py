"""What the work of a node costs, as it was measured, and a batch from worker to worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

MESSAGE_S: Final = 60e-6
"""CPU seconds of a batch between two processes, sender and receiver together, without its bytes.

Measured with batches of 8 KiB: 60 to 64 us, and 34 us on another machine.
"""
BYTE_S: Final = 1e-9
"""The same of each byte: it is copied once, and read from where the other core has it, which makes
the firing that does so slower, too. Of `mnist`, batches of 313 kB: 0.15 to 0.5 ms each."""


@final
@dataclass(frozen=True, slots=True)
class NodeCost:
    """Of one node, over some instances.

    Args:
        seconds: Forward and backward together.
        forward, backward: Firings, each of which sends a batch on.
        forward_bytes, backward_bytes: Of the rows that these have taken, and of the gradients.
    """

    seconds: float
    forward: int = 0
    backward: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def __add__(self, other: NodeCost) -> NodeCost:
        return NodeCost(
            self.seconds + other.seconds,
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_bytes + other.forward_bytes,
            self.backward_bytes + other.backward_bytes,
        )

    def share(self, copies: int) -> NodeCost:
        """Of one of so many copies: these fire as often, with fewer rows."""
        return NodeCost(
            self.seconds / copies,
            self.forward,
            self.backward,
            self.forward_bytes // copies,
            self.backward_bytes // copies,
        )


NOTHING: Final = NodeCost(0.0)
