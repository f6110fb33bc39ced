"""What is held in a loop that runs whole: bundles of a value, which rows of a turn read by number.

    bundles of a value ─► HoldStage ─► the same, their numbers in a column ─► ... ─► a reader

Nothing is kept beside the value: its buffers are what is held, and the gradient of what is read is
added to that of its places. Whoever made a bundle goes back after all that has read it, as calls
go back in the reverse of the order in which they were made.
"""

from __future__ import annotations

from typing import final

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.nodes.held import AbstractHeld
from geartrain.nodes.loop.buffers import FiringTensors


@final
class HeldInTurn(AbstractHeld):
    """The bundles of a stored value, in one turn.

    Args:
        tensors: Of the turn.
        number: Of the value.
    """

    def __init__(self, tensors: FiringTensors, number: int) -> None:
        self._tensors, self._number = tensors, number

    def spans(self, handles: IntArray) -> tuple[IntArray, IntArray]:
        return self._tensors.numbers.spans(self._number, handles)

    def payload(self) -> Payload:
        return tuple(self._tensors.likes(self._number) or ())

    def sums(self) -> Gradient:
        return tuple(self._tensors.zeros(self._number))

    def wanted(self, handles: IntArray) -> bool:
        return True

    def add(
        self, handles: IntArray, gradient: Gradient, cells: IntArray, rows: IntArray | None
    ) -> None:
        self._tensors.scatter_places(self._number, cells, gradient, rows)

    def touch(self, handles: IntArray, gradient: Gradient) -> None:
        bits = sum([1 << j for j, g in enumerate(gradient) if g is not None])
        if bits:
            self._tensors.touch(self._number)[handles] = True
            self._tensors.came(self._number, bits)
