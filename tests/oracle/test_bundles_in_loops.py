"""Loops that bundles go round: whole and by steps, gradients are those of plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import geartrain as gt
from geartrain.nodes.loop.node import LoopNode
from tests.rigs.beside_plain import Model
from tests.rigs.passes import (
    ORDERS,
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
    orders,
)

H = 3
F64 = torch.float64


class Pass(nn.Module):
    """New states by what comes along the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.cell = nn.Linear(H, H, dtype=F64), nn.GRUCell(H, H, dtype=F64)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        edges = inside.edges
        return self.along(h, edges["source"], edges["target"])

    def along(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.send(h)[source]
        return self.cell(torch.zeros_like(h).index_add(0, target, sent), h)


class Pool(nn.Module):
    """A row for each bundle, also for an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H, dtype=F64)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        summed = h.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, h)
        return torch.tanh(self.map(summed))


class Read(nn.Module):
    """Each row reads what is held by a softmax of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(H, H, dtype=F64)

    def forward(self, h: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("nld,nd->nl", keys, self.query(h)).exp() * mask
        context = torch.einsum("nl,nld->nd", scores, keys)
        return torch.tanh(context / (1 + scores.sum(1, keepdim=True)) + h)


def loss(y: Tensor) -> Tensor:
    return (y**2).sum(-1)


def one(x: Tensor) -> gt.Inside:
    n = len(x)
    return gt.Inside(torch.tensor([n]), torch.zeros(n, dtype=torch.int64), {})


def sources(n: int, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(1, 6, (1,), generator=rng)) for _ in range(n)]
    return [torch.randn(k, H, generator=rng, dtype=F64) for k in lengths]


def ring(x: Tensor, **value: int) -> gt.Instance:
    v = np.arange(len(x))
    return gt.Instance({"x": x}, edge={"source": v, "target": np.roll(v, 1)}, value=value)


def rounds_of(run: str, n: int) -> Model:
    """Some rounds of messages, by a column; then a pooled row."""
    torch.manual_seed(0)
    step, pool = Pass(), Pool()
    graph = gt.Graph(edge=(), value=("steps",))
    state = graph.loop(name="rounds", run=run)
    state.join(graph.input("x", bundle=True, step=0))
    passed = state.through(step, name="step", inside=True)
    done, more = passed.where(lambda m: m.step + 1 >= m.steps)
    state.join(more.move(step=lambda m: m.step + 1))
    done.through(pool, name="pool", inside=True, pool=True).loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        h = given.inputs["x"]
        source, target = (torch.from_numpy(given.edge[name]) for name in ("source", "target"))
        for _ in range(given.value["steps"]):
            h = step.along(h, source, target)
        return loss(pool(h, one(h))).sum()

    data = [ring(x, steps=1 + i % 4) for i, x in enumerate(sources(n, 1))]
    return Model(graph, {"step": step, "pool": pool}, plain, data)


def sure(run: str, n: int) -> Model:
    """Each round a row is pooled and has a loss; what bundles hold says when they stop."""
    torch.manual_seed(1)
    step, pool = nn.Linear(H, H, dtype=F64), Pool()
    graph = gt.Graph()
    state = graph.loop(name="rounds", run=run)
    state.join(graph.input("x", bundle=True, step=0))
    passed = state.through(step, name="step").move(step=lambda m: m.step + 1)
    passed.through(pool, name="pool", inside=True, pool=True).loss(loss)

    def goes_on(m) -> object:
        first = np.cumsum(m.lengths) - m.lengths
        return (m.payload[0].numpy()[first, 0] > -0.1) & (m.step < 4)

    more, done = passed.where(goes_on)
    state.join(more)
    done.stop()

    def plain(given: gt.Instance) -> Tensor:
        h, total = given.inputs["x"], torch.zeros((), dtype=F64)
        for number in range(1, 5):
            h = step(h)
            total = total + loss(pool(h, one(h))).sum()
            if not (h[0, 0] > -0.1 and number < 4):
                break
        return total

    data = [gt.Instance({"x": x}) for x in sources(n, 2)]
    return Model(graph, {"step": step, "pool": pool}, plain, data)


def reading(run: str, n: int) -> Model:
    """Bundles whose rows read what is held; they leave as bundles."""
    torch.manual_seed(2)
    encode, read, last = nn.Linear(H, H, dtype=F64), Read(), nn.Linear(H, 2, dtype=F64)
    graph = gt.Graph(value=("steps",))
    held = graph.input("x", bundle=True, step=0).through(encode, name="encode").hold(name="held")
    state = graph.loop(name="rounds", run=run)
    state.join(held.through(lambda x: x * x, name="square"))
    passed = state.attend(held, read, name="read").move(step=lambda m: m.step + 1)
    more, done = passed.where(lambda m: m.step < m.steps)
    state.join(more)
    done.through(last, name="last").loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        keys = encode(given.inputs["x"])
        h, mask = keys * keys, torch.ones(1, len(keys), dtype=torch.bool)
        for _ in range(given.value["steps"]):
            h = torch.cat([read(row[None], keys[None], mask) for row in h])
        return loss(last(h)).sum()

    data = [gt.Instance({"x": x}, value={"steps": 1 + i % 3}) for i, x in enumerate(sources(n, 3))]
    return Model(graph, {"encode": encode, "read": read, "last": last}, plain, data)


def halves(run: str, n: int) -> Model:
    """Bundles enter by two ways and go on by two, one of them detached and one taking a part."""
    torch.manual_seed(3)
    step, wide = nn.Linear(H, H, dtype=F64), nn.Linear(2 * H, H, dtype=F64)
    graph = gt.Graph(value=("steps", "kind"))
    state = graph.loop(name="rounds", run=run)
    given_rows = graph.input("x", bundle=True, step=0)
    odd, even = given_rows.where(lambda m: m.kind > 0)
    state.join(odd.through(step, name="odd"), even)
    both = state.through(lambda h: (h * h, h), name="both")
    both.detach().through(lambda square, h: square, name="square").loss(loss, name="beside")
    passed = both.through(step, name="step", take=1).move(step=lambda m: m.step + 1)
    more, done = passed.where(lambda m: m.step < m.steps)
    state.join(more)
    done.through(lambda h: torch.cat([h, h], 1), name="twice").through(wide, name="wide").loss(loss)

    def plain(given: gt.Instance) -> Tensor:
        h, total = given.inputs["x"], torch.zeros((), dtype=F64)
        if given.value["kind"]:
            h = step(h)
        for _ in range(given.value["steps"]):
            total = total + loss((h * h).detach()).sum()
            h = step(h)
        return total + loss(wide(torch.cat([h, h], 1))).sum()

    data = [
        gt.Instance({"x": x}, value={"steps": 1 + i % 3, "kind": i % 2})
        for i, x in enumerate(sources(n, 4))
    ]
    return Model(graph, {"odd": step, "wide": wide}, plain, data)


MODELS = {"rounds": rounds_of, "sure": sure, "reading": reading, "halves": halves}


def check(name: str, run: str, n: int, order: Order) -> None:
    model = MODELS[name](run, n)
    model.graph.check({"x": ((H,), F64)}, model.data[0])
    total = model.total()
    got = accumulate(model.graph, model.data, order)
    whole = any(isinstance(node, LoopNode) for node in got.engine.wiring.nodes.values())
    assert whole == (run == "whole")
    assert_same_loss(got, total)
    assert_same_gradients(got.gradients, autograd(total, model.modules))


@pytest.mark.both_ways
@pytest.mark.parametrize("order", [ORDERS[k] for k in (0, 4, 9)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_bundles_in_a_whole_loop_are_those_of_autograd(name, order):
    check(name, "whole", 5, order)


@pytest.mark.parametrize("name", MODELS)
def test_by_steps_they_are_the_same(name):
    check(name, "steps", 4, ORDERS[3])


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=200)
@given(
    name=st.sampled_from(sorted(MODELS)),
    run=st.sampled_from(["steps", "whole"]),
    n=st.integers(1, 12),
    order=orders(),
)
def test_in_any_order_the_gradients_of_bundles_in_loops_are_those_of_autograd(name, run, n, order):
    check(name, run, n, order)


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_of_bundles_in_a_whole_loop_leaves_nothing_behind(name):
    model = MODELS[name]("whole", 5)
    model.graph.check({"x": ((H,), F64)}, model.data[0])
    got = one_pass(model.graph, model.data, Order(max_active=3), train=False)
    assert_same_loss(got, model.total())


def test_rows_of_bundles_count_as_often_whole_as_by_steps():
    found = []
    for run in ("steps", "whole"):
        model = rounds_of(run, 5)
        got = accumulate(model.graph, model.data)
        found.append({name: sum(part.histogram()) for name, part in got.parts.items()})
    assert found[0] == found[1]
