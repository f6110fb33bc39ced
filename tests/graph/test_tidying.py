"""What calls that are made one by one leave in the heap goes back when C makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from geartrain.nodes.loop import listing
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.listing import Listing


def _turn(calls: int, made: int | None) -> Any:
    native = None if made is None else SimpleNamespace(count=made)
    return SimpleNamespace(native=native, plan=SimpleNamespace(calls=[None] * calls))


def test_the_heap_gives_back_when_fewer_calls_are_made_one_by_one_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    monkeypatch.setattr(listing, "heap", SimpleNamespace(give_back=lambda: given.append(1)))
    one = Listing([], LoopKernels([]), ahead=True)
    turns = [(30, None), (30, None), (30, 20), (30, 30), (40, 40), (40, 30)]
    found = []
    for calls, made in turns:
        one.tidy(_turn(calls, made))
        found.append(len(given))
    assert found == [0, 0, 1, 2, 2, 2]
