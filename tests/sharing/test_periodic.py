"""Meetings of all copies: averages and DiLoCo."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from geartrain.sharing.exchanges.periodic import DiLoCo, PeriodicAverage

RATE = 0.1  # of the copies' optimisers
PLAIN = partial(DiLoCo, rate=1.0, momentum=0.0)
MIXERS = [PeriodicAverage, partial(DiLoCo, rate=0.7, momentum=0.9)]


def gradients(rounds, n=4):
    return torch.randn(
        rounds, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )


@pytest.mark.parametrize("make", [PeriodicAverage, PLAIN])
@pytest.mark.parametrize("every", [1, 3])
def test_copies_become_their_mean_every_so_many_steps(copies, make, every):
    """DiLoCo with plain SGD inside and outside, at rate 1, is synchronous averaging."""
    hand, given = copies(make(every), equal=True), gradients(6)
    want = hand.x
    for r, g in enumerate(given):
        want = want - RATE * g
        if (r + 1) % every == 0:
            want = want.mean(0).expand(4, 3)
        hand.rounds(g[None])
        torch.testing.assert_close(hand.x, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_is_an_optimiser_of_torch_on_what_was_moved(copies, nesterov):
    hand = copies(DiLoCo(2, rate=0.7, momentum=0.9, nesterov=nesterov), equal=True)
    outer = torch.nn.Parameter(hand.x[0].clone())
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=nesterov)
    for pair in gradients(8).split(2):
        outer.grad = RATE * pair.sum(0).mean(0)
        optimizer.step()
        hand.rounds(pair)
        torch.testing.assert_close(hand.x, outer.detach().expand(4, 3), rtol=1e-12, atol=1e-12)


def test_inner_optimisers_keep_their_state(copies):
    hand = copies(DiLoCo(1), optimizer=partial(torch.optim.AdamW, lr=0.01))
    hand.rounds(gradients(3))
    optimizer = hand.members[2].part.optimizer
    assert [s["step"].item() for s in optimizer.state.values()] == [3]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", MIXERS)
def test_who_has_come_waits_and_nobody_waits_for_ever(copies, noise, make, seed):
    hand = copies(make(3))
    hand.shuffle(seed, 150, noise)
    rounds = [m.rounds for m in hand.members]
    assert max(rounds) - min(rounds) <= 3
    hand.settle()


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_moves_by_the_steps_alone(copies, noise, seed):
    hand = copies(PeriodicAverage(3))
    before = hand.x.sum(0)
    given = hand.shuffle(seed, 150, noise)
    hand.settle()
    torch.testing.assert_close(hand.x.sum(0), before - RATE * given, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", MIXERS)
def test_at_the_end_of_a_stretch_all_meet_as_they_are(copies, make):
    hand = copies(make(2), equal=True)
    ones = torch.ones(3, dtype=torch.float64)
    hand.step(0, ones)
    hand.step(1, ones)
    hand.step(1, ones)  # waits for three that have no data
    assert [d.waiting for d in hand.desks] == [False, True, False, False]
    hand.settle()
    assert torch.equal(hand.x, hand.x[0].expand(4, 3))
    hand.rounds(gradients(2))
    assert torch.equal(hand.x, hand.x[0].expand(4, 3))


@pytest.mark.parametrize("make", MIXERS)
def test_equal_copies_stay_equal(copies, still, make):
    hand = copies(make(2), equal=True, n=5)
    before = hand.x
    hand.shuffle(1, 100, still)
    hand.settle()
    torch.testing.assert_close(hand.x, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", MIXERS)
@pytest.mark.parametrize("seed", range(4))
def test_copies_leave_and_join(copies, noise, make, seed):
    hand = copies(make(3))
    hand.shuffle(seed, 41, noise)
    hand.replicas.leave(1)
    hand.shuffle(seed, 100, noise)
    there = [m.rounds for m in hand.members]
    hand.replicas.join(1)
    hand.shuffle(seed, 150, noise)
    assert all(m.rounds > was for m, was in zip(hand.members, there, strict=True))
    hand.settle()


def test_a_restart_makes_what_was_the_outer_weights_void(copies):
    hand = copies(DiLoCo(1))
    hand.rounds(gradients(3))
    hand.replicas.agree()
    hand.replicas.restart()
    begin = hand.x
    g = gradients(1)
    hand.rounds(g)
    want = begin[0] - 0.7 * 1.9 * RATE * g[0].mean(0)
    torch.testing.assert_close(hand.x, want.expand(4, 3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "settings", [{"every": 0}, {"rate": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}]
)
def test_numbers_out_of_range_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DiLoCo(**settings)
