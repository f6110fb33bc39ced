"""Small linear maps write their gradients over the buffers in which these are added up."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from geartrain.nn.kernels import LinearKernel
from geartrain.nodes.gradient import GradientSum

ROWS = 64


@pytest.fixture(name="linear")
def small_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 4, dtype=torch.float64)


def back(linear: nn.Linear, into: GradientSum) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows go back; what autograd says of them."""
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    dy = torch.randn(ROWS, 4, dtype=torch.float64)
    LinearKernel(linear).backward((dy,), (x,), None, into)
    return dy.t() @ x, dy.sum(0)


@pytest.mark.usefixtures("needs_kernels")
def test_the_next_update_lies_where_the_last_one_lay(linear: nn.Linear) -> None:
    into, parameters = GradientSum(linear.parameters()), [*linear.parameters()]
    where = []
    for _ in range(3):
        expected = back(linear, into)
        found, _ = into.take_each(parameters)
        assert_close(tuple(found), expected)
        where.append([g.data_ptr() for g in found if g is not None])
    assert where[1:] == where[:-1]


def test_rows_that_come_after_others_are_added(linear: nn.Linear) -> None:
    into = GradientSum(linear.parameters())
    several = [back(linear, into) for _ in range(3)]
    found, _ = into.take_each([*linear.parameters()])
    assert_close(tuple(found), tuple(sum(its) for its in zip(*several, strict=True)))


def test_a_buffer_that_lies_otherwise_is_not_written_over(linear: nn.Linear) -> None:
    into, parameters = GradientSum(linear.parameters()), [*linear.parameters()]
    turned = torch.ones(5, 4, dtype=torch.float64).t()
    into.add(parameters[0], turned, given=True)
    into.take_each(parameters)
    expected = back(linear, into)
    found, _ = into.take_each(parameters)
    assert_close(tuple(found), expected)
