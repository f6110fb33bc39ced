"""Weights that are computed of weights: once a firing, and what they learn becomes the weights'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.native.steady import steady
from geartrain.nodes.computed import IDLE
from geartrain.nodes.gradient import GradientSum

WIDTH, N = 4, 7


class LowRank(nn.Module):
    """A weight that is a product, and a scale that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(s)) for s in ((WIDTH, 2), (2, WIDTH)))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, self.a @ self.b)) * self.scale.exp()


class Masked(nn.Module):
    """A weight that is read as it is, too, and a buffer that it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.map.weight * self.mask, self.map.bias)
        return self.map(torch.relu(y))


class Normed(nn.Module):
    """Directions and lengths apart."""

    def __init__(self) -> None:
        super().__init__()
        self.map = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.sigmoid(self.map(x))
        return found


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.both(x, torch.relu(x)))
        return found


class Looked(nn.Module):
    """The nearest of normed keys, and what a table has there."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.table = (nn.Parameter(torch.randn(9, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        near, which = functional.linear(x, functional.normalize(self.keys, dim=-1)).topk(3, -1)
        return (near.softmax(-1).unsqueeze(-1) * self.table[which]).sum(-2)


class Marked(Bilinear):
    """Rows of a unit matrix are looked up beside a weight that is turned: the former is none."""

    def forward(self, x: Tensor) -> Tensor:
        most = functional.one_hot(x[:, :3].argmax(1), 3)
        return super().forward(x) * (1 - most) + most.to(x.dtype)


MODULES: list[type[nn.Module]] = [LowRank, Masked, Normed, Bilinear, Looked, Marked]


pytestmark = pytest.mark.usefixtures("needs_kernels")


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, Program]:
    torch.manual_seed(2)
    module = make().double()
    program = Program(derive(module, [rows()]), Operands(module))
    assert program.cut.computed is not None
    assert program.cut.parts.fused is not None
    return module, program


def rows(n: int = N) -> Tensor:
    return torch.randn((n, WIDTH), generator=torch.Generator().manual_seed(5)).double()


def expected(module: nn.Module, x: Tensor, d: Tensor) -> list[Tensor | None]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(module(x), parameters, d, allow_unused=True)
    by = dict(zip(parameters, found, strict=True))
    return [by.get(p) for p in module.parameters()]


def same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


def taken(into: GradientSum, module: nn.Module) -> list[Tensor | None]:
    found = [into.take(p) for p in module.parameters()]
    return [None if d is None else d.clone() for d in found]


@pytest.mark.parametrize("make", MODULES)
def test_gradients_are_those_of_autograd_step_after_step(make: type[nn.Module]) -> None:
    module, program = made(make)
    into = GradientSum(list(module.parameters()))
    x, d = rows(), torch.ones_like(module(rows()))
    for _ in range(2):
        _, kept = program.forward((x,))
        (answer,) = program.backward((d,), kept, None, into)
        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(module(leaf), leaf, d)
        assert answer is not None
        torch.testing.assert_close(answer, wanted)
        same(taken(into, module), expected(module, x, d))
        assert not any(d is not None for d in taken(into, module))


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("n", [N, 300], ids=("few rows", "many"))
def test_rows_of_several_updates_are_told_apart(make: type[nn.Module], n: int) -> None:
    module, program = made(make)
    assert program.apart
    into = GradientSum(list(module.parameters()))
    x, updates = rows(n), np.arange(n) % 3
    d = torch.ones_like(module(x))
    _, kept = program.forward((x,))
    with into.of_updates(updates):
        program.backward((d,), kept, None, into)
    assert into.ahead
    for update in range(3):
        mine = torch.from_numpy(np.flatnonzero(updates == update))
        same(taken(into, module), expected(module, x[mine], d[mine]))
        into.next_update()
    assert not into.ahead


def test_they_are_settled_in_the_weights_of_then() -> None:
    """Gradients become those of the weights before these change."""
    module, program = made(LowRank)
    into = GradientSum(list(module.parameters()))
    x = rows()
    d = torch.ones_like(module(x))
    wanted = expected(module, x, d)
    _, kept = program.forward((x,))
    program.backward((d,), kept, None, into)
    into.settle()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2.0)
    same(taken(into, module), wanted)


def test_the_weights_are_those_of_now() -> None:
    module, program = made(LowRank)
    x = rows()
    program.forward((x,))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5)
    torch.testing.assert_close(program.forward((x,))[0][0], module(x).detach())


def test_what_is_frozen_learns_nothing() -> None:
    module, program = made(LowRank)
    next(module.parameters()).requires_grad_(False)
    into = GradientSum(list(module.parameters()))
    x = rows()
    d = torch.ones_like(module(x))
    program.backward((d,), program.forward((x,))[1], None, into)
    found = taken(into, module)
    assert found[0] is None
    same(found, expected(module, x, d))


def test_what_is_forgotten_does_not_come_back() -> None:
    module, program = made(LowRank)
    into = GradientSum(list(module.parameters()))
    x = rows()
    program.backward((torch.ones_like(module(x)),), program.forward((x,))[1], None, into)
    into.forget()
    assert not any(d is not None for d in taken(into, module))


def test_a_program_that_learns_no_more_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fit makes one; what it learnt is kept, and the sum of one that goes on is the same."""
    module, old = made(LowRank)
    _, new = made(LowRank)
    new = Program(new.cut, old.own)
    into, x = GradientSum(list(module.parameters())), rows()
    d = torch.ones_like(module(x))
    wanted = expected(module, x, d)
    old.backward((d,), old.forward((x,))[1], None, into)
    asked: list[int] = []
    before = GradientSum.holds

    def holds(self: GradientSum) -> bool:
        asked.append(id(self))
        return bool(before.__get__(self))

    monkeypatch.setattr(GradientSum, "holds", property(holds))
    for step in range(2 * IDLE):
        new.backward((d,), new.forward((x,))[1], None, into)
        into.settle()
        times = 2 if step == 0 else 1
        same(taken(into, module), [None if g is None else times * g for g in wanted])
    ours = max(asked, key=asked.count)
    assert len(set(asked)) == 2
    assert len(asked) - asked.count(ours) == 1 + IDLE
    old.backward((d,), old.forward((x,))[1], None, into)
    same(taken(into, module), wanted)


def test_one_sum_takes_what_another_has() -> None:
    module, program = made(Normed)
    sums = [GradientSum(list(module.parameters())) for _ in range(2)]
    x = rows()
    d = torch.ones_like(module(x))
    for into in sums:
        program.backward((d,), program.forward((x,))[1], None, into)
    sums[0].absorb(sums[1])
    wanted = [None if g is None else 2 * g for g in expected(module, x, d)]
    same(taken(sums[0], module), wanted)


def test_they_are_computed_once_a_firing() -> None:
    _, program = made(Normed)
    found = []
    with torch.no_grad(), steady():
        for _ in range(3):
            found.append(program.operands.tensors()[-1])
            program.forward((rows(),))
    assert found[0] is found[1] is found[2]
    with torch.no_grad(), steady():
        assert program.operands.tensors()[-1] is not found[0]


class Table(nn.Module):
    """Rows of a table that is computed meet a weight, and a bias that is."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.map = nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        rows = functional.embedding(word, functional.normalize(self.words))
        return x[:, :3] + functional.linear(rows, self.map.weight, self.map.bias.exp())


def test_tables_may_be_computed() -> None:
    word = torch.arange(N) % 5
    cut = derive(Table().double(), [rows(), word])  # is tried against autograd
    assert cut.computed is not None
    assert len(cut.computed.likes) == 2
    assert cut.parts.fused is not None


def test_modules_without_stay_as_they_were() -> None:
    cut = derive(nn.Linear(WIDTH, WIDTH).double(), [rows()])
    assert cut.computed is None
    assert cut.parts.fused is not None
