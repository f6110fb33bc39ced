"""Who else has a part's weights, and what is done for them around a step of the part.

step:  taking ─ collect ─► stepping ─► moving ─ optimiser ─► stepped
         what others added    held?      others see the next version
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias

from torch import Tensor

from geartrain.nodes.gradient import GradientSum

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()  # it may be entered by many at once
Gradients: TypeAlias = Sequence[Tensor | None]
"""One entry a parameter that learns, dense or sparse COO; None: none."""


class Ownership:
    """Nobody else has the weights; ways of sharing override what is different with them."""

    def begin(self) -> None:
        """A pass begins: weights may have been written to meanwhile, and nobody computes."""

    def taking(self) -> AbstractContextManager[object]:
        """While sums and counts of an update are taken."""
        return _NOTHING

    def collect(self, into: GradientSum) -> None:
        """Add the gradients that others have handed in; none of them may be adding."""

    def forget(self) -> None:
        """Drop what others have added: nothing of it comes any more."""

    def stepping(self, gradients: Gradients) -> Gradients | None:
        """Before a step of the part's own: what to step with; None: the step is held.

        Args:
            gradients: Averaged and clipped.
        """
        return gradients

    def moving(self) -> AbstractContextManager[object]:
        """While the weights are written to; others see those of the next version after it."""
        return _NOTHING

    def stepped(self, gradients: Gradients) -> None:
        """After a step of the part's own that was not held."""
