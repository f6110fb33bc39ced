"""Sums of gradients: sparse ones, and what torch is told of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from geartrain.nodes.gradient import GradientSum, _say_that_checks_are_off


@pytest.mark.parametrize("asked", [True, False])
def test_who_has_asked_for_checks_of_sparse_tensors_keeps_them(asked: bool) -> None:
    _say_that_checks_are_off.cache_clear()
    checks = torch.sparse.check_sparse_tensor_invariants
    weight = nn.Parameter(torch.zeros(5, 2))
    into = GradientSum([weight])
    into.add_rows(weight, torch.tensor([1, 3]), torch.ones(2, 2))
    with checks(asked):
        assert into.take(weight) is not None
        assert checks.is_enabled() == asked
