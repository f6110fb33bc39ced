"""Rows that follow upon one another are told from others, however they are given."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.frames import counted as module
from geartrain.frames.counted import consecutive, counted, sliced

MANY = 1 << 13  # more than are compared as bytes


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Counted, "numbers", np.arange(1 << 12))


@pytest.mark.parametrize("n", [1, 2, 3, 64, 4096, MANY])
@pytest.mark.parametrize("first", [0, 7, (5 << 40) + 3])
def test_rows_that_follow_upon_one_another_are_known_by_the_first(n: int, first: int) -> None:
    rows = np.arange(first, first + n)
    assert consecutive(rows) == first
    assert consecutive(np.repeat(rows, 2)[::2]) == first
    assert sliced(rows) == slice(first, first + n)
    if first < 8:
        assert consecutive(counted(first, n)) == first


@pytest.mark.parametrize("n", [3, 64, 4096, MANY])
def test_others_are_not_though_the_first_and_the_last_are_theirs(n: int) -> None:
    rows = np.arange(5, 5 + n)
    rows[1] += 1
    assert consecutive(rows) == -1
    assert sliced(rows) is rows
    assert consecutive(rows[::-1]) == -1


def test_no_rows_are_no_slice() -> None:
    rows = np.zeros(0, np.int64)
    assert sliced(rows) is rows
