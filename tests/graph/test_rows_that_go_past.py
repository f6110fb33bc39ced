"""Rows that go past a module, as they are, lie where they lay: they are not copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.nodes.loop.listing import Listing
from geartrain.nodes.loop.plan import StoreStage
from tests.rigs.called import Block, past, tokens_in_bags
from tests.rigs.passes import Order, accumulate, assert_same_gradients

FEW = Order(max_active=3)
WAYS: dict[str, dict[str, Any]] = {
    "by columns": {"looks": False},
    "as they say": {"looks": True},
    "experts": {"looks": True, "experts": 2},
    "experts by columns": {"looks": False, "experts": 2},
    "of one tensor alone": {"looks": True, "all_read": False},
    "of one tensor alone, by columns": {"looks": False, "all_read": False},
}


class Narrow(Block):
    """Gives less of both."""

    def forward(self, a: Tensor, wanted: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        made, other = super().forward(a, wanted, b)
        return made[:, 1:], other[:, 1:]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[StoreStage]:
    """Places at which rows are copied, as loops are made."""
    found: list[StoreStage] = []
    before = StoreStage.__init__

    def note(self: StoreStage, *args: object) -> None:
        found.append(self)
        before(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreStage, "__init__", note)
    return found


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", WAYS)
def test_they_are_not_copied_and_learn_what_they_learn_by_steps(
    name: str, native: bool, copied: list[StoreStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(Listing, "pays", False)
    found = []
    for run in ("whole", "steps"):
        torch.manual_seed(1)
        found.append(accumulate(past(run, **WAYS[name]), tokens_in_bags(), FEW))
    assert_same_gradients(*[each.gradients for each in found])
    assert not copied


@pytest.mark.parametrize("native", [True, False])
def test_rows_of_another_shape_than_those_that_go_past_are_refused(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(Listing, "pays", False)
    with pytest.raises(GraphError, match="all rows of a stream have one shape"):
        accumulate(past("whole", looks=True, block=Narrow), tokens_in_bags(), FEW)
