"""Letters, inboxes, members and collectives by themselves."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.errors import TransportError
from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.sharing.endpoint import Communicator, Endpoint
from geartrain.sharing.exchanges.allreduce import AllReduce, Collective
from geartrain.sharing.exchanges.gossip import PairAverage
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.letters import SHARE, Inbox, Ledger, Letter, tensor_bytes
from geartrain.sharing.locks import NoLock
from geartrain.sharing.member import Member

SGD = partial(torch.optim.SGD, lr=0.5)


def members(n: int, *, inbox: Inbox | None = None, **rules: object) -> list[Member]:
    """Fully connected copies of a map of one weight, which is 1."""
    made = []
    for k in range(n):
        module = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(module.weight)
        part = PartState(f"map#{k}", module, Rules(**({"optimizer": SGD} | rules)))
        others = [j for j in range(n) if j != k]
        made.append(Member("map", k, part, others, others, inbox, frozenset({"gradient"})))
    for member in made:
        member.peers = made
    return made


def letter(value: float, sender: int = 1, kind: str = "gradient", **more: object) -> Letter:
    return Letter("map", sender, 0, kind, (torch.tensor([[value]]).double(),), nbytes=8, **more)


def values(me: Member) -> list[float]:
    return [float(x.tensors[0]) for x in me.take() if x.tensors[0] is not None]


def test_letters_carry_copies():
    a, b = members(2)
    given = torch.ones(1, 1)
    a.send_all("gradient", [given])
    given.zero_()
    assert float(a.outbox[0].tensors[0]) == 1.0
    assert (a.outbox[0].sender, a.outbox[0].receiver, a.outbox[0].nbytes) == (0, 1, 4)
    assert (a.ledger.sent, a.ledger.bytes) == (1, 4)
    assert b.mail == 0


def test_a_full_inbox_drops_the_oldest_of_the_same_sender_and_kind():
    me = members(3, inbox=Inbox(2))[0]
    for value in (1.0, 2.0, 3.0):
        me.put(letter(value))
    me.put(letter(9.0, sender=2))
    me.put(letter(7.0, kind="weights"))
    assert values(me) == [2.0, 3.0, 9.0, 7.0]
    assert (me.ledger.came, me.ledger.applied, me.ledger.dropped) == (5, 4, 1)


def test_a_full_inbox_merges_by_adding():
    me = members(2, inbox=Inbox(2, "merge"))[0]
    for value in (1.0, 2.0, 3.0, 4.0):
        me.put(letter(value, weight=0.5))
    found = me.take()
    assert [float(x.tensors[0]) for x in found] == [1.0, 9.0]
    assert [x.count for x in found] == [1, 3]
    assert found[1].weight == 1.5
    assert (me.ledger.came, me.ledger.applied, me.ledger.merged) == (4, 4, 2)


def test_kinds_that_are_not_bounded_all_stay():
    me = members(2, inbox=Inbox(1))[0]
    for value in range(5):
        me.put(letter(float(value), kind="weights"))
    assert values(me) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_of_mail_that_is_forgotten_what_waits_is_dropped_and_what_is_to_go_was_never_sent():
    me, _, _ = members(3)
    me.send_all("gradient", [torch.ones(1, 1)])
    me.outbox.clear()  # they have gone
    me.send_all("gradient", [torch.ones(1, 1)])
    me.put(letter(1.0))
    me.forget_mail()
    ledger = me.ledger
    assert (ledger.sent, ledger.bytes, ledger.came, ledger.dropped) == (2, 8, 1, 1)
    assert not me.mail and not me.outbox


def test_staleness_is_the_receivers_versions_since_the_letter_was_sent():
    me = members(2)[0]
    me.put(letter(1.0, seen=0))
    me.apply([torch.ones(1, 1).double()])
    me.apply([torch.ones(1, 1).double()])
    me.take()
    assert me.ledger.staleness == {2: 1}


def test_letters_are_taken_at_rest_or_once_after_a_step_while_rows_are_in_flight():
    exchange, (me, other) = NearestNeighbours(), members(2, update_every=1)
    exchange.prepare([me, other])
    here, part = Endpoint(exchange, me), me.part
    part.sent(2)
    assert here.put(letter(1.0)) and not here.ready
    part.gradient.add(part.parameters[0], torch.ones(1, 1).double())
    part.received(1, np.zeros(1, np.int64))
    assert not here.ready and part.step_if_due(0) and here.ready
    assert len(here.receive()) == 1 and here.put(letter(1.0)) and not here.ready
    part.received(1, np.zeros(1, np.int64))
    assert here.ready and len(here.receive()) == 1 and not here.ready


def test_a_step_with_a_foreign_gradient_leaves_the_gradient_that_waits_alone():
    me = members(2)[0]
    weight = me.parameters[0]
    me.part.gradient.add(weight, torch.full((1, 1), 3.0).double())
    foreign = torch.full((1, 1), 2.0).double()
    me.apply([foreign], scale=0.5)
    assert float(me.weights()[0]) == pytest.approx(1 - 0.5 * 0.5 * 2)
    assert me.part.version == 1 and len(me.steps) == 1
    assert float(me.part.pending_gradients()["weight"]) == 3.0
    assert float(foreign) == 2.0


def test_a_missing_gradient_moves_nothing():
    me = members(2)[0]
    me.apply([None])
    assert float(me.weights()[0]) == 1.0


def test_a_scheduler_steps_with_the_own_step_that_was_held_and_not_with_foreign_ones():
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)
    me = members(2, scheduler=schedule)[0]
    gradient = [torch.ones(1, 1).double()]
    me.apply(gradient)
    assert me.part.optimizer is not None
    assert me.part.optimizer.param_groups[0]["lr"] == 0.5
    me.apply(gradient, own=True)
    assert me.part.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_weights_that_are_written_are_a_version_of_their_own():
    me = members(2)[0]
    me.write([torch.full((1, 1), 5.0)])
    assert float(me.weights()[0]) == 5.0 and me.part.version == 1


def test_a_collective_gives_everybody_the_mean_and_the_cost_of_a_ring():
    all_of_them = members(4)
    collective = Collective("mean", all_of_them, NoLock())
    for me in all_of_them:
        assert all(not m.outbox for m in all_of_them)
        collective.contribute(me, [torch.full((1, 1), float(me.index)).double()])
        assert collective.waits(me)
    letters = [x for m in all_of_them for x in m.outbox]
    assert [x.receiver for x in letters] == [0, 1, 2, 3]
    assert {float(x.tensors[0]) for x in letters} == {1.5}
    assert {(x.hops, x.nbytes, x.collective) for x in letters} == {(6, 12, True)}


def test_a_collective_does_not_wait_for_those_who_have_left():
    a, b, c = members(3)
    collective = Collective("mean", [a, b, c], NoLock())
    collective.contribute(a, [torch.zeros(1, 1)])
    collective.contribute(b, [torch.ones(1, 1)])
    c.present = False
    collective.left(c)
    assert [float(x.tensors[0]) for x in a.outbox] == [0.5, 0.5]


def test_all_reduce_steps_with_what_there_is_when_nothing_more_comes():
    exchange = AllReduce()
    exchange.lock = NoLock()
    a, b = members(2)
    exchange.prepare([a, b])
    assert not exchange.finish([a, b])
    a.rounds += 1
    assert exchange.stepping(a, [torch.ones(1, 1).double()]) is None
    assert exchange.waiting(a) and not exchange.waiting(b)
    assert exchange.finish([a, b])
    for me in (a, b):
        exchange.received(me, [x for x in a.outbox if x.receiver == me.index])
        assert float(me.weights()[0]) == 0.5
        assert not exchange.waiting(me)


def test_every_says_at_which_own_gradients_something_is_sent():
    exchange = NearestNeighbours(every=3)
    exchange.lock = NoLock()
    a, b = members(2)
    exchange.prepare([a, b])
    for _ in range(7):
        a.rounds += 1
        exchange.stepped(a, [torch.ones(1, 1)])
    assert [x.round for x in a.outbox] == [3, 6]


def test_ledgers_add_up():
    a, b = Ledger(sent=2, staleness={0: 1}), Ledger(sent=3, staleness={0: 1, 4: 2})
    a.add(b)
    assert a == Ledger(sent=5, staleness={0: 2, 4: 2})


def test_bytes_of_sparse_gradients_are_those_of_their_rows():
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 4), (1000, 4))
    assert tensor_bytes([sparse, None, torch.ones(2)]) == 8 + 16 + 8


@pytest.mark.parametrize("given", [{"limit": 0}, {"full": "burn"}])
def test_an_inbox_that_makes_no_sense_is_refused(given):
    with pytest.raises(ValueError, match="Inbox"):
        Inbox(**given)


ONE = torch.ones(1, 1).double()


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ((torch.ones(2, 1).double(),), r"tensor 0 is .*\(2, 1\), expected .* of shape \(1, 1\)"),
        ((ONE, torch.ones(1).double()), r"tensor 1 is .*\(1,\), expected .* of shape \(1, 1\)"),
        ((torch.ones(1, 1, dtype=torch.int64),), r"tensor 0 is .*int64.*, expected None, or float"),
    ],
)
@pytest.mark.parametrize("kind", ["offer", "answer", "gradient", SHARE])
def test_a_letter_of_a_strangers_shape_is_refused_before_an_exchange_sees_it(kind, tensors, told):
    me, other = members(2)
    exchange = PairAverage()
    exchange.prepare([me, other])
    communicator = Communicator({"map#0": Endpoint(exchange, me)})
    with pytest.raises(TransportError, match=f"letter of copy 1 about part 'map'.*{told}"):
        communicator.receive(Letter("map", 1, 0, kind, tensors))
    assert not communicator.ready and me.ledger.came == 0
    assert torch.equal(me.weights()[0], ONE)
    communicator.receive(Letter("map", 1, 0, "offer", (3 * ONE,)))
    communicator.take()
    assert torch.equal(me.weights()[0], 2 * ONE)


def test_a_letter_with_too_many_or_too_few_tensors_is_refused():
    module = nn.Linear(2, 1)
    me = Member("map", 0, PartState("map#0", module, Rules(optimizer=SGD)), [1], [1])
    communicator = Communicator({"map#0": Endpoint(NearestNeighbours(), me)})
    weight, bias = (p.detach() for p in module.parameters())
    for some in ((weight,), (weight, bias, weight)):
        with pytest.raises(TransportError, match=f"content is {len(some)} tensors, expected 2, or"):
            communicator.receive(Letter("map", 1, 0, "gradient", some))
    for some in ((), (weight, None), (weight, bias, weight, bias)):
        communicator.receive(Letter("map", 1, 0, "gradient", some))
    assert me.ledger.came == 3
