"""What tests are made with does what it says."""

from __future__ import annotations

import pytest

from geartrain.native import library

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

def test_needs_them():
    assert library.kind() == "native"

def test_what_was_seen():
    assert seen == ["native", "torch", "nothing", "chosen native"]
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
    found.assert_outcomes(passed=6, failed=1)
    found.stdout.fnmatch_lines(["FAILED *test_needs_them (without kernels)*"])
    found = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "train")
    found.assert_outcomes(passed=4, failed=1)
    assert library.kind() == "native"
