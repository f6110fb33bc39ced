"""Gradients of weights that are computed of weights, which become those of the weights themselves.

W = g / |V| V, W = A B, W = stack(...)     once a firing
rows meet W      ─►  dW, a sum over rows   as of any weight
the step comes   ─►  dg, dV = vjp(dW)      once, of the weights of then
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor, nn


class AbstractComputed(Protocol):
    """What knows what some weights are computed of.

    Attributes:
        key: Equal for those whose gradients are added up together.
        stand_ins: Parameters of the shapes of what is computed: sums know these.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def stand_ins(self) -> Sequence[nn.Parameter]: ...

    def back(self, gradients: Sequence[Tensor | None]) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """What weights get, of the gradients of what is computed of them."""
