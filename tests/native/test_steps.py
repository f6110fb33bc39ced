"""What is done to gradients before a step, in one call for all of them."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
import torch

from geartrain.native.steps import AdagradStep, AdamStep, AdamTensors, norm_of, scaled_


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
    assert not AdamStep(AdamTensors([w], [m], [v], [step])).suits([g])
    assert not AdagradStep(([w], [v], [step])).suits([g])
    assert all(torch.equal(x, y) for x, y in zip((w, m, v, step), before, strict=True))


@pytest.mark.parametrize("shape", [(3, 3), (4,), (0, 4), (12,)])
def test_steps_with_state_of_another_shape_are_left_to_torch(shape: tuple[int, ...]) -> None:
    w, g, step = torch.ones(3, 4), torch.ones(3, 4), torch.zeros(())
    good, bad = torch.zeros(3, 4), torch.zeros(shape)
    for m, v in ((good, bad), (bad, good)):
        assert not AdamStep(AdamTensors([w], [m], [v], [step])).suits([g])
    assert not AdagradStep(([w], [bad], [step])).suits([g])
    assert torch.equal(w, torch.ones(3, 4)) and not step


@pytest.mark.usefixtures("needs_kernels")
def test_gradients_that_do_not_suit_a_step_of_adam_are_left_to_torch() -> None:
    w, g, m, v = (torch.full((3, 4), x) for x in (1.0, 0.5, 0.25, 0.125))
    step = AdamStep(AdamTensors([w], [m], [v], [torch.zeros(())]))
    assert step.suits([g])
    for bad in ([], [g, g], [g.double()], [g[:2]], [g.t().contiguous().t()], [g.to_sparse()]):
        assert not step.suits(bad)


ADAGRAD: Final = {
    "rate": 0.1,
    "rate_decay": 0.01,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "maximize": False,
}


def rows_of(
    which: list[int], limit: int, width: int, dtype: torch.dtype, draw: torch.Generator
) -> torch.Tensor:
    """A gradient of rows as they came, each as often as it is named."""
    values = torch.randn(len(which), width, generator=draw, dtype=dtype)
    rows = torch.tensor([which], dtype=torch.int64)
    return torch.sparse_coo_tensor(rows, values, (limit, width), check_invariants=False)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("times", [0, 1, 2, 40])
def test_a_step_of_adagrad_adds_rows_up_in_their_order(dtype: torch.dtype, times: int) -> None:
    """Bit by bit as if they came so, each row once; the gradient stays."""
    draw = torch.Generator().manual_seed(0)
    which = [int(x) for x in torch.randint(0, 1 << 40, (7 * times,), generator=draw) % 13]
    g = rows_of(which, 13, 5, dtype, draw)
    before = g._values().clone()
    once: dict[int, torch.Tensor] = {}
    for row, value in zip(which, before, strict=True):
        once[row] = once[row] + value if row in once else value
    added = rows_of([*once], 13, 5, dtype, draw)
    added._values().copy_(torch.stack([*once.values()]) if once else added._values())
    torch.testing.assert_close(added.to_dense(), g.to_dense())
    start = torch.randn(13, 5, generator=draw, dtype=dtype)
    found = []
    for gradient in (g, added):
        w, sums, step = start.clone(), torch.ones_like(start), torch.zeros(())
        taken = AdagradStep(([w], [sums], [step]))
        for _ in range(2):
            assert taken.suits([gradient])
            taken.take([gradient], **ADAGRAD)
        assert step == 2
        found.append((w, sums))
    (w, sums), (expected, squares) = found
    assert torch.equal(w, expected) and torch.equal(sums, squares)
    assert torch.equal(w != start, (g.to_dense() != 0))
    assert torch.equal(g._values(), before)


@pytest.mark.usefixtures("needs_kernels")
def test_a_step_of_adagrad_takes_rows_and_what_is_dense_as_they_come() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = rows_of([2, 0, 2], 4, 3, torch.float32, draw)
    w, sums, step = torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(())
    taken = AdagradStep(([w], [sums], [step]))
    for gradient in (rows, rows.to_dense(), rows):
        assert taken.suits([gradient])
        taken.take([gradient], **ADAGRAD)
    assert step == 3
    torch.testing.assert_close(sums, 3 * rows.to_dense() ** 2)


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("row", [-1, 4])
def test_a_step_of_adagrad_refuses_rows_that_its_weight_does_not_have(row: int) -> None:
    draw = torch.Generator().manual_seed(0)
    dense, rows = torch.ones(2), rows_of([0, row, 0], 4, 3, torch.float32, draw)
    both = [torch.zeros(2), torch.zeros(4, 3)]
    taken = AdagradStep((both, [torch.zeros_like(x) for x in both], [torch.zeros(())] * 2))
    with pytest.raises(IndexError, match=rf"rows \[0, {row}, 0\].*has 4"):
        taken.take([dense, rows], **ADAGRAD)
    assert not any(x.any() for x in both)


def test_rows_that_do_not_suit_a_step_of_adagrad_are_left_to_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    w = torch.zeros(4, 3)
    step = AdagradStep(([w], [torch.zeros_like(w)], [torch.zeros(())]))
    cells = torch.ones(4, 3).to_sparse()  # by both dimensions
    double = rows_of([1], 4, 3, torch.float64, draw)
    longer = rows_of([1], 5, 3, torch.float32, draw)
    turned = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), torch.ones(3, 2).t(), (4, 3), check_invariants=False
    )
    for bad in (cells, double, longer, turned):
        assert not step.suits([bad])
    assert not step.suits([rows_of([1], 4, 3, torch.float32, draw)] * 2)


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
