"""A thread that begins has the memory of one that has gone, so nobody begins before that."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.derived.registry import REGISTRY
from geartrain.native.heap import heap
from geartrain.runtime import threads
from geartrain.runtime.threads import Going
from tests.rigs.called import cell, sets, turning
from tests.rigs.pairs import graph_of_pairs, pairs

RULES = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.fixture
def ended(tmp_path: Path) -> Any:
    """A thread that the system still has."""
    (tmp_path / "7").mkdir()
    return SimpleNamespace(native_id=7)


def test_who_begins_waits_for_threads_that_have_ended(
    ended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            (tmp_path / "7").rmdir()

    monkeypatch.setattr(time, "sleep", nap)
    monkeypatch.setattr(threads, "_GOING_S", 1e9)
    one = Going(str(tmp_path))
    one.add(ended)
    one.wait()
    one.wait()
    assert len(naps) == 3


def test_but_not_for_long(ended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    monkeypatch.setattr(threads, "_GOING_S", -1.0)
    one = Going(str(tmp_path))
    one.add(ended)
    one.wait()
    monkeypatch.setattr(threads, "_GOING_S", 1e9)
    one.wait()  # it is forgotten
    assert not naps


def test_a_run_waits_for_the_threads_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Listening:
        def add(self, thread: threading.Thread) -> None:
            told.append(f"ended {thread.name} {thread.is_alive()}")

        def wait(self) -> None:
            told.append("wait")

    monkeypatch.setattr(threads, "going", Listening())
    session = gt.Session(graph_of_pairs(), rules=RULES, runtime=gt.Threads(1), max_active=4)
    session.fit(pairs(8), epochs=2)
    assert told == ["wait", "ended geartrain-0 False"] * 2


@pytest.mark.usefixtures("needs_kernels")
def test_what_trials_leave_goes_back_at_the_end_of_their_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the thread that has tried."""
    ends: list[str] = []
    end = partial(lambda: ends.append(threading.current_thread().name))
    monkeypatch.setattr(heap, "_end", end)
    monkeypatch.setattr(heap, "_trim", lambda pad: None)
    REGISTRY.forget()
    torch.manual_seed(0)
    session = gt.Session(turning(cell, "whole"), rules=RULES, runtime=gt.Threads(1), max_active=4)
    session.fit(sets(), epochs=1)
    assert ends == ["geartrain-0"]
    session.fit(sets(), epochs=3)
    assert ends == ["geartrain-0"]
