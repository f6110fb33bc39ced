"""What passes on the way back of calls that C makes: how much of it is asked for."""

from __future__ import annotations

import pytest
from torch import Tensor

from geartrain.nodes.loop.arenas import PassingMemory


def noted_asking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By calls that go back together, bytes that were asked for and not lent."""
    asked: list[int] = []
    begin, lend = PassingMemory.begin, PassingMemory.lend

    def began(self: PassingMemory, nbytes: int) -> None:
        asked.append(nbytes)
        begin(self, nbytes)

    def lent(self: PassingMemory, nbytes: int) -> tuple[Tensor, int]:
        asked[-1] -= nbytes + -nbytes % 64
        found = lend(self, nbytes)
        assert found[0] is self._memory
        return found

    monkeypatch.setattr(PassingMemory, "begin", began)
    monkeypatch.setattr(PassingMemory, "lend", lent)
    return asked
