"""Rows of tables meet a weight once a row of the table, in derived programs, there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.derived.derivation import derive
from geartrain.derived.fused import Pair
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program, Programs
from geartrain.native import library, operations
from geartrain.native.steady import steady
from geartrain.native.sums import multiply_sums
from geartrain.nodes.gradient import GradientSum
from geartrain.parts.part import PartState
from tests.rigs.products import in_pairs

N, D, V, KINDS = 40, 5, 7, 3
Tensors = tuple[Tensor, ...]


class Whole(nn.Module):
    """What is looked up meets a weight alone, and is added to other rows after another."""

    def __init__(self, padding: int | None = None, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D, padding_idx=padding, sparse=sparse)
        self.here, self.below = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D)

    def forward(self, h: Tensor, c: Tensor, word: Tensor, kind: Tensor) -> Tensor:
        i, u = (self.below(h) + self.here(self.words(word))).chunk(2, 1)
        return torch.sigmoid(i) * torch.tanh(u) + c


class Beside(nn.Module):
    """Between other columns, before two weights, and read by itself too."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D, padding_idx=padding)
        self.gate, self.new = nn.Linear(3 * D, D), nn.Linear(3 * D, D, bias=False)

    def forward(self, h: Tensor, c: Tensor, word: Tensor, kind: Tensor) -> Tensor:
        x = self.words(word)
        both = torch.cat([h, x, c * h], 1)
        return torch.sigmoid(self.gate(both)) * torch.tanh(self.new(both)) + x * c


class Summed(nn.Module):
    """Two tables whose rows are added up first; one of them is looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(V, D), nn.Embedding(KINDS, D)
        self.inner = nn.Linear(2 * D, D)

    def forward(self, h: Tensor, c: Tensor, word: Tensor, kind: Tensor) -> Tensor:
        x = self.words(word) + self.kinds(kind) + self.words(word)
        return torch.tanh(self.inner(torch.cat([x, h], 1))) * c


class Shared(nn.Module):
    """The weight meets other rows as well, and the table is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.other = nn.Embedding(D, D), nn.Linear(D, D)
        self.other.weight = self.words.weight
        self.both = nn.Linear(D, D)

    def forward(self, h: Tensor, c: Tensor, word: Tensor, kind: Tensor) -> Tensor:
        y = self.both(self.words(word)) + self.both(c)
        return torch.tanh(self.other(h)) * y


_CASES: dict[str, Callable[[], nn.Module]] = {
    "whole": Whole,
    "whole, padding": lambda: Whole(padding=2),
    "whole, sparse": lambda: Whole(padding=1, sparse=True),
    "beside": Beside,
    "beside, padding": lambda: Beside(padding=0),
    "summed": Summed,
    "shared": Shared,
}
each_case = pytest.mark.parametrize("name", _CASES)


def _made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Program, Tensors]:
    torch.manual_seed(0)
    module = _CASES[name]().to(dtype)
    # Zeros of padding would hide what it should not get.
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.rand_like(p))
    h, c = torch.randn(N, D, dtype=dtype), torch.randn(N, D, dtype=dtype)
    inputs = h, c, torch.randint(D, (N,)), torch.randint(KINDS, (N,))
    return module, Program(derive(module, inputs), Operands(module)), inputs


def _pair(program: Program) -> Pair:
    if library.current() is None:
        pytest.skip("no compiler here")
    return program.pair


def _plainly(module: nn.Module, inputs: Tensors, dy: Tensor) -> list[Tensor | None]:
    """Output, then gradients of the first two inputs and of parameters."""
    leaves = [x.clone().requires_grad_() for x in inputs[:2]]
    y = module(*leaves, *inputs[2:])
    wanted = [*leaves, *module.parameters()]
    real = [x for x in wanted if x.requires_grad]
    found = iter(torch.autograd.grad(y, real, dy))
    each = [next(found) if x.requires_grad else None for x in wanted]
    return [y.detach(), *(d.to_dense() if d is not None else None for d in each)]


def _by_calls(
    module: nn.Module, program: Program, inputs: Tensors, dy: Tensor, calls: int, firings: int = 1
) -> list[Tensor | None]:
    """The same by the program, in so many calls there, and back in another order."""
    into = GradientSum(list(module.parameters()))
    for firing in range(firings):
        with torch.no_grad(), steady():
            pieces = [x.chunk(calls) for x in inputs]
            went = [program.forward(tuple(some)) for some in zip(*pieces, strict=True)]
            dys, back = dy.chunk(calls), {}
            for k in reversed(range(calls)):
                if firing == firings - 1:
                    back[k] = program.backward((dys[k],), went[k][1], None, into)
    y = torch.cat([outputs[0] for outputs, _ in went])
    dh, dc = (torch.cat([back[k][i] for k in range(calls)]) for i in (0, 1))  # type: ignore[misc]
    sums = [into.take(p) for p in module.parameters()]
    return [y, dh, dc, *(d if d is None else d.to_dense().clone() for d in sums)]


@in_pairs(name=[*_CASES], calls=[1, 4, 40], dtype=[torch.float64, torch.float32])
def test_gradients_are_those_of_plain_torch(name: str, calls: int, dtype: torch.dtype) -> None:
    module, program, inputs = _made(name, dtype)
    dy = torch.randn(N, D, dtype=dtype)
    found = _by_calls(module, program, inputs, dy, calls, firings=2)
    close = 1e-12 if dtype is torch.float64 else 1e-4
    assert_close(found, _plainly(module, inputs, dy), rtol=close, atol=close)


@each_case
def test_weights_are_those_of_the_firing_where_they_change_in_place(name: str) -> None:
    module, program, inputs = _made(name)
    dy = torch.randn(N, D, dtype=torch.float64)
    for _ in range(3):
        found = _by_calls(module, program, inputs, dy, calls=2)
        assert_close(found, _plainly(module, inputs, dy), rtol=1e-12, atol=1e-12)
        for p in module.parameters():
            p.data.mul_(1.5)  # which torch does not count


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *(("whole, padding", frozen) for frozen in ("words", "here", "below")),
        *(("beside", frozen) for frozen in ("words", "gate", "new")),
    ],
)
def test_what_is_frozen_gets_nothing_and_the_others_theirs(name: str, frozen: str) -> None:
    module, program, inputs = _made(name)
    getattr(module, frozen).requires_grad_(False)
    dy = torch.randn(N, D, dtype=torch.float64)
    found = _by_calls(module, program, inputs, dy, calls=3)
    assert_close(found, _plainly(module, inputs, dy), rtol=1e-12, atol=1e-12)


@each_case
def test_all_that_can_meets_its_weight_by_row_of_the_table(name: str) -> None:
    module, program, _ = _made(name)
    pair = _pair(program)
    assert pair.folded is not None
    met = [t for t in pair.terms if t.how == "looked up" and t.weight >= 0]
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    expected = {"whole": 1, "beside": 2, "summed": 3, "shared": 1}[name.partition(",")[0]]
    assert len(met) == expected and all(t.weighs for t in met) and linear
    assert not any(t.how == "rows" for t in pair.terms)


def test_a_table_meets_its_weight_once_a_firing_from_enough_rows_on() -> None:
    module, program, inputs = _made("whole")
    pair = _pair(program)
    assert V < pair.worth < N // 2
    table, rows = 2 * V * D * 2 * D, 2 * (N // 2) * D * 2 * D
    counted = []
    for _ in range(2):
        with torch.no_grad(), steady():
            for k in range(2):
                some = tuple(x.chunk(2)[k] for x in inputs)
                with operations.Counted() as call:
                    program.forward(some)
                counted.append(call.operations)
    # In each firing once, and for each call the rows that are no table's.
    assert counted == [table + rows, rows] * 2

    few = tuple(x[: pair.worth // 3] for x in inputs)
    with torch.no_grad(), steady(), operations.Counted() as call:  # many came in the one before
        program.forward(few)
    less = 2 * (pair.worth // 3) * D * 2 * D
    assert call.operations == table + less
    with torch.no_grad(), steady(), operations.Counted() as call:  # few did
        program.forward(few)
    assert call.operations == 2 * less
    with torch.no_grad(), operations.Counted() as call:  # weights may change after any call
        program.forward(few)
        program.forward(inputs)
    assert call.operations == 2 * less + table + 2 * rows
    assert isinstance(module, Whole)
    module.words.weight.data.mul_(2)  # which torch does not count
    with torch.no_grad(), steady():
        (y,), _ = program.forward(inputs)
    assert_close(y, module(*inputs).detach(), rtol=1e-12, atol=1e-12)


def test_back_there_are_two_products_of_the_rows_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    module, program, inputs = _made("whole")
    _pair(program)
    asked: list[int] = []

    def watched(ids: Tensor, sums: Tensor, *rest: Any, **wanted: Any) -> None:
        asked.append(len(ids))
        multiply_sums(ids, sums, *rest, **wanted)

    monkeypatch.setattr("geartrain.nodes.looked_up.multiply_sums", watched)
    assert isinstance(module, Whole)
    inputs = (*inputs[:2], inputs[2] % 4, inputs[3])
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        for _ in range(3):
            (y,), kept = program.forward(inputs)
            program.backward((torch.ones_like(y),), kept, None, into)
        assert not asked
        into.take(module.below.bias)
        into.take(module.words.weight)
    assert asked == [4]


def test_rows_of_a_table_are_not_kept_but_looked_up_again() -> None:
    for name, most in (("whole", 2 * D + 2), ("beside", 3 * D + 2 * D)):
        _, program, inputs = _made(name)
        with torch.no_grad():
            (y,), kept = program.forward(inputs)
        own = [x for x in kept if not any(x is other for other in (*inputs, y))]
        assert sum(x[0].numel() for x in own) <= most


@pytest.mark.parametrize("name", ["whole, padding", "beside", "summed"])
def test_each_update_gets_the_gradient_of_its_own_rows(name: str) -> None:
    module, program, inputs = _made(name)
    if not program.apart:
        return  # then nobody asks for it
    dy = torch.randn(N, D, dtype=torch.float64)
    each = np.random.default_rng(0).integers(0, 3, N)
    into = GradientSum(list(module.parameters()))
    with torch.no_grad(), steady():
        for some in np.array_split(np.arange(N), 3):
            _, kept = program.forward(tuple(x[some] for x in inputs))
            with into.of_updates(each[some]):
                program.backward((dy[some],), kept, None, into)
    assert into.ahead
    for update in range(3):
        found = [into.take(p) for p in module.parameters()]
        found = [None if d is None else d.clone() for d in found]
        mine = np.flatnonzero(each == update)
        wanted = _plainly(module, tuple(x[mine] for x in inputs), dy[mine])[3:]
        assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        into.next_update()
    assert not into.ahead


@pytest.mark.parametrize("updates", [False, True])
def test_programs_together_give_what_each_gives(updates: bool) -> None:
    sizes = [30, 10]
    made = [_made("beside, padding"), _made("beside, padding")]
    with torch.no_grad():
        made[1][0].gate.weight.mul_(-1)  # type: ignore[union-attr,operator]
    inputs = made[0][2]
    both = made[0][1].beside([made[1][1]])
    if library.current() is None:
        assert both is None
        return
    assert isinstance(both, Programs)
    dy = torch.randn(N, D, dtype=torch.float64)
    into = [GradientSum(list(module.parameters())) for module, _, _ in made]
    each = np.arange(N) % 2 if updates else np.zeros(N, np.int64)
    with torch.no_grad(), steady():
        for _ in range(2):
            (y,), kept = both.forward(inputs, sizes)
        with into[0].of_updates(each[:30]), into[1].of_updates(each[30:]):
            dh, dc, *_ = both.backward((dy,), kept, sizes, into)
    start = 0
    for (module, _, _), size, own in zip(made, sizes, into, strict=True):
        rows = np.arange(start, start + size)
        wanted = _plainly(module, tuple(x[rows] for x in inputs), dy[rows])[:3]
        assert dh is not None and dc is not None
        assert_close([y[rows], dh[rows], dc[rows]], wanted, rtol=1e-12, atol=1e-12)
        for update in range(each.max() + 1):
            mine = rows[each[rows] == update]
            sums = [own.take(p) for p in module.parameters()]
            theirs = _plainly(module, tuple(x[mine] for x in inputs), dy[mine])[3:]
            assert_close(sums, theirs, rtol=1e-12, atol=1e-12)
            own.next_update()
        start += size


def _gone_back(module: nn.Module, program: Program, inputs: Tensors, dy: Tensor) -> GradientSum:
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        _, kept = program.forward(inputs)
        program.backward((dy,), kept, None, into)
    return into


def test_what_is_settled_is_of_the_weights_before_they_change() -> None:
    module, program, inputs = _made("beside")
    dy = torch.randn(N, D, dtype=torch.float64)
    wanted = _plainly(module, inputs, dy)[3:]
    into = _gone_back(module, program, inputs, dy)
    into.settle()
    into.settle()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(3)
    assert_close([into.take(p) for p in module.parameters()], wanted, rtol=1e-12, atol=1e-12)
    assert all(into.take(p) is None for p in module.parameters())


def test_sums_take_over_what_others_have_looked_up_and_forget_it() -> None:
    module, program, inputs = _made("beside")
    dy = torch.randn(N, D, dtype=torch.float64)
    wanted = _plainly(module, inputs, dy)[3:]
    into = _gone_back(module, program, inputs, dy)
    into.absorb(_gone_back(module, program, inputs, dy))
    found = [into.take(p) for p in module.parameters()]
    assert_close(found, [2 * d for d in wanted if d is not None], rtol=1e-12, atol=1e-12)
    into = _gone_back(module, program, inputs, dy)
    into.forget()
    assert all(into.take(p) is None for p in module.parameters())


class Large(nn.Module):
    """More rows than sums are kept of."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(9000, 2), nn.Linear(2, 2)

    def forward(self, word: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.words(word)))


def _rows_of(update: int, n: int) -> Sequence[int]:
    return np.random.default_rng(update).permutation(9000)[:n].tolist()


def test_of_a_large_table_a_bounded_number_of_sums_waits() -> None:
    torch.manual_seed(0)
    module = Large().double()
    program = Program(derive(module, (torch.arange(4),)), Operands(module))
    into = GradientSum(list(module.parameters()))
    words = torch.tensor([k for update in range(4) for k in _rows_of(update, 3000)])
    with torch.no_grad():
        for some in words.split(3000):
            (y,), kept = program.forward((some,))
            program.backward((torch.ones_like(y),), kept, None, into)
            if library.current() is not None:
                assert all(len(found) <= 4096 for _, found in into._looked_up._known.values())
    wanted = torch.autograd.grad(module(words).sum(), list(module.parameters()))
    found = [into.take(p) for p in module.parameters()]
    assert_close(found, list(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", ["a step from elsewhere", "others' weights"])
def test_a_part_settles_before_its_weights_change(how: str) -> None:
    module, program, inputs = _made("beside")
    part = PartState("p", module, gt.Rules(optimizer=partial(torch.optim.SGD, lr=1.0)))
    dy = torch.randn(N, D, dtype=torch.float64)
    wanted = _plainly(module, inputs, dy)[3:]
    with torch.no_grad():
        _, kept = program.forward(inputs)
        program.backward((dy,), kept, None, part.gradient)
    if how == "a step from elsewhere":
        part.step_with([torch.ones_like(p) for p in part.parameters], own=False)
    else:
        part.overwrite([p.detach() + 1 for p in part.parameters])
    found = [part.gradient.take(p) for p in module.parameters()]
    assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    changed = _plainly(module, inputs, dy)[3:]
    assert not torch.allclose(changed[0], wanted[0])  # type: ignore[arg-type]
