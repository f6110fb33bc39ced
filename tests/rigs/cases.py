"""Which cases of tests stand for the others, where something is done with few of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def firsts(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first case of each test; a test without parameters is its own."""
    found: dict[tuple[object, str], pytest.Item] = {}
    for item in items:
        found.setdefault((item.parent, getattr(item, "originalname", None) or item.name), item)
    return [*found.values()]


# What these run, the tests of the rooms have run.
BEYOND_ROOMS = frozenset({"benchmarks", "examples", "mutation", "oracle"})


def not_counted(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Cases in which branches need not be counted: they have other numbers than those that are."""
    every = [*items]
    counted = {id(item) for item in firsts(every) if item.path.parent.name not in BEYOND_ROOMS}
    return [item for item in every if id(item) not in counted]
