"""Modules of loops whose rows read the same ones, called in two, beside the same loops by steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loop import hoisting, native
from geartrain.nodes.loop.bound import CalledModules
from geartrain.nodes.loop.calls import LoopCalls
from geartrain.nodes.loop.module import NativeKept
from tests.rigs.called import CASES
from tests.rigs.passes import Order, accumulate, assert_same_gradients
from tests.rigs.products import halved
from tests.rigs.sharing_rows import (
    SENDS,
    Beside,
    along_edges,
    different_rows,
    graphs,
    grown,
    trees,
)

FEW = Order(max_active=3)
ORDERS = [FEW, Order(policy="random", seed=3, max_active=2), Order("threads", 2, max_active=3)]
Made = Callable[..., Graph]
LOOPS: dict[str, tuple[Made, Callable[[], list[Instance]]]] = {
    **{name: (partial(along_edges, make), graphs) for name, make in SENDS.items()},
    "from parents": (grown, trees),
}


pytestmark = pytest.mark.usefixtures("needs_kernels")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of calls of first pieces, by turn."""
    found: list[int] = []
    before = hoisting.call_in_two

    def count(module: Any, shared: Any, *rest: Any) -> Any:
        found.append(shared.first.size)
        return before(module, shared, *rest)

    monkeypatch.setattr(native, "call_in_two", count)
    return found


def both(name: str, order: Order, **where: Any) -> tuple[Any, Any]:
    return one(name, order, run="whole", **where), by_steps(name, **where)


def one(name: str, order: Order, **where: Any) -> Any:
    make, data = LOOPS[name]
    torch.manual_seed(1)
    return accumulate(make(**where), 3 * data(), order)


def two_heads() -> Graph:
    """A section: rows that enter, a loss of each and one of their mean."""
    graph = Graph(vertex=("aim",), value=("whole",))
    rows = graph.input("x").through(nn.Linear(3, 4), name="trunk")
    rows.through(nn.Linear(4, 1), name="each").loss(of_one, target="aim")
    mean = rows.group(by="instance", size=lambda m: m.size, how="mean")
    mean.through(nn.Linear(4, 1), name="all").loss(of_one, target="whole")
    return graph


def of_one(prediction: Tensor, aim: Tensor) -> Tensor:
    return (prediction[:, 0] - aim) ** 2


def points() -> list[Instance]:
    found = []
    for n in (2, 3, 5, 4):
        aim = np.linspace(0, 1, n, dtype=np.float32)
        rows = {"x": torch.linspace(-1, 1, 3 * n).view(n, 3)}
        found.append(Instance(rows, {"aim": aim}, value={"whole": np.float32(n)}))
    return found


@cache
def by_steps(name: str, **where: Any) -> Any:
    """The same in any order; nobody changes it."""
    return one(name, FEW, run="steps", **where)


@halved(
    name=[*LOOPS],
    order=dict(zip(("three at a time", "two at a time", "on threads"), ORDERS, strict=True)),
    apart={"at once": False, "apart": True},
)
def test_gradients_and_rows_are_those_of_steps(
    early: list[int], name: str, order: Order, apart: bool
) -> None:
    whole, steps = both(name, order, apart=apart)
    assert early
    assert_same_gradients(whole.gradients, steps.gradients)
    for part, state in whole.parts.items():
        assert state.counting.rows == steps.parts[part].counting.rows, part


def test_each_row_that_is_read_is_computed_once(early: list[int]) -> None:
    torch.manual_seed(1)
    data = graphs()
    graph = along_edges(SENDS["a product and a table"], "whole")
    accumulate(graph, 4 * data, Order(max_active=len(data)))
    assert early  # after a turn or two that find programs
    assert set(early) == {different_rows(data)}


def test_c_makes_all_calls_and_first_pieces_come_before_the_others() -> None:
    plans: list[list[str]] = []
    kept: list[bool] = []
    before = LoopCalls.take_back

    def take_back(self: LoopCalls, turn: Any, *rest: Any, **more: Any) -> None:
        plans.append([self._inner[called.stage.number].name for called in turn.plan.calls])
        kept.append(all(isinstance(one, NativeKept) for one in turn.kept))
        before(self, turn, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopCalls, "take_back", take_back)
        both("from parents", Order(max_active=4))
    assert plans[0] == ["first", "born", "born", "readout"]
    assert plans[-1] == ["first", *2 * ["born", "born"], "readout"]
    assert kept[-1]


@pytest.mark.parametrize("name", ["sums of children", "a cell that reads words"])
def test_modules_whose_rows_are_all_different_stay_in_one(early: list[int], name: str) -> None:
    make, data = CASES[name]
    accumulate(make("whole"), data(), FEW)
    assert not early


@pytest.mark.slow
def test_rows_that_follow_upon_one_another_are_not_asked_what_they_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, again = list[bool](), list[bool]()
    shares, begins = hoisting.shared_rows, CalledModules.again

    def ask(tensors: Any, stored: Any) -> Any:
        asked.append(any(each.plain for each in tensors))
        return shares(tensors, stored)

    def begin(self: CalledModules, stage: Any, rows: Any) -> Any:
        found = begins(self, stage, rows)
        again.append(found is not None)
        return found

    monkeypatch.setattr(hoisting, "SPARED", 0)  # any module may be called in two
    monkeypatch.setattr(hoisting, "FEWER", 2)
    monkeypatch.setattr(native, "shared_rows", ask)
    monkeypatch.setattr(CalledModules, "again", begin)
    accumulate(two_heads(), 4 * points(), Order(max_active=4))
    assert any(again) and not any(asked)


@pytest.mark.parametrize("least", ["FEWER", "SPARED"])
def test_where_little_is_spared_a_module_stays_in_one(
    monkeypatch: pytest.MonkeyPatch, early: list[int], least: str
) -> None:
    monkeypatch.setattr(hoisting, least, 1 << 20)
    both("from parents", FEW)
    assert not early


def test_what_is_frozen_learns_nothing(early: list[int]) -> None:
    outcomes = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        graph = along_edges(SENDS["side by side"], run)
        (send,) = [t.function for t in graph.throughs() if t.name == "send"]
        assert isinstance(send, Beside)
        send.map.weight.requires_grad_(False)
        outcomes.append(accumulate(graph, 3 * graphs(), FEW))
    assert early
    assert_same_gradients(outcomes[0].gradients, outcomes[1].gradients)
    assert outcomes[0].gradients["send", "map.bias"].abs().max() > 0
