"""Shared weights in memory that all workers have: whoever has gathered an update steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.errors import NonFiniteError, TransportError
from geartrain.frames.message import Payload
from geartrain.frames.tables import look_up
from geartrain.native import library, sums
from geartrain.native.steps import AdamStep, AdamTensors
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.slot import summed
from geartrain.parts.optimizers import FusedAdagrad, FusedAdam
from geartrain.parts.part import PartState
from geartrain.parts.rules import Clip, Rules
from geartrain.parts.triggers import Instances
from geartrain.sharing.arrivals import AGES, GRADIENT
from geartrain.sharing.letters import Letter
from geartrain.sharing.published import PublishedState
from geartrain.sharing.published_share import PublishedShare
from geartrain.sharing.stepped import SteppedShare

SGD = partial(torch.optim.SGD, lr=1.0)


class Lock:
    """Tells who has it; what must not be held twice."""

    def __init__(self) -> None:
        self.held = False
        self.taken = 0

    def acquire(self, blocking: bool = True) -> bool:
        assert not (self.held and blocking), "it would wait for ever"
        free, self.held = not self.held, True
        self.taken += free
        return free

    def release(self) -> None:
        self.held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Workers:
    """Two workers, each with a part of its own on weights and an optimiser's state of both."""

    def __init__(self, module: nn.Module, rules: Rules, *, once: bool = False) -> None:
        self.lock = Lock()
        mine = PartState("p", module, rules)
        memory = {id(p): p for p in module.parameters()}
        self.parts, self.shares = [mine, PartState("p", copy.deepcopy(module), rules)], []
        for p, q in zip(self.parts[1].parameters, memory.values(), strict=True):
            p.data = q.data
            for key, x in mine.optimizer.state.get(q, {}).items():
                self.parts[1].optimizer.state[p][key] = x
        self.common = [p.data for p in mine.parameters]
        first = PublishedState({"p": mine}, 2)
        (board,) = first.in_common()
        self.board = board.numpy()
        for k, part in enumerate(self.parts):
            part.counting.once = once
            state = PublishedState({"p": part}, 2)
            state._versions = board
            state.live_on(k, 2, in_common=True, lock=lambda number: self.lock)
            self.shares.append(state.weights("p", ())[k])

    def add(self, k: int, rows: int = 1, value: float = 1.0) -> None:
        """A firing of a worker adds rows of gradient, which saw the weights that it has."""
        share = self.shares[k]
        with share:
            seen = share.version
            share.sent(rows)
            for p in share.parameters:
                share.gradient.add(p, torch.full_like(p, value))
            share.received(rows, np.full(rows, seen))

    def sees(self, k: int) -> list[float]:
        """The weights that its nodes compute with."""
        return self.shares[k].module.weight.detach().flatten().tolist()


def begun(weights: list[nn.Parameter], lr: float) -> FusedAdam:
    """It remembers something, which is nothing yet."""
    optimizer = FusedAdam(weights, lr, (0.0, 0.0))
    for p in weights:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def linear(*, once: bool = False, **rules) -> Workers:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    given = {"optimizer": SGD, "update_every": 1, "average": "none"} | rules
    return Workers(module, Rules(**given), once=once)


def test_whoever_has_an_update_steps_and_nothing_is_sent() -> None:
    both = linear(update_every=2)
    both.add(0)
    both.add(1)
    assert both.board[0] == 0 and float(both.common[0]) == 0  # half an update each
    both.add(1)
    assert both.board[0] == 1 and float(both.common[0]) == -2
    both.add(0)
    assert both.board[0] == 2 and float(both.common[0]) == -4
    assert not both.shares[0].take_letters() and not both.shares[1].take_letters()
    assert [len(share.take_steps()) for share in both.shares] == [1, 1]


def test_a_firing_has_the_weights_of_its_beginning_and_the_next_one_those_of_now() -> None:
    both = linear()
    share = both.shares[0]
    with share:
        both.add(1)
        assert both.sees(0) == [0] and share.version == 0
    for k in range(2):
        with both.shares[k]:
            assert both.sees(k) == [-1] and both.shares[k].version == 1


def test_who_begins_a_firing_waits_for_nobody_that_steps() -> None:
    both = linear()
    both.add(1)
    both.lock.acquire()
    with both.shares[0]:
        assert both.sees(0) == [0] and both.shares[0].version == 0
    both.lock.release()
    with both.shares[0]:
        assert both.sees(0) == [-1]


def test_several_steps_of_its_own_are_copied_once_as_the_next_firing_begins() -> None:
    both = linear()
    share = both.shares[0]
    before = both.lock.taken
    for _ in range(2):
        share.answered(1, 1)
        share.gradient.add(both.parts[0].parameters[0], torch.ones(1, 1))
        share._hand_in_if_whole()
    assert both.board[0] == 2 and both.lock.taken == before + 2
    assert both.sees(0) == [0] and share.version == 0  # what it would compute with, and says
    with share:
        assert both.sees(0) == [-2] and share.version == 2
    assert both.lock.taken == before + 3


def test_a_firing_has_all_steps_of_its_own_worker_and_waits_for_these_alone() -> None:
    both = linear()
    both.add(0)
    both.lock.acquire()
    with pytest.raises(AssertionError, match="wait for ever"), both.shares[0]:
        pass
    with both.shares[1]:  # the step is none of its own
        assert both.sees(1) == [0]
    both.lock.release()
    with both.shares[0]:
        assert both.sees(0) == [-1]
    both.add(1)
    both.lock.acquire()
    with both.shares[0]:
        assert both.sees(0) == [-1]
    both.lock.release()


def test_weights_are_not_copied_again_where_nobody_has_stepped() -> None:
    both = linear(update_every=9)
    both.add(0)
    both.add(0)
    assert not both.lock.taken


@pytest.mark.parametrize("turned", [False, True], ids=["as it lies", "turned"])
@pytest.mark.parametrize("native", [True, False], ids=["C", "torch"])
def test_every_look_copies_the_weights_of_then_however_they_lie(
    monkeypatch: pytest.MonkeyPatch, turned: bool, native: bool
) -> None:
    if not native:
        monkeypatch.setattr("geartrain.sharing.stepped.library.current", lambda: None)
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    if turned:
        module.weight.data = torch.zeros(3, 2).T
    both = Workers(module, Rules(optimizer=SGD, update_every=1, average="none"))
    share = both.shares[0]
    assert isinstance(share, SteppedShare)
    assert (share._renewed is None) == (turned or not native or library.current() is None)
    for k in range(1, 4):
        both.add(1)
        with both.shares[0]:
            assert both.sees(0) == [-k] * 6 and both.shares[0].version == k
            assert both.shares[0].module.bias.tolist() == [-k] * 2
        assert both.sees(0) == [-k] * 6  # of its own, whatever others do


def test_torch_counts_a_copy_of_other_weights_as_a_change() -> None:
    """What is made of weights, such as copies in bfloat16, is made anew by that count."""
    both = linear()
    (p,) = both.shares[0].parameters
    before = p._version
    with both.shares[0]:
        assert p._version == before
    both.add(1)
    with both.shares[0]:
        assert p._version > before


def test_a_step_takes_gradients_where_they_were_added_and_what_it_writes_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[AdamStep] = []

    def make(tensors: AdamTensors) -> AdamStep:
        made.append(AdamStep(tensors))
        return made[-1]

    monkeypatch.setattr("geartrain.parts.optimizers.AdamStep", make)
    both = linear(optimizer=partial(begun, lr=0.1))
    part, share = both.parts[0], both.shares[0]
    mine, places = part.gradient, set()
    for _ in range(6):
        both.add(0)
        buffer = share.gradient._slots[part.parameters[0]].buffer
        assert buffer is not None
        places.add(buffer.data_ptr())
    assert both.board[0] == 6 and float(both.common[0]) == pytest.approx(-0.6)
    assert len(places) == 1 and len(made) == 1
    assert part.gradient is mine and mine._slots[part.parameters[0]].buffer is None


def test_what_is_handed_in_and_makes_no_update_waits_at_the_part_for_the_next_that_does() -> None:
    both = linear(update_every=3)
    part, share = both.parts[0], both.shares[0]
    both.add(0)
    share.rest()
    assert [float(x) for x in part.pending_gradients().values()] == [1]
    assert both.board[0] == 0 and not share.gradient.holds
    for _ in range(3):
        both.add(0)
    # The part has four of which three make an update; the fourth counts for the next one.
    assert both.board[0] == 1 and float(both.common[0]) == -4 and not part.gradient.holds
    for _ in range(3):
        both.add(0)
    assert both.board[0] == 2 and float(both.common[0]) == -7


def test_what_was_left_before_a_pass_is_stepped_with_what_the_owner_adds() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    part = PartState("p", module, Rules(optimizer=SGD, update_every=2, average="none"))
    (p,) = part.parameters
    for rows in (False, True):
        if rows:  # rows of a table, which no buffer has
            part.gradient.add_rows(p, torch.zeros(1, dtype=torch.int64), torch.ones(1, 1).double())
        else:
            part.gradient.add(p, torch.ones(1, 1, dtype=torch.float64))
        part.sent(1, 0)
        part.received(1, np.zeros(1, np.int64))
        state = PublishedState({"p": part}, 2)
        state.in_common()
        state.live_on(0, 2, in_common=True, lock=lambda number: Lock())
        share = state.weights("p", ())[0]
        assert isinstance(share, SteppedShare)
        for _ in range(2):
            with share:
                share.answered(1, 1)
                share.gradient.add(p, torch.ones(1, 1, dtype=torch.float64))
        share.leave_pass()
    assert part.version == 2 and p.item() == -6


def test_gradients_of_updates_that_are_put_apart_are_limited_by_the_norm_of_their_own() -> None:
    both = linear(update_every=Instances(2), clip=Clip(norm=1.0), once=True)
    share = both.shares[0]
    with share:
        gradients(share, [0.25], None)
        share.answered(1, 1)
    with share:
        updates = share.updates_of(np.arange(3))
        assert updates is not None and updates.tolist() == [0, 1, 1]
        gradients(share, [4.0, 0.25, 0.5], updates)
        share.answered_for(updates, None)
    assert float(both.common[0]) == pytest.approx(-1.0)
    assert share.next_update() and float(both.common[0]) == pytest.approx(-1.75)


def test_what_goes_back_has_the_steps_of_its_own_worker_and_copies_none_of_others() -> None:
    both = linear()
    share = both.shares[0]
    both.add(1)
    taken = both.lock.taken
    with share.guard_back:
        assert both.sees(0) == [0] and share.version == 0
    assert both.lock.taken == taken
    with share.guard_back:
        gradients(share, [1.0], None)
        share.answered(1, 1)
    assert both.board[0] == 2  # what one adds on its way back is handed in as it ends
    with share.guard_back:
        assert both.sees(0) == [-2] and share.version == 2
    both.add(1)
    with share.guard:
        assert both.sees(0) == [-3]


def test_while_a_worker_has_the_lock_it_hands_over_what_has_been_looked_at(monkeypatch) -> None:
    """Gradients are read once, before, and not again for their norm."""
    rules = Rules(optimizer=partial(begun, lr=0.1), clip=Clip(norm=1.0), update_every=1)
    both = Workers(nn.Linear(16, 16), rules)
    held: list[bool] = []

    def seen(slots) -> float | None:
        held.append(both.lock.held)
        return summed(slots)

    for module in ("gradient", "slots"):
        monkeypatch.setattr(f"geartrain.nodes.{module}.summed", seen)
    for _ in range(3):
        both.add(0)
    if sums.may_sum(torch.float32):
        assert held == [False] * 3 and both.board[0] == 3
    moments = [x["exp_avg"] for x in both.parts[0].optimizer.state.values()]
    assert float(torch.cat([x.flatten() for x in moments]).norm()) == pytest.approx(1.0)  # clipped


def test_staleness_is_that_of_the_version_that_rows_saw() -> None:
    both = linear()
    share = both.shares[0]
    with share:  # rows that leave at version 0, and come back after three steps of the other one
        share.sent(1)
    for _ in range(3):
        both.add(1)
    with share:
        share.gradient.add(share.parameters[0], torch.ones(1, 1, dtype=torch.float64))
        share.received(1, np.zeros(1, np.int64))
    assert both.parts[0].histogram() == (0, 0, 0, 1)
    assert both.parts[1].histogram() == (3,)
    assert both.parts[0].version == 4


def gradients(share: SteppedShare, values: list[float], updates: np.ndarray | None) -> None:
    """A firing adds a row of gradient for each value."""
    (p,) = share.parameters
    rows = torch.tensor(values, dtype=p.dtype)[:, None]
    with nullcontext() if updates is None else share.gradient.of_updates(updates):
        share.gradient.add_product(p, rows, torch.ones_like(rows))


def test_rows_of_later_updates_are_stepped_with_those_of_their_own_update() -> None:
    """Where each message is an instance, and counts as it is answered."""
    both = linear(update_every=Instances(2), once=True)
    share = both.shares[0]
    both.add(1, 2, 0.5)  # the other one has stepped meanwhile: a version of its own
    with share:
        updates = share.updates_of(np.arange(5))
        assert updates is not None and updates.tolist() == [0, 0, 1, 1, 2]
        gradients(share, [1.0, 2.0, 4.0, 8.0, 16.0], updates)
        share.answered_for(updates, None)
    assert float(both.common[0]) == -0.5 - 3
    assert share.step_if_due(0) and not share.step_if_due(0)
    assert share.next_update() and float(both.common[0]) == -0.5 - 3 - 12
    assert share.step_if_due(0)
    assert share.next_update() and not share.step_if_due(0)  # one of two instances
    assert not share.next_update() and both.board[0] == 3
    with share:
        assert share.updates_of(np.arange(1)) is None  # it completes the present one
        gradients(share, [32.0], None)
        share.answered(1, 1)
    assert float(both.common[0]) == -0.5 - 3 - 12 - 48
    # Two rows of each of the first updates, and one each that saw the first version and the third.
    assert both.parts[0].histogram() == (3, 2, 1) and not share.gradient.ahead


def test_rows_of_later_updates_wait_until_the_instances_of_theirs_have_finished() -> None:
    both = linear(update_every=Instances(2))
    share = both.shares[0]
    share.in_cohorts(lambda _: 0, lambda slots: slots // 2)
    with share:
        updates = share.updates_of(np.arange(4))
        assert updates is not None and updates.tolist() == [0, 0, 1, 1]
        share.sent(4)
        gradients(share, [1.0, 2.0, 4.0, 8.0], updates)
        share.received_for(updates, np.zeros(4, np.int64), np.array([1, 1, 1, 1]))
    assert not share.step_if_due(0) and share.outstanding == 2
    share.finished(2)
    assert share.step_if_due(0) and float(both.common[0]) == -3
    assert share.next_update() and not share.outstanding
    assert not share.step_if_due(0) and float(both.common[0]) == -3
    share.finished(2)
    assert share.step_if_due(0) and float(both.common[0]) == -15
    assert both.parts[0].histogram() == (2, 2)


def test_where_letters_go_no_update_is_ahead() -> None:
    state = PublishedState({"p": linear(update_every=Instances(2)).parts[0]}, 2)
    state.live_on(0, 2, in_common=False)
    share = state.weights("p", ())[0]
    assert not share.takes_ahead and share.updates_of(np.arange(5)) is None


def carried(both: Workers) -> list[Letter]:
    """Letters go to whom they are for, and are taken, until there are none."""
    found = []
    while letters := [x for share in both.shares for x in share.take_letters()]:
        for letter in letters:
            both.shares[letter.receiver].receive(letter)
        for share in both.shares:
            share.take()
        found += letters
    return found


def test_what_is_left_of_updates_goes_to_the_owner_once_with_the_ages_of_all() -> None:
    both = linear(update_every=3)
    for k in (1, 1, 1, 1, 0, 0):
        both.add(k)
    assert both.board[0] == 1
    for share in both.shares:
        share.rest()
    assert [x.kind for x in carried(both)] == [GRADIENT, AGES]
    # Two of worker 0, which saw version 0 or 1, and one of worker 1 make an update together.
    assert both.board[0] == 2 and float(both.common[0]) == -6
    owner = both.parts[0]
    assert sum(owner.histogram()) == 6 and not sum(both.parts[1].histogram())
    for share in both.shares:
        share.rest()
    assert not carried(both) and sum(owner.histogram()) == 6


class OfWeightsOfNow:
    """A gradient that is known when it is asked for, by the weights of then: they, and 1."""

    def add_all(self, found: Sequence[Payload], into: GradientSum) -> None:
        for (weight,) in found:
            into.add(weight, weight.detach() + 1)


def test_what_the_owner_is_gathering_is_of_its_own_weights_if_a_letter_has_it_step() -> None:
    both = linear(update_every=2)
    owner, other = both.shares
    both.add(0)
    owner.rest()  # half an update, which waits at the part
    both.add(1)
    both.add(1)
    assert float(both.common[0]) == -2 and both.sees(0) == [0]
    with both.lock:
        assert owner.gradient.add_later(OfWeightsOfNow(), (both.parts[0].parameters[0],), 1)
    both.add(1)
    other.rest()
    carried(both)
    assert both.board[0] == 2 and float(both.common[0]) == -4 and both.sees(0) == [0]
    owner.answered(1, 1)
    owner.rest()
    (gradient,) = both.parts[0].pending_gradients().values()
    assert float(gradient) == 1  # and not of -2, from which the step went


def test_what_was_left_before_a_pass_is_with_the_owner_alone() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    part = PartState("p", module, Rules(optimizer=SGD, update_every=2, average="none"))
    part.gradient.add(part.parameters[0], torch.ones(1, 1, dtype=torch.float64))
    part.sent(1, 0)
    part.received(1, np.zeros(1, np.int64))
    left = []
    for k in (0, 1):
        mine = copy.deepcopy(part)
        state = PublishedState({"p": mine}, 2)
        state.live_on(k, 2, in_common=True, lock=lambda number: Lock())
        assert isinstance(state.weights("p", ())[k], SteppedShare)
        left.append((mine.counting.rows, len(mine.pending_gradients()), sum(mine.histogram())))
    assert left == [(1, 1, 1), (0, 0, 0)]


def test_a_step_that_is_refused_leaves_the_lock_and_the_weights() -> None:
    both = linear()
    with pytest.raises(NonFiniteError, match="part 'p'"):
        both.add(1, value=float("nan"))
    assert not both.lock.held and both.board[0] == 0 and float(both.common[0]) == 0
    assert both.parts[1].gradient is not both.shares[1].gradient
    both.shares[1].leave_pass()
    both.add(0)
    with both.shares[0]:
        assert both.board[0] == 1 and both.sees(0) == [-1]


def test_after_a_pass_a_part_is_what_all_have() -> None:
    both = linear()
    both.add(1)
    for part, share in zip(both.parts, both.shares, strict=True):
        share.leave_pass()
        assert part.version == 1
        assert part.parameters[0].data_ptr() == both.common[0].data_ptr()


def test_rows_of_a_table_are_read_where_they_are_stepped_under_the_lock(monkeypatch) -> None:
    table = nn.Embedding(9, 2, sparse=True)
    with torch.no_grad():
        table.weight.zero_()
    monkeypatch.setattr("geartrain.sharing.stepped._reads_rows", lambda nodes: True)
    rules = Rules(optimizer=partial(FusedAdagrad, lr=1.0), update_every=1, average="none")
    both = Workers(table, rules)
    share = both.shares[1]
    assert isinstance(share, SteppedShare)
    with share:
        share.sent(1)
        share.gradient.add_rows(share.parameters[0], torch.tensor([4]), torch.ones(1, 2))
        share.received(1, np.zeros(1, np.int64))
    assert both.shares[0].module.weight[4].tolist() == [-1, -1]  # no copy of it
    assert both.shares[0].module.weight.abs().sum() == 2
    taken = both.lock.taken
    look_up(both.shares[0].module.weight, torch.tensor([4]))
    assert both.lock.taken == taken + 1 and not both.lock.held


@pytest.mark.parametrize(
    "rules",
    [
        {"max_staleness": 1},
        {"window": 2},
        {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)},
        {"optimizer": partial(torch.optim.Adam, lr=0.1)},  # remembers nothing yet
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_where_a_step_wants_more_than_lies_in_common_memory_the_owner_steps(rules) -> None:
    both = linear(**rules)
    assert all(type(share) is PublishedShare for share in both.shares)


def test_an_optimiser_steps_for_all_once_it_remembers() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    part = PartState("p", module, Rules(optimizer=torch.optim.Adam, update_every=1))
    part.gradient.add(part.parameters[0], torch.ones(1, 1, dtype=torch.float64))
    part.sent(1, 0)
    part.received(1, np.zeros(1, np.int64))
    part.step_if_due(0)
    state = PublishedState({"p": part}, 2)
    state.live_on(0, 2, in_common=True, lock=lambda number: Lock())
    assert isinstance(state.weights("p", ())[0], SteppedShare)
    state.live_on(0, 2, in_common=False, lock=None)
    assert type(state.weights("p", ())[0]) is PublishedShare


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ((), "content is 0 tensors, expected 1"),
        ((torch.ones(2),), "rows by age is .*float32"),
        ((torch.tensor([1, -1]),), r"rows by age is -1\.\.1, expected 0"),
    ],
)
def test_ages_that_are_no_counts_are_refused_by_name(tensors, told) -> None:
    both = linear()
    both.shares[0].receive(Letter("p", 1, 0, AGES, tensors))
    with pytest.raises(TransportError, match=f"letter of worker 1 about part 'p'.*{told}"):
        both.shares[0].take()
