"""How a node may use its module, other than to run it and to answer its gradient: gears,
overlapping losses and synthetic gradients are such uses.

                     ┌─► streams, one for each port
rows ─► the module ──┤
                     └─► the node that the use makes, which keeps autograd's graph of whole messages
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from geartrain.graph.operator import Spec
from geartrain.nodes.call import Call
from geartrain.nodes.node import AbstractNode, Place
from geartrain.nodes.weights import AbstractWeights


class AbstractUse(ABC):
    """How a node with ``keep="graph"`` uses its module, where it is not the plain way."""

    ways: ClassVar[int] = 1
    ports: ClassVar[tuple[str, ...]] = ("",)

    @abstractmethod
    def specs(self, name: str, given: Spec, sent: Spec) -> list[Spec]:
        """What leaves, by port, where the plain way would send ``sent``.

        Raises:
            GraphError: The module does not fit this use.
        """

    @abstractmethod
    def make(self, place: Place, call: Call, weights: AbstractWeights | None) -> AbstractNode:
        """A fresh node."""

    @abstractmethod
    def detail(self) -> str:
        """What the printed graph says of it."""
