"""The member of each bundle that has the most: one for it alone, its number, and what it has;
beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.derived.ragged.derivation import derive_inside
from geartrain.errors import GraphError
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import check_inside

H = 6
LENGTHS = [[2, 3, 1], [1], [5, 9], [1 + k * 7 % 30 for k in range(60)]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Choice = Callable[["Chooses", Tensor, Tensor], Tensor]


class Chooses(nn.Module):
    """Pads its bundles; ``way`` chooses of each."""

    def __init__(self, way: Choice) -> None:
        super().__init__()
        self.way, self.map, self.worth = way, nn.Linear(H, H), nn.Linear(H, 1)

    def score(self, x: Tensor, mask: Tensor, *, least: bool = False) -> Tensor:
        score = self.worth(torch.tanh(self.map(x))).squeeze(-1)
        return score.masked_fill(~mask, torch.inf if least else -torch.inf)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
        out = x.new_zeros(*mask.shape, H)
        out[mask] = x
        return self.way(self, out, mask)[mask]


def _one(at: Tensor, x: Tensor) -> Tensor:
    return functional.one_hot(at, x.shape[1])


def best(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    return x + s.map(x) * _one(s.score(x, mask).argmax(1), x)[..., None].to(x.dtype)


def worst(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    one = _one(s.score(x, mask, least=True).argmin(-1), x)
    return torch.where(one[..., None].bool(), s.map(x), x)


def all_others(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    return s.map(x) * (1 - _one(s.score(x, mask).max(1).indices, x))[..., None]


def the_first_of_those_alike(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    alike = (x[..., 0] > 0).to(x.dtype).masked_fill(~mask, -1)
    return x + s.map(x) * _one(alike.argmax(1), x)[..., None]


def up_to_it(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    at = s.score(x, mask).argmax(1, keepdim=True)
    return torch.where((torch.arange(x.shape[1]) <= at)[..., None], s.map(x), x)


def as_a_number(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    return x * s.score(x, mask).argmax(1)[:, None, None].to(x.dtype)


def what_it_has(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    at = s.score(x, mask).argmax(1)
    return torch.tanh(x) * s.map(x).gather(1, at[:, None, None].expand(-1, 1, H))


def what_the_least_scores(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    score = s.score(x, mask, least=True)
    return x * score.gather(1, score.argmin(1, keepdim=True))[..., None]


def both(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    """Its number, and what it has: numbers are read in two ways."""
    at = s.score(x, mask).argmax(1)
    its = s.map(x).gather(1, at[:, None, None].expand(-1, 1, H))
    return torch.where((torch.arange(x.shape[1]) == at[:, None])[..., None], its, x)


WAYS: list[Choice] = [
    best,
    worst,
    all_others,
    the_first_of_those_alike,
    up_to_it,
    as_a_number,
    what_it_has,
    what_the_least_scores,
    both,
]


@pytest.mark.parametrize("way", WAYS, ids=[w.__name__ for w in WAYS])
def test_what_is_chosen_is_what_torch_chooses(way: Choice) -> None:
    torch.manual_seed(0)
    check_inside(Chooses(way), *LENGTHS, width=H)


def _of_each_column(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    one = _one(s.map(x).masked_fill(~mask[..., None], -torch.inf).argmax(1), x)
    return x * one.transpose(1, 2)


def _with_padding(s: Chooses, x: Tensor, mask: Tensor) -> Tensor:
    """Behind the ends is what is larger than all others."""
    return x + s.map(x) * _one((x.abs().sum(2) * -1.0).argmax(1), x)[..., None]


@pytest.mark.parametrize("way", [_of_each_column, _with_padding])
def test_what_is_chosen_otherwise_is_left_to_torch(way: Choice) -> None:
    torch.manual_seed(0)
    with pytest.raises(GraphError):
        derive_inside(Chooses(way), (torch.randn(7, H),), {}, pools=False)
