"""The benchmark of pipelines: all systems train on the same minibatches, and tables."""

from __future__ import annotations

import math

import pytest

from benchmarks.pipeline.main import best_peer, measure, table
from benchmarks.pipeline.systems import Work, minibatches, ours, plain

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
    found, wanted = ours(SMALL, 1), plain(SMALL)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert min(found["rows_per_second"], wanted["rows_per_second"]) > 0


@pytest.mark.slow
def test_the_peer_has_the_losses_of_the_plain_loop() -> None:
    found = measure("peer:2", SMALL)
    assert found["loss"] == pytest.approx(plain(SMALL)["loss"], rel=1e-4)
    with pytest.raises(RuntimeError, match="give plain, ours:IN_FLIGHT or peer:MICROBATCHES"):
        measure("other:1", SMALL)


def test_tables_compare_within_rounds_with_the_best_peer() -> None:
    def reply(rate: float) -> dict[str, float]:
        return {"rows_per_second": rate, "cpu_ms_per_row": 1.0, "loss": math.e}

    rounds = [
        {"ours:2": reply(300), "peer:2": reply(100), "peer:4": reply(200)},
        {"ours:2": reply(330), "peer:2": reply(150), "peer:4": reply(300)},
    ]
    assert best_peer(rounds) == "peer:4"
    lines = table(rounds, ["ours:2", "peer:4"]).splitlines()
    assert lines[2] == "| ours:2 | 315.0 | 300.0 | 330.0 | 1.30 (1.10 to 1.50) | 1.00 | 2.7183 |"
