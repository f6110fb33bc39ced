"""Delay rules against their formulae, and the quadratic on which a delay decides."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from math import pi, sin

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.parts.late.delay import mean_age
from tests.rigs.pipes import OneNode, close


def ages(*counts: int) -> np.ndarray:
    return np.array(counts)


class Scale(nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def quadratic(
    rate: float, late: int, steps: int, *, version: int = 0, **rules: object
) -> list[float]:
    """Weights under w' = w - rate · (w of ``late`` updates ago), by one node."""
    optimizer = partial(torch.optim.SGD, lr=rate)
    one = OneNode(Scale(), optimizer=optimizer, update_every=gt.Messages(1), **rules)
    one.part.version = version
    x, waiting, found = torch.ones(1, 1, dtype=torch.float64), deque(), []
    for _ in range(steps):
        waiting.append(one.forward(x))
        if len(waiting) > late:
            sent = waiting.popleft()
            one.backward(sent, sent.payload[0])  # the gradient of y² / 2
            one.part.step_if_due(0)
            found.append(abs(one.part.module.weight.item()))
    return found


@pytest.mark.parametrize(
    "delay", [0, 3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 6))]
)
def test_the_delayed_quadratic_is_stable_up_to_the_known_rate_and_no_further(delay):
    limit = 2 * sin(pi / (4 * delay + 2))
    below = quadratic(0.96 * limit, delay, 300)
    above = quadratic(1.04 * limit, delay, 300)
    assert max(below[-30:]) < 0.7 * max(below[:30])
    assert max(above[-30:]) > 1.4 * max(above[:30])


def test_an_annealed_rate_is_divided_by_the_delay_at_first_and_whole_in_the_end():
    rule = gt.AnnealedRate(over=10)
    found = [rule.rate(ages(0, 0, 0, 0, 5), k) for k in (0, 5, 10, 50)]
    assert found == pytest.approx([1 / 4, 1 / 2, 1.0, 1.0])
    assert rule.rate(ages(9), 0) == rule.rate(ages(0, 9), 0) == 1.0  # never more than whole
    assert gt.AnnealedRate(over=10, delay=3).rate(ages(9), 0) == pytest.approx(1 / 3)
    assert gt.AnnealedRate(over=1).rate(ages(0, 0, 2), 1) == 1.0
    assert rule.rate(ages(1, 0, 0, 0, 0, 1), 0) == pytest.approx(1 / 2.5)


def test_an_annealed_rate_makes_a_delayed_step_stable_that_would_not_be():
    rate, delay = 1.0, 3  # the limit is 0.445
    assert max(quadratic(rate, delay, 120)[-20:]) > 1e6
    calm = quadratic(rate, delay, 120, delay=gt.AnnealedRate(over=10**9))
    assert max(calm[-20:]) < 1e-2


def test_past_its_last_update_an_annealed_rate_changes_nothing():
    plain = quadratic(0.4, 3, 30)
    assert quadratic(0.4, 3, 30, version=7, delay=gt.AnnealedRate(over=7)) == plain
    assert quadratic(0.4, 3, 30, version=0, delay=gt.AnnealedRate(over=7)) != plain


def test_a_rate_that_is_scaled_is_the_mean_of_reciprocals():
    rule = gt.ScaledByStaleness()
    assert rule.rate(ages(4), 0) == rule.rate(ages(0, 4), 7) == 1.0
    assert rule.rate(ages(0, 0, 6), 0) == pytest.approx(1 / 2)
    assert rule.rate(ages(2, 0, 0, 0, 6), 0) == pytest.approx((2 + 6 / 4) / 8)


def test_the_rate_of_a_rule_multiplies_that_of_the_schedule_for_its_step_alone():
    one = OneNode(
        Scale(), delay=gt.AnnealedRate(over=10**9, delay=4), schedule=lambda progress: 0.5
    )
    before = one.part.module.weight.item()
    x = torch.ones(1, 1, dtype=torch.float64)
    one.backward(one.forward(x), x)
    one.part.step(0)
    assert one.part.module.weight.item() == pytest.approx(before - 0.1 * 0.5 / 4)
    assert one.part.optimizer.param_groups[0]["lr"] == 0.1
    assert one.part.rate_factor == pytest.approx(0.125)


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def late(average: str, **rules: object) -> tuple[OneNode, list[Tensor], list[Tensor], nn.Module]:
    """A node whose one message came two updates late; the plain gradient; what was added."""
    module = two_layers()
    then = copy.deepcopy(module)
    one = OneNode(module, average=average, **rules)
    torch.manual_seed(4)
    x, dy = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    sent = one.forward(x)
    one.step_by_chance()
    one.step_by_chance()
    one.backward(sent, dy)
    plain = list(torch.autograd.grad(then(x), list(then.parameters()), dy))
    return one, plain, one.gradients(), then


@pytest.mark.parametrize(("average", "rows"), [("rows", 5), ("none", 1)])
def test_a_gradient_is_compensated_for_the_way_of_the_weights_since(average, rows):
    one, plain, added, then = late(average, delay=gt.DelayCompensated(0.3))
    for g, found, now, old in zip(
        plain, added, one.part.module.parameters(), then.parameters(), strict=True
    ):
        mean = g / rows
        close(found / rows, mean + 0.3 * mean * mean * (now - old).detach())


def test_an_adaptive_compensation_is_divided_by_the_root_of_the_mean_square():
    one, plain, added, then = late("none", delay=gt.DelayCompensated(2.0, adaptive=0.95))
    for g, found, now, old in zip(
        plain, added, one.part.module.parameters(), then.parameters(), strict=True
    ):
        scale = (0.05 * g * g + 1e-7).sqrt()
        close(found, g + 2.0 / scale * g * g * (now - old).detach())


def test_no_weight_of_the_compensation_is_the_plain_gradient():
    _, plain, added, _ = late("rows", delay=gt.DelayCompensated(0.0))
    close(added, plain)


def test_a_gradient_is_damped_by_the_gap_in_mean_steps():
    one, plain, added, then = late("none", delay=gt.GapAware(decay=0.5))
    steps = []
    module = two_layers()
    twin = OneNode(module)
    torch.manual_seed(4)
    torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    for _ in range(2):
        before = [p.detach().clone() for p in module.parameters()]
        twin.step_by_chance()
        steps.append(
            [
                (p.detach() - b).square().mean().sqrt()
                for p, b in zip(module.parameters(), before, strict=True)
            ]
        )
    for i, (now, old) in enumerate(
        zip(one.part.module.parameters(), then.parameters(), strict=True)
    ):
        mean = (0.25 * steps[0][i] + 0.5 * steps[1][i]) / 0.75
        close(added[i], plain[i] / (1 + (now - old).detach().abs() / mean))


def test_without_a_gap_nothing_is_compensated_or_damped():
    for rule in (gt.DelayCompensated(0.5), gt.DelayCompensated(2.0, adaptive=0.9), gt.GapAware()):
        module = two_layers()
        one = OneNode(module, delay=rule)
        one.step_by_chance()
        x, dy = torch.randn(5, 3).double(), torch.randn(5, 2).double()
        one.backward(one.forward(x), dy)
        close(one.gradients(), list(torch.autograd.grad(module(x), list(module.parameters()), dy)))


def test_sparse_gradients_are_compensated_too():
    module = nn.Embedding(5, 2, sparse=True).double()
    then = copy.deepcopy(module)
    one = OneNode(module, delay=gt.DelayCompensated(0.3))
    ids, dy = torch.tensor([1, 3, 1]), torch.randn(3, 2, dtype=torch.float64)
    sent = one.forward(ids)
    one.step_by_chance()
    one.node.backward([_answer(sent, dy)])
    dense = torch.zeros(5, 2, dtype=torch.float64).index_add_(0, ids, dy)
    gap = (module.weight - then.weight).detach()
    close(one.gradients()[0], dense + 0.3 * dense * dense * gap)


def _answer(sent, dy):
    from geartrain.frames.message import Backward

    return Backward(sent.origin, (dy,), sent.lengths)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gt.AnnealedRate(over=0), "over=0"),
        (lambda: gt.AnnealedRate(over=1, delay=-1), "delay=-1"),
        (lambda: gt.DelayCompensated(-0.1), "lambda_=-0.1"),
        (lambda: gt.DelayCompensated(adaptive=1.0), "adaptive=1.0"),
        (lambda: gt.GapAware(1.0), "decay=1.0"),
        (lambda: gt.Rules(window=0), "window=0"),
        (lambda: gt.Messages(0), r"Messages\(0\)"),
        (lambda: gt.Synchronous(-1), "instances=-1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_mean_age_is_weighted_by_rows():
    assert mean_age(ages(2, 0, 2)) == 1.0 and mean_age(ages(0, 0)) == 0.0
