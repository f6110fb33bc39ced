"""Operations counted by node against numbers worked out by hand."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.native import library
from geartrain.nodes.gradient import GradientSum
from geartrain.observe.flops import _Counting, cost_of
from geartrain.whole.graph.cell import GatedGraphCell
from geartrain.whole.graph.gated_sum import GatedSum

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
        compute=gt.Compute(meter=meter),
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
    session = gt.Session(
        graph, rules=gt.Rules(update_every=gt.Rows(1)), compute=gt.Compute(meter=meter)
    )
    session.fit([gt.Instance({"x": torch.randn(ROWS, 3), "y": torch.zeros(ROWS)})], epochs=1)
    assert meter.nodes()["low"] == gt.Flops(SIZES[0], SIZES[0])
    assert meter.nodes()["one"] == meter.nodes()["two"] == gt.Flops(SIZES[1], SIZES[1])


def trained(graph, instances, update_every):
    meter = gt.FlopMeter()
    every = gt.Instances(update_every)
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=every)
    gt.Session(graph, rules=rules, max_active=3, compute=gt.Compute(meter=meter)).fit(
        instances, epochs=1
    )
    return meter


@pytest.mark.parametrize("update_every", [1, 5])
def test_products_that_wait_for_a_step_are_counted_where_they_are_asked_for(update_every):
    graph = gt.Graph(value=("y",))
    stream = graph.input("x").through(nn.Linear(3, 6), name="low")
    stream = stream.through(nn.Linear(6, 4), name="high")
    stream.loss(gt.cross_entropy, "y")
    data = [gt.Instance({"x": torch.randn(1, 3)}, value={"y": k % 4}) for k in range(5)]
    meter = trained(graph, data, update_every)
    low, high = (2 * 5 * a * b for a, b in ((3, 6), (6, 4)))
    assert meter.nodes()["low"] == gt.Flops(low, low)  # nobody reads the gradient of the data
    assert meter.nodes()["high"].executed == 3 * high


def test_products_that_wait_so_long_that_they_are_done_in_a_firing_count_once():
    weight = nn.Parameter(torch.zeros(2, 3))
    into, counted = GradientSum([weight]), []
    with _Counting(counted.append):
        for _ in range(40):
            into.add_product(weight, torch.ones(100, 2), torch.ones(100, 3))
        into.add_product(weight, torch.ones(200, 2), torch.ones(200, 3))
    assert into.take(weight)[0, 0] == 4200
    assert counted == [2 * 4200 * 2 * 3]


@pytest.mark.parametrize("native", [True, False])
def test_products_inside_kernels_are_counted(native, monkeypatch):
    """Gated graphs: each way a product for the messages of senders, and six for the gates."""
    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    elif library.current() is None:
        pytest.skip("needs a C compiler: cc, gcc or clang")
    width, types, steps, n = 5, 2, 3, 4
    graph = gt.Graph(vertex=("kind",), edge=("type",), value=("y",))
    rows = graph.input("x", bundle=True)
    cell = GatedGraphCell(width, types, steps=steps)
    rows = rows.through(cell, name="cell", inside=True)
    rows = rows.through(GatedSum(width), name="sum", inside=True, pool=True)
    rows.loss(lambda p, y: (p[:, 0] - y) ** 2, "y")
    columns = {"source": [0, 0, 1, 2], "target": [1, 2, 2, 0], "type": [0, 0, 1, 0]}
    data = [
        gt.Instance({"x": torch.randn(n, width)}, {"kind": [0] * n}, columns, {"y": 0.5})
        for _ in range(3)
    ]
    nodes = trained(graph, data, update_every=3).nodes()
    senders = 3  # of a type: vertices 0 and 2, and 1
    forward = 2 * 3 * steps * width * width * (senders + 6 * n)
    # Nobody wants the gradient of the data, so the first step need not go back to its states.
    spared = 2 * 3 * width * width * (senders + 3 * n) if native else 0
    assert nodes["cell"] == gt.Flops(forward, 2 * forward - spared)
    # The loss is computed in its node, and so is the way back, in firings that go forward.
    assert nodes["sum"] == gt.Flops(3 * 2 * 3 * n * width * 2, 0)


def test_products_in_place_are_counted():
    y, left, right = torch.zeros(2, 4), torch.ones(2, 3), torch.ones(3, 4)
    counted = []
    with _Counting(counted.append):
        y.addmm_(left, right)
        torch.zeros(5, 2, 4).baddbmm_(left.expand(5, 2, 3), right.expand(5, 3, 4))
        left @ right[:, 0]
        torch.addmv(y[:, 0], left, right[:, 0])
    assert counted == [2 * 2 * 3 * (4 + 5 * 4 + 1 + 1)]
