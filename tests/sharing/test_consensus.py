"""The model that stands for all copies of it."""

from __future__ import annotations

import torch
from torch import nn

from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.sharing.consensus import average_buffers


def test_buffers_of_numbers_become_the_mean_and_counters_are_those_of_the_first() -> None:
    parts = []
    for k in range(7):
        norm = nn.BatchNorm1d(2)
        norm.running_mean.fill_(10.0 * k)
        norm.running_var.fill_(0.1)  # equal ones stay to the bit, though their sum does not
        norm.num_batches_tracked.fill_(k + 5)
        parts.append(PartState(f"p#{k}", norm, Rules()))
    into = PartState("p", nn.BatchNorm1d(2), Rules())
    average_buffers(parts, into)
    assert into.module.running_mean.tolist() == [30.0, 30.0]
    assert torch.equal(into.module.running_var, parts[0].module.running_var)
    assert int(into.module.num_batches_tracked) == 5
    assert parts[1].module.running_mean.tolist() == [10.0, 10.0]
    assert parts[2].module.running_mean.tolist() == [20.0, 20.0]
