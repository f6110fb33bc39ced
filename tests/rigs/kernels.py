"""Which tests are run a second time, without native kernels: those that have asked for them.

Where the C of a kernel works, its twin in torch does not, and either must pass the same tests. In
the rooms where kernels compute, and wherever a test is marked ``both_ways``, a test that has passed
is run again without them, in the same process, if the package has asked for kernels while it ran;
what never asks for them would only be run twice. A test that chooses by itself goes both ways in
one run; what needs kernels goes one way, and so does a soak. Of the cases of a test the first goes
both ways: the others go without kernels where all of the rooms do, with GEARTRAIN_NATIVE=0 (``make
test-slow``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from _pytest.runner import runtestprotocol

from geartrain.native import library
from tests.rigs import cases

ROOMS = frozenset({"nodes", "derived", "graph", "nn", "whole"})
"""Folders of tests."""
CHOOSE = frozenset({"native", "needs_kernels", "either", "way"})
"""Parameters and fixtures by which a test chooses."""


def goes_both_ways(item: pytest.Item) -> bool:
    """Whether a test is to be tried without kernels, should it ask for them."""
    names = getattr(item, "fixturenames", ())
    if item.get_closest_marker("slow") is not None:
        return False
    chosen = item.path.parent.name in ROOMS or item.get_closest_marker("both_ways") is not None
    return chosen and CHOOSE.isdisjoint(names) and item.nodeid in _firsts(item.session)


def _firsts(session: pytest.Session) -> frozenset[str]:
    if _FIRSTS not in session.stash:
        session.stash[_FIRSTS] = frozenset(item.nodeid for item in cases.firsts(session.items))
    return session.stash[_FIRSTS]


_FIRSTS = pytest.StashKey[frozenset[str]]()


def run(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and again if it has asked; answers whether it asked."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with asked_for() as times:
        reports = runtestprotocol(item, nextitem=nextitem)
    asked = bool(times) and all(report.passed for report in reports)
    if asked:
        with without_kernels():
            again = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in again:
            if report.failed:
                report.nodeid += " (without kernels)"
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return asked


@contextmanager
def asked_for() -> Iterator[list[str]]:
    """A list of something for every time that there were kernels when they were asked for."""
    times: list[str] = []
    current = library.current

    def watched() -> library.Library | None:
        found = current()
        if found is not None and not times:
            times.append("asked")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "current", watched)
        yield times


@contextmanager
def without_kernels() -> Iterator[None]:
    """As with GEARTRAIN_NATIVE=0, which the programs that are started here get too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEARTRAIN_NATIVE", "0")
        for name, value in (("_settled", False), ("_library", None), ("_status", "")):
            patch.setattr(library, name, value)
        yield
