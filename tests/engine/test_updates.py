"""The number asked for is what happens: how many updates there are, and of what."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import geartrain as gt
from geartrain.engine.cohorts import Cohorts
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Finished, Firing
from geartrain.engine.parts import make_parts
from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.runtime.base import AbstractRuntime
from tests.rigs.pairs import graph_of_pairs, pairs
from tests.rigs.passes import AT_ONCE, POLICIES, Order, Quiet, one_pass
from tests.rigs.sessions import session_of
from tests.rigs.updates import KINDS, WHOLE_LOOPS, Kind, Steps, cut

N = 24
SGD = partial(torch.optim.SGD, lr=1e-3)
SLOW = pytest.mark.slow
ORDERS = {
    "7 in flight": (7, lambda: gt.Simulated(1)),
    "64 on threads": (64, lambda: gt.Threads(3, kernel_threads=1)),
}
MORE = {
    "64 in flight": (64, lambda: gt.Simulated(1)),
    "1 in flight": (1, lambda: gt.Simulated(1)),
    "1 on threads": (1, lambda: gt.Threads(2, kernel_threads=1)),
    "7 on threads": (7, lambda: gt.Threads(2, kernel_threads=1)),
    "64 in flight, 3 workers": (64, lambda: gt.Simulated(3, seed=1, jitter=0.7)),
    "256 in flight": (256, lambda: gt.Simulated(1)),
}


def trained(
    kind: Kind, trigger: object, in_flight: int, runtime: AbstractRuntime, **more: object
) -> tuple[Steps, gt.Session, gt.Fit]:
    steps = Steps()
    session = session_of(
        kind.graph,
        rules=gt.Rules(optimizer=SGD, update_every=trigger),
        runtime=runtime,
        max_active=in_flight,
        ramp=gt.Ramp(over=0),
        shuffle=False,
        instruments=[steps],
        **more,
    )
    fit = session.fit(list(kind.data), epochs=1)
    for part, messages in kind.brings.items():
        assert sum(steps.of(part)) == sum(map(sum, messages))  # nothing is lost, or comes twice
        assert fit.history[0].updates.get(part, 0) == len(steps.of(part))
        assert sum(fit.history[0].staleness[part].histogram) == sum(steps.of(part))
    return steps, session, fit


@pytest.fixture(params=[*ORDERS, *(pytest.param(name, marks=SLOW) for name in MORE)])
def order(request) -> tuple[int, AbstractRuntime]:
    in_flight, make = (ORDERS | MORE)[request.param]
    return in_flight, make()


@pytest.mark.parametrize("n", [8, pytest.param(1, marks=SLOW), pytest.param(20, marks=SLOW)])
@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_instances_is_of_that_many(name, n, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Instances(n), *order)
    for part, messages in kind.brings.items():
        rows = [sum(brought) for brought in messages]
        if name in ("uneven bundles", "whole trees"):  # they may overtake one another
            assert len(steps.of(part)) == -(-N // n)
        else:
            assert steps.of(part) == cut(rows, n)


@pytest.mark.parametrize("n", [7, pytest.param(1, marks=SLOW), pytest.param(50, marks=SLOW)])
@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_rows_is_of_that_many_and_bundles_even_out(name, n, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Rows(n), *order)
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        total, largest = sum(sizes), max(sizes, default=0)
        *whole, last = steps.of(part)
        if largest == 1:
            assert steps.of(part) == cut(sizes, n)
        elif n == 1:
            assert len(steps.of(part)) == len(sizes)
        elif largest <= n:
            assert len(steps.of(part)) in (total // n, total // n + 1)
            ahead = np.cumsum(whole) - n * np.arange(1, len(whole) + 1)
            assert (ahead >= 0).all() and (ahead < largest).all()
            assert last < n + largest


@pytest.mark.parametrize("n", [6, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_messages_is_of_that_many(name, n, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Messages(n), *order)
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        assert len(steps.of(part)) == -(-len(sizes) // n)
        if len(set(sizes)) == 1:
            assert steps.of(part) == cut(sizes, n)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_what_waits_for_the_flush_is_one_update(name, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Flush(), *order)
    assert all(len(steps.of(part)) == 1 for part in kind.brings)


@pytest.mark.parametrize("n", [8, pytest.param(1, marks=SLOW), pytest.param(20, marks=SLOW)])
@pytest.mark.parametrize("name", WHOLE_LOOPS)
def test_an_update_of_instances_is_of_that_many_where_a_loop_runs_whole(name, n, order):
    kind = WHOLE_LOOPS[name](N)
    steps, _, _ = trained(kind, gt.Instances(n), *order)
    for part, messages in kind.brings.items():
        rows = [sum(brought) for brought in messages]
        assert steps.of(part) == cut(rows, n)


@pytest.mark.parametrize("n", [7, pytest.param(50, marks=SLOW)])
@pytest.mark.parametrize("name", WHOLE_LOOPS)
def test_an_update_of_rows_is_of_that_many_where_a_loop_runs_whole(name, n, order):
    kind = WHOLE_LOOPS[name](N)
    steps, _, _ = trained(kind, gt.Rows(n), *order)
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        total, largest = sum(sizes), max(sizes)
        assert len(steps.of(part)) in (total // n, total // n + 1)
        ahead = np.cumsum(steps.of(part)[:-1]) - n * np.arange(1, len(steps.of(part)))
        assert (ahead >= 0).all() and (ahead < largest).all()


WORKERS = [gt.Simulated(3, seed=2, jitter=0.5), gt.Threads(3, kernel_threads=1)]
SHARED = [name for name in KINDS if name != "minibatches"]  # which keep autograd's graph


@pytest.mark.parametrize("runtime", WORKERS, ids=["simulated", "threads"])
@pytest.mark.parametrize(
    "trigger",
    [
        gt.Instances(8),
        gt.Rows(20),
        pytest.param(gt.Instances(1), marks=SLOW),
        pytest.param(gt.Messages(3), marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SHARED)
def test_workers_that_share_weights_make_as_many_updates_as_one_worker(name, trigger, runtime):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, trigger, 64, runtime, sharing=gt.SharedWeights())
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        visits = [bool(brought) for brought in messages]
        total = {"rows": sum(sizes), "messages": len(sizes), "instances": N}[trigger.unit]
        if all(visits) or trigger.unit != "instances":
            # What the very last update has too much is lost, where bundles of several workers meet.
            least = total // trigger.n - (trigger.unit == "rows" and max(sizes) > 1)
            assert least <= len(steps.of(part)) <= -(-total // trigger.n)


def test_copies_of_a_part_count_the_instances_that_go_to_them():
    steps = Steps()
    session = gt.Session(
        graph_of_pairs(),
        sharing=gt.PartCopies({"first": 2}),
        rules=gt.Rules(optimizer=SGD, update_every=gt.Instances(4)),
        runtime=gt.Simulated(3, jitter=0.5),
        max_active=32,
        schedule=gt.Schedule(ramp=AT_ONCE),
        reading=gt.Reading(shuffle=False),
        instruments=[steps],
    )
    session.fit(pairs(50), epochs=1)
    assert steps.of("first") == steps.of("first#1") == [8] * 6 + [2]  # two rows an instance
    assert steps.of("last") == [4] * 12 + [2]


@pytest.mark.parametrize("runtime", [gt.Simulated(2, jitter=0.5), gt.Threads(2, kernel_threads=1)])
def test_copies_of_the_model_make_updates_of_their_own_instances(runtime):
    kind, steps = KINDS["loops"](40), Steps()
    session = gt.Session(
        kind.graph,
        rules=gt.Rules(optimizer=SGD, update_every=gt.Instances(4)),
        runtime=runtime,
        max_active=32,
        schedule=gt.Schedule(ramp=AT_ONCE),
        reading=gt.Reading(shuffle=False),
        instruments=[steps],
        sharing=gt.Neighbours(copies=2, exchange="weights", when=1000),
    )
    session.fit(list(kind.data), epochs=1)
    for copy in (0, 1):
        *whole, last = steps.of(f"readout#{copy}")
        assert whole == [4] * len(whole) and 0 < last <= 4


def test_what_is_left_of_one_stretch_goes_into_the_first_update_of_the_next(tmp_path):
    kind, steps = KINDS["loops"](N), Steps()
    session = gt.Session(
        kind.graph,
        rules=gt.Rules(optimizer=SGD, update_every=gt.Instances(8)),
        max_active=32,
        schedule=gt.Schedule(ramp=AT_ONCE),
        reading=gt.Reading(shuffle=False),
        instruments=[steps],
    )
    session.fit(list(kind.data), epochs=2, folder=tmp_path, checkpoint_every=13)
    for part, messages in kind.brings.items():
        assert steps.of(part) == 2 * cut([sum(brought) for brought in messages], 8)


def moves_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Where its one weight is, and then after each of its steps: some are taken in one go."""
    (weight,) = optimizer.param_groups[0]["params"]
    seen = [weight.detach().clone()]
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    return seen


COHORTS = given(
    many=st.integers(15, 40),
    n=st.integers(1, 12),
    in_flight=st.integers(1, 50),
    workers=st.integers(1, 3),
    seed=st.integers(0, 99),
    policy=st.sampled_from(POLICIES),
    max_rows=st.sampled_from([4096, 3]),
)


@settings(max_examples=8)
@COHORTS
def test_an_update_is_the_gradient_of_its_cohort_and_of_nobody_else(**drawn):
    train_in_cohorts(**drawn)


@pytest.mark.slow
@settings(max_examples=300)
@COHORTS
def test_very_many_updates_are_the_gradients_of_their_cohorts(**drawn):
    train_in_cohorts(**drawn)


def train_in_cohorts(many, n, in_flight, workers, seed, policy, max_rows):
    """The loss is linear in the weights, so its gradient does not depend on when it is computed."""
    rounds = np.random.default_rng(seed).integers(1, 5, many)
    graph, weight = gt.Graph(value=("rounds",)), nn.Linear(2, 1, bias=False).double()
    loop = graph.loop(run="steps")
    loop.join(graph.input("x", step=0))
    pairs = loop.through(nn.Identity(), name="each")
    pairs.through(weight, name="map").loss(lambda y: y[:, 0])
    turned = pairs.through(nn.Linear(2, 2).double(), name="other").move(step=lambda m: m.step + 1)
    again, out = turned.where(lambda m: m.step < m.rounds)
    loop.join(again.detach().through(torch.ones_like, name="anew"))
    out.stop()
    data = [
        gt.Instance({"x": torch.full((1, 2), float(i), dtype=torch.float64)}, value={"rounds": r})
        for i, r in enumerate(rounds.tolist())
    ]
    rules = Rules(
        optimizer=partial(torch.optim.SGD, lr=1.0), update_every=gt.Instances(n), average="none"
    )
    order = Order("simulated", workers, policy, seed, 0.8, in_flight, max_rows)
    engine = Engine(graph, make_parts(graph, rules), order.settings(), workers)
    optimizer = engine.parts["map"].optimizer
    assert optimizer is not None
    seen = moves_of(optimizer)
    one_pass(graph, data, order, engine=engine)
    gradients = np.arange(many) + (
        rounds - 1
    )  # its own row, and one of ones for each further round
    moved = [float((a - b)[0, 0]) for a, b in pairwise(seen)]
    assert moved == [float(gradients[i : i + n].sum()) for i in range(0, many - many % n, n)]


@pytest.mark.parametrize(("other", "asked"), [(2, 1), (3, 2)])
def test_parts_whose_updates_are_of_the_same_instances_step_one_after_the_other(
    monkeypatch, other, asked
):
    """Who has finished is found once for all of them, and no part is an update ahead of another."""
    graph = gt.Graph()
    loop = graph.loop(run="steps")
    loop.join(graph.input("x", step=0))
    turned = loop.through(nn.Linear(2, 2), name="one").through(nn.Linear(2, 2), name="other")
    again, out = turned.move(step=lambda m: m.step + 1).where(lambda m: m.step < 2)
    loop.join(again)
    out.loss(lambda y: y[:, 0])
    parts = make_parts(graph, Rules(optimizer=SGD, update_every=gt.Instances(2)))
    parts["other"].trigger = parts["other"].counting.trigger = gt.Instances(other)
    engine = Engine(graph, parts, Order("simulated", 1, POLICIES[0], 0, 0.0, 8, 4096).settings())
    engine.begin(train=True)
    stepped: list[str] = []
    found = 0
    finished = Cohorts.finished

    def counted(self, turns):
        nonlocal found
        found += 1
        return finished(self, turns)

    monkeypatch.setattr(PartState, "steps_plainly", False)  # each by itself, so that it is seen
    monkeypatch.setattr(PartState, "step_if_due", lambda part, _: stepped.append(part.name))
    monkeypatch.setattr(Cohorts, "finished", counted)
    engine.workers[0].finished(Finished(np.arange(4), 4))
    assert found == asked
    both = ["one", "other"] * 3  # twice due, and once for what has finished of the next
    assert stepped == both if other == 2 else stepped[:3] == ["one"] * 3


def triggers() -> st.SearchStrategy[object]:
    some = st.integers(1, 20)
    return st.one_of(
        some.map(gt.Instances),
        some.map(gt.Instances),
        some.map(gt.Rows),
        some.map(gt.Messages),
        st.just(gt.Flush()),
    )


MIXED = given(
    name=st.sampled_from([*KINDS]),
    chosen=st.lists(triggers(), min_size=3, max_size=3),
    bound=st.sampled_from([None, None, None, 0, 2]),
    drain=st.booleans(),
    ramp=st.sampled_from([AT_ONCE, gt.Ramp(start=1, over=30)]),
    order=st.builds(
        Order,
        st.sampled_from(["simulated", "simulated", "threads"]),
        st.integers(1, 3),
        st.sampled_from(POLICIES),
        st.integers(0, 99),
        st.sampled_from([0.0, 0.9]),
        st.integers(1, 70),
        st.sampled_from([1, 5, 4096]),
    ),
)


@settings(max_examples=10)
@MIXED
def test_parts_with_rules_of_their_own_never_wait_for_one_another_in_vain(**drawn):
    train_with_mixed_rules(**drawn)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=500)
@MIXED
def test_parts_with_many_rules_of_their_own_never_wait_for_one_another_in_vain(**drawn):
    train_with_mixed_rules(**drawn)


def train_with_mixed_rules(name, chosen, bound, drain, ramp, order) -> None:
    many = 24
    kind, steps = KINDS[name](many), Steps()
    parts = make_parts(kind.graph, Rules(optimizer=SGD))
    for part, trigger in zip([*parts.values()], chosen, strict=False):
        own = replace(part.rules, update_every=trigger, max_staleness=bound)
        parts[part.name] = PartState(part.name, part.module, own)
    limits = replace(order.settings(), drain=drain, ramp=ramp)
    engine = Engine(kind.graph, parts, limits, order.workers)

    class Told(Quiet):
        def stepped(self, worker, step, now_s):
            steps.rows.setdefault(step.part, []).append(step.rows)

    one_pass(kind.graph, kind.data, order, engine=engine, watch=Told())
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        state, trigger = parts[part], parts[part].trigger
        assert sum(steps.of(part)) + state.counting.rows == sum(sizes)
        if bound is not None:
            assert len(state.histogram()) <= bound + 1
        elif trigger.unit == "instances" and all(messages):
            assert len(steps.of(part)) == many // trigger.n
        elif trigger.unit == "messages":
            assert len(steps.of(part)) == len(sizes) // trigger.n
        elif trigger.unit == "rows" and max(sizes) <= trigger.n:
            assert len(steps.of(part)) == sum(sizes) // trigger.n


class Versions(Quiet):
    """The version of part ``lower`` at the forward of every instance, which come in their order."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen = engine, []

    def fired(self, worker: int, firing: Firing, start_s: float, end_s: float) -> None:
        if firing.node == "lower" and firing.forward:
            self.seen += [self.engine.parts["lower"].version] * firing.rows


@pytest.mark.parametrize("n", [8, pytest.param(1, marks=SLOW), pytest.param(20, marks=SLOW)])
@pytest.mark.parametrize("in_flight", [1, 7, 64, pytest.param(256, marks=SLOW)])
@pytest.mark.parametrize("name", ["one row", "equal bundles"])
def test_staleness_is_the_updates_between_a_forward_and_the_update_that_it_is_part_of(
    name, in_flight, n
):
    kind = KINDS[name](100)
    rules = Rules(optimizer=SGD, update_every=gt.Instances(n))
    order = Order(max_active=in_flight, reach=False)  # what goes back at once is of one version
    engine = Engine(kind.graph, make_parts(kind.graph, rules), order.settings())
    watch = Versions(engine)
    one_pass(kind.graph, kind.data, order, engine=engine, watch=watch)
    ages = np.arange(100) // n - np.array(watch.seen)
    rows = kind.brings["lower"][0][0]
    assert (np.bincount(ages) * rows).tolist() == list(engine.parts["lower"].histogram())
    assert in_flight <= n or name != "one row" or ages.max() > 0
