"""Queues and the policies that pick among them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.engine.mailbox import (
    BackwardFirst,
    FullestFirst,
    OldestFirst,
    Queue,
    RandomOrder,
    Sweeps,
)
from geartrain.frames.message import Backward, Forward, join_payload


def batch(first: int, n: int) -> Forward:
    numbers = np.arange(first, first + n)
    return Forward((torch.from_numpy(numbers)[:, None],), np.stack([numbers] * 2), numbers)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), most=st.integers(1, 12))
def test_rows_leave_in_the_order_they_came_and_no_more_than_asked(sizes, most):
    queue, total = Queue(1, 0, alone=False), 0
    for size in sizes:
        queue.put(batch(total, size), total)
        total += size
    seen: list[int] = []
    while queue.rows:
        taken = queue.take(most)
        rows = join_payload(taken)[0][:, 0].tolist()
        assert rows == [o for b in taken for o in b.origin.tolist()]
        assert len(rows) == min(most, total - len(seen))
        seen += rows
    assert seen == list(range(total))


def test_messages_that_are_fired_alone_leave_one_by_one():
    queue = Queue(1, -1, alone=True)
    queue.put(Backward(np.arange(3), None), 0)
    assert [q.rows.tolist() for _ in range(3) for q in queue.take(100)] == [[0], [1], [2]]


@pytest.fixture
def queues() -> list[Queue]:
    old, full, back = Queue(1, 0, False), Queue(2, 0, False), Queue(2, -1, False)
    old.put(batch(0, 1), 1)
    full.put(batch(0, 5), 2)
    back.put(Backward(np.arange(4), None), 3)
    return [full, back, old]


def test_each_policy_picks_its_queue(queues):
    full, back, old = queues
    assert FullestFirst().choose(queues) is full
    assert BackwardFirst().choose(queues) is back
    assert OldestFirst().choose(queues) is old
    back.put(Backward(np.arange(1), None), 4)
    assert FullestFirst().choose(queues) is back  # a tie


def test_random_order_is_that_of_its_seed_whatever_order_queues_come_in(queues):
    def picks(seed: int, given: list[Queue]) -> list[tuple[int, int, int]]:
        policy = RandomOrder(seed)
        chosen = [policy.choose(given) for _ in range(30)]
        return [(q.node, q.port, policy.limit(q, 3)) for q in chosen]

    assert picks(1, queues) == picks(1, queues[::-1]) != picks(2, queues)
    assert {p[:2] for p in picks(1, queues)} == {(1, 0), (2, 0), (2, -1)}
    assert {p[2] for p in picks(1, queues)} == {1, 2, 3}


def ranked(rank: int, rows: int, loops: tuple[tuple[int, int], ...] = ()) -> Queue:
    queue = Queue(rank, 0, False, rank, loops)
    queue.put(batch(0, rows), 0)
    return queue


def test_a_sweep_goes_on_along_the_ranks_and_begins_again_behind_the_last():
    sweeps, first, loop, fuller, last = Sweeps(), *map(ranked, (1, 3, 3, 7), (9, 2, 4, 1))
    waiting = [last, loop, first, fuller]
    seen = []
    while waiting:
        seen.append(sweeps.choose(waiting))
        waiting.remove(seen[-1])
        if seen[-1] is fuller:
            waiting.append(again := ranked(1, 50))  # comes in behind the sweep
    assert seen == [first, fuller, loop, last, again]


def test_a_sweep_stays_where_rows_go_on_coming():
    sweeps, here, further = Sweeps(), ranked(2, 1), ranked(5, 100)
    assert [sweeps.choose([further, here]) for _ in range(3)] == [here] * 3
    assert sweeps.choose([further]) is further
    assert sweeps.choose([further, here]) is further


def test_a_queue_with_enough_rows_goes_first_and_the_sweep_then_goes_on_where_it_was():
    sweeps, here, little, much = Sweeps(enough=8), ranked(3, 2), ranked(4, 7), ranked(6, 8)
    most = ranked(1, 99)
    assert sweeps.choose([little, here]) is here
    assert sweeps.choose([here, most, little, much]) is much
    assert sweeps.choose([here, most, little]) is most
    assert sweeps.choose([here, little]) is here
    with pytest.raises(ValueError, match=r"Sweeps\(enough=0\): give 1 row or more"):
        Sweeps(enough=0)


def test_a_sweep_goes_round_a_loop_until_it_is_empty_and_an_inner_one_within_each_round():
    outer, inner = (2, 6), (3, 4)
    before, behind = ranked(2, 1, (outer,)), ranked(6, 1, (outer,))
    one, two = ranked(3, 1, (inner, outer)), ranked(4, 1, (inner, outer))
    entry, readout = ranked(1, 99), ranked(9, 99)
    sweeps, others = Sweeps(), [entry, readout]
    assert sweeps.choose([before]) is before
    assert sweeps.choose([*others, one, two]) is one
    assert sweeps.choose([*others, two, behind]) is two
    assert sweeps.choose([*others, one, behind]) is one  # the inner one is not empty
    assert sweeps.choose([*others, behind]) is behind
    assert sweeps.choose([*others, before]) is before  # nor the outer one
    assert sweeps.choose(others) is readout
    assert sweeps.choose([entry]) is entry


def bundles(rank: int, lengths: list[int], portion: int | None = None) -> Queue:
    queue, n = Queue(rank, 0, False, rank), len(lengths)
    queue.put(Backward(np.arange(n), None, np.array(lengths)), 0)
    queue.portion = portion
    return queue


def test_a_sweep_follows_a_portion_of_bundles_to_the_end_before_it_takes_the_next():
    sweeps = Sweeps()
    entry = bundles(1, [9] * 50, 4)
    assert sweeps.choose([entry]) is entry
    little, pooled = bundles(2, [9] * 3, 4), ranked(5, 3)
    assert sweeps.choose([entry, little, pooled]) is little
    assert sweeps.choose([entry, pooled]) is pooled
    much = bundles(7, [1] * 5, 4)
    assert sweeps.choose([entry, much]) is much
    assert sweeps.choose([entry, much]) is much  # nothing ahead: the last of those with a portion
    assert sweeps.choose([entry, little]) is entry
    assert sweeps.choose([entry, little, much]) is much  # it is ahead and has enough


def test_bundles_that_are_fired_alone_are_taken_from_the_fullest_queue():
    sweeps, here, further = Sweeps(), Queue(2, 0, True, 2), Queue(5, 0, True, 5)
    for queue, n in ((here, 3), (further, 2)):
        queue.put(Backward(np.arange(n), None, np.full(n, 100)), 0)
    assert sweeps.choose([here, further]) is here


@given(
    sizes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    rows=st.integers(1, 30),
)
def test_so_many_payload_rows_are_in_so_many_messages(sizes, rows):
    queue = Queue(1, 0, alone=False)
    for each in sizes:
        queue.put(Backward(np.arange(len(each)), None, np.array(each)), 0)
    flat = [n for each in sizes for n in each]
    found = queue.messages_with(rows, lambda batch: batch.lengths)
    assert sum(flat[: found - 1]) < rows
    assert found == len(flat) + 1 or sum(flat[:found]) >= rows


def test_lengths_of_a_batch_are_asked_for_once_while_it_waits():
    queue, asked = Queue(1, 0, alone=False), []
    batches = [Backward(np.arange(2) + first, None) for first in (0, 2)]

    def lengths(batch):
        asked.append(batch)
        return np.array([3, 3, 5, 5])[batch.rows]

    for batch in batches:
        queue.put(batch, 0)
    for _ in range(3):
        assert queue.messages_with(30, lengths) == 5
    assert asked == batches
    assert queue.messages_with(4, lambda batch: None, "of another part") == 4
    queue.take(3)
    assert queue.messages_with(5, lengths) == 1
    queue.take(1)
    for each, found in ((10, 3), (30, 2)):  # what waits anew may have other rows
        queue.put(batches[0], 1)
        assert queue.messages_with(40, lambda batch: np.full(2, each)) == found  # noqa: B023
        queue.take(2)
    queue.put(batches[0], 1)
    queue.put(batches[1], 1)
    assert queue.messages_with(1000, lambda batch: np.full(2, 10)) == 5
    queue.take(3)
    queue.put(batches[0], 1)
    assert queue.messages_with(250, lambda batch: np.full(len(batch), 100)) == 3


@pytest.mark.parametrize(
    "take",
    [
        lambda queue: queue.take(1),
        lambda queue: queue.take(4),
        lambda queue: queue.take_earliest(1, lambda batch: -batch.rows),
        lambda queue: queue.take_latest(1, lambda batch: batch.rows),
    ],
)
def test_a_queue_says_that_others_wait_in_it(take):
    queue = Queue(1, 0, alone=False)
    queue.put(Backward(np.arange(4), None, np.full(4, 2)), 0)
    assert queue.changed
    queue.messages_with(3, lambda batch: batch.lengths)
    queue.changed = False
    take(queue)
    assert queue.changed
    queue.put(Backward(np.arange(1), None, np.full(1, 2)), 1)
    assert queue.messages_with(100, lambda batch: batch.lengths) == queue.rows + 1


def test_of_what_waits_the_instances_that_were_admitted_first_are_taken():
    queue, turns = Queue(1, 0, alone=False), np.array([5, 0, 3, 1, 4, 2, 6])
    for first, n in ((0, 3), (3, 1), (4, 3)):
        queue.put(batch(first, n), first)

    def admitted(some):
        return turns[some.origin]

    for most, want in ((2, [1, 3]), (3, [2, 4, 5]), (4, [0, 6])):
        taken = queue.take_earliest(most, admitted)
        assert [o for b in taken for o in b.origin.tolist()] == want
        rows = join_payload(taken)[0][:, 0].tolist()
        assert rows == want
    assert not queue.rows
