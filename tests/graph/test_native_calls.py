"""Calls of derived programs that C makes many at a time, beside the same loops by steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.errors import WorkerError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph, Stream
from geartrain.native import calls, library
from geartrain.nodes.loop import native
from geartrain.nodes.loop.module import NativeKept
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loop.tables import CallLayout
from geartrain.nodes.loop.turn import KeptCall
from tests.rigs.passes import Order, accumulate, assert_same_gradients, one_pass

WIDTH = 4
FEW = Order(max_active=3)
ORDERS = [FEW, Order(policy="random", seed=3, max_active=2), Order("threads", 2, max_active=3)]


@pytest.fixture(autouse=True)
def _in_c() -> None:
    if library.current() is None:
        pytest.skip("there are no kernels in C")


def squared(x: Tensor) -> Tensor:
    return x.square().flatten(1).sum(1)


def linear(into: int = WIDTH, out: int = WIDTH) -> nn.Module:
    return nn.Linear(into, out).double()


class Gated(nn.Module):
    """Two states in, two out, the second by way of the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.words = nn.Linear(WIDTH, 2 * WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, h: Tensor, c: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.gates(h + self.words(word)).chunk(2, 1)
        c = torch.sigmoid(a) * c + torch.tanh(b)
        return torch.tanh(c), c


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(x)), x


class Rooted(Start):
    """Of what is negative it makes what is no number."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.sqrt())


class Beside(nn.Module):
    """What it was given goes on beside what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(h)) + x, x


class Stacked(nn.Module):
    """Of two rows that lie side by side, one."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h.flatten(1)))


def random_trees(arity: int | None) -> list[Instance]:
    """Of at most so many children each; or of just two or none."""
    rng = np.random.default_rng(5)
    found = []
    for size in (1, 5, 9, 15, 3):
        if arity is None:
            parent = (
                rng.integers(0, np.maximum(np.arange(size), 1)) if size > 1 else np.zeros(1, int)
            )
        else:
            parent = (np.arange(size) - 1) // 2
        parent[0] = -1
        children = np.bincount(parent[1:], minlength=size) if size > 1 else np.zeros(1, int)
        leaves = np.flatnonzero(children == 0)
        columns = {
            "parent": parent,
            "siblings": np.where(parent < 0, 1, children[parent]),
            "slot": np.array([int((parent[:v] == parent[v]).sum()) for v in range(size)]),
            "token": rng.integers(0, 5, size),
        }
        rows = torch.from_numpy(rng.standard_normal((leaves.size, WIDTH)))
        found.append(Instance({"x": (rows, leaves)}, columns))
    return found


def tree(how: str, run: str) -> Graph:
    """Children meet in a parent, as a sum, a mean or a stack."""
    graph = Graph(vertex=("parent", "siblings", "slot", "token"))
    nodes = graph.loop(name="nodes", run=run)  # type: ignore[arg-type]
    own = {"keep": "activations"}
    nodes.join(graph.input("x").through(Start().double(), name="leaf", **own))
    inner, root = nodes.where(lambda m: m.parent >= 0)
    above = {"vertex": lambda m: m.parent}
    met = inner.group(by=above, size="siblings", order="slot", how=how, name="met")  # type: ignore[arg-type]
    if how == "stack":
        met = met.through(Stacked().double(), take=0, name="cell", **own)
        nodes.join(met.through(Start().double(), name="two", **own))
    else:
        nodes.join(met.through(Gated().double(), name="cell", read="token", **own))
    nodes.through(linear(), name="readout", take=0).loss(squared, name="each")
    root.through(linear(), name="last", take=1).loss(squared)
    return graph


def turning(make: Callable[[Stream, Graph], Stream], run: str, **where: Any) -> Graph:
    """A state of two tensors goes round as often as its instance says, or it decides."""
    graph = Graph(vertex=("token",), value=("turns",))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    own = {"keep": "activations"}
    state.join(graph.input("x", turn=0).through(Start().double(), name="first", **own))
    step = make(state, graph).move(turn=lambda m: m.turn + 1)
    again = where.get("again", lambda m: m.turn < m.turns)
    more, done = step.where(again, name="again")
    state.join(more)
    done.loss(lambda h, c: squared(h) + squared(c) if where.get("both", True) else squared(h))
    return graph


def cell(state: Stream, graph: Graph) -> Stream:
    return state.through(Gated().double(), name="cell", read="token", keep="activations")


def passed(state: Stream, graph: Graph) -> Stream:
    return state.through(Beside().double(), name="cell", keep="activations")


def joined(state: Stream, graph: Graph) -> Stream:
    """Both tensors go different ways, are put side by side, and taken apart."""
    one = state.through(linear(), take=0, name="one")
    other = state.through(linear(), take=1, name="other")
    mixed = graph.concat(one, other, on=("vertex", "turn"), name="both").through(
        linear(2 * WIDTH, 2 * WIDTH), name="mixed"
    )
    a, b = mixed.split(WIDTH, WIDTH)
    return graph.concat(a, b.detach(), on=("vertex", "turn"), how="tuple", name="again with")


def routed(state: Stream, graph: Graph) -> Stream:
    """One of two experts, as the payload says."""
    some, others = state.where(lambda m: m.payload[0][:, 0] > 0, name="sign")
    ways = [
        way.through(Gated().double(), name=f"expert {k}", read="token", keep="activations")
        for k, way in enumerate((some, others))
    ]
    return graph.merge(*ways)


def unsure(m: Any) -> Any:
    """Goes on as long as the payload says so, at most nine times."""
    more = (m.payload[0][:, 0].abs() > 0.05).numpy()
    return more & (m.turn < 9)


def sets(rows: int = 3) -> list[Instance]:
    rng = np.random.default_rng(2)
    return [
        Instance(
            {"x": torch.from_numpy(rng.standard_normal((rows, WIDTH)))},
            {"token": rng.integers(0, 5, rows)},
            value={"turns": n},
        )
        for n in (3, 1, 4, 1, 5, 2)
    ]


CASES: dict[str, tuple[Callable[[str], Graph], Callable[[], list[Instance]]]] = {
    "sums of children": (lambda run: tree("sum", run), lambda: random_trees(None)),
    "means of children": (lambda run: tree("mean", run), lambda: random_trees(None)),
    "children side by side": (lambda run: tree("stack", run), lambda: random_trees(2)),
    "a cell that reads words": (lambda run: turning(cell, run), sets),
    "an input that goes on": (lambda run: turning(passed, run), sets),
    "tensors put side by side": (lambda run: turning(joined, run), sets),
    "an output that nobody reads": (lambda run: turning(cell, run, both=False), sets),
    "experts by payload": (lambda run: turning(routed, run), sets),
    "a loop that decides": (lambda run: turning(cell, run, again=unsure), sets),
    "experts in a loop that decides": (lambda run: turning(routed, run, again=unsure), sets),
}


def both(name: str, order: Order = FEW) -> tuple[Any, Any]:
    make, data = CASES[name]
    outcomes = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        outcomes.append(accumulate(make(run), data(), order))
    return outcomes[0], outcomes[1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls that C has made, forward and back."""
    found = {"forward": 0, "backward": 0}
    for name in found:
        before = getattr(calls, name)

        def count(
            dtype: Any, n: int, *rest: Any, of: str = name, before: Any = before, **much: Any
        ) -> int:
            found[of] += n
            return int(before(dtype, n, *rest, **much))

        monkeypatch.setattr(calls, name, count)
    return found


@pytest.mark.parametrize("order", ORDERS, ids=("three at a time", "two at a time", "on threads"))
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_steps_and_c_has_made_calls(
    made: dict[str, int], name: str, order: Order
) -> None:
    whole, steps = both(name, order)
    assert_same_gradients(whole.gradients, steps.gradients)
    assert made["forward"] > 0
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
    monkeypatch.setattr(native, "ROWS_BACK", 3)
    few, _ = both("sums of children")
    assert_same_gradients(few.gradients, whole.gradients)
    assert_same_gradients(few.gradients, steps.gradients)
    assert made["backward"] == 2 * once["backward"]


def test_buffers_grow_where_more_rows_come_than_were_expected() -> None:
    make, data = CASES["a loop that decides"]
    order = Order(max_active=2)
    many = [*data()[:2], *sets(9)]
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(make(run), many, order).gradients)
    assert_same_gradients(*found)


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


def test_a_word_that_a_table_lacks_is_told_with_the_module_and_its_instance() -> None:
    data = sets()
    data[4] = Instance(
        {"x": torch.zeros(3, WIDTH, dtype=torch.float64)},
        {"token": np.array([1, 9, 1])},
        value={"turns": 2},
    )
    with pytest.raises(WorkerError, match=r"IndexError in node 'cell'.*forward, call"):
        one_pass(turning(cell, "whole"), data, Order(max_active=1))


def test_without_kernels_in_c_calls_are_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, made: dict[str, int]
) -> None:
    whole, _ = both("sums of children")
    before = dict(made)
    monkeypatch.setattr(library, "_library", None)
    alone, steps = both("sums of children")
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
