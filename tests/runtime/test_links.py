"""Links between hosts that delay, lose, and are cut; hosts are network namespaces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import geartrain as gt
from benchmarks.cluster import hosts as bench
from benchmarks.cluster.hosts import Hosts, Link
from geartrain.engine.instrument import AbstractInstrument, Restored, Worked
from geartrain.transport import sockets
from tests.rigs.left import living, wait_until
from tests.rigs.pairs import graph_of_pairs, pairs

MISSING = bench.unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(MISSING is not None, reason=f"no hosts on this machine: {MISSING}"),
]
INSTANCES = 40
LATENCY_S = 0.005
CUT_S = 10.0
"""Longer than a silent connection is waited for."""


class Faults(AbstractInstrument):
    """Does something to links at a step of training, and takes it back after some seconds."""

    def __init__(self, at: int, do: Callable[[], None], back: Callable[[], None], after_s: float):
        self._at, self._do, self._steps = at, do, 0
        self._timer = threading.Timer(after_s, back)
        self.restored: list[Restored] = []

    def on_updated(self, event: object) -> None:
        self._steps += 1
        if self._steps == self._at:
            self._do()
            self._timer.start()

    def on_restored(self, event: Restored) -> None:
        self.restored.append(event)

    def end(self) -> None:
        self._timer.join()


@contextmanager
def three_hosts(link: Link) -> Iterator[tuple[Hosts, gt.Hosts]]:
    """Two workers on hosts of their own, and this program on a third; nothing is left of them."""
    with Hosts(3, link) as hosts, hosts[0].inside():
        there = [gt.Host(host.address, host.prefix) for host in hosts[1:]]
        runtime = gt.Hosts(
            *(there, 2, 1),
            address=hosts[0].address,
            on_worker_death="restore",
            most_deaths=20,
        )
        try:
            yield hosts, runtime
        finally:
            pids = runtime.pids
            runtime.close()
        assert living(pids) == []
        wait_until(lambda: hosts[1].pids == () == hosts[2].pids, "nothing runs there")


def trained(runtime: object, *instruments: AbstractInstrument) -> tuple[list[Tensor], gt.Fit]:
    """One instance at a time, so that it is the same to the last bit on every runtime."""
    torch.manual_seed(0)
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)
    session = gt.Session(
        graph_of_pairs(),
        rules=rules,
        runtime=runtime,  # type: ignore[arg-type]
        max_active=1,
        instruments=instruments,
    )
    fit = session.fit(pairs(INSTANCES), epochs=2)
    return [p.detach().clone() for part in session.parts.values() for p in part.parameters], fit


def same(found: list[Tensor]) -> bool:
    expected, _ = trained(gt.Threads(1))
    return all(x.equal(y) for x, y in zip(found, expected, strict=True))


def test_a_run_over_links_that_delay_and_lose_ends_as_if_they_did_not():
    with three_hosts(Link(latency_s=LATENCY_S, loss=0.02)) as (hosts, runtime):
        began = time.monotonic()
        found, fit = trained(runtime)
        seconds = time.monotonic() - began
        counts = [hosts.counts(a, b) for a in range(3) for b in range(3) if a != b]
    assert fit.deaths == 0 and same(found)
    assert all(each.delivered for each in counts), "rows go from worker to worker"
    assert sum(each.lost for each in counts) > 0
    assert seconds > 2 * INSTANCES * 2 * LATENCY_S  # there and back at least, one by one


def test_a_link_that_is_cut_for_less_than_a_silence_costs_nobody_his_life():
    with three_hosts(Link()) as (hosts, runtime):
        faults = Faults(5, lambda: hosts.cut(1, 2), lambda: hosts.mend(1, 2), 1.0)
        found, fit = trained(runtime, faults)
        faults.end()
        cut = hosts.counts(1, 2).cut + hosts.counts(2, 1).cut
    assert cut > 0 and fit.deaths == 0 and same(found)


@pytest.mark.parametrize("between", [(1, 2), (0, 2)], ids=["workers", "parent and worker"])
def test_a_link_that_is_cut_for_ten_seconds_costs_what_was_trained_since_the_last_state(between):
    with three_hosts(Link()) as (hosts, runtime):
        faults = Faults(15, lambda: hosts.cut(*between), lambda: hosts.mend(*between), CUT_S)
        found, fit = trained(runtime, faults)
        faults.end()
        a, b = between
        cut = hosts.counts(a, b).cut + hosts.counts(b, a).cut
    assert cut > 0 and fit.deaths == len(faults.restored) >= 1
    assert fit.instances == 2 * INSTANCES and fit.repeated > 0
    assert same(found)


class _Beside(AbstractInstrument):
    """Seconds of each worker in the last pass in which it neither fired nor waited."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_worked(self, event: Worked) -> None:
        self.seconds = [
            event.seconds - waited - sum(n.seconds for n in event.nodes if n.worker == w)
            for w, waited in enumerate(event.waiting)
        ]


def test_until_all_are_connected_workers_wait_and_do_not_work():
    """Costs of a run are what is left of its time; a handshake takes some ways there and back."""
    latency_s, beside = 0.1, _Beside()
    with three_hosts(Link(latency_s=latency_s)) as (_, runtime):
        session = gt.Session(graph_of_pairs(), runtime=runtime, instruments=[beside])
        session.fit(pairs(10), epochs=1)
    assert max(beside.seconds) < 2 * latency_s


def test_what_a_worker_gives_back_is_there_although_somebody_speaks_as_it_leaves(monkeypatch):
    """A connection that is closed while data come is aborted, with what is still on its way."""
    monkeypatch.setattr(sockets, "_BEAT_MS", 5)
    with three_hosts(Link(latency_s=0.02, bits_per_s=1e7)) as (_, runtime):
        found, fit = trained(runtime)
    assert fit.deaths == 0 and same(found)
