"""A module that gives a column as it came, beside what it computes: C is told of no such rows, and
asks again in each turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from geartrain.graph.graph import Graph, Stream
from geartrain.nodes.loop.layout import CallLayout
from tests.rigs.called import WIDTH, Gated, sets, turning
from tests.rigs.passes import Order, accumulate, assert_same_gradients


class Naming(nn.Module):
    """A state, and the token that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.map = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(h) + self.words(token)), token


def named(state: Stream, graph: Graph) -> Stream:
    cell = state.through(Gated().double(), name="cell", read="token", keep="activations")
    said = cell.through(Naming().double(), take=0, name="said", read="token", keep="activations")
    return said.through(lambda h, token: (h, token[:, None] * h), name="both", keep="activations")


@pytest.mark.usefixtures("needs_kernels")
def test_it_is_called_without_c_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    before = CallLayout.holds

    def holds(self: CallLayout, *given: object) -> bool:
        asked.append(self.possible)
        return before(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(CallLayout, "holds", holds)
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(turning(named, run), sets(), Order(max_active=1)).gradients)
    assert_same_gradients(*found)
    assert not all(asked)
