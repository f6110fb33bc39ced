"""Copies that come, leave and die in the middle of training: nothing is lost, nothing counted twice
but what is told, and the others go on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import geartrain as gt
from geartrain.errors import StuckError
from geartrain.runtime.costs import Costs
from geartrain.runtime.events import Die, Join, Leave
from geartrain.runtime.simulated import Simulated
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.mixing import check_doubly_stochastic
from geartrain.sharing.neighbours import Neighbours
from geartrain.sharing.replicas import Replicas
from geartrain.sharing.topology import check_connected
from tests.rigs.products import halved
from tests.rigs.told import Told, numbered

SLOW = pytest.mark.slow
ADAM = partial(torch.optim.Adam, lr=0.01)
EXCHANGES: dict[str, Any] = {
    "weights": lambda: "weights",
    "d-psgd": lambda: "d-psgd",
    "gradients": lambda: NearestNeighbours(scale=0.3),
    "lockstep": lambda: NearestNeighbours(lockstep=True),
    "all-reduce": lambda: "all-reduce",
    "push-sum": lambda: "push-sum",
    "average": lambda: gt.PeriodicAverage(3),
    "diloco": lambda: gt.DiLoCo(3),
    "elastic": lambda: gt.ElasticAverage(every=2),
    "async-local-sgd": lambda: gt.DelayedNesterov(3),
}
QUICK = ("weights", "d-psgd", "all-reduce")


def session(sharing: Neighbours, runtime: Simulated, **given: Any) -> tuple[gt.Session, Told]:
    torch.manual_seed(0)
    graph = gt.Graph(run="steps")  # firings enough for something to happen between them
    x = graph.input("x", shape=(2,), dtype=torch.float64)
    x = x.through(nn.Linear(2, 3).double(), name="a").through(nn.Tanh(), name="tanh")
    x.through(nn.Linear(3, 1).double(), name="b").loss(lambda y: y.square().sum(1), name="loss")
    rules = gt.Rules(optimizer=ADAM, update_every=4)
    seen = Told()
    given = {"max_active": 3, "instruments": [seen], **given}
    return gt.Session(graph, rules=rules, runtime=runtime, sharing=sharing, **given), seen


def cluster(events: list[Any], n: int = 4, seed: int = 0, latency_s: float = 1e-3) -> Simulated:
    costs = Costs(firing_s=1e-4, latency_s=latency_s)
    return Simulated(n, seed=seed, jitter=0.5, costs=costs, events=events)


def replicas_of(s: gt.Session) -> Replicas:
    assert isinstance(s.state.sharing, Replicas)
    return s.state.sharing


times = st.floats(0, 0.008)
comings = st.lists(
    st.tuples(st.sampled_from([Leave, Die]), st.integers(1, 3), times, times), max_size=4
)


@pytest.mark.parametrize(
    "exchange", [pytest.param(x, marks=[SLOW] * (x not in QUICK)) for x in EXCHANGES]
)
@settings(max_examples=6)
@given(comings=comings, seed=st.integers(0, 99), shards=st.sampled_from(["static", "pull"]))
def test_whoever_comes_and_goes_nothing_is_lost_or_counted_twice(exchange, comings, seed, shards):
    events = [
        event
        for kind, worker, at, away in comings
        for event in (kind(worker, at), Join(worker, at + away))
    ]
    sharing = Neighbours(copies=4, exchange=EXCHANGES[exchange](), shards=shards)
    s, seen = session(sharing, cluster(events, seed=seed))
    fit = s.fit(numbered(25), epochs=2)
    assert fit.instances == seen.total("instances") == 50  # each once, whatever died
    assert fit.repeated == sum(e.unfinished for e in seen.restored)
    assert fit.deaths == len(seen.restored) <= sum(isinstance(e, Die) for e in events)
    assert all(e.source == "copies" and e.repeated == 0 for e in seen.restored)
    assert seen.total("sent") == sum(seen.total(n) for n in ("applied", "dropped", "lost"))
    for part in s.trained_parts.values():
        assert all(bool(p.isfinite().all()) for p in part.module.parameters())


@pytest.mark.parametrize("shards", ["static", "pull"])
def test_what_was_in_flight_in_a_copy_that_dies_is_trained_by_others(shards):
    """Every instance reaches the loss of a copy that lives to tell, and is counted there once."""
    sharing = Neighbours(copies=3, exchange="weights", shards=shards)
    s, seen = session(sharing, cluster([Die(1, 0.004)], n=3), max_active=5)
    fit = s.fit(numbered(60), epochs=1)
    (death,) = seen.restored
    assert death.worker == 1 and death.unfinished > 0
    assert (fit.deaths, fit.repeated) == (1, death.unfinished)
    assert fit.instances == 60
    finished = [c.instances for c in seen.exchanged[-1].copies]
    assert sum(finished) == 60 and 0 < finished[1] < min(finished[0], finished[2])
    assert replicas_of(s).present() == [True, False, True]


@halved(
    kind={"leave": Leave, "die": Die},
    topology={"ring": "ring", "torus": "torus", "full": "full", "line": [(0, 1), (1, 2), (2, 3)]},
)
def test_those_who_are_left_are_linked_anew_and_mix_by_a_doubly_stochastic_matrix(kind, topology):
    gone = (1, 2) if topology != "torus" else (1, 2, 4)
    n = 6 if topology == "torus" else 4
    sharing = Neighbours(copies=n, exchange="d-psgd", topology=topology)
    s, _ = session(sharing, cluster([kind(k, 0.001 * k) for k in gone], n=n))
    s.fit(numbered(60), epochs=2)
    for endpoints in replicas_of(s).endpoints.values():
        members = [e.member for e in endpoints]
        there = [m.index for m in members if m.present]
        links = [list(m.neighbours) for m in members]
        assert all(not links[k] for k in gone)
        check_connected([[there.index(j) for j in links[k]] for k in there])
        exchange = endpoints[0].exchange
        assert isinstance(exchange, gt.DecentralizedSGD)
        matrix = exchange._matrix
        check_doubly_stochastic(matrix, links)
        for k in there:
            assert sum(matrix[k][j] for j in there) == pytest.approx(1)


@pytest.mark.parametrize(
    "exchange", ["d-psgd", *(pytest.param(x, marks=SLOW) for x in ("weights", "push-sum"))]
)
def test_after_deaths_the_copies_that_are_left_come_together(exchange):
    """On a ring of five without two that are no neighbours, which would be cut in two."""
    events = [Die(1, 0.002), Die(3, 0.003)]
    still = gt.Rules(optimizer=partial(torch.optim.SGD, lr=1e-9), update_every=2)

    def start(module: nn.Module, k: int) -> None:
        for p in module.parameters():
            nn.init.constant_(p, float(k))

    sharing = Neighbours(copies=5, exchange=exchange, start=start)
    s, _ = session(sharing, cluster(events, n=5))
    s = gt.Session(s.graph, rules=still, runtime=s.runtime, sharing=sharing, max_active=2)
    s.fit(numbered(200), epochs=1)
    rest = [
        torch.cat([p.detach().flatten() for p in part.module.parameters()])
        for name, part in s.trained_parts.items()
        if name in ("b#0", "b#2", "b#4")
    ]
    spread = float(torch.stack(rest).std(0).max())
    assert spread < 0.02  # they began 2 apart
    assert replicas_of(s).present() == [True, False, True, False, True]


def test_a_newcomer_takes_part_at_once_and_its_optimiser_goes_on():
    s, seen = session(Neighbours(copies=3), cluster([Die(2, 0.003), Join(2, 0.006)], n=3))
    s.fit(numbered(60), epochs=2)
    (joined,) = seen.joined
    assert (joined.worker, list(joined.copies)) == (2, [2]) and joined.time_s >= 0.006
    assert all(c.present for c in seen.exchanged[-1].copies)
    assert seen.exchanged[-1].copies[2].instances > 0
    optimizer = replicas_of(s).endpoints["a"][2].member.part.optimizer
    assert optimizer is not None
    steps = [float(state["step"]) for state in optimizer.state.values()]
    assert min(steps) > seen.exchanged[-1].copies[2].rounds  # not those of its own alone


@pytest.mark.parametrize("exchange", ["d-psgd", "push-sum"])
def test_where_all_are_there_again_they_are_linked_as_they_were(exchange):
    sharing = Neighbours(copies=4, exchange=exchange, topology="ring")
    s, _ = session(sharing, cluster([]))
    replicas = replicas_of(s)

    def linked() -> list[Any]:
        members = [e.member for endpoints in replicas.endpoints.values() for e in endpoints]
        return [({*m.neighbours}, {*m.senders}) for m in members]

    before = linked()
    for present in (False, True):
        replicas.set_present(2, present)
        replicas.regroup()
        assert (linked() == before) is present
    s.fit(numbered(40), epochs=1)
    assert all(e.member.ledger.came for e in replicas.all_endpoints())


@pytest.mark.parametrize(("exchange", "together"), [("all-reduce", [0, 1, 3]), ("weights", [])])
def test_copies_that_go_in_rounds_begin_anew_together_as_many_as_are_there(exchange, together):
    s, _ = session(Neighbours(copies=4, exchange=exchange), cluster([]))
    replicas_of(s).set_present(2, False)
    assert [*replicas_of(s).going_together()] == together


def test_copies_that_are_split_die_as_a_whole():
    sharing = Neighbours(copies=3, exchange="weights")
    s, seen = session(sharing, cluster([Die(3, 0.002), Join(2, 0.005)], n=6), max_active=4)
    fit = s.fit(numbered(90), epochs=1)
    assert (fit.instances, fit.deaths) == (90, 1)
    assert [list(e.copies) for e in seen.joined] == [[1]]
    assert replicas_of(s).present() == [True] * 3


def test_training_waits_for_the_least_number_of_copies_or_says_that_they_do_not_come():
    events = [Leave(1, 0.002), Leave(2, 0.002), Join(1, 5.0)]
    s, _ = session(Neighbours(copies=3, least=2), cluster(events, n=3))
    fit = s.fit(numbered(60), epochs=1)
    assert fit.instances == 60 and fit.train_seconds > 5.0
    s, _ = session(Neighbours(copies=3, least=2), cluster(events[:2], n=3))
    with pytest.raises(StuckError, match="fewer than least=2 copies"):
        s.fit(numbered(60), epochs=1)


def test_where_fewer_than_the_least_are_left_by_a_death_training_goes_back():
    s, seen = session(Neighbours(copies=3, least=3), cluster([Die(1, 0.002), Join(1, 0.01)], n=3))
    fit = s.fit(numbered(60), epochs=1)
    (death,) = seen.restored
    assert death.source == "memory" and (fit.instances, fit.deaths) == (60, 1)
    assert fit.repeated == death.repeated > 0
    assert fit.train_seconds < 1.0  # virtual: a death takes no real ones


@pytest.mark.parametrize("least", [0, 3])
def test_a_least_number_that_is_none_of_copies_is_refused(least):
    with pytest.raises(ValueError, match=f"least={least}"):
        Neighbours(copies=2, least=least)


def test_equal_copies_are_equal_after_the_death_of_whoever_was_to_send_their_mean():
    for at in (2, 5, 9):
        s, _ = session(
            Neighbours(copies=3, exchange="all-reduce"), cluster([Die(at % 3, 0.0007 * at)], n=3)
        )
        fit = s.fit(numbered(40), epochs=1)
        assert fit.instances == 40 and fit.deaths == 1
        there = [k for k in range(3) if replicas_of(s).present()[k]]
        for name in ("a", "b"):
            first, second = (s.trained_parts[f"{name}#{k}"].module.parameters() for k in there)
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
