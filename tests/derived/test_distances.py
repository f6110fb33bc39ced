"""Squared distances of members of a row in one step: as autograd says, whoever reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from geartrain.derived.derivation import derive
from geartrain.derived.told.otherwise import OTHERWISE
from geartrain.native.fused import Op
from tests.rigs.products import halved
from tests.rigs.programs_in_c import ops_of
from tests.rigs.rowwise import Rowwise, assert_as_autograd

N, M, D = 7, 5, 19

pytestmark = pytest.mark.usefixtures("needs_kernels")


def nearest(f: Any, x: Tensor, apart: Tensor) -> Tensor:
    """What a member's nearest other one is."""
    which = apart.topk(2, 2, largest=False).indices[:, :, 1:]
    found: Tensor = f(x.gather(1, which.expand(-1, -1, x.shape[2])))
    return found


def fewer(x: Tensor) -> Tensor:
    return x[:, :3]


def of_stacks(x: Tensor) -> Tensor:
    s = x[:, :4].reshape(-1, 2, 2, D)
    return ((s[:, :, :, None] - s[:, :, None]) ** 2).sum(4).argmax(3).to(x.dtype).sum((1, 2))


RULES: dict[str, tuple[Callable[..., Any], int]] = {
    "nearest": (lambda f, x: nearest(f, x, ((x[:, :, None] - x[:, None]) ** 2).sum(3)), 1),
    "of what was found": (
        lambda f, x: nearest(f, x, ((f(x)[:, :, None] - f(x)[:, None]) ** 2).sum(-1)),
        1,
    ),
    "multiplied": (
        lambda f, x: nearest(f, x, (lambda by: (by * by).sum(3))(x.unsqueeze(1) - x.unsqueeze(2))),
        1,
    ),
    "of others": (
        lambda f, x: (
            f(x[:, 3:]) * ((x[:, 3:, None] - fewer(x)[:, None]) ** 2).sum(3).argmin(2, True)
        ),
        1,
    ),
    "kept as an axis": (
        lambda f, x: f(x) * ((x[:, :, None] - x[:, None]) ** 2).sum(3, True).argmax(2),
        1,
    ),
    "of pairs of stacks": (lambda f, x: f(x) * of_stacks(x)[:, None, None], 1),
    "with a way back": (
        lambda f, x: f(x) * torch.exp(-((f(x)[:, :, None] - x[:, None]) ** 2).sum(3)).sum(2, True),
        0,
    ),
    "cubed": (lambda f, x: nearest(f, x, ((x[:, :, None] - x[:, None]) ** 3).sum(3)), 0),
    "along another axis": (
        lambda f, x: f(x) * ((x[:, :, None] - x[:, None]) ** 2).sum(2).argmax(2, True),
        0,
    ),
    "read by others": (
        lambda f, x: (lambda by: nearest(f, x, (by**2).sum(3)) * (by.amax((2, 3)) > 1)[:, :, None])(
            x[:, :, None] - x[:, None]
        ),
        0,
    ),
    "cdist": (lambda f, x: nearest(f, x, torch.cdist(x, x)), 1),
    "cdist with a way back": (lambda f, x: f(x) * torch.cdist(f(x), fewer(x)).mean(2, True), 0),
    "cdist of itself with a way back": (lambda f, x: f(x) * torch.cdist(x, x).sum(2, True), 0),
}


@halved(name=[*RULES], dtype=[torch.float32, torch.float64])
def test_distances_are_what_autograd_says(name: str, dtype: torch.dtype) -> None:
    rule, steps = RULES[name]
    module = Rowwise(rule, D, D).to(dtype)
    x = torch.randn(N, M, D, dtype=dtype, generator=torch.Generator().manual_seed(1))
    assert_as_autograd(module, (x,))
    pair = derive(module, (x,)).parts.fused
    assert pair is not None
    assert ops_of(pair.forward._steps).count(Op.DISTANCES) == steps


def test_what_distances_are_of_is_not_written_over_before_they_are_read() -> None:
    def function(f: Any, x: Tensor) -> Tensor:
        y = torch.tanh(f(x))
        by = y[:, :, None] - y[:, None]
        other = torch.sigmoid(f(x)) * 2  # of the size of y, which nobody reads from here on
        square = by**2
        more = torch.cos(other)
        return f(more) * square.sum(3).argmax(2, True)

    assert_as_autograd(Rowwise(function, D, D), (torch.randn(N, M, D),))


def test_other_distances_are_torchs() -> None:
    mine, x, y = OTHERWISE[torch.cdist], torch.randn(2, 30, 3), torch.randn(2, 4, 3)
    for given in ((x, x), (y, y, 1.0), (x[0], x[0]), (y[:, :0], y)):
        assert torch.equal(mine(*given), torch.cdist(*given))
    for given in ((y, y), (x[0], y[0])):
        torch.testing.assert_close(mine(*given), torch.cdist(*given))
