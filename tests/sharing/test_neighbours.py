"""Copies of a whole model: what is asked of all of them together."""

from __future__ import annotations

import pytest
import torch

from geartrain.sharing.neighbours import EXCHANGES


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_single_copy_stands_for_itself_in_all_that_several_are_asked(copies, noise, name):
    hand = copies(EXCHANGES[name](), n=1)
    for _ in range(3):
        hand.step(0, noise(0))
    hand.settle()
    (base,) = hand.replicas.consensus.parts.values()
    hand.replicas.agree()
    (me,) = hand.members
    (stands,) = me.tensors["centre"] if name == "async-local-sgd" else me.weights()
    torch.testing.assert_close(base.module.weight.detach(), stands, rtol=1e-12, atol=1e-12)
    tensors, document = hand.replicas.to_tensors()
    hand.replicas.check(tensors, document | {"parts": {"p#0": {}}}).copied()()
    hand.replicas.restart()
    hand.replicas.abandon()
    hand.step(0, noise(0))
    hand.settle()
    totals = hand.replicas.totals()
    assert totals.rounds == (4,) and totals.ledgers[0].lost == 0
    assert hand.replicas.distance() == 0
