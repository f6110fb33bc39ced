"""The benchmark of pipelines on hosts: all systems train on the same minibatches, and tables."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest
import torch

import geartrain as gt
from benchmarks.cluster import hosts as bench
from benchmarks.cluster.hosts import Hosts, Link
from benchmarks.cluster.pipelines import few_in_flight, many_in_flight, peers, steps_of, table
from benchmarks.cluster.stages import Timed, Work, answers, first_to_reach, ours, plain

SMALL = Work(hidden=8, layers=4, batch=4, rate=0.01, rising=3, minibatches=12, warm_up=2, steps=10)
MISSING = bench.unavailable()
on_hosts = pytest.mark.skipif(MISSING is not None, reason=f"no hosts on this machine: {MISSING}")


def test_layers_are_shared_out_and_the_readout_is_of_the_last_part() -> None:
    assert SMALL.ends(2) == [0, 4, 9]
    assert SMALL.ends(4) == [0, 2, 4, 6, 9]


def test_the_rate_rises_and_falls_to_nothing() -> None:
    found = [SMALL.factor(k) for k in range(13)]
    assert found[0] == pytest.approx(1 / 3)
    assert found[2:] == sorted(found[2:], reverse=True)
    assert found[12] == 0.0


def test_without_late_gradients_our_losses_are_those_of_plain_training() -> None:
    wanted = plain(SMALL)
    runtime = gt.Threads(2, kernel_threads=1)
    found = ours(SMALL, "async:1", runtime, "stashed")
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-5)
    assert found["rows_per_second"] > 0
    for system in ("drained:1", "drained:2"):
        drained = ours(SMALL, system, runtime, "stashed")
        assert drained["loss"] == pytest.approx(sum(wanted["losses"][2:]) / 10, rel=1e-5)
        assert set(drained["staleness"].values()) == {0.0}


def test_a_device_that_takes_its_time_changes_no_number() -> None:
    wanted, found = plain(SMALL), plain(replace(SMALL, device_ms=1.0))
    assert found["losses"] == wanted["losses"]
    assert found["test_loss"] == wanted["test_loss"]
    stage = Timed(1e-3)
    x = torch.randn(4, 2, requires_grad=True)
    began = time.perf_counter()
    stage(x).sum().backward()
    assert time.perf_counter() - began >= 4e-3
    assert (x.grad == (x > 0)).all()


def test_gradients_are_late_in_the_first_part_alone() -> None:
    runtime = gt.Threads(2, kernel_threads=1)
    found = ours(replace(SMALL, minibatches=30), "async:5", runtime, "predicted")
    assert 1.0 < found["staleness"]["part 0"] <= 4.0
    assert found["staleness"]["part 1"] == 0.0


def test_a_target_is_reached_by_the_mean_of_the_last_minibatches() -> None:
    losses = [4.0, 2.0, 4.0, 1.0, 1.0]
    assert first_to_reach(losses, 2.5, smooth=2) == 4
    assert first_to_reach(losses, 1.0, smooth=2) == 5
    assert first_to_reach(losses, 0.5, smooth=2) is None


def test_slow_links_are_timed_for_fewer_minibatches_and_hold_more() -> None:
    fast, slow = Link(latency_s=0.001), Link(latency_s=0.050, bits_per_s=1e8)
    assert steps_of(Work(), fast) > steps_of(Work(), slow) >= 10
    assert few_in_flight(Work(), fast) == 2 < few_in_flight(Work(), slow)
    assert many_in_flight(Work(), slow) < many_in_flight(Work(), Link(latency_s=0.050))


def test_tables_compare_with_the_best_synchronous_system() -> None:
    losses = [1.0] * 50 + [0.5] * 50 + [0.4] * 100
    work = asdict(replace(SMALL, batch=100))
    best = {"system": "plain", "work": work, "losses": losses, "test_loss": 0.3}
    cell = {"parts": 2, "latency_s": 0.01, "bits_per_s": 1e9, "round": 0}
    late = [1.0] * 100 + [0.4] * 100
    lines = [
        best,
        best | {"test_loss": 0.4},
        {"system": "gpipe:2", "rows_per_second": 100.0} | cell,
        {"system": "1f1b:4", "rows_per_second": 200.0} | cell,
        {"system": "drained:2", "rows_per_second": 150.0} | cell,
        {
            "system": "async:3",
            "view": "predicted",
            "minibatches": 200,
            "rows_per_second": 500.0,
            "losses": late,
            "test_loss": 0.31,
        }
        | cell,
    ]
    slower = lines[-1] | {"rate": 0.2, "momentum": 0.5, "rows_per_second": 400.0}
    [_, _, row, other] = table([*lines, slower])
    assert "| async:3 predicted, 200, rate 0.2, momentum 0.5 | 400 |" in other
    assert not [*table(lines[2:])]  # there is nothing to compare with
    told = [word.strip() for word in row.strip("|").split("|")]
    assert told[:4] == ["2", "10 ms", "1000", "1f1b:4"]
    assert told[4:9] == [
        "200",
        "drained:2: 150",
        "async:3 predicted, 200",
        "500",
        "2.50 (2.50 to 2.50)",
    ]
    assert told[9:11] == ["0.4000, 0.4000", "0.3100, 0.3000"]
    assert told[11:] == ["1.00 times", "30.0, 2.50 times"]


@on_hosts
@pytest.mark.slow
def test_schedules_of_torch_run_on_hosts_and_have_the_losses_of_plain_training() -> None:
    wanted = sum(plain(SMALL)["losses"][2:]) / 10
    systems = ["gpipe:2", "1f1b:2", "interleaved:2"]
    with Hosts(2, Link(latency_s=0.002)) as hosts:
        found = [*peers(SMALL, hosts, systems)]
        assert hosts.counts(0, 1).nbytes > 3 * 12 * 4 * 8 * 4  # activations went by the link
    assert [line["system"] for line in found] == systems
    for line in found:
        assert line["loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_request_is_answered_system_by_system() -> None:
    request = {"kind": "plain", "work": asdict(SMALL), "systems": ["plain"]}
    [reply] = answers(json.loads(json.dumps(request)))
    assert len(reply["losses"]) == 12
