"""Copies of a whole model: what is asked of all of them together."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.sharing.neighbours import EXCHANGES, Neighbours
from geartrain.sharing.replicas import Replicas


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


def test_copies_that_begin_anew_have_weights_and_buffers_of_the_user_s_module():
    module = nn.BatchNorm1d(2)
    part = PartState("p", module, Rules(optimizer=partial(torch.optim.SGD, lr=0.1)))
    replicas = Replicas({"p": part}, Neighbours(copies=2))
    copies = [endpoint.member.part.module for endpoint in replicas.endpoints["p"]]
    for k, each in enumerate(copies):
        each.running_mean.fill_(k + 1)
        each.weight.data.fill_(k + 5)
    module.running_mean.fill_(7.0)
    module.weight.data.fill_(8.0)
    replicas.restart()
    for each in copies:
        assert each.running_mean.tolist() == [7.0, 7.0] and each.weight.tolist() == [8.0, 8.0]


def test_the_distance_of_copies_is_that_of_those_who_take_part(copies):
    hand = copies(EXCHANGES["weights"](), n=3)
    for k, me in enumerate(hand.members):
        me.part.overwrite([torch.full((1, 3), float(k), dtype=torch.float64)])
    # Each entry is (-1, 0, 1) from the mean.
    assert hand.replicas.distance() == pytest.approx((3 * 2 / 3) ** 0.5)
    hand.replicas.set_present(0, False)
    assert hand.replicas.distance() == pytest.approx((3 * 2 * 0.25 / 2) ** 0.5)


@pytest.mark.parametrize(("sent", "came", "lost"), [(7, 3, 1), (2, 3, 1), (4, 3, 1)])
def test_accounts_that_a_death_has_left_open_are_closed_at_the_copy_that_died(
    copies, sent, came, lost
):
    hand = copies(EXCHANGES["weights"](), n=3)
    first, second, third = (me.ledger for me in hand.members)
    first.sent, second.came, third.lost = sent, came, lost
    hand.replicas.balance(2)
    assert (first.sent, second.came, first.lost, second.lost) == (sent, came, 0, 0)
    assert sent + third.sent == came + third.lost
    assert (third.sent, third.lost - lost) == (max(0, 4 - sent), max(0, sent - 4))
