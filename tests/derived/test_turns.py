"""Axes within a row that change places, and norms of groups of columns, in C."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.traces.record import record
from tests.rigs.rowwise import Rowwise, assert_as_autograd

N, D = 5, 24
TAIL = 2, 3, 4

pytestmark = pytest.mark.usefixtures("needs_kernels")


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))), ids=str)
def test_axes_of_a_row_come_in_any_order(order: tuple[int, ...]) -> None:
    """As results, and read by others in order."""

    def function(f: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = f(x).view(-1, *TAIL).permute(0, *order)
        return turned, turned.reshape(-1, D) * x

    assert_as_autograd(Rowwise(function, D, D), (torch.randn(N, D),))


@pytest.mark.parametrize("order", [(1, 4, 2, 3), (4, 2, 3, 1), (2, 4, 1, 3), (4, 3, 2, 1)], ids=str)
def test_more_axes_come_in_any_order(order: tuple[int, ...]) -> None:
    def function(f: Any, x: Tensor) -> Tensor:
        return f(x).view(-1, 2, 3, 2, 2).permute(0, *order).reshape(-1, D) * x

    assert_as_autograd(Rowwise(function, D, D), (torch.randn(N, D),))


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_a_turn_of_a_turn_is_one_turn_of_what_was_there_or_none(order: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4)

    def twice(x: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2).permute(order), x.permute(order).transpose(-1, -2)]

    found = record(twice, [x])
    (given,) = (each for each in found.graph.nodes if each.op == "placeholder")
    (made,) = next(each for each in found.graph.nodes if each.op == "output").args
    for node, wanted in zip(made, twice(x), strict=True):
        if order == (0, 2, 1):
            assert node is given
        else:
            assert node.args[0] is given
            assert torch.equal(node.target(x, *node.args[1:]), wanted)


def test_turns_that_cancel_are_gone_forward_and_back() -> None:
    """As einsum writes them, of rows on both sides."""

    def function(f: Any, x: Tensor) -> Tensor:
        both = f(x).view(-1, 2, 12)
        some = torch.einsum("me,mbe->mb", x[:, :12], both)
        return torch.einsum("mb,mbe->me", x[:, :2], both) + some.sum(1, keepdim=True)

    assert_as_autograd(Rowwise(function, D, 24).double(), (torch.randn(N, D).double(),))


class Normed(nn.Module):
    """A norm of groups of what others make."""

    def __init__(self, norm: nn.Module, made: nn.Module) -> None:
        super().__init__()
        self.norm, self.made = norm, made

    def forward(self, *given: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.made(*given)))


def stirred(norm: nn.GroupNorm) -> nn.GroupNorm:
    """With weights that are not all the same."""
    for x in norm.parameters():
        nn.init.normal_(x)
    return norm


NORMS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "of a map": lambda: (
        Normed(stirred(nn.GroupNorm(4, D)), nn.Linear(D, D)),
        (torch.randn(N, D),),
    ),
    "of rows that meet": lambda: (
        Normed(stirred(nn.GroupNorm(2, 6)), nn.Bilinear(4, 5, 6)),
        (torch.randn(N, 4), torch.randn(N, 5)),
    ),
    "of several in each row": lambda: (
        Normed(stirred(nn.GroupNorm(2, 4)), nn.Linear(6, 6)),
        (torch.randn(N, 4, 6),),
    ),
    "without weights": lambda: (
        Normed(nn.GroupNorm(4, D, affine=False), nn.Linear(D, D)),
        (torch.randn(N, D),),
    ),
    "another least deviation": lambda: (
        Normed(stirred(nn.GroupNorm(1, D, eps=0.3)), nn.Linear(D, D)),
        (torch.randn(N, D),),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_groups_are_what_autograd_says(name: str, dtype: torch.dtype) -> None:
    module, given = NORMS[name]()
    assert_as_autograd(module.to(dtype), tuple(x.to(dtype) for x in given))
