"""Calls that C makes of the modules of loops, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from geartrain.nodes.loop import native


def count_made(monkeypatch: pytest.MonkeyPatch, of: Callable[[Any], bool]) -> dict[str, int]:
    """Those of some modules that C makes from now on, ``forward`` and ``backward``.

    Args:
        of: Whether a module is one of them.
    """
    found = {"forward": 0, "backward": 0}
    before = native.NativeCalls._make, native.NativeCalls._back

    def some(self: native.NativeCalls, first: int, end: int) -> int:
        return sum(of(self._modules[k]) for k in self._records[first:end, 0].tolist())

    def make(self: native.NativeCalls, first: int, records: Any) -> int:
        found["forward"] += some(self, first, first + len(records))
        return before[0](self, first, records)

    def back(self: native.NativeCalls, first: int, end: int, *rest: Any) -> None:
        found["backward"] += some(self, first, end)
        before[1](self, first, end, *rest)

    monkeypatch.setattr(native.NativeCalls, "_make", make)
    monkeypatch.setattr(native.NativeCalls, "_back", back)
    return found
