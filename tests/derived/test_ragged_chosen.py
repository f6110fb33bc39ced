"""Weights that members and edges choose by a column of integers, beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_inside
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import check_inside

H, OUT, KINDS = 6, 5, 4
LENGTHS = [[2, 3, 1], [1], [5, 9], [3, 0, 2, 1], [1 + k * 7 % 30 for k in range(60)]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Choosing = Callable[["Chooses", Tensor, Tensor], Tensor]


class Chooses(nn.Module):
    """``way`` says what rows and their kinds make; members send along edges, or by themselves."""

    def __init__(self, way: Choosing, *, edges: bool) -> None:
        super().__init__()
        self.way, self.edges = way, edges
        self.w = nn.Parameter(torch.randn(KINDS, H, OUT) / 2)
        self.v = nn.Parameter(torch.randn(KINDS, OUT, H) / 2)
        self.b, self.own = nn.Parameter(torch.randn(KINDS, OUT)), nn.Parameter(torch.randn(KINDS))
        self.table, self.both = nn.Embedding(KINDS, H * OUT), nn.Linear(H + KINDS, OUT)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        inside: Inside = rest[-1]
        if not self.edges:
            y = self.way(self, x, rest[0])
            return (
                y
                + y.new_zeros(len(inside.lengths), OUT).index_add(0, inside.segment, y)[
                    inside.segment
                ]
            )
        source, target, kind = (inside.edges[k] for k in ("source", "target", "kind"))
        y = self.way(self, x[source], kind)
        return x.new_zeros(len(x), OUT).index_add(0, target, y)


def by_bmm(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return torch.tanh(torch.bmm(x[:, None], s.w[kind])[:, 0])


def from_behind(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return (s.v[kind] @ torch.tanh(x)[:, :, None])[..., 0]


def by_einsum(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return torch.einsum("nd,nde->ne", x, s.w[kind])


def by_einsum_turned(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return torch.einsum("ned,nd->ne", s.v.index_select(0, kind), x)


def turned(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return (x[:, None] @ s.v[kind].transpose(1, 2)).squeeze(1)


def with_biases(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return (x[:, None] @ s.w[kind])[:, 0] * s.own[kind][:, None] + s.b[kind]


def of_an_embedding(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return (s.table(kind).view(-1, OUT, H) @ x[:, :, None])[:, :, 0]


def entry_by_entry(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return (x[:, :, None] * s.w[kind]).sum(1)


def both_ways(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    w = s.w[kind]
    hidden = torch.tanh((x[:, None] @ w)[:, 0])
    return hidden + (torch.relu(w @ hidden[:, :, None])[..., 0][:, None] @ w)[:, 0]


def one_of(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    found: Tensor = s.both(torch.cat([x, functional.one_hot(kind, KINDS).to(x.dtype)], 1))
    return found


def by_two_numbers(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    other = (kind * 2 + 1) % OUT
    return torch.tanh(x[:, :OUT]) * s.b[kind, other].unsqueeze(1) + s.w[kind, other - OUT]


def of_another_axis(s: Chooses, x: Tensor, kind: Tensor) -> Tensor:
    return torch.tanh(x[:, :OUT]) * s.w[:, 1].softmax(0)[kind] + s.v[0, :, kind].t()


WAYS = [
    by_bmm,
    from_behind,
    by_einsum,
    by_einsum_turned,
    turned,
    with_biases,
    of_an_embedding,
    entry_by_entry,
    both_ways,
    one_of,
    by_two_numbers,
    of_another_axis,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("edges", [False, True])
def test_weights_that_rows_choose(way: Choosing, edges: bool) -> None:
    torch.manual_seed(1)
    kinds = {"edges": KINDS} if edges else {"kinds": KINDS}
    check_inside(Chooses(way, edges=edges), *LENGTHS, width=H, **kinds)


def test_products_make_no_matrix_for_each_row() -> None:
    """What is computed in between, and kept, is as wide as rows are."""
    module = Chooses(by_bmm, edges=False)
    cut = derive_inside(module, (torch.randn(5, H), torch.arange(5) % KINDS), {}, pools=False)
    for routine in (cut.forward, cut.back):
        assert max(routine.steps._widths) < H * OUT
    assert {t.how for t in cut.terms} == {"products"}


def test_a_kind_that_is_not_there() -> None:
    module = Chooses(by_bmm, edges=False)
    x, kind = torch.randn(5, H), torch.tensor([0, 1, 2, 3, 1])
    program = RaggedProgram(derive_inside(module, (x, kind), {}, pools=False), Operands(module))
    inside = Inside(torch.tensor([5]), torch.zeros(5, dtype=torch.int64), {})
    for bad in (KINDS, -1):
        kind[3] = bad
        with pytest.raises(IndexError):
            program.forward(call_of_inside((x, kind), inside, {}))


def test_by_two_numbers_none_out_of_range_is_another_entry() -> None:
    module = Chooses(lambda s, x, kind: x[:, :OUT] * s.b[1 - kind, kind][:, None], edges=False)
    x, kind = torch.randn(5, H), torch.tensor([0, 1, 2, 3, 1])
    program = RaggedProgram(derive_inside(module, (x, kind), {}, pools=False), Operands(module))
    inside = Inside(torch.tensor([5]), torch.zeros(5, dtype=torch.int64), {})
    kind[3] = OUT  # b has a row 1 - OUT, counted from the end
    assert 1 - OUT >= -KINDS
    with pytest.raises(IndexError):
        program.forward(call_of_inside((x, kind), inside, {}))


def test_rows_of_several_updates_learn_apart() -> None:
    """Of each update the weights get what its rows alone give."""
    torch.manual_seed(2)
    module = Chooses(with_biases, edges=False)
    x, kind = torch.randn(7, H), torch.arange(7) % KINDS
    program = RaggedProgram(derive_inside(module, (x, kind), {}, pools=False), Operands(module))
    inside = Inside(torch.tensor([3, 4]), torch.tensor([0, 0, 0, 1, 1, 1, 1]), {})
    weights = [module.w, module.b, module.own]
    together = GradientSum(list(module.parameters()))
    ys, kept = program.forward(call_of_inside((x, kind), inside, {}))
    dy = torch.randn_like(ys[0])
    updates = inside.segment.numpy()
    with together.of_updates(updates):
        program.backward(kept, (dy,), together)
    for update in range(2):
        alone = GradientSum(list(module.parameters()))
        some = dy * (inside.segment == update)[:, None]
        program.backward(kept, (some,), alone)
        for w in weights:
            found, wanted = together.take(w), alone.take(w)
            assert found is not None and wanted is not None
            assert_close(found, wanted)
        together.next_update()


class CountsEdges(nn.Module):
    """Shares what comes along edges among those that come, with a weight for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.scores = nn.Linear(H, H), nn.Parameter(torch.randn(1, 2, H // 2))

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        source, target = inside.edges["source"], inside.edges["target"]
        heads = self.out(x).view(len(x), 2, -1)
        share = (heads * self.scores).sum(2)[source].exp()
        many = torch.bincount(target, minlength=len(x)).clamp(min=1)
        got = torch.zeros_like(heads).index_add(0, target, share[..., None] * heads[source])
        return got.flatten(1) / many[:, None]


def test_edges_are_counted_and_weights_have_several_axes() -> None:
    torch.manual_seed(1)
    check_inside(CountsEdges(), *LENGTHS, width=H, edges=KINDS)
