"""What is done to gradients before a step, in one call for all of them."""

from __future__ import annotations

import math

import pytest
import torch

from geartrain.native import library
from geartrain.native.steps import norm_of, scaled_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_and_scale_of_all(dtype: torch.dtype) -> None:
    if library.current() is None:
        pytest.skip("no compiled kernels here")
    draw = torch.Generator().manual_seed(0)
    some = [torch.randn(n, generator=draw, dtype=dtype) for n in (1, 31, 32, 33, 5000, 0)]
    expected = float(torch.cat(some).double().norm())
    found = norm_of(some)
    assert found == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 1e-14)
    before = [x.clone() for x in some]
    assert scaled_(some, 0.25)
    assert all(torch.equal(x, 0.25 * y) for x, y in zip(some, before, strict=True))
    for broken in (math.nan, math.inf, -math.inf):
        some[4][4321] = broken
        total = norm_of(some)
        assert total is not None and not math.isfinite(total)


def test_what_is_not_for_c_is_left_to_torch() -> None:
    x = torch.ones(3, 4)
    for some in ([], [x.t()], [x, x.double()], [x.bfloat16()], [x.to_sparse()]):
        assert norm_of(some) is None
        assert not scaled_(some, 2.0)
    assert torch.equal(x, torch.ones(3, 4))
