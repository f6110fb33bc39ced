"""What was said first is heard first, whichever ways messages take between processes."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import TransportError
from geartrain.transport.causal import CausalOrder


class World:
    """n processes, a channel from each to each that keeps its order, and no clock.

    Every message knows all messages that happened before it was sent, so what a delivery should
    have waited for is known apart from any matrix.
    """

    def __init__(self, n: int) -> None:
        self.orders: list[CausalOrder[int]] = [CausalOrder(n, k) for k in range(n)]
        self.channels = {(k, to): deque() for k in range(n) for to in range(n) if k != to}
        self.before: list[set[int]] = []  # of each message, those that happened before it
        self.receiver: list[int] = []
        self.seen: list[set[int]] = [set() for _ in range(n)]
        self.delivered: list[list[int]] = [[] for _ in range(n)]

    def send(self, sender: int, to: int) -> int:
        message = len(self.before)
        self.before.append(set(self.seen[sender]))
        self.receiver.append(to)
        self.seen[sender].add(message)
        self.channels[sender, to].append((message, self.orders[sender].stamp(to)))
        return message

    def arrive(self, sender: int, to: int, *, ordered: bool = True) -> list[int]:
        message, stamp = self.channels[sender, to].popleft()
        found = [(sender, message)]
        if ordered:
            found = self.orders[to].receive(sender, stamp, message)
        for _, each in found:
            self.delivered[to].append(each)
            self.seen[to] |= self.before[each] | {each}
        return [each for _, each in found]

    def open(self) -> list[tuple[int, int]]:
        return [edge for edge, channel in self.channels.items() if channel]

    def overtaken(self) -> list[tuple[int, int]]:
        """Pairs that one process was told in the wrong order."""
        return [
            (early, late)
            for order in self.delivered
            for place, late in enumerate(order)
            for early in order[place + 1 :]
            if early in self.before[late]
        ]


def play(data: st.DataObject, n: int, *, ordered: bool) -> World:
    world = World(n)
    processes = st.integers(0, n - 1)
    for _ in range(data.draw(st.integers(0, 40))):
        if world.open() and data.draw(st.booleans()):
            world.arrive(*data.draw(st.sampled_from(world.open())), ordered=ordered)
        else:
            sender, to = data.draw(processes), data.draw(processes)
            if sender != to:
                world.send(sender, to)
    while world.open():
        world.arrive(*data.draw(st.sampled_from(world.open())), ordered=ordered)
    return world


@given(st.data(), st.integers(2, 5))
def test_whatever_arrives_when_causes_come_first_and_nothing_is_held_for_ever(
    data: st.DataObject, n: int
) -> None:
    world = play(data, n, ordered=True)
    assert world.overtaken() == []
    assert all(order.held == 0 and order.missing() == [] for order in world.orders)
    for k, delivered in enumerate(world.delivered):
        assert sorted(delivered) == [m for m, to in enumerate(world.receiver) if to == k]


def test_an_answer_overtakes_what_it_answers_unless_it_is_held_back() -> None:
    a, b, c = range(3)
    for ordered in (False, True):
        world = World(3)
        spawned = world.send(a, c)
        rows = world.send(a, b)
        world.arrive(a, b, ordered=ordered)
        answered = world.send(b, c)
        early = world.arrive(b, c, ordered=ordered)
        late = world.arrive(a, c, ordered=ordered)
        assert world.delivered[b] == [rows]
        if ordered:
            assert (early, late) == ([], [spawned, answered])
            assert world.overtaken() == []
        else:
            assert world.overtaken() == [(spawned, answered)]


def test_what_is_held_is_counted_and_says_what_it_waits_for() -> None:
    world = World(3)
    world.send(0, 2)
    world.send(0, 2)
    world.send(0, 1)
    world.arrive(0, 1)
    world.send(1, 2)
    world.arrive(1, 2)
    assert world.orders[2].held == 1
    assert world.orders[2].missing() == ["2 of 2 messages from 0 to 2"]
    world.arrive(0, 2)
    assert world.orders[2].missing() == ["1 of 2 messages from 0 to 2"]
    assert world.arrive(0, 2) == [1, 3]
    assert world.orders[2].held == 0


def test_what_comes_after_a_held_message_on_its_edge_waits_behind_it() -> None:
    world = World(3)
    first = world.send(0, 2)
    world.send(0, 1)
    world.arrive(0, 1)
    second, third = world.send(1, 2), world.send(1, 2)
    assert world.arrive(1, 2) == [] and world.arrive(1, 2) == []
    assert world.arrive(0, 2) == [first, second, third]


@pytest.mark.parametrize(
    ("arrivals", "told"),
    [
        ([0, 2], "from process 1 to process 0 were lost: number 2 came, expected number 1"),
        ([0, 1, 1], "from process 1 to process 0 came twice: number 1 came, expected number 2"),
        ([1], "were lost: number 1 came, expected number 0"),
    ],
)
def test_messages_that_are_lost_or_come_twice_are_named(arrivals: list[int], told: str) -> None:
    sender, receiver = CausalOrder(2, 1), CausalOrder(2, 0)
    stamps = [sender.stamp(0) for _ in range(3)]
    with pytest.raises(TransportError, match=told):
        for k in arrivals:
            receiver.receive(1, stamps[k], k)


def test_a_stamp_is_a_copy_and_counts_before_the_message() -> None:
    order = CausalOrder(2, 0)
    first, second = order.stamp(1), order.stamp(1)
    assert first.tolist() == [[0, 0], [0, 0]]
    assert second.tolist() == [[0, 1], [0, 0]]
    assert order.sent.tolist() == [[0, 2], [0, 0]]


def test_counts_by_sender_are_those_of_deliveries() -> None:
    world = World(3)
    for _ in range(4):
        world.send(1, 0)
        world.arrive(1, 0)
    assert world.orders[0].delivered == [0, 4, 0]
    assert np.array_equal(world.orders[0].sent[:, 0], [0, 4, 0])


def test_a_process_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CausalOrder\(n=2, me=2\): me is one of 0\.\.1"):
        CausalOrder(2, 2)


def test_what_was_lost_with_one_that_is_gone_is_waited_for_no_more():
    """0 tells 1, and 2; what it told 2 is lost with it, and 1's word waits for it."""
    zero, one, two = (CausalOrder(3, k) for k in range(3))
    zero.stamp(2)  # lost
    told = zero.stamp(1)
    assert one.receive(0, told, "from 0") == [(0, "from 0")]
    assert two.receive(1, one.stamp(2), "from 1") == []
    assert two.held == 1
    assert two.forget(0) == [(1, "from 1")]
    assert two.held == 0 and two.missing() == []
    one.forget(0)
    assert not one.sent[0].any() and not two.sent[0].any()  # nor does anybody say it again
    assert two.receive(1, one.stamp(2), "more") == [(1, "more")]
