"""Rows of tables by places and distances that steps compute, beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.ragged.derivation import derive_inside
from geartrain.errors import GraphError
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import check_inside

H, HEADS, FAR = 6, 2, 3
LENGTHS = [[2, 3, 1], [1], [5, 9], [3, 4, 2, 1], [1 + k * 7 % 30 for k in range(60)]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Biased = Callable[["Biases", Tensor], Tensor]


class Biases(nn.Module):
    """Pads its bundles; ``way`` says what is looked up by place."""

    def __init__(self, way: Biased) -> None:
        super().__init__()
        self.way = way
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)
        self.one = nn.Parameter(torch.randn(2 * FAR + 1))
        self.several = nn.Embedding(2 * FAR + 1, HEADS)
        self.places = nn.Embedding(FAR + 1, H)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
        y = x.new_zeros(*mask.shape, H)
        y[mask] = x
        heads = [z.view(*mask.shape, HEADS, -1).transpose(1, 2) for z in (self.q(y), self.k(y))]
        score = heads[0] @ heads[1].transpose(2, 3) + self.way(self, y)
        share = score.masked_fill(~mask[:, None, None], -1e9).softmax(3)
        found = (share @ heads[1]).transpose(1, 2).reshape(y.shape)
        at = torch.arange(mask.shape[1]).clamp(max=FAR)
        return (found + self.places(at))[mask]


def distances(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return (at[None] - at[:, None]).clamp(-FAR, FAR) + FAR


def of_one(s: Biases, x: Tensor) -> Tensor:
    return s.one[distances(x)]


def of_heads(s: Biases, x: Tensor) -> Tensor:
    found: Tensor = s.several(distances(x))
    return found.permute(2, 0, 1)


@pytest.mark.parametrize("way", [of_one, of_heads])
def test_biases_by_distance(way: Biased) -> None:
    torch.manual_seed(1)
    check_inside(Biases(way), *LENGTHS, width=H)


def below_nothing(s: Biases, x: Tensor) -> Tensor:
    return s.one[distances(x) - 1]


def test_numbers_that_count_from_the_end_are_refused() -> None:
    torch.manual_seed(1)
    with pytest.raises(GraphError):
        derive_inside(Biases(below_nothing), (torch.randn(5, H),), {}, pools=False)
