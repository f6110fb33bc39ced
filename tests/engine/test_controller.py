"""The controller: events in, deliveries out; no runtime is needed to ask it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.engine.controller import Ramp
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.router import Outbox
from geartrain.engine.settings import Settings
from geartrain.errors import ProtocolError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.parts.rules import Rules
from geartrain.parts.triggers import Instances
from geartrain.sharing.neighbours import Neighbours
from geartrain.sharing.replicas import Replicas
from tests.rigs.passes import AT_ONCE


def graph() -> Graph:
    made = Graph()
    made.input("x").through(torch.sin, name="sin").stop()
    return made


def learning() -> Graph:
    made = Graph()
    made.input("x").through(torch.nn.Linear(3, 1), name="map").loss(lambda y: y.square().sum(1))
    return made


def instances(n: int) -> list[Instance]:
    return [Instance({"x": torch.zeros(2, 3)}, key=f"number {i}") for i in range(n)]


def controller(max_active: int = 3, ramp: Ramp = AT_ONCE):
    engine = Engine(graph(), {}, Settings(max_active=max_active, ramp=ramp))
    engine.begin(train=True)
    return engine.controller, engine


def answered(*slots: int) -> Outbox:
    return Outbox(answered=[np.array(slots)])


def test_a_finished_instance_makes_room_for_the_next():
    state, _ = controller(3)
    assert state.want() == 3
    out = state.admit(instances(3))
    assert state.want() == 0 and state.active == 3
    assert sum(len(d.batch) for d in out.deliveries) == 6
    assert state.settle(answered(0)) == 0
    assert state.settle(answered(1, 0)) == 1
    assert (state.want(), state.active, state.finished, state.trained) == (1, 2, 1, 1)


def test_more_than_may_be_in_flight_are_given_ahead_by_lots_until_the_pass_is_over():
    state, engine = controller(4)
    assert engine.ahead.may_go
    state.admit(instances(4))
    engine.ahead.go(nbytes=1)
    assert state.want() == 8 and state.in_flight == 4
    state.admit(instances(8))
    assert (state.active, state.in_flight, state.want()) == (12, 4, 0)
    state.settle(answered(0, 0, 1, 1, 2, 2))
    assert (state.active, state.want()) == (9, 0)  # one is missing to a lot
    state.settle(answered(3, 3))
    assert state.want() == 4
    engine.begin(train=True)
    assert state.assignment.room(20) == 12


@pytest.mark.parametrize(("nbytes", "lot"), [(0, 4), (1 << 20, 2), (1 << 22, 1)])
def test_lots_of_large_instances_have_few(nbytes, lot):
    state, engine = controller(4)
    engine.ahead.go(nbytes)
    assert state.assignment.lot == lot and state.want() == 4 + 2 * lot


@pytest.mark.parametrize(
    ("rules", "settings", "may"),
    [
        ({}, {}, True),
        ({"update_every": 7}, {}, True),
        ({"window": 2}, {}, True),
        ({"max_staleness": 2}, {}, False),
        ({"update_every": Instances(2)}, {}, False),  # two rows an instance: each is a message
        ({}, {"max_active": 1}, False),
        ({}, {"drain": True}, False),
    ],
)
def test_nothing_is_given_ahead_where_steps_or_admission_hang_on_each_instance(
    rules, settings, may
):
    made = learning()
    parts = make_parts(made, Rules(**rules))
    assert Engine(made, parts, Settings(**{"max_active": 4, **settings})).ahead.may_go is may


def test_an_answer_too_many_names_the_instance():
    state, _ = controller()
    state.admit(instances(2))
    with pytest.raises(ProtocolError, match=r"instance 1 \(number 1\) got 1 answers more"):
        state.settle(answered(1, 1, 1))


def test_rows_that_are_spawned_are_awaited_before_the_answers_of_the_same_firing():
    state, _ = controller()
    state.admit(instances(1))
    both = Outbox(answered=[np.array([0, 0])], spawned=[np.array([0])])
    assert state.settle(both) == 0 and state.active == 1
    assert state.settle(answered(0)) == 1
    state.check_empty()


def test_an_unfinished_instance_is_no_empty_controller():
    state, _ = controller()
    state.admit(instances(2))
    assert state.unfinished() == [
        "instance 0 (number 0): 2 rows open",
        "instance 1 (number 1): 2 rows open",
    ]
    with pytest.raises(ProtocolError, match="2 instances are unfinished; 4 rows were fed and 0"):
        state.check_empty()


def test_a_part_that_holds_its_step_pauses_admission_while_something_is_in_flight():
    state, _ = controller(5)
    state.hold("leaf", True)
    assert state.want() == 5
    state.admit(instances(1))
    assert state.want() == 0
    state.hold("leaf", False)
    assert state.want() == 4


def test_the_ramp_is_for_training_alone():
    state, engine = controller(64, Ramp(start=2, over=10))
    assert state.want() == 2
    engine.begin(train=False)
    assert state.want() == 64


def test_many_instances_get_slots_of_their_own_and_give_them_back():
    state, engine = controller(1000)
    for _ in range(3):
        out = state.admit(instances(500))
        slots = sorted({int(s) for d in out.deliveries for s in d.batch.state[0]})
        assert len(slots) == 500
        assert state.settle(answered(*slots, *slots)) == 500
        state.check_empty()
    assert engine.wiring.arena.active == 0


def test_one_instance_more_than_there_was_room_for_makes_room():
    state, _ = controller(1000)
    for n in (64, 1, 62, 1, 1):
        state.admit(instances(n))
    assert state.settle(answered(*range(129), *range(129))) == 129
    state.check_empty()


def test_numbers_that_make_no_sense_are_refused():
    made = graph()
    for make, words in (
        (lambda: Engine(made, {}, Settings(max_active=0)), "max_active=0"),
        (lambda: Settings(max_rows=0), "max_rows=0"),
        (lambda: Ramp(start=0), "start=0"),
        (lambda: Ramp(over=-1), "over=-1"),
        (lambda: Engine(made, {}, Settings(), 1, {"nix": 0}), "placement names 'nix'"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_a_ramp_grows_from_its_start_to_the_most():
    ramp = Ramp(start=4, over=100)
    limits = [ramp.limit(64, n) for n in range(0, 120, 10)]
    assert limits[0] == 4 and limits[-1] == limits[10] == 64
    assert limits == sorted(limits)
    assert Ramp(start=9).limit(3, 0) == 3


def test_every_copy_has_the_ramp_to_itself_and_climbs_it_with_what_all_have_finished():
    made, ramp = learning(), Ramp(start=2, over=4)
    setting = Neighbours(copies=2, exchange="weights")
    parts = make_parts(made, Rules(update_every=1))
    replicas = Replicas(parts, setting)
    engine = Engine(made, parts, Settings(max_active=64, ramp=ramp), sharing=replicas)
    engine.begin(train=True)
    state = engine.controller

    def wanted():
        return [state.want_of(0), state.want_of(1)]

    assert wanted() == [2, 2]
    state.admit(instances(2), 0)
    assert wanted() == [0, 2]
    state.admit(instances(1), 1)
    assert wanted() == [0, 1]
    assert state.settle(answered(2, 2)) == 1  # that of copy 1
    assert ramp.limit(64, 1) == 4
    assert wanted() == [2, 4]
    assert state.settle(answered(0, 0, 1, 1)) == 2
    assert wanted() == [ramp.limit(64, 3)] * 2
    engine.begin(train=False)
    assert wanted() == [64, 64]


def test_admission_waits_for_room_for_a_sixteenth():
    state, _ = controller(64)
    state.admit(instances(64))
    assert state.settle(answered(*[0, 1, 2] * 2)) == 3 and state.want() == 0
    assert state.settle(answered(9, 9)) == 1 and state.want() == 4
    state.admit(instances(4))
    assert (state.want(), state.active) == (0, 64)
