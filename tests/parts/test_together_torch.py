"""Steps of torch's own optimisers that parts take together are, bit by bit, those of torch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import geartrain as gt
from geartrain.errors import NonFiniteError, WorkerError
from geartrain.native import library
from geartrain.native.as_torch import AdamOfTorch, SgdOfTorch
from geartrain.parts import alike
from geartrain.parts.rules import Rules
from geartrain.parts.snapshot import check_parts, put_parts
from geartrain.parts.told import StepTeller
from tests.rigs.stepped import Parts, noting, require_equal, require_equal_at_the_end

Make = Callable[[Any], Optimizer]

IN_C: dict[str, Make] = {
    "Adam": partial(Adam, lr=0.02),
    "Adam that decays": partial(Adam, lr=0.02, weight_decay=0.1, betas=(0.7, 0.9)),
    "Adam upwards": partial(Adam, lr=0.02, weight_decay=0.1, maximize=True, eps=1e-3),
    "Adam of the last": partial(Adam, lr=1, betas=(0.0, 0.0)),
    "Adam that is not in lists": partial(Adam, lr=0.02, foreach=False, fused=False),
    "AdamW": partial(AdamW, lr=0.02),
    "AdamW upwards": partial(AdamW, lr=0.3, weight_decay=0.2, maximize=True, betas=(0.4, 0.99)),
    "AdamW without decay": partial(AdamW, lr=0.02, weight_decay=0),
    "SGD": partial(SGD, lr=0.1),
    "SGD that decays": partial(SGD, lr=0.1, weight_decay=0.2, maximize=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "damped": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True),
    "Nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


class Halved(SGD):
    """Steps half as far."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad *= 0.5
        super().step(closure)


class Adam2(Adam):
    """Somebody's own."""


def hooked(parameters: Any) -> Optimizer:
    found = Adam(parameters, lr=0.02)
    found.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.03))
    return found


def in_groups(parameters: Any) -> Optimizer:
    weight, bias = parameters
    return SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "momentum": 0.9}], lr=0.2)


def of_one(parameters: Any) -> Optimizer:
    return Adam(parameters[:1], lr=0.02)


BY_TORCH: dict[str, Make] = {
    "amsgrad": partial(Adam, lr=0.02, amsgrad=True),
    "in lists": partial(Adam, lr=0.02, foreach=True),
    "fused": partial(AdamW, lr=0.02, fused=True),
    "SGD in lists": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "fused SGD": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "a tensor's rate": lambda parameters: Adam(parameters, lr=torch.tensor(0.02)),
    "SGD at a tensor's rate": lambda parameters: SGD(parameters, lr=torch.tensor(0.1)),
    "its own": partial(Halved, lr=0.1),
    "its own Adam": partial(Adam2, lr=0.02),
    "hooked": hooked,
    "in groups": in_groups,
    "of one": of_one,
    "the other way round": lambda parameters: Adam([*parameters][::-1], lr=0.02),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
}


def both(make: Callable[[int], Make], **more: Any) -> tuple[Parts, Parts]:
    """Parts of which each has such an optimiser: alone, and together."""

    def rules(k: int) -> Rules:
        return Rules(optimizer=make(k), update_every=gt.Instances(4), **more)

    return Parts(rules, together=False), Parts(rules, together=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each call of C has stepped."""
    found: list[int] = []
    for of_torch in (Adam, AdamW, SGD):  # which are tried before
        for dtype in (torch.float32, torch.float64):
            alike.reckons_as_torch(of_torch, dtype)
    for kind in (AdamOfTorch, SgdOfTorch):
        monkeypatch.setattr(kind, "take", noting(kind.take, found))
    return found


@pytest.fixture
def tried_anew() -> Iterator[None]:
    """What has been found out of C is forgotten afterwards."""
    yield
    alike._tried.cache_clear()


@pytest.mark.parametrize("name", IN_C)
def test_they_are_those_of_torch(name: str, calls: list[int]) -> None:
    alone, together = both(lambda _: IN_C[name])
    for _ in range(10):
        for each in (alone, together):
            each.step()
        require_equal(alone, together)
    require_equal_at_the_end(alone, together)
    if library.current() is not None and alike.reckons_as_torch(Adam, torch.float32):
        first = 0 if name.startswith("SGD") else 1  # torch makes what is remembered
        assert sorted(calls) == [2] * (10 - first) + [4] + [6] * (10 - first)


@pytest.mark.parametrize("name", BY_TORCH)
def test_what_c_does_not_know_torch_does(name: str, calls: list[int]) -> None:
    alone, together = both(lambda _: BY_TORCH[name])
    for _ in range(5):
        for each in (alone, together):
            each.step()
        require_equal(alone, together)
    assert not calls


def test_parts_of_several_kinds_step_side_by_side(calls: list[int]) -> None:
    kinds = [IN_C["AdamW"], IN_C["Nesterov"], BY_TORCH["hooked"], IN_C["AdamW"]]
    alone, together = both(lambda k: kinds[k], schedule=lambda n: 0.5 if n > 20 else 1.0)
    for _ in range(8):
        for each in (alone, together):
            each.step()
        require_equal(alone, together)
    assert {*calls} <= {2, 4}


@pytest.mark.parametrize("name", ["Adam", "momentum"])
def test_schedulers_of_torch_step_with_their_parts(name: str) -> None:
    alone, together = both(lambda _: IN_C[name], scheduler=partial(ExponentialLR, gamma=0.5))
    for _ in range(5):
        for each in (alone, together):
            each.step()
        require_equal(alone, together)
    assert (
        alone.all[0].rates(0)
        == together.all[0].rates(0)
        != both(lambda _: IN_C[name])[0].all[0].rates(0)
    )


@pytest.mark.parametrize("name", ["Adam", "momentum"])
def test_limits_of_the_norm_are_those_of_parts_that_step_alone(name: str, calls: list[int]) -> None:
    alone, together = both(lambda _: IN_C[name], clip=gt.Clip(norm=0.7))
    free = both(lambda _: IN_C[name])[1]
    for _ in range(6):
        for each in (alone, together, free):
            each.step({1: 0.01})
        require_equal(alone, together)
    assert not torch.equal(free.all[3].parameters[0], together.all[3].parameters[0])
    if alike.reckons_as_torch(Adam, torch.float32):
        assert calls.count(6) == 10


@pytest.mark.parametrize("clip", [gt.Clip(value=0.01), gt.Clip(norm=1.0, value=0.01)])
def test_limits_of_entries_are_those_of_parts_that_step_alone(
    clip: gt.Clip, calls: list[int]
) -> None:
    alone, together = both(lambda _: IN_C["SGD"], clip=clip)
    for _ in range(3):
        for each in (alone, together):
            each.step()
        require_equal(alone, together)
    assert not calls


def changed(each: Parts, turn: int) -> None:
    """Do to parts what may be done to them between steps."""
    first, second, _, last = (cast(Optimizer, part.optimizer) for part in each.all)
    if turn == 3:
        first.param_groups[0]["lr"] = 0.5
        second.param_groups[0]["weight_decay"] = 0.3
        second.param_groups[0]["maximize"] = True
    each.all[1].frozen = turn == 4
    if turn == 5:
        last.load_state_dict(copy.deepcopy(last.state_dict()))
        first.param_groups[0]["foreach"] = True
    if turn == 6:
        for state in second.state.values():
            for key in state.keys() - {"step"}:
                state[key] = state[key].clone()
        for p in each.all[0].parameters:
            p.data = p.data.clone()
    if turn == 7:
        first.param_groups[0]["foreach"] = None
        last.register_step_pre_hook(lambda *_: None)
    if turn == 8:
        second.state.clear()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "momentum", "SGD"])
def test_what_changes_between_steps_is_seen(name: str, calls: list[int]) -> None:
    alone, together = both(lambda _: IN_C[name])
    for turn in range(10):
        for each in (alone, together):
            changed(each, turn)
            each.step(without=[0, 3] if turn % 3 == 1 else ())
        require_equal(alone, together)
    if calls:
        assert max(calls) == 6 and {4, 5} & {*calls}


@pytest.mark.parametrize("name", ["Adam", "momentum"])
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(name: str) -> None:
    whole, begun = both(lambda _: IN_C[name])
    for _ in range(4):
        for each in (whole, begun):
            each.step()
    tensors, document = begun.state()
    kept, written = {k: x.clone() for k, x in tensors.items()}, json.loads(json.dumps(document))
    resumed = both(lambda _: IN_C[name])[1]
    for _ in range(4):  # what it has been does not matter
        resumed.step({0: 3.0})
    parts = {part.name: part for part in resumed.all}
    put_parts(parts, check_parts(parts, kept, written, "file"))
    resumed.told, resumed.finished = list(begun.told), begun.finished
    resumed.draw_as(begun)
    for _ in range(4):
        for each in (whole, resumed):
            each.step()
        require_equal(whole, resumed)


def test_a_part_that_steps_alone_steps_in_c_as_well(calls: list[int]) -> None:
    alone, together = both(lambda _: IN_C["Adam"])
    for each in (alone, together):
        for _ in range(3):
            each.step()
    calls.clear()
    for each in (alone, together):
        each.add(each.all[1])
        each.flush()
    require_equal(alone, together)
    if alike.reckons_as_torch(Adam, torch.float32):
        assert calls == [2]


@pytest.mark.parametrize("name", ["momentum", "SGD"])
def test_a_step_that_is_put_in_the_place_of_the_class_s_is_taken(
    name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[int] = []

    def step(optimizer: SGD, closure: Any = None) -> None:
        stepped.append(len(optimizer.param_groups[0]["params"]))

    monkeypatch.setattr(SGD, "step", step)
    together = both(lambda _: IN_C[name])[1]
    for _ in range(3):
        together.step()
    assert not calls and stepped == [2] * 12


def test_without_kernels_torch_steps(
    calls: list[int], use: Callable[[library.Library | None], None]
) -> None:
    use(None)
    alone, together = both(lambda _: IN_C["Adam"])
    for _ in range(3):
        for each in (alone, together):
            each.step()
    require_equal(alone, together)
    assert not calls


@pytest.mark.usefixtures("tried_anew", "needs_kernels")
def test_c_that_rounds_otherwise_does_not_step(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = SgdOfTorch.take

    def another(step: SgdOfTorch, gradients: Any, **how: Any) -> None:
        before = [w.clone() for w in step.weights]
        take(step, gradients, **how)
        for w, was, g in zip(step.weights, before, gradients, strict=True):
            if not how["momentum"] and not how["maximize"]:
                decayed = g + how["weight_decay"] * was
                w.copy_(was - how["rate"] * decayed)  # every product is rounded

    monkeypatch.setattr(SgdOfTorch, "take", another)
    alike._tried.cache_clear()
    for dtype in (torch.float32, torch.float64):
        assert not alike.reckons_as_torch(SGD, dtype)
    calls.clear()
    together = both(lambda _: IN_C["SGD"])[1]
    together.step()
    assert not calls


@pytest.mark.usefixtures("in_float64")
def test_counts_in_float64_are_torch_s(calls: list[int]) -> None:
    alone, together = both(lambda _: IN_C["AdamW"])
    for _ in range(4):
        for each in (alone, together):
            each.step()
    require_equal(alone, together)
    assert not calls


def told_of(*weights: nn.Parameter, **options: Any) -> tuple[Adam, StepTeller]:
    """An optimiser that has stepped the last of its weights before the others."""
    optimizer = Adam(weights, lr=0.02, **options)
    for some in (weights[-1:], weights):
        for p in some:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer, StepTeller(optimizer, weights)


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_ways_that_torch_would_go_by_itself_are_told_nobody(name: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, teller = told_of(weight)
    known = alike.reckons_as_torch(Adam, torch.float32)
    assert (teller.told([torch.ones(3)]) is not None) == known
    optimizer.param_groups[0][name] = True
    assert teller.told([torch.ones(3)]) is None


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_gradients_that_torch_would_scale_are_told_nobody(name: str) -> None:
    optimizer, teller = told_of(nn.Parameter(torch.ones(3)))
    setattr(optimizer, name, torch.ones(()))
    assert teller.told([torch.ones(3)]) is None
    delattr(optimizer, name)
    assert (teller.told([torch.ones(3)]) is None) != alike.reckons_as_torch(Adam, torch.float32)


def test_betas_that_may_change_where_they_lie_are_looked_at_each_time() -> None:
    optimizer, teller = told_of(nn.Parameter(torch.ones(3)))
    optimizer.param_groups[0]["betas"] = betas = [0.9, 0.999]
    for betas[0] in (0.8, 0.7):
        job = teller.told([torch.ones(3)])
        assert job is None or job.settings["betas"] == (betas[0], 0.999)


def test_gradients_that_are_sparse_or_go_nowhere_are_told_nobody() -> None:
    one, two = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    _, teller = told_of(one, two)
    assert teller.told([torch.ones(3, 2).to_sparse(1), torch.ones(2)]) is None
    two.requires_grad_(False)
    assert teller.told([torch.ones(3, 2), torch.ones(2)]) is None


@pytest.mark.usefixtures("needs_kernels")
def test_what_is_remembered_is_told_by_weight_in_whatever_order_they_have_stepped() -> None:
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, teller = told_of(one, two)
    assert [*optimizer.state] == [two, one]
    job = teller.told([torch.ones(3), torch.ones(3)])
    if job is not None:
        assert job.tensors[3] == [optimizer.state[p]["step"] for p in (one, two)]
        assert [x.item() for x in job.tensors[3]] == [1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_told_by_its_part(bad: float) -> None:
    said = []
    for each in both(lambda _: IN_C["Adam"]):
        each.step()
        each.step()
        with pytest.raises(NonFiniteError, match="part 1") as told:
            each.step({1: bad})
        said.append(str(told.value))
        assert [part.version for part in each.all] == [3, 2, 2, 2]
    assert said[0] == said[1]


def test_an_optimiser_that_raises_is_told_by_its_part() -> None:
    def failing(parameters: Any) -> Optimizer:
        found = Adam(parameters, lr=0.02)
        found.register_step_pre_hook(lambda *_: 1 / 0)  # type: ignore[func-returns-value]
        return found

    together = both(lambda k: failing if k == 2 else IN_C["Adam"])[1]
    with pytest.raises(WorkerError, match=r"ZeroDivisionError in a step of part 'part 2', of Adam"):
        together.step()
