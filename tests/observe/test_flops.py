"""Operations counted by node against numbers worked out by hand."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.observe.flops import cost_of

ROWS, WIDTHS = 5, (3, 6, 4, 2)
SIZES = [2 * ROWS * a * b for a, b in itertools.pairwise(WIDTHS)]
"""One product of each stage."""


def shapes(*sizes):
    return tuple((torch.Size(s), torch.float32) for s in sizes)


def measured(gears, n=6, replay=None, runtime=None):
    meter = gt.FlopMeter()
    graph = gt.Graph()
    stream = graph.input("x", bundle=True)
    for k, gear in enumerate(gears):
        if replay == k:
            stream = stream.replay(times=1)
        linear = nn.Linear(WIDTHS[k], WIDTHS[k + 1])
        stream = stream.through(linear, keep="graph", name=f"stage {k}", gear=gear)
    stream.loss(lambda y: y.square().sum(1))
    session = gt.Session(
        graph,
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=gt.Rows(1)),
        runtime=runtime or gt.Simulated(),
        max_active=1,
        meter=meter,
    )
    data = [gt.Instance({"x": torch.randn(ROWS, 3)}) for _ in range(n)]
    session.fit(data, epochs=1, valid=data)
    return meter


def test_forward_and_backward_of_every_node_are_counted_and_evaluation_is_not():
    for runtime in (gt.Simulated(2), gt.Threads(2, kernel_threads=1)):
        nodes = measured([gt.Gear()] * 3, runtime=runtime).nodes()
        assert nodes["stage 0"] == gt.Flops(6 * SIZES[0], 6 * SIZES[0])  # no gradient of the data
        assert nodes["stage 1"] == gt.Flops(6 * SIZES[1], 6 * 2 * SIZES[1])
        assert nodes["stage 2"] == gt.Flops(6 * SIZES[2], 6 * 2 * SIZES[2])


def test_a_slow_gear_spares_the_backward_work_of_its_off_turns():
    meter = measured([gt.Gear(4), gt.Gear(2), gt.Gear()])
    nodes, plain = meter.nodes(), measured([gt.Gear()] * 3).total()
    assert nodes["stage 0"] == gt.Flops(6 * SIZES[0], 2 * SIZES[0], 4 * SIZES[0])
    # Where the part below has skipped, nobody wants the gradient of the input.
    assert nodes["stage 1"] == gt.Flops(6 * SIZES[1], (2 + 3) * SIZES[1], (12 - 5) * SIZES[1])
    assert nodes["stage 2"] == gt.Flops(6 * SIZES[2], (3 + 6) * SIZES[2], 3 * SIZES[2])
    assert meter.total().executed + meter.total().spared == plain.executed
    total = meter.total()
    assert total.share_spared == pytest.approx(total.spared / (total.executed + total.spared))


def test_skipping_weights_spares_their_half():
    nodes = measured([gt.Gear(), gt.Gear(3, skip="weights"), gt.Gear()]).nodes()
    assert nodes["stage 1"] == gt.Flops(6 * SIZES[1], (6 + 2) * SIZES[1], 4 * SIZES[1])


def test_replays_cost_a_forward_and_a_backward_without_the_input_of_the_first_part():
    nodes = measured([gt.Gear()] * 3, replay=2).nodes()
    assert nodes["stage 1"] == gt.Flops(6 * SIZES[1], 12 * SIZES[1])
    assert nodes["stage 2"] == gt.Flops(12 * SIZES[2], (6 * 2 + 6) * SIZES[2])


def test_a_meter_begins_anew():
    meter = measured([gt.Gear()] * 3, n=1)
    assert meter.total().executed > 0
    meter.reset()
    assert meter.total() == gt.Flops() and meter.total().share_spared == 0.0


def test_the_cost_of_a_message_is_told_by_halves():
    cost = cost_of(nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 4)), shapes((ROWS, 3)))
    assert cost.forward == SIZES[0] + SIZES[1]
    assert cost.backward == 2 * (SIZES[0] + SIZES[1])
    assert cost.input == SIZES[0] + SIZES[1]
    assert cost.weights == SIZES[0] + 2 * SIZES[1]  # no gradient of the first input


def test_convolutions_and_attention_are_counted():
    conv = cost_of(nn.Conv2d(2, 4, 3, padding=1), shapes((ROWS, 2, 8, 8)))
    assert conv.forward == 2 * ROWS * 64 * 4 * 2 * 9
    q = (2, 2, 7, 4)
    attend = cost_of(torch.nn.functional.scaled_dot_product_attention, shapes(q, q, q))
    assert attend.forward == 2 * (2 * 2 * 2 * 7 * 7 * 4)


def test_a_module_that_looks_at_values_is_counted_on_zeros_and_draws_no_number():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(3, 6), nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.linear(x)) * (2.0 if x.sum().item() > 1 else 1.0)

    before = torch.get_rng_state()
    assert cost_of(Looks(), shapes((ROWS, 3))).forward == SIZES[0]
    looks = Looks()
    before = torch.get_rng_state()
    cost_of(looks, shapes((ROWS, 3)))
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_for_data_and_detached_rows_are_not_computed_behind_joins_and_broadcasts():
    meter = gt.FlopMeter()
    graph = gt.Graph()
    x, y = graph.input("x", bundle=True), graph.input("y", bundle=True)

    class First(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, h, y):
            return self.linear(h), y

    stream = graph.concat(x, y, how="tuple").replay(times=0)
    stream = stream.through(First(nn.Linear(3, 6)), keep="graph", name="low")
    stream.loss(lambda h, y: h.square().sum(1))
    stream = stream.detach()
    for name in ("one", "two"):  # two readers of the same detached rows
        wide = stream.through(First(nn.Linear(6, 4)), keep="graph", name=name)
        wide.loss(lambda h, y: h.square().sum(1))
    session = gt.Session(graph, rules=gt.Rules(update_every=gt.Rows(1)), meter=meter)
    session.fit([gt.Instance({"x": torch.randn(ROWS, 3), "y": torch.zeros(ROWS)})], epochs=1)
    assert meter.nodes()["low"] == gt.Flops(SIZES[0], SIZES[0])
    assert meter.nodes()["one"] == meter.nodes()["two"] == gt.Flops(SIZES[1], SIZES[1])
