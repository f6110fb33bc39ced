"""Calls of derived programs that C makes many at a time, beside the same loops by steps."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.errors import GeartrainError, WorkerError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph, Stream
from geartrain.native import library, sums
from geartrain.nodes.loop import native, words
from geartrain.nodes.loop.bound import CalledModules
from geartrain.nodes.loop.calls import LoopCalls
from geartrain.nodes.loop.layout import CallLayout
from geartrain.nodes.loop.module import NativeKept
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loop.reads import Read
from geartrain.nodes.loop.returning import Returning
from geartrain.nodes.loop.turn import KeptCall
from tests.rigs.called import (
    CASES,
    WIDTH,
    Beside,
    Gated,
    Rooted,
    Start,
    bags,
    cell,
    linear,
    sets,
    squared,
    turning,
    unsure,
    widest,
)
from tests.rigs.passes import Order, accumulate, assert_same_gradients, one_pass
from tests.rigs.passing import counted_calls
from tests.rigs.products import halved

FEW = Order(max_active=3)
MANY = 8
ORDERS = [FEW, Order(policy="random", seed=3, max_active=2), Order("threads", 2, max_active=3)]


pytestmark = pytest.mark.usefixtures("needs_kernels")


def one(name: str, run: str, order: Order = FEW) -> Any:
    make, data = CASES[name]
    torch.manual_seed(1)
    return accumulate(make(run), data(), order)


@cache
def by_steps(name: str) -> Any:
    """Gradients do not depend on the order; nobody changes them."""
    return one(name, "steps")


def both(name: str, order: Order = FEW) -> tuple[Any, Any]:
    return one(name, "whole", order), by_steps(name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls that C has made, forward and back."""
    return counted_calls(monkeypatch)


@halved(
    name=[*CASES],
    order=dict(zip(("three at a time", "two at a time", "on threads"), ORDERS, strict=True)),
)
def test_gradients_are_those_of_steps_and_c_has_made_calls(
    made: dict[str, int], name: str, order: Order
) -> None:
    whole, steps = both(name, order)
    assert_same_gradients(whole.gradients, steps.gradients)
    assert 0 < made["backward"] <= made["forward"]
    if "in flight" not in name:  # instances may come back apart
        assert made["forward"] == made["backward"]


def test_rows_that_got_a_gradient_are_counted_as_by_steps() -> None:
    for name in CASES:
        whole, steps = both(name)
        for part, state in whole.parts.items():
            assert state.counting.rows == steps.parts[part].counting.rows, (name, part)


def test_some_thousand_rows_go_back_at_a_time(
    monkeypatch: pytest.MonkeyPatch, made: dict[str, int]
) -> None:
    whole, steps = both("sums of children")
    once = dict(made)
    monkeypatch.setattr(native, "BYTES_BACK", 3)
    few, _ = both("sums of children")
    assert_same_gradients(few.gradients, whole.gradients)
    assert_same_gradients(few.gradients, steps.gradients)
    assert made["backward"] == 2 * once["backward"]


def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of the gradients that are made from where rows lie, by gradient."""
    found: list[int] = []
    before = sums.GradientCall.add

    def note(call: Any, place: Any, pieces: Any, **how: bool) -> None:
        found.append(len(pieces))
        before(call, place, pieces, **how)

    monkeypatch.setattr(sums.GradientCall, "add", note)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_weights_learn_of_rows_where_they_lie_is_what_is_kept_and_added_up_later(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, data = CASES[name]
    pieces, found = multiplied(monkeypatch), []
    for lying in (True, False):
        torch.manual_seed(1)
        if not lying:
            monkeypatch.setattr(sums.GradientCall, "may_add", lambda *_: False)
            assert pieces or "in flight" in name
            pieces.clear()
        found.append(accumulate(make("whole"), data(), FEW).gradients)
    assert_same_gradients(*found)
    assert not pieces


class Normed(nn.Module):
    """The way back adds up itself what the weights of its norm learn."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(self.norm(h))), c + h


@pytest.mark.parametrize("nbytes", [native.BYTES_BACK, 3])
def test_what_the_way_back_adds_up_is_added_with_the_products(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    def normed(state: Stream, graph: Graph) -> Stream:
        return state.through(Normed().double(), name="cell", keep="activations")

    whole: list[bool] = []
    before = sums.GradientCall.add

    def note(call: Any, place: Any, pieces: Any, **how: bool) -> None:
        whole.append(how["whole"])
        before(call, place, pieces, **how)

    monkeypatch.setattr(sums.GradientCall, "add", note)
    monkeypatch.setattr(native, "BYTES_BACK", nbytes)
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        data = [*sets(200), *sets(150)]
        found.append(accumulate(turning(normed, run), data, Order(max_active=1)).gradients)
    assert_same_gradients(*found)
    assert any(whole) and not all(whole)


def test_a_weight_of_two_modules_gets_what_both_of_them_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def twice(state: Stream, graph: Graph) -> Stream:
        gated, own = Gated().double(), {"read": "token", "keep": "activations"}
        first = state.through(gated, name="one", **own)  # type: ignore[arg-type]
        return first.through(gated, name="two", **own)  # type: ignore[arg-type]

    pieces, found = multiplied(monkeypatch), []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(turning(twice, run), sets(), FEW).gradients)
    assert_same_gradients(*found)
    assert pieces


def test_maxima_of_more_numbers_than_c_looks_at_at_once(made: dict[str, int]) -> None:
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(widest(run), bags(), FEW).gradients)
    assert_same_gradients(*found)
    assert 0 < made["backward"] == made["forward"]


def test_buffers_grow_where_more_rows_come_than_were_expected() -> None:
    make, data = CASES["a loop that decides"]
    order = Order(max_active=2)
    many = [*data()[:2], *sets(9)]
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(make(run), many, order).gradients)
    assert_same_gradients(*found)


@pytest.mark.parametrize("again", [lambda m: m.turn < m.turns, unsure], ids=("known", "decides"))
def test_places_that_copy_read_the_same_whichever_of_them_comes_first_in_a_firing(
    made: dict[str, int], again: Any
) -> None:
    """What the one copies lies elsewhere than what the other does."""

    def parted(run: str) -> Graph:
        graph = Graph(vertex=("token",), value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        own = {"keep": "activations"}
        state.join(graph.input("x", turn=0).through(Start().double(), name="first", **own))
        more, done = cell(state, graph).move(turn=lambda m: m.turn + 1).where(again)
        state.join(more)
        odd, even = done.where(lambda m: m.turns % 2 > 0)
        last = even.through(Beside().double(), name="last", **own)
        ways = odd.through(lambda h, c: c, name="c"), last.through(lambda h, c: h, name="h")
        graph.merge(*ways).through(linear(), name="readout").loss(squared)
        return graph

    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(parted(run), sets(), Order(max_active=1)).gradients)
    assert_same_gradients(*found)
    assert made["backward"] > 0


def test_addresses_are_written_anew_where_what_a_call_reads_or_writes_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[Any, ...]] = []
    before = CallLayout.place

    def place(self: CallLayout, arena: Any, fleeting: Any, held: Any) -> object:
        lying = [x.data_ptr() for v in self.values for x in held.likes(v) or ()]
        # All are held, so that no address comes again.
        found.append((self, held, (arena, fleeting), lying))
        return before(self, arena, fleeting, held)

    monkeypatch.setattr(CallLayout, "place", place)

    def thrice(state: Stream, graph: Graph) -> Stream:
        own = {"read": "token", "keep": "activations"}
        for name in ("one", "two", "three"):
            state = state.through(Gated().double(), name=name, **own)  # type: ignore[arg-type]
        return state

    torch.manual_seed(1)
    accumulate(turning(thrice, "whole", again=unsure), sets(), FEW)
    last: dict[tuple[int, int], tuple[Any, ...]] = {}
    for layout, held, rooms, lying in found:
        now, key = ([*map(id, rooms)], lying), (id(layout), id(held))
        assert last.get(key) != now
        last[key] = now
    assert len(last) > 3  # modules, in some firings


BESIDE = {"tensors put side by side"}
"""Cases in which something else than C makes some calls."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - BESIDE))
def test_c_makes_all_calls_of_a_loop_once_there_are_programs(name: str) -> None:
    kept: list[list[Any]] = []
    before = LoopCalls.take_back

    def take_back(self: LoopCalls, turn: Any, *rest: Any, **more: Any) -> None:
        kept.append(list(turn.kept))
        before(self, turn, *rest, **more)

    make, data = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopCalls, "take_back", take_back)
        accumulate(make("whole"), data(), FEW)
    assert len(kept) > 1
    assert all(isinstance(one, NativeKept) for turn in kept[1:] for one in turn if one is not None)


def test_many_experts_are_called_by_c_and_learn_what_they_learn_by_steps() -> None:
    kept: list[list[Any]] = []
    before = LoopCalls.take_back

    def take_back(self: LoopCalls, turn: Any, *rest: Any, **more: Any) -> None:
        kept.append(list(turn.kept))
        before(self, turn, *rest, **more)

    def several(state: Stream, graph: Graph) -> Stream:
        ways = state.route(lambda m: (m.payload[0][:, 0] * 1000).long() % MANY, MANY)
        said = [
            way.through(Gated().double(), name=f"expert {k}", read="token", keep="activations")
            for k, way in enumerate(ways)
        ]
        return graph.merge(*said)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopCalls, "take_back", take_back)
        for run in ("whole", "steps"):
            torch.manual_seed(1)
            found.append(accumulate(turning(several, run), sets(120), FEW).gradients)
    assert_same_gradients(*found)
    made = [one for turn in kept[1:] for one in turn if one is not None]
    assert len(made) > MANY and all(isinstance(one, NativeKept) for one in made)


def test_room_for_row_numbers_is_made_anew_where_more_come_than_it_has(
    monkeypatch: pytest.MonkeyPatch, made: dict[str, int]
) -> None:
    """Of a loop that decides they are copied to where they stay."""
    monkeypatch.setattr(words, "_POOL", 8)
    whole, steps = both("a loop that decides")
    assert_same_gradients(whole.gradients, steps.gradients)
    whole, steps = both("experts in a loop that decides")
    assert_same_gradients(whole.gradients, steps.gradients)
    assert made["forward"] > 0


def test_what_has_been_multiplied_is_not_put_together_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Counter[int] = Counter()
    seen: dict[int, Returning] = {}
    before = Returning._result

    def note(self: Returning, k: int) -> Tensor | None:
        if self._multiplied:
            seen[id(self)] = self
            asked[id(self)] += 1
        return before(self, k)

    monkeypatch.setattr(Returning, "_result", note)
    both("a cell that reads words")
    assert seen
    assert all(asked[each] == len(one._rest) for each, one in seen.items())


@pytest.mark.parametrize("starts", [None, 0, 1, 2, 3, -1])
def test_rows_that_are_not_there_are_refused(starts: int | None) -> None:
    before = CalledModules.made_of

    def harmed(read: Read) -> Read:
        if starts is not None and read.starts is not None:
            falling = read.starts.copy()
            falling[starts] = read.starts[-1] + (1 << 40)
            return replace(read, starts=falling)
        return read if starts is not None else replace(read, rows=read.rows + (1 << 40))

    def made_of(self: CalledModules, stage: Any, rows: Any) -> Any:
        tensors = before(self, stage, rows)
        return tensors and [replace(t, reads=[*map(harmed, t.reads)]) for t in tensors]

    make, data = CASES["sums of children"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CalledModules, "made_of", made_of)
        with pytest.raises(GeartrainError, match="a row is read that is not there"):
            accumulate(make("whole"), data(), FEW)


def test_members_that_begin_behind_their_end_are_refused_where_calls_are_found() -> None:
    before = CalledModules.whence

    def whence(self: CalledModules, stage: Any, rows: Any) -> Any:
        found = before(self, stage, rows)
        return found and [
            [one._replace(starts=-one.starts) if one.starts is not None else one for one in some]
            for some in found
        ]

    make, data = CASES["sums in a loop that looks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CalledModules, "whence", whence)
        with pytest.raises(GeartrainError, match="a row is read that is not there"):
            accumulate(make("whole"), data(), FEW)


def test_rows_of_which_some_get_no_gradient_teach_nothing(made: dict[str, int]) -> None:
    def half(run: str) -> Graph:
        """Rows of even tokens end without a loss."""
        graph = Graph(vertex=("token",), value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        own = {"keep": "activations"}
        state.join(graph.input("x", turn=0).through(Start().double(), name="first", **own))
        step = cell(state, graph).move(turn=lambda m: m.turn + 1)
        more, done = step.where(lambda m: m.turn < m.turns)
        state.join(more)
        odd, even = done.where(lambda m: m.token % 2 > 0)
        even.stop()
        odd.loss(lambda h, c: squared(h))
        return graph

    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(half(run), sets(), FEW).gradients)
    assert_same_gradients(*found)
    assert made["backward"] > 0


def test_a_row_without_a_gradient_that_is_not_a_number_does_no_harm() -> None:
    """What a call makes of such a row is never computed on the way back."""
    data = [
        Instance(
            {"x": torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)[:, None].expand(3, WIDTH)},
            {"token": np.array([1, 2, 3])},
            value={"turns": n},
        )
        for n in (2, 1, 3, 2, 2, 1)
    ]

    def some(run: str) -> Graph:
        graph = Graph(vertex=("token",), value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        rooted = graph.input("x", turn=0).through(
            Rooted().double(), name="first", keep="activations"
        )
        state.join(rooted)
        step = cell(state, graph).move(turn=lambda m: m.turn + 1)
        more, done = step.where(lambda m: m.turn < m.turns)
        state.join(more)
        rest, gone = done.where(lambda m: m.vertex > 0)
        gone.stop()
        rest.loss(lambda h, c: squared(h))
        return graph

    torch.manual_seed(1)
    found = accumulate(some("whole"), data, FEW).gradients
    assert all(bool(g.isfinite().all()) for g in found.values())


class First(nn.Module):
    """A state of many tensors."""

    def __init__(self, many: int) -> None:
        super().__init__()
        self.map, self.many = nn.Linear(WIDTH, WIDTH), many

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.map(x)
        return tuple([torch.tanh(y * (k + 1)) for k in range(self.many)])


class All(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, *h: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.map(h[0]))
        return y, *[x + y for x in h[1:]]


@pytest.mark.parametrize(("many", "in_c"), [(63, True), (64, False), (70, False)])
def test_a_state_of_more_tensors_than_a_number_has_bits_is_left_to_python(
    many: int, in_c: bool, made: dict[str, int]
) -> None:
    def make(run: str) -> Graph:
        torch.manual_seed(1)
        graph = Graph(value=("turns",))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        own = {"keep": "activations"}
        state.join(graph.input("x", turn=0).through(First(many).double(), name="first", **own))
        step = state.through(All().double(), name="all", **own).move(turn=lambda m: m.turn + 1)
        more, done = step.where(lambda m: m.turn < m.turns)
        state.join(more)
        done.loss(lambda *h: sum(squared(x) for x in h))
        return graph

    data = [Instance(i.inputs, value=i.value) for i in sets(1)]
    found = [accumulate(make(run), data, FEW).gradients for run in ("whole", "steps")]
    assert_same_gradients(*found)
    assert (made["backward"] > 0) == in_c


def test_a_word_that_a_table_lacks_is_told_with_the_module_and_its_instance() -> None:
    data = sets()
    data[4] = Instance(
        {"x": torch.zeros(3, WIDTH, dtype=torch.float64)},
        {"token": np.array([1, 9, 1])},
        value={"turns": 2},
    )
    with pytest.raises(WorkerError, match=r"IndexError in node 'cell'.*forward, call"):
        one_pass(turning(cell, "whole"), data, Order(max_active=1))


@pytest.mark.parametrize("name", CASES)
def test_without_kernels_in_c_calls_are_made_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch, made: dict[str, int]
) -> None:
    whole, _ = both(name)
    before = dict(made)
    monkeypatch.setattr(library, "_library", None)
    alone, steps = both(name)
    assert made == before
    assert_same_gradients(alone.gradients, steps.gradients)
    assert_same_gradients(alone.gradients, whole.gradients)


def test_what_c_has_made_goes_back_call_by_call_where_instances_come_back_apart() -> None:
    """Two instances leave by another worker's loss, one after the other."""
    make, data = CASES["sums of children"]
    torch.manual_seed(1)
    kept: list[KeptCall] = []
    graph = make("whole")
    before = NativeKept.of

    def of(self: NativeKept, number: int) -> KeptCall:
        kept.append(before(self, number))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeKept, "of", of)
        patch.setattr(native.NativeCalls, "made", lambda self, number: False)
        apart = accumulate(graph, data(), FEW).gradients
    torch.manual_seed(1)
    steps = accumulate(make("steps"), data(), FEW).gradients
    assert kept
    assert_same_gradients(apart, steps)


def test_experts_that_go_back_one_by_one_answer_for_all_that_they_were_given() -> None:
    name = "experts in a loop that decides"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.NativeCalls, "made", lambda self, number: False)
        whole, steps = both(name)
    assert_same_gradients(whole.gradients, steps.gradients)


def test_the_memory_of_a_turn_goes_with_its_last_instance_and_not_as_garbage() -> None:
    held: list[weakref.ref[Any]] = []
    before = native.NativeCalls.__init__

    def begin(self: native.NativeCalls, turn: Any, tensors: Any, *rest: Any) -> None:
        held.append(weakref.ref(self))
        before(self, turn, tensors, *rest)

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native.NativeCalls, "__init__", begin)
            make, data = CASES["sums of children"]
            accumulate(make("whole"), data(), FEW)
        assert len(held) > 1
        assert all(one() is None for one in held)
    finally:
        gc.enable()


def test_the_tables_of_a_loop_are_made_once() -> None:
    make, data = CASES["sums of children"]
    torch.manual_seed(1)
    written: list[CallLayout] = []
    before = CallLayout.write

    def write(self: CallLayout, words: Any) -> None:
        written.append(self)
        before(self, words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallLayout, "write", write)
        outcome = accumulate(make("whole"), data(), Order(max_active=1))
    (loop,) = (n for n in outcome.engine.wiring.nodes.values() if isinstance(n, LoopNode))
    assert loop.listing.firings > 2
    assert len(written) == 4  # leaf, cell and two readouts
