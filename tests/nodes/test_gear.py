"""Gears as settings: what is refused, and which turns they take."""

from __future__ import annotations

import pytest
import torch

import geartrain as gt
from geartrain.errors import CheckpointError, GraphError
from geartrain.nodes.replay import Entry, ReplayBuffer, Replays


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"period": 0}, "give 1 or more, or 'never'"),
        ({"period": "rarely"}, "give 1 or more, or 'never'"),
        ({"period": {5: 1}}, "begins with minibatch 0"),
        ({"period": {}}, "begins with minibatch 0"),
        ({"skip": "forward"}, "give 'backward' or 'weights'"),
        ({"replays": -1}, "give 0 or more"),
        ({"buffer": 0}, "buffer 1 or more"),
        ({"draw": "oldest"}, "give 'newest', 'least_used' or 'uniform'"),
        ({"max_age": -1}, "max_age 0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        gt.Gear(**settings)


def test_a_mapping_shifts_gears():
    gear = gt.Gear({0: 1, 4: 3, 10: "never"})
    assert [t for t in range(14) if gear.on_turn(t)] == [0, 1, 2, 3, 6, 9]
    assert gear.on_turn(5, replayed=True) and not gear.on_turn(11, replayed=True)


@pytest.mark.parametrize("periods", [(4, 2, 1), (4, 4, 4), ("never", 3, 3), ("never", "never", 1)])
def test_periods_that_divide_those_below_are_accepted(periods):
    gt.check_gears({f"part {k}": gt.Gear(p) for k, p in enumerate(periods)})


def test_a_period_that_does_not_divide_names_both_parts_and_the_way_out():
    gears = {"low": gt.Gear(3), "middle": gt.Gear(6), "high": gt.Gear(2)}
    with pytest.raises(GraphError, match=r"'middle' has period 6 .*'low' below it has period 3"):
        gt.check_gears(gears)
    gears["middle"] = gt.Gear(6, skip="weights")
    with pytest.raises(GraphError, match=r"'high' has period 2 .*'low'.*skip='weights' for 'high'"):
        gt.check_gears(gears)
    gears["high"] = gt.Gear(2, skip="weights")
    gt.check_gears(gears)


def test_a_shift_is_checked_from_its_minibatch_on():
    with pytest.raises(GraphError, match="'high' has period 2 from minibatch 8 on"):
        gt.check_gears({"low": gt.Gear(), "high": gt.Gear({0: 1, 8: 2})})
    gt.check_gears({"low": gt.Gear({0: 1, 8: 4}), "high": gt.Gear({0: 1, 8: 2})})


def test_a_cut_frees_the_parts_below_it():
    gears = {"low": gt.Gear(), "middle": gt.Gear(2), "high": gt.Gear(2)}
    gt.check_gears(gears, cut=["middle"])
    with pytest.raises(GraphError, match="'middle' has period 2"):
        gt.check_gears(gears, cut=["high"])
    with pytest.raises(ValueError, match="the parts are"):
        gt.check_gears(gears, cut=["nobody"])


def test_replays_that_teach_nobody_are_refused():
    gears = {"low": gt.Gear("never", replays=1), "high": gt.Gear()}
    with pytest.raises(GraphError, match="'low' replays rows, but 'low' never learns"):
        gt.check_gears(gears)
    gears = {"low": gt.Gear("never", replays=1, skip="weights"), "high": gt.Gear()}
    gt.check_gears(gears)


def test_the_least_used_is_drawn_and_of_those_the_freshest():
    buffer = ReplayBuffer(Replays(buffer=3, draw="least_used"), "a")
    for t, uses in enumerate((1, 1, 2)):
        buffer.put(Entry(t, (), None, uses))
    drawn = [buffer.draw(2, k).minibatch for k in range(7)]
    assert drawn == [1, 0, 2, 1, 0, 2, 1]


def test_entries_that_are_too_old_are_dropped_when_something_is_drawn():
    buffer = ReplayBuffer(Replays(buffer=9, max_age=2), "a")
    for t in (3, 4, 5):
        buffer.put(Entry(t, (), None, 1))
    assert buffer.draw(6, 0).minibatch == 5
    assert [e.minibatch for e in buffer.entries] == [4, 5]
    assert buffer.draw(9, 0) is None and not buffer.entries


def test_uniform_draws_reach_every_entry():
    buffer = ReplayBuffer(Replays(buffer=5, draw="uniform"), "a")
    for t in range(5):
        buffer.put(Entry(t, (), None, 1))
    assert {buffer.draw(t, 0).minibatch for t in range(60)} == set(range(5))


def test_a_buffer_of_a_smaller_capacity_recalls_the_newest():
    old, new = ReplayBuffer(Replays(buffer=4), "a"), ReplayBuffer(Replays(buffer=2), "a")
    for t in range(4):
        old.put(Entry(t, (torch.zeros(1, 2),), None, 1))
    new.recall(old.memory())
    assert [e.minibatch for e in new.entries] == [2, 3]


def test_a_damaged_buffer_is_refused():
    buffer = ReplayBuffer(Replays(buffer=4), "inlet")
    kept = {"entries": [{"minibatch": 0, "uses": 1, "width": 1, "rows": None}]}
    for document, said in (({}, "has no 'entries'"), (kept, r"has or lacks tensors \['0/0'\]")):
        with pytest.raises(CheckpointError, match=f"the buffer of 'inlet' {said}"):
            buffer.recall(({}, document))
