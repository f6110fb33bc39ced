"""What exchanges keep in a checkpoint: looked at before it is put back, and changed by no look."""

from __future__ import annotations

import copy

import pytest

from geartrain.sharing.exchanges.gossip import DecentralizedSGD
from geartrain.sharing.exchanges.periodic import DiLoCo
from geartrain.sharing.exchanges.pushsum import PushSum


def written(hand):
    """What a checkpoint has of these copies."""
    tensors, document = hand.replicas.to_tensors()
    tensors = {name: t.clone() for name, t in tensors.items()}
    return tensors, copy.deepcopy(document | {"parts": {m.part.name: {} for m in hand.members}})


def kept(hand):
    return [
        (m.rounds, dict(m.numbers), {k: [t.tolist() for t in v] for k, v in m.tensors.items()})
        for m in hand.members
    ]


@pytest.mark.parametrize("make", [PushSum, DecentralizedSGD, lambda: DiLoCo(2)])
def test_a_look_changes_nothing_and_what_is_put_back_is_what_was_kept(copies, noise, make):
    hand, other = copies(make()), copies(make())
    hand.shuffle(1, 60, noise)
    hand.settle()
    fresh, was = kept(other), kept(hand)
    found = other.replicas.check(*written(hand))
    assert kept(other) == fresh != was
    put = found.copied()
    assert kept(other) == fresh
    put()
    assert kept(other) == was


@pytest.mark.parametrize(
    ("make", "numbers", "reason"),
    [
        (PushSum, {"omega": 100.0}, "copy 1 has a share of 100, expected more than 0"),
        (PushSum, {"omega": 0.0}, "copy 1 has a share of 0, expected more than 0"),
        (DecentralizedSGD, {"round": 3, "mixed": 2}, r"copies \[1\] wait for letters that nobody"),
    ],
)
def test_numbers_that_no_exchange_can_have_kept_are_refused_and_nothing_changes(
    copies, make, numbers, reason
):
    hand = copies(make())
    tensors, document = written(hand)
    document["members"]["p#1"]["numbers"] |= numbers
    before = kept(hand)
    with pytest.raises(ValueError, match=reason):
        hand.replicas.check(tensors, document)
    assert kept(hand) == before
