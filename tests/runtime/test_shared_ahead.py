"""Worker processes that share weights add rows of several updates at a time: none is lost."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import geartrain as gt
from geartrain.engine.instrument import Worked
from tests.rigs import turns
from tests.rigs.passes import processes
from tests.rigs.sessions import session_of

N, UPDATE, RATE = 202, 4, 1e-9


class Rows(gt.AbstractInstrument):
    """At most how many rows, to a power of two, of which a node has added gradients in a firing."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}

    def on_worked(self, event: Worked) -> None:
        for use in event.nodes:
            name = use.node.split("#")[0]
            if use.direction == "backward" or name == "readout":
                most = max((1 << size - 1 for size, n in enumerate(use.sizes) if size and n))
                self.most[name] = max(self.most.get(name, 0), most)


@pytest.mark.parametrize(("in_flight", "workers"), [("all", 2), ("each", 2), ("each", 4)])
def test_every_gradient_is_in_one_step_though_firings_have_those_of_several(
    in_flight, workers
) -> None:
    parts, items = turns.model(), turns.data(N)
    graph = turns.graph_of(parts, run="steps")
    weights = [*parts.parameters()]
    before = [p.detach().clone() for p in weights]
    expected = torch.autograd.grad(turns.loss_of(parts, items), weights)
    seen = Rows()
    session = session_of(
        graph,
        rules=gt.Rules(
            optimizer=partial(torch.optim.SGD, lr=RATE),
            update_every=gt.Instances(UPDATE),
            average="none",
        ),
        runtime=processes(workers),
        sharing=gt.SharedWeights(in_flight),
        max_active=32,
        ramp=gt.Ramp(over=0),
        instruments=[seen],
    )
    fit = session.fit(items, epochs=1)
    # So little that weights stay as they were: what they have moved by is the sum of all steps.
    for p, was, gradient in zip(weights, before, expected, strict=True):
        moved = (was - p.detach()) / RATE
        torch.testing.assert_close(moved, gradient, rtol=1e-4, atol=1e-5)
    # Each worker may have left some of an update, which are stepped together.
    last = fit.history[-1]
    least, most = N // UPDATE - workers + 1, -(-N // UPDATE)
    assert all(least <= n <= most for n in last.updates.values())
    assert all(sum(ages.histogram) >= N for ages in last.staleness.values())
    # Of the four updates that one worker takes together two for each of two, and no fewer of more.
    assert seen.most["readout"] == seen.most["cell"] == 2 * UPDATE, seen.most
