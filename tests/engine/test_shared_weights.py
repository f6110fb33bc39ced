"""Shared weights: every worker runs the whole graph, all with the same weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.engine.instrument import Fired, Updated
from geartrain.runtime.base import AbstractRuntime
from tests.rigs.pairs import graph_of_pairs, pairs
from tests.rigs.passes import processes


def _updates(every: int | gt.Instances, rows: int) -> float:
    """Of a part, in an epoch of forty instances."""
    return rows / every if isinstance(every, int) else 40 / every.n


def _weights(session: gt.Session) -> list[Tensor]:
    return [p.detach().clone() for part in session.parts.values() for p in part.parameters]


RUNTIMES = {
    "simulated 3": lambda: gt.Simulated(3, jitter=0.5),
    "threads 2": lambda: gt.Threads(2),
    "threads 4": lambda: gt.Threads(4),
    "processes 2": lambda: processes(2),
    "processes 3": lambda: processes(3),
}


@pytest.fixture(
    params=[pytest.param(n, marks=pytest.mark.slow if n == "processes 3" else ()) for n in RUNTIMES]
)
def runtime(request: pytest.FixtureRequest) -> AbstractRuntime:
    return RUNTIMES[request.param]()


BOTH_WAYS = [gt.SharedWeights(), gt.SharedWeights(in_flight="each")]


@pytest.mark.parametrize("shared", BOTH_WAYS, ids=["all", "each"])
def test_one_step_of_shared_weights_is_one_step_of_one_worker(runtime, shared) -> None:
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=gt.Flush())
    found = []
    for sharing, where in ((gt.Alone(), gt.Simulated(1)), (shared, runtime)):
        session = gt.Session(graph_of_pairs(), rules=rules, runtime=where, sharing=sharing)
        session.fit(pairs(40), epochs=1)
        assert {p.version for p in session.parts.values()} == {1}
        found.append(_weights(session))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", BOTH_WAYS, ids=["all", "each"])
@pytest.mark.parametrize("every", [7, gt.Instances(5)])
def test_every_gradient_row_goes_into_exactly_one_step(runtime, every, shared) -> None:
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=every)
    steps: list[Updated] = []

    class Counts(gt.AbstractInstrument):
        def on_updated(self, event: Updated) -> None:
            steps.append(event)

    session = gt.Session(
        graph_of_pairs(),
        rules=rules,
        runtime=runtime,
        sharing=shared,
        instruments=[Counts()],
    )
    session.fit(pairs(40), epochs=2)
    assert len(steps) == pytest.approx(2 * sum(_updates(every, n) for n in (80, 40)), abs=6)
    rows = {name: sum(s.rows for s in steps if s.part == name) for name in session.parts}
    assert rows == {"first": 2 * 80, "last": 2 * 40}
    for name, part in session.parts.items():
        assert part.version == sum(s.part == name for s in steps)


def test_every_worker_has_all_nodes_and_gets_its_share_of_the_instances() -> None:
    fired = {0: 0, 1: 0, 2: 0}

    class Counts(gt.AbstractInstrument):
        wants_firings = True

        def on_fired(self, event: Fired) -> None:
            fired[event.worker] += event.rows

    session = gt.Session(
        graph_of_pairs(),
        runtime=gt.Simulated(3),
        sharing=gt.SharedWeights(),
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        instruments=[Counts()],
    )
    session.fit(pairs(60), epochs=1)
    assert len(set(fired.values())) == 1 and fired[0] > 0
    engine = session.state.engine
    assert engine is not None
    for worker in range(3):
        names = {n.partition("#")[0] for n, w in engine.nodes_by_worker().items() if w == worker}
        assert names >= {"first", "group", "sum", "last"}


def test_workers_that_share_weights_are_repeatable_and_learn() -> None:
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=4)
    found = []
    for _ in range(2):
        session = gt.Session(
            graph_of_pairs(),
            rules=rules,
            runtime=gt.Simulated(2, seed=3, jitter=0.3),
            sharing=gt.SharedWeights(),
        )
        fit = session.fit(pairs(50), epochs=5)
        found.append(_weights(session))
    assert fit.history[-1].loss < 0.5 * fit.history[0].loss
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("runtime", [gt.Simulated(3, jitter=0.5), gt.Threads(2)])
def test_the_bound_on_staleness_holds_for_shared_weights(runtime) -> None:
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=2, max_staleness=1)
    session = gt.Session(
        graph_of_pairs(),
        rules=rules,
        runtime=runtime,
        sharing=gt.SharedWeights(),
        max_active=16,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
    )
    fit = session.fit(pairs(80), epochs=1)
    assert all(s.max <= 1 for s in fit.history[0].staleness.values())


def test_a_checkpoint_in_mid_epoch_holds_what_the_workers_had_added(tmp_path) -> None:
    def made() -> gt.Session:
        rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=16)
        return gt.Session(
            graph_of_pairs(), rules=rules, runtime=gt.Simulated(2), sharing=gt.SharedWeights()
        )

    whole = made()
    whole.fit(pairs(30), epochs=2, folder=tmp_path / "a", checkpoint_every=7, keep_last=20)
    middle = sorted((tmp_path / "a").glob("*-*.safetensors"))[1]
    resumed = made()
    resumed.load(middle)
    resumed.fit(pairs(30), epochs=2, folder=tmp_path / "b", checkpoint_every=7)
    assert all(torch.equal(a, b) for a, b in zip(_weights(whole), _weights(resumed), strict=True))


@pytest.mark.parametrize("runtime", [gt.Threads(1), gt.Threads(2)])
@pytest.mark.parametrize("sharing", [gt.SharedWeights(), gt.Neighbours()], ids=["shared", "copies"])
def test_parts_of_a_graph_that_every_worker_has_cannot_be_placed(runtime, sharing) -> None:
    with pytest.raises(ValueError, match=r"placement=\{'first': 0\} do not go together"):
        gt.Session(
            graph_of_pairs(),
            runtime=runtime,
            sharing=sharing,
            schedule=gt.Schedule(placement={"first": 0}),
        )


def test_shared_weights_beside_modules_that_keep_graphs_are_refused() -> None:
    """``functional_call`` swaps the weights of the module that all workers share."""
    graph = gt.Graph()
    graph.input("x", bundle=True).through(nn.Linear(2, 2), keep="graph", name="map").output()
    with pytest.raises(ValueError, match=r"keep='graph' of \['map'\] do not go together"):
        gt.Session(graph, runtime=gt.Threads(2), sharing=gt.SharedWeights())


@pytest.mark.parametrize("rule", [gt.DelayCompensated(), gt.GapAware()], ids=str)
def test_compensation_goes_with_shared_weights_on_no_runtime(rule) -> None:
    """It wants graphs that are kept, and shared weights none; so processes lack nothing."""
    without = r"DelayCompensated|GapAware"
    for runtime in (gt.Threads(2), gt.Simulated(2), gt.Processes(2)):
        for keep, words in (("inputs", without), ("graph", r"keep='graph' of \['map'\] do not go")):
            graph = gt.Graph()
            part = gt.Part(nn.Linear(2, 2), delay=rule, keep=keep)
            rows = graph.input("x", bundle=True).through(part, name="map")
            rows.loss(lambda y: y.square().sum(1))
            with pytest.raises((ValueError, gt.GraphError), match=words):
                made = gt.Session(graph, runtime=runtime, sharing=gt.SharedWeights())
                made.fit([gt.Instance({"x": torch.ones(1, 2)})], epochs=1)


def test_what_in_flight_counts_is_said_or_refused() -> None:
    with pytest.raises(ValueError, match=r"in_flight='some'\): give 'all'"):
        gt.SharedWeights(in_flight="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drain=True do not go together: a minibatch is of all"):
        gt.Session(
            graph_of_pairs(),
            runtime=gt.Threads(2),
            sharing=gt.SharedWeights(in_flight="each"),
            schedule=gt.Schedule(drain=True),
        )


@pytest.mark.parametrize(("in_flight", "most"), [("all", 6), ("each", 12)])
def test_each_worker_has_as_many_in_flight_as_were_asked_for(in_flight, most) -> None:
    active: list[int] = []

    class Looks(gt.AbstractInstrument):
        wants_firings = True

        def on_fired(self, event: Fired) -> None:
            engine = session.state.engine
            assert engine is not None
            active.append(engine.controller.active)

    session = gt.Session(
        graph_of_pairs(),
        runtime=gt.Simulated(2),
        sharing=gt.SharedWeights(in_flight=in_flight),
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        max_active=6,
        instruments=[Looks()],
    )
    session.fit(pairs(60), epochs=1)
    assert max(active) == most
