"""Memory of calls that C makes many at a time: how much is asked for, and that nothing is written
behind it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph, Stream
from geartrain.native import fused, library, pool
from geartrain.nodes.loop import buffers
from geartrain.nodes.loop.arenas import Block, RowMemory, larger
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.module import TurnModule
from geartrain.nodes.loop.native import NativeCalls
from geartrain.nodes.loop.numbers import Numbers
from tests.rigs.called import (
    CASES,
    WIDTH,
    Gated,
    Start,
    linear,
    random_trees,
    sets,
    squared,
    turning,
)
from tests.rigs.passes import Order, accumulate, assert_same_gradients

MARK = 0xA5
ROWS = 2000
HIDDEN = 96


class Guarded:
    """In place of the pool: memory with marks behind it."""

    def __init__(self) -> None:
        self.all: list[tuple[Tensor, int]] = []
        self.behind = 4096

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        whole = torch.full((nbytes + self.behind,), MARK, dtype=torch.uint8)
        self.all.append((whole, nbytes))
        return whole[:nbytes].view(dtype).view(tuple(shape))

    def check(self) -> None:
        """Nobody has written behind any of it."""
        assert self.all
        assert all(bool((whole[nbytes:] == MARK).all()) for whole, nbytes in self.all)


@pytest.fixture
def guarded(native: library.Library, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    found = Guarded()
    monkeypatch.setattr(pool.shared, "empty", found.empty)
    return found


class Wide(nn.Module):
    """Computes much in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.sigmoid(torch.tanh(self.up(h)).square()) + self.up(c))
        return torch.tanh(y), c - y


def wide(state: Stream, graph: Graph) -> Stream:
    return state.through(Wide().double(), name="cell", keep="activations")


def many_rows() -> list[Instance]:
    rng = np.random.default_rng(4)
    return [
        Instance(
            {"x": torch.from_numpy(rng.standard_normal((n, WIDTH)))},
            {"token": np.zeros(n, np.int64)},
            value={"turns": 2},
        )
        for n in (7, ROWS, 9)
    ]


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_of_many_rows_asks_for_no_more_than_c_takes_at_a_time(
    threads: int, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    want = accumulate(turning(wide, "steps"), many_rows()).gradients
    guarded.behind = fused.IN_BETWEEN
    asked: list[int] = []
    before = NativeCalls._extent

    def extent(self: NativeCalls, *given: Any, **named: Any) -> tuple[Tensor | None, bool]:
        room, much = before(self, *given, **named)
        asked.append(0 if room is None else room.nbytes)
        return room, much

    monkeypatch.setattr(NativeCalls, "_extent", extent)
    monkeypatch.setattr(library, "MUCH_WORK", 1)  # as many threads as there are
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    found = accumulate(turning(wide, "whole"), many_rows(), Order(max_active=1)).gradients
    assert_same_gradients(found, want)
    guarded.check()
    most = fused.IN_BETWEEN * threads
    assert ROWS * HIDDEN * 8 > most / threads
    assert most / 2 < max(asked) <= most


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_written_behind_any_memory_of_a_turn(name: str, guarded: Guarded) -> None:
    make, data = CASES[name]
    accumulate(make("whole"), data(), Order(max_active=3))
    guarded.check()


def test_where_more_rows_come_than_were_expected_there_is_room_for_a_few_more() -> None:
    assert larger(0, 7, 0) == 7 and larger(0, 7, 90) == 90
    assert larger(100, 101, 0) == 200
    assert larger(100, 101, 100) == 125
    assert larger(100, 300, 100) == 300


def test_buffers_that_were_expected_to_do_grow_by_a_quarter(native: library.Library) -> None:
    """Those of one that found its calls one by one, and of the last firing knew how many."""
    for expected, room in ((0, 128), (64, 80)):
        numbers = Numbers(1)
        held = FiringTensors(numbers, {0: expected} if expected else None)
        numbers.more(0, 64)
        x = torch.zeros(1, WIDTH)
        assert held.reserve(0, "one", [x])[0].shape[0] == 64
        numbers.more(0, 1)
        assert held.reserve_rows(0)[0].shape[0] == room
        memory, layout = RowMemory([], 64), SimpleNamespace(blocks=[])
        one: Any = SimpleNamespace(arena=memory, call_rows=64, size=64, layout=layout)
        TurnModule.reserve(one, expected, 1, 1)
        assert one.arena.rows == room


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_what_grows_move_unless_somebody_else_has_them(shared: bool) -> None:
    n, wide = 1 << 10, 1 << 9
    x = torch.arange(n * wide).reshape(n, wide)
    blocks = [Block(torch.int64, (wide,)), Block(torch.int64, ())]
    memory = RowMemory(blocks, n)
    memory.write(0, 0, n, x)
    memory.write(1, 0, n, x[:, 1].contiguous())
    seen = [memory.view(0, 0, n)[1:]] if shared else []
    grown = memory.grown(n + 9, n)
    assert torch.equal(grown.view(0, 0, n), x) and torch.equal(grown.view(1, 0, n), x[:, 1])
    assert all(torch.equal(one, x[1:]) for one in seen)
    numbers = Numbers(1)
    held = FiringTensors(numbers)
    numbers.more(0, n)
    (rows,) = held.reserve(0, "one", [x])
    rows[:] = x
    seen = [rows[1:]] if shared else []
    del rows
    numbers.more(0, 1)
    assert torch.equal(held.reserve_rows(0)[0][:n], x)
    assert all(torch.equal(one, x[1:]) for one in seen)


@pytest.mark.usefixtures("needs_kernels")
def test_gradients_lie_where_values_lay_that_nobody_has_any_more(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nowhere else: views that somebody keeps stay as they were."""
    over: list[bool] = []
    had: list[tuple[Tensor, Tensor]] = []
    seen: set[tuple[FiringTensors, int]] = set()
    before = FiringTensors.zeros

    def zeros(self: FiringTensors, number: int, *read: Any) -> list[Tensor | None]:
        columns = self.likes(number) or ()
        if keep and (self, number) not in seen:
            seen.add((self, number))
            had.extend([(x[1:3], x[1:3].clone()) for x in columns])
        found = before(self, number, *read)
        pairs = zip(found, columns, strict=True)
        over.extend(g.data_ptr() == x.data_ptr() for g, x in pairs if g is not None)
        return found

    monkeypatch.setattr(FiringTensors, "zeros", zeros)
    keep = False
    first = _passed()
    assert any(over) and not all(over)  # a column is read on the way back
    keep = True
    assert_same_gradients(_passed(), first)
    assert had and all(torch.equal(x, then) for x, then in had)


def _passed() -> Any:
    torch.manual_seed(0)
    return accumulate(turning(wide, "whole"), sets(), Order(max_active=3)).gradients


def test_what_is_read_on_the_way_back_is_not_written_over(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a largest member goes where it is the largest."""
    results = []
    for spared in (True, False):
        if not spared:
            monkeypatch.setattr(buffers, "is_alone", lambda x: False)
        torch.manual_seed(0)
        results.append(accumulate(of_largest(), random_trees(None), Order(max_active=2)).gradients)
    assert_same_gradients(*results)


def of_largest() -> Graph:
    graph = Graph(vertex=("parent", "siblings", "slot", "token"))
    nodes = graph.loop(name="nodes", run="whole")
    nodes.join(graph.input("x").through(Start().double(), name="leaf", keep="activations"))
    inner, root = nodes.where(lambda m: m.parent >= 0)
    above = {"vertex": lambda m: m.parent}
    met = inner.group(by=above, size="siblings", order="slot", how="max", name="met")
    nodes.join(met.through(Gated().double(), name="cell", read="token", keep="activations"))
    nodes.through(linear(), name="readout", take=0, keep="activations").loss(squared, name="each")
    root.through(linear(), name="last", take=1).loss(squared)
    return graph
