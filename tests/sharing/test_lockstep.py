"""Gradients to neighbours in lock-step, letter by letter; and what a run that failed leaves."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from geartrain.sharing.exchanges.allreduce import AllReduce
from geartrain.sharing.exchanges.centre import DelayedNesterov, ElasticAverage
from geartrain.sharing.exchanges.gossip import DecentralizedSGD, PairAverage
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.exchanges.periodic import DiLoCo, PeriodicAverage
from geartrain.sharing.exchanges.pushsum import PushSum

RATE = 0.1  # of the copies' optimisers
Lockstep = partial(NearestNeighbours, lockstep=True)


def gradients(rounds, n):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rounds, n, 3, dtype=torch.float64, generator=generator)


def waiting(hand):
    return [e.waiting for e in hand.endpoints]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 3])
def test_in_any_order_every_gradient_of_a_neighbour_is_taken_once(copies, noise, seed, every):
    """Also at the end of a segment, where some have come further than others."""
    hand = copies(Lockstep(every), n=5)
    start, own = hand.x, torch.zeros(5, 3, dtype=torch.float64)
    sent, rounds = torch.zeros_like(own), [0] * 5

    def gradient(k):
        given = noise(k)
        rounds[k] += 1
        own[k] += given
        if rounds[k] % every == 0:
            sent[k] += given
        return given

    hand.shuffle(seed, 150, gradient)
    assert max(rounds) - min(rounds) <= 3 * every  # of neighbours, one exchange at most
    hand.settle()
    assert [m.rounds for m in hand.members] == rounds
    close(hand.x, start - RATE * (own + sent.roll(1, 0) + sent.roll(-1, 0)))


def test_one_waits_for_this_round_and_keeps_what_comes_of_the_next(copies):
    hand, (g, h) = copies(Lockstep(), n=3), gradients(2, 3)
    start = hand.x
    for k in range(3):
        hand.step(k, g[k])
    assert waiting(hand) == [True] * 3
    for link in ((0, 1), (2, 1)):
        hand.deliver(link)
    assert waiting(hand) == [True, False, True]
    hand.step(1, h[1])
    for _ in range(2):  # of the first round and of the second
        hand.deliver((1, 0))
    close(hand.x[0], start[0] - RATE * g[0])
    hand.deliver((2, 0))
    close(hand.x[0], start[0] - RATE * g.sum(0))
    assert waiting(hand) == [False, True, True]
    hand.step(0, h[0])
    assert waiting(hand) == [True, True, True]
    hand.deliver_all()  # copy 2 is in its first round, and has those of the second at once
    assert waiting(hand) == [True, True, False]
    hand.step(2, h[2])
    hand.deliver_all()
    assert waiting(hand) == [False] * 3
    close(hand.x, start - RATE * (g + h).sum(0))


def test_between_exchanges_nobody_waits(copies):
    hand, g = copies(Lockstep(2), n=3), gradients(2, 3)
    hand.step(0, g[0, 0])
    assert waiting(hand) == [False] * 3 and not hand.links
    hand.step(0, g[1, 0])
    assert waiting(hand) == [True, False, False]


def test_those_who_wait_for_one_that_leaves_go_on_without_it(copies):
    hand, (g,) = copies(Lockstep(), n=3), gradients(1, 3)
    start = hand.x
    for k in (0, 1):
        hand.step(k, g[k])
    hand.deliver_all()
    assert waiting(hand) == [True, True, False]
    close(hand.x[:2], start[:2] - RATE * g[:2])
    hand.leave(2)
    assert waiting(hand) == [False] * 3
    close(hand.x[:2], start[:2] - RATE * g[:2].sum(0))


def test_one_that_joins_is_awaited_from_the_next_round_on(copies):
    hand, g = copies(Lockstep(), n=3), gradients(4, 3)
    hand.leave(2)
    for row in g[:2]:
        for k in (0, 1):
            hand.step(k, row[k])
        hand.deliver_all()
    hand.step(0, g[2, 0])
    hand.replicas.join(2)
    assert (hand.members[2].rounds, waiting(hand)) == (3, [True, False, False])
    hand.step(1, g[2, 1])
    hand.deliver_all()
    assert waiting(hand) == [False] * 3  # that round was theirs alone
    before = hand.x
    for k in (0, 1):
        hand.step(k, g[3, k])
    hand.deliver_all()
    assert waiting(hand) == [True, True, False]
    hand.step(2, g[3, 2])
    hand.deliver_all()
    assert waiting(hand) == [False] * 3
    close(hand.x[:2], before[:2] - RATE * g[3].sum(0))
    late = g[2, :2].sum(0)  # came to it when it was there, and is taken with the next round
    close(hand.x[2], before[2] - RATE * (g[3].sum(0) + late))


def abandoned(hand):
    hand.replicas.abandon()
    hand.links.clear()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("end", [abandoned, lambda hand: hand.settle()], ids=["failed", "settled"])
def test_after_a_stretch_in_which_some_have_come_further_rounds_are_one_again(copies, end, every):
    hand, g = copies(Lockstep(every), n=3), gradients(3 * every, 3)
    for row in g[:every]:
        for k in (0, 1):
            hand.step(k, row[k])
    assert waiting(hand) == [True, True, False]
    end(hand)
    before = hand.x
    hand.rounds(g[every : 2 * every])  # nobody is released
    assert waiting(hand) == [False] * 3
    hand.rounds(g[2 * every :])
    assert waiting(hand) == [False] * 3
    own, sent = g[every:].sum((0, 1)), g[2 * every - 1 :: every].sum((0, 1))
    if every == 1:
        close(hand.x, before - RATE * own)
    close(hand.x.sum(0), before.sum(0) - RATE * (own + 2 * sent))


def test_letters_under_way_when_a_run_fails_are_lost_by_the_first_copy(copies, noise):
    hand = copies(NearestNeighbours(), n=3)
    for _ in range(2):  # so that more is lost than the first copy has sent
        for k in range(3):
            hand.step(k, noise(k))
    hand.deliver((2, 0))
    abandoned(hand)
    assert [m.ledger.lost for m in hand.members] == [11, 0, 0]
    hand.replicas.check_settled()
    abandoned(hand)  # nothing more was under way
    assert [m.ledger.lost for m in hand.members] == [11, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        Lockstep,
        NearestNeighbours,
        AllReduce,
        PairAverage,
        DecentralizedSGD,
        PushSum,
        partial(PeriodicAverage, 2),
        partial(DiLoCo, 2),
        partial(ElasticAverage, every=1),
        partial(DelayedNesterov, 1),
    ],
)
def test_after_a_run_that_failed_nobody_waits_and_the_books_are_closed(copies, noise, make):
    hand = copies(make())
    hand.shuffle(2, 45, noise)
    hand.step(min(k for k, e in enumerate(hand.endpoints) if not e.waiting), noise(0))
    under_way = [x for link in hand.links.values() for x in link if not x.collective]
    lost = sum(m.ledger.lost for m in hand.members)
    hand.replicas.abandon()
    hand.links.clear()
    assert waiting(hand) == [False] * 4
    assert [(m.mail, m.outbox, m.steps) for m in hand.members] == [(0, [], [])] * 4
    found = sum(m.ledger.lost for m in hand.members) - lost
    assert found == sum(x.count for x in under_way)
    hand.replicas.check_settled()
    before = hand.x
    for _ in range(2):
        for k in range(4):
            hand.step(k, noise(k))
        hand.settle()
    assert (hand.x != before).all()
