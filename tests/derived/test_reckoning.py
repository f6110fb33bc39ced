"""Integers that are made of integers in C: exact at 64 bits, as torch's."""

from __future__ import annotations

from collections.abc import Callable
from struct import iter_unpack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from tests.rigs.called import WIDTH, Sampling
from tests.rigs.products import halved
from tests.rigs.rowwise import Rowwise, assert_as_autograd, in_c

N, D = 7, 6
KINDS = torch.tensor([0, 1, 2, 3, 2, 1, 0])
OTHERS = torch.tensor([3, 3, 0, 1, 2, 0, 2])
LARGE = 1 << 62
"""Neither it nor its neighbours are told apart by any number of the programs."""
HUGE = torch.tensor([LARGE, LARGE + 1, -LARGE - 3, 2 * LARGE - 1, -2 * LARGE, -1, (1 << 53) + 1])

pytestmark = pytest.mark.usefixtures("needs_kernels")

Function = Callable[..., Any]

OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda k, m: k + m,
    "taken off": lambda k, m: k - m,
    "multiplied": lambda k, m: k * m,
    "a number more": lambda k, m: 3 + k,
    "a number less": lambda k, m: k - 3,
    "from a number": lambda k, m: 5 - k,
    "times a number": lambda k, m: k * -7,
    "negative": lambda k, m: -k,
    "divided downwards": lambda k, m: k // 3,
    "divided downwards by name": lambda k, m: torch.div(k, 3, rounding_mode="floor"),
    "what is left": lambda k, m: k % 5,
    "what is left of much": lambda k, m: k % (LARGE - 1),
    "the lesser": lambda k, m: torch.minimum(k, m),
    "the greater": lambda k, m: torch.maximum(k, m),
    "at least": lambda k, m: k.clamp(min=1),
    "at most": lambda k, m: k.clamp(max=2),
    "within": lambda k, m: k.clamp(1, LARGE),
    "bits of both": lambda k, m: k & m,
    "bits of either": lambda k, m: k | m,
    "bits of one": lambda k, m: k ^ m,
    "some bits": lambda k, m: (k & 6) | 1,
    "other bits": lambda k, m: ~k ^ 9,
    "one of two": lambda k, m: torch.where(m > 1, k, m),
    "one or a number": lambda k, m: torch.where(m > 1, k, LARGE + 1),
    "a number or one": lambda k, m: torch.where(m > 1, LARGE + 1, k),
    "one of two numbers": lambda k, m: torch.where(m > k, LARGE + 1, 4),
    "filled": lambda k, m: k.masked_fill(m > 1, -LARGE - 1),
    "beside a truth": lambda k, m: k + (m > 1),
    "times a truth": lambda k, m: k * (m > 1),
    "a truth": lambda k, m: (m > 1).long(),
    "as it is": lambda k, m: k.clone(),
    "of several": lambda k, m: ((k + 7919 * m) % 1000 - m) // 3,
}


BY_EACH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "what is left": lambda k, m: k[:, None] % torch.tensor([1, 2, 4, LARGE - 1]),
    "divided": lambda k, m: torch.stack([k, m], 1) // torch.tensor([7, 3]),
}


@pytest.mark.parametrize("name", BY_EACH)
def test_several_numbers_divide(name: str) -> None:
    """As the periods of a clock do."""
    module = Rowwise(lambda f, x, k, m: (f(x), BY_EACH[name](k, m)), D, D)
    for k, m in ((KINDS, OTHERS), (HUGE, OTHERS), (-KINDS, HUGE)):
        assert_as_autograd(module, (torch.randn(N, D), k, m), (torch.randn(N, D), KINDS, OTHERS))


@halved(name=[*OF_TWO], dtype=[torch.float32, torch.float64])
def test_what_is_reckoned_is_exact(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(lambda f, x, k, m: (f(x), OF_TWO[name](k, m)), D, D).to(dtype)
    x = torch.randn(N, D, dtype=dtype)
    for k, m in ((KINDS, OTHERS), (HUGE, OTHERS), (OTHERS, HUGE), (HUGE, HUGE.roll(2))):
        assert_as_autograd(module, (x, k, m), (x, KINDS, OTHERS))


@pytest.mark.parametrize("name", OF_TWO)
def test_several_are_reckoned_in_each_row(name: str) -> None:
    """One of them for all of a row as well."""
    module = Rowwise(lambda f, x, k, m: (f(x), OF_TWO[name](k, m)), D, D)
    many, x = HUGE.repeat(3).view(N, 3), torch.randn(N, D)
    assert_as_autograd(module, (x, many, OTHERS.repeat(3).view(N, 3)))
    assert_as_autograd(module, (x, many, OTHERS.unsqueeze(1)))
    assert_as_autograd(module, (x, OTHERS.unsqueeze(1), many))


CONSTANTS: dict[str, Function] = {
    "full_like": lambda f, x, k: (f(x), torch.full_like(k, LARGE + 1)),
    "zeros_like": lambda f, x, k: (f(x), torch.zeros_like(k)),
    "ones_like": lambda f, x, k: (f(x), torch.ones_like(k)),
    "new_zeros": lambda f, x, k: (f(x), x.new_zeros((len(x), 2), dtype=torch.int64)),
    "new_ones": lambda f, x, k: (f(x), k.new_ones((len(x),))),
    "new_full": lambda f, x, k: (f(x), k.new_full((len(x),), LARGE + 1)),
    "full": lambda f, x, k: (f(x), torch.full((len(x),), 3)),
    "zeros": lambda f, x, k: (f(x), torch.zeros(len(x), dtype=torch.int64)),
    "ones": lambda f, x, k: (f(x), torch.ones((len(x), 2), dtype=torch.int64)),
    "beside others": lambda f, x, k: (f(x), torch.full_like(k, 3) + k),
    "of numbers": lambda f, x, k: torch.cat(
        [f(x), torch.ones_like(x), x.new_full((len(x), 1), 2)], 1
    ),
    "as numbers": lambda f, x, k: f(x) * torch.full((len(x), 1), 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONSTANTS)
def test_integers_are_the_same_in_all_rows(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(CONSTANTS[name], D, D).to(dtype)
    assert_as_autograd(module, (torch.randn(N, D, dtype=dtype), KINDS))


class Reading(nn.Module):
    """Looks a row up by a number that it makes; a weight meets it beside the state."""

    def __init__(self, made: Function, width: int = D) -> None:
        super().__init__()
        self.made, self.words, self.map = made, nn.Embedding(5, D), nn.Linear(D + width, D)

    def forward(self, x: Tensor, k: Tensor, m: Tensor) -> Any:
        word = self.made(x, k, m)
        return torch.tanh(self.map(torch.cat([x, self.words(word).flatten(1)], 1))), word


MADE: dict[str, Function] = {
    "the teacher's or one's own": lambda x, k, m: torch.where(m > 1, k, x[:, :4].argmax(1)),
    "the most": lambda x, k, m: x[:, :4].argmax(1),
    "a sum": lambda x, k, m: (k + m) % 4,
    "a count": lambda x, k, m: (x.cumsum(1) < 0.5).sum(1).clamp(max=4),
    "always the same": lambda x, k, m: torch.full_like(k, 3),
    "one of several": lambda x, k, m: torch.stack([m, k], 1)[:, 1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MADE)
def test_rows_of_tables_are_looked_up_by_integers_that_are_made(
    name: str, dtype: torch.dtype
) -> None:
    """By few rows and, of a table that has met the weight, by many."""
    module = Reading(MADE[name]).to(dtype)
    x = torch.randn(N, D, dtype=dtype)
    pair = derive(module, (x, KINDS, OTHERS)).parts.fused
    assert pair is not None and pair.folded is not None
    assert_as_autograd(module, (x, KINDS, OTHERS))
    many = tuple(
        y.repeat(*[9] * (y.ndim == 1), *[9, 1] * (y.ndim == 2)) for y in (x, KINDS, OTHERS)
    )
    assert_as_autograd(module, many, (x, KINDS, OTHERS))


def test_the_module_of_a_loop_of_words_is_in_c() -> None:
    """Which ``tests/graph/test_native_calls.py`` runs whole."""
    module = Sampling().double()
    x = torch.randn(N, WIDTH, dtype=torch.float64)
    assert_as_autograd(module, (x, KINDS, x[:, 0] > 0, OTHERS))


def test_several_rows_of_a_table_are_looked_up_by_integers_that_are_made() -> None:
    module = Reading(lambda x, k, m: torch.stack([(k + m) % 5, m], 1), 2 * D)
    assert_as_autograd(module, (torch.randn(N, D), KINDS, OTHERS))


@pytest.mark.parametrize("number", [5, -1, 1 << 53])
def test_a_row_that_a_table_lacks_is_refused(number: int) -> None:
    module = Reading(lambda x, k, m: k + m)
    x, zero = torch.randn(N, D), torch.zeros(N, dtype=torch.int64)
    program = Program(derive(module, (x, KINDS, zero)), Operands(module))
    wrong = zero.clone()
    wrong[2] = number - int(KINDS[2])
    with torch.no_grad(), pytest.raises(IndexError):
        program.forward((x, KINDS, wrong))


USED: dict[str, Function] = {
    "as places": lambda f, x, k, m: f(x).gather(1, ((k + m) % D).unsqueeze(1)),
    "one hot": lambda f, x, k, m: f(x) * functional.one_hot((k * m) % D, D),
    "as numbers": lambda f, x, k, m: f(x) * ((k + 7919 * m) % 1000).to(x.dtype).unsqueeze(1) / 1000,
    "compared": lambda f, x, k, m: torch.where((k + m > k * m).unsqueeze(1), f(x), x),
    "compared with a count": lambda f, x, k, m: f(x) * (f(x).argmax(1) != k + m).unsqueeze(1),
    "any but nothing": lambda f, x, k, m: f(x) * (k - m).bool().unsqueeze(1),
    "any of a count": lambda f, x, k, m: f(x) * f(x).argmax(1).bool().unsqueeze(1),
    "one of two truths": lambda f, x, k, m: f(x) * ((k > 1) ^ (m > 1)).unsqueeze(1),
    "chosen by numbers": lambda f, x, k, m: (f(x), torch.where(x[:, 0] > 0, k, m)),
    "side by side": lambda f, x, k, m: (f(x), torch.stack([k, m, k + m, x.argmax(1)], 1)),
    "apart again": lambda f, x, k, m: (f(x), torch.cat([k[:, None], m[:, None]], 1)[:, 1:]),
    "for all of a row": lambda f, x, k, m: (f(x), (k + m).unsqueeze(1).expand(-1, 3)),
    "for all of a row, and more": lambda f, x, k, m: (f(x), m.unsqueeze(1).expand(-1, 3) + 1),
    "behind the point": lambda f, x, k, m: (f(x) * 3 + k.unsqueeze(1)).frac(),
    "that go round": lambda f, x, k, m: (f(x), k, m + 1, k),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", USED)
def test_what_is_reckoned_meets_others(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(USED[name], D, D).to(dtype)
    assert_as_autograd(module, (torch.randn(N, D, dtype=dtype), KINDS, OTHERS))


def test_integers_lie_where_they_may_beside_odd_rows_of_numbers() -> None:
    """Of two floats each, behind slots of one float, of an odd number of rows."""

    def function(f: Any, x: Tensor, k: Tensor, m: Tensor) -> Any:
        y = torch.tanh(f(x).sum(1, keepdim=True))
        which = torch.where((y * x.sum(1, keepdim=True)).squeeze(1) > 0, k, m) + 1
        return y * which.unsqueeze(1), which * 3

    module, given = Rowwise(function, D, D), (torch.randn(N, D), KINDS, OTHERS)
    assert_as_autograd(module, given)
    pair = derive(module, given).parts.fused
    assert pair is not None
    steps = pair.forward.form.steps
    assert any(wide % 2 for (wide,) in iter_unpack("q", steps._room))


LEFT_TO_TORCH: dict[str, Function] = {
    "divided by others": lambda f, x, k, m: (f(x), k // (m + 1)),
    "what is left by others": lambda f, x, k, m: (f(x), k % (m + 1)),
    "divided by less than nothing": lambda f, x, k, m: (f(x), k // -1),
    "what is left by less than nothing": lambda f, x, k, m: (f(x), k % -3),
    "divided by each, one less than nothing": lambda f, x, k, m: (
        f(x),
        k[:, None] // torch.tensor([2, -2]),
    ),
    "what is left of each": lambda f, x, k, m: (f(x), torch.tensor([5, 7]) % (k[:, None] + 1)),
    "divided towards nothing": lambda f, x, k, m: (f(x), torch.div(k, 2, rounding_mode="trunc")),
    "added up": lambda f, x, k, m: (f(x), torch.stack([k, m], 1).sum(1)),
    "added up so far": lambda f, x, k, m: (f(x), torch.stack([k, m], 1).cumsum(1)),
    "both of two": lambda f, x, k, m: f(x) * k.logical_and(m).unsqueeze(1),
    "the most of several": lambda f, x, k, m: (f(x), torch.stack([k, m], 1).max(1).values),
    "which is the most": lambda f, x, k, m: (f(x), torch.stack([k, m], 1).argmax(1)),
    "the least of several": lambda f, x, k, m: (f(x), torch.stack([k, m], 1).amin(1)),
    "of fewer bits": lambda f, x, k, m: (f(x), k.int()),
    "times a number": lambda f, x, k, m: (f(x), torch.add(k, m, alpha=2)),
    "turned": lambda f, x, k, m: (f(x), torch.stack([k, m] * 2, 1).view(-1, 2, 2).mT + 1),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_other_integers_are_left_to_torch(name: str) -> None:
    module = Rowwise(LEFT_TO_TORCH[name], D, D)
    assert not in_c(module, (torch.randn(N, D), KINDS, OTHERS))


TRUTHS: dict[str, Function] = {
    "given": lambda f, x, t: f(x) * t.to(x.dtype),
    "one of two": lambda f, x, t: torch.where(t, f(x), x),
    "filled": lambda f, x, t: f(x).masked_fill(~t, 0.5),
    "made": lambda f, x, t: (f(x), f(x) > x),
    "made of one that is given": lambda f, x, t: (f(x), ~t, t, t & (x > 0)),
    "made and read": lambda f, x, t: (lambda mask: (f(x) * mask, mask))(f(x) > x),
    "of integers": lambda f, x, t: (f(x), t.long() * 3 == 3, t.sum(1)),
    "as integers": lambda f, x, t: (f(x), t.long()),
    "a part": lambda f, x, t: (torch.where(t[:, 1:2], f(x), x), t[:, 1:3]),
    "any": lambda f, x, t: (f(x) * t.any(1, keepdim=True), (x > 1).any(1)),
    "all": lambda f, x, t: (f(x) * (x > -1).all(1, keepdim=True), t.all(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRUTHS)
def test_truths_are_given_and_made(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(TRUTHS[name], D, D).to(dtype)
    mask = torch.arange(N * D).view(N, D) % 3 > 0
    mask[3], mask[4] = True, False
    assert_as_autograd(module, (torch.randn(N, D, dtype=dtype), mask))
