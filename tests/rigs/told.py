"""What is told of copies of a model that come, go and talk."""

from __future__ import annotations

import torch

import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument, Exchanged, Joined, Restored


class Told(AbstractInstrument):
    """Keeps it."""

    def __init__(self) -> None:
        self.exchanged: list[Exchanged] = []
        self.restored: list[Restored] = []
        self.joined: list[Joined] = []

    def on_exchanged(self, event: Exchanged) -> None:
        self.exchanged.append(event)

    def on_restored(self, event: Restored) -> None:
        self.restored.append(event)

    def on_joined(self, event: Joined) -> None:
        self.joined.append(event)

    def total(self, name: str) -> int:
        """Of all copies, in all epochs."""
        return sum(getattr(c, name) for e in self.exchanged for c in e.copies)


def numbered(n: int) -> list[gt.Instance]:
    """Instances of two rows, whose keys are their numbers."""
    drawn = torch.Generator().manual_seed(0)
    return [
        gt.Instance({"x": torch.randn(2, 2, generator=drawn, dtype=torch.float64)}, key=i)
        for i in range(n)
    ]
