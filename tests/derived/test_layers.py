"""Stacks whose second axis counts rows: what is computed of them has programs in C, as of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from tests.rigs.products import halved
from tests.rigs.rowwise import Rowwise, assert_as_autograd, in_c

N, D = 6, 4
Of = Callable[[nn.Module, Tensor, Tensor], Any]

pytestmark = pytest.mark.usefixtures("needs_kernels")


def _stack(f: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([f(x), torch.tanh(f(y)), x * y])


def _heard(f: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    every = _stack(f, x, y)
    share = functional.softmax((every * x).sum(-1, keepdim=True) / 2, dim=0)
    return (share * every).sum(0)


CASES: Mapping[str, Of] = {
    "sum": lambda f, x, y: _stack(f, x, y).sum(0),
    "sum by name, kept": lambda f, x, y: _stack(f, x, y).sum(dim=0, keepdim=True).squeeze(0),
    "mean": lambda f, x, y: torch.mean(_stack(f, x, y), 0),
    "product": lambda f, x, y: _stack(f, x, y).prod(0),
    "most": lambda f, x, y: _stack(f, x, y).max(0).values,
    "most of two axes": lambda f, x, y: _stack(f, x, y).amax(0).amax(1, keepdim=True) * x,
    "which": lambda f, x, y: f(x) * _stack(f, x, y).argmax(0),
    "median": lambda f, x, y: _stack(f, x, y).median(dim=0).values,
    "variance": lambda f, x, y: _stack(f, x, y).var(0, unbiased=False),
    "length": lambda f, x, y: _stack(f, x, y).norm(1, dim=0),
    "logsumexp": lambda f, x, y: torch.logsumexp(_stack(f, x, y), dim=0),
    "so far": lambda f, x, y: _stack(f, x, y).cumsum(0)[1],
    "shares of one another": _heard,
    "along the last axis": lambda f, x, y: (_stack(f, x, y).softmax(-1) * x).sum(0),
    "around the mean": lambda f, x, y: (
        (_stack(f, x, y) - _stack(f, x, y).mean(0, keepdim=True)) ** 2
    ).mean(0),
    "by shares that are learnt": lambda f, x, y: (
        torch.softmax(f.bias[:3], 0).view(-1, 1, 1) * _stack(f, x, y)
    ).sum(0),
    "less than a row": lambda f, x, y: (1 - _stack(f, x, y) * f.bias).mean(0),
    "a map": lambda f, x, y: torch.tanh(f(_stack(f, x, y))).sum(0),
    "a norm": lambda f, x, y: functional.layer_norm(_stack(f, x, y), (D,)).sum(0),
    "by an equation": lambda f, x, y: torch.einsum(
        "kni,nk->ni", _stack(f, x, y), x[:, :3].softmax(1)
    ),
    "two of an equation": lambda f, x, y: torch.einsum(
        "kni, kni -> nk", _stack(f, x, y), _stack(f, y, x)
    ),
    "one after a function": lambda f, x, y: torch.exp(_stack(f, x, y))[-1],
    "of single numbers": lambda f, x, y: (
        torch.stack([f(x).sum(1), y.sum(1)]).softmax(0)[1, :, None] * x
    ),
}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(N, D, generator=generator, dtype=dtype) for _ in range(2))
    return x, y


def _module(of: Of, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return Rowwise(of, D, D).to(dtype)


@halved(name=[*CASES], dtype=[torch.float32, torch.float64])
def test_what_is_made_of_stacks_is_in_c(name: str, dtype: torch.dtype) -> None:
    assert_as_autograd(_module(CASES[name], dtype), _inputs(dtype))


OTHERS: Mapping[str, Of] = {
    "weights": lambda f, x, y: x @ torch.stack([f.weight, f.weight * 2]).mean(0) + y,
    "numbers": lambda f, x, y: torch.stack([f.bias[0], f.bias[1]]).softmax(0)[0] * f(x) + y,
    "one in front of rows": lambda f, x, y: torch.sigmoid(f.bias.unsqueeze(0)) * f(x) + y,
    "weights by an equation": lambda f, x, y: torch.einsum(
        "nk,kij,nj->ni", x[:, :2], torch.stack([f.weight, f.weight.t()]) * f.bias[:2, None, None], y
    ),
}


@pytest.mark.parametrize("name", [*OTHERS])
def test_what_has_no_rows_stays_in_c(name: str) -> None:
    assert_as_autograd(_module(OTHERS[name], torch.float64), _inputs(torch.float64))


def test_along_rows_there_is_nothing_to_tell() -> None:
    """Whoever adds up rows mixes them: that is told, and not taken for another axis."""
    module = _module(lambda f, x, y: _stack(f, x, y).softmax(1).sum(0), torch.float64)
    with pytest.raises(Exception, match="rows"):
        derive(module, _inputs(torch.float64))


def test_what_is_left_out_of_a_stack_is_left_out_row_by_row() -> None:
    module = _module(lambda f, x, y: functional.dropout(_stack(f, x, y), 0.5).sum(0), torch.float32)
    inputs = _inputs(torch.float32)
    program = Program(derive(module, inputs), Operands(module))
    assert program.in_c
    with torch.no_grad():
        one, other = (program.forward(inputs)[0][0] for _ in range(2))
    assert not torch.equal(one, other)


def test_what_is_written_into_a_stack_is_not_forgotten() -> None:
    def written(f: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        every = _stack(f, x, y)
        every[0] = x
        return every[0] + every[1]

    module, inputs = _module(written, torch.float64), _inputs(torch.float64)
    with torch.no_grad():
        found = Program(derive(module, inputs), Operands(module)).forward(inputs)[0][0]
        torch.testing.assert_close(found, module(*inputs))
    assert in_c(_module(lambda f, x, y: _stack(f, x, y)[0] + y, torch.float64), inputs)


def test_rows_that_are_not_first_are_told() -> None:
    def across(f: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (f(x) - f.weight.unsqueeze(1)).pow(2).sum(-1).t() + y

    def by_number(f: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _stack(f, x, y)[(x[:, 0] > 0).long(), torch.arange(len(x))]

    for of in (across, by_number):
        parts = derive(_module(of, torch.float64), _inputs(torch.float64)).parts
        assert parts.fused is None
        assert "not along" in parts.unfused
