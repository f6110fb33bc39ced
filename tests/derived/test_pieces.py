"""Parts of rows along any axis in C, and what is put together of them, or turned round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from geartrain.derived.derivation import derive
from geartrain.native.fused import Op
from tests.rigs.rowwise import Rowwise, assert_as_autograd, in_c

N, D = 5, 6


pytestmark = pytest.mark.usefixtures("needs_kernels")


def cube(y: Tensor) -> Tensor:
    return y.view(-1, 2, 3, 4)


OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "a slice of the last axis": lambda y: cube(y)[..., 1:3] * 2,
    "a slice from the end": lambda y: cube(y)[:, :, -2:].exp(),
    "an item in the middle": lambda y: cube(y)[:, :, 1].sin(),
    "an item from the end": lambda y: cube(y)[..., -1].sin(),
    "parts of the last axis": lambda y: torch.mul(*cube(y).chunk(2, -1)),
    "unequal parts": lambda y: torch.mul(*cube(y).split((1, 2), 2)) + cube(y)[:, :, 2:],
    "put together at the end": lambda y: torch.cat([cube(y), cube(y)[..., :1].tanh()], -1),
    "put together in the middle": lambda y: torch.cat([cube(y).tanh(), cube(y)], 2),
    "a stack at the end": lambda y: torch.stack([cube(y), cube(y).tanh()], 4),
    "zeros around": lambda y: functional.pad(y, (1, 2)),
    "zeros along two axes": lambda y: functional.pad(cube(y), (0, 1, 2, 0)),
    "zeros and less": lambda y: functional.pad(cube(y), (-1, 2, 1, -2)),
    "rolled": lambda y: y.roll(1, 1) * y.roll(-2, 1),
    "rolled along two axes": lambda y: cube(y).roll((1, -1), (2, 3)),
    "rolled all round": lambda y: y.roll(24, 1) + y.tanh(),
    "repeated": lambda y: y.repeat(1, 3).tanh(),
    "repeated along two axes": lambda y: cube(y).repeat(1, 2, 1, 3).tanh(),
    "backwards": lambda y: y.flip(1).tanh() * y,
    "backwards along two axes": lambda y: cube(y).flip(1, 3),
    "added up so far": lambda y: y.cumsum(1),
    "added up in the middle": lambda y: cube(y).cumsum(2).tanh(),
    "a sum of axes apart": lambda y: cube(y).sum((1, 3)).exp(),
    "a mean of axes apart": lambda y: cube(y).mean((1, 3), keepdim=True) * cube(y),
    "an error function": lambda y: torch.erf(y),
    "unlike": lambda y: y * (y != y.flip(1)) + y * (y.tanh() != 0.0),
    "no more": lambda y: y * (y <= y.flip(1)) + y.tanh() * (y >= y.flip(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_ROWS)
def test_steps_are_what_autograd_says(name: str, dtype: torch.dtype) -> None:
    def function(f: Any, x: Tensor) -> Tensor:
        found: Tensor = OF_ROWS[name](f(x))
        return found

    assert_as_autograd(Rowwise(function, D, 24).to(dtype), (torch.randn(N, D, dtype=dtype),))


def test_one_truth_chooses_for_all_of_a_row() -> None:
    def function(f: Any, x: Tensor, y: Tensor) -> Tensor:
        chosen = torch.where(y > 0, f(x), x).where(y < 1, y)
        return chosen + x.masked_fill(y > 0.5, 2.0) + torch.where(y > 0.2, f(x).tanh(), 1.0)

    assert_as_autograd(Rowwise(function, D, D), (torch.randn(N, D), torch.randn(N, 1)))


FOR_ALL: dict[str, Callable[..., Any]] = {
    "a vector": lambda f, x: (f.bias.expand(len(x), -1), x * 2),
    "a matrix": lambda f, x: (x.sin(), f.weight.expand(len(x), -1, -1)),
    "twice": lambda f, x: (f.bias.expand(len(x), -1), f.bias.expand(len(x), -1), x * 1),
    "what is made of it": lambda f, x: (f.bias.tanh().expand(len(x), D), x * f.weight[0]),
    "repeated": lambda f, x: (f.bias.repeat(len(x), 1), x.exp()),
    "repeated, of one row": lambda f, x: (f.weight[:1].repeat(len(x), 2).sin(), f(x)),
    "always the same": lambda f, x: torch.arange(D).to(x).repeat(len(x), 1) * f(x),
    "a matrix, repeated": lambda f, x: (f.weight.repeat(len(x), 1, 1).exp(), x.exp()),
}


@pytest.mark.parametrize("name", FOR_ALL)
def test_rows_begin_with_what_all_have_in_common(name: str) -> None:
    """As first states do, which are weights."""
    assert_as_autograd(Rowwise(FOR_ALL[name], D, D), (torch.randn(N, D),))


ACROSS: dict[str, Callable[[Tensor], Any]] = {
    "rolled": lambda y: y.roll(1, 0) * 0 + y,
    "backwards": lambda y: y.flip(0) * 0 + y,
    "repeated": lambda y: y.repeat(2, 1)[: len(y)],
}


@pytest.mark.parametrize("name", ACROSS)
def test_others_are_left_to_torch(name: str) -> None:
    def function(f: Any, x: Tensor) -> Tensor:
        found: Tensor = ACROSS[name](f(x))
        return found

    assert not in_c(Rowwise(function, D, 24), (torch.randn(N, D),))


def test_parts_of_the_first_axis_are_places() -> None:
    def ops(function: Callable[..., Any]) -> list[Op]:
        pair = derive(Rowwise(function, D, 24), (torch.randn(N, D),)).parts.fused
        assert pair is not None
        steps = pair.forward._steps
        size = len(steps._steps) // steps._count
        return [
            Op(int.from_bytes(steps._steps[k : k + 8], "little"))
            for k in range(0, len(steps._steps), size)
        ]

    assert Op.PIECES not in ops(lambda f, x: torch.mul(*cube(f(x)).chunk(2, 1)))
    assert ops(lambda f, x: torch.mul(*cube(f(x)).chunk(2, 3))).count(Op.PIECES) == 2
