"""What the work of a node costs, as it was measured, and a batch from worker to worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

MESSAGE_S: Final = 60e-6
"""CPU seconds of a batch between two processes, sender and receiver together.

Measured with batches of 8 KiB: 60 to 64 us; large ones take another 0.1 ms a 128 KiB.
"""


@final
@dataclass(frozen=True, slots=True)
class NodeCost:
    """Of one node, over some instances.

    Args:
        seconds: Forward and backward together.
        forward, backward: Firings, each of which sends a batch on.
    """

    seconds: float
    forward: int = 0
    backward: int = 0

    def __add__(self, other: NodeCost) -> NodeCost:
        return NodeCost(
            self.seconds + other.seconds,
            self.forward + other.forward,
            self.backward + other.backward,
        )


NOTHING: Final = NodeCost(0.0)
