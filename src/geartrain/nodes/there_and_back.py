"""What nodes have in common that compute losses, and answer rows in the firing that brings them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from torch import nn

from geartrain.frames.message import Backward
from geartrain.nodes.loss import Objective
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.products import GRAIN


class AbstractThereAndBack(AbstractNode):
    """A node that stores nothing: nobody else wants what it computes.

    Args:
        place: Number, name, frames.
        functions: What it runs on rows.
    """

    def __init__(self, place: Place, functions: Iterable[object]) -> None:
        super().__init__(place)
        self._bundled = False
        self._grain = max(_grain_of(function) for function in functions)

    @property
    @abstractmethod
    def objectives(self) -> Sequence[Objective]:
        """Its losses."""

    def backward(self, batches: Sequence[Backward]) -> Emission:
        raise AssertionError(f"'{self.name}' sends nothing, so nothing can come back")

    @property
    def bundled(self) -> bool:
        return self._bundled

    @property
    def grain(self) -> int:
        return 1 if self._bundled else self._grain

    def check_empty(self) -> None:
        """Every row is answered at once, but a device may still have to say of what loss.

        Raises:
            NonFiniteError: A loss was NaN or infinite.
        """
        for objective in self.objectives:
            objective.sums.check_finite()


def _grain_of(function: object) -> int:
    """Rows that its products are best a multiple of: narrow maps care for none."""
    if not isinstance(function, nn.Module):
        return 1
    wide = any(p.ndim == 2 and min(p.shape) >= GRAIN for p in function.parameters())
    return GRAIN if wide else 1
