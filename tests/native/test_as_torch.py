"""Steps of torch's own optimisers in C: to the last bit, of whatever numbers and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from geartrain.native import as_torch
from geartrain.native.as_torch import AdamOfTorch, SgdOfTorch
from geartrain.native.steps import AdamTensors, scaled_
from geartrain.parts.alike import reckons_as_torch

SIZES = (0, 1, 3, 16, 31, 33, 70, 1000, 4099, 40001)
pytestmark = pytest.mark.usefixtures("needs_kernels")


@pytest.fixture(autouse=True)
def _alike() -> None:
    if not reckons_as_torch(torch.optim.Adam, torch.float32):
        pytest.skip("torch rounds otherwise here")


def drawn(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """From the least to the largest that a step may meet."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for n in SIZES:
        scale = 10.0 ** torch.randint(-20, 6, (n,), generator=draw, dtype=dtype)
        found.append(torch.randn(n, generator=draw, dtype=dtype) * scale)
    return found


def copied(some: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in some]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most", [100, as_torch._MOST])
@pytest.mark.parametrize(
    "how",
    [
        {"weight_decay": 0.0, "decoupled": False, "maximize": False},
        {"weight_decay": 0.3, "decoupled": False, "maximize": True},
        {"weight_decay": 0.3, "decoupled": True, "maximize": False},
    ],
)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.2, 0.5)])
def test_adam(
    dtype: torch.dtype,
    most: int,
    how: dict[str, Any],
    betas: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(as_torch, "_MOST", most)
    weights, means = drawn(dtype, 0), drawn(dtype, 1)
    squares = [x.abs() for x in drawn(dtype, 2)]
    counts = [torch.tensor(float(n % 7)) for n in SIZES]
    mine = AdamTensors(*map(copied, (weights, means, squares, counts)))
    step = AdamOfTorch(mine)
    factors = [1.0 / (1 + n % 3) for n in SIZES]
    for turn in range(3):
        gradients = drawn(dtype, 3 + turn)
        its = copied(gradients)
        for g, factor in zip(its, factors, strict=True):
            assert scaled_([g], factor)
        adam(
            *(weights, its, means, squares, [], counts),
            foreach=False,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=0.1,
            eps=1e-8,
            weight_decay=how["weight_decay"],
            decoupled_weight_decay=how["decoupled"],
            maximize=how["maximize"],
        )
        assert step.fits(mine) and step.suits(gradients)
        step.take(gradients, rate=0.1, betas=betas, eps=1e-8, factors=factors, **how)
        for theirs, own in zip((weights, means, squares, counts), mine, strict=True):
            assert all(map(same_bits, theirs, own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "how",
    [
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": True},
        {"momentum": 0.9, "dampening": 0.2, "nesterov": False, "maximize": False},
        {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "maximize": True},
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_sgd(dtype: torch.dtype, how: dict[str, Any], weight_decay: float) -> None:
    weights, momenta = drawn(dtype, 0), drawn(dtype, 1)
    mine, its = copied(weights), copied(momenta)
    kept = bool(how["momentum"])
    step = SgdOfTorch((mine, its) if kept else (mine,))
    for turn in range(3):
        gradients = drawn(dtype, 3 + turn)
        theirs: list[torch.Tensor | None] = [*momenta] if kept else [None] * len(weights)
        sgd(weights, gradients, theirs, foreach=False, lr=0.1, weight_decay=weight_decay, **how)
        assert step.suits(gradients)
        ones = [1.0] * len(gradients)
        step.take(gradients, rate=0.1, weight_decay=weight_decay, factors=ones, **how)
        assert all(map(same_bits, [*weights, *momenta], [*mine, *its]))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    of = {4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(of), b.view(of))


def test_weights_that_share_memory_are_left_to_torch() -> None:
    some = torch.ones(4)
    for weights, suits in (([some, some[:2]], False), ([some[:2], some[2:]], True)):
        like = [[torch.zeros_like(w) for w in weights] for _ in range(3)]
        counts = [torch.zeros(()) for _ in weights]
        step = AdamOfTorch(AdamTensors(weights, like[0], like[1], counts))
        assert step.suits(like[2]) is suits
