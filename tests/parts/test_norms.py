"""Limits over all parts: what a part knows of the others' norms, and what it makes of it."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain import device as transfer
from geartrain.parts.norms import Norms, share_norms
from geartrain.parts.part import PartState
from geartrain.parts.stepping import Stepping

OVER_ALL = gt.Clip(norm=1.0, over="all")
SGD = partial(torch.optim.SGD, lr=1.0)


def parts_of(*clips, names="abc"):
    torch.manual_seed(0)
    made = {}
    for name, clip in zip(names, clips, strict=False):
        rules = gt.Rules(optimizer=SGD, average="none", clip=clip)
        made[name] = PartState(name, nn.Linear(2, 1, bias=False).double(), rules)
    share_norms(made)
    return made


def moved(part, *gradient):
    """How far a step with this gradient moves the weights."""
    weight = part.module.weight
    before = weight.detach().clone()
    part.gradient.add(weight, torch.tensor([gradient], dtype=torch.float64))
    part.answered(1, 1)
    part.step(0)
    return (before - weight.detach()).flatten().tolist()


class Done:
    """An event of a device that is through with everything."""

    def query(self):
        return True

    def synchronize(self):
        pass


@pytest.fixture(params=["here", "on a device"])
def place(request, monkeypatch):
    """Where parts believe that they live."""
    monkeypatch.setattr(transfer, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(transfer, "recorded", lambda device: Done())
    monkeypatch.setattr(Stepping, "elsewhere", request.param != "here")


@pytest.mark.usefixtures("place")
def test_a_step_is_limited_by_its_own_norm_and_the_last_ones_of_the_others():
    parts = parts_of(OVER_ALL, OVER_ALL)
    a, b = parts["a"], parts["b"]
    assert moved(a, 3.0, 4.0) == pytest.approx([0.6, 0.8], rel=1e-5)  # b has not stepped yet
    assert moved(b, 0.0, 12.0) == pytest.approx([0, 12 / 13], rel=1e-5)
    assert moved(a, 9.0, 0.0) == pytest.approx([9 / 15, 0], rel=1e-5)
    assert moved(b, 0.0, 0.1) == pytest.approx([0, 0.1 / math.hypot(9, 0.1)], rel=1e-5)
    assert moved(a, 0.3, 0.4) == pytest.approx([0.3, 0.4], rel=1e-5)  # within the limit


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("over", ["part", "all"])
def test_gradients_of_next_to_nothing_are_limited_as_by_torch(over):
    """It adds a millionth to the norm."""
    twin = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    twin.grad = torch.tensor([3e-6, 4e-6], dtype=torch.float64)
    nn.utils.clip_grad_norm_([twin], 1e-6)
    part = parts_of(gt.Clip(norm=1e-6, over=over))["a"]
    with torch.no_grad():
        part.module.weight.zero_()  # a step so small would be lost in the weights
    assert moved(part, 3e-6, 4e-6) == pytest.approx(twin.grad.tolist(), rel=1e-9, abs=0)


@pytest.mark.usefixtures("place")
def test_parts_without_that_limit_count_and_are_not_limited_by_it():
    parts = parts_of(OVER_ALL, None, gt.Clip(norm=6.0))
    assert moved(parts["b"], 3.0, 4.0) == [3, 4]
    assert moved(parts["c"], 12.0, 0.0) == pytest.approx([6, 0], rel=1e-5)
    norm = math.hypot(5, 12, 84)  # as they were before any limit
    assert moved(parts["a"], 84.0, 0.0) == pytest.approx([84 / norm, 0], rel=1e-5)


def test_the_value_is_limited_before_the_norm_of_all():
    parts = parts_of(gt.Clip(norm=1.0, value=3.0, over="all"), OVER_ALL)
    moved(parts["b"], 4.0, 0.0)
    assert moved(parts["a"], 0.0, 50.0) == pytest.approx([0, 3 / 5], rel=1e-5)


def test_copies_of_a_part_count_as_one():
    parts = parts_of(OVER_ALL, OVER_ALL, OVER_ALL, names=["a", "b", "b#1"])
    moved(parts["b"], 100.0, 0.0)
    moved(parts["b#1"], 3.0, 0.0)
    assert moved(parts["a"], 0.0, 4.0) == pytest.approx([0, 0.8], rel=1e-5)


def test_nothing_is_shared_where_nobody_is_limited_by_all():
    assert {p.norms for p in parts_of(gt.Clip(norm=1.0), None).values()} == {None}


def test_norms_are_joined_on_the_host_and_on_a_device():
    norms = Norms(["a", "b", "c#0"])
    norms.note("a", 3.0)
    norms.note("c#0", torch.tensor(4.0))
    assert norms.of_all() == 5
    assert float(norms.of_all_on(torch.device("cpu"))) == 5
    assert [norms.last("a"), norms.last("b"), norms.last("c")] == [3, 0, 4]


def test_one_part_of_several_modules_is_limited_as_by_torch():
    torch.manual_seed(0)
    modules = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1)]).double()
    twins = copy.deepcopy(modules)
    part = PartState("p", modules, gt.Rules(optimizer=SGD, average="none", clip=gt.Clip(norm=0.5)))
    part.answered(1, 1)
    for p, twin in zip(modules.parameters(), twins.parameters(), strict=True):
        twin.grad = torch.randn_like(p)
        part.gradient.add(p, twin.grad.clone())
    part.step(0)
    nn.utils.clip_grad_norm_(twins.parameters(), 0.5)
    SGD(twins.parameters()).step()
    for p, twin in zip(modules.parameters(), twins.parameters(), strict=True):
        torch.testing.assert_close(p, twin, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"norm": 1.0, "over": "model"}, "give over='part' or over='all'"),
     ({"value": 1.0, "over": "all"}, r"what is over all parts is the norm; give norm=")],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        gt.Clip(**given)
