"""Costs of one's own: ``Simulated`` takes whatever has all that ``Costs`` has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.firing import Firing
from geartrain.engine.router import Delivery
from geartrain.runtime.costs import batch_bytes
from geartrain.runtime.simulated import Simulated
from tests.rigs.passes import one_pass


class OnlyFirings:
    def firing(self, firing: Firing) -> float:
        return 1.0


@dataclass
class ByName:
    """A second for each letter of a node's name."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    message_s: float = 0.0
    shared: bool = False
    buffer_bytes: float | None = None
    again_s: float = 0.0
    collective: Literal["ring", "star"] = "ring"

    def firing(self, firing: Firing) -> float:
        return float(len(firing.node))

    def nbytes(self, delivery: Delivery) -> int:
        return batch_bytes(delivery)


def test_costs_that_lack_something_are_refused_before_anything_runs() -> None:
    with pytest.raises(TypeError, match=re.escape("Simulated(costs=")) as caught:
        Simulated(costs=cast("Any", OnlyFirings()))
    assert "Costs(firing_s=...), or None" in str(caught.value)


def test_costs_of_ones_own_are_what_firings_take() -> None:
    graph = gt.Graph()
    graph.input("x").through(nn.Linear(2, 1), name="ab").loss(lambda y: y[:, 0], name="loss")
    data = [gt.Instance({"x": torch.ones(3, 2)})]
    apart = {"ab": 0, "loss": 1}
    passed = one_pass(graph, data, runtime=Simulated(2, costs=ByName()), placement=apart)
    assert passed.seconds == pytest.approx(2 + 4 + 2)
