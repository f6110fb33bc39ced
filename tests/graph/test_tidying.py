"""What calls that are made one by one leave in the heap goes back when C makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from geartrain.native.heap import LATER_S, SOON_S
from geartrain.nodes.loop import listing
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.listing import Listing


def _turn(calls: int, made: int | None) -> Any:
    native = None if made is None else SimpleNamespace(count=made, leave=lambda: None)
    return SimpleNamespace(native=native, plan=SimpleNamespace(calls=[None] * calls))


def test_the_heap_gives_back_when_fewer_calls_are_made_one_by_one_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []
    tried: list[int] = []
    heap = SimpleNamespace(give_back=given.append, tried=lambda: tried.append(len(given)))
    monkeypatch.setattr(listing, "heap", heap)
    one = Listing([], LoopKernels([]), able=True)
    turns = [(30, None), (30, None), (30, 20), (30, 30), (40, 40), (40, 30)]
    for calls, made in turns:
        given.append(0)
        one.tidy(_turn(calls, made))
    assert given == [0, 0, 0, SOON_S, 0, SOON_S, 0, LATER_S, 0]
    assert tried == [4, 6]  # and once more at the end of the run, with what lies behind all
