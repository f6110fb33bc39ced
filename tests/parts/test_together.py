"""Steps that parts take together are, bit by bit, those that they take one after the other."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import geartrain as gt
from geartrain.errors import NonFiniteError
from geartrain.native.steps import AbstractWeightsStep, AdamStep
from geartrain.parts.counting import Counting
from geartrain.parts.part import PartState
from geartrain.parts.rules import Rules
from tests.rigs.stepped import Parts, noting, require_equal, require_equal_at_the_end

ADAM = partial(gt.FusedAdam, lr=1e-2)


def halved(progress: int) -> float:
    return 0.5 if progress > 20 else 1.0


def in_groups(parameters: Any) -> gt.FusedAdam:
    weight, bias = parameters
    return gt.FusedAdam([{"params": [weight], "lr": 0.1}, {"params": [bias]}])


def hooked(parameters: Any) -> gt.FusedAdam:
    found = ADAM(parameters)
    found.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.03))
    return found


RULES: dict[str, Callable[[int], Rules]] = {
    "alike": lambda k: Rules(optimizer=ADAM, update_every=gt.Instances(4)),
    "of rows": lambda k: Rules(optimizer=ADAM, update_every=gt.Instances(4), average="rows"),
    "sums": lambda k: Rules(optimizer=ADAM, update_every=gt.Instances(4), average="none"),
    "rates": lambda k: Rules(
        optimizer=partial(gt.FusedAdam, lr=0.1 / (1 + k % 2), weight_decay=0.1),
        update_every=gt.Instances(4),
        schedule=halved,
    ),
    "scheduler": lambda k: Rules(
        optimizer=ADAM,
        update_every=gt.Instances(4),
        scheduler=None if k else partial(ExponentialLR, gamma=0.5),
    ),
    "limited": lambda k: Rules(
        optimizer=ADAM, update_every=gt.Instances(4), clip=gt.Clip(norm=0.01) if k == 1 else None
    ),
    "views": lambda k: Rules(
        optimizer=ADAM, update_every=gt.Instances(4), view=gt.Predicted(by="difference")
    ),
    "others": lambda k: Rules(
        optimizer=[ADAM, partial(torch.optim.SGD, lr=0.1), in_groups, hooked][k],
        update_every=gt.Instances(4),
    ),
    "amsgrad": lambda k: Rules(optimizer=ADAM, update_every=gt.Instances(4)),
    "some due": lambda k: Rules(optimizer=ADAM, update_every=gt.Instances(4 + 4 * (k % 2))),
}


def both(name: str) -> tuple[Parts, Parts]:
    return Parts(RULES[name], together=False), Parts(RULES[name], together=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each call of Adam in C has stepped."""
    found: list[int] = []
    monkeypatch.setattr(AdamStep, "take", noting(AdamStep.take, found))
    return found


@pytest.mark.parametrize("name", RULES)
def test_steps_together_are_those_one_after_the_other(name: str) -> None:
    alone, together = both(name)
    for turn in range(10):
        for each in (alone, together):
            if name == "amsgrad" and turn == 5:
                assert each.all[3].optimizer is not None
                each.all[3].optimizer.param_groups[0]["amsgrad"] = True
                for state in each.all[3].optimizer.state.values():
                    state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
            each.step()
        require_equal(alone, together)
    require_equal_at_the_end(alone, together)
    assert len(together.told) >= 20


@pytest.mark.usefixtures("needs_kernels")
def test_they_are_one_call_for_all_weights_of_a_type(calls: list[int]) -> None:
    together = Parts(RULES["alike"], together=True)
    together.step()
    assert not calls  # torch makes the state
    together.step()
    assert sorted(calls) == [2, 6]  # that of float64 by itself


@pytest.mark.usefixtures("needs_kernels")
def test_what_changes_between_steps_is_seen(calls: list[int]) -> None:
    alone, together = both("alike")
    for turn in range(8):
        for each in (alone, together):
            change(each, turn)
            each.step()
        require_equal(alone, together)
    assert max(calls) == 6


@pytest.mark.usefixtures("needs_kernels")
def test_what_c_is_told_of_a_part_stays_whoever_steps_with_it(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(AbstractWeightsStep, "__init__", noting(AbstractWeightsStep.__init__, made))
    together = Parts(RULES["alike"], together=True)
    for turn in range(6):
        together.all[1].frozen = turn % 2 == 1
        together.step()
    assert sorted(calls) == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6]
    assert len(made) == 4  # one for each part


def change(each: Parts, turn: int) -> None:
    """Do to parts what may be done to them between steps."""
    first, second, _, last = (cast(gt.FusedAdam, part.optimizer) for part in each.all)
    if turn == 2:
        first.param_groups[0]["lr"] = 0.5
    each.all[1].frozen = turn == 3
    if turn == 4:
        last.load_state_dict(last.state_dict())
    if turn == 5:  # weights, and what is remembered of gradients, move
        for p in each.all[0].parameters:
            p.data = p.data.clone()
        for state in second.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
    if turn == 6:
        each.all[3].parameters[1].requires_grad_(False)
    if turn == 7:
        last.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_told_by_its_part_when_those_before_have_stepped(
    bad: float,
) -> None:
    alone, together = both("alike")
    said = []
    for each in (alone, together):
        each.step()
        each.step()
        with pytest.raises(NonFiniteError, match="part 1") as told:
            each.step({1: bad})
        said.append(str(told.value))
        assert [part.version for part in each.all] == [3, 2, 2, 2]
    assert said[0] == said[1]
    require_equal_weights(alone, together)


def require_equal_weights(alone: Parts, together: Parts) -> None:
    for one, other in zip(alone.all, together.all, strict=True):
        assert all(map(torch.equal, one.module.parameters(), other.module.parameters()))


def test_views_keep_the_weights_of_before() -> None:
    """Rows in flight see the weights of their forward, whoever steps meanwhile."""
    _, together = both("alike")
    together.step()
    together.step()
    part = together.all[0]
    seen = part.look(0, 1)
    part.sent(1)
    before = [x.clone() for x in seen.leaves.values()]
    together.step()
    now = part.look_back(seen)
    for parameter, then in zip(part.parameters, before, strict=True):
        assert torch.equal(now[parameter], then) and not torch.equal(parameter, then)


class Choosing(nn.Module):
    """Two layers of experts, of which each row comes by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2)
        )
        self.readout = nn.Linear(4, 3)

    def graph(self) -> gt.Graph:
        graph = gt.Graph(value=("label",))
        h = graph.input("x")
        for number, layer in enumerate(self.layers):
            ways = h.route(lambda m: m.payload[0][:, :3].argmax(1), 3)
            said = [
                way.through(expert, name=f"expert {number}.{k}")
                for k, (way, expert) in enumerate(zip(ways, layer.children(), strict=True))
            ]
            h = graph.merge(*said)
        h.through(self.readout, name="readout").loss(gt.cross_entropy, target="label")
        return graph


@pytest.mark.parametrize(("update", "in_flight"), [(8, 8), (8, 32), (12, 20)])
def test_a_fit_is_that_of_parts_that_step_one_after_the_other(
    update: int, in_flight: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(5)
    data = [
        gt.Instance({"x": torch.randn(1, 4, generator=draw)}, value={"label": k % 3})
        for k in range(90)
    ]
    found: list[list[torch.Tensor]] = []
    most: list[int] = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(PartState, "steps_plainly", False)
        calls.clear()
        network = Choosing()
        session = gt.Session(
            network.graph(),
            rules=gt.Rules(optimizer=ADAM, update_every=gt.Instances(update)),
            max_active=in_flight,
        )
        for epoch in (1, 2):
            session.fit(data, epochs=epoch)
        states = [part.optimizer for part in session.parts.values()]
        moments = [x["exp_avg"] for each in states if each is not None for x in each.state.values()]
        found.append([*network.parameters(), *moments])
        most.append(max(calls, default=0))
    assert all(map(torch.equal, *found))
    if most[1]:  # C steps
        assert most[1] == 2 and most[0] >= 8


def test_parts_that_have_stepped_may_be_copied() -> None:
    """Other processes get them: with what they remember, and without where it lay."""
    torch.manual_seed(0)
    graph, maps = gt.Graph(), [nn.Linear(3, 3), nn.Linear(3, 3)]
    h = graph.input("x").through(maps[0], name="0").through(maps[1], name="1")
    h.loss(lambda y: y.square().sum(1), name="size")
    rules = gt.Rules(optimizer=ADAM, update_every=gt.Instances(4))
    session = gt.Session(graph, rules=rules)
    session.fit([gt.Instance({"x": torch.randn(1, 3)})] * 12, epochs=1)
    for name, here in session.parts.items():
        assert isinstance(here, PartState)
        there = copy.deepcopy(here)
        for part in (here, there):
            for p in part.parameters:
                part.gradient.add(p, torch.ones_like(p))
            part.answered(1, 1)
            part.step(0)
        assert here.version == there.version == 4, name
        assert all(map(torch.equal, here.parameters, there.parameters))
        assert not any(p is q for p, q in zip(here.parameters, there.parameters, strict=True))


def test_parts_that_are_not_due_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(lambda k: Rules(update_every=gt.Instances(4 if k else 8)), together=True)
    asked: list[Counting] = []
    before = Counting.due

    def due(self: Counting, version: int) -> bool:
        asked.append(self)
        return before(self, version)

    monkeypatch.setattr(Counting, "due", due)
    parts.step()
    assert [each.part for each in parts.told] == ["part 1", "part 2", "part 3"]
    parts.step()
    assert [each.part for each in parts.told[3:]] == ["part 0", "part 1", "part 2", "part 3"]
    assert asked == 2 * [part.counting for part in parts.all]
