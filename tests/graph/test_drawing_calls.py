"""Modules that draw, whose calls C makes many at a time: as if each call were made by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import geartrain as gt
from geartrain.derived.program import Program
from geartrain.graph.graph import Graph, Stream
from geartrain.native import calls, library
from geartrain.nodes.loop.module import TurnModule
from tests.rigs.called import DRAWING, dropping, sets, turning
from tests.rigs.passes import Order, accumulate, assert_same_gradients

pytestmark = pytest.mark.usefixtures("needs_kernels")


FEW = Order(max_active=3)


def run_(name: str) -> tuple[Any, Tensor]:
    """Gradients of a pass, and where torch's generator stands after it."""
    torch.manual_seed(1)
    found = accumulate(DRAWING[name]("whole"), sets(5), FEW).gradients
    return found, torch.get_rng_state()


@pytest.mark.parametrize("name", DRAWING)
def test_calls_made_many_at_a_time_draw_what_they_draw_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    before = calls.forward

    def count(*args: Any, **named: Any) -> int:
        made.append(args[1])
        return before(*args, **named)

    monkeypatch.setattr(calls, "forward", count)
    many, state = run_(name)
    assert sum(made) > 0
    monkeypatch.setattr(Program, "listed", lambda self, rows: None)
    alone, after = run_(name)
    assert_same_gradients(many, alone)
    assert torch.equal(state, after)
    monkeypatch.setattr(library, "_library", None)
    assert library.current() is None
    by_torch, after = run_(name)
    assert_same_gradients(many, by_torch)
    assert torch.equal(state, after)


def test_masks_are_those_of_the_seeds_that_rows_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other seeds, other gradients: so they are read, of the right rows."""
    plain, _ = run_("one module drops")
    before = TurnModule.seed

    def turned(self: TurnModule, first: int, seeds: Tensor) -> None:
        before(self, first, seeds.flip(0))

    monkeypatch.setattr(TurnModule, "seed", turned)
    other, _ = run_("one module drops")
    with pytest.raises(AssertionError):
        assert_same_gradients(plain, other)


def _sequence(state: Stream, graph: Graph) -> Stream:
    """Kernels that are written by hand, and what is derived in their place."""
    some = state.through(nn.Dropout(0.3), take=0, name="drop")
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1)).double()
    other = state.through(nn.Linear(4, 4).double(), take=1, name="other")
    both = graph.concat(
        some.through(inner, name="inner"), other, on=("vertex", "turn"), how="tuple", name="both"
    )
    return dropping(both, graph)


def _session(
    seed: int, make: Callable[[str], Graph] = DRAWING["two modules drop"]
) -> tuple[gt.Session, list[nn.Parameter]]:
    torch.manual_seed(seed)
    graph = make("whole")
    modules = [t.function for t in graph.throughs() if isinstance(t.function, nn.Module)]
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=0.01), update_every=gt.Instances(3))
    session = gt.Session(graph, rules=rules, runtime=gt.Simulated(seed=0), max_active=4)
    return session, [p for m in modules for p in m.parameters()]


@pytest.mark.parametrize(
    "make",
    [DRAWING["two modules drop"], DRAWING["experts drop"], partial(turning, _sequence)],
    ids=("two", "experts", "by hand"),
)
def test_a_run_that_is_resumed_draws_the_same(tmp_path: Path, make: Callable[[str], Graph]) -> None:
    data = sets(4)
    session, whole = _session(0, make)
    session.fit(data, epochs=1)
    session.save(tmp_path / "one")
    half = copy.deepcopy([p.detach() for p in whole])
    session.fit(data, epochs=3)
    resumed, weights = _session(9, make)
    resumed.load(tmp_path / "one")
    assert all(map(torch.equal, half, weights))
    resumed.fit(data, epochs=3)
    assert all(map(torch.equal, whole, weights))
    assert not any(map(torch.equal, half, weights))
    again, others = _session(0, make)
    torch.manual_seed(5)
    again.fit(data, epochs=3)
    assert not all(map(torch.equal, whole, others))


class Scaled(nn.Module):
    """Drops by a function, which no module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x * self.scale, 0.5, self.training)


def test_what_a_function_drops_has_no_gradient_under_auto() -> None:
    torch.manual_seed(0)
    module, seen = Scaled(), []

    def square(y: Tensor) -> Tensor:
        seen.append(y.detach().clone())
        return y.square().sum(1)

    graph = gt.Graph()
    graph.input("x").through(module, name="scaled").loss(square)
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=gt.Instances(1))
    session = gt.Session(graph, rules=rules, runtime=gt.Simulated(), max_active=1)
    session.fit([gt.Instance({"x": torch.ones(1, 64)})], epochs=1)
    assert "derived, for the mask" in str(graph)
    mask = seen[-1][0] != 0
    assert 10 < int(mask.sum()) < 54
    assert torch.equal(module.scale.detach() != 1, mask)


def test_evaluation_draws_nothing() -> None:
    session, _ = _session(0)
    session.fit(sets(), epochs=1)
    before = torch.get_rng_state()
    first, second = (session.evaluate(sets()).metrics["loss"] for _ in range(2))
    assert first == second and torch.equal(before, torch.get_rng_state())
