"""What tests are made with does what it says."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.logging import catching_logs

from geartrain import garbage
from geartrain.native import library
from tests.rigs import bounds, loggers
from tests.rigs.products import covering, halved, in_pairs
from tests.rigs.programs import Nursery, Program

CONFTEST = """
import pytest
from tests.rigs import kernels

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    return kernels.run(item, nextitem) or True if kernels.goes_both_ways(item) else None
"""
TESTS = """
import pytest
from geartrain.native import library

seen = []

def test_asks(tmp_path):
    seen.append(library.kind())
    (tmp_path / "new").mkdir()

def test_asks_for_nothing():
    seen.append("nothing")

@pytest.mark.parametrize("native", [True])
def test_chooses(native):
    seen.append(f"chosen {library.kind()}")

@pytest.fixture
def needs_kernels():
    pass

def test_has_said_so(needs_kernels):
    seen.append(f"needed {library.kind()}")

def test_needs_them():
    assert library.kind() == "native"

def test_what_was_seen():
    assert seen == ["native", "torch", "nothing", "chosen native", "needed native"]
"""


def test_what_asks_for_kernels_runs_again_without_and_nothing_else_does(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_settled", True)
    monkeypatch.setattr(library, "_library", object())
    pytester.makeconftest(CONFTEST)
    for folder in ("nodes", "train"):
        (pytester.mkdir(folder) / f"test_of_{folder}.py").write_text(TESTS)
    found = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "nodes")
    found.assert_outcomes(passed=7, failed=1)
    found.stdout.fnmatch_lines(["FAILED *test_needs_them (without kernels)*"])
    found = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "train")
    found.assert_outcomes(passed=5, failed=1)
    assert library.kind() == "native"


CASES = """
import pytest
from geartrain.native import library

@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 1), (2, 2)])
def test_pairs(a, b, c):
    print("pair", a, b, library.kind())

@pytest.mark.both_ways
@pytest.mark.parametrize("d", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one(d):
    print("one", d, library.kind())
"""


def test_of_the_cases_of_a_test_the_first_runs_with_kernels_and_without(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_settled", True)
    monkeypatch.setattr(library, "_library", object())
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers = slow\n  both_ways")
    words = ("-q", "-s", "-p", "no:cacheprovider", "-m", "not slow")
    seen = {}
    for folder in ("nodes", "train"):
        (pytester.mkdir(folder) / f"test_cases_of_{folder}.py").write_text(CASES)
        found = pytester.runpytest_inprocess(*words, folder)
        lines = [line.lstrip(".") for line in found.outlines]
        assert sum(line.endswith("native") for line in lines) == 7
        seen[folder] = sorted(line for line in lines if line.endswith("torch"))
    assert seen == {"nodes": ["one 1 torch", "pair 0 0 torch"], "train": ["one 1 torch"]}


def test_every_case_runs_and_the_first_ones_of_rooms_are_traced(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import tests.conftest as real

        pytest_addoption, pytest_configure = real.pytest_addoption, real.pytest_configure
        """
    )
    for folder in ("parts", "oracle"):
        (pytester.mkdir(folder) / f"test_of_{folder}.py").write_text(
            "import pytest, sys, threading\n"
            "from hypothesis import given, settings\n"
            "from hypothesis.strategies import integers\n"
            "@pytest.mark.parametrize('k', range(3))\n"
            "@pytest.mark.parametrize('name', 'ab')\n"
            "def test_cases(name, k):\n"
            "    traced = sys.gettrace() and threading.gettrace()\n"
            f"    print('{folder}', name, k, 'traced' if traced else '')\n"
            "calls = []\n"
            "@settings(max_examples=40, database=None)\n"
            "@given(integers())\n"
            "def test_property(k):\n"
            "    calls.append(bool(sys.gettrace() and threading.gettrace()))\n"
            "def test_after():\n"
            f"    print('{folder}', sum(calls), 'of', len(calls), 'are', 'traced')\n"
        )
    here, of_threads = sys.gettrace(), threading.gettrace()
    words, found = ("-q", "-s", "-p", "no:cacheprovider"), []
    for option in (["--first-cases"], []):
        sys.settrace(lambda *event: None)
        threading.settrace(lambda *event: None)
        try:
            found.append(pytester.runpytest_inprocess(*words, *option))
            assert sys.gettrace() and threading.gettrace()
        finally:
            sys.settrace(here)
            threading.settrace(of_threads)  # type: ignore[arg-type]
    for each in found:
        each.assert_outcomes(passed=16)
    some, every = (
        [line.lstrip(".") for line in each.outlines if line.endswith(" traced")] for each in found
    )
    assert some == ["oracle 0 of 40 are traced", "parts a 0 traced", "parts 25 of 40 are traced"]
    assert len(every) == 14 and all("40 of 40" in line for line in every if "are" in line)


def test_any_two_values_of_two_parameters_meet_in_about_the_fewest_cases() -> None:
    for sizes, most in (([4, 2, 3], 12), ([7, 6, 2], 42), ([2, 2, 2, 3], 7), ([5], 5), ([3, 1], 3)):
        cases = covering(sizes)
        assert len(cases) <= most
        for i, j in combinations(range(len(sizes)), 2):
            assert {(c[i], c[j]) for c in cases} == {*product(range(sizes[i]), range(sizes[j]))}


def test_a_fit_does_not_count_what_is_frozen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(1) or 1)
    with garbage.old_objects_spared():
        pass
    assert not counts


@in_pairs(letter={"first": "a", "second": "b"}, number=[1, 2], flag=[True, False])
def test_pairs_are_parameters_and_have_names(
    letter: str, number: int, flag: bool, request: pytest.FixtureRequest
) -> None:
    name = {"a": "first", "b": "second"}[letter]
    assert request.node.name.endswith(f"[{name}-{number}-{flag}]")


def test_of_all_products_each_value_is_in_a_case_that_is_not_slow() -> None:
    mark = halved(letter={"first": "a", "second": "b"}, number=[1, 2, 3])
    names, cases = mark.args
    fast = {case.id: case.values for case in cases if not case.marks}
    assert names == ("letter", "number") and len(cases) == 6
    assert fast == {"first-1": ("a", 1), "first-3": ("a", 3), "second-2": ("b", 2)}


def test_pytest_hangs_no_handlers_on_loggers_of_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, other = logging.getLogger("torch.alone"), logging.getLogger("torchlike.alone")
    for logger in (alone, other):
        monkeypatch.setattr(logger, "propagate", False)
    loggers.by_the_root()
    assert (alone.propagate, other.propagate) == (True, False)
    with catching_logs(caplog.handler):
        assert caplog.handler in other.handlers and caplog.handler not in alone.handlers


def test_a_test_that_runs_for_too_long_is_ended_and_c_prints_threads_before(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    said: list[object] = []
    told = SimpleNamespace(
        dump_traceback_later=lambda left, file: said.append(left),
        cancel_dump_traceback_later=lambda: said.append("none"),
    )
    monkeypatch.setattr(bounds, "faulthandler", told)
    watch = bounds.Watch(pytestconfig)
    watch.begin(bounds.Running(150.0, 50.0, lambda: said.append("the first")))
    watch.look(101.0)
    watch.look(102.0)  # the same test: C has been told
    watch.begin(bounds.Running(110.0, 10.0, lambda: said.append("the second")))
    watch.look(103.0)
    assert said == [47.0, pytest.approx(6.6)]
    watch.cancel()
    watch.look(104.0)
    watch.look(200.0)
    assert said[2:] == ["none"]
    watch.begin(bounds.Running(110.0, 10.0, lambda: said.append("the third")))
    watch.look(109.9)
    watch.look(110.0)
    assert said[3:] == [bounds.EVERY_S, "the third"]


HANGS = """
import threading
import pytest

def test_of_a_moment():
    pass

@pytest.mark.timeout(1)
def test_waits():
    threading.Event().wait()

def test_is_not_reached():
    pass
"""


@pytest.mark.slow
def test_a_test_that_waits_for_ever_ends_the_run_with_the_stacks_of_threads(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(
        "from tests.rigs import bounds\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(bounds.Watch(config))\n"
    )
    pytester.makepyfile(HANGS)
    pytester.makeini("[pytest]\ntimeout = 30\ntimeout_method = thread")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-n0")
    assert found.ret == 1
    assert "Stack of MainThread" in found.stdout.str() and "test_waits" in found.stdout.str()
    found.stdout.no_fnmatch_line("*passed*")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="who is told of it is Linux")
def test_programs_end_with_the_process_that_forked_them(tmp_path: Path) -> None:
    """A run of tests that is killed leaves nothing that computes for ever."""
    nursery = Nursery()
    words = "import signal\nprint('here', flush=True)\nsignal.pause()"
    program = Program(nursery, tmp_path / "run", words)
    program.until("here")
    nursery.close()
    assert program.line() is None
