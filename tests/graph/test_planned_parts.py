"""Loops in which modules make the parts that become rows: planned ahead, as many as were seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loop.parting import Parting
from tests.rigs.passes import Order, accumulate, assert_same_gradients, one_pass

FEW = Order(max_active=3)

pytestmark = pytest.mark.usefixtures("needs_kernels")


class Several(nn.Module):
    """So many rows of one, side by side."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.map = k, nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh((1 + k) * self.map(x)) for k in range(self.k)], 1)


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


def large(m: Any) -> Any:
    return (m.turn < m.turns) & (m.payload[0][:, 0] > -2).numpy()


def build(several: Several, run: str, *, by_payload: bool = False) -> Graph:
    """A row becomes several in each round."""
    graph = Graph(value=("turns",))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    state.join(graph.input("x", shape=(2,), dtype=torch.float64, turn=0, part=0))
    parts = state.through(several, name="several", keep="activations").ungroup(index="part")

    again = large if by_payload else lambda m: m.turn < m.turns
    more, done = parts.move(turn=lambda m: m.turn + 1).where(again)
    state.join(more)
    done.through(nn.Linear(2, 2).double(), name="last", keep="activations").loss(squared)
    graph.check()
    return graph


def data() -> list[Instance]:
    torch.manual_seed(7)
    return [
        Instance({"x": torch.randn(2, 2, dtype=torch.float64)}, value={"turns": n})
        for n in (1, 3, 2, 1, 2, 3)
    ]


def gradients(run: str, k: int = 2, **how: bool) -> Any:
    torch.manual_seed(1)
    return accumulate(build(Several(k), run, **how), data(), FEW)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By turn in training, whether it was planned ahead, however often it began."""
    found: list[bool] = []
    before = LoopNode._turn

    def turn(self: LoopNode, slots: Any, came: Any, parts: Any, listing: Any) -> Any:
        found.append(parts is not None)
        return before(self, slots, came, parts, listing)

    monkeypatch.setattr(LoopNode, "_turn", turn)
    return found


def test_parts_that_the_check_has_seen_are_planned_with(planned: list[bool]) -> None:
    whole = gradients("whole")
    assert planned
    assert all(planned)
    assert_same_gradients(whole.gradients, gradients("steps").gradients)


def test_what_payloads_decide_is_not_planned(planned: list[bool]) -> None:
    gradients("whole", by_payload=True)
    assert planned
    assert not any(planned)


def test_turns_are_the_same_bits_where_parts_are_found_on_the_way(
    monkeypatch: pytest.MonkeyPatch, planned: list[bool]
) -> None:
    ahead = gradients("whole").gradients
    turns = len(planned)
    monkeypatch.setattr(Parting, "count", lambda self, came: None)
    found = gradients("whole").gradients
    assert not any(planned[turns:])
    assert all(torch.equal(found[key], ahead[key]) for key in ahead)


def test_a_module_that_makes_other_parts_now_has_its_turn_planned_again(
    monkeypatch: pytest.MonkeyPatch, planned: list[bool]
) -> None:
    torch.manual_seed(1)
    several = Several(2)
    before = LoopNode.forward

    def forward(self: LoopNode, *given: Any) -> Any:
        several.k = 3
        return before(self, *given)

    monkeypatch.setattr(LoopNode, "forward", forward)
    whole = accumulate(build(several, "whole"), data(), FEW)
    assert planned[:2] == [True, False]
    assert all(planned[2:])
    assert_same_gradients(whole.gradients, gradients("steps", 3).gradients)


def test_a_look_finds_the_parts_that_there_are() -> None:
    losses = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        several = Several(2)
        graph = build(several, run)
        several.k = 3
        losses.append(one_pass(graph, data(), FEW, train=False).sums["loss"])
    assert losses[0] == pytest.approx(losses[1])
