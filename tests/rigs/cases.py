"""Which cases of tests stand for the others, where something is done with few of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from functools import wraps
from itertools import count
from typing import Any, Final

import pytest


def firsts(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first case of each test; a test without parameters is its own."""
    found: dict[tuple[object, str], pytest.Item] = {}
    for item in items:
        found.setdefault((item.parent, getattr(item, "originalname", None) or item.name), item)
    return [*found.values()]


# What these run, the tests of the rooms have run.
BEYOND_ROOMS = frozenset({"benchmarks", "examples", "mutation", "oracle"})

TRACED: Final = 25
"""Examples of a property that are traced; those after them take the ways that these have taken."""


class Untraced:
    """A plugin: what traces, and counts branches, is taken off while other cases run than these.

    The marker ``no_cover`` of pytest-cov would say so, too, but in the processes of xdist a tracer
    lies below the one that it takes off.
    """

    def __init__(self) -> None:
        self._counted: frozenset[str] = frozenset()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._counted = frozenset(
            item.nodeid for item in firsts(items) if item.path.parent.name not in BEYOND_ROOMS
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        here, of_threads = sys.gettrace(), threading.gettrace()
        found = getattr(getattr(item, "obj", None), "hypothesis", None)
        inner = None if found is None else found.inner_test
        if item.nodeid not in self._counted:
            _untrace()
        elif inner is not None:
            found.inner_test = traced_at_first(inner)
        try:
            return (yield)
        finally:
            if inner is not None:
                found.inner_test = inner
            sys.settrace(here)
            threading.settrace(of_threads)  # type: ignore[arg-type]


def traced_at_first(inner: Callable[..., Any]) -> Callable[..., Any]:
    """What Hypothesis calls for an example; what traces is taken off after so many."""
    calls = count()

    @wraps(inner)
    def call(*values: object, **named: object) -> Any:
        if next(calls) == TRACED:
            _untrace()
        return inner(*values, **named)

    return call


def _untrace() -> None:
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
