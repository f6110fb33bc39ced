"""Identities that pin the seams of the engine: what must equal what, exactly or in float64."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain.nn  # noqa: F401 - registers the kernels
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.frames.columns import Columns
from geartrain.frames.instance import Instance
from geartrain.frames.message import Backward, Forward, address
from geartrain.graph.graph import Graph
from geartrain.graph.owners import Owner
from geartrain.graph.wiring import wire
from geartrain.parts.part import PartState
from geartrain.parts.rules import Clip, Flush, Instances, Rows, Rules
from tests.rigs.models import MODELS, lists, trees
from tests.rigs.passes import AT_ONCE, Order, Quiet, accumulate, one_pass, weights_of

ONE_BY_ONE = [
    Order(max_active=1),
    Order(workers=3, jitter=0.5, seed=1, policy="random", max_active=1),
    Order("threads", 1, max_active=1),
    Order("threads", 2, "random", 2, max_active=1),
    Order("threads", 4, "backward", max_active=1, max_rows=3),
]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
PLAIN = partial(torch.optim.SGD, lr=0.1)  # edge types that do not occur: no gradient or zero
ADAM = partial(torch.optim.Adam, lr=1e-2)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)
SINGLE, SPARSE = partial(lists, dtype=torch.float32), partial(lists, sparse=True)


SOME = 7
"""Instances one by one: longer and shorter ones, and steps enough to carry a moment on."""


@cache
def one_by_one(make, optimizer, n=SOME):
    """Plain PyTorch: an instance, a step."""
    model = make(n)
    optimizers = [optimizer(m.parameters()) for m in model.modules.values()]
    for given in model.data:
        for o in optimizers:
            o.zero_grad()
        model.plain(given).backward()
        for o in optimizers:
            o.step()
    return weights_of(model.modules)


PAIRS = [
    pytest.param(("lists", "trees")[(i + j) % 2], optimizer, order, id=f"{name}-{order}")
    for i, (name, optimizer) in enumerate({"sgd": SGD, "adam": ADAM, "adagrad": ADAGRAD}.items())
    for j, order in enumerate(ONE_BY_ONE)
]
"""Every optimiser with every order, and either model with every one of both."""


def assert_close_weights(got, want, tolerance):
    for key, expected in want.items():
        scale = max(1.0, float(expected.abs().max()))
        worst = float((got[key] - expected).abs().max()) / scale
        assert worst < tolerance, f"{key} is off by {worst:.1e}"


@pytest.mark.both_ways
@pytest.mark.parametrize(("name", "optimizer", "order"), PAIRS)
def test_one_instance_in_flight_and_a_step_after_each_is_sequential_training(
    name, optimizer, order
):
    want = one_by_one(MODELS[name], optimizer)
    model = MODELS[name](SOME)
    rules = Rules(optimizer=optimizer, update_every=Instances(1), average="none")
    outcome = one_pass(model.graph, model.data, order, rules=rules)
    assert_close_weights(weights_of(model.modules), want, 1e-12)
    assert all(len(p.take_histogram()) <= 1 for p in outcome.parts.values())


@pytest.mark.parametrize("name", ["edges", "bundles"])
@pytest.mark.parametrize("keep", ["auto", "graph"])
def test_one_graph_in_flight_is_sequential_training_whatever_is_kept(name, keep):
    want = one_by_one(MODELS[name], PLAIN, 5)
    model = MODELS[name](5, keep=keep)
    rules = Rules(optimizer=PLAIN, update_every=Instances(1), average="none")
    one_pass(model.graph, model.data, ONE_BY_ONE[1], rules=rules)
    assert_close_weights(weights_of(model.modules), want, 1e-12)


@pytest.mark.both_ways
@pytest.mark.parametrize("keep", ["auto", "inputs", "graph"])
def test_sequential_training_in_single_precision(keep):
    want = one_by_one(SINGLE, SGD)
    model = lists(SOME, keep=keep, dtype=torch.float32)
    rules = Rules(optimizer=SGD, update_every=Instances(1), average="none")
    one_pass(model.graph, model.data, ONE_BY_ONE[3], rules=rules)
    assert_close_weights(weights_of(model.modules), want, 2e-6)


@pytest.mark.parametrize("optimizer", [PLAIN, ADAGRAD], ids=["sgd", "adagrad"])
@pytest.mark.parametrize("order", ONE_BY_ONE[::2], ids=str)
def test_sequential_training_with_a_sparse_embedding(optimizer, order):
    want = one_by_one(SPARSE, optimizer)
    model = lists(SOME, sparse=True)
    rules = Rules(optimizer=optimizer, update_every=Instances(1), average="none")
    one_pass(model.graph, model.data, order, rules=rules)
    assert_close_weights(weights_of(model.modules), want, 1e-12)


@pytest.mark.both_ways
def test_a_pass_with_one_step_at_its_end_is_full_batch_training():
    plain, model = trees(6), trees(6)
    optimizers = [SGD(m.parameters()) for m in plain.modules.values()]
    rules = Rules(optimizer=SGD, update_every=Flush(), average="none", clip=Clip(norm=3.0))
    order = Order("threads", 2, "random", max_active=7, max_rows=5)
    engine = Engine(model.graph, make_parts(model.graph, rules), order.settings(), 2)
    for epoch in range(1, 4):
        for o in optimizers:
            o.zero_grad()
        plain.total().backward()
        for m in plain.modules.values():
            nn.utils.clip_grad_norm_(m.parameters(), 3.0)
        for o in optimizers:
            o.step()
        one_pass(model.graph, model.data, order, engine=engine)
        for worker in engine.workers:
            worker.flush()
        assert {p.version for p in engine.parts.values()} == {epoch}
    assert_close_weights(weights_of(model.modules), weights_of(plain.modules), 1e-11)
    assert all(len(p.take_histogram()) == 1 for p in engine.parts.values())


def test_averages_over_rows_and_instances_divide_the_sum():
    rows = trees().total().detach()
    for average in ("rows", "instances"):
        model, summed = trees(), accumulate(*(lambda m: (m.graph, m.data))(trees()))
        before = weights_of(model.modules)
        rules = Rules(
            optimizer=partial(torch.optim.SGD, lr=1.0), update_every=Flush(), average=average
        )
        outcome = one_pass(model.graph, model.data, rules=rules)
        counts = {"leaf": 0, "branch": 0, "readout": 0}
        for given in model.data:
            leaves = len(given.inputs["word"])
            counts["leaf"] += leaves
            counts["branch"] += leaves - 1
            counts["readout"] += 2 * leaves - 1
        outcome.engine.workers[0].flush()
        for key, after in weights_of(model.modules).items():
            n = counts[key[0]] if average == "rows" else len(model.data)
            torch.testing.assert_close(before[key] - after, summed.gradients[key] / n)
    assert rows > 0


@pytest.mark.parametrize("name", MODELS)
def test_with_a_learning_rate_of_zero_losses_stay_constant(name):
    model = MODELS[name](5)
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.0, momentum=0.9), update_every=2)
    before = weights_of(model.modules)
    seen = set()
    for seed in range(2):
        order = Order(policy="random", seed=seed, workers=2, jitter=0.5, max_active=3 + 9 * seed)
        outcome = one_pass(model.graph, model.data, order, rules=rules)
        assert max(p.version for p in outcome.parts.values()) > 2
        seen.add(round(outcome.sums["loss"][0], 9))
    assert len(seen) == 1
    for key, after in weights_of(model.modules).items():
        assert torch.equal(after, before[key])


def trained(seed, order_seed):
    model = trees(8)
    rules = Rules(optimizer=ADAM, update_every=Rows(9))
    order = Order("simulated", 3, "random", order_seed, 0.8, 8, 16)
    one_pass(model.graph, model.data, order, rules=rules)
    return weights_of(model.modules)


def test_one_seed_gives_the_same_weights_to_the_last_bit_and_another_does_not():
    one, same, other = trained(0, 5), trained(0, 5), trained(0, 6)
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not all(torch.equal(one[k], other[k]) for k in one)


def histograms(bound: int | None, order: Order, n: int = 30) -> dict[str, tuple[int, ...]]:
    model = trees(n)
    rules = Rules(
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        update_every=3,
        max_staleness=bound,
    )
    outcome = one_pass(model.graph, model.data, order, rules=rules)
    assert all(p.version > 0 for p in outcome.parts.values())
    return {name: p.take_histogram() for name, p in outcome.parts.items()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_staleness_stays_within_its_bound(bound, workers):
    order = Order("simulated", workers, "random", 0, 0.9, 40, 8)
    assert max(len(h) for h in histograms(bound, order).values()) <= bound + 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_staleness_stays_within_its_bound_in_other_orders(seed, bound, workers):
    order = Order("simulated", workers, "random", seed, 0.9, 40, 8)
    assert max(len(h) for h in histograms(bound, order, 60).values()) <= bound + 1


def test_the_bound_holds_on_threads_too():
    order = Order("threads", 3, "random", max_active=40, max_rows=8)
    assert max(len(h) for h in histograms(1, order).values()) <= 2


def test_without_a_bound_staleness_grows_past_it():
    order = Order("simulated", 1, "random", 0, 0.9, 40, 8)
    assert max(len(h) for h in histograms(None, order).values()) > 5


def test_a_bound_with_steps_by_instances_does_not_starve_admission():
    """A step that instances make due may come or go without any gradient passing."""

    class Most(Quiet):
        most = 0

        def finished(self, engine, now_s):
            self.most = max(self.most, engine.controller.active)

    model = trees(30)
    rules = Rules(optimizer=SGD, update_every=Instances(2), max_staleness=1)
    watch = Most()
    order = Order("simulated", 2, "random", 1, 0.9, 20, 8)
    outcome = one_pass(model.graph, model.data, order, rules=rules, watch=watch)
    assert max(len(p.take_histogram()) for p in outcome.parts.values()) <= 2
    assert watch.most > 5


def through(keep: str, module: nn.Module):
    """One node and its part; the loss is not used."""
    graph = Graph()
    graph.input("x").through(module, name="map", keep=keep).loss(lambda y: y.sum(1))
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.3), average="none")
    part = make_parts(graph, rules)["map"]
    wiring = wire(graph, lambda t: [Owner(t.function, part)], apart=["loss"])
    (node,) = [n for n in wiring.nodes.values() if n.name == "map"]
    return node, part


def gradients_of(part: PartState) -> list[Tensor]:
    found = [part.gradient.take(p) for p in part.module.parameters()]
    return [f.clone() for f in found if f is not None]


def vjp(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(module(x), [x, *module.parameters()], dy))


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def stale(keep: str, module: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A row forward, two steps, and the row back: what came, and autograd's at then and at now."""
    torch.manual_seed(1)
    node, part = through(keep, module)
    x, dy = torch.randn(2, 1, 3, dtype=torch.float64), torch.randn(2, 1, 2, dtype=torch.float64)
    then = [vjp(module, x[i], dy[i]) for i in range(2)]
    sent = [_send(node, x[i]) for i in range(2)]
    for _ in range(2):  # steps between the forward and the backward
        for p in module.parameters():
            part.gradient.add(p, torch.randn_like(p))
        part.counting.rows += 1
        assert part.step(0) is not None
    now = [vjp(module, x[i], dy[i]) for i in range(2)]
    back = [node.backward([Backward(sent[i], (dy[i],))]).backward[0].gradient for i in (1, 0)]
    node.check_empty()
    assert part.take_histogram() == (0, 0, 2)
    total = gradients_of(part)
    return (
        [torch.cat([back[1][0], back[0][0]]), *total],
        [
            torch.cat([t[0] for t in then]),
            *(a + b for a, b in zip(then[0][1:], then[1][1:], strict=True)),
        ],
        [
            torch.cat([t[0] for t in now]),
            *(a + b for a, b in zip(now[0][1:], now[1][1:], strict=True)),
        ],
    )


def _send(node, x: Tensor) -> np.ndarray:
    state = np.zeros((2, 1), np.int64)
    emission = node.forward(0, [Forward((x,), state, address(77, 0, 1))], True)
    ((_, batch),) = emission.forward
    return batch.origin


def all_close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(one, other, strict=True)
    )


def test_a_stash_gives_the_gradient_at_the_weights_of_then():
    got, then, now = stale("graph", two_layers())
    assert all_close(got, then) and not all_close(got, now)


def test_a_recompute_gives_the_gradient_at_the_weights_of_now():
    got, then, now = stale("inputs", two_layers())
    assert all_close(got, now) and not all_close(got, then)


def test_mixed_weights_are_a_recompute_for_one_affine_map():
    torch.manual_seed(0)
    got, then, now = stale("activations", nn.Linear(3, 2).double())
    assert all_close(got, now) and not all_close(got, then)


def test_mixed_weights_differ_from_both_for_two_layers():
    got, then, now = stale("activations", two_layers())
    assert not all_close(got, now) and not all_close(got, then)


def test_an_evaluation_leaves_weights_sums_and_stores_as_they_were():
    model = trees()
    rules = Rules(optimizer=ADAM, update_every=Flush())
    order = Order(workers=2, policy="random")
    engine = Engine(model.graph, make_parts(model.graph, rules), order.settings(), 2)
    one_pass(model.graph, model.data, order, engine=engine)
    want = accumulate(*(lambda m: (m.graph, m.data))(trees())).gradients
    before = weights_of(model.modules)
    rows = {name: part.counting.rows for name, part in engine.parts.items()}
    peeks = {name: part.peek_staleness() for name, part in engine.parts.items()}
    one = one_pass(model.graph, model.data, order, engine=engine, train=False).sums
    two = one_pass(model.graph, model.data[::-1], order, engine=engine, train=False).sums
    assert one["loss"] == pytest.approx(two["loss"])
    assert engine.controller.trained == len(model.data)
    for name, part in engine.parts.items():
        assert part.counting.rows == rows[name] and part.version == 0
        assert part.peek_staleness() == peeks[name]
        for parameter, p in part.module.named_parameters():
            torch.testing.assert_close(part.gradient.take(p), want[name, parameter])
    for key, after in weights_of(model.modules).items():
        assert torch.equal(after, before[key])


def test_updates_by_rows_come_at_the_first_firing_that_reaches_them():
    torch.manual_seed(0)
    graph = Graph()
    graph.input("x").through(nn.Linear(2, 1), name="map").loss(lambda y: y.square().sum(1))
    data = [Instance({"x": torch.ones(3, 2)}) for _ in range(20)]
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=1e-3), update_every=Rows(6))
    outcome = one_pass(graph, data, Order(max_active=1), rules=rules)
    assert outcome.parts["map"].version == 10


def test_an_engine_goes_on_after_a_pass_with_nothing_left_over():
    model = lists(5)
    parts = make_parts(model.graph, Rules(update_every=Flush()))
    engine = Engine(model.graph, parts, Settings(max_active=2, ramp=AT_ONCE))
    sums = [one_pass(model.graph, model.data, engine=engine).sums["loss"] for _ in range(3)]
    assert sums[0] == pytest.approx(sums[1])
    assert sums[0] == pytest.approx(sums[2])
    assert engine.controller.trained == 15


def test_kept_graphs_survive_the_steps_of_many_instances_in_flight():
    model = MODELS["bundles"](16, keep="graph")
    rules = Rules(optimizer=SGD, update_every=Instances(1))
    order = Order(workers=2, policy="random", jitter=0.5, max_active=20)
    outcome = one_pass(model.graph, model.data, order, rules=rules)
    assert max(len(p.take_histogram()) for p in outcome.parts.values()) > 3


def asking(given: Instance) -> Instance:
    """The same instance, whose rows were made by something that may still be differentiated."""

    def made(rows: Tensor) -> Tensor:
        return rows.clone().requires_grad_() * 1 if rows.is_floating_point() else rows

    inputs = {
        name: (made(rows[0]), rows[1]) if isinstance(rows, tuple) else made(rows)
        for name, rows in given.inputs.items()
    }
    return Instance(inputs, given.vertex, given.edge, given.value)


@pytest.mark.parametrize("keep", ["auto", "inputs", "graph"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_require_a_gradient_are_data_like_any_other(name, keep):
    found = []
    for change in (asking, lambda given: given):
        model = MODELS[name](4, keep=keep)
        rules = Rules(optimizer=SGD, update_every=Instances(3))
        for train in (True, False):
            one_pass(model.graph, map(change, model.data), rules=rules, train=train)
        found.append(weights_of(model.modules))
    assert all(torch.equal(found[0][key], weight) for key, weight in found[1].items())


def test_columns_that_require_a_gradient_are_data_like_any_other():
    weight = nn.Linear(2, 1).double()
    graph = Graph(vertex=("aim",))
    graph.input("x").through(weight, name="map").loss(lambda y, aim: (y[:, 0] - aim) ** 2, "aim")
    rows, aims = torch.ones(4, 2).double().requires_grad_(), torch.ones(4).requires_grad_() * 2
    data = Columns([1, 3], {"x": rows * 2}, {"aim": aims})
    accumulate(graph, data)
    accumulate(graph, list(data))
    assert rows.grad is None
