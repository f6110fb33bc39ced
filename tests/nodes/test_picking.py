"""Functions that pick some of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.nodes.call import Call
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.loop.kernels import LoopKernels
from geartrain.nodes.loop.picking import known_picks, may_pick, picked


def test_a_function_that_picks_gives_its_arguments_and_their_gradients_back():
    inputs = tuple(torch.randn(4, k).double().requires_grad_() for k in (2, 3, 1))
    for function in (
        lambda h, x, scores: (h, x),
        lambda h, x, scores: scores,
        lambda h, x, scores: (x, h, x),
    ):
        found = picked(function, inputs)
        assert found is not None
        outputs, kernel = found
        want = function(*inputs)
        want = (want,) if isinstance(want, torch.Tensor) else want
        assert all(y is z for y, z in zip(outputs, want, strict=True))
        gradients = tuple(torch.randn_like(y) for y in outputs)
        total = sum((y * g).sum() for y, g in zip(want, gradients, strict=True))
        expected = torch.autograd.grad(total, inputs, allow_unused=True)
        got = kernel.backward(gradients, (), None, GradientSum(()))
        for mine, theirs in zip(got, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_gradient_that_did_not_come_stays_away():
    inputs = torch.randn(2, 1), torch.randn(2, 1)
    found = picked(lambda a, b: (a, b, a), inputs)
    assert found is not None
    one = torch.ones(2, 1)
    first, second = found[1].backward((None, None, one), (), None, GradientSum(()))
    assert first is one and second is None


def test_what_computes_or_is_a_module_is_left_to_kernels():
    inputs = torch.randn(2, 3), torch.randn(2, 3)
    assert picked(lambda a, b: a + b, inputs) is None
    assert picked(lambda a, b: (a, b * 1), inputs) is None
    assert picked(lambda a, b: a.detach(), inputs) is None
    assert not may_pick(nn.Dropout(), True)
    assert not may_pick(lambda a: a, False)
    assert may_pick(lambda a: a, True)


def test_what_a_function_picks_is_known_without_rows():
    assert known_picks(nn.Identity()) == (0,)
    assert known_picks(lambda h, x, scores: (h, x)) == (0, 1)
    assert known_picks(lambda h, x, scores: scores) == (2,)
    assert known_picks(lambda a, b: (b, a, b)) == (1, 0, 1)
    assert known_picks(lambda a, b: (b, a), take=(4, 2)) == (2, 4)
    assert known_picks(nn.Identity(), take=(3,)) == (3,)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda *state: state, (3, 0, 5)),
        (lambda *state: state[:2], (3, 0)),
        (lambda *state: state[-1], (5,)),
        (lambda *state: (state[2], state[0]), (5, 3)),
        (lambda *state: (*state[1:], state[0]), (0, 5, 3)),
        (lambda *state: state[:1] + state[2:], (3, 5)),
        (lambda first, *rest: (first, *rest), (3, 0, 5)),
        (lambda first, *rest: rest, (0, 5)),
        (lambda *state: state[3], None),
        (lambda *state: (state,), None),
        (lambda *state: state[0][0], None),
        (lambda *state: state[0] + state[1], None),
        (lambda a, b, c, d, *rest: (a, d), None),
        (lambda *state, **more: state, None),
    ],
)
def test_functions_of_any_number_of_arguments_are_known_where_it_is_said_what_they_take(
    function: Callable[..., Any], found: tuple[int, ...] | None
) -> None:
    assert known_picks(function, take=(3, 0, 5)) == found


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda *state: state[3], (3,)),
        (lambda *state: (state[2], state[0]), (2, 0)),
        (lambda a, b, c, d, *rest: (a, d), (0, 3)),
        (lambda first, *rest: rest[1], (2,)),
        (lambda *state: state, None),
        (lambda *state: state[:2], None),
        (lambda *state: state[-1], None),
        (lambda *state: (state[0], state[-1]), None),
        (lambda *state: state[-1:][0], None),
        (lambda *state: (*state[1:], state[0]), None),
        (lambda *state: state[:1] + state[2:], None),
        (lambda *state: state[:2] + state[:1], None),
        (lambda first, *rest: rest, None),
        (lambda first, *rest: (first, *rest), None),
        (lambda *state: (state,), None),
        (lambda *state: state[0][0], None),
        (lambda *state: state[0] + state[1], None),
        (lambda *state, **more: state[0], None),
    ],
)
def test_functions_that_pick_the_same_of_any_number_of_arguments_are_known(
    function: Callable[..., Any], found: tuple[int, ...] | None
) -> None:
    assert known_picks(function) == found


def test_what_may_do_more_is_not_called_to_find_out():
    called = []

    def tells(a, b):
        called.append(1)
        return a

    outer = torch.ones(1)
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda *args: None)
    for function in (
        *(tells, hooked, nn.Dropout(), torch.relu),
        lambda a, b: a + b,
        lambda a, b: (a, outer),
        lambda a, b: (a, None),
        lambda a, b: (a, (b,)),
        lambda a, b=None: a,
        lambda *rows: rows,
        lambda a, *, b: a,
        lambda: (),
    ):
        assert known_picks(function) is None, function
    assert not called


def test_what_does_more_than_to_pick_is_found_out_once_and_draws_nothing_for_it() -> None:
    called: list[int] = []

    def noisy(x: Tensor) -> Tensor:
        called.append(0)
        return x + torch.rand_like(x)

    def swapped(x: Tensor) -> Tensor:
        called.append(1)
        return x

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    inner: Any = [
        SimpleNamespace(
            name="each",
            call=Call(f),
            kernel=None,
            choice=None,
            reads=None,
            twin=None,
            weights=None,
        )
        for f in (noisy, swapped, Alone())
    ]
    first, x = LoopKernels(inner), torch.zeros(3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = [first.pick(k, (x,)) for k in range(3)]
    assert torch.equal(before, torch.get_rng_state())
    assert [each is None for each in found] == [True, False, True]
    assert called == [0, 1]
    later = LoopKernels(inner)
    later.take_over(first)
    assert later.pick(0, (x,)) is None and later.pick(1, (x,)) is not None
    assert called == [0, 1, 1]
