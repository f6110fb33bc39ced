"""Forecasts of slow links beside measurements, and methods against late gradients."""

from __future__ import annotations

import pytest

from benchmarks.cluster import copies, forecasts, late, stages
from benchmarks.cluster.hosts import Link
from benchmarks.cluster.methods import METHODS

NODES = {"part 0": (0.004, 0.0), "part 1": (0.004, 0.0)}
NODES |= {f"{name} backward": (0.008, 0.0) for name in NODES}
NODES |= {name: (0.0, 0.0) for name in ("minibatch", "prediction", "loss", "loss backward")}
COSTS = forecasts.Costs(NODES, message_s=0.001, throughput=1.0)
WORK = stages.Work(hidden=4, batch=4, minibatches=16, warm_up=4, steps=8, rate=0.001)


def test_a_minibatch_alone_takes_its_firings_its_messages_and_its_way() -> None:
    link = Link(latency_s=0.010, bits_per_s=1e12)
    each = WORK.batch / forecasts.foreseen_parts(WORK, "async:1", link, COSTS)
    # There and back, and from the first part to the program on its host and again to the part.
    assert each == pytest.approx(2 * (0.004 + 0.008) + 2 * (0.010 + 0.001) + 2 * 0.001, rel=1e-3)
    drained = WORK.batch / forecasts.foreseen_parts(WORK, "drained:1", link, COSTS)
    assert drained == pytest.approx(each, rel=1e-3)


def test_more_in_flight_is_foreseen_to_hide_latency_up_to_the_slowest_part() -> None:
    link = Link(latency_s=0.010, bits_per_s=1e12)
    one, three, six = (forecasts.foreseen_parts(WORK, f"async:{n}", link, COSTS) for n in (1, 3, 6))
    assert 2.5 * one < three < six
    assert six == pytest.approx(WORK.batch / 0.012, rel=0.02)


def test_copies_wait_for_nobody_and_a_line_says_how_far_a_forecast_is_off() -> None:
    nodes = {"part 0": (0.01, 0.0), "part 0 backward": (0.02, 0.0), "part 0 exchange": (0.0, 0.0)}
    costs = forecasts.Costs(NODES | nodes, 0.0, 1.0)
    work = copies.Work(hidden=4, batch=5, rate=0.001, steps=10)
    link = Link(latency_s=0.005, bits_per_s=1e9)
    found = forecasts.foreseen_copies(work, 2, link, costs)
    assert found == pytest.approx(2 * work.batch / 0.03, rel=0.1)
    case = {"case": "2 copies", "latency_s": 0.005, "bits_per_s": 1e9, "measured": 100.0}
    *_, row, within = forecasts.table([case | {"foreseen": 114.0, "by_own": 120.0}])
    assert row.endswith("| 100 | 114 | 1.14 | 1.20 | |")
    assert within.strip() == "1 of 1 within 15 %; 0 with their own costs."
    *_, row, _ = forecasts.table([case | {"foreseen": 114.0, "by_own": 120.0, "busy": 0.251}])
    assert row.endswith("| 1.20 | 25% |")


def test_gloo_is_foreseen_to_ask_at_each_step_around_the_ring() -> None:
    nodes = {"part 0": (0.03, 0.0), "part 0 backward": (0.0, 0.0), "part 0 exchange": (0.0, 0.0)}
    costs = forecasts.Costs(NODES | nodes, 0.0, 1.0)
    work = copies.Work(hidden=4, batch=5, rate=0.001, steps=10)
    link = Link(latency_s=0.005, bits_per_s=1e12)
    for n in (2, 4):
        found = forecasts.foreseen_all_reduce(work, n, link, costs)
        step = 0.03 + 2 * (n - 1) * 2 * 0.005
        assert found == pytest.approx(n * work.batch / step, rel=0.1)


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, m in enumerate(METHODS)],
)
def test_every_method_trains_and_its_gradients_are_as_late_as_the_others(method: str) -> None:
    line = late.trained(WORK, 4, method, 0.05)
    alone = METHODS[method].alone
    assert len(line["losses"]) == WORK.minibatches
    assert line["staleness"]["part 1"] == 0.0 < line["staleness"]["part 0"] <= 3.0
    lines = line | {"parts": 2, "minibatches": WORK.minibatches, "method": method}
    assert late.seconds_to(lines, WORK.minibatches) == pytest.approx(line["seconds"])
    assert bool(alone) == (late.seconds_to(lines, 1) == pytest.approx(late.waiting_s(lines)))


def test_the_best_rate_of_each_method_is_beside_plain_training() -> None:
    about = {"hidden": 4, "parts": 2, "latency_s": 0.05, "minibatches": 100, "momentum": 0.9}
    about |= {"seconds": 10.0, "staleness": {"part 0": 2.0}, "test_loss": 0.3}
    lines = [
        about
        | {"system": "plain", "method": "plain", "rate": 0.1}
        | {"losses": [1.0] * 50 + [0.5] * 50},
        about | {"system": "async:3", "method": "stashed", "rate": 0.1, "losses": [2.0] * 100},
        about | {"system": "async:3", "method": "stashed", "rate": 0.2, "losses": [0.6] * 100},
        about | {"system": "async:3", "method": "gap", "rate": 0.2, "losses": [float("nan")] * 100},
    ]
    _, _, plain, first, second = late.table(lines)
    assert "| plain | 0.1, 0.9 | | 0.5000 |" in plain
    assert "| stashed | 0.2, 0.9 of 2 | 2.0 | 0.6000 | 0.3000 |" in first
    assert "| gap | 0.2, 0.9 of 1 | 2.0 | inf |" in second


def test_headers_take_their_share_of_a_link() -> None:
    costs = COSTS.on(Link(latency_s=0.010, bits_per_s=1e9))
    assert costs.shared and costs.bytes_per_s == pytest.approx(1e9 / 8 * 1448 / 1500)
