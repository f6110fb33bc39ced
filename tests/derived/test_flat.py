"""Rows of several vectors that a module flattens, to have a cell or a head for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rigs.rowwise import assert_as_autograd

N, B, D = 5, 3, 6
Way = Callable[["Flat", Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")


class Flat(nn.Module):
    """A way to compute with ``(n * b, d)``, of rows ``(b, d)``."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.map, self.wide = way, nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.gru, self.lstm, self.norm = nn.GRUCell(D, D), nn.LSTMCell(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        made = self.way(self, x.reshape(-1, D))
        return made.view(x.shape[0], -1, made.shape[-1])


def _chosen(s: Flat, x: Tensor) -> Tensor:
    y = s.map(x)
    return torch.where(y > 0, y, y * y) + y.masked_fill(y < -0.3, 0.5)


WAYS: Mapping[str, Way] = {
    "a gru": lambda s, x: s.gru(x, torch.tanh(x)),
    "an lstm": lambda s, x: s.lstm(x, (torch.tanh(x), x))[0],
    "parts": lambda s, x: torch.mul(*s.wide(x).chunk(2, 1)),
    "unequal parts": lambda s, x: torch.mul(*s.map(x).split((1, D - 1), 1)),
    "slices": lambda s, x: s.wide(x)[:, :D] * s.wide(x)[:, -D:].tanh(),
    "columns": lambda s, x: s.map(x)[:, 0:1] * s.map(x)[:, 1][:, None] * s.map(x)[:, -1:],
    "heads": lambda s, x: s.map(x).view(-1, 2, D // 2)[:, 0] * s.map(x).view(-1, 2, D // 2)[:, 1],
    "side by side": lambda s, x: torch.cat([x.tanh(), s.map(x).sin()], -1),
    "one behind the other": lambda s, x: torch.stack([s.map(x), x.tanh()], 1).flatten(0, 1),
    "a norm": lambda s, x: s.norm(s.map(x)),
    "a softmax": lambda s, x: s.map(x).softmax(1) * s.map(x).log_softmax(-1),
    "a relu": lambda s, x: torch.relu(s.map(x)) * functional.glu(s.wide(x), 1),
    "chosen": _chosen,
    "a sum": lambda s, x: s.map(x).sum(1, keepdim=True) + s.map(x).mean(-1, keepdim=True),
    "a sum of heads": lambda s, x: s.map(x).view(-1, 2, D // 2).sum(1).exp(),
}


@pytest.mark.parametrize("name", WAYS)
def test_each_vector_of_a_row_is_computed_as_by_torch(name: str) -> None:
    torch.manual_seed(0)
    assert_as_autograd(Flat(WAYS[name]), [torch.randn(N, B, D)])
