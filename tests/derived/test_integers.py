"""Integers of rows in C: exact where they are compared, numbers where they meet numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.native import library
from geartrain.native.fused import Steps
from tests.rigs.rowwise import Rowwise, assert_as_autograd, both, in_c

N, D, MANY = 7, 6, 900
LARGE = 1 << 53


pytestmark = pytest.mark.usefixtures("needs_kernels")


def truth(mask: Tensor, x: Tensor) -> Tensor:
    return mask.to(x.dtype).unsqueeze(1) * x


OF_KINDS: dict[str, Callable[..., Any]] = {
    "a number of its own": lambda f, x, k: f(x) * k.unsqueeze(1).to(x.dtype),
    "as it is": lambda f, x, k: f(x) * k.unsqueeze(1) + k.view(-1, 1),
    "divided": lambda f, x, k: f(x) + (k / 2).to(x.dtype).unsqueeze(1),
    "one of two": lambda f, x, k: torch.where((k == 1).unsqueeze(1), f(x), x),
    "a number instead": lambda f, x, k: torch.where((k != 1).unsqueeze(1), f(x), 0.5),
    "filled": lambda f, x, k: f(x).masked_fill((k > 1).unsqueeze(1), 0.0),
    "both": lambda f, x, k: truth((k > 0) & (k <= 2), f(x)),
    "either": lambda f, x, k: truth((k < 1) | (k >= 2), f(x)),
    "not": lambda f, x, k: truth(~(k == 1), f(x)) + truth((k < 1).logical_not(), x),
    "even": lambda f, x, k: truth(k % 2 == 0, f(x)),
    "what is left": lambda f, x, k: f(x) * (k % 3).unsqueeze(1).to(x.dtype),
    "any but nothing": lambda f, x, k: truth(k.bool(), f(x)),
    "beside numbers": lambda f, x, k: torch.cat([f(x), k.unsqueeze(1).to(x.dtype)], 1),
    "one of several": lambda f, x, k: f(x) * functional.one_hot(k, D),
    "against numbers": lambda f, x, k: torch.where(k.unsqueeze(1) > x, f(x), x),
}
KINDS = torch.tensor([0, 1, 2, 3, 2, 1, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_KINDS)
def test_steps_of_integers_are_what_autograd_says(name: str, dtype: torch.dtype) -> None:
    if name == "divided" and dtype is torch.float64:
        pytest.skip("torch divides integers as float32, which such a program has not")
    module = Rowwise(OF_KINDS[name], D, D).to(dtype)
    assert_as_autograd(module, (torch.randn(N, D, dtype=dtype), KINDS))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [1, 3])
def test_many_rows_with_integers_are_taken_in_pieces(
    odd: int, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers of every row lie beside odd numbers of entries, each where its piece begins."""
    monkeypatch.setattr(library, "MUCH_WORK", MANY)
    monkeypatch.setattr(library, "threads_for", lambda work: threads)

    def of_chosen(x: Tensor) -> Tensor:
        k = x.argmax(1)
        first = (x[:, :odd] > 0) & (k.unsqueeze(1) == 1)
        chosen = (k * k - k).clamp(max=3)
        there = torch.where(first, x[:, 1 : odd + 1], x[:, :odd].sin()).exp()
        wide = (x.unsqueeze(2) * torch.linspace(-1, 1, 65, dtype=dtype)).tanh().sum(2)
        return x * (chosen.unsqueeze(1) + there.sum(1, keepdim=True)) + wide

    x = torch.randn(MANY, D, dtype=dtype)
    found, wanted = both(of_chosen, (x,), (x[:N],))
    torch.testing.assert_close(found, wanted)


def test_room_that_is_lent_has_place_for_slots_that_begin_evenly() -> None:
    """Of five rows of one and of three entries: room for six and for sixteen."""
    room, _ = Steps([], [1, 2, 3, 0], torch.float32).extent(5)
    assert room >= 6 + 10 + 16


@pytest.mark.parametrize("name", ["lt", "le", "eq", "ne", "ge", "gt"])
@pytest.mark.parametrize("of_two", [False, True])
def test_integers_are_compared_as_such(name: str, of_two: bool) -> None:
    """No number of 53 bits tells those apart."""
    kinds = torch.tensor([LARGE, LARGE + 1, LARGE + 2, -LARGE - 1, 0])
    compare = getattr(torch, name)

    def function(f: Any, x: Tensor, k: Tensor, other: Tensor) -> Tensor:
        return truth(compare(k, other if of_two else LARGE + 1), f(x))

    others = torch.full((5,), LARGE + 1)
    module = Rowwise(function, D, D)
    assert_as_autograd(module, (torch.randn(5, D), kinds, others))


def test_one_integer_is_compared_with_all_of_a_row() -> None:
    def function(f: Any, x: Tensor, k: Tensor, others: Tensor) -> Tensor:
        return f(x) * (k.unsqueeze(1) == others) + x * (others[:, 1:2] < others)

    module = Rowwise(function, D, D)
    others = torch.randint(LARGE, LARGE + 3, (N, D))
    assert_as_autograd(module, (torch.randn(N, D), torch.full((N,), LARGE + 1), others))


OF_SEVERAL: dict[str, Callable[..., Any]] = {
    "one of them": lambda f, x, k: truth(k[:, 1] == 2, f(x)),
    "the last of them": lambda f, x, k: f(x) * k[:, -1:],
    "some of them": lambda f, x, k: f(x).view(-1, 2, 3) * k[:, 1:3].unsqueeze(2),
    "parts": lambda f, x, k: f(x).view(-1, 3, 2) * (k.split((1, 3), 1)[1] > k[:, :1]).unsqueeze(2),
    "in another shape": lambda f, x, k: f(x)[:, :4].reshape(-1, 2, 2) * (k.view(-1, 2, 2) % 2),
}


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_a_row_has_several_integers(name: str) -> None:
    kinds = torch.randint(-3, 4, (N, 4))
    assert_as_autograd(Rowwise(OF_SEVERAL[name], D, D), (torch.randn(N, D), kinds))


@pytest.mark.parametrize("name", ["even", "what is left", "any but nothing", "as it is"])
def test_integers_may_be_negative(name: str) -> None:
    x = torch.randn(N, D)
    assert_as_autograd(Rowwise(OF_KINDS[name], D, D), (x, KINDS - 4), (x, KINDS))


BY_NUMBER: dict[str, Callable[..., Any]] = {
    "one": lambda f, x, k: f(x).gather(1, k.unsqueeze(1)),
    "by take_along_dim": lambda f, x, k: torch.take_along_dim(f(x), k.unsqueeze(1), 1),
    "an axis before others": lambda f, x, k: (
        f(x).view(-1, 3, 2).gather(1, (k % 3).view(-1, 1, 1).expand(-1, 1, 2)).flatten(1)
    ),
    "the last axis": lambda f, x, k: (
        f(x).view(-1, 3, 2).gather(2, x.view(-1, 3, 2).argmax(2, True))
    ),
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_entries_are_taken_by_number(name: str) -> None:
    assert_as_autograd(Rowwise(BY_NUMBER[name], D, D), (torch.randn(N, D), KINDS))


def test_entries_that_are_taken_twice_get_both_gradients() -> None:
    module = Rowwise(lambda f, x, k: f(x).gather(1, k), D, D)
    twice = torch.tensor([[0, 3, 0], [1, 1, 1], [5, 4, 5], [2, 0, 1], [0, 0, 5]])
    assert_as_autograd(module, (torch.randn(5, D), twice))


@pytest.mark.parametrize("number", [D, -1, 1 << 40, -(1 << 62)])
def test_an_entry_that_is_not_there_is_refused(number: int) -> None:
    _assert_refused(Rowwise(lambda f, x, k: f(x).gather(1, k.unsqueeze(1)), D, D), number)


@pytest.mark.parametrize("number", [D, -1, 1 << 40])
def test_a_class_that_is_not_there_is_refused(number: int) -> None:
    _assert_refused(Rowwise(OF_KINDS["one of several"], D, D), number)


def _assert_refused(module: Rowwise, number: int) -> None:
    x = torch.randn(N, D)
    program = Program(derive(module, (x, KINDS)), Operands(module))
    wrong = KINDS.clone()
    wrong[2] = number
    with torch.no_grad(), pytest.raises(IndexError):
        program.forward((x, wrong))


NAMED: dict[str, Callable[..., Any]] = {
    "which, beside others": lambda f, x, k: (f(x), f(x).argmax(1)),
    "which, kept": lambda f, x, k: (f(x).argmin(1, keepdim=True), f(x)),
    "of what there is the most": lambda f, x, k: tuple(f(x).view(-1, 3, 2).max(1)),
    "what is left": lambda f, x, k: (k % 3, f(x), k),
    "what is chosen, straight through": lambda f, x, k: (
        functional.one_hot(f(x).argmax(1), D).to(x.dtype) - f(x).detach() + f(x)
    ),
    "several": lambda f, x, k: (
        functional.one_hot(x.view(-1, 3, 2).argmax(2), 2).to(x.dtype).flatten(1) * f(x)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMED)
def test_integers_are_made_beside_numbers(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(NAMED[name], D, D).to(dtype)
    assert_as_autograd(module, (torch.randn(N, D, dtype=dtype), KINDS))


MOST: dict[str, Callable[..., Any]] = {
    "amax": lambda f, x: f(x.amax(1)),
    "amin": lambda f, x: f(x.amin(1)),
    "amax of two axes": lambda f, x: f(x[:, 0]) * x.amax((1, 2)).unsqueeze(1),
    "amin, kept": lambda f, x: f((x - x.amin(2, keepdim=True)).sum(1)),
    "max": lambda f, x: f(x.max(1).values),
    "min": lambda f, x: f(x.min(1).values),
    "max, kept, of the last": lambda f, x: f((x - x.max(-1, keepdim=True).values).sum(1)),
    "which": lambda f, x: f(x.sum(1)) * x.sum(1).argmax(1).unsqueeze(1),
    "which is least": lambda f, x: truth(x.sum(1).argmin(1) == 2, f(x.sum(1))),
    "both": lambda f, x: f(x.max(1).values) * (x.max(1).indices == 1),
}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("name", MOST)
def test_the_most_of_an_axis(name: str, equal: bool) -> None:
    """amax shares a gradient among equals, max gives it to the first."""
    x = torch.randn(N, 3, D)
    rows = torch.randint(0, 2, x.shape).to(x.dtype) if equal else x
    assert_as_autograd(Rowwise(MOST[name], D, D), (rows,), (x,))


def test_integers_along_a_later_axis_are_left_to_torch() -> None:
    module = Rowwise(lambda f, x, k: truth(k[:, :, 0].sum(1) * 0 == 0, f(x)), D, D)
    lone = Rowwise(lambda f, x, k: f(x).view(-1, 2, 3) * (k[:, :, :1] > 0), D, D)
    kinds = torch.randint(0, 2, (N, 2, 2))
    assert not in_c(module, (torch.randn(N, D), kinds))
    assert not in_c(lone, (torch.randn(N, D), kinds))
