"""What is done to gradients before a step, in one call for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from geartrain.native.steps import AdamStep, AdamTensors, adagrad_step, norm_of, scaled_


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_and_scale_of_all(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    some = [torch.randn(n, generator=draw, dtype=dtype) for n in (1, 31, 32, 33, 5000, 0)]
    expected = float(torch.cat(some).double().norm())
    found = norm_of(some)
    assert found == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 1e-14)
    before = [x.clone() for x in some]
    assert scaled_(some, 0.25)
    assert all(torch.equal(x, 0.25 * y) for x, y in zip(some, before, strict=True))
    for broken in (math.nan, math.inf, -math.inf):
        some[4][4321] = broken
        total = norm_of(some)
        assert total is not None and not math.isfinite(total)


def test_what_is_not_for_c_is_left_to_torch() -> None:
    x = torch.ones(3, 4)
    for some in ([], [x.t()], [x, x.double()], [x.bfloat16()], [x.to_sparse()]):
        assert norm_of(some) is None
        assert not scaled_(some, 2.0)
    assert torch.equal(x, torch.ones(3, 4))


NO_COUNTS = {
    "of no elements": torch.empty(0),
    "of two elements": torch.zeros(2),
    "float64": torch.zeros((), dtype=torch.float64),
}


@pytest.mark.parametrize("step", NO_COUNTS.values(), ids=NO_COUNTS)
def test_steps_with_a_count_that_is_not_one_float32_are_left_to_torch(step: torch.Tensor) -> None:
    w, g, m, v = (torch.full((3, 4), x) for x in (1.0, 0.5, 0.25, 0.125))
    before = [x.clone() for x in (w, m, v, step)]
    adam = {"rate": 0.1, "eps": 1e-8, "weight_decay": 0.0, "maximize": False}
    assert not AdamStep(AdamTensors([w], [m], [v], [step])).suits([g])
    assert not adagrad_step([w], [g], [v], [step], rate_decay=0.0, **adam)
    assert all(torch.equal(x, y) for x, y in zip((w, m, v, step), before, strict=True))


@pytest.mark.parametrize("shape", [(3, 3), (4,), (0, 4), (12,)])
def test_steps_with_state_of_another_shape_are_left_to_torch(shape: tuple[int, ...]) -> None:
    w, g, step = torch.ones(3, 4), torch.ones(3, 4), torch.zeros(())
    good, bad = torch.zeros(3, 4), torch.zeros(shape)
    adam = {"rate": 0.1, "eps": 1e-8, "weight_decay": 0.0, "maximize": False}
    for m, v in ((good, bad), (bad, good)):
        assert not AdamStep(AdamTensors([w], [m], [v], [step])).suits([g])
    assert not adagrad_step([w], [g], [bad], [step], rate_decay=0.0, **adam)
    assert torch.equal(w, torch.ones(3, 4)) and not step


@pytest.mark.usefixtures("needs_kernels")
def test_gradients_that_do_not_suit_a_step_of_adam_are_left_to_torch() -> None:
    w, g, m, v = (torch.full((3, 4), x) for x in (1.0, 0.5, 0.25, 0.125))
    step = AdamStep(AdamTensors([w], [m], [v], [torch.zeros(())]))
    assert step.suits([g])
    for bad in ([], [g, g], [g.double()], [g[:2]], [g.t().contiguous().t()], [g.to_sparse()]):
        assert not step.suits(bad)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_adam_with_factors_is_that_of_gradients_multiplied_before(
    dtype: torch.dtype,
) -> None:
    draw = torch.Generator().manual_seed(1)
    shapes, factors = [(5,), (7, 9), (3, 2, 4)], [1 / 64, 1.0, 0.3]

    def drawn() -> list[torch.Tensor]:
        return [torch.rand(shape, generator=draw, dtype=dtype) for shape in shapes]

    weights, gradients, means, squares = drawn(), drawn(), drawn(), drawn()
    how: Any = {"rate": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    how |= {"weight_decay": 0.1, "maximize": False}
    found: list[list[torch.Tensor]] = []
    for together in (False, True):
        mine, its, m, v = ([x.clone() for x in y] for y in (weights, gradients, means, squares))
        step = AdamStep(AdamTensors(mine, m, v, [torch.zeros(()) for _ in mine]))
        for _ in range(3):
            if together:
                step.take(its, factors=factors, **how)
            else:
                for g, factor in zip(its, factors, strict=True):
                    assert scaled_([g], factor)
                step.take(its, **how)
        found.append([*mine, *its, *m, *v])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert not torch.equal(found[0][0], weights[0])


@pytest.mark.usefixtures("needs_kernels")
def test_joint_steps_are_found_once_and_anew_where_others_come() -> None:
    def one() -> AdamStep:
        w, m, v = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 4)
        return AdamStep(AdamTensors([w], [m], [v], [torch.zeros(())]))

    a, b, c = one(), one(), one()
    joint = a.and_others([b])
    assert a.and_others([b]) is joint
    assert joint.and_others([c]) is not joint  # it remembers none of what it was made of
    for others in ([c], [b, c], [c, b], [b]):
        found = a.and_others(others)
        wanted = [a.weights[0], *(other.weights[0] for other in others)]
        assert all(x is y for x, y in zip(found.weights, wanted, strict=True))
    assert a.and_others([b]) is not joint  # of the last ones alone
