"""Products whose columns fill no vector: what torch gives, and nothing beside it is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from geartrain.native.maps import map_forward
from geartrain.native.sums import Unsummed, sum_gradients

BEHIND = 64
"""Numbers behind a gradient, more than a vector has."""
WIDTHS = [*range(1, 20), 24, 31, 33, 40, 47, 48, 49, 63, 65, 97]


def _drawn(seed: int, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("height", [1, 2, 9])
def test_a_gradient_of_any_width_and_nothing_behind_it(height: int, dtype: torch.dtype) -> None:
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
    for width in WIDTHS:
        left, right = _drawn(1, dtype, 200, height), _drawn(2, dtype, 200, width)
        for add in (False, True):
            room = _drawn(3, dtype, height * width + BEHIND)
            before, n = room.clone(), height * width
            sum_gradients([Unsummed(room[:n].view(height, width), add, [left], [right])])
            expected = left.t() @ right + (before[:n].view(height, width) if add else 0)
            assert_close(room[:n].view(height, width), expected, **near)
            assert room[n:].equal(before[n:])


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_map_to_any_width_with_a_bias(n: int, dtype: torch.dtype) -> None:
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
    for width in WIDTHS:
        x, weight = _drawn(1, dtype, n, 7), _drawn(2, dtype, width, 7)
        bias = _drawn(3, dtype, width)
        assert_close(map_forward(x, weight, bias), x @ weight.t() + bias, **near)
