"""Memories in the one firing that goes from inputs to losses, where C reads them in the loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain import Graph, Inside, Instance
from geartrain.derived import auto
from geartrain.derived.ragged import choice
from geartrain.derived.registry import REGISTRY
from geartrain.native.fused import available
from geartrain.nodes.choice import UNDECIDED, Experience
from geartrain.nodes.loop.columns import SideBySide
from geartrain.nodes.loop.tensors import AbstractTensors
from geartrain.nodes.loop.values import AbstractValue
from tests.rigs.counted import count_made
from tests.rigs.passes import Order, accumulate, assert_same_gradients

Chosen = Literal["derived", "again"] | None
Before = Literal["section", "loop"] | None


class Last(nn.Module):
    """The last row of each bundle."""

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        return x[inside.lengths.cumsum(0) - 1]


class Hop(nn.Module):
    """What a row has read, and whether that is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.new = nn.Linear(2, 2).double(), nn.Linear(4, 2).double()

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        score = (memory * self.query(h)[:, None]).sum(2).masked_fill(~mask, -1e9)
        read = (score.softmax(1)[..., None] * memory).sum(1)
        return torch.tanh(self.new(torch.cat([h, read], 1)))


class Turn(nn.Module):
    """A cell that nobody has written a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2).double()

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.sin(self.map(h))


def hops(chosen: dict[str, Chosen], run: str = "auto", before: Before = None) -> Graph:
    """Members by a group; a question that hops over them as long as it says. Before the group there
    is a section with it, or a loop that goes round twice."""
    torch.manual_seed(3)
    graph = Graph(value=("members",), run=run)  # type: ignore[arg-type]
    x = graph.input("x")
    if before == "section":
        x = x.through(nn.Linear(2, 2).double(), name="first")
    elif before == "loop":
        again = graph.loop(name="again")
        again.join(x.move(step=0))
        cell = again.through(nn.Linear(2, 2).double(), name="cell").move(step=lambda m: m.step + 1)
        round, x = cell.where(lambda m: m.step < 2)
        again.join(round)
    made = x.through(nn.Linear(2, 2).double(), name="made")
    bundles = made.group(by="instance", size="members", order="vertex", how="bundle", name="all")
    held = bundles.hold(name="held")
    last = held.through(Last(), name="last", inside=True, pool=True)
    asked = graph.input("question", step=0).through(nn.Linear(2, 2).double(), name="asked")
    rounds = graph.loop(name="rounds")
    begun = graph.concat(asked, last, on="instance", how="tuple")
    rounds.join(begun.through(lambda a, b: a - b, name="begun"))
    seen = rounds.attend(held, Hop(), name="hop").move(step=lambda m: m.step + 1)
    more, done = seen.where(lambda m: (m.step < 4) & (m.payload[0][:, 0] < 0.1).numpy())
    rounds.join(more)
    done.through(nn.Linear(2, 1).double(), name="end").loss(lambda y: y[:, 0].square())
    row = (2,), torch.float64
    graph.check({"x": row, "question": row}, questions()[0])  # whose handles go through the concat
    for through in graph.throughs():
        through.experience.chosen = chosen.get(through.name)
    return graph


def questions() -> list[Instance]:
    torch.manual_seed(4)
    return [
        Instance(
            {
                "x": (torch.randn(n, 2).double(), np.arange(n)),
                "question": (torch.randn(1, 2).double(), [0]),
            },
            vertex={},
            value={"members": n},
        )
        for n in (1, 4, 2, 3, 5)
    ]


@pytest.mark.parametrize(
    ("hop", "last", "within"),
    [
        ("derived", "derived", True),
        ("derived", None, True),
        (None, None, False),
        ("again", None, False),
        ("derived", "again", True),  # it has no weights: updates go back together
    ],
)
@pytest.mark.parametrize("most", [4096, 2])
def test_a_memory_is_held_within_where_who_reads_it_in_the_loop_is_better_in_c(
    hop: Chosen, last: Chosen, within: bool, most: int
) -> None:
    graph = hops({"hop": hop, "last": last})
    (line,) = [line for line in str(graph).splitlines() if "on one worker, with" in line]
    assert (", last," in line) is within and ("held, " in line) is within
    got = accumulate(graph, questions(), Order(max_rows=most))
    want = accumulate(hops({}, "steps"), questions(), Order(max_rows=most))
    assert_same_gradients(got.gradients, want.gradients)
    assert got.sums["loss"] == pytest.approx(want.sums["loss"])


@pytest.mark.parametrize(("before", "within"), [("section", True), ("loop", False)])
def test_a_section_runs_with_the_loop_behind_it_that_payloads_decide_and_a_loop_does_not(
    before: Before, within: bool
) -> None:
    """A loop that columns decide is planned, which what payloads decide is not."""
    chosen: dict[str, Chosen] = {"hop": "derived", "last": "derived"}
    graph = hops(chosen, before=before)
    lines = [line for line in str(graph).splitlines() if "on one worker, with" in line]
    (line,) = [line for line in lines if "'rounds'" in line]
    assert ("'first'" in line or "'again'" in line) is within
    got = accumulate(graph, questions(), Order())
    want = accumulate(hops({}, "steps", before), questions(), Order())
    assert_same_gradients(got.gradients, want.gradients)
    assert got.sums["loss"] == pytest.approx(want.sums["loss"])


@pytest.mark.parametrize("most", [4096, 2])
def test_bundles_are_copied_in_c_to_where_they_are_held_though_payload_decides(
    most: int, needs_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = count_made(monkeypatch, lambda module: module.inner is None)
    monkeypatch.setattr(choice, "_ratio", lambda *_: 0.5)
    monkeypatch.setattr(choice, "FIRINGS", 1)
    monkeypatch.setattr(choice, "ROWS", 1)
    graph = hops({}, before="section")
    for _ in range(3):
        got = accumulate(graph, questions(), Order(max_rows=most))
    want = accumulate(hops({}, "steps", "section"), questions(), Order())
    assert_same_gradients(got.gradients, want.gradients)
    assert 0 < copied["backward"] == copied["forward"]


@pytest.mark.parametrize(("run", "chosen"), [("auto", "derived"), ("steps", "again")])
def test_what_is_a_little_slower_alone_is_taken_in_what_runs_whole(
    run: str, chosen: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    REGISTRY.forget()
    monkeypatch.setattr(auto, "FIRINGS", 1)
    monkeypatch.setattr(auto, "ROWS", 2)
    monkeypatch.setattr(auto, "compare", lambda *_: 1.1)
    graph = Graph()
    turns = graph.loop(name="turns", run=run)  # type: ignore[arg-type]
    turns.join(graph.input("x", step=0))
    after = turns.through(Turn(), name="cell").move(step=lambda m: m.step + 1)
    done, more = after.where(lambda m: m.step > 2)
    turns.join(more)
    done.loss(lambda y: y.sum(1))
    accumulate(graph, [Instance({"x": torch.ones(1, 2).double()})] * 8, Order(max_rows=64))
    (found,) = [t.experience.chosen for t in graph.throughs()]
    REGISTRY.forget()
    assert found == (chosen if available(torch.float64) else "again")


@pytest.mark.parametrize("told", [True, False])
def test_what_was_found_slower_by_steps_is_judged_anew_as_soon_as_it_runs_whole(
    told: bool, needs_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by what was measured then; what a checkpoint says is believed."""
    REGISTRY.forget()
    measured: list[float] = []
    monkeypatch.setattr(auto, "FIRINGS", 1)
    monkeypatch.setattr(auto, "ROWS", 2)
    monkeypatch.setattr(auto, "compare", lambda *_: measured.append(1.1) or 1.1)

    def train(run: str) -> Experience:
        graph = Graph()
        turns = graph.loop(name="turns", run=run)  # type: ignore[arg-type]
        turns.join(graph.input("x", step=0))
        after = turns.through(cell, name="cell").move(step=lambda m: m.step + 1)
        done, more = after.where(lambda m: m.step > 2)
        turns.join(more)
        done.loss(lambda y: y.sum(1))
        (through,) = graph.throughs()
        through.experience = experience
        accumulate(graph, [Instance({"x": torch.ones(1, 2).double()})] * 8, Order(max_rows=64))
        return through.experience

    cell, experience = Turn(), Experience()
    found = train("steps")
    assert found.chosen == "again" and len(measured) == 1
    if not told:
        found.story = UNDECIDED
    assert train("auto").chosen == ("derived" if told else "again")
    experience.chosen = "again"
    assert train("auto").chosen == "again" and len(measured) == 1
    REGISTRY.forget()


class Source(AbstractValue):
    """A value of so many tensors, which notes what is added."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__(number)
        self.tensors, self.got = width, 0

    def width(self, held: AbstractTensors) -> int:
        return self.tensors

    def gather(self, held: AbstractTensors, rows: Any) -> Any:
        raise AssertionError("nobody asks for rows")

    def reads(self, held: AbstractTensors, rows: Any) -> Any:
        return [SimpleNamespace(tail=(2,))] * self.tensors

    def whence(self, held: AbstractTensors, rows: Any) -> Any:
        return [[]] * self.tensors

    def scatter(self, held: AbstractTensors, rows: Any, gradient: Any, at: Any = None) -> None:
        self.got += len(gradient)


def test_joined_rows_find_their_sides_where_a_fit_before_told_what_reads_them() -> None:
    one, other, rows = Source(1, 2), Source(2, 1), np.arange(3)
    joined = SideBySide(0, [one, other], "tuple")
    numbers = SimpleNamespace(sides=lambda number, rows: [rows, rows])
    held = cast(AbstractTensors, SimpleNamespace(numbers=numbers))
    joined.whence(held, rows)
    joined.scatter(held, rows, tuple(torch.ones(3, 3, 2)))
    assert (one.got, other.got) == (2, 1)
