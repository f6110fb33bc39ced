"""What is entered by who computes with parts: the guards of all of them, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from geartrain.parts.trained import AbstractPart, guarded


def parts(told: list[str], names: str, *, free: str = "") -> list[AbstractPart]:
    """Parts that tell of their guards; those in ``free`` have none that does anything."""

    @contextmanager
    def guard(name: str) -> Iterator[None]:
        told.append(f"in {name}")
        try:
            yield
        finally:
            told.append(f"out {name}")

    def of(name: str, way: str) -> AbstractContextManager[Any]:
        return nullcontext() if name in free else guard(f"{name} {way}")

    made = [SimpleNamespace(guard=of(n, "there"), guard_back=of(n, "back")) for n in names]
    return [cast("AbstractPart", each) for each in made]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("names", ["", "a", "ab", "abc"])
def test_guards_are_entered_in_order_and_left_the_other_way_round(names: str, back: bool) -> None:
    told: list[str] = []
    way = "back" if back else "there"
    with guarded(parts(told, names), back=back):
        assert told == [f"in {n} {way}" for n in names]
        told.clear()
    assert told == [f"out {n} {way}" for n in reversed(names)]


def test_guards_that_do_nothing_are_passed_over() -> None:
    told: list[str] = []
    with guarded(parts(told, "abcd", free="ac"), back=False):
        assert told == ["in b there", "in d there"]


def test_guards_are_left_if_what_they_guard_raises() -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="inside"), guarded(parts(told, "ab"), back=True):
        raise ValueError("inside")
    assert told[2:] == ["out b back", "out a back"]
