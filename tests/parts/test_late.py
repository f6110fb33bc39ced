"""What a part does on a device, done on the host: what is asked is heard later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from geartrain.errors import NonFiniteError
from geartrain.parts.part import PartState
from geartrain.parts.rules import Clip, Flush, Rules
from geartrain.parts.stepping import Stepping
from tests.rigs.unheard import answer_late


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_late(monkeypatch)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parts believe that they live on another device."""
    monkeypatch.setattr(Stepping, "elsewhere", True)


def test_a_gradient_that_is_nan_leaves_the_weights_and_is_told_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Linear(2, 2)
    rules = Rules(optimizer=lambda p: torch.optim.SGD(p, lr=1.0), update_every=Flush())
    part = PartState("p", module, rules)
    elsewhere(monkeypatch)
    before = [p.detach().clone() for p in module.parameters()]
    part.counting.rows = 1
    part.gradient.add(module.weight, torch.tensor([[1.0, torch.nan], [1.0, 1.0]]))
    part.gradient.add(module.bias, torch.ones(2))
    assert part.step(0) is not None
    assert all(map(torch.equal, before, module.parameters()))
    with pytest.raises(NonFiniteError, match=r"part 'p': the gradient of \['weight'\] .* 0 upd"):
        part.check_finite()
    part.check_finite()  # it is said once


@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_clipping_there_is_clipping_here(monkeypatch: pytest.MonkeyPatch, norm: float) -> None:
    found = []
    for there in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        rules = Rules(optimizer=lambda p: torch.optim.SGD(p, lr=1.0), clip=Clip(norm))
        part = PartState("p", module, rules)
        if there:
            elsewhere(monkeypatch)
        part.counting.rows = 1
        part.gradient.add(module.weight, torch.randn(2, 3) * 300)
        part.step(0)
        part.check_finite()
        found.append(module.weight.detach().clone())
    torch.testing.assert_close(found[1], found[0])
