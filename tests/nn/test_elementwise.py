"""The fast tanh is tanh to two units of rounding of its dtype, everywhere."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from geartrain.nn.elementwise import tanh_into


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 2.4e-7), (torch.float64, 4.5e-16), (torch.bfloat16, 4e-3)],
)
def test_tanh_is_right_to_two_units_of_rounding(dtype: torch.dtype, error: float) -> None:
    x = torch.cat((torch.linspace(-12, 12, 20_001), torch.logspace(-30, 0, 301))).to(dtype)
    y = torch.empty_like(x)
    tanh_into(x, y)
    assert (y.double() - x.double().tanh()).abs().max() <= error


def test_extreme_values_go_to_their_limits_and_nan_stays() -> None:
    x = torch.tensor([float("inf"), float("-inf"), 3e38, -3e38, 0.0, float("nan")])
    tanh_into(x, x)
    assert_close(x, torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, float("nan")]), equal_nan=True)
