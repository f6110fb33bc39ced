"""Shared weights between processes: what the owner of a part knows of the gradients that come."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from geartrain.parts.late.delay import AnnealedRate, DelayCompensated, GapAware, ScaledByStaleness
from geartrain.parts.late.views import Corrected, Predicted
from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from geartrain.sharing.letters import Letter
from geartrain.sharing.published import GRADIENT, PublishedState

SGD = partial(torch.optim.SGD, lr=1.0)


def made(**rules) -> tuple[PartState, PublishedState]:
    module = nn.Linear(2, 1, bias=False).double()
    part = PartState("p", module, Rules(optimizer=SGD, update_every=1, average="none", **rules))
    return part, PublishedState({"p": part}, 2)


def moved(part: PartState, state: PublishedState, versions: list[int]) -> list[float]:
    """How far the weights go by gradients of ones that saw these versions, each a step."""
    state.live_on(0, 2, in_common=True)
    owner = state.weights("p", ())[0]
    found = []
    for version in versions:
        before = part.parameters[0].detach().clone()
        saw, rows = torch.tensor([version]), torch.tensor([1])
        gradient = torch.ones(1, 2, dtype=torch.float64)
        owner.receive(Letter("p", 1, 0, GRADIENT, (gradient, saw, rows), round=1, progress=0))
        owner.take()
        found.append(float((before - part.parameters[0].detach())[0, 0]))
    return found


def test_a_step_is_scaled_by_the_age_of_the_gradients_that_other_workers_sent():
    part, state = made(delay=ScaledByStaleness())
    assert moved(part, state, [0, 1, 2, 0, 4]) == pytest.approx([1.0, 1.0, 1.0, 1 / 3, 1.0])


def test_a_rate_that_is_annealed_goes_by_the_updates_of_the_owner():
    part, state = made(delay=AnnealedRate(over=4))
    # Update k of age 2: 2^(k / 4 - 1); the first two are of age 0 and 1.
    wanted = [1.0, 1.0, 2**-0.5, 2**-0.25, 1.0]
    assert moved(part, state, [0, 0, 0, 1, 2]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"max_staleness": 2}, "max_staleness=2 wants to know of all rows in flight"),
        ({"window": 3}, "window=3 wants to know of all rows in flight"),
        ({"delay": DelayCompensated(1.0)}, "DelayCompensated.* wants the weights that each row"),
        ({"delay": GapAware()}, "GapAware.* wants the weights that each row has seen"),
        ({"view": Corrected()}, "Corrected.* wants the weights that each row has seen"),
        ({"view": Predicted()}, "Predicted.* wants the weights that each row has seen"),
    ],
)
def test_rules_that_want_more_than_the_owner_knows_are_refused_by_name(rules, said):
    with pytest.raises(ValueError, match=said):
        made(**rules)
