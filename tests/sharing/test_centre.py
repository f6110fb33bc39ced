"""EASGD and asynchronous local SGD: copies that meet a centre."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from geartrain.sharing.exchanges.centre import DelayedNesterov, ElasticAverage

RATE = 0.1  # of the copies' optimisers
MIXERS = [partial(ElasticAverage, every=2), partial(DelayedNesterov, 2)]


def gradients(rounds, n=4):
    return torch.randn(
        rounds, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )


def centre(hand):
    return hand.exchange.keeper.tensors["centre"][0].clone().flatten()


def under_way(hand):
    """What answers on the links still take from the copies."""
    letters = [x for link in hand.links.values() for x in link if x.kind == "answer"]
    return sum((x.tensors[0].flatten() for x in letters), torch.zeros(3, dtype=torch.float64))


def test_without_stiffness_copies_train_alone_to_the_bit(copies):
    hand, alone = copies(ElasticAverage(0.0, every=1)), copies(ElasticAverage(every=10**6))
    for each in (hand, alone):
        each.rounds(gradients(5))
    assert torch.equal(hand.x, alone.x)
    assert hand.members[1].ledger.sent == 5


@pytest.mark.parametrize("seed", range(5))
def test_springs_keep_the_sum_of_centre_and_copies(copies, still, seed):
    hand = copies(ElasticAverage(0.2, every=2))
    before = hand.x.sum(0) + centre(hand)

    def check():
        now = hand.x.sum(0) + centre(hand) - under_way(hand)
        torch.testing.assert_close(now, before, rtol=1e-10, atol=1e-10)

    hand.shuffle(seed, 200, still, after=check)
    hand.settle()
    check()


def test_one_pull_by_hand(copies):
    hand = copies(ElasticAverage(0.25, every=1), n=2)
    (a, b), c = hand.x, centre(hand)
    torch.testing.assert_close(c, (a + b) / 2)
    hand.step(1, torch.zeros(3, dtype=torch.float64))
    hand.deliver_all()
    torch.testing.assert_close(centre(hand), c + 0.25 * (b - c))
    torch.testing.assert_close(hand.x[1], b - 0.25 * (b - c))


def test_springs_bring_copies_together(copies, still):
    hand = copies(ElasticAverage(every=1))
    hand.shuffle(0, 1500, still)
    hand.settle()
    torch.testing.assert_close(hand.x, centre(hand).expand(4, 3), rtol=1e-6, atol=1e-6)


def test_the_centre_is_the_consensus(copies, noise):
    for make in MIXERS:
        hand = copies(make())
        hand.shuffle(0, 80, noise)
        hand.settle()
        (found,) = hand.exchange.consensus(hand.members)
        assert torch.equal(found.flatten(), centre(hand))


def test_asynchronous_local_sgd_of_one_copy_is_nesterov(copies):
    hand = copies(DelayedNesterov(1, rate=0.5, momentum=0.9), n=1)
    plain = torch.nn.Parameter(hand.x[0].clone())
    optimizer = torch.optim.SGD([plain], lr=0.5 * RATE, momentum=0.9, nesterov=True)
    for g in gradients(10, 1):
        plain.grad = g[0].clone()
        optimizer.step()
        hand.step(0, g[0])
        torch.testing.assert_close(hand.x[0], plain.detach(), rtol=1e-12, atol=1e-12)


def test_momentum_comes_with_every_nth_push(copies):
    hand = copies(DelayedNesterov(1, rate=0.5, momentum=0.9), n=2, equal=True)
    start, (g, h) = centre(hand), gradients(1, 2)[0]
    hand.step(1, g)
    hand.deliver_all()
    one = start - 0.5 * RATE * g / 2
    torch.testing.assert_close(centre(hand), one)
    torch.testing.assert_close(hand.x[1], one)
    hand.step(0, h)
    two = one - 0.5 * RATE * h / 2 - 0.5 * 0.9 * RATE * (g + h) / 2
    torch.testing.assert_close(centre(hand), two)


def test_the_heir_of_a_keeper_goes_on_with_its_momentum_its_sums_and_its_count(copies):
    """Copy 2 alone pushes; in one of two equal runs the keeper leaves between two pushes."""
    stays, goes = (
        copies(DelayedNesterov(1, rate=0.5, momentum=0.9, buffer=3), equal=True) for _ in range(2)
    )
    for n, g in enumerate(gradients(9, 1)):
        if n == 4:  # a momentum of three pushes, one push since
            goes.replicas.leave(0)
        for hand in (stays, goes):
            hand.step(2, g[0])
            hand.deliver_all()
        assert torch.equal(centre(goes), centre(stays))
    assert (stays.exchange.keeper.index, goes.exchange.keeper.index) == (0, 1)
    for key in ("momentum", "pushed"):
        assert key not in goes.members[0].tensors
        assert torch.equal(
            goes.exchange.keeper.tensors[key][0], stays.exchange.keeper.tensors[key][0]
        )


@pytest.mark.parametrize("make", MIXERS)
def test_a_question_to_one_who_has_no_centre_any_more_is_declined_and_counted(copies, still, make):
    hand = copies(make())
    for _ in range(2):
        hand.step(2, still(2))  # asks copy 0
    hand.leave(0)
    hand.replicas.join(0)
    hand.settle()
    assert hand.exchange.keeper.index == 1
    assert [m.ledger.declined for m in hand.members] == [0, 0, 1, 0]
    assert [m.ledger.meetings for m in hand.members] == [0] * 4
    for _ in range(2):
        hand.step(2, still(2))
    hand.settle()
    assert [m.ledger.declined for m in hand.members] == [0, 0, 1, 0]
    assert hand.members[2].ledger.meetings == 1


@pytest.mark.parametrize("seed", range(3))
def test_without_momentum_the_centre_moves_by_all_pushes(copies, noise, seed):
    hand = copies(DelayedNesterov(2, rate=1.0, momentum=0.0, buffer=3), equal=True)
    start = centre(hand)
    given = hand.shuffle(seed, 150, noise)
    hand.settle()
    left = sum(
        (m.tensors["given"][0] - m.weights()[0]).flatten() for m in hand.members
    )  # moved since the last push
    torch.testing.assert_close(
        centre(hand), start - (RATE * given - left) / 3, rtol=1e-9, atol=1e-9
    )


def test_a_slower_copy_takes_fewer_inner_steps(copies):
    hand = copies(DelayedNesterov(8, speeds=[1.0, 0.25, 1.0, 0.01]))
    assert [hand.exchange.steps(m) for m in hand.members] == [8, 2, 8, 1]


def test_a_copy_computes_nothing_until_it_is_answered(copies, noise):
    hand = copies(DelayedNesterov(1))
    hand.step(2, noise(2))
    assert [d.waiting for d in hand.desks] == [False, False, True, False]
    hand.deliver_all()
    assert not hand.desks[2].waiting


@pytest.mark.parametrize("make", MIXERS)
def test_equal_copies_stay_equal(copies, still, make):
    hand = copies(make(), equal=True)
    before = hand.x
    hand.shuffle(0, 200, still)
    hand.settle()
    torch.testing.assert_close(hand.x, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", MIXERS)
@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_centre_outlives_its_keeper_and_nobody_waits_for_ever(copies, noise, make, gone, seed):
    hand = copies(make())
    hand.shuffle(seed, 41, noise)
    kept = centre(hand)
    hand.replicas.leave(gone)
    assert torch.equal(centre(hand), kept)
    assert hand.exchange.keeper.index == (1 if gone == 0 else 0)
    hand.shuffle(seed, 100, noise)
    rounds = [m.rounds for m in hand.members]
    hand.replicas.join(gone)
    hand.shuffle(seed, 200, noise)
    assert all(m.rounds > was for m, was in zip(hand.members, rounds, strict=True))
    hand.settle()


@pytest.mark.parametrize("make", MIXERS)
def test_a_restart_moves_the_centre_to_what_all_have(copies, make):
    hand = copies(make())
    hand.rounds(gradients(5))
    hand.replicas.agree()
    hand.replicas.restart()
    assert torch.equal(hand.x, centre(hand).expand(4, 3))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ElasticAverage(1.0), r"alpha=1.0.*less than 1"),
        (lambda: ElasticAverage(-0.1), "alpha=-0.1"),
        (lambda: ElasticAverage(every=0), "every=0"),
        (lambda: DelayedNesterov(buffer=0), "buffer=0"),
        (lambda: DelayedNesterov(rate=-1.0), "rate=-1.0"),
        (lambda: DelayedNesterov(speeds=[1.0, 0.0]), "speeds="),
        (lambda: DelayedNesterov(speeds=[1.0, 2.0]), "2 speeds for 4 copies; give one a copy"),
    ],
)
def test_what_cannot_work_is_refused(copies, make, reason):
    with pytest.raises(ValueError, match=reason):
        copies(make())
