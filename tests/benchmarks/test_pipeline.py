"""The benchmark of pipelines: all systems train on the same minibatches, and tables."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace

import pytest

import geartrain as gt
from benchmarks.pipeline.main import best_peer, measure, run_rounds, table
from benchmarks.pipeline.systems import Passes, Work, minibatches, ours, plain


def one_pass(passes: Passes) -> dict[str, float]:
    """The reply to the first pass."""
    with closing(passes):
        assert next(passes) == {}
        return next(passes)


SMALL = Work(dim=8, blocks=2, heads=2, length=6, batch=4, warm_up=1, steps=3, cuts=(2,))


def test_minibatches_are_the_same_in_every_process_and_targets_follow_one_behind() -> None:
    batches, tokens = minibatches(SMALL)
    again, _ = minibatches(SMALL)
    assert len(batches) == 4
    assert all((a[0] == b[0]).all() for a, b in zip(batches, again, strict=True))
    x, y = batches[0]
    assert x.shape == (4, 6)
    assert (x[:, 1:] == y[:, :-1]).all()
    assert int(x.max()) < tokens


def test_our_pipeline_with_one_minibatch_in_flight_has_the_losses_of_the_plain_loop() -> None:
    found = one_pass(ours(SMALL, 1, gt.Threads(2, kernel_threads=1)))
    wanted = one_pass(plain(SMALL))
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert min(found["rows_per_second"], wanted["rows_per_second"]) > 0


@pytest.mark.parametrize("name", ["residual", "perceptron"])
def test_pictures_are_cut_into_parts_that_learn_as_the_whole_does(name: str) -> None:
    work = replace(SMALL, network=name)
    found = one_pass(ours(work, 1, gt.Threads(2, kernel_threads=1)))
    wanted = one_pass(plain(work))
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "system", ["1f1b:2", "gpipe:2", "interleaved:2", "zerobubble:2", "processes:1"]
)
def test_processes_have_the_losses_of_the_plain_loop(system: str) -> None:
    found = measure(system, replace(SMALL, four=(1, 2, 3)))
    assert found["loss"] == pytest.approx(one_pass(plain(SMALL))["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_process_that_fails_is_told_with_what_it_said() -> None:
    with pytest.raises(RuntimeError, match="give plain:KERNEL_THREADS, ours:IN_FLIGHT"):
        measure("other:1", SMALL)


@pytest.mark.slow
def test_a_system_that_says_nothing_is_ended() -> None:
    with pytest.raises(RuntimeError, match=r"1f1b:2 said nothing for 0.01 s"):
        measure("1f1b:2", SMALL, 0.01)


@pytest.mark.slow
def test_systems_stay_alive_and_train_a_pass_each_in_every_round() -> None:
    systems = ["plain:1", "1f1b:2"]
    rounds = run_rounds(systems, SMALL, 3)
    for a, b in ((r["plain:1"], r["1f1b:2"]) for r in rounds):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    assert rounds[2]["plain:1"]["loss"] < rounds[0]["plain:1"]["loss"]


def test_tables_compare_within_rounds_with_the_best_peer() -> None:
    def reply(rate: float) -> dict[str, float]:
        return {"rows_per_second": rate, "cpu_ms_per_row": 1.0, "loss": math.e}

    rounds = [
        {"ours:2": reply(300), "gpipe:2": reply(100), "gpipe:4": reply(200)},
        {"ours:2": reply(330), "gpipe:2": reply(150), "gpipe:4": reply(300)},
    ]
    assert best_peer(rounds) == "gpipe:4"
    lines = table(rounds, ["ours:2", "gpipe:4"]).splitlines()
    assert lines[2] == "| ours:2 | 315.0 | 300.0 | 330.0 | 1.30 (1.10 to 1.50) | 1.00 | 2.7183 |"
