"""Weights and buffers that are indexed by a row's number are looked up as tables are, in C."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived.derivation import derive
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.errors import GraphError
from geartrain.native.fused import Op
from geartrain.nodes.gradient import GradientSum
from tests.rigs.products import halved
from tests.rigs.programs_in_c import ops_of

N, D, KINDS = 11, 5, 3


pytestmark = pytest.mark.usefixtures("needs_kernels")


class Related(nn.Module):
    """Parameters and a buffer, and what is computed of them, a row and its number."""

    def __init__(self, rule: Callable[[Related, Tensor, Tensor], Tensor], frozen: str = "") -> None:
        super().__init__()
        self.rule, self.inner = rule, nn.Linear(D, D)
        self.w, self.b = nn.Parameter(torch.rand(KINDS, D, D)), nn.Parameter(torch.rand(KINDS, D))
        self.scale = nn.Parameter(torch.rand(KINDS))
        self.register_buffer("known", torch.rand(KINDS, D, D))
        for name in frozen.split():
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return torch.tanh(self.rule(self, x, r))


def _met(w: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(x.unsqueeze(1), w).squeeze(1)


_RULES: dict[str, Callable[[Related, Tensor, Tensor], Tensor]] = {
    "product": lambda m, x, r: _met(m.w[r], x),
    "other way": lambda m, x, r: (m.w[r] @ x.unsqueeze(2)).squeeze(2),
    "einsum": lambda m, x, r: torch.einsum("ni,nij->nj", x, m.w[r]),
    "whole axes": lambda m, x, r: _met(m.w[r, :, :], x) + m.b[r, ...],
    "selected": lambda m, x, r: _met(m.w.index_select(0, r), x),
    "by function": lambda m, x, r: m.inner(x) + torch.index_select(m.b, dim=0, index=r),
    "bias": lambda m, x, r: m.inner(x) + m.b[r],
    "numbers": lambda m, x, r: m.inner(x) * m.scale[r].unsqueeze(1),
    "buffer": lambda m, x, r: _met(m.known[r], m.inner(x)),
    "read as numbers": lambda m, x, r: _met(m.w[r], x) + m.w[r].sum(1),
    "twice": lambda m, x, r: _met(m.w[r], _met(m.w[r], x)) + m.b[r],
    "also whole": lambda m, x, r: _met(m.w[r], x) + functional.linear(x, m.w.flatten(0, 1))[:, :D],
    "also a weight": lambda m, x, r: functional.linear(x, m.b) @ m.b + m.b[r],
    "two numbers": lambda m, x, r: m.inner(x) * m.b[r, (r + 2) % D].unsqueeze(1),
    "numbers of scores": lambda m, x, r: m.inner(x) + m.w[r, m.inner(x).argmax(1)],
    "three numbers": lambda m, x, r: x * m.w[2 - r, r, (r * r) % D].unsqueeze(1),
    "from the end": lambda m, x, r: m.inner(x) + m.w[r - KINDS, -1 - r],
    "numbers apart": lambda m, x, r: m.inner(x) + m.w[r, :, r + 1],
    "beside a number": lambda m, x, r: m.inner(x) * m.w[r, 1, 2].unsqueeze(1),
    "beside a part": lambda m, x, r: torch.cat(
        [m.w[r, 1:3, 2], m.w[r, ..., 3:].sum(1), x[:, :1]], 1
    ),
    "second axis": lambda m, x, r: m.inner(x) * m.b[:, r].t().sum(1, keepdim=True),
    "second axis selected": lambda m, x, r: x * m.b.index_select(-1, r).T.prod(1, keepdim=True),
    "turned": lambda m, x, r: m.inner(x) * m.b.T[r].sum(1, keepdim=True),
    "of a part": lambda m, x, r: _met(m.w[1:][r % 2], x) + m.b[0].view(-1)[r].unsqueeze(1),
    "of a softmax": lambda m, x, r: m.inner(x) + m.b.softmax(1)[r],
    "of a softmax, by two": lambda m, x, r: x * m.w.log_softmax(1)[r, r].sum(1, keepdim=True),
    "seen as one axis": lambda m, x, r: x * m.b.view(-1)[r * D + 1].unsqueeze(1),
    "taken": lambda m, x, r: x * torch.take(m.b, r * D + r).unsqueeze(1) + m.w.take(r)[:, None],
    "each of several": lambda m, x, r: x + m.w[r.unsqueeze(1), torch.arange(2)].sum(1),
    "several of each": lambda m, x, r: x + m.w[torch.stack([r, r // 2], 1), 1].sum(1),
    "met by two": lambda m, x, r: _met(m.w.unsqueeze(1).expand(-1, 2, -1, -1)[r, r % 2], x),
}


def _sums(module: nn.Module, inputs: tuple[Tensor, Tensor], dy: Tensor, parts: int) -> list[Tensor]:
    """Outputs, and gradients of the first input and of parameters, by programs as they are."""
    program = Program(derive(module, inputs), Operands(module))
    into = GradientSum(list(module.parameters()))
    with torch.no_grad():
        (y,), kept = program.forward(inputs)
        order = torch.arange(N).flip(0).chunk(parts)
        back = [
            program.backward((dy[some],), tuple(x[some] for x in kept), None, into)[0]
            for some in order
        ]
        dx = torch.cat([d for d in back if d is not None]).flip(0)
        sums = [into.take(p) for p in module.parameters()]
        return [y, dx, *(d.to_dense().clone() for d in sums if d is not None)]


def _plainly(module: nn.Module, inputs: tuple[Tensor, Tensor], dy: Tensor) -> list[Tensor]:
    x = inputs[0].clone().requires_grad_()
    y = module(x, inputs[1])
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    found = torch.autograd.grad(y, wanted, dy, allow_unused=True)
    return [y.detach(), *(d for d in found if d is not None)]


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, D, dtype=torch.float64), torch.randint(KINDS, (N,))


def _used(found: list[Tensor]) -> list[Tensor]:
    """Without zeros, which autograd gives as none."""
    return [x for x in found if x.any()]


@halved(name=[*_RULES], frozen={"nothing frozen": "", "w and b frozen": "w b"})
def test_what_is_indexed_learns_as_by_autograd(name: str, frozen: str) -> None:
    x, r = _inputs()
    module, dy = Related(_RULES[name], frozen).double(), torch.randn(N, D, dtype=torch.float64)
    assert derive(module, (x, r)).parts.fused is not None
    wanted = _plainly(module, (x, r), dy)
    for parts in (1, 3):
        assert_close(_used(_sums(module, (x, r), dy, parts)), wanted, rtol=1e-10, atol=1e-12)


def test_several_numbers_a_row_are_several_rows_of_a_table() -> None:
    x, _ = _inputs()
    r = torch.randint(KINDS, (N, 2))
    module = Related(lambda m, x, r: m.inner(x) + m.b[r].sum(1)).double()
    assert derive(module, (x, r)).parts.fused is not None
    dy = torch.randn(N, D, dtype=torch.float64)
    found, wanted = _used(_sums(module, (x, r), dy, 2)), _plainly(module, (x, r), dy)
    assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["product", "einsum"])
def test_a_product_reads_the_table_where_it_lies(name: str) -> None:
    cut = derive(Related(_RULES[name]).double(), _inputs())
    assert cut.parts.fused is not None
    for routine in (cut.parts.fused.forward, cut.parts.fused.backward):
        ops = ops_of(routine._steps)
        assert Op.MATRICES in ops
        assert not {Op.EMBED, Op.TURN, Op.COPY} & set(ops)


@pytest.mark.parametrize("bad", [-1, KINDS])
@pytest.mark.parametrize("name", ["product", "bias"])
def test_a_number_that_is_no_row_is_refused_and_says_what_helps(name: str, bad: int) -> None:
    x, r = _inputs()
    module = Related(_RULES[name]).double()
    program = Program(derive(module, (x, r)), Operands(module))
    r[4] = bad
    with pytest.raises(IndexError, match='keep="inputs"'), torch.no_grad():
        program.forward((x, r))
    with pytest.raises(GraphError, match=r"out of (range|bounds)"):
        derive(module, (x, r))


@pytest.mark.parametrize(("first", "second"), [(KINDS, 0), (-KINDS - 1, 0), (0, D), (1, -D - 1)])
def test_by_two_numbers_none_out_of_range_is_another_entry(first: int, second: int) -> None:
    x, r = _inputs()
    module = Related(lambda m, x, r: x * m.b[r[:, 0], r[:, 1]].unsqueeze(1)).double()
    both = torch.stack([r, r + 1], 1)
    program = Program(derive(module, (x, both)), Operands(module))
    both[3] = torch.tensor([first, second])
    with pytest.raises(IndexError), torch.no_grad():
        module(x, both)
    with pytest.raises(IndexError, match="out of range"), torch.no_grad():
        program.forward((x, both))


@pytest.mark.parametrize(
    ("name", "rows"),
    [("two numbers", KINDS * D), ("product", KINDS), ("seen as one axis", KINDS * D)],
)
def test_of_a_weight_seen_as_a_table_rows_are_added_up_by_number(name: str, rows: int) -> None:
    fused = derive(Related(_RULES[name]).double(), _inputs()).parts.fused
    assert fused is not None
    assert {term.table for term in fused.terms if term.how == "looked up"} == {rows}
    assert all(term.how != "rows" for term in fused.terms)


def test_rows_of_inputs_are_indexed_as_before() -> None:
    x, r = _inputs()
    module = Related(lambda m, x, r: m.inner(x[:, torch.tensor([-1, 0, 1, 2, 3])])).double()
    dy = torch.randn(N, D, dtype=torch.float64)
    found, wanted = _used(_sums(module, (x, r), dy, 2)), _plainly(module, (x, r), dy)
    assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_table_that_is_read_alike_for_all_rows_gets_one_gradient() -> None:
    x, r = _inputs()

    def shifted(m: Related, x: Tensor, r: Tensor) -> Tensor:
        return m.inner(x) + m.b[torch.tensor([2, 0])].sum(0)

    module = Related(shifted).double()
    cut = derive(module, (x, r))
    assert all(term.how != "rows" for term in cut.parts.terms)
    dy = torch.randn(N, D, dtype=torch.float64)
    found, wanted = _used(_sums(module, (x, r), dy, 3)), _plainly(module, (x, r), dy)
    assert_close(found, wanted, rtol=1e-10, atol=1e-12)
