"""Masks, places and other tensors that are the same for all rows, in C: as autograd says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.traces.constants import MOST_CONSTANT
from tests.rigs.rowwise import Rowwise, assert_as_autograd

N, M, D = 7, 5, 6
COUNTS = torch.tensor([5, 1, 3, 2, 4, 5, 1])

pytestmark = pytest.mark.usefixtures("needs_kernels")


def later() -> Tensor:
    return torch.ones(M, M).triu(1).bool()


def real(k: Tensor) -> Tensor:
    """(n, M), which members there are."""
    return torch.arange(M)[None] < k[:, None]


def shared(f: Any, x: Tensor, scores: Tensor) -> Tensor:
    found: Tensor = (torch.softmax(scores, 2) @ f(x)).flatten(1)
    return found


ALIKE: dict[str, Callable[..., Any]] = {
    "a mask": lambda f, x, k: shared(f, x, (x @ x.mT).masked_fill(later(), -1e9)),
    "a mask that is added": lambda f, x, k: shared(
        f, x, x @ x.mT + torch.full((M, M), -1e9).triu(1)
    ),
    "one of two": lambda f, x, k: shared(f, x, torch.where(later(), -1e9, x @ x.mT)),
    "without itself": lambda f, x, k: shared(
        f, x, (x @ x.mT).masked_fill(torch.eye(M, dtype=torch.bool), -1e9)
    ),
    "as many as there are": lambda f, x, k: f(x).masked_fill(~real(k)[:, :, None], -1e9).amax(1),
    "their mean": lambda f, x, k: (f(x) * real(k)[:, :, None]).sum(1) / real(k).sum(1, True),
    "of which one is the last": lambda f, x, k: (
        f(x) * (torch.arange(M) == k[:, None] - 1)[:, :, None]
    ).sum(1),
    "by number": lambda f, x, k: f(x)[:, torch.tensor([3, 0, 3])].flatten(1),
    "by a list": lambda f, x, k: f(x)[:, [0, 2]].flatten(1),
    "by a mask": lambda f, x, k: f(x)[:, torch.tensor([True, False, True, True, False])].flatten(1),
    "the last axis": lambda f, x, k: f(x)[..., torch.tensor([5, 1, 1])].flatten(1),
    "selected": lambda f, x, k: f(x).index_select(2, torch.tensor([2, 2, 0])).flatten(1),
    "pairs": lambda f, x, k: (lambda i, j: (f(x) @ x.mT)[:, i, j])(*torch.triu_indices(M, M, 1)),
    "numbers": lambda f, x, k: f(x) * torch.tensor([0.5, 1, 2, 1, 0, -1]),
    "places": lambda f, x, k: (
        f(x) + torch.sin(torch.arange(M)[:, None] / torch.arange(1, D + 1)[None])
    ).flatten(1),
    "an axis less": lambda f, x, k: (
        f(x.view(-1, M, 2, 3).flatten(2)) * torch.linspace(0, 1, M)[:, None]
    ),
    "integers of integers": lambda f, x, k: f(x) * ((k[:, None] + torch.arange(M)) % 2)[:, :, None],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike_for_all_rows_is_as_autograd_says(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.float64 and name in (
        "a mask that is added",
        "numbers",
        "places",
        "an axis less",
    ):
        pytest.skip("it makes float32, which such a program has not")
    module = Rowwise(ALIKE[name], D, D).to(dtype)
    assert_as_autograd(module, (torch.randn(N, M, D, dtype=dtype), COUNTS))


def test_large_integers_are_compared_as_such() -> None:
    """No number of 53 bits tells those apart."""
    large = torch.tensor([1 << 53, (1 << 53) + 1, (1 << 53) + 2])

    def function(f: Any, x: Tensor, k: Tensor) -> Tensor:
        return f(x) * (torch.tensor([1 << 53, (1 << 53) + 1]) < k[:, None]).sum(1, True)

    assert_as_autograd(Rowwise(function, D, D), (torch.randn(3, D), large))


MASK = torch.ones(D)
OF_SOMEBODYS: dict[str, Callable[..., Any]] = {
    "itself": lambda f, x: f(x) * MASK,
    "made of it": lambda f, x: f(x) * MASK.cumsum(0),
    "part of it": lambda f, x: f(x[:, ::2].repeat(1, 2)) * MASK[::2].repeat(2),
}


@pytest.mark.parametrize("name", OF_SOMEBODYS)
def test_a_tensor_of_somebodys_is_read_as_it_is_now(name: str) -> None:
    module, x = Rowwise(OF_SOMEBODYS[name], D, D), torch.randn(N, D)
    program = Program(derive(module, (x,)), Operands(module))
    try:
        MASK[2] = 0
        with torch.no_grad():
            torch.testing.assert_close(program.forward((x,))[0][0], module(x))
    finally:
        MASK[2] = 1


@pytest.mark.parametrize("more", [0, 1])
def test_large_ones_are_computed_again(more: int) -> None:
    size = MOST_CONSTANT // D + more

    def function(f: Any, x: Tensor) -> Tensor:
        return (f(x)[:, None] * torch.ones(size, D, dtype=x.dtype).cumsum(0)).sum(1)

    module, x = Rowwise(function, D, D).double(), torch.randn(N, D, dtype=torch.float64)
    cut = derive(module, (x,))
    assert (cut.computed is not None) is bool(more)
    with torch.no_grad():
        found = Program(cut, Operands(module)).forward((x,))[0][0]
        torch.testing.assert_close(found, module(x))
