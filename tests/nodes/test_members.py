"""Members of groups and sides of joins in a plan, against dictionaries: whatever comes when."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import GraphError
from geartrain.frames.frame import Arena, Schema
from geartrain.frames.message import INSTANCE, VERTEX, IntArray
from geartrain.nodes.group import Group
from geartrain.nodes.join import JoinNode
from geartrain.nodes.loop import sides as sides_of_joins
from geartrain.nodes.loop import sorting
from geartrain.nodes.loop.members import Members
from geartrain.nodes.loop.sides import Sides
from geartrain.nodes.node import Place

KEY, SLOT, SIZE = 2, 3, 4
SHUFFLED = {"seed": st.integers(0, 10**6), "batches": st.integers(1, 9), "ordered": st.booleans()}


def place() -> Place:
    names = ["", "", "key", "slot", "many"]
    names[INSTANCE], names[VERTEX] = "instance", "vertex"
    return Place(1, "meeting", Arena(), Schema(names, [], None, []))


def group(*, ordered: bool, size: Any = lambda m: m.many) -> Group:
    return Group(place(), [KEY], None, size, (lambda m: m.slot) if ordered else None, "sum")


def rows(draw: np.random.Generator, keys: int) -> IntArray:
    """Columns of all members of some groups of one to four, of three instances, shuffled."""
    found = []
    for key in range(keys):
        many = int(draw.integers(1, 5))
        for slot in range(many):
            column = np.zeros(5, np.int64)
            column[INSTANCE], column[KEY], column[SLOT], column[SIZE] = key % 3, key, slot, many
            column[VERTEX] = draw.integers(0, 100)
            found.append(column)
    return draw.permutation(np.stack(found, 1), axis=1)


@settings(max_examples=40)
@given(**SHUFFLED)
def test_groups_are_complete_when_a_dictionary_says_so(seed, batches, ordered):
    draw = np.random.default_rng(seed)
    state = rows(draw, keys=6)
    waiting, members = defaultdict(list), Members(group(ordered=ordered))
    for numbers in np.array_split(np.arange(state.shape[1]), batches):
        if not numbers.size:
            continue
        want = {}
        for n in numbers.tolist():
            key = (int(state[INSTANCE, n]), int(state[KEY, n]))
            waiting[key].append(n)
            if len(waiting[key]) == state[SIZE, n]:
                by = (lambda n: state[SLOT, n]) if ordered else (lambda n: tuple(state[:, n]))
                first = waiting[key][0]
                want[key] = first, sorted(waiting.pop(key), key=by)
        found, sizes, states = members.complete(numbers, state[:, numbers])
        pieces = np.split(found, np.cumsum(sizes)[:-1]) if sizes.size else []
        got = {
            (int(s[INSTANCE]), int(s[KEY])): p.tolist()
            for s, p in zip(states.T, pieces, strict=True)
        }
        assert got == {key: inside for key, (_, inside) in want.items()}
        for s in states.T:
            first, _ = want[int(s[INSTANCE]), int(s[KEY])]
            assert s.tolist() == state[:, first].tolist()
        assert len(members.story()) == min(len(waiting), 5) + (len(waiting) > 5)
    assert not waiting and not members.story()


@pytest.mark.parametrize(
    ("slots", "size", "words"),
    [
        ([0, 1, 1], 3, "for position 1, but the group has 3"),
        ([0, 3], 3, "for position 3, but the group has 3"),
        ([-1], 3, "for position -1"),
        ([0], 0, "got size 0 .* a child how many children its parent has"),
    ],
)
def test_a_place_that_is_none_or_taken_is_refused(slots, size, words, monkeypatch):
    monkeypatch.setattr(Group, "key", lambda *_: "somebody")
    members, state = Members(group(ordered=True)), np.zeros((5, 1), np.int64)
    with pytest.raises(GraphError, match=words):
        for k, slot in enumerate(slots):
            state[SLOT], state[SIZE] = slot, size
            members.complete(np.array([k]), state.copy())


def test_a_member_too_many_is_refused_where_none_has_a_place(monkeypatch):
    monkeypatch.setattr(Group, "key", lambda *_: "somebody")
    members, state = Members(group(ordered=False, size=2)), np.zeros((5, 3), np.int64)
    with pytest.raises(GraphError, match="for position 2, but the group has 2"):
        members.complete(np.arange(3), state)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    batches=st.integers(1, 9),
    ports=st.integers(2, 4),
    key=st.sampled_from([KEY, VERTEX]),
    far=st.sampled_from([1, 90]),
)
def test_sides_are_joined_when_a_dictionary_says_so(seed, batches, ports, key, far):
    """A vertex is found by a table; another column with its instance, by a sort."""
    draw = np.random.default_rng(seed)
    handles = [[] for _ in range(ports)]
    handles[1] = [SIZE]  # taken over from port 1
    sides = Sides(JoinNode(place(), ports, [key], "tuple", handles), ports)
    state = np.zeros((5, 7 * ports), np.int64)
    state[key], state[INSTANCE] = far * np.arange(7).repeat(ports), np.arange(7).repeat(ports) % 2
    state[SLOT], state[SIZE] = draw.integers(0, 100, (2, 7 * ports))
    port_of, waiting = np.tile(np.arange(ports), 7), defaultdict(dict)
    order = draw.permutation(7 * ports)
    for some in np.array_split(order, batches):
        for port in range(ports):
            numbers = some[port_of[some] == port]
            if not numbers.size:
                continue
            want = {}
            for n in numbers.tolist():
                waiting[int(state[key, n])][port] = n
                if len(waiting[int(state[key, n])]) == ports:
                    want[int(state[key, n])] = waiting.pop(int(state[key, n]))
            found, states = sides.complete(port, numbers, state[:, numbers])
            assert {*states[key].tolist()} == set(want)
            for at, joined in enumerate(states.T):
                mine = want[int(joined[key])]
                assert [int(side[at]) for side in found] == [mine[p] for p in range(ports)]
                assert joined[SLOT] == state[SLOT, mine[0]]
                assert joined[SIZE] == state[SIZE, mine[1]]
    assert not waiting and not sides.story()


@pytest.mark.parametrize("key", [KEY, VERTEX])
def test_a_second_row_of_a_port_is_refused_and_who_is_absent_is_told(key, monkeypatch):
    monkeypatch.setattr(JoinNode, "key", lambda *_: "somebody")
    sides, state = Sides(JoinNode(place(), 3, [key], "tuple"), 3), np.zeros((5, 1), np.int64)
    for port in range(2):
        sides.complete(port, np.array([port]), state)
    with pytest.raises(GraphError, match="two rows of port 2 have the key somebody"):
        sides.complete(2, np.array([4, 5]), state.repeat(2, 1))
    sides = Sides(JoinNode(place(), 3, [key], "tuple"), 3)
    sides.complete(1, np.array([4]), state)
    assert sides.story() == ["'meeting' waits for port [0, 2] of somebody"]
    with pytest.raises(GraphError, match="two rows of port 1 have the key somebody"):
        sides.complete(1, np.array([5]), state)
        sides.story()  # where several columns are the key, and the others never come


def test_sides_are_sorted_when_all_ports_have_come(monkeypatch):
    seen, before = [], sorting.by_key

    def by_key(keys, places):
        seen.append(places.size)
        return before(keys, places)

    monkeypatch.setattr(sides_of_joins, "by_key", by_key)
    sides, state = Sides(JoinNode(place(), 3, [KEY], "tuple"), 3), np.zeros((5, 4), np.int64)
    state[KEY] = np.arange(4)
    for port in range(3):
        found, _ = sides.complete(port, np.arange(4 - port), state[:, : 4 - port])
        assert found[0].tolist() == ([0, 1] if port == 2 else [])
    assert seen == [9]
    found, _ = sides.complete(2, np.array([9]), state[:, 2:3])  # one more waits for this one
    assert [side.tolist() for side in found] == [[2], [2], [9]]
    assert seen == [9, 4]
    sides.complete(1, np.array([3]), state[:, 3:])
    assert seen == [9, 4]


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("key", [KEY, VERTEX])
@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_that_come_at_once_by_every_port_are_joined_in_the_order_of_their_keys(
    shuffled, key, many
):
    """Rows of a vertex may be of several slots."""
    draw = np.random.default_rng(0)
    for left in (0, 1):  # a row that waits since before has all of them sorted together
        sides, found = Sides(JoinNode(place(), 2, [key, SLOT], "tuple", [[], [SIZE]]), 2), []
        state = np.zeros((5, 8), np.int64)
        state[key], state[SLOT] = np.arange(8) % (8 // many), np.arange(8) // (8 // many)
        state[SIZE] = np.arange(8)
        if left:
            odd = np.full((5, 1), 9)
            assert not sides.complete(0, np.array([99]), odd)[0][0].size
        for port in (0, 1):
            order = draw.permutation(8) if shuffled else np.arange(8)
            given = state[:, order]
            given[SIZE] += 10 * port
            kept = given.copy()
            found = sides.complete(port, order, given)
            assert (given == kept).all()
        assert [side.tolist() for side in found[0]] == [[*range(8)]] * 2
        assert found[1][[SLOT, key]].T.tolist() == sorted(state[[SLOT, key]].T.tolist())
        assert found[1][SIZE].tolist() == [*range(10, 18)]


def test_rows_that_come_twice_by_every_port_are_refused(monkeypatch):
    monkeypatch.setattr(JoinNode, "key", lambda *_: "somebody")
    sides, state = Sides(JoinNode(place(), 2, [KEY], "tuple"), 2), np.zeros((5, 2), np.int64)
    sides.complete(0, np.arange(2), state)
    with pytest.raises(GraphError, match="two rows of port 0 have the key somebody"):
        sides.complete(1, np.arange(2), state.copy())


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3))
def test_rows_ascend_when_their_keys_do(columns):
    keys = [np.array(column) for column in columns]
    rows = [*zip(*columns, strict=True)]
    assert sorting.ascend(keys) == all(a < b for a, b in pairwise(rows))
    assert sorting.ascend(keys, strictly=False) == all(a <= b for a, b in pairwise(rows))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    ranges=st.lists(st.sampled_from([1, 2, 7, 10**4, 10**9, 2**61]), min_size=1, max_size=5),
    many=st.sampled_from([1, 10**6]),
)
def test_rows_are_in_the_order_of_all_keys_however_they_are_sorted(seed, ranges, many):
    draw = np.random.default_rng(seed)
    keys = [draw.integers(-each, each, 300) if each > 1 else np.full(300, 3) for each in ranges]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "_MANY", many)
        found = sorting.order_of(keys)
        order, starts, counts = sorting.by_key(keys, None)
        with_places = sorting.by_key(keys, draw.permutation(300))[0]
    assert found.tolist() == np.lexsort(tuple(keys)[::-1]).tolist()
    assert order.tolist() == np.lexsort(tuple(keys)).tolist()
    distinct = {tuple(int(key[i]) for key in keys) for i in range(300)}
    assert len(distinct) == starts.size
    assert counts.sum() == 300
    assert sorted(with_places.tolist()) == [*range(300)]
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        mine = {tuple(int(key[i]) for key in keys) for i in order[start : start + count]}
        assert len(mine) == 1
