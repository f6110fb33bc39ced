"""What a worker's share of a part has of the part itself, in whatever way the shares meet."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.parts.trained import AbstractPart


class WorkerShare(AbstractPart):
    """A part as one worker sees it; it is its own guard, and entered for each firing.

    Args:
        part: The part.
    """

    def __init__(self, part: PartState) -> None:
        self.name, self._part, self.module = part.name, part, part.module
        self.wants_graph = part.wants_graph
        self.size, self.trigger = part.size, part.trigger
        self.copy, self.copies = part.copy, part.copies

    @property
    def guard(self) -> WorkerShare:  # type: ignore[override]
        return self

    @abstractmethod
    def __enter__(self) -> None: ...

    @abstractmethod
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...

    @property
    def device(self) -> torch.device:
        return self._part.device

    @property
    def rules(self) -> Rules:  # type: ignore[override]
        return self._part.rules

    def begun(self, n: int) -> int:
        # Each worker has cohorts of its own, and none waits for another: so it is when they begin.
        return 0
