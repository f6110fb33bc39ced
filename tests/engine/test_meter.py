"""What a meter is told: every firing of training, and what slow gears have left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import AbstractMeter
from geartrain.nodes.node import Spared


class Told(AbstractMeter):
    def __init__(self) -> None:
        self.firings: Counter[tuple[str, str]] = Counter()
        self.left_out: Counter[str] = Counter()

    def firing(self, node: str, *, forward: bool) -> AbstractContextManager[None]:
        self.firings[node, "forward" if forward else "backward"] += 1
        return nullcontext()

    def spared(self, node: str, work: Sequence[Spared]) -> None:
        assert work
        self.left_out[node] += len(work)


@pytest.mark.parametrize(("every", "spared"), [(None, {}), (1, {}), (3, {"slow": 4})])
def test_a_meter_is_told_of_firings_in_training_and_of_what_gears_have_spared(every, spared):
    meter, graph = Told(), gt.Graph()
    gear = None if every is None else gt.Gear(every)
    x = graph.input("x", bundle=True)
    x = x.through(nn.Linear(3, 3), name="slow", keep="graph", gear=gear)
    x.through(nn.Linear(3, 1), name="fast", keep="graph").loss(lambda y: y.square().sum(1))
    session = gt.Session(
        graph, rules=gt.Rules(update_every=1), max_active=1, compute=gt.Compute(meter=meter)
    )
    data = [gt.Instance({"x": torch.ones(2, 3)}) for _ in range(6)]
    session.fit(data, epochs=1)
    assert meter.left_out == spared
    assert meter.firings["slow", "forward"] == meter.firings["fast", "forward"] == 6
    assert meter.firings["fast", "backward"] == 6
    assert meter.firings["slow", "backward"] == 6 - spared.get("slow", 0)
    told = meter.firings.copy()
    session.evaluate(data)
    assert meter.firings == told
