"""Memory of loops at its peak: shares that go back, what they ask for, and room for the next turn's
rows, so that it need not be lent anew."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.frames.message import IntArray
from geartrain.native import fused, library, pool
from geartrain.nodes.loop import native as loop_native
from geartrain.nodes.loop.arenas import NO_MEMORY, few_more
from geartrain.nodes.loop.back import NativeReturn
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.door import Came, LoopDoor
from geartrain.nodes.loop.listing import Listing, RowsSeen
from geartrain.nodes.loop.module import NativeKept, TurnModule
from geartrain.nodes.loop.native import NativeCalls
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.several import SeveralModule
from geartrain.nodes.loop.turn import Turn
from tests.rigs.called import CASES, WIDTH, cell, sets, turning
from tests.rigs.passes import Order, accumulate
from tests.rigs.passing import noted_asking


class Modules(list[Any]):
    """Those of a turn, all of which C calls."""

    @property
    def callable(self) -> list[Any]:
        return self


def test_a_few_more_are_as_many_as_there_have_been_or_a_quarter() -> None:
    assert few_more(64, 0) == few_more(64, 40) == 64
    assert few_more(64, 70) == 70 and few_more(64, 900) == 80


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([10] * 9, [3, 3, 3]),  # not 4, 4 and 1
        ([10] * 4, [4]),
        ([90, 10, 10], [1, 2]),  # the last to go first
        ([3], [1]),
        ([0, 0], [2]),
    ],
)
def test_calls_go_back_in_equal_shares(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], shares: Sequence[int]
) -> None:
    monkeypatch.setattr(loop_native, "BYTES_BACK", 40)
    module = SimpleNamespace(number=0, nbytes_back=lambda first, n: sizes[first])
    kept: list[Any] = [NativeKept.__new__(NativeKept) for _ in sizes]
    calls: Any = SimpleNamespace(_turn=SimpleNamespace(kept=kept), _modules=Modules([module]))
    listed = [[0, 1, k] for k in range(len(sizes))]
    begins = [*NativeCalls._shares(calls, len(sizes), listed), len(sizes)]
    assert [end - begin for begin, end in pairwise(begins)] == shares
    kept[0] = None
    if len(sizes) > 1:  # one that Python has made goes back by itself
        assert NativeCalls._shares(calls, len(sizes), listed)[0] == 1


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("name", CASES)
def test_what_passes_on_the_way_back_is_asked_for_once_and_no_more_than_that(
    native: library.Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked = noted_asking(monkeypatch)
    make, data = CASES[name]
    accumulate(make("whole"), data(), Order(max_active=3))
    assert asked and not any(asked)


def test_turns_that_are_planned_are_to_have_room_for_the_most_so_far() -> None:
    seen = RowsSeen()
    for n in (70, 80, 60):
        seen.note({0: n}, 5, ahead=True)
    assert seen.expected(5, ahead=True) == {0: 80}
    assert seen.expected(5, ahead=False) == {}
    seen.note({0: 80}, 10, ahead=False)
    assert seen.expected(5, ahead=False) == {0: 45} and seen.expected(5, ahead=True) == {0: 80}


def test_buffers_of_a_turn_that_is_planned_have_room_for_a_few_more() -> None:
    columns = [torch.zeros(64, WIDTH)]
    for most, room in ((70, 70), (900, 80), (30, 64)):
        numbers = Numbers(2)
        numbers.more(0, 64), numbers.more(1, 64)
        held = FiringTensors(numbers, {0: most, 1: most}, None, {})
        assert held.reserve(0, "one", columns)[0].shape[0] == room
        held.put(1, "one", 0, columns)
        assert (held.likes(1) or ())[0] is columns[0]  # all there are need no buffer


def test_gradients_of_all_rows_are_copied_and_others_added() -> None:
    numbers = Numbers(1)
    numbers.more(0, 3)
    held = FiringTensors(numbers, {0: 3}, None, {})
    held.put(0, "one", 0, [torch.zeros(3, 2)])
    first = torch.arange(6.0).view(3, 2)
    given = first.clone()
    held.scatter(0, np.arange(3), (given,), None)
    held.scatter(0, np.array([2, 0]), (torch.ones(2, 2),), None)
    (found,) = held.gradient(0, 0, 3, None)
    assert found is not None and found.data_ptr() != given.data_ptr()
    assert torch.equal(given, first)  # whoever gave it may have it still
    assert torch.equal(found, first + torch.tensor([[1.0], [0.0], [1.0]]))


@pytest.mark.parametrize("rows", [[0, 1], [1, 2], [2, 1, 0], [0, 1, 2]])
@pytest.mark.parametrize("told", [False, True])
def test_gradients_come_to_their_rows_and_to_where_c_was_told(rows: list[int], told: bool) -> None:
    numbers = Numbers(1)
    numbers.more(0, 3)
    held = FiringTensors(numbers, {0: 3}, None, {})
    held.put(0, "one", 0, [torch.zeros(3, 2)])
    there = held.zeros(0)[0] if told else None
    gradient = 1 + torch.arange(2.0 * len(rows)).view(-1, 2)
    held.scatter(0, np.array(rows), (gradient,), None)
    (found,) = held.gradient(0, 0, 3, None)
    assert found is not None
    assert torch.equal(found, torch.zeros(3, 2).index_add(0, torch.tensor(rows), gradient))
    assert there is None or found.data_ptr() == there.data_ptr()


def test_what_a_value_had_is_free_before_it_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could not lie where that lay, and the pool would reach further."""
    columns, lent = [torch.zeros(16, WIDTH)], list[int]()
    numbers = [Numbers(1), Numbers(1)]
    numbers[0].more(0, 16), numbers[1].more(0, 64)
    first = FiringTensors(numbers[0], {}, None, {})
    before = ref(first.reserve(0, "one", columns)[0])
    second = FiringTensors(numbers[1], {}, first.leave(), {})
    del first
    assert before() is not None
    empty = FiringTensors._empty

    def asked(self: FiringTensors, x: Tensor, n: int) -> Tensor:
        lent.append(n)
        assert before() is None
        return empty(self, x, n)

    monkeypatch.setattr(FiringTensors, "_empty", asked)
    second.reserve(0, "one", columns)
    assert lent == [64]


@pytest.mark.usefixtures("needs_kernels")
def test_what_calls_compute_in_between_is_lent_after_what_the_way_back_makes_and_goes_first(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_native, "_MUCH", 1)
    monkeypatch.setattr(loop_native, "BYTES_BACK", 1)  # many shares
    rooms, looks = list[Any](), list[str]()
    extent, begin, turn = NativeCalls._extent, NativeReturn.begin, NativeCalls.__init__

    def none_is_left(when: str) -> None:
        assert not any(room() is not None for room in rooms), when
        looks.append(when)

    def lend(self: NativeCalls, *given: Any, forward: bool) -> tuple[Tensor | None, bool]:
        room, much = extent(self, *given, forward=forward)
        if room is not None:
            rooms.append(ref(room))
        return room, much

    def back(self: NativeReturn, *given: Any) -> None:
        none_is_left("before the way back")
        begin(self, *given)

    def another(self: NativeCalls, *given: Any) -> None:
        none_is_left("before a turn")
        turn(self, *given)

    monkeypatch.setattr(NativeCalls, "__init__", another)
    monkeypatch.setattr(NativeCalls, "_extent", lend)
    monkeypatch.setattr(NativeReturn, "begin", back)
    make, data = CASES["a loop that decides"]
    accumulate(make("whole"), data(), Order(max_active=1))
    assert rooms and min(map(looks.count, ("before a turn", "before the way back"))) > 4


def test_of_members_there_is_room_for_as_many_as_a_turn_has_had() -> None:
    layout = SimpleNamespace(most=0, blocks=([], []), form=SimpleNamespace(inside=True))
    for members, room in ((70, 70), (64, 70), (30, 37)):
        lengths = np.full(2, members // 2)
        one: Any = SimpleNamespace(
            layout=layout,
            size=0,
            members=0,
            arenas=[NO_MEMORY, NO_MEMORY],
            _ends=np.zeros(1, np.int64),
            _next=(lengths, lengths),
        )
        SeveralModule.reserve(one, 0, 2, 2)
        assert [arena.rows for arena in one.arenas] == [2, room]


def test_numbers_of_members_have_room_for_a_few_more_and_those_of_a_turn_before_go() -> None:
    layout = SimpleNamespace(most=0, blocks=([], []), form=SimpleNamespace(inside=False))
    one: Any = SimpleNamespace(layout=layout, arenas=[NO_MEMORY, NO_MEMORY], _ends=np.zeros(9))
    cells = np.arange(60)
    for used, members, room in ((0, 64, 64), (0, 70, 70), (60, 4, 75), (60, 20, 80)):
        one.size, one.members, one._cells = 0, used, cells
        one._next = np.full(2, members // 2), np.full(2, members // 2)
        SeveralModule.reserve(one, 0, 2, 2)
        assert one._cells.size == room and (one._cells[:used] == cells[:used]).all()


@pytest.mark.usefixtures("needs_kernels")
def test_in_a_later_fit_no_memory_of_a_turn_is_lent_anew(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turns are no larger than those of the first, in which it moves."""
    found: list[list[int]] = []
    before = Listing.tidy

    def tidy(self: Listing, turn: Turn) -> None:
        held, calls = turn.held, turn.native
        if calls is not None:
            assert isinstance(held, FiringTensors) and isinstance(calls, NativeCalls)
            values = [x.shape[0] for k in sorted(held._made) for x in held.likes(k) or ()]
            modules = [m.arena.rows for m in calls._modules.callable if isinstance(m, TurnModule)]
            assert values and modules
            found.append([*values, *modules])
        before(self, turn)

    monkeypatch.setattr(Listing, "tidy", tidy)
    torch.manual_seed(1)
    session = gt.Session(
        turning(cell, "whole"),
        rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.0), update_every=gt.Instances(1)),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=1,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
        seed=0,
    )
    data = [sets(n)[0] for n in (40, 41, 42, 43, 44, 45)]
    for fit in range(1, 5):
        session.fit(data, epochs=fit)
    later = found[-12:]  # of the last two
    assert all(rooms == later[0] for rooms in later)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("name", ["sums of children", "a cell that reads words"])
def test_rows_that_have_gone_in_have_no_memory_when_calls_go_back(
    native: library.Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether that is in the same firing or later."""
    gone_in: list[ref[Tensor]] = []
    kept: list[bool] = []
    take, back = LoopDoor.take, NativeCalls._back

    def takes(self: LoopDoor, slots: IntArray) -> list[Came]:
        came = take(self, slots)
        gone_in.extend([ref(x) for each in came for x in each.columns])
        return came

    def goes(self: NativeCalls, *given: Any) -> None:
        kept.extend([x() is not None for x in gone_in])
        back(self, *given)

    monkeypatch.setattr(LoopDoor, "take", takes)
    monkeypatch.setattr(NativeCalls, "_back", goes)
    make, data = CASES[name]
    accumulate(make("whole"), data(), Order(max_active=1))
    assert kept and not any(kept)


def test_packed_weights_lie_apart_from_what_comes_and_goes(native: library.Library) -> None:
    before, there = pool.shared.nbytes(), pool.lasting.nbytes()
    packing = fused.Packing(torch.float32)
    packing.add(torch.zeros(256, 256), turned=False)
    assert pool.shared.nbytes() == before
    assert pool.lasting.nbytes() == there + 256 * 256 * 4
