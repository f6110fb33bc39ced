"""Calls that C makes: how many, and how much is asked for of what passes on their way back."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from geartrain.native import calls
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


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls that C has made, forward and back."""
    found = {"forward": 0, "backward": 0}
    for name in found:
        before = getattr(calls, name)

        def count(
            dtype: Any, n: int, *rest: Any, of: str = name, before: Any = before, **much: Any
        ) -> int:
            found[of] += n
            return int(before(dtype, n, *rest, **much))

        monkeypatch.setattr(calls, name, count)
    return found
