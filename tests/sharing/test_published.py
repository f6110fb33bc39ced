"""Shared weights between processes: what the owner of a part knows of the gradients that come."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.errors import TransportError
from geartrain.graph.graph import Graph
from geartrain.parts.late.delay import AnnealedRate, DelayCompensated, GapAware, ScaledByStaleness
from geartrain.parts.late.views import Corrected, Predicted
from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.sharing.arrivals import FLOOR, GRADIENT, WEIGHTS
from geartrain.sharing.letters import Letter
from geartrain.sharing.published import PublishedState
from geartrain.sharing.published_share import PublishedShare

SGD = partial(torch.optim.SGD, lr=1.0)


def made(**rules) -> tuple[PartState, PublishedState]:
    module = nn.Linear(2, 1, bias=False).double()
    part = PartState("p", module, Rules(optimizer=SGD, update_every=1, average="none", **rules))
    return part, PublishedState({"p": part}, 2)


def moved(part: PartState, state: PublishedState, versions: list[int]) -> list[float]:
    """How far the weights go by gradients of ones that saw these versions, each a step."""
    state.live_on(0, 2, in_common=True)
    owner = state.weights("p", ())[0]
    found = []
    for version in versions:
        before = part.parameters[0].detach().clone()
        saw, rows = torch.tensor([version]), torch.tensor([1])
        gradient = torch.ones(1, 2, dtype=torch.float64)
        owner.receive(Letter("p", 1, 0, GRADIENT, (gradient, saw, rows), round=1, progress=0))
        owner.take()
        found.append(float((before - part.parameters[0].detach())[0, 0]))
    return found


def test_a_step_is_scaled_by_the_age_of_the_gradients_that_other_workers_sent():
    part, state = made(delay=ScaledByStaleness())
    assert moved(part, state, [0, 1, 2, 0, 4]) == pytest.approx([1.0, 1.0, 1.0, 1 / 3, 1.0])


def test_a_rate_that_is_annealed_goes_by_the_updates_of_the_owner():
    part, state = made(delay=AnnealedRate(over=4))
    # Update k of age 2: 2^(k / 4 - 1); the first two are of age 0 and 1.
    wanted = [1.0, 1.0, 2**-0.5, 2**-0.25, 1.0]
    assert moved(part, state, [0, 0, 0, 1, 2]) == pytest.approx(wanted)


def test_parts_are_spread_over_the_workers_by_their_size_the_large_ones_first():
    sizes = {"one": 1, "two": 2, "four": 4, "six": 6}
    parts = {
        name: PartState(name, nn.Linear(size, 1, bias=False), Rules(optimizer=SGD))
        for name, size in sizes.items()
    }
    state = PublishedState(parts, 2)
    state.live_on(0, 2, in_common=False)
    mine = {name for name in parts if state.keeps(0, name)}
    assert mine == {"six", "one"}
    assert {name for name in parts if state.keeps(1, name)} == parts.keys() - mine


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"max_staleness": 0}, "max_staleness=0 wants that nobody computes while a step is taken"),
        ({"window": 1}, "window=1 is shared out among 2 processes .* give 2 or more"),
        ({"delay": DelayCompensated(1.0)}, "DelayCompensated.* wants the weights that each row"),
        ({"delay": GapAware()}, "GapAware.* wants the weights that each row has seen"),
        ({"view": Corrected()}, "Corrected.* wants the weights that each row has seen"),
        ({"view": Predicted()}, "Predicted.* wants the weights that each row has seen"),
    ],
)
def test_rules_that_want_more_than_the_owner_knows_are_refused_by_name(rules, said):
    with pytest.raises(ValueError, match=said):
        made(**rules)


def owner_of(state: PublishedState) -> PublishedShare:
    state.live_on(0, 2, in_common=True)
    return state.weights("p", ())[0]


def of(version: int, kind: str = GRADIENT) -> Letter:
    """What the other worker sends: a gradient that saw a version, or its floor."""
    if kind == FLOOR:
        return Letter("p", 1, 0, FLOOR, (), version=version)
    saw, rows = torch.tensor([version]), torch.tensor([1])
    gradient = torch.ones(1, 2, dtype=torch.float64)
    return Letter("p", 1, 0, GRADIENT, (gradient, saw, rows), round=1, progress=0)


def bringing(*tensors: object, kind: str = GRADIENT) -> Letter:
    return Letter("p", 1, 0, kind, tuple(map(torch.as_tensor, tensors)), round=1, progress=0)


ONES = [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("letter", "told"),
    [
        (of(2), r"versions that its messages saw is 2\.\.2, expected 0\.\.1"),
        (of(-1), r"versions that its messages saw is -1\.\.-1"),
        (of(2, FLOOR), r"floor is 2\.\.2, expected 0\.\.1"),
        (of(-1, FLOOR), r"floor is -1\.\.-1"),
        (bringing(ONES, [0], [-1]), r"rows of its messages is -1\.\.-1, expected 0\.\."),
        (bringing(ONES, [0, 1], [1]), r"rows is 1 numbers, expected 2, one for each version"),
        (bringing(ONES, [0.0], [1]), r"versions is .*float32 \(1,\), expected int64"),
        (bringing(ONES, [0]), r"content is 2 tensors, expected 1, versions and rows"),
        (bringing([1.0], [0], [1]), r"tensor 0 is .* \(1,\), expected .* of shape \(1, 2\)"),
        (bringing([[1, 1]], [0], [1]), r"tensor 0 is .*int64 .*, expected None, or floating point"),
        (bringing(ONES, kind=WEIGHTS), r"kind is 'weights', expected 'gradient' or 'floor'"),
    ],
)
def test_what_the_owner_cannot_use_is_refused_by_name_and_steps_nothing(letter, told):
    part, state = made(max_staleness=4)
    owner = owner_of(state)
    owner.receive(of(0))
    owner.take()
    owner.receive(letter)
    with pytest.raises(TransportError, match=f"letter of worker 1 about part 'p'.*{told}"):
        owner.take()
    assert part.version == 1 and not part.counting.rows


@pytest.mark.parametrize(
    ("letter", "told"),
    [
        (bringing(ONES, [0], [1]), r"kind is 'gradient', expected 'weights'"),
        (bringing(ONES, ONES, kind=WEIGHTS), r"content is 2 tensors, expected 1"),
        (bringing([1.0, 1.0], kind=WEIGHTS), r"tensor 0 is .* \(2,\), expected .* \(1, 2\)"),
    ],
)
def test_weights_that_are_not_those_of_the_part_are_refused_by_name(letter, told):
    part, state = made()
    state.live_on(1, 2, in_common=True)
    share = state.weights("p", ())[1]
    share.receive(letter)
    with pytest.raises(TransportError, match=f"about part 'p'.*{told}"):
        share.take()
    assert share.parameters[0].shape == part.parameters[0].shape


@pytest.mark.parametrize(("me", "own"), [(0, False), (1, True)])
def test_who_does_not_own_a_part_computes_with_weights_that_nobody_steps(me, own):
    part, state = made()
    (common,) = [p.data for p in part.parameters]
    state.live_on(me, 2, in_common=True)
    (weight,) = state.weights("p", ())[me].parameters
    assert torch.equal(weight, common) and (weight.data_ptr() != common.data_ptr()) is own


def test_a_step_waits_for_the_oldest_rows_that_another_worker_may_still_have():
    part, state = made(max_staleness=2)
    owner = owner_of(state)
    found = []
    for letter in (of(0), of(0), of(0), of(0), of(1, FLOOR), of(2), of(2, FLOOR), of(3, FLOOR)):
        owner.receive(letter)
        owner.take()
        found.append(part.version)
    # Rows of version 0 may come until the floor has risen: 2 is the last version they may meet.
    assert found == [1, 2, 2, 2, 3, 3, 4, 4]
    assert part.histogram() == (1, 2, 2)
    assert len(owner.take_steps()) == 4 and not part.counting.rows


def test_a_step_waits_for_rows_of_the_owner_s_own_worker_as_well():
    part, state = made(max_staleness=1)
    owner = owner_of(state)
    with owner:
        owner.sent(1)
    for _ in range(3):
        owner.receive(of(part.version, FLOOR))
        owner.receive(of(part.version))
        owner.take()
    assert part.version == 1  # a row of version 0 is in flight
    with owner:
        owner.gradient.add(owner.parameters[0], torch.ones(1, 2, dtype=torch.float64))
        owner.received(1, np.zeros(1, np.int64))
    assert part.version == 2 and owner.note_holding() is None
    assert len(owner.take_steps()) == 2


def test_a_worker_tells_of_its_floor_after_the_gradients_that_it_has_left_behind():
    _, state = made(max_staleness=1)
    state.live_on(1, 2, in_common=True)
    share = state.weights("p", ())[1]
    ones = torch.ones(1, 2, dtype=torch.float64)
    with share:
        share.sent(1)
    share.receive(Letter("p", 0, 1, WEIGHTS, (ones,), version=1))
    share.take()
    assert not share.take_letters()  # a row that saw version 0 is in flight
    with share:
        share.sent(1)
        share.gradient.add(share.parameters[0], ones)
        share.received(1, np.zeros(1, np.int64))
    told = share.take_letters()
    assert [(x.kind, x.version) for x in told] == [(GRADIENT, 0), (FLOOR, 1)]
    share.receive(Letter("p", 0, 1, WEIGHTS, (ones,), version=2))
    share.take()
    with share:
        share.dropped(np.ones(1, np.int64))
    assert [(x.kind, x.version) for x in share.take_letters()] == [(GRADIENT, 0), (FLOOR, 2)]


def test_gradients_older_than_the_weights_are_handed_in_before_an_update_is_whole():
    module = nn.Linear(2, 1, bias=False).double()
    rules = Rules(optimizer=SGD, update_every=4, average="none", max_staleness=1)
    state = PublishedState({"p": PartState("p", module, rules)}, 2)
    state.live_on(1, 2, in_common=True)
    share = state.weights("p", ())[1]
    ones = torch.ones(1, 2, dtype=torch.float64)
    with share:
        share.sent(2)
        share.gradient.add(share.parameters[0], ones)
        share.received(2, np.zeros(2, np.int64))
    assert not share.take_letters()  # half of an update, as young as can be
    share.receive(Letter("p", 0, 1, WEIGHTS, (ones,), version=1))
    share.take()
    assert [(x.kind, x.version) for x in share.take_letters()] == [(GRADIENT, 0), (FLOOR, 1)]


def test_a_window_is_shared_out_among_the_workers():
    _, state = made(window=3)
    shares = []
    for worker in (0, 1):
        state.live_on(worker, 2, in_common=True)
        shares.append(state.weights("p", ())[worker])
    room = []
    for share in shares:
        room.append(0)
        while share.open:
            share.sent(1)
            room[-1] += 1
    assert room == [2, 1]
    shares[1].received(1, np.zeros(1, np.int64))
    assert shares[1].open and not shares[0].open


def test_the_program_hears_that_a_step_is_held_and_that_it_is_no_more():
    graph = Graph()
    module = nn.Linear(2, 1, bias=False).double()
    graph.input("x").through(module, name="p").loss(lambda y: y.square().sum(1))
    parts = make_parts(graph, Rules(optimizer=SGD, update_every=1, max_staleness=1))
    state = PublishedState(parts, 2)
    state.live_on(0, 2, in_common=True)
    engine = Engine(graph, parts, Settings(), 2, sharing=state)
    engine.begin(train=True)
    (worker, held) = engine.workers[0], []
    for letter in (of(0), of(0), of(0, FLOOR), of(1, FLOOR)):
        worker.receive(letter)
        firing = worker.fire()
        held.append((firing.held, [step.version for step in firing.steps]))
    assert held == [({}, [1]), ({"p": True}, []), ({}, []), ({"p": False}, [2])]


def test_weights_are_told_once_for_all_steps_since_the_last_letters():
    part, state = made()
    owner = owner_of(state)
    for _ in range(3):
        owner.receive(of(part.version))
    owner.take()
    (told,) = owner.take_letters()
    assert (told.kind, told.version, part.version) == (WEIGHTS, 3, 3)
    assert torch.equal(told.tensors[0], part.parameters[0])
    assert not owner.take_letters()
    state.live_on(1, 2, in_common=True)
    other = state.weights("p", ())[1]
    other.receive(told)
    other.take()
    assert other.version == 3 and torch.equal(other.parameters[0], told.tensors[0])


def test_of_a_table_the_rows_of_all_steps_since_then_are_told():
    table = nn.Embedding(9, 2, sparse=True)
    rules = Rules(optimizer=SGD, update_every=1, average="none")
    state = PublishedState({"p": PartState("p", table, rules)}, 2)
    owner = owner_of(state)
    for rows in ([1, 4], [4, 7]):
        values = torch.ones(2, 2)
        gradient = torch.sparse_coo_tensor(torch.tensor([rows]), values, (9, 2))
        saw, lengths = torch.tensor([0]), torch.tensor([2])
        owner.receive(Letter("p", 1, 0, GRADIENT, (gradient, saw, lengths), round=1, progress=0))
    owner.take()
    (told,) = owner.take_letters()
    assert told.tensors[0]._indices().tolist() == [[1, 4, 7]]
    assert torch.equal(told.tensors[0]._values(), table.weight.detach()[[1, 4, 7]])
