"""Hosts have clocks of their own, and what a run tells has one: the parent's."""

from __future__ import annotations

import subprocess
import time

import pytest

import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument, Fired, Updated
from geartrain.runtime.hosts.program import Host
from tests.rigs.pairs import graph_of_pairs, pairs

AHEAD_S = 5000
ELSEWHERE = ("unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--kill-child", "--")


def why_not() -> str | None:
    """Why no process can have another clock here; None: it can."""
    try:
        done = subprocess.run([*ELSEWHERE, "true"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() or f"status {done.returncode}" if done.returncode else None


class Times(AbstractInstrument):
    """When things began and ended, by worker."""

    wants_firings = True

    def __init__(self) -> None:
        self.fired: dict[int, list[tuple[float, float]]] = {}
        self.updated: list[float] = []

    def on_fired(self, event: Fired) -> None:
        self.fired.setdefault(event.worker, []).append((event.start_s, event.end_s))

    def on_updated(self, event: Updated) -> None:
        self.updated.append(event.time_s)


@pytest.mark.slow
def test_a_worker_whose_clock_is_an_hour_ahead_fires_between_the_firings_of_the_others():
    if (reason := why_not()) is not None:
        pytest.skip(f"no clock of its own for a process: {reason}")
    seen = Times()
    here, there = Host("127.0.0.1"), Host("127.0.0.1", ELSEWHERE)
    runtime = gt.Hosts([here, there], kernel_threads=1)
    session = gt.Session(graph_of_pairs(), runtime=runtime, max_active=1, instruments=[seen])
    try:
        began = time.perf_counter()
        session.fit(pairs(20), epochs=1)
        took = time.perf_counter() - began
    finally:
        runtime.close()
    assert seen.fired.keys() == {0, 1}
    for times in seen.fired.values():
        starts = [start for start, _ in times]
        assert starts == sorted(starts) and len({*starts}) == len(starts)
        assert all(0 <= start <= end <= took for start, end in times)
    assert all(0 <= at <= took for at in seen.updated)
    # One instance at a time: of two that work on it in turn nobody is long before the other.
    (a, b), (c, d) = ((x[0][0], x[-1][1]) for x in seen.fired.values())
    assert abs(a - c) < took / 2 and abs(b - d) < took / 2
