"""Foreign gradients scaled by their age, and corrected for their distance."""

from __future__ import annotations

import pytest
import torch

from geartrain.sharing.exchanges.foreign import CompensatedNeighbours, StalenessAware
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.letters import Inbox

RATE = 0.1  # of the copies' optimisers


@pytest.mark.parametrize("exchange", [StalenessAware(power=0), CompensatedNeighbours(0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_without_scale_or_strength_it_is_the_published_exchange(copies, exchange, seed):
    found = []
    for each in (exchange, NearestNeighbours()):
        generator = torch.Generator().manual_seed(9)
        hand = copies(each)
        hand.shuffle(seed, 120, lambda _, g=generator: torch.randn(3, generator=g).double())
        hand.settle()
        found.append(hand.x)
    assert torch.equal(*found)


def test_where_nothing_has_moved_compensation_changes_nothing(copies):
    found = []
    for each in (CompensatedNeighbours(3.0), NearestNeighbours()):
        hand = copies(each, n=2, equal=True, optimizer=lambda p: torch.optim.SGD(p, lr=1e-12))
        for k in (0, 1):
            hand.step(k, torch.ones(3, dtype=torch.float64))
        hand.deliver_all()
        found.append(hand.x)
    torch.testing.assert_close(*found, rtol=0, atol=1e-20)


def test_a_gradient_counts_by_one_over_the_versions_passed(copies):
    hand = copies(StalenessAware(), n=2)
    start, one = hand.x[1], torch.ones(3, dtype=torch.float64)
    hand.step(0, one)
    for _ in range(3):
        hand.step(1, torch.zeros(3, dtype=torch.float64))
    hand.deliver((0, 1))
    torch.testing.assert_close(hand.x[1], start - RATE * one / 3)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_compensation_by_hand(copies, strength, merged):
    inbox = Inbox(limit=1, full="merge") if merged else None
    hand = copies(CompensatedNeighbours(strength, inbox=inbox), n=2)
    there, here = hand.x
    g = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    hand.step(0, g)
    if merged:
        hand.step(0, g)
        for letter in hand.links.pop((0, 1)):
            hand.replicas.put(letter)
        hand.endpoints[1].receive()
        there, g = there - RATE * g / 2, 2 * g  # the mean of where, the sum of what
    else:
        hand.deliver((0, 1))
    torch.testing.assert_close(hand.x[1], here - RATE * (g + strength * g * g * (here - there)))


def test_adaptive_compensation_by_hand(copies):
    hand = copies(CompensatedNeighbours(2.0, adaptive=True, decay=0.9, eps=1e-3), n=2)
    there, here = hand.x
    g = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    hand.step(0, g)
    hand.deliver((0, 1))
    strength = 2.0 / (0.1 * g * g + 1e-3).sqrt()
    torch.testing.assert_close(hand.x[1], here - RATE * (g + strength * g * g * (here - there)))


def test_letters_are_twice_as_large_with_compensation(copies):
    sizes = []
    for each in (StalenessAware(), CompensatedNeighbours()):
        hand = copies(each, n=2)
        hand.step(0, torch.ones(3, dtype=torch.float64))
        sizes.append(hand.members[0].ledger.bytes)
    assert sizes == [24, 48]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: StalenessAware(power=-1), "power=-1"),
        (lambda: CompensatedNeighbours(-1.0), "strength=-1.0"),
        (lambda: CompensatedNeighbours(decay=1.0), "decay=1.0"),
        (lambda: CompensatedNeighbours(eps=0.0), "eps=0.0"),
    ],
)
def test_numbers_out_of_range_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()
