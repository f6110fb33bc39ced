"""Memory of a turn that the next one has again: where it lies, and that nobody reads it then."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from geartrain.native import library, pool
from geartrain.nodes.loop import arenas, buffers, hoisting
from geartrain.nodes.loop import native as loop_native
from geartrain.nodes.loop.arenas import NO_MEMORY, PassingMemory, RowMemory, nbytes_of
from geartrain.nodes.loop.back import NativeReturn
from geartrain.nodes.loop.bound import CalledModules
from geartrain.nodes.loop.buffers import FiringTensors
from geartrain.nodes.loop.layout import CallLayout
from geartrain.nodes.loop.listing import Listing
from geartrain.nodes.loop.module import TurnModule
from geartrain.nodes.loop.native import NativeCalls
from geartrain.nodes.loop.turn import Turn
from tests.rigs.called import CASES, cell, sets, turning, unsure
from tests.rigs.passes import Order, Outcome, accumulate, assert_same_gradients
from tests.rigs.products import halved

ONE = Order(max_active=1)
LOOKS = ["a loop that decides", "experts in a loop that decides", "maxima in a loop that looks"]


def passed(run: str = "whole", order: Order = ONE, again: Any = unsure) -> Outcome:
    torch.manual_seed(1)
    return accumulate(turning(cell, run, again=again), [*sets(), *sets()], order)


def noted_turns(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """By turn that has come back, where its buffers and the memory of its modules lie."""
    found: list[set[int]] = []
    before = Listing.tidy

    def tidy(self: Listing, turn: Turn) -> None:
        held: Any = turn.held
        modules: Any = turn.native
        if modules is not None:
            mine = {x.data_ptr() for number in held._made for x in held.likes(number)}
            mine |= {m.arena.pointers[0] for m in modules._modules.callable if m.arena.pointers}
            found.append(mine)
        before(self, turn)

    monkeypatch.setattr(Listing, "tidy", tidy)
    return found


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("again", [unsure, lambda m: m.turn < m.turns], ids=("found", "planned"))
def test_a_turn_has_the_memory_of_the_one_before(
    native: library.Library, monkeypatch: pytest.MonkeyPatch, again: Any
) -> None:
    turns = noted_turns(monkeypatch)
    found = passed(again=again).gradients
    assert len(turns) == 11  # in the first turn kernels are found
    pairs = list(pairwise(turns))
    # Instances that go round about as often; others want more memory, or much less.
    assert sum(bool(one & other) for one, other in pairs) > len(pairs) // 2
    assert_same_gradients(found, passed("steps", again=again).gradients)


@pytest.mark.usefixtures("needs_kernels")
def test_what_c_reads_of_a_module_is_written_again_only_where_something_has_moved(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[CallLayout] = []
    told: list[int] = []
    before, made_of = CallLayout.place, CalledModules.made_of

    def place(self: CallLayout, *given: Any) -> object:
        placed.append(self)
        return before(self, *given)

    def ask(self: Any, stage: Any, rows: Any) -> Any:
        told.append(stage.number)
        return made_of(self, stage, rows)

    monkeypatch.setattr(CallLayout, "place", place)
    monkeypatch.setattr(CalledModules, "made_of", ask)
    torch.manual_seed(1)
    graph = turning(cell, "whole", again=lambda m: (m.payload[0][:, 0] < 9).numpy() & (m.turn < 3))
    data = [sets()[0]] * 6
    outcome = accumulate(graph, data, ONE)
    assert len({*told}) == len(told)  # each module once, in the first turn
    later = len(placed)
    assert later < 3 * len({*map(id, placed)})
    torch.manual_seed(1)
    steps = turning(cell, "steps", again=lambda m: (m.payload[0][:, 0] < 9).numpy() & (m.turn < 3))
    assert_same_gradients(outcome.gradients, accumulate(steps, data, ONE).gradients)


@pytest.mark.usefixtures("needs_kernels")
def test_rows_that_a_function_has_kept_stay_as_they_were(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are views of the buffers of their turn."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keeping(m: Any) -> Any:
        kept.extend([(x, x.clone()) for x in m.payload])
        return unsure(m)

    alone = pool.is_alone
    for careless in (False, True):
        kept.clear()
        # That gradients of the same turn lie where values lay is not to be seen here.
        monkeypatch.setattr(FiringTensors, "_is_ours", lambda *_: False)
        monkeypatch.setattr(buffers, "is_alone", (lambda *_: True) if careless else alone)
        passed(again=keeping)
        assert len(kept) > 24
        assert all(torch.equal(x, then) for x, then in kept) is not careless


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("what", ["own", "made"])
def test_rows_that_wait_for_a_step_stay_as_they_were(
    native: library.Library, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Gradients of weights are made of them later, and few of a turn's rows wait as they lie."""
    monkeypatch.setattr(loop_native, "BYTES_BACK", 3)
    want = passed("steps").gradients
    assert_same_gradients(passed().gradients, want)
    if what == "own":
        monkeypatch.setattr(RowMemory, "is_alone", True)
    else:
        monkeypatch.setattr(pool, "is_alone", lambda *_: True)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same_gradients(passed().gradients, want)


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("active", [1, 3])
def test_gradients_are_those_of_turns_that_have_memory_of_their_own(
    native: library.Library, monkeypatch: pytest.MonkeyPatch, name: str, active: int
) -> None:
    make, data = CASES[name]
    found = []
    for own in (False, True):
        if own:
            monkeypatch.setattr(Listing, "_room", property(lambda _: None, lambda *_: None), False)
        torch.manual_seed(1)
        found.append(accumulate(make("whole"), data(), Order(max_active=active)).gradients)
    assert all(torch.equal(found[0][key], x) for key, x in found[1].items())


@pytest.mark.usefixtures("needs_kernels")
def test_turns_that_are_in_flight_have_memory_of_their_own(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss outside of the loop: many turns are computed before the first comes back."""
    held: list[FiringTensors] = []
    before = FiringTensors.__init__

    def begin(self: FiringTensors, *given: Any) -> None:
        before(self, *given)
        held.append(self)

    monkeypatch.setattr(FiringTensors, "__init__", begin)
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        graph = turning(cell, run, again=unsure, apart=True)
        found.append(accumulate(graph, [*sets(), *sets()], Order(max_active=3)).gradients)
    assert len(held) > 2
    assert_same_gradients(*found)


@pytest.mark.usefixtures("needs_kernels")
def test_a_room_for_many_more_rows_is_not_kept(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    before = Listing.tidy

    def tidy(self: Listing, turn: Turn) -> None:
        modules: Any = turn.native
        if modules is not None:
            sizes.append(max(m.arena.rows for m in modules._modules.callable))
        before(self, turn)

    monkeypatch.setattr(Listing, "tidy", tidy)
    torch.manual_seed(1)
    few = [sets()[1]] * 3
    data = [*few, *sets(300)[:1], *few]
    accumulate(turning(cell, "whole", again=unsure), data, ONE)
    assert max(sizes) >= 300
    assert sizes[-1] < 100


def test_memory_that_passes_is_lent_again_unless_somebody_has_a_view() -> None:
    memory = PassingMemory()
    for _ in range(2):
        memory.begin(1152)
        (whole, first), (other, second) = memory.lend(1000), memory.lend(70)
        assert other is whole and second - first == 1024
        at = whole.data_ptr() + first
        del whole, other
    memory.begin(1000)
    whole, first = memory.lend(1000)
    assert whole.data_ptr() + first == at
    view = whole.view(torch.int64)[1:3]
    view.zero_()
    del whole
    memory.begin(1024)
    whole, first = memory.lend(1000)
    whole[first : first + 1000].fill_(1)
    assert not view.any()


def test_memory_that_passes_is_there_in_turns_alone_and_for_a_few_more() -> None:
    memory, before, one = PassingMemory(), pool.shared.nbytes(), pool.LEAST
    rooms = []
    for wanted in (one, 8 * one, 7 * one, 2 * one):
        memory.begin(wanted)
        assert memory.lend(wanted)[0].nbytes == pool.shared.nbytes() - before
        rooms.append((pool.shared.nbytes() - before) / one)
        memory.rest()
        assert pool.shared.nbytes() == before
    assert rooms == [1, 8, 8, 2.5]


@pytest.mark.usefixtures("needs_kernels")
def test_rows_that_wait_for_a_step_hold_nothing_that_others_were_lent(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_native, "BYTES_BACK", 3)
    held: list[bool] = []
    before = PassingMemory.begin

    def begin(self: PassingMemory, nbytes: int) -> None:
        held.append(not pool.is_alone(self._memory))
        before(self, nbytes)

    monkeypatch.setattr(PassingMemory, "begin", begin)
    passed()
    assert len(held) > 24
    assert not any(held)


def test_larger_memory_of_a_module_lies_where_the_smaller_one_lay() -> None:
    row = pool.LEAST // 8
    blocks = [arenas.Block(torch.uint8, (row,))]
    layout: Any = SimpleNamespace(blocks=blocks, fleeting_blocks=blocks)
    module, passing = TurnModule(0, None, None, layout), PassingMemory()
    before = pool.shared.nbytes()
    module.reserve(0, 8, 8)
    assert module.lie(passing) and not module.lie(passing)
    most: list[int] = []
    empty = pool.MemoryPool.empty

    def noted(self: pool.MemoryPool, *given: Any) -> Tensor:
        found = empty(self, *given)
        most.append(self.nbytes() - before)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.MemoryPool, "empty", noted)
        module.reserve(0, 16, 16)
        module.fleeting = NO_MEMORY
        assert module.lie(passing) and module.fleeting.rows == 20
    assert most == [24 * row, 36 * row]  # of a call it has a quarter more


def test_inputs_of_calls_that_are_over_lie_where_those_of_others_do() -> None:
    blocks = [arenas.Block(torch.float64, (3,)), arenas.Block(torch.int64, ())]
    layout: Any = SimpleNamespace(blocks=[], fleeting_blocks=blocks)
    one, other = (TurnModule(k, None, None, layout) for k in range(2))
    passing = PassingMemory()
    for module, n in ((one, 5), (other, 4)):
        module.reserve(0, n, n)
        assert module.lie(passing) and module.fleeting.rows == n
        assert not module.lie(passing)
    assert one.fleeting.pointers[0] == other.fleeting.pointers[0]
    other.reserve(0, 400, 400)
    assert other.lie(passing) and other.fleeting.rows == 500
    assert one.lie(passing)  # it lay where nobody else does any more
    assert one.fleeting.pointers[0] == other.fleeting.pointers[0]


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("name", ["words that are made", "experts in a loop that decides"])
def test_inputs_that_no_way_back_reads_are_gone_when_calls_go_back(
    name: str, native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay: list[list[int]] = []
    left: list[int] = []
    make_calls, begin = NativeCalls._make, NativeReturn.begin

    def making(self: NativeCalls, *given: Any) -> int:
        lay.append([one.fleeting.pointers[0] for one in self._inputs.modules.values()])
        return make_calls(self, *given)

    def beginning(self: NativeReturn, *given: Any) -> None:
        modules = self._modules.callable
        left.extend(one.fleeting.rows for one in modules if isinstance(one, TurnModule))
        begin(self, *given)

    monkeypatch.setattr(NativeCalls, "_make", making)
    monkeypatch.setattr(NativeReturn, "begin", beginning)
    make, data = CASES[name]
    accumulate(make("whole"), data(), Order(max_active=3))
    assert max(map(len, lay)) > 1
    assert all(len({*places}) < 2 for places in lay)
    assert left and not any(left)


def test_rows_of_lent_memory_lie_where_it_says() -> None:
    memory = PassingMemory()
    blocks = [arenas.Block(torch.float64, (3,)), arenas.Block(torch.int64, ())]
    for _ in range(2):
        memory.begin(2 * nbytes_of(blocks, 5))
        one, other = (RowMemory(blocks, 5, within=memory) for _ in range(2))
        for number, each in enumerate((one, other)):
            for k in range(2):
                each.view(k, 0, 5).fill_(10 * number + k)
                assert each.view(k, 0, 5).data_ptr() == each.pointers[k]
        found = [int(x.view(k, 4, 1).sum()) for x in (one, other) for k in range(2)]
        assert found == [0, 1, 30, 11]
        assert other.nbytes() == 2 * nbytes_of(blocks, 5)  # that of both
        del one, other, each


@pytest.mark.usefixtures("needs_kernels")
def test_a_module_that_is_called_in_another_way_than_before_is_told_anew(
    native: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[str] = []
    before = TurnModule.renew

    def renew(self: TurnModule, *given: Any) -> None:
        renewed.append(self.name)
        before(self, *given)

    monkeypatch.setattr(TurnModule, "renew", renew)
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        make, data = CASES["children side by side in a loop that looks"]
        found.append(accumulate(make(run), data(), Order(max_active=2)).gradients)
    assert renewed
    assert_same_gradients(*found)


@pytest.fixture
def in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module is worth being called in two, as is usual."""
    monkeypatch.setattr(hoisting.Hoists, "may", lambda *_: False)


@pytest.mark.usefixtures("needs_kernels", "in_one")
@halved(name=[*CASES])
def test_modules_that_are_planned_are_bound_as_in_the_turn_before(
    native: library.Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bound: list[bool] = []
    before = CalledModules.again

    def again(self: CalledModules, stage: Any, rows: Any) -> Any:
        found = before(self, stage, rows)
        if self.number(stage) in self._left or found is not None:
            bound.append(found is not None)
        return found

    monkeypatch.setattr(CalledModules, "again", again)
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        make, data = CASES[name]
        found.append(accumulate(make(run), data()[:6] * 2, ONE).gradients)
    assert_same_gradients(*found)
    # Some have other programs for few rows than for many, or lie otherwise side by side.
    assert sum(bound) * 2 > len(bound) or not bound
    assert bound or any(word in name for word in ("decide", "looks", "payload"))
