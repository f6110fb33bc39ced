"""What is found out of a module before there are rows."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from geartrain.graph.imagined import on_meta


class Asked(TorchDispatchMode):
    """Notes which operators torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)])
def test_linear_maps_are_known_by_their_shapes(bias: bool, shape: tuple[int, ...]) -> None:
    module = nn.Linear(3, 4, bias=bias, dtype=torch.float64)
    with Asked() as asked:
        found = on_meta(module, [rows(*shape, dtype=torch.float64)])
    assert isinstance(found, Tensor) and found.is_meta
    real = module(torch.zeros(shape, dtype=torch.float64))
    assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
    assert not asked.names & {"aten.addmm.default", "aten.mm.default", "aten.linear.default"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_what_is_of_another_dtype_is_asked_of_torch(dtype: torch.dtype) -> None:
    with Asked() as asked, suppress(RuntimeError):
        on_meta(nn.Linear(3, 4), [rows(5, 3, dtype=dtype)])
    assert any("mm" in name for name in asked.names)


def test_features_that_do_not_fit_a_linear_map_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match=r"\[5, 2\] X \[3, 4\]|shapes cannot be multiplied"):
        on_meta(nn.Linear(3, 4), [rows(5, 2)])


def test_a_bias_that_does_not_fit_is_refused_by_torch() -> None:
    module = nn.Linear(3, 4)
    module.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError):
        on_meta(module, [rows(5, 3)])
