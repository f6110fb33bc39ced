"""Sums of gradients: sparse ones, and what torch is told of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.slots import _say_that_checks_are_off


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


def test_a_table_whose_gradient_is_rows_gets_no_buffer_of_its_size() -> None:
    table, weight = nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(2, 2))
    into = GradientSum([table, weight])
    for _ in range(2):
        into.add_rows(table, torch.tensor([1, 3]), torch.ones(2, 2))
        into.add_product(weight, torch.ones(3, 2), torch.ones(3, 2))
        (rows, dense), _ = into.take_each([table, weight])
        assert rows is not None and rows.is_sparse and dense is not None
    assert into._slots[table].buffer is None and into._slots[weight].buffer is not None


def test_what_means_nothing_does_not_go_with_a_copy_and_what_waits_does() -> None:
    """Sums go to worker processes with their parts, in every pass."""
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
    into = GradientSum([first, second])
    into.add(first, torch.ones(2, 3))
    into.add(second, torch.full((2, 3), 2.0))
    into.take(first)
    other = copy.deepcopy(into)
    slots = {float(slot.fresh): slot.buffer for slot in other._slots.values()}
    assert slots[1.0] is None
    assert slots[0.0] is not None and bool((slots[0.0] == 2.0).all())
    taken = [other.take(p) for p in other._slots]
    assert taken[0] is None and taken[1] is not None
    own = into.take(second)
    assert own is not None and bool((own == 2.0).all())
