"""Shards: who is fed what, and when the pass ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.engine.router import Outbox
from geartrain.errors import DataError
from geartrain.frames.instance import Instance
from geartrain.runtime.shards import PullFeeder, ShardFeeder, sooner
from geartrain.train.source import Source


class Doors:
    """A controller that finishes what it is told to."""

    def __init__(self, copies: int, most: int = 1) -> None:
        self.copies, self.most = copies, most
        self.active = np.zeros(copies, np.int64)
        self.got: list[tuple[int, object]] = []
        self.controller = self.assignment = self
        self.open = np.ones(copies, np.bool_)
        self.packer = self
        self.one_by_one = self.whole = False

    def pack(self, instances):
        raise ValueError("one by one")

    def want_of(self, copy: int) -> int:
        return self.most - self.active[copy]

    def admit(self, instances, copy):
        for each in instances:
            if each.key == "bad":
                raise DataError("a bad one")
        self.active[copy] += len(instances)
        self.got += [(copy, each.key) for each in instances]
        return Outbox()

    def finish(self, *copies: int) -> None:
        for copy in copies:
            self.active[copy] -= 1


def data(n: int) -> list[Instance]:
    return [
        Instance({"x": torch.zeros(1, 1)}, {"slot": np.zeros(1, np.int64)}, key=i) for i in range(n)
    ]


def shards(source: Source, copies: int, limit: int, positions=None, *, ends=True, **more):
    return ShardFeeder(
        lambda k, start: source.shard(1, k, copies, start),
        [len(range(k, len(source), copies)) for k in range(copies)],
        [0] * copies if positions is None else positions,
        limit,
        ends=ends,
        **more,
    )


def drain(feeder, doors) -> None:
    while feeder.admit(doors) is not None:
        pass


def test_each_copy_has_every_nth_instance_and_begins_anew():
    doors, positions = Doors(2), [0, 0]
    feeder = shards(Source(data(5)), 2, 8, positions)
    drain(feeder, doors)
    for _ in range(5):
        doors.finish(0)
        drain(feeder, doors)
    assert [k for c, k in doors.got if c == 0] == [0, 2, 4, 0, 2, 4]
    assert [k for c, k in doors.got if c == 1] == [1]
    doors.finish(1)
    drain(feeder, doors)
    assert doors.got[-1] == (1, 3)
    assert positions == [6, 2] and feeder.taken == 8
    assert feeder.exhausted and feeder.source_ended


def test_a_stretch_that_is_cut_short_does_not_end_the_data_and_goes_on_later():
    source, positions = Source(data(6)), [0, 0]
    doors = Doors(2)
    first = shards(source, 2, 3, positions, ends=False)
    drain(first, doors)
    doors.finish(0, 1)
    drain(first, doors)
    assert first.exhausted and not first.source_ended
    doors.finish(0)
    second = shards(source, 2, 3, positions)
    drain(second, doors)
    doors.finish(1)
    drain(second, doors)
    assert sorted(k for _, k in doors.got) == [0, 1, 2, 3, 4, 5]


def test_shuffled_shards_are_disjoint_cover_the_data_and_differ_by_epoch():
    source = Source(data(11), shuffle=True, seed=4)
    found = [[i.key for i in source.shard(1, k, 3)] for k in range(3)]
    assert sorted(key for shard in found for key in shard) == list(range(11))
    assert found != [[i.key for i in source.shard(2, k, 3)] for k in range(3)]
    order = [i.key for i in source.epoch(1)]
    assert found == [order[k::3] for k in range(3)]


def test_a_bad_instance_is_skipped_and_counts_as_taken():
    given = data(4)
    given[2] = Instance({"x": torch.zeros(1, 1)}, {"slot": np.zeros(1, np.int64)}, key="bad")
    doors, positions = Doors(1, most=4), [0]
    feeder = shards(Source(given), 1, 4, positions, on_bad="skip")
    drain(feeder, doors)
    assert [k for _, k in doors.got] == [0, 1, 3]
    assert (feeder.taken, feeder.skipped, positions) == (4, 1, [4])
    with pytest.raises(DataError):
        drain(shards(Source(given), 1, 4), Doors(1, most=4))


def test_a_closed_feeder_admits_nothing():
    feeder, doors = shards(Source(data(4)), 2, 4), Doors(2)
    feeder.close()
    drain(feeder, doors)
    assert doors.got == [] and not feeder.source_ended


def test_whoever_has_room_pulls_the_next():
    doors, positions = Doors(2), [0, 0]
    feeder = PullFeeder(iter(data(5)), positions)
    drain(feeder, doors)
    for copy in (1, 1, 0, 1):
        doors.finish(copy)
        drain(feeder, doors)
    assert doors.got == [(0, 0), (1, 1), (1, 2), (1, 3), (0, 4)]
    assert positions == [2, 3] and feeder.taken == 5
    assert feeder.exhausted and feeder.source_ended


def by_speed(n: int, left: int | None, speeds: tuple[int, ...]) -> tuple[list[int], int]:
    """What copies of such speeds are given of n instances, two at a time; and when all is done."""
    doors, feeder = (
        Doors(len(speeds), most=2),
        PullFeeder(iter(data(n)), [0] * len(speeds), left=left),
    )
    at = [0] * len(speeds)  # how much each has done of its first instance in flight
    for now in range(1000):
        while feeder.admit(doors) is not None:
            pass
        if feeder.source_ended and not doors.active.any():
            return [sum(copy == k for copy, _ in doors.got) for k in range(len(speeds))], now
        for k, speed in enumerate(speeds):
            at[k] = at[k] + speed if doors.active[k] else 0
            if at[k] >= 12:
                at[k] = 0
                doors.finish(k)
    raise AssertionError(f"nothing moves any more: {doors.got}")


def test_a_slow_copy_takes_no_last_one_that_others_are_through_with_sooner():
    given, seconds = by_speed(36, 36, (4, 4, 4, 1))
    late, longer = by_speed(36, None, (4, 4, 4, 1))  # nobody knows how many there are
    assert sum(given) == sum(late) == 36
    assert (given[3], late[3]) == (3, 4)
    assert (seconds, longer) == (36, 48)


@pytest.mark.parametrize("speeds", [(1,), (3, 3), (4, 3), (12, 1), (6, 4, 3, 2, 1), (4, 4, 4, 4)])
@pytest.mark.parametrize("n", range(1, 30, 4))
def test_whoever_is_put_off_all_are_taken_and_none_is_later_for_it(n, speeds):
    given, seconds = by_speed(n, n, speeds)
    _, before = by_speed(n, None, speeds)
    assert sum(given) == n
    assert seconds <= before + 12 // max(speeds)  # what one takes, of the quickest


def test_a_copy_that_has_done_nothing_is_given_what_it_has_room_for():
    nothing = np.zeros(2, np.int64)
    assert sooner(0, 3, 2, nothing, np.array([5, 0])) == 2
    assert sooner(0, 1, 9, np.array([1, 0]), np.array([5, 20])) == 1
    assert sooner(0, 1, 8, np.array([1, 0]), np.array([5, 20])) == 1
    assert sooner(0, 1, 7, np.array([1, 0]), np.array([5, 20])) == 0


def test_copies_that_go_together_begin_anew_together_and_an_absent_one_is_not_waited_for():
    doors, there = Doors(2), [0, 1]
    feeder = shards(Source(data(6)), 2, 12, together=lambda: there)

    def goes_on(*copies: int) -> list[tuple[int, object]]:
        before = len(doors.got)
        doors.finish(*copies)
        drain(feeder, doors)
        return doors.got[before:]

    assert goes_on() == [(0, 0), (1, 1)]
    assert goes_on(0) + goes_on(0) == [(0, 2), (0, 4)]
    assert goes_on(0) == []  # copy 1 has had one of its three
    assert goes_on(1) == [(1, 3)]
    assert goes_on(1) == [(1, 5), (0, 0)]
    assert goes_on(0) + goes_on(0) == [(0, 2), (0, 4)]
    assert goes_on(0) == []
    there.remove(1)
    assert goes_on() == [(0, 0)]
