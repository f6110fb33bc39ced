"""The benchmarks of copies and of the transport on hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import geartrain as gt
from benchmarks.cluster import copies, neighbours, stages, transport
from benchmarks.cluster import hosts as bench
from benchmarks.cluster.copies import Work
from benchmarks.cluster.hosts import Hosts, Link

SMALL = Work(hidden=4, batch=5, rate=0.01, steps=6)
MISSING = bench.unavailable()
on_hosts = pytest.mark.skipif(MISSING is not None, reason=f"no hosts on this machine: {MISSING}")


def test_images_and_classes_are_read_by_number_where_the_copy_is() -> None:
    x, y = copies.digits(None, "train")
    rows = torch.tensor([3, 0, 7])
    assert (copies.Lookup(None)(rows) == x[rows]).all()
    prediction = torch.randn(3, 10)
    judge = copies.Judge(None, Path("not written to, as nothing is trained"))
    wanted = torch.nn.functional.cross_entropy(prediction, y[rows], reduction="none")
    assert (judge(prediction, rows) == wanted).all()


def test_one_copy_alone_has_the_weights_of_plain_training() -> None:
    model = copies.network(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL.rate, momentum=SMALL.momentum)
    y = copies.digits(None, "train")[1]
    for rows in copies.order(SMALL, SMALL.steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), y[rows]).backward()
        optimizer.step()
    found = copies.ours(SMALL, 1, gt.Threads(1, kernel_threads=1))
    assert found["accuracy"] == pytest.approx(copies.accuracy(SMALL, model))
    assert found["minibatches"] == [6]


@pytest.mark.parametrize("exchange", ["weights", "weights:2", "d-psgd"])
def test_copies_train_on_as_many_minibatches_as_were_asked_for(exchange: str) -> None:
    work = Work(hidden=4, batch=5, rate=0.01, steps=6, exchange=exchange)
    found = copies.ours(work, 2, gt.Threads(2, kernel_threads=1))
    assert sum(found["minibatches"]) == 12
    assert found["rows_per_second"] > 0
    assert found["meetings_per_gradient"] > 0


def test_the_table_compares_with_all_reduce_and_says_what_a_straggler_costs() -> None:
    def line(system: str, rate: float, slow: float, **more: float) -> dict[str, object]:
        about = {"copies": 8, "latency_s": 0.005, "bits_per_s": 1e8, "system": system, "slow": slow}
        about |= {"work": {"rate": 0.03}, "accuracy": 0.9 if rate > 2800 else 0.91}
        return about | {"rows_per_second": rate, "bytes_a_step": 2000.0} | more

    lines = [
        line("ddp", 1000.0, 1.0),
        line("ddp", 500.0, 4.0),
        line("weights", 3000.0, 1.0, meetings_per_gradient=0.9),
        line("weights", 3000.0, 1.0, meetings_per_gradient=0.9, accuracy=0.92),
        line("weights", 2700.0, 4.0, meetings_per_gradient=0.9),
    ]
    _, _, ddp, ours = neighbours.table(lines)
    assert ddp.endswith(
        "| ddp | 1,000 | 1.00 | 2 | 1 | 0.03 | 91.00% (91.00% to 91.00%) | 500 | 50% |"
    )
    start, end = (
        "| weights | 3,000 | 3.00 | 2 | 0.90 | 0.03 | ",
        "(90.00% to 92.00%) | 2,700 | 10% |",
    )
    assert ours.endswith(f"{start}91.00% {end}")


def test_what_all_reduce_trains_is_a_step_with_the_mean_of_all_copies_gradients() -> None:
    model = copies.network(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL.rate, momentum=SMALL.momentum)
    y = copies.digits(None, "train")[1]
    for both in copies.order(SMALL, 2 * SMALL.steps).split(2):
        optimizer.zero_grad()
        for rows in both:
            (torch.nn.functional.cross_entropy(model(rows), y[rows]) / 2).backward()
        optimizer.step()
    assert copies.together(SMALL, 2) == pytest.approx(copies.accuracy(SMALL, model), abs=0.004)
    assert copies.together(SMALL, 1) == copies.ours(SMALL, 1, gt.Threads(1))["accuracy"]


def test_rates_are_chosen_by_another_seed_and_each_system_has_its_own(monkeypatch) -> None:
    link, tried = Link(latency_s=0.005), []

    def accuracy(work: Work, system: str, n: int, link: Link, device_ms: float) -> float:
        tried.append((work.seed, work.rate))
        return -abs(work.rate - (0.1 if system == "ddp" else 0.3))

    monkeypatch.setattr(neighbours, "imagined", accuracy)
    work = Work(seed=3)
    rates = (0.1, 0.2, 0.3)
    assert neighbours.best_rate(work, "ddp", 2, link, 1.0, rates) == 0.1
    assert neighbours.best_rate(work, "weights", 2, link, 1.0, rates) == 0.3
    assert {seed for seed, _ in tried} == {neighbours.CHOOSING}
    monkeypatch.undo()
    neighbours.best_rate.cache_clear()
    small = [neighbours.imagined(SMALL, s, 2, link, 5.0) for s in ("ddp", "weights", "d-psgd")]
    assert all(0 <= x <= 1 for x in small)


@on_hosts
def test_records_pass_between_hosts_at_the_latency_of_their_link() -> None:
    found = [*transport.measure(Link(latency_s=0.005), 1 << 22, [1 << 21], 0.3)]
    assert [line["what"] for line in found] == ["bare", *["answered"] * 4, *["one way"] * 2]
    assert all(line["ms"] >= 5.0 for line in found if line["what"] == "answered")
    for line in found[-2:]:
        assert 0 < line["mbit"] < 1.5e3
        assert line["held"] == 0


@on_hosts
@pytest.mark.slow
@pytest.mark.timeout(600)  # nine processes import torch
def test_both_systems_train_on_hosts_and_bytes_are_those_of_their_links() -> None:
    work = Work(hidden=4, batch=5, rate=0.01, steps=10)
    model = sum(p.numel() * 4 for p in copies.network(work).parameters())
    for system in ("ddp", "weights"):
        with Hosts(3, Link(latency_s=0.002)) as hosts:
            line = neighbours.trial(work, system, hosts, [1.0, 1.0])
        assert sum(line["minibatches"]) == 20
        assert 0.2 * model < line["bytes_a_step"] < 4 * model


@on_hosts
@pytest.mark.slow
@pytest.mark.timeout(600)  # nine processes import torch
def test_our_pipeline_trains_on_hosts_with_the_losses_of_plain_training() -> None:
    from benchmarks.cluster.pipelines import ours

    work = stages.Work(hidden=8, batch=4, rate=0.01, rising=3, minibatches=8, warm_up=2, steps=4)
    with Hosts(2, Link(latency_s=0.002)) as hosts:
        alone, drained = ours(
            work, hosts, [("async:1", "stashed", {}), ("drained:2", "stashed", {})]
        )
        assert hosts.counts(0, 1).delivered > 0
    wanted = stages.plain(work)
    assert alone["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert alone["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-5)
    assert drained["loss"] == pytest.approx(sum(wanted["losses"][2:6]) / 4, rel=1e-5)
