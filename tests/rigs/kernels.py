"""Which tests are run a second time, without native kernels: those that have asked for them.

Where the C of a kernel works, its twin in torch does not, and either must pass the same tests. In
the rooms where kernels compute, a test that has passed is run again without them, in the same
process, if the package has asked for kernels while it ran; what never asks for them would only be
run twice. A test that chooses by itself goes both ways in one run, and a soak goes one way. Of a
test with several parameters every other case goes both ways, so that each value of each does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from _pytest.runner import runtestprotocol

from geartrain.native import library

ROOMS = frozenset({"nodes", "graph", "nn", "whole", "pipeline", "oracle"})
"""Folders of tests."""
CHOOSE = frozenset({"native", "either", "way"})
"""Parameters and fixtures by which a test chooses."""


def goes_both_ways(item: pytest.Item) -> bool:
    """Whether a test is to be tried without kernels, should it ask for them."""
    names = getattr(item, "fixturenames", ())
    if item.get_closest_marker("slow") is not None:
        return False
    return item.path.parent.name in ROOMS and CHOOSE.isdisjoint(names)


def is_its_turn(item: pytest.Item) -> bool:
    """Whether this case of a test is one of those that go both ways.

    With kernels or without is a parameter like others. Of three and more it is enough that any two
    meet in all their values, so cases go both ways as the black squares of a board do; where a test
    has one parameter of several values, all do.
    """
    stash = item.session.stash
    if _TURNS not in stash:
        stash[_TURNS] = frozenset(_turns(item.session.items))
    return item.nodeid in stash[_TURNS]


_TURNS = pytest.StashKey[frozenset[str]]()


def _turns(items: Sequence[pytest.Item]) -> Iterator[str]:
    """Cases whose numbers of values, of parameters that have several, have an even sum."""
    tests: dict[tuple[object, str], dict[str, list[Hashable]]] = defaultdict(dict)
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        tests[item.parent, name][item.nodeid] = _values(item)
    for cases in tests.values():
        columns = [[*dict.fromkeys(column)] for column in zip(*cases.values(), strict=True)]
        several = [k for k, column in enumerate(columns) if len(column) > 1]
        for case, values in cases.items():
            numbers = [columns[k].index(values[k]) for k in several]
            if len(several) < 2 or sum(numbers) % 2 == 0:
                yield case


def _values(item: pytest.Item) -> list[Hashable]:
    """What tells apart the values of each parameter; names that get theirs together are one."""
    spec = getattr(item, "callspec", None)
    left = {} if spec is None else {name: id(value) for name, value in spec.params.items()}
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple(left.pop(name.strip(), None) for name in names))
    return [*found, *left.values()]


def run(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and again if it has asked; answers whether it asked."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with asked_for() as times:
        reports = runtestprotocol(item, nextitem=nextitem)
    asked = bool(times) and all(report.passed for report in reports)
    if asked and is_its_turn(item):
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
