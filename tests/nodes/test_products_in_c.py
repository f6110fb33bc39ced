"""Gradients of weights of many rows: on one thread they are multiplied in C, whatever the rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from geartrain.native import sums
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.products import outer_suits

THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    torch.set_num_threads(THREADS)


def _added(threads: int, n: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """How far two products added are from torch's, at most; how many were not made in C."""
    torch.set_num_threads(threads)
    asked: list[int] = []
    monkeypatch.setattr(
        "geartrain.nodes.slot.outer_suits",
        lambda d, x: asked.append(d.shape[0]) or outer_suits(d, x),
    )
    random = torch.Generator().manual_seed(n)
    weight = nn.Parameter(torch.zeros(192, 64))
    left, right = (torch.randn(n, k, generator=random) for k in (192, 64))
    into = GradientSum([weight])
    with torch.no_grad():
        for _ in range(2):
            into.add_product(weight, left, right)
        found = into.take(weight)
    assert found is not None
    want = 2 * (left.double().t() @ right.double())
    return float((found - want).abs().max() / want.abs().max()), len(asked)


@pytest.mark.parametrize("n", [352, 1400, 2047])
def test_on_one_thread_many_rows_are_multiplied_in_c(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, elsewhere = _added(1, n, monkeypatch)
    assert error < 1e-5 and elsewhere == (0 if sums.may_sum(torch.float32) else 2)


def test_on_several_threads_torch_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    error, elsewhere = _added(2, 1400, monkeypatch)
    assert error < 1e-5 and elsewhere == 2
