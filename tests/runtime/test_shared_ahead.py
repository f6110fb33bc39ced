"""Worker processes that share weights add rows of several updates at a time: none is lost."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import Worked
from tests.rigs.passes import processes
from tests.rigs.sessions import session_of

WIDTH, CLASSES, N, UPDATE, RATE = 4, 3, 202, 4, 1e-9


class Rows(gt.AbstractInstrument):
    """Whether a node has added gradients of more rows in a firing than an update has."""

    def __init__(self) -> None:
        self.more: dict[str, bool] = {}

    def on_worked(self, event: Worked) -> None:
        for use in event.nodes:
            name = use.node.split("#")[0]
            some = sum(use.sizes[(UPDATE - 1).bit_length() + 2 :]) > 0
            adds = use.direction == "backward" or name == "readout"
            self.more[name] = self.more.get(name, False) or (adds and some)


def data() -> list[gt.Instance]:
    draw = np.random.default_rng(0)
    return [
        gt.Instance(
            {"x": torch.from_numpy(draw.standard_normal((1, WIDTH)))},
            value={"label": int(draw.integers(CLASSES)), "turns": int(draw.integers(1, 5))},
        )
        for _ in range(N)
    ]


@pytest.mark.parametrize("in_flight", ["all", "each"])
def test_every_gradient_is_in_one_step_though_firings_have_those_of_several(in_flight) -> None:
    torch.manual_seed(3)
    start = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    cell = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    readout = nn.Linear(WIDTH, CLASSES).double()
    graph = gt.Graph(value=("label", "turns"), run="steps")
    states = graph.loop(name="states")
    states.join(graph.input("x", step=0).through(start, name="start"))
    done, more = states.through(cell, name="cell").where(lambda m: m.step + 1 >= m.turns)
    states.join(more.move(step=lambda m: m.step + 1))
    done.through(readout, name="readout").loss(gt.cross_entropy, target="label")
    weights = [*start.parameters(), *cell.parameters(), *readout.parameters()]
    before = [p.detach().clone() for p in weights]
    total = torch.zeros((), dtype=torch.float64)
    for one in data():
        h = start(one.inputs["x"])
        for _ in range(int(one.value["turns"])):
            h = cell(h)
        total = total + nn.functional.cross_entropy(
            readout(h), torch.tensor([int(one.value["label"])])
        )
    expected = torch.autograd.grad(total, weights)
    seen = Rows()
    session = session_of(
        graph,
        rules=gt.Rules(
            optimizer=partial(torch.optim.SGD, lr=RATE),
            update_every=gt.Instances(UPDATE),
            average="none",
        ),
        runtime=processes(2),
        sharing=gt.SharedWeights(in_flight),
        max_active=32,
        ramp=gt.Ramp(over=0),
        instruments=[seen],
    )
    fit = session.fit(data(), epochs=1)
    # So little that weights stay as they were: what they have moved by is the sum of all steps.
    for p, was, gradient in zip(weights, before, expected, strict=True):
        moved = (was - p.detach()) / RATE
        torch.testing.assert_close(moved, gradient, rtol=1e-4, atol=1e-5)
    # Each worker may have left some of an update, which are stepped together.
    last = fit.history[-1]
    assert all(N // UPDATE - 1 <= n <= -(-N // UPDATE) for n in last.updates.values())
    assert all(sum(ages.histogram) >= N for ages in last.staleness.values())
    assert seen.more["readout"] and seen.more["cell"], seen.more
