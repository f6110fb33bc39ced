"""Of a row that has an entry for each kind of edge, the entry of that kind, by two numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import RaggedCall, call_of_inside
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.errors import GraphError
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import assert_as_torch, tangents

H, KINDS = 5, 3
LENGTHS = {"few": [3, 1, 4], "some at a time": [2] * 300, "long": [1, 300, 2]}
Take = Callable[[Tensor, Tensor, Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

_TAKEN: dict[str, Take] = {
    "at once": lambda sent, source, kind: sent[source, kind],
    "rows first": lambda sent, source, kind: sent[source][torch.arange(len(source)), kind],
    "from the end": lambda sent, source, kind: sent[source, kind - KINDS],
}


class OfKinds(nn.Module):
    """What a member sends along an edge depends on its kind."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take, self.send = take, nn.Linear(H, KINDS * H)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        sent = self.send(x).view(-1, KINDS, H)
        come = self.take(sent, inside.edges["source"], inside.edges["kind"])
        return torch.tanh(x.index_add(0, inside.edges["target"], come))


def _inside(lengths: Sequence[int], first: int = 0) -> Inside:
    """Bundles in which each member has two edges, to itself and to the first; kinds from there."""
    sizes = torch.tensor(lengths)
    segment = torch.arange(len(lengths)).repeat_interleave(sizes)
    each = torch.arange(len(segment))
    ends = {
        "source": each.repeat(2),
        "target": torch.cat([each, (sizes.cumsum(0) - sizes)[segment]]),
    }
    return Inside(sizes, segment, {**ends, "kind": torch.arange(2 * len(each)) % KINDS + first})


def _program(module: nn.Module) -> RaggedProgram:
    edges = dict(_inside([2, 3]).edges)
    return RaggedProgram(
        derive_inside(module, (torch.randn(5, H),), edges, pools=False), Operands(module)
    )


def _call(x: Tensor, inside: Inside) -> RaggedCall:
    return call_of_inside((x,), inside, dict.fromkeys(inside.edges, True))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("how", _TAKEN)
def test_of_a_row_the_entry_of_a_kind(how: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    module, inside = OfKinds(_TAKEN[how]), _inside(lengths)
    program, x = _program(module), torch.randn(sum(lengths), H)

    def run(into: GradientSum) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        ys, kept = program.forward(_call(x, inside))
        return ys, [program.backward(kept, tangents(ys), into)[0]]

    leaf = x.clone().requires_grad_()
    assert_as_torch(module, run, [module(leaf, inside)], [leaf])


def test_a_mask_that_says_how_many_rows_there_are_has_no_program() -> None:
    def chosen(sent: Tensor, source: Tensor, kind: Tensor) -> Tensor:
        return sent[source[kind == 1]].sum((0, 1))[None].expand(len(kind), -1)

    module = OfKinds(chosen)
    with pytest.raises(GraphError, match="rows are chosen by a mask"):
        _program(module)


@pytest.mark.parametrize("first", [1, -KINDS - 1])
def test_a_kind_out_of_range_is_no_entry_of_another_row(first: int) -> None:
    program = _program(OfKinds(_TAKEN["at once"]))
    with pytest.raises(IndexError, match="out of"), torch.no_grad():
        program.forward(_call(torch.randn(5, H), _inside([2, 3], first)))
