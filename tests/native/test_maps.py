"""Linear maps of few rows or columns: what torch gives."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from geartrain.native.maps import map_backward, map_forward


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (14, 128, 128), (300, 33, 5), (5, 7, 300), (0, 3, 2)])
def test_a_map_and_its_gradients(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, into, out = shape
    draw = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, dtype=dtype)

    x, weight, bias, d = drawn(n, into), drawn(out, into), drawn(out), drawn(n, out)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
    assert_close(map_forward(x, weight, bias), x @ weight.t() + bias, **near)
    assert_close(map_forward(x, weight, None), x @ weight.t(), **near)
    expected = d @ weight, d.t() @ x, d.sum(0)
    assert_close(map_backward(d, x, weight), expected, **near)
    found = map_backward(d, x, weight, wanted=False)
    assert found is not None and found[0] is None
    assert_close(found[1:], expected[1:], **near)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("which", [(), (0,), (1,), (0, 1)])
def test_gradients_are_written_where_there_is_room_for_them(which: tuple[int, ...]) -> None:
    d, x, weight = torch.randn(7, 3), torch.randn(7, 4), torch.randn(3, 4)
    there = torch.full((3, 4), 9.0), torch.full((3,), 9.0)
    rooms = [room if k in which else None for k, room in enumerate(there)]
    found = map_backward(d, x, weight, rooms=rooms)
    assert found is not None
    assert_close(found[1:], (d.t() @ x, d.sum(0)), rtol=1e-4, atol=1e-4)
    for k, room in enumerate(there):
        assert (found[1 + k] is room) == (k in which)
        assert bool((room == 9.0).all()) == (k not in which)


def test_what_is_not_for_c_is_left_to_torch() -> None:
    x, weight = torch.ones(4, 3), torch.ones(2, 3)
    assert map_forward(x.double(), weight, None) is None
    assert map_forward(x.t().contiguous().t(), weight, None) is None
    assert map_forward(x, torch.ones(2, 4), None) is None
    assert map_forward(x.bfloat16(), weight.bfloat16(), None) is None
    assert map_backward(torch.ones(4, 3), x, weight) is None
