"""D-PSGD and AD-PSGD: what is mixed, what stays, who waits."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from geartrain.sharing.exchanges.gossip import DecentralizedSGD, PairAverage
from geartrain.sharing.mixing import metropolis
from geartrain.sharing.topology import Exponential, Ring, topology_of
from tests.rigs.products import in_pairs

RATE = 0.1  # of the copies' optimisers
MIXERS = [DecentralizedSGD, PairAverage, partial(PairAverage, at_once=2)]
STAR = [(0, 1), (0, 2), (0, 3)]


def gradients(rounds, n=4):
    return torch.randn(
        rounds, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )


@pytest.mark.parametrize("topology", ["ring", "full", STAR])
def test_rounds_of_d_psgd_are_w_x_minus_the_step(copies, topology):
    hand, given = copies(DecentralizedSGD(), topology=topology), gradients(5)
    matrix = torch.tensor(metropolis(topology_of(topology).neighbours(4)), dtype=torch.float64)
    want = hand.x
    for g in given:
        want = matrix @ want - RATE * g
    hand.rounds(given)
    torch.testing.assert_close(hand.x, want, rtol=1e-12, atol=1e-12)


def test_d_psgd_takes_a_matrix_and_uniform_weights_of_a_directed_graph(copies):
    lazy = 0.5 * torch.eye(4) + 0.5 * torch.tensor(metropolis(Ring().neighbours(4)))
    matrix = lazy.double()
    hand, given = copies(DecentralizedSGD(matrix.tolist())), gradients(1)
    want = matrix @ hand.x - RATE * given[0]
    hand.rounds(given)
    torch.testing.assert_close(hand.x, want, rtol=1e-6, atol=1e-6)
    spread = copies(DecentralizedSGD("uniform"), topology=Exponential())
    mean = spread.x.mean(0)
    spread.rounds(torch.zeros(40, 4, 3, dtype=torch.float64))
    torch.testing.assert_close(spread.x, mean.expand(4, 3), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_random_order_gives_the_same_rounds_of_d_psgd(copies, seed):
    given = gradients(6)
    steady, hand = copies(DecentralizedSGD()), copies(DecentralizedSGD())
    steady.rounds(given)
    taken = [0] * 4

    def next_gradient(k):
        taken[k] += 1
        return given[taken[k] - 1, k]

    generator = torch.Generator().manual_seed(seed)
    while min(taken) < 6:
        free = [k for k in range(4) if taken[k] < 6 and not hand.endpoints[k].waiting]
        links = sorted(hand.links)
        pick = int(torch.randint(len(free) + len(links), (1,), generator=generator))
        if pick < len(free):
            hand.step(free[pick], next_gradient(free[pick]))
        else:
            hand.deliver(links[pick - len(free)])
    hand.settle()
    assert torch.equal(hand.x, steady.x)


@in_pairs(topology=["ring", "torus", "full", STAR], seed=range(4), mixer=MIXERS)
def test_the_sum_of_the_copies_moves_by_the_steps_alone(copies, noise, mixer, topology, seed):
    hand = copies(mixer(), topology=topology)
    before = hand.x.sum(0)
    given = hand.shuffle(seed, 200, noise)
    hand.settle()
    torch.testing.assert_close(hand.x.sum(0), before - RATE * given, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("topology", ["ring", [(0, 1), (1, 2), (2, 0), (2, 3)]])
@pytest.mark.parametrize("mixer", MIXERS)
def test_without_gradients_copies_tend_to_their_mean(copies, still, mixer, topology):
    hand = copies(mixer(), topology=topology)
    mean = hand.x.mean(0)
    hand.shuffle(0, 1500, still)
    hand.settle()
    torch.testing.assert_close(hand.x, mean.expand(4, 3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mixer", MIXERS)
def test_equal_copies_stay_equal(copies, still, mixer):
    hand = copies(mixer(), n=5, equal=True)
    before = hand.x
    hand.shuffle(3, 200, still)
    hand.settle()
    torch.testing.assert_close(hand.x, before, rtol=1e-12, atol=1e-12)


def test_the_end_of_a_stretch_lets_those_without_data_mix_too(copies):
    hand = copies(DecentralizedSGD(), n=5)
    before = hand.x.sum(0)
    hand.step(0, torch.ones(3))  # nobody else has data
    assert hand.endpoints[0].waiting
    hand.settle()
    assert {m.numbers["round"] for m in hand.members} == {1}
    torch.testing.assert_close(hand.x.sum(0), before - RATE)


def test_a_pair_becomes_its_mean_and_keeps_what_it_did_meanwhile(copies):
    hand = copies(PairAverage(every=1), n=2)
    a, b = hand.x
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    hand.step(0, zero)
    hand.step(0, one)  # while its offer is under way
    assert len(hand.links[0, 1]) == 1  # one offer at a time
    hand.deliver((0, 1))
    hand.deliver((1, 0))
    torch.testing.assert_close(hand.x[1], (a + b) / 2)
    torch.testing.assert_close(hand.x[0], (a + b) / 2 - RATE)


@in_pairs(n=[2, 3, 4, 5, 7], seed=range(4), at_once=[1, 2, 3])
def test_pairs_neither_wait_nor_deadlock(copies, noise, n, seed, at_once):
    hand = copies(PairAverage(seed=seed, at_once=at_once), n=n, topology="full")
    hand.shuffle(seed, 300, noise, after=lambda: _nobody_waits(hand))
    hand.settle()
    assert not _awaited(hand)


def _awaited(hand):
    return [k for m in hand.members for k in hand.exchange.awaited(m)]


def _nobody_waits(hand):
    assert not any(e.waiting for e in hand.endpoints)


def test_all_but_those_of_the_highest_level_offer(copies, noise):
    for n, topology, offering in (
        (4, "ring", {0, 2}),
        (3, "ring", {0, 1}),
        (4, "full", {0, 1, 2}),
        (4, STAR, {1, 2, 3}),
    ):
        hand = copies(PairAverage(), n=n, topology=topology)
        for k in range(n):
            hand.step(k, noise(k))
        assert {a for a, _ in hand.links} == offering


def test_one_with_an_open_offer_keeps_what_is_offered_to_it_and_answers_next(copies, noise):
    made = (copies(PairAverage(seed=seed), n=3) for seed in range(20))
    hand = next(hand for hand in made if _one_behind_the_other(hand, noise))
    a, b, c = hand.x
    one = torch.ones(3, dtype=torch.float64)
    hand.deliver((0, 1))
    assert torch.equal(hand.x, torch.stack([a, b, c]))  # 1 has an offer open
    hand.step(1, one)  # and goes on
    hand.deliver((1, 2))
    hand.deliver((2, 1))
    own = -RATE * one
    torch.testing.assert_close(hand.x[2], (b + c) / 2)
    torch.testing.assert_close(hand.x[1], (a + (b + c) / 2 + own) / 2)
    hand.deliver((1, 0))
    torch.testing.assert_close(hand.x[0], hand.x[1])


def _one_behind_the_other(hand, noise):
    hand.step(0, noise(0))
    hand.step(1, noise(1))
    return set(hand.links) == {(0, 1), (1, 2)}


def test_an_offer_that_falls_due_while_one_is_open_is_made_when_the_answer_is_there(copies, still):
    hand = copies(PairAverage(every=2), n=2)
    for _ in range(3):
        hand.step(0, still(0))
    assert len(hand.links[0, 1]) == 1
    hand.deliver_all()
    assert hand.members[0].ledger.sent == 1  # the third step owes none
    for _ in range(3):
        hand.step(0, still(0))  # the fourth offers, the sixth is owed
    hand.deliver((0, 1))
    hand.deliver((1, 0))
    assert hand.members[0].ledger.sent == 3


def test_two_offers_may_be_open_at_once_to_two_neighbours(copies, still):
    hand = copies(PairAverage(at_once=2), topology="ring")
    before = hand.x
    for _ in range(3):
        hand.step(0, still(0))
    assert {link: len(letters) for link, letters in hand.links.items()} == {(0, 1): 1, (0, 3): 1}
    assert sorted(hand.exchange.awaited(hand.members[0])) == [1, 3]
    hand.deliver((0, 1))
    hand.deliver((1, 0))  # the third step's offer is made now
    assert hand.members[0].ledger.sent == 3 and len(hand.links[0, 1]) == 1
    hand.deliver((0, 3))
    hand.deliver((3, 0))
    a, b, _, d = before
    torch.testing.assert_close(hand.x[1], (a + b) / 2)
    torch.testing.assert_close(hand.x[3], (a + d) / 2)
    torch.testing.assert_close(hand.x[0], (b + d) / 2)  # both answers go by what it was before
    hand.settle()
    assert not _awaited(hand)


@pytest.mark.parametrize(("at_once", "made"), [(1, 1), (2, 2)])
def test_offers_that_fell_due_while_none_could_be_made_are_made_at_once(
    copies, still, at_once, made
):
    hand = copies(PairAverage(at_once=at_once), topology="ring")
    for _ in range(9):
        hand.step(0, still(0))
    opened = list(hand.links)
    for a, b in opened:
        hand.deliver((a, b))
    answers = [hand.links.pop((b, a))[0] for a, b in opened]
    for letter in answers:
        hand.replicas.put(letter)
    before = hand.members[0].ledger.sent
    hand.endpoints[0].receive()
    hand._post(0)
    assert hand.members[0].ledger.sent == before + made
    hand.settle()
    assert hand.members[0].ledger.sent == before + made  # and no more are owed


def test_one_with_two_offers_open_answers_those_that_wait_before_it_makes_another(copies, still):
    hand = copies(PairAverage(at_once=2), n=4, topology="full")
    low = next(m.index for m in hand.members if len(_above(hand, m.index)) == 2)
    [asks] = [m.index for m in hand.members if low in _above(hand, m.index)]
    for _ in range(2):
        hand.step(low, still(low))
    first, second = hand.exchange.awaited(hand.members[low])
    while (asks, low) not in hand.links:
        hand.step(asks, still(asks))
    hand.deliver((asks, low))  # kept
    hand.step(low, still(low))  # owes an offer
    hand.deliver((low, first))
    hand.deliver((first, low))
    assert (low, asks) not in hand.links and (low, first) not in hand.links
    hand.deliver((low, second))
    hand.deliver((second, low))
    assert (low, asks) in hand.links and set(hand.exchange.awaited(hand.members[low]))
    hand.settle()


def _above(hand, k):
    return hand.exchange._above[k]


@pytest.mark.parametrize("at_once", [2, 3, 5])
def test_offers_at_once_do_not_throw_copies_to_the_other_side(copies, still, at_once):
    star = [(0, k) for k in range(1, 8)]
    hand = copies(PairAverage(at_once=at_once), n=8, topology=star)
    apart = [(hand.x - hand.x.mean(0)).norm()]
    for _ in range(20):
        for k in range(8):
            for _ in range(at_once):
                hand.step(k, still(k))
        hand.deliver_all()
        apart.append((hand.x - hand.x.mean(0)).norm())
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(apart))
    assert apart[-1] < 1e-2 * apart[0]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_when_one_leaves_nobody_keeps_its_offer_or_waits_for_its_answer(copies, noise, who):
    made = (copies(PairAverage(seed=seed), n=3) for seed in range(20))
    hand = next(hand for hand in made if _one_behind_the_other(hand, noise))
    hand.deliver((0, 1))  # 1 keeps the offer of 0 and waits for 2
    hand.leave(who)
    hand.settle()
    assert not _awaited(hand)
    meetings = {0: {(1, 2)}, 1: set(), 2: {(0, 1)}}[who]
    assert {m.index for m in hand.members if m.ledger.meetings} == {k for p in meetings for k in p}


def test_an_offer_of_before_it_left_is_not_answered_when_it_is_back(copies, noise):
    made = (copies(PairAverage(seed=seed), n=3) for seed in range(20))
    hand = next(hand for hand in made if _one_behind_the_other(hand, noise))
    hand.deliver((0, 1))  # kept
    hand.leave(0)
    hand.replicas.join(0)
    hand.settle()
    assert [m.ledger.meetings for m in hand.members] == [0, 1, 1]


def test_an_offer_that_was_kept_when_the_run_failed_is_never_answered(copies, noise, still):
    made = (copies(PairAverage(seed=seed), n=3) for seed in range(20))
    hand = next(hand for hand in made if _one_behind_the_other(hand, noise))
    hand.deliver((0, 1))  # kept, as 1 has an offer open
    hand.replicas.abandon()
    hand.links.clear()
    before = hand.x
    hand.step(1, still(1))
    assert set(hand.links) == {(1, 2)}  # a new offer, and no answer to 0
    assert torch.equal(hand.x, before)
    hand.settle()
    assert [m.ledger.meetings for m in hand.members] == [0, 1, 1]


def test_an_answer_to_an_offer_of_before_it_left_keeps_the_sum(copies, still):
    hand = copies(PairAverage(), n=2)
    hand.step(0, still(0))
    hand.leave(0)
    hand.replicas.join(0)
    hand.step(0, still(0))  # a second offer
    before = hand.x.sum(0)
    hand.deliver_all()
    torch.testing.assert_close(hand.x.sum(0), before)
    hand.settle()
    assert not _awaited(hand)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("seed", range(4))
def test_copies_leave_and_join_and_nobody_is_waited_for(copies, noise, mixer, seed):
    hand = copies(mixer())
    hand.shuffle(seed, 41, noise)
    hand.replicas.leave(1)
    hand.shuffle(seed, 100, noise)
    there = [m.rounds for m in hand.members]
    hand.replicas.join(1)
    hand.shuffle(seed, 200, noise)
    assert all(m.rounds > was for m, was in zip(hand.members, there, strict=True))
    hand.settle()


@pytest.mark.parametrize(
    ("make", "topology", "reason"),
    [
        (lambda: DecentralizedSGD("best"), "ring", "weights='best'"),
        (lambda: DecentralizedSGD(every=0), "ring", "every=0"),
        (lambda: PairAverage(at_once=0), "ring", r"PairAverage\(at_once=0\)"),
        (DecentralizedSGD, Exponential(), "does not send back"),
        (lambda: DecentralizedSGD("uniform"), STAR, "column 0 sums to"),
        (lambda: DecentralizedSGD([[1.0]]), "ring", "4 rows of 4 were expected"),
        (PairAverage, Exponential(), "PairAverage: between copies 0 and 1 letters go one way"),
    ],
)
def test_what_cannot_work_is_refused(copies, make, topology, reason):
    with pytest.raises(ValueError, match=reason):
        copies(make(), topology=topology)
