"""What a part counts of the gradients that come back."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.nodes.weights import AbstractWeights
from geartrain.parts.part import PartState


def _part(most: int | None, version: int) -> PartState:
    rules = gt.Rules(
        optimizer=partial(torch.optim.SGD, lr=0.5),
        update_every=gt.Messages(4),
        max_staleness=most,
    )
    part = PartState("p", nn.Linear(2, 1), rules)
    part.version = 1
    part.sent(1)
    part.version = 2
    part.sent(3)
    part.version = version
    return part


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("version", [2, 4, 12])
def test_messages_of_one_version_count_as_if_each_named_it(most: int | None, version: int) -> None:
    named, told, by_default = (_part(most, version) for _ in range(3))
    named.received(5, np.array([2, 2]), np.array([2, 3]))
    told.received_of(2, 5, 2)
    AbstractWeights.received_of(by_default, 2, 5, 2)
    seen = []
    for part in (named, told, by_default):
        counting = part.counting
        seen.append((counting.rows, counting.messages, counting.outstanding, part.histogram()))
        part.received_of(2, 1, 1)
        assert not part.holding
        part.sent(1, 1)
        part.received_of(1, 1, 1)  # the update is full, and one of version 1 is on its way
        assert part.holding == (most is not None and version > 2)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0] == (5, 2, 2, (*[0] * (version - 2), 5))


@pytest.mark.parametrize("bundles", [(), (0,), (0, 2), (0, 1, 2)])
def test_what_is_told_of_a_later_update_counts_as_if_each_firing_told_of_it(
    bundles: tuple[int, ...],
) -> None:
    together, each = (_part(None, 7) for _ in range(2))
    lengths = {k: np.array([2, 3]) for k in bundles}
    for part in (together, each):
        part.sent(6)
    for k in range(3):
        versions = np.array([2 + k, 3])
        together.received_for(np.array([1, 1]), versions, lengths.get(k))
        each.received(int(lengths.get(k, np.ones(2)).sum()), versions, lengths.get(k))
        together.answered_for(np.array([1]), None)
        each.answered(1, 1)
    assert together.counting.rows == 0
    assert together.next_update()
    assert not together.next_update()
    seen = [(c.rows, c.messages, c.outstanding) for c in (together.counting, each.counting)]
    assert seen[0] == seen[1]
    assert together.histogram() == each.histogram()
