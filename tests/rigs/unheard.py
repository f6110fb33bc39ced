"""A device that is only said to be: what is asked of it is heard when somebody waits for it."""

from __future__ import annotations

import pytest
import torch

from geartrain import device as transfer


class Event:
    """Is reached when somebody waits for it."""

    reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


def answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host take memory of the host, and are there when they are waited for."""
    monkeypatch.setattr(transfer, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(transfer, "recorded", lambda device: Event())
