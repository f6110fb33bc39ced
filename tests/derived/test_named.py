"""Entries of rows that are chosen by their size or named by number, in C: as autograd says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from geartrain.derived.derivation import derive, sample
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.steps.integers import MOST_RANKED
from geartrain.native.fused import Op
from tests.rigs.programs_in_c import ops_of
from tests.rigs.rowwise import Rowwise, assert_as_autograd, in_c

N, M, D = 7, 5, 6

pytestmark = pytest.mark.usefixtures("needs_kernels")


def apart(x: Tensor) -> Tensor:
    """Squared distances of the members of each row."""
    return ((x[:, :, None] - x[:, None]) ** 2).sum(3)


def nearest(x: Tensor) -> Tensor:
    return apart(x).topk(3, 2, largest=False).indices


def by_gather(x: Tensor) -> Tensor:
    """(n, M, 3, D), the neighbours of each member."""
    which = nearest(x).reshape(len(x), M * 3, 1).expand(-1, -1, x.shape[2])
    return x.gather(1, which).view(len(x), M, 3, -1)


def by_rows(x: Tensor) -> Tensor:
    return x[torch.arange(len(x))[:, None, None], nearest(x)]


def by_gather_of_pairs(x: Tensor) -> Tensor:
    which = nearest(x)[..., None].expand(-1, -1, -1, x.shape[2])
    return x[:, None].expand(-1, M, -1, -1).gather(2, which)


IN_ORDER: dict[str, Callable[..., Any]] = {
    "largest": lambda f, x: f(x).topk(3, 1).values,
    "least": lambda f, x: f(x).topk(2, dim=1, largest=False).values,
    "all of them": lambda f, x: f(x).topk(D).values,
    "and which": lambda f, x: f(x).topk(3, 1),
    "which alone": lambda f, x: (f(x), x.topk(2, 1).indices),
    "of few, the others nothing": lambda f, x: f(x) * (x >= x.topk(2, 1).values[:, -1:]),
    "sorted": lambda f, x: f(x).sort(1).values,
    "sorted down": lambda f, x: f(x).sort(dim=1, descending=True).values,
    "sorted as it was": lambda f, x: (f(x), x.trunc().sort(dim=1, stable=True).indices),
    "in another's order": lambda f, x: f(x).gather(1, x.argsort(1)),
    "along an axis before others": lambda f, x: f(x).view(-1, 3, 2).sort(1).values.flatten(1),
    "weighed": lambda f, x: (lambda v, k: v.softmax(1) * f(x).gather(1, k))(*x.topk(3, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", IN_ORDER)
def test_what_comes_first_is_what_autograd_says(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(IN_ORDER[name], D, D).to(dtype)
    assert_as_autograd(module, (torch.randn(N, D, dtype=dtype),))


OF_MEMBERS: dict[str, Callable[..., Any]] = {
    "gathered": lambda f, x: f(by_gather(x)).amax(2).flatten(1),
    "by the numbers of rows": lambda f, x: f(by_rows(x) - x[:, :, None]).amax(2).flatten(1),
    "gathered of pairs": lambda f, x: f(by_gather_of_pairs(x)).mean(2).flatten(1),
    "the loudest": lambda f, x: f(x)[torch.arange(len(x)), x.sum(2).argmax(1)],
    "two of them": lambda f, x: f(x)[
        torch.arange(len(x)).unsqueeze(1), x.sum(2).topk(2, 1).indices
    ].flatten(1),
    "one entry": lambda f, x: (
        f(x[:, 0]) * x[:, 1][torch.arange(0, len(x)), x[:, 2].argmax(1)][:, None]
    ),
    "one for several neighbours": lambda f, x: (
        f(x)
        .view(-1, M, 2, 3)
        .gather(1, x.view(-1, M, 2, 3).argmax(1, True)[..., :1].expand(-1, 1, -1, 3))
    ),
    "repeated in between": lambda f, x: (
        f(x).gather(1, x[:, :, :1].argmax(1, True).expand(-1, 2, D)).flatten(1)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_MEMBERS)
def test_members_are_chosen_and_get_their_gradients(name: str, dtype: torch.dtype) -> None:
    module = Rowwise(OF_MEMBERS[name], D, D).to(dtype)
    assert_as_autograd(module, (torch.randn(N, M, D, dtype=dtype),))


NUMBERS = torch.tensor([0, 4, 2, 2, 1, 3, 0])


def _of_rows(f: Any, x: Tensor, k: Tensor) -> Tensor:
    found: Tensor = f(x)[torch.arange(len(x)), k]
    return found


def test_numbers_below_nothing_count_from_the_end() -> None:
    x = torch.randn(N, M, D)
    assert_as_autograd(Rowwise(_of_rows, D, D), (x, NUMBERS - M), (x, NUMBERS))


@pytest.mark.parametrize("number", [M, -M - 1, 1 << 40])
def test_a_member_that_is_not_there_is_refused(number: int) -> None:
    module, x = Rowwise(_of_rows, D, D), torch.randn(N, M, D)
    program = Program(derive(module, (x, NUMBERS)), Operands(module))
    with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
        program.forward((x, torch.where(NUMBERS == 4, number, NUMBERS)))


OF_INTEGERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gathered": lambda w, k: w.gather(1, k[:, None]),
    "gathered behind others": lambda w, k: w.view(-1, 1, M).gather(2, k.view(-1, 1, 1)),
    "gathered before others": lambda w, k: w.view(-1, M, 1).gather(1, k.view(-1, 1, 1)),
    "by the numbers of rows": lambda w, k: w[torch.arange(len(w)), k],
    "several of them": lambda w, k: w.view(-1, M, 1)[
        torch.arange(len(w))[:, None], torch.stack([k, k - 1], 1)
    ],
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_are_named_too_and_stay_exact(name: str) -> None:
    """As words of a beam are, where those of the better half are taken."""
    module = Rowwise(lambda f, x, w, k: (f(x), OF_INTEGERS[name](w, k)), D, D)
    words = torch.arange(N * M).view(N, M) + (1 << 60) + 1
    given = torch.randn(N, D), words, NUMBERS
    program = Program(derive(module, given), Operands(module))
    pair = derive(module, given).parts.fused
    assert pair is not None
    assert Op.GATHER_INTEGERS in ops_of(pair.forward._steps)
    with torch.no_grad():
        (_, got), _ = program.forward(given)
    assert torch.equal(got, OF_INTEGERS[name](words, NUMBERS))
    with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
        program.forward((*given[:2], NUMBERS + 1))


def test_the_best_of_several_words_is_found_in_c() -> None:
    """Numbers that were reckoned before, of which there are two for each axis."""

    def best(f: Any, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        top, at = f(x).topk(2, 1)
        return top, words.gather(1, at)

    given = torch.randn(N, D), torch.arange(N * D).view(N, D)
    assert_as_autograd(Rowwise(best, D, D), given)


def test_members_that_are_named_twice_get_both_gradients() -> None:
    def function(f: Any, x: Tensor, k: Tensor) -> Tensor:
        return f(x[torch.arange(len(x))[:, None], k]).flatten(1)

    twice = torch.tensor([[0, 3, 0], [1, 1, 1], [4, 4, 0], [2, 0, 1], [0, 0, 3]])
    assert_as_autograd(Rowwise(function, D, D), (torch.randn(5, M, D), twice))


def test_numbers_that_are_repeated_for_neighbours_are_read_once() -> None:
    pair = derive(Rowwise(OF_MEMBERS["gathered"], D, D), (torch.randn(N, M, D),)).parts.fused
    assert pair is not None
    told = {op: ops_of(pair.forward._steps).count(op) for op in (Op.GATHER, Op.RANK_UP, Op.WHOLE)}
    assert told == {Op.GATHER: 1, Op.RANK_UP: 1, Op.WHOLE: 0}
    widths = [s for s in pair.backward._steps._room if s == M * 3 * D]
    assert Op.SCATTER in ops_of(pair.backward._steps), widths


def test_which_and_how_many_are_kept_beside_numbers() -> None:
    """As numbers, not as integers of their own."""
    for name in ("gathered", "the loudest", "two of them"):
        module, x = Rowwise(OF_MEMBERS[name], D, D), torch.randn(N, M, D)
        with torch.no_grad():
            _, kept = Program(derive(module, (x,)), Operands(module)).forward((x,))
        assert [y.dtype for y in kept if y is not x] == [torch.float32]


@pytest.mark.parametrize("down", [False, True])
def test_what_is_no_number_is_the_largest(down: bool) -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[nan, 1, inf, -inf, 0, nan], [2, 2, 1, 1, 2, 1], [nan] * 6, [inf] * 6])
    module = Rowwise(lambda f, x: (f(x), x.sort(dim=1, descending=down, stable=True).indices), D, D)
    program = Program(derive(module, (torch.randn(5, D),)), Operands(module))
    assert program.in_c
    with torch.no_grad():
        found = program.forward((rows,))[0][1]
    assert torch.equal(found, rows.sort(dim=1, descending=down, stable=True).indices)


def test_of_entries_alike_torchs_are_taken_where_it_takes_others() -> None:
    """A trace that finds such leaves the module to torch."""

    def function(f: Any, x: Tensor) -> Tensor:
        return f(x) * (2 * x).trunc().topk(3, 1).indices

    cut = derive(Rowwise(function, 64, 3), (torch.rand(N, 64),))
    assert cut.parts.fused is None
    assert "its steps in C give something else" in cut.parts.unfused


def test_as_many_as_take_long_are_left_to_torch() -> None:
    wide = MOST_RANKED // 64
    for some, within in ((64, True), (65, False)):
        module = Rowwise(lambda f, x, some=some: f(x.topk(some, 1).values), some, 2)
        assert in_c(module, (torch.randn(N, wide),)) is within


NOT_TOLD: dict[str, Callable[..., Any]] = {
    "in any order": lambda f, x: f(x).topk(3, 1, sorted=False).values.sum(1, True),
    "of integers": lambda f, x: f(x) * x.argsort(1).topk(1, 1).values,
    "two axes by number": lambda f, x: (
        f(x) * x.view(-1, 3, 2)[torch.arange(len(x)), [0], [1]][:, None]
    ),
}


@pytest.mark.parametrize("name", NOT_TOLD)
def test_what_has_no_step_is_torchs(name: str) -> None:
    assert not in_c(Rowwise(NOT_TOLD[name], D, D), (torch.randn(N, D),))


def test_a_trace_of_zeros_is_tried_with_other_rows() -> None:
    """A loop is laid out with rows of zeros, of which any are the nearest."""
    module = Rowwise(OF_MEMBERS["by the numbers of rows"], D, D)
    assert in_c(module, (torch.zeros(N, M, D),))
    one, other = sample([torch.zeros(2, 3), torch.tensor([[1.0, 0.0], [0.0, 2.0]])], 5)
    assert one.unique().numel() == 15 and bool((one >= 0).all())
    assert torch.equal(other != 0, torch.tensor([[True, False], [False, True]])[[0, 1, 0, 1, 0]])
