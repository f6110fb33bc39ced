"""Derived programs as two: what some inputs decide, and the rest; and weights by their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.native import library
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.hoisted import Hoisted, hoisted
from geartrain.nodes.kernel import AbstractKernel
from tests.rigs.sharing_rows import Beside, Born, Cut, Same, Send

WIDTH, N = 4, 6


class Ends(nn.Module):
    """Two ends of an edge and what is known of it, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor, e: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner(torch.cat([a, e, b], 1))))


class Deep(nn.Module):
    """Several steps follow from the first input, then something is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, a: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.norm(torch.relu(self.map(a))))
        left, right = x.chunk(2, 1)
        return left * right * e, a


class Turned(nn.Module):
    """Products in which an early value meets a late one, and none with a weight."""

    def forward(self, a: Tensor, e: Tensor) -> Tensor:
        return (a.unsqueeze(1) @ e.unsqueeze(2)).flatten(1)


def rows(*shapes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn((N, k), generator=generator, dtype=torch.float64) for k in shapes]


def ids() -> Tensor:
    return torch.tensor([0, 2, 1, 1, 0, 2])


CASES: dict[str, tuple[Callable[[], nn.Module], list[Tensor], Sequence[int], tuple[int, ...]]] = {
    "a product and a table": (Send, [*rows(4, 4), ids()], (0,), (1, 2)),
    "side by side": (Beside, [*rows(4, 4), ids()], (0, 1), (1, 2)),
    "the first of them": (Beside, [*rows(4, 4), ids()], (0,), (1, 2)),
    "nothing else": (Same, [*rows(4, 4), ids()], (0, 1), ()),
    "columns of a weight": (Cut, [*rows(4, 4), ids()], (0, 1), (1, 2)),
    "from a parent": (Born, [*rows(4, 4), ids()], (0,), (1, 2)),
    "one end": (Ends, rows(4, 4, 4), (0,), (1, 2)),
    "both ends": (Ends, rows(4, 4, 4), (0, 1), (2,)),
    "the middle": (Ends, rows(4, 4, 4), (2,), (0, 1)),
    "all": (Ends, rows(4, 4, 4), (0, 1, 2), ()),
}


def in_two(
    module: nn.Module, inputs: Sequence[Tensor], early: Sequence[int]
) -> tuple[Program, Hoisted | None]:
    whole = Program(derive(module, inputs), Operands(module))
    return whole, hoisted(whole, module, inputs, frozenset(early))


def learnt(module: nn.Module, back: Callable[[GradientSum], object]) -> list[Tensor | None]:
    into = GradientSum(list(module.parameters()))
    back(into)
    return [into.take(p) for p in module.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_both_together_are_the_whole(name: str) -> None:
    make, inputs, early, late_reads = CASES[name]
    module = make().double()
    whole, two = in_two(module, inputs, early)
    assert two is not None
    assert set(two.early_reads) <= set(early)
    assert two.late_reads == late_reads
    first, last = two.early, two.late
    between, kept = first.forward(tuple(inputs[i] for i in two.early_reads))
    found, more = last.forward((*between, *(inputs[i] for i in late_reads)))
    expected, residuals = whole.forward(tuple(inputs))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)
    ds = tuple(torch.randn_like(y) for y in expected)
    answers: list[Sequence[Tensor | None]] = []

    def back(into: GradientSum) -> None:
        of_last = last.backward(ds, more, None, into)
        of_first = first.backward(of_last[: len(between)], kept, None, into)
        total: list[Tensor | None] = [None] * len(inputs)
        for i, d in (
            *zip(two.early_reads, of_first, strict=True),
            *zip(late_reads, of_last[len(between) :], strict=True),
        ):
            if d is not None:
                before = total[i]
                total[i] = d if before is None else before + d
        answers.append(total)

    mine = learnt(module, back)
    theirs = learnt(module, lambda into: answers.append(whole.backward(ds, residuals, None, into)))
    for a, b in (*zip(mine, theirs, strict=True), *zip(*answers, strict=True)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a.to_dense(), b.to_dense())


def test_what_is_computed_first_depends_on_nothing_else() -> None:
    module = Send().double()
    inputs = [*rows(4, 4), ids()]
    _, two = in_two(module, inputs, (0, 1))
    assert two is not None
    (value,), _ = two.early.forward((inputs[0],))
    torch.testing.assert_close(value, module.value(inputs[0]).detach())


def test_what_is_drawn_is_drawn_for_each_row() -> None:
    module = Deep().double()
    _, two = in_two(module, rows(4, 4), (0,))
    assert two is not None
    (value,), _ = two.early.forward((rows(4)[0],))
    again, _ = two.early.forward((rows(4)[0],))
    torch.testing.assert_close(value, again[0], rtol=0, atol=0)
    torch.testing.assert_close(value, module.norm(torch.relu(module.map(rows(4)[0]))).detach())
    outputs = [two.late.forward((value, rows(4, 4)[1], rows(4)[0]))[0][0] for _ in range(2)]
    assert not torch.equal(*outputs)


@pytest.mark.parametrize(
    ("make", "early"),
    [(Turned, (0,)), (Deep, (1,)), (Ends, ())],
    ids=("no weight", "no product before", "nothing is known before"),
)
def test_what_gains_nothing_stays_in_one(
    make: Callable[[], nn.Module], early: Sequence[int]
) -> None:
    shapes = (4, 4, 4) if make is Ends else (4, 4)
    assert in_two(make().double(), rows(*shapes), early)[1] is None


def test_kernels_by_hand_stay_in_one() -> None:
    kernel = object.__new__(_ByHand)
    assert hoisted(kernel, nn.Linear(4, 4), rows(4), frozenset({0})) is None


class _ByHand(AbstractKernel):
    forward = backward = None  # type: ignore[assignment]


_ByHand.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def test_two_of_one_structure_are_found_once() -> None:
    inputs = [*rows(4, 4), ids()]
    one, other = Send().double(), Send().double()
    cut = derive(one, inputs)
    found = [hoisted(Program(cut, Operands(m)), m, inputs, frozenset({0})) for m in (one, other)]
    assert len(cut.hoists) == 1
    assert found[0] is not None and found[1] is not None
    (a,), _ = found[1].early.forward((inputs[0],))
    torch.testing.assert_close(a, other.value(inputs[0]).detach())


class Columns(nn.Module):
    """Products with columns of one weight that overlap, turned and not."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.words = nn.Linear(3 * WIDTH, WIDTH), nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        weight, bias = self.map.weight, self.map.bias
        y = nn.functional.linear(torch.cat([x[:, :2], self.words(word)], 1), weight[:, 6:], bias)
        y = y + x @ weight[:, 4:8].t() + self.words(word) @ weight.narrow(1, 0, WIDTH).t()
        return torch.tanh(y) @ weight[:, 2:5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_multiplied_and_learn_by_their_columns(dtype: torch.dtype) -> None:
    module = Columns().to(dtype)
    cut = derive(module, [rows(4)[0].to(dtype), ids()])  # is tried against autograd
    products = [t.columns for t in cut.parts.terms if t.how == "product"]
    assert {c for columns in products for c in columns or ()} == {(6, 12), (4, 8), (0, 4), (2, 5)}
    if library.current() is not None:
        assert cut.parts.fused is not None
