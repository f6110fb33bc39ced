"""Copies come together: how far the spread shrinks by meetings, on every graph, at every speed.

Without gradients nothing moves the copies but their meetings. The spread is Σ |x_i - mean|².
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD

from geartrain.sharing.exchange import AbstractExchange
from geartrain.sharing.exchanges.centre import DelayedNesterov, ElasticAverage
from geartrain.sharing.exchanges.foreign import CompensatedNeighbours, StalenessAware
from geartrain.sharing.exchanges.gossip import DecentralizedSGD, PairAverage
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.exchanges.periodic import DiLoCo, PeriodicAverage
from geartrain.sharing.exchanges.pushsum import PushSum
from geartrain.sharing.member import Member
from geartrain.sharing.mixing import metropolis
from geartrain.sharing.topology import Torus, topology_of
from tests.rigs.products import halved

RATE = 0.1  # of the copies' optimisers
GRAPHS = {
    "pair": (2, "full"),
    "ring of 3": (3, "ring"),
    "ring of 4": (4, "ring"),
    "ring of 5": (5, "ring"),
    "ring of 7": (7, "ring"),
    "torus 3x3": (9, Torus(3, 3)),
    "torus 4x4": (16, "torus"),
    "full 4": (4, "full"),
    "star": (5, [(0, 1), (0, 2), (0, 3), (0, 4)]),
    "kite": (5, [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4)]),
}
SPEEDS = {"equal": [1.0] * 16, "one slow": [0.25, *[1.0] * 15], "mixed": [1, 0.5, 1.7, 0.3] * 4}
PACES = [("equal", 0.0), ("one slow", 0.3), ("mixed", 1.5)]
SECONDS = 40  # of which an own gradient takes one, at speed 1
MIXERS = {
    "d-psgd": DecentralizedSGD,
    "push-sum": PushSum,
    "push-sum to all": partial(PushSum, rotate=False),
    "elastic": partial(ElasticAverage, 0.4, every=1),
    "average": partial(PeriodicAverage, 4),
    "diloco": partial(DiLoCo, 4),
    "async-local-sgd": partial(DelayedNesterov, 4, momentum=0.5),
    "weights": PairAverage,
    "weights, two at once": partial(PairAverage, at_once=2),
}
AT_ONCE = {"average", "diloco"}  # all have become one
MOVED = {"elastic", "diloco", "async-local-sgd"}  # the agreed is not the mean of the copies
ODD = [g for g in GRAPHS if g not in ("pair", "ring of 4", "torus 4x4", "star")]
SIZES = ("ring of 3", "torus 3x3")  # enough for those who ask for no neighbours


def everywhere(test):
    """On every graph, at equal and other speeds, on links of no, of short and of long latency."""
    return halved(graph=[*GRAPHS], pace=PACES)(test)


def spread(x: Tensor) -> float:
    return float((x - x.mean(0)).square().sum())


def run(copies, exchange, graph, pace, gradient, seconds=SECONDS):
    """Copies that have gone on by the clock and come to rest; x before; own gradients."""
    (n, topology), (speeds, latency) = GRAPHS[graph], pace
    hand = copies(exchange, n=n, topology=topology)
    before = hand.x
    made = hand.clocked(seconds, gradient, SPEEDS[speeds], latency)
    hand.settle()
    return hand, before, made


class Written(AbstractExchange):
    """Lets pairs meet, and writes down who did, in the order of the answers."""

    def __init__(self, inner: PairAverage) -> None:
        super().__init__(inner.every)
        self.inner = inner
        self.met: list[tuple[int, int]] = []

    def prepare(self, members: Sequence[Member]) -> None:
        self.inner.prepare(members)

    def stepped(self, me, gradients):
        self.inner.stepped(me, gradients)
        self._note(me)

    def received(self, me, letters):
        self.inner.received(me, letters)
        self._note(me)

    def finish(self, members):
        return self.inner.finish(members)

    def _note(self, me: Member) -> None:
        self.met += [(x.receiver, me.index) for x in me.outbox if x.kind == "answer"]


def means_of_pairs(x: Tensor, met: Sequence[tuple[int, int]]) -> Tensor:
    x = x.clone()
    for i, j in met:
        x[i] = x[j] = (x[i] + x[j]) / 2
    return x


def gap(n: int, met: Sequence[tuple[int, int]]) -> float:
    """The second least eigenvalue of the Laplacian of who met how often."""
    laplacian = torch.zeros(n, n, dtype=torch.float64)
    for i, j in met:
        e = torch.zeros(n, dtype=torch.float64)
        e[i], e[j] = 1, -1
        laplacian += torch.outer(e, e) / len(met)
    return float(torch.linalg.eigvalsh(laplacian)[1])


@everywhere
def test_pairs_become_their_mean_one_meeting_after_the_other_and_come_together(
    copies, still, graph, pace
):
    hand, before, made = run(copies, Written(PairAverage()), graph, pace, still)
    n, met = len(hand.members), hand.exchange.met
    torch.testing.assert_close(hand.x, means_of_pairs(before, met), rtol=1e-12, atol=1e-12)
    assert len(met) >= made / (9 if pace[1] > 1 else 5)
    assert 0 < gap(n, met)  # whoever is connected has met
    assert spread(hand.x) < max((1 - gap(n, met) / 2) ** len(met) * spread(before), 1e-24)


@pytest.mark.parametrize("graph", [g for g in GRAPHS if g != "torus 4x4"])
def test_pairs_meet_on_every_link(copies, still, graph):
    hand, _, _ = run(copies, Written(PairAverage()), graph, ("equal", 0.0), still, 90)
    n, topology = GRAPHS[graph]
    neighbours = topology_of(topology).neighbours(n)
    met = {(min(pair), max(pair)) for pair in hand.exchange.met}
    assert met == {(k, j) for k in range(n) for j in neighbours[k] if k < j}


@everywhere
def test_every_offer_is_answered_and_counted(copies, noise, graph, pace):
    hand, _, _ = run(copies, Written(PairAverage()), graph, pace, noise, 20)
    ledgers = [m.ledger for m in hand.members]
    assert sum(x.sent for x in ledgers) == 2 * len(hand.exchange.met)  # an offer and an answer
    assert sum(x.meetings for x in ledgers) == 2 * len(hand.exchange.met)  # each counts it
    assert sum(x.declined for x in ledgers) == 0
    assert not any(hand.exchange.inner.awaited(m) for m in hand.members)


@st.composite
def connected_graphs(draw):
    n = draw(st.integers(2, 8))
    tree = [(draw(st.integers(0, k - 1)), k) for k in range(1, n)]
    pairs = [(a, b) for b in range(n) for a in range(b)]
    return n, [*tree, *draw(st.lists(st.sampled_from(pairs), max_size=2 * n))]


SOME_SPEEDS = st.lists(st.sampled_from([0.25, 0.6, 1.0, 1.0, 1.7, 3.0]), min_size=8, max_size=8)


@settings(max_examples=12)
@given(connected_graphs(), SOME_SPEEDS, st.sampled_from([0.0, 0.1, 1.0, 3.0]), st.integers(0, 5))
def test_pairs_mix_on_random_connected_graphs_at_random_speeds(
    copies, graph, speeds, latency, seed
):
    n, edges = graph
    hand = copies(Written(PairAverage(seed=seed)), n=n, topology=edges)
    before, draw = hand.x, torch.Generator().manual_seed(seed)
    given_to_all = torch.zeros(3, dtype=torch.float64)

    def noise(_: int) -> Tensor:
        g = torch.randn(3, dtype=torch.float64, generator=draw)
        given_to_all.add_(g)
        return g

    hand.clocked(5, noise, speeds, latency)
    hand.settle()
    torch.testing.assert_close(hand.x.sum(0), before.sum(0) - RATE * given_to_all)
    noisy, quiet = len(hand.exchange.met), hand.x
    hand.clocked(20 + 5 * n, lambda _: torch.zeros(3, dtype=torch.float64), speeds, latency)
    hand.settle()
    met = hand.exchange.met[noisy:]
    torch.testing.assert_close(hand.x, means_of_pairs(quiet, met), rtol=1e-9, atol=1e-12)
    assert 0 < gap(n, met)
    assert spread(hand.x) < max((1 - gap(n, met) / 2) ** len(met) * spread(quiet), 1e-24)
    assert not any(m.ledger.declined for m in hand.members)


@halved(
    case=[
        (m, g) for m, make in MIXERS.items() for g in ODD if make().needs_neighbours or g in SIZES
    ],
    pace=PACES,
)
def test_copies_that_mix_weights_come_together(copies, still, case, pace):
    name, graph = case
    hand, before, _ = run(copies, MIXERS[name](), graph, pace, still, 25)
    assert spread(hand.x) < (1e-20 if name in AT_ONCE else 0.1) * spread(before)
    if name not in MOVED:
        agreed = hand.exchange.consensus(hand.members)
        agreed = hand.x.mean(0) if agreed is None else agreed[0].flatten()
        torch.testing.assert_close(agreed, before.mean(0), rtol=1e-9, atol=1e-12)
    assert all(m.ledger.meetings > 0 for m in hand.members)
    assert not any(m.ledger.declined for m in hand.members)


@everywhere
def test_rounds_of_d_psgd_are_powers_of_the_matrix(copies, still, graph, pace):
    hand, before, _ = run(copies, DecentralizedSGD(), graph, pace, still)
    n, topology = GRAPHS[graph]
    matrix = torch.tensor(metropolis(topology_of(topology).neighbours(n)), dtype=torch.float64)
    (rounds,) = {m.numbers["round"] for m in hand.members}
    want = torch.linalg.matrix_power(matrix, int(rounds)) @ before
    torch.testing.assert_close(hand.x, want, rtol=1e-10, atol=1e-12)
    assert {m.ledger.meetings for m in hand.members} == {rounds}
    speeds, latency = pace
    assert rounds >= SECONDS * min(SPEEDS[speeds][:n]) / (1 + latency) - 2


@pytest.mark.parametrize("graph", SIZES)
@pytest.mark.parametrize("make", [NearestNeighbours, StalenessAware, CompensatedNeighbours])
def test_gradients_alone_bring_nobody_closer(copies, still, make, graph):
    hand, before, _ = run(copies, make(), graph, ("mixed", 0.3), still, 10)
    assert torch.equal(hand.x, before)
    assert not any(m.ledger.meetings for m in hand.members)


GRADIENTS = {
    "published": NearestNeighbours,
    "every fourth": partial(NearestNeighbours, 4),
    "a fifth": partial(NearestNeighbours, scale=0.2),
    "staleness-aware": StalenessAware,
    "delay-compensated": partial(CompensatedNeighbours, 0.001),
}


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        *(("published", graph) for graph in GRAPHS if graph != "torus 4x4"),
        *((name, graph) for name in GRADIENTS for graph in ("ring of 5", "full 4")),
        *(pytest.param(name, "torus 3x3", marks=pytest.mark.slow) for name in GRADIENTS),
    ],
)
def test_copies_that_send_gradients_drift_apart_just_where_they_are_advised_against(
    copies, name, graph
):
    n, topology = GRAPHS[graph]
    hand = copies(GRADIENTS[name](), n=n, topology=topology, optimizer=partial(SGD, lr=0.05))
    before = hand.x
    weights = [m.weights()[0].flatten() for m in hand.members]
    hand.clocked(40, lambda k: weights[k])  # the gradient of half the square
    hand.settle()
    if hand.exchange.advice() is None:
        assert spread(hand.x) < 1.01 * spread(before)
    else:
        assert spread(hand.x) > 1.5 * spread(before)


def test_advice_gives_the_eigenvalue_and_a_scale_that_brings_copies_together(copies):
    for n, topology, least, scale in (
        (4, "ring", "-1.00", "0.33"),
        (5, "ring", "-0.62", "0.33"),
        (16, "torus", "-3.00", "0.2"),
        (8, "exponential", "-0.71", "0.25"),
    ):
        advice = copies(NearestNeighbours(), n=n, topology=topology).exchange.advice()
        assert f"least eigenvalue of I + A, A being this graph, is {least}: below 0" in advice
        assert f"averages, or NearestNeighbours(scale={scale}), or topology='full'" in advice
        again = NearestNeighbours(scale=float(scale))
        assert copies(again, n=n, topology=topology).exchange.advice() is None
    often = copies(NearestNeighbours(2), n=16, topology="torus").exchange.advice()
    assert "I + 0.5 A, A being this graph, is -1.00" in often and "(scale=0.4)" in often


@pytest.mark.parametrize(
    "make",
    [
        partial(DecentralizedSGD, torch.eye(4).tolist()),
        partial(DecentralizedSGD, [[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]] * 2),
        partial(PushSum, matrix=[[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]] * 2, least=0.01),
    ],
)
def test_a_matrix_by_which_some_difference_stays_is_advised_against(copies, make):
    hand = copies(make())
    assert "absolute value 1" in hand.exchange.advice()
    assert copies(DecentralizedSGD()).exchange.advice() is None
