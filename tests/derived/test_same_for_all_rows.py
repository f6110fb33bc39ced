"""Rows that meet weights and are the same for all: of nothing, or a start that is learnt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.rigs.rowwise import assert_as_autograd

D = 6
Start = Callable[["Begun", Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")


class Begun(nn.Module):
    """What comes, and a state before the first, each by a map of its own."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self.before, self.start = start, nn.Parameter(torch.randn(1, D))
        self.of_state, self.of_input = nn.Linear(D, D, bias=False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.of_state(self.before(self, x)) + self.of_input(x))


_STARTS: dict[str, Start] = {
    "zeros": lambda m, x: torch.zeros(len(x), D, dtype=x.dtype),
    "of rows": lambda m, x: torch.zeros_like(x),
    "ones": lambda m, x: x.new_ones(x.shape),
    "learnt": lambda m, x: m.start.expand(len(x), -1),
    "repeated": lambda m, x: m.start.repeat(x.shape[0], 1),
}


@pytest.mark.parametrize("start", _STARTS)
def test_a_state_before_the_first_meets_weights_in_c(start: str) -> None:
    torch.manual_seed(0)
    assert_as_autograd(Begun(_STARTS[start]), (torch.randn(5, D),))
