"""Bundles that are held and read by reference: losses and gradients are those of plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import geartrain as gt
from tests.rigs.beside_plain import Model
from tests.rigs.passes import (
    ORDERS,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
    orders,
)
from tests.rigs.products import in_pairs

H = 3
F64 = torch.float64


class Encode(nn.Module):
    """Keys and values of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2 * H, dtype=F64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(x)).chunk(2, -1)


class First(nn.Module):
    """A row for each bundle: the sum of its values, through weights."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H, dtype=F64)

    def forward(self, keys: Tensor, values: Tensor, inside: gt.Inside) -> Tensor:
        total = values.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, values)
        return torch.tanh(self.map(total))


class Cell(nn.Module):
    """A step that reads with weights of its own; what is behind the end has no share."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.cell = nn.Linear(H, H, dtype=F64), nn.GRUCell(H, H, dtype=F64)

    def forward(self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("nld,nd->nl", keys, self.query(h)).exp() * mask
        context = torch.einsum("nl,nld->nd", scores, values)
        return self.cell(context / (1 + scores.sum(1, keepdim=True)), h)


def loss(y: Tensor) -> Tensor:
    return (y**2).sum(-1)


def alone(module: nn.Module, h: Tensor, *memory: Tensor) -> Tensor:
    """A module that reads, on one row and its own memory, without padding."""
    n = memory[0].shape[0]
    mask = torch.ones(1, n, dtype=torch.bool)
    return module(h, *(x[None] for x in memory), mask)


def sums(x: Tensor) -> gt.Inside:
    """The inside of one bundle."""
    n = x.shape[0]
    return gt.Inside(torch.tensor([n]), torch.zeros(n, dtype=torch.int64), {})


def sources(n: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(1, 6, (1,), generator=rng)) for _ in range(n)]
    return [torch.randn(k, 2, generator=rng, dtype=F64) for k in lengths]


def translate(n: int = 5, run: str | None = None) -> Model:
    """A decoder's loop: how long it takes is seen in the payload; a loss at every step."""
    torch.manual_seed(0)
    encode, first, cell, readout = Encode(), First(), Cell(), nn.Linear(H, 2, dtype=F64)
    graph = gt.Graph()
    held = graph.input("x", bundle=True).through(encode, name="encode").hold(name="states")
    state = graph.loop(run=run)
    state.join(held.through(first, name="first", inside=True, pool=True).move(step=0))
    after = state.attend(held, cell, name="cell").move(step=lambda m: m.step + 1)
    after.through(readout, name="readout").loss(loss)
    more, done = after.where(lambda m: (m.payload[0][:, 0] > -0.1).numpy() & (m.step < 5))
    state.join(more)
    done.stop()

    def plain(given: gt.Instance) -> Tensor:
        keys, values = encode(given.inputs["x"])
        h, total = first(keys, values, sums(values)), torch.zeros((), dtype=F64)
        for step in range(1, 6):
            h = alone(cell, h, keys, values)
            total = total + loss(readout(h)).sum()
            if not (h[0, 0] > -0.1 and step < 5):
                break
        return total

    modules = {"encode": encode, "first": first, "cell": cell, "readout": readout}
    data = [gt.Instance({"x": x}) for x in sources(n)]
    return Model(graph, modules, plain, data, {"x": ((2,), F64)})


def two(n: int = 4, run: str | None = None) -> Model:
    """Two memories: one is read before the loop, both in it by one shared cell, and some rows pass
    one of them by."""
    torch.manual_seed(1)
    one, other, first, cell = Encode(), Encode(), First(), Cell()
    readout, mix = nn.Linear(H, 2, dtype=F64), nn.Bilinear(H, H, H, dtype=F64)
    graph = gt.Graph(value=("odd",))
    a = graph.input("a", bundle=True).through(one, name="one").hold(name="left")
    b = graph.input("b", bundle=True).through(other, name="other").hold(name="right")
    part = gt.Part(cell, name="cell")
    firsts = gt.Part(first, name="first")
    row_a = a.through(firsts, name="first a", inside=True, pool=True)
    row_b = b.through(firsts, name="first b", inside=True, pool=True)
    both = graph.concat(row_b, row_a, how="tuple").through(mix, name="mix")
    before = both.attend(a, part, name="before").move(step=0)
    state = graph.loop(run=run)
    state.join(before)
    read, past = state.where(lambda m: (m.odd + m.step) % 2 == 0)
    read = read.attend(a, part, name="left cell")
    met = graph.merge(read, past).attend(b, part, name="right cell")
    after = met.move(step=lambda m: m.step + 1)
    more, done = after.where(lambda m: m.step < 2 + m.odd)
    state.join(more)
    done.through(readout, name="readout").loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        left, right = one(given.inputs["a"]), other(given.inputs["b"])
        h = mix(first(*right, sums(right[0])), first(*left, sums(left[0])))
        h = alone(cell, h, *left)
        odd = given.value["odd"]
        for step in range(2 + odd):
            if (odd + step) % 2 == 0:
                h = alone(cell, h, *left)
            h = alone(cell, h, *right)
        return loss(readout(h)).sum()

    modules = {"one": one, "other": other, "first": first, "cell": cell, "mix": mix}
    data = [
        gt.Instance({"a": a, "b": b}, value={"odd": i % 2})
        for i, (a, b) in enumerate(zip(sources(n, 1), sources(n, 2), strict=True))
    ]
    modules |= {"readout": readout}
    return Model(graph, modules, plain, data, {"a": ((2,), F64), "b": ((2,), F64)})


def features(n: int = 3, run: str | None = None) -> Model:
    """A loop over a graph, each of whose vertices reads the features of all, behind a group."""
    torch.manual_seed(2)
    encode, cell, send = Encode(), Cell(), nn.Linear(H, H, dtype=F64)
    graph = gt.Graph(edge=())
    held = graph.input("x", bundle=True).through(encode, name="encode").hold(name="features")
    rows = held.ungroup(index="vertex").through(lambda k, v: v).move(step=0)
    rounds = graph.loop(run=run)
    rounds.join(rows)
    going, done = rounds.where(lambda m: m.step < 2)
    sent = going.flatmap("edge").through(send, name="send")
    arrived = sent.move(vertex=lambda m: m.target).group(
        by=("vertex", "step"), size="in_degree", how="sum"
    )
    rounds.join(arrived.attend(held, cell, name="cell").move(step=lambda m: m.step + 1))
    done.loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        keys, values = encode(given.inputs["x"])
        h = values
        source, target = (torch.from_numpy(given.edge[name]) for name in ("source", "target"))
        for _ in range(2):
            x = torch.zeros_like(h).index_add(0, target, send(h)[source])
            h = torch.cat([alone(cell, row[None], keys, values) for row in x])
        return loss(h).sum()

    def ring(x: Tensor) -> gt.Instance:
        v = np.arange(len(x))
        return gt.Instance({"x": x}, edge={"source": v, "target": np.roll(v, 1)})

    data = [ring(x) for x in sources(n, 3)]
    modules = {"encode": encode, "cell": cell, "send": send}
    return Model(graph, modules, plain, data, {"x": ((2,), F64)})


def queries(n: int = 4, run: str | None = None) -> Model:
    """Bundles that read: each row of one reads the bundle that is held for its message."""
    torch.manual_seed(3)
    encode, cell, readout = Encode(), Cell(), nn.Linear(H, 2, dtype=F64)
    graph = gt.Graph()
    held = graph.input("x", bundle=True).through(encode, name="encode").hold()
    asked = held.through(lambda k, v: v * k).attend(held, cell, name="cell")
    asked.through(readout, name="readout").loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        keys, values = encode(given.inputs["x"])
        rows = [alone(cell, row[None], keys, values) for row in keys * values]
        return loss(readout(torch.cat(rows))).sum()

    data = [gt.Instance({"x": x}) for x in sources(n, 4)]
    modules = {"encode": encode, "cell": cell, "readout": readout}
    return Model(graph, modules, plain, data, {"x": ((2,), F64)})


MODELS = {"translate": translate, "two": two, "features": features, "queries": queries}


@pytest.mark.both_ways
@pytest.mark.parametrize(
    ("name", "order"),
    [
        *(("translate", order) for order in ORDERS),
        *((name, order) for name in ("two", "features", "queries") for order in ORDERS[::3]),
    ],
    ids=str,
)
def test_in_every_order_the_gradients_are_those_of_autograd(name, order):
    # By steps and whole in turns, so that each order has both.
    k = ORDERS.index(order) + sorted(MODELS).index(name)
    model = MODELS[name](run=("steps", None)[k % 2])
    model.graph.check(model.shapes, model.data[0])
    total = model.total()
    got = accumulate(model.graph, model.data, order)
    assert_same_loss(got, total)
    assert_same_gradients(got.gradients, autograd(total, model.modules))


@pytest.mark.parametrize("name", ["translate", "two"])
def test_a_loop_that_reads_memories_runs_whole_unless_it_is_to_run_by_steps(name):
    for run, whole in ((None, True), ("steps", False)):
        graph = MODELS[name](run=run).graph
        assert ("loop 'loop' runs whole" in str(graph)) == whole


def check(name, n, order, run):
    model = MODELS[name](n, run)
    model.graph.check(model.shapes, model.data[0])
    total = model.total()
    got = accumulate(model.graph, model.data, order)
    assert_same_gradients(got.gradients, autograd(total, model.modules))


@pytest.mark.both_ways
@settings(max_examples=5)
@given(
    name=st.sampled_from(sorted(MODELS)),
    n=st.integers(1, 8),
    order=orders(),
    run=st.sampled_from(["steps", "auto"]),
)
def test_in_any_order_the_gradients_are_those_of_autograd(name, n, order, run):
    check(name, n, order, run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(MODELS)),
    n=st.integers(1, 20),
    order=orders(),
    run=st.sampled_from(["steps", "auto"]),
)
def test_in_many_orders_the_gradients_are_those_of_autograd(name, n, order, run):
    check(name, n, order, run)


@pytest.mark.parametrize("run", ["steps", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_computes_the_same_and_leaves_nothing_behind(name, run):
    model = MODELS[name](run=run)
    model.graph.check(model.shapes, model.data[0])
    got = one_pass(model.graph, model.data, train=False)
    assert_same_loss(got, model.total())


class Step(nn.Module):
    """A step of what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(H, H, dtype=F64)

    def forward(self, context: Tensor, h: Tensor) -> Tensor:
        return self.cell(context, h)


class Values(nn.Module):
    """The values of an encoded bundle alone."""

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        return keys * values


def ready(attention: nn.Module, one: bool, run: str, n: int = 4) -> Model:
    """A loop of a column's length, with attention that has a kernel."""
    torch.manual_seed(4)
    encode, first, step = Encode(), First(), Step()
    readout = nn.Linear(H, 2, dtype=F64)
    graph = gt.Graph(value=("steps",))
    coded = graph.input("x", bundle=True).through(encode, name="encode")
    start = coded.through(first, name="first", inside=True, pool=True)
    held = (coded.through(Values(), name="values") if one else coded).hold()
    begin = graph.concat(
        start, held.through(Nothing(), name="nothing", inside=True, pool=True), how="tuple"
    ).through(lambda h, nothing: h)
    state = graph.loop(run=run)
    state.join(begin.move(step=1))
    after = state.attend(held, attention, name="read").through(step, name="step")
    after.through(readout, name="readout").loss(loss)
    more, done = after.where(lambda m: m.step < m.steps)
    state.join(more.move(step=lambda m: m.step + 1))
    done.stop()

    def plain(given: gt.Instance) -> Tensor:
        keys, values = encode(given.inputs["x"])
        h, total = first(keys, values, sums(values)), torch.zeros((), dtype=F64)
        memory = (keys * values,) if one else (keys, values)
        for _ in range(given.value["steps"]):
            h = step(*alone(attention, h, *memory))
            total = total + loss(readout(h)).sum()
        return total

    modules = {"encode": encode, "first": first, "step": step, "readout": readout}
    rng = np.random.default_rng(0)
    data = [gt.Instance({"x": x}, value={"steps": int(rng.integers(1, 6))}) for x in sources(n, 5)]
    return Model(graph, modules, plain, data, {"x": ((2,), F64)})


class Nothing(nn.Module):
    """A row that says only where its bundle is held."""

    def forward(self, x: Tensor, *others: Tensor | gt.Inside) -> Tensor:
        inside = others[-1]
        assert isinstance(inside, gt.Inside)
        return x.new_zeros(len(inside.lengths), 1)


ATTENTION = {
    "dot": gt.nn.DotAttention,
    "scaled": lambda: gt.nn.DotAttention(2.0),
}


@pytest.mark.both_ways
@in_pairs(
    kind=ATTENTION,
    one={"one tensor": True, "keys and values": False},
    within=[*((order, "whole") for order in ORDERS[3::6]), (ORDERS[9], "steps")],
)
def test_attention_with_a_kernel_has_the_gradients_of_autograd(kind, one, within):
    order, run = within
    model = ready(kind(), one, run)
    model.graph.check(model.shapes, model.data[0])
    assert "attends to memory [activations]" in str(model.graph)
    total = model.total()
    got = accumulate(model.graph, model.data, order)
    assert_same_loss(got, total)
    assert_same_gradients(got.gradients, autograd(total, model.modules))
