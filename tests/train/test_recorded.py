"""Costs of firings and rows, from the log of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument, EpochEnded, Worked
from geartrain.errors import DataError
from geartrain.observe.recorded import recorded, recorded_run
from geartrain.runtime.costs import Costs
from geartrain.runtime.simulated import Simulated


def chain() -> gt.Graph:
    """Three parts, one after the other."""
    torch.manual_seed(0)
    graph = gt.Graph()
    stream = graph.input("x")
    for name in ("a", "b", "c"):
        stream = stream.through(nn.Linear(2, 2), name=name)
    stream.loss(lambda y: y.square().sum(1), name="loss")
    return graph


class Keeps(AbstractInstrument):
    """What JsonLog would write of work and epochs."""

    def __init__(self) -> None:
        self.lines: list[dict] = []

    def on_worked(self, event: Worked) -> None:
        self.lines.append({"event": "Worked", **json.loads(json.dumps(asdict(event)))})

    def on_epoch_ended(self, event: EpochEnded) -> None:
        self.lines.append({"event": "EpochEnded", "instances": event.instances})


def data(n: int) -> list[gt.Instance]:
    """Instances of 1 to 5 rows."""
    draw = torch.Generator().manual_seed(3)
    return [gt.Instance({"x": torch.randn(1 + k % 5, 2, generator=draw)}) for k in range(n)]


def logged(graph: gt.Graph, workers: int, costs: Costs, n: int, epochs: int = 2) -> list[dict]:
    """The log of a simulated run with these costs."""
    keeps = Keeps()
    session = gt.Session(
        graph, rules=gt.Rules(update_every=4), runtime=Simulated(workers, costs=costs),
        max_active=8, instruments=[keeps],
    )  # fmt: skip
    session.fit(data(n), epochs=epochs)
    return keeps.lines


def test_what_a_firing_and_a_row_take_is_found_again() -> None:
    costs = Costs(firing_s=0.004, row_s=0.0015, nodes={"b": (0.01, 0.0002)}, latency_s=1e-3)
    found = recorded(logged(chain(), 3, costs, 60))
    assert found.nodes["a"] == pytest.approx((0.004, 0.0015), rel=1e-6)
    assert found.nodes["a backward"] == pytest.approx((0.004, 0.003), rel=1e-6)
    assert found.nodes["b"] == pytest.approx((0.01, 0.0002), rel=1e-6)
    assert found.instances == 60 and found.workers == 3
    assert found.throughput == pytest.approx(60 / found.seconds)
    assert found.link_bytes > 0
    assert found.costs(Costs(latency_s=3.0)).latency_s == 3.0


def work(epoch: float, passed: float, waiting: list[float], **node: float) -> list[dict]:
    """A pass in which worker 0 fired node a."""
    line = {"worker": 0, "node": "a#1", "direction": "forward", **node}
    return [
        {"event": "Worked", "epoch": epoch, "seconds": passed, "waiting": waiting,
         "nodes": [line], "links": []},
        {"event": "EpochEnded", "instances": 10},
    ]  # fmt: skip


def test_time_beside_firings_counts_and_the_first_epoch_does_not() -> None:
    first = work(1.0, 100.0, [0.0], firings=10, rows=20, seconds=90.0)
    second = work(2.0, 10.0, [3.0], firings=10, rows=20, seconds=5.0)
    assert recorded(first + second).nodes == {"a": (pytest.approx(0.2), pytest.approx(0.25))}
    assert recorded(first).nodes["a"] == pytest.approx((1.0, 4.5))


def test_a_line_that_would_begin_below_nothing_goes_through_nothing() -> None:
    # 1 row in 1 s and 3 rows in 9 s: more for a row of the larger one.
    steep = work(
        1.0, 10.0, [0.0], firings=2, rows=4, seconds=10.0, row_squares=10, row_seconds=28.0
    )
    assert recorded(steep).nodes["a"] == pytest.approx((0.0, 2.5))
    falling = work(1.0, 4.0, [0.0], firings=2, rows=4, seconds=4.0, row_squares=10, row_seconds=6.0)
    assert recorded(falling).nodes["a"] == pytest.approx((2.0, 0.0))


def test_a_log_without_an_epoch_of_training_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"event": "RunStarted"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl: no epoch of training has ended"):
        recorded_run(tmp_path)
    lines = work(1.0, 10.0, [0.0], firings=10, rows=20, seconds=5.0)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recorded_run(file).instances == 10
