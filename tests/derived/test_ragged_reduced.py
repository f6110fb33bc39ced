"""The most, the least and the mean of rows by number, as graph networks take them along edges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_inside
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import assert_as_torch, tangents

H = 5
LENGTHS = {"few": [3, 1, 4], "some at a time": [2] * 300, "long": [1, 300, 2]}
pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")


class Reduced(nn.Module):
    """Reduces what comes along edges, beside a number that is there before."""

    def __init__(self, how: str, number: float, *, own: bool, learns: bool = True) -> None:
        super().__init__()
        self.how, self.number, self.own, self.learns = how, number, own, learns
        self.send, self.keep = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        source, target = inside.edges["source"], inside.edges["target"]
        begin = torch.full_like(x, self.number)
        sent = self.send(x) if self.learns else x.detach()
        come, to = sent[source], target[:, None].expand(-1, H)
        found = begin.scatter_reduce(0, to, come, self.how, include_self=self.own)
        return torch.tanh(self.keep(x) + found)


class ShareOfEdges(nn.Module):
    """A softmax over the edges that come to a member, of which the largest is taken off before."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.detached, self.weigh = detached, nn.Linear(H, 1)
        self.send, self.keep = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        source, target, n = inside.edges["source"], inside.edges["target"], x.shape[0]
        score = self.weigh(torch.tanh(self.send(x)[source] + self.keep(x)[target]))[:, 0]
        seen = score.detach() if self.detached else score
        far = x.new_full((n,), -math.inf).scatter_reduce(0, target, seen, "amax")
        weight = (score - far[target]).exp()
        total = weight.new_zeros(n).scatter_add(0, target, weight)
        share = (weight / total[target])[:, None]
        return x + torch.zeros_like(x).index_add(0, target, share * x[source])


def _inside(lengths: Sequence[int]) -> Inside:
    """Bundles with two edges a member, all of them inside; to some members nothing comes."""
    sizes, rng = torch.tensor(lengths), torch.Generator().manual_seed(2)
    segment = torch.arange(len(lengths)).repeat_interleave(sizes)
    of = segment.repeat_interleave(2)
    first, size = (sizes.cumsum(0) - sizes)[of], sizes[of]
    ends = [(torch.rand(of.shape, generator=rng) * size).long() + first for _ in range(2)]
    return Inside(sizes, segment, {"source": ends[0], "target": ends[1]})


def _program(module: nn.Module) -> RaggedProgram:
    small = _inside([2, 3])
    cut = derive_inside(module, (torch.randn(5, H),), dict(small.edges), pools=False)
    return RaggedProgram(cut, Operands(module))


def _check(module: nn.Module, inside: Inside) -> None:
    program, x = _program(module), torch.randn(len(inside.segment), H)

    def run(into: GradientSum) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        ys, kept = program.forward(call_of_inside((x,), inside, dict.fromkeys(inside.edges, True)))
        return ys, [program.backward(kept, tangents(ys), into)[0]]

    leaf = x.clone().requires_grad_()
    assert_as_torch(module, run, [module(leaf, inside)], [leaf])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("how", "number", "own"),
    [
        ("amax", 0.0, True),
        ("amax", 0.0, False),
        ("amax", 0.2, False),
        ("amin", 0.1, True),
        ("amin", -1.0, False),
        ("mean", 0.0, False),
    ],
)
def test_rows_are_reduced_by_number(how: str, number: float, own: bool, lengths: list[int]) -> None:
    torch.manual_seed(0)
    _check(Reduced(how, number, own=own), _inside(lengths))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("detached", [False, True])
def test_a_softmax_over_edges(detached: bool, lengths: list[int]) -> None:
    torch.manual_seed(0)
    inside = _inside(lengths)
    each = torch.arange(len(inside.segment))  # of a member to which nothing comes it is no number
    edges = {k: torch.cat([v, each]) for k, v in inside.edges.items()}
    _check(ShareOfEdges(detached=detached), Inside(inside.lengths, inside.segment, edges))


def test_rows_of_other_bundles_are_reduced_too() -> None:
    """Nobody should have such edges; then bundles are not done some at a time."""
    torch.manual_seed(0)
    inside = _inside([2] * 300)
    target = inside.edges["target"].flip(0)
    other = Inside(inside.lengths, inside.segment, {**inside.edges, "target": target})
    module = Reduced("amax", 0.0, own=True, learns=False)  # else its way back looks at them too
    program, x = _program(module), torch.randn(600, H)
    with torch.no_grad():
        (y,), _ = program.forward(call_of_inside((x,), other, dict.fromkeys(other.edges, True)))
        assert_close(y, module(x, other))


def test_a_row_to_reduce_that_is_not_there_is_refused() -> None:
    inside = _inside([3, 2])
    target = torch.full_like(inside.edges["target"], 5)
    wrong = Inside(inside.lengths, inside.segment, {**inside.edges, "target": target})
    program = _program(Reduced("amax", 0.0, own=True))
    with torch.no_grad(), pytest.raises(IndexError, match="a row is asked for that is not there"):
        x = torch.randn(5, H)
        program.forward(call_of_inside((x,), wrong, dict.fromkeys(wrong.edges, True)))


def test_what_is_no_number_is_the_most() -> None:
    torch.manual_seed(0)
    inside, module = _inside([3, 2]), Reduced("amax", 0.0, own=True)
    program, x = _program(module), torch.randn(5, H)
    x[1] = math.nan
    with torch.no_grad():
        (y,), _ = program.forward(call_of_inside((x,), inside, dict.fromkeys(inside.edges, True)))
        assert_close(y, module(x, inside), equal_nan=True)
