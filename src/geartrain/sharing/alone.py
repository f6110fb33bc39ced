"""Nobody shares weights: every part lives on one worker, and all instances come by it.

worker 0: part a ─► worker 1: part b ─► worker 0: part c ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from geartrain.graph.graph import Graph
from geartrain.graph.through import Through
from geartrain.parts.part import PartState
from geartrain.sharing.assignment import AbstractAssignment, Together
from geartrain.sharing.locks import MakeLock, NoLock
from geartrain.sharing.sharing import AbstractSharing, AbstractSharingState


@final
@dataclass(frozen=True, slots=True)
class Alone(AbstractSharing):
    """Parts are spread over the workers, each on one, by what they cost or by hand."""

    spreads: ClassVar[bool] = True

    def make(
        self,
        graph: Graph,
        parts: Mapping[str, PartState],
        workers: int = 1,
        lock: MakeLock | None = NoLock,
    ) -> AbstractSharingState:
        return AloneState(parts)


@final
class AloneState(AbstractSharingState):
    """Parts as they are.

    Args:
        parts: By name.
    """

    def __init__(self, parts: Mapping[str, PartState]) -> None:
        super().__init__()
        self.parts = parts

    def weights(self, name: str, nodes: Sequence[Through]) -> Sequence[PartState]:
        return [self.parts[name]]

    def assignment(self) -> AbstractAssignment:
        return Together()
