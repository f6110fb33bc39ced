"""Products of which edges read parts by number are made of those parts alone, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_inside
from geartrain.derived.ragged.cut import RaggedCut
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.native.operations import Noted
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import assert_as_torch, check_inside, tangents

H, OUT, KINDS = 6, 16, 3
LENGTHS = [[2, 3, 1], [1], [3, 0, 2, 1], [9] * 60, [1, 300, 2]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Sending = Callable[["Sends", Tensor, Tensor, Tensor], Tensor]


class Sends(nn.Module):
    """What ``way`` takes of what rows send, one of several a row, to where edges lead."""

    def __init__(self, way: Sending, *, out: int = OUT, bias: bool = True) -> None:
        super().__init__()
        self.way, self.out = way, out
        self.send = nn.Linear(H, KINDS * out, bias=bias)
        self.back = nn.Parameter(torch.randn(out, H) / 4)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        source, target, kind = (inside.edges[k] for k in ("source", "target", "kind"))
        sent = self.way(self, x, source, kind)
        return x + torch.tanh(x.new_zeros(len(x), self.out).index_add(0, target, sent) @ self.back)


def by_number(s: Sends, x: Tensor, source: Tensor, kind: Tensor) -> Tensor:
    return s.send(x).view(-1, s.out).index_select(0, source * KINDS + kind)


def by_index(s: Sends, x: Tensor, source: Tensor, kind: Tensor) -> Tensor:
    return torch.sigmoid(s.send(x).view(-1, s.out)[source * KINDS + kind])


def read_twice(s: Sends, x: Tensor, source: Tensor, kind: Tensor) -> Tensor:
    rows = s.send(x).view(-1, s.out)
    return rows[source * KINDS + kind] - rows[source * KINDS]


def read_whole(s: Sends, x: Tensor, source: Tensor, kind: Tensor) -> Tensor:
    rows = s.send(x)
    return rows.view(-1, s.out)[source * KINDS + kind] + rows.sum(1)[source, None]


def bent(s: Sends, x: Tensor, source: Tensor, kind: Tensor) -> Tensor:
    return torch.tanh(s.send(x)).view(-1, s.out)[source * KINDS + kind]


WAYS = [by_number, by_index, read_twice, read_whole, bent]


def _cut(module: nn.Module) -> RaggedCut:
    columns = {k: torch.tensor([0, 1, 2, 1]) for k in ("source", "target", "kind")}
    return derive_inside(module, (torch.randn(5, H),), columns, pools=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("out", [OUT, 5])
def test_gradients_are_those_of_torch(way: Sending, out: int) -> None:
    torch.manual_seed(1)
    check_inside(Sends(way, out=out), *LENGTHS, width=H, edges=KINDS)


def test_a_product_without_a_bias() -> None:
    torch.manual_seed(1)
    check_inside(Sends(by_number, bias=False), *LENGTHS, width=H, edges=KINDS)


def _inside(lengths: Sequence[int]) -> Inside:
    """Bundles in which the first two members alone send, to the last, by kinds 0 and 2."""
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    source = torch.stack([ends - sizes, ends - sizes, ends - sizes + 1], 1).flatten()
    target = (ends - 1).repeat_interleave(3)
    edges = {"source": source, "target": target, "kind": torch.tensor([0, 2, 2] * len(lengths))}
    return Inside(sizes, torch.arange(len(lengths)).repeat_interleave(sizes), edges)


def _multiplied(module: Sends, lengths: Sequence[int]) -> tuple[int, int]:
    """Multiplications forward and back."""
    torch.manual_seed(2)
    x, inside = torch.randn(sum(lengths), H), _inside(lengths)
    program, into = (
        RaggedProgram(_cut(module), Operands(module)),
        GradientSum(list(module.parameters())),
    )
    with torch.no_grad():
        with Noted() as forward:
            ys, kept = program.forward(
                call_of_inside((x,), inside, dict.fromkeys(inside.edges, True))
            )
        with Noted() as back:
            program.backward(kept, tangents(ys), into)
    one, other = (int(each.products[:, :3].prod(1).sum()) for each in (forward, back))
    return one, other


@pytest.mark.parametrize("bundles", [60, 200])
def test_rows_that_no_edge_reads_are_not_multiplied(bundles: int) -> None:
    """Of 9 members of 3 kinds each 3 are read."""
    rows, of_each = 9 * bundles, H * OUT
    common = rows * of_each
    forward, back = _multiplied(Sends(by_number), [9] * bundles)
    assert forward == common + 3 * bundles * of_each
    assert back == 2 * common + 2 * 3 * bundles * of_each  # weights learn in the same call
    forward, back = _multiplied(Sends(read_whole), [9] * bundles)
    assert forward == common + rows * KINDS * of_each


@pytest.mark.parametrize("lost", [False, True])
def test_edges_from_bundle_to_bundle(lost: bool) -> None:
    """Such are done at once; of a row that is not there the call is refused."""
    torch.manual_seed(3)
    module, inside, n = Sends(by_number), _inside([9] * 40), 360
    inside.edges["source"][:] = torch.randint(n, (120,))
    inside.edges["source"][7] = n if lost else 0
    program, x = RaggedProgram(_cut(module), Operands(module)), torch.randn(n, H)
    names = dict.fromkeys(inside.edges, True)

    def run(into: GradientSum) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        ys, kept = program.forward(call_of_inside((x,), inside, names))
        return ys, [program.backward(kept, tangents(ys), into)[0]]

    if lost:
        with pytest.raises(IndexError):
            run(GradientSum(list(module.parameters())))
        return
    leaf = x.clone().requires_grad_()
    assert_as_torch(module, run, [module(leaf, inside)], [leaf])
