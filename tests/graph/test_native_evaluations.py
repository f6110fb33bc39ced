"""Evaluations of loops that run whole: C makes their calls as in training, and nothing is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loop import listing
from geartrain.nodes.loop.native import NativeCalls
from geartrain.nodes.loop.node import LoopNode
from tests.rigs.called import CASES, DRAWING, sets
from tests.rigs.passes import Order, Outcome, accumulate, assert_same_gradients, one_pass
from tests.rigs.passing import counted_calls
from tests.rigs.products import halved

pytestmark = pytest.mark.usefixtures("needs_kernels")

ORDER = Order(max_active=3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls that C has made, forward and back; it is asked from the first one on."""
    monkeypatch.setattr(listing, "LOOKED", 0)
    return counted_calls(monkeypatch)


def evaluated(data: list[Instance], trained: Outcome) -> Outcome:
    """By the engine of a training, in the mode of evaluations."""
    for part in trained.parts.values():
        part.module.eval()
    found = one_pass(Graph(), data, ORDER, train=False, engine=trained.engine)
    for part in trained.parts.values():
        part.module.train()
    return found


def the_loop(trained: Outcome) -> LoopNode:
    (loop,) = (n for n in trained.engine.wiring.nodes.values() if isinstance(n, LoopNode))
    return loop


def means(found: Outcome) -> dict[str, float]:
    return {k: s / n for k, (s, n) in found.sums.items()}


def by_steps(graph: Graph, data: list[Instance]) -> dict[str, float]:
    """Losses of the same loop, module by module."""
    return means(evaluated(data, accumulate(graph, data, ORDER)))


@halved(name=[*CASES], passes=[1, 2])
def test_losses_are_those_of_steps_and_c_has_made_calls(
    made: dict[str, int], name: str, passes: int
) -> None:
    make, data = CASES[name]
    torch.manual_seed(1)
    graph = make("whole")
    trained = accumulate(graph, data(), ORDER)
    made["forward"] = made["backward"] = 0
    for _ in range(passes):
        found = evaluated(data(), trained)
    assert made["forward"] > 0
    assert made["backward"] == 0
    torch.manual_seed(1)
    assert means(found) == pytest.approx(by_steps(make("steps"), data()), rel=1e-12)


@pytest.mark.parametrize("name", DRAWING)
def test_modules_that_drop_do_not(made: dict[str, int], name: str) -> None:
    make = DRAWING[name]
    torch.manual_seed(1)
    graph = make("whole")
    trained = accumulate(graph, sets(), ORDER)
    before, made["forward"] = the_loop(trained).calls, 0
    found = evaluated(sets(), trained)
    assert made["forward"] >= the_loop(trained).calls - before > 0
    torch.manual_seed(1)
    assert means(found) == pytest.approx(by_steps(make("steps"), sets()), rel=1e-12)


@pytest.mark.parametrize("name", ["sums of children", "a loop that decides"])
def test_training_goes_on_as_if_nobody_had_looked(made: dict[str, int], name: str) -> None:
    make, data = CASES[name]
    torch.manual_seed(1)
    graph = make("whole")
    trained = accumulate(graph, data(), ORDER)
    evaluated(data(), trained)
    again = accumulate(graph, data(), ORDER, engine=trained.engine)
    assert_same_gradients(again.gradients, trained.gradients)
    assert made["backward"] > 0


def test_c_is_asked_when_some_calls_have_been_made(
    made: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data = CASES["sums of children"]
    torch.manual_seed(1)
    graph = make("whole")
    trained = accumulate(graph, data(), ORDER)
    loop = the_loop(trained)
    before = loop.calls
    evaluated(data(), trained)
    monkeypatch.setattr(listing, "LOOKED", 2 * (loop.calls - before))
    made["forward"] = 0
    evaluated(data(), trained)
    some = made["forward"]
    evaluated(data(), trained)
    assert some == 0
    assert made["forward"] > 0


def test_an_evaluation_that_is_over_leaves_no_garbage(made: dict[str, int]) -> None:
    make, data = CASES["sums of children"]
    trained = accumulate(make("whole"), data(), ORDER)
    held: list[weakref.ref[NativeCalls]] = []
    before = NativeCalls.__init__

    def begin(self: NativeCalls, *args: Any) -> None:
        held.append(weakref.ref(self))
        before(self, *args)

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NativeCalls, "__init__", begin)
            evaluated(data(), trained)
        assert len(held) > 1
        assert all(one() is None for one in held)
    finally:
        gc.enable()
