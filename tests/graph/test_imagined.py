"""What is found out of a module before there are rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from geartrain.graph import imagined as room
from geartrain.graph.imagined import imagined, on_meta
from geartrain.nodes.inside import Inside


class Asked(TorchDispatchMode):
    """Notes which operators torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.of_meta = False
        """Whether any was for a tensor without data."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.add(str(function))
        self.of_meta |= any(isinstance(x, Tensor) and x.is_meta for x in args)
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


class Written(nn.Module):
    """Writes into all that it has, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, max_norm=0.1)
        self.register_buffer("count", torch.zeros(2))
        self.called = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.called += 1
        self.count += 1
        return self.table(ids) + torch.rand(3)


class Summed(nn.Module):
    """Sums of bundles, and of what comes along edges."""

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        sums = x.new_zeros(inside.lengths.shape[0], x.shape[1]).index_add(0, inside.segment, x)
        heads = x[inside.edges["source"]].sum(0)
        return (sums / inside.lengths[:, None])[inside.segment] + heads


def test_what_computes_with_zeros_is_asked_for_nothing_without_data() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.LayerNorm(4))
    with Asked() as asked:
        (found,) = imagined(module, (rows(5, 3),), None)
    assert found.is_meta and not asked.of_meta
    assert (found.shape, found.dtype) == (torch.Size([5, 4]), torch.float32)
    with Asked() as asked:
        on_meta(module, [rows(5, 3)])
    assert asked.of_meta


def test_bundles_and_edges_are_imagined_as_well() -> None:
    inside = Inside(
        rows(2, dtype=torch.int64),
        rows(3, dtype=torch.int64),
        {"source": rows(4, dtype=torch.int64)},
    )
    with Asked() as asked:
        (found,) = imagined(Summed(), (rows(3, 2),), inside)
    assert found.shape == (3, 2) and not asked.of_meta


def test_nothing_of_a_module_is_written_and_no_number_drawn() -> None:
    module, before = Written(), torch.get_rng_state()
    weights = module.table.weight.detach().clone()
    (found,) = imagined(module, (rows(5, dtype=torch.int64),), None)
    assert found.shape == (5, 3) and torch.equal(before, torch.get_rng_state())
    assert torch.equal(module.table.weight, weights)
    assert (module.called, module.count.tolist()) == (0, [0.0, 0.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, : int(x.sum()) + 1],
        lambda x: x[:, : x.numpy().argmax() + 1],
        lambda x: x[:, : np.asarray(x).argmax() + 1],
        lambda x: x[:, : len(x.tolist())],
        lambda x: x if x.any() else -x,
        lambda x: x[x == 0][:, None],
        lambda x: x.nonzero(),
        lambda x: F.one_hot(x[:, 0].long()),
        lambda x: x.unique()[:, None],
    ],
)
def test_where_numbers_decide_no_shape_is_known(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((NotImplementedError, RuntimeError, TypeError), match=r"(?i)meta"):
        imagined(function, (rows(3, 2),), None)


def test_what_is_refused_is_told_of_tensors_without_data() -> None:
    for module in (nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4))):
        with pytest.raises(RuntimeError, match=r"\[5, 2\] X \[3, 4\]|shapes cannot be multiplied"):
            imagined(module, (rows(5, 2),), None)


def test_what_has_too_many_numbers_is_told_by_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MOST_NUMBERS", 15)
    with Asked() as asked:
        (found,) = imagined(nn.Sequential(nn.Linear(3, 4), nn.SiLU()), (rows(5, 3),), None)
    assert found.shape == (5, 4) and asked.of_meta
