"""What a forward has drawn comes again when the module runs again, for other weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from geartrain.nodes.chance import Remembered

ROWS, DIM = 40, 5


def fused(x: Tensor, p: float) -> Tensor:
    """Dropout as one operator with a mask, which is what accelerators run."""
    dropped: Tensor = torch.native_dropout(x, p, True)[0]
    return dropped


@pytest.mark.parametrize("p", [0.3, 0.75])
def test_the_mask_of_a_native_dropout_comes_again_with_its_gradient(p: float) -> None:
    torch.manual_seed(0)
    then, now = torch.rand(2, ROWS, DIM, dtype=torch.float64) + 1
    with Remembered() as chance:
        first, second = fused(then, p), fused(then, p)
    assert not torch.equal(first, second)
    leaf = now.clone().requires_grad_()
    torch.manual_seed(1)
    with chance.repeated():
        again = [fused(leaf, p), fused(leaf, p)]
    dy = torch.randn(ROWS, DIM, dtype=torch.float64)
    for y, was in zip(again, (first, second), strict=True):
        factors = was / then  # 0 or 1 / (1 - p)
        assert_close(y.detach(), now * factors)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert_close(dx, dy * factors)


def test_a_native_dropout_of_all_is_zero_again() -> None:
    x = torch.ones(3, 2, dtype=torch.float64)
    with Remembered() as chance:
        assert not fused(x, 1.0).any()
    with chance.repeated():
        assert not fused(x, 1.0).any()


def test_a_native_dropout_in_evaluation_draws_nothing() -> None:
    x = torch.ones(3, 2, dtype=torch.float64)
    with Remembered() as chance:
        y = torch.native_dropout(x, 0.5, False)[0]
    assert torch.equal(y, x)
    assert chance.drawn == [] and chance.nbytes() == 0
    with chance.repeated():
        assert torch.equal(torch.native_dropout(x, 0.5, False)[0], x)


def test_of_a_native_dropout_the_mask_alone_is_kept() -> None:
    x = torch.ones(ROWS, DIM, dtype=torch.float64)
    with Remembered() as chance:
        fused(x, 0.5)
    (mask,) = chance.drawn
    assert mask.dtype == torch.bool and chance.nbytes() == ROWS * DIM
