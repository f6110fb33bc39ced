"""Copies of a pipeline: modules that keep autograd's graph, one set of them a copy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.parts.part import PartState
from geartrain.sharing.replicas import Replicas
from tests.rigs.products import halved

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
VIEWS = [
    gt.Stashed(),
    gt.Mixed(),
    gt.Recomputed(),
    gt.Predicted(),
    gt.Predicted(by="difference", steps=1),
    gt.Corrected(),
    gt.DoubleBuffered(),
]
CREDITS = [gt.Greedy(), gt.Chunked(), gt.Overlapping()]


def data(n: int = 24) -> gt.Minibatches:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5 * n, 4, generator=generator)
    return gt.Minibatches(x, (x[:, 0] > 0).long(), batch=5)


def session(
    sharing: gt.AbstractSharing | None = None,
    *,
    active: int = 4,
    runtime: Any = None,
    view: Any = None,
    every: int = 4,
    **more: Any,
) -> gt.Session:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    network = nn.Sequential(*blocks, nn.Linear(4, 2))
    pipe = gt.Pipeline(network, parts=3, sample=torch.zeros(5, 4), view=view, **more)
    schedule = replace(pipe.settings()["schedule"], placement={})
    return gt.Session(
        pipe.graph,
        rules=gt.Rules(optimizer=SGD, update_every=gt.Messages(every)),
        runtime=runtime or gt.Simulated(2),
        sharing=sharing,
        schedule=schedule,
        max_active=active,
    )


def weights(s: gt.Session) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for x in s.parts.values() for p in x.parameters])


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_a_single_copy_of_a_pipeline_trains_as_the_pipeline_does(view):
    found = []
    for sharing in (None, gt.Neighbours(copies=1)):
        s = session(sharing, view=view, runtime=gt.Simulated(1))
        s.fit(data(8), epochs=2)
        found.append(weights(s))
    assert torch.equal(found[0], found[1])


@halved(view=VIEWS, exchange=["gradients", "all-reduce"])
def test_copies_of_a_pipeline_learn_with_any_view(view, exchange):
    s = session(gt.Neighbours(copies=3, exchange=exchange), view=view, every=4)
    fit = s.fit(data(18), epochs=3)
    assert fit.instances == 54
    assert fit.history[-1].loss < fit.history[0].loss


@pytest.mark.parametrize("credit", CREDITS, ids=str)
def test_copies_of_a_pipeline_learn_with_local_losses_in_threads(credit):
    s = session(gt.Neighbours(copies=3), credit=credit, every=1, runtime=gt.Threads(2))
    fit = s.fit(data(18), epochs=3)
    assert fit.instances == 54
    assert fit.history[-1].loss < fit.history[0].loss


def test_each_copy_counts_the_turns_of_a_gear_by_its_own_minibatches():
    s = session(gt.Neighbours(copies=2), gears=[gt.Gear(period=2), None, None], every=1, active=1)
    fit = s.fit(data(24), epochs=1)
    seen = s.state.sharing.totals()
    assert seen.finished == (12, 12)
    assert isinstance(s.state.sharing, Replicas)
    rounds = {e.member.part.name: e.member.rounds for e in s.state.sharing.all_endpoints()}
    assert rounds == {
        "part 0#0": 6, "part 0#1": 6, "part 1#0": 12, "part 1#1": 12, "part 2#0": 12,
        "part 2#1": 12,
    }  # fmt: skip
    assert fit.instances == 24


@pytest.mark.parametrize("credit", [gt.Backprop(), gt.DecoupledGreedy(buffer=2)], ids=str)
def test_copies_of_a_pipeline_go_on_where_a_checkpoint_left_them(credit, tmp_path):
    def fresh() -> gt.Session:
        gears = [gt.Gear(period={0: 1, 9: 3}), None, None]
        return session(gt.Neighbours(copies=2), gears=gears, credit=credit, every=1, active=1)

    whole, first, second = fresh(), fresh(), fresh()
    whole.fit(data(14), epochs=2)
    first.fit(data(14), epochs=1)
    first.save(tmp_path / "a.safetensors")
    second.load(tmp_path / "a.safetensors")
    second.fit(data(14), epochs=2)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize("view", [gt.Stashed(), gt.DoubleBuffered()], ids=str)
@pytest.mark.parametrize("way", ["gradient", "weights"])
def test_what_comes_in_a_letter_leaves_the_weights_of_rows_in_flight_alone(view, way):
    rules = gt.Rules(optimizer=SGD, update_every=gt.Messages(2), view=view)
    part = PartState("p", nn.Linear(2, 1, bias=False), rules)
    part.in_flight(2)
    (weight,) = part.parameters
    seen = part.look(0, 1)
    part.sent(1)
    before = weight.detach().clone()
    if way == "gradient":
        part.step_with([torch.ones(1, 2)], own=False)
    else:
        part.overwrite([torch.zeros(1, 2)])
    assert torch.equal(seen.leaves[weight].detach(), before)
    assert not torch.equal(weight.detach(), before)


def test_copies_of_the_model_refuse_a_placement():
    with pytest.raises(ValueError, match=r"Neighbours.* and placement=.*one worker"):
        torch.manual_seed(0)
        pipe = gt.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), parts=2)
        gt.Session(
            pipe.graph,
            rules=gt.Rules(optimizer=SGD),
            sharing=gt.Neighbours(copies=2),
            **pipe.settings(2),
        )
