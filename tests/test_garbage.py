"""Objects that were there before are spared, and only as long as they are to be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from geartrain import garbage
from geartrain.garbage import old_objects_spared


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is frozen at first; others in this process may have frozen what they import."""
    monkeypatch.setattr(garbage, "gc", gc)
    had = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if had:
        gc.freeze()


class Ring:
    """A cycle of its own."""

    def __init__(self) -> None:
        self.me = self


def test_cycles_that_are_made_meanwhile_are_collected_and_those_of_before_afterwards() -> None:
    before = Ring()
    old = weakref.ref(before)
    with old_objects_spared():
        assert gc.get_freeze_count()
        del before
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert not gc.get_freeze_count()
    gc.collect()
    assert old() is None


def test_what_somebody_else_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        with old_objects_spared():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_one_within_another_ends_nothing() -> None:
    with old_objects_spared():
        with old_objects_spared():
            pass
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


def test_what_is_raised_ends_it() -> None:
    try:
        with old_objects_spared():
            raise ValueError
    except ValueError:
        assert not gc.get_freeze_count()
