"""Rows that edges read and add to by number are not copied for them: heads of attention, and what
else is multiplied part by part, beside torch in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived import computed
from geartrain.derived.operands import Operands
from geartrain.derived.ragged import cut
from geartrain.derived.ragged.calls import call_of_inside
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.ragged.parted import by_parts
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.derived.ragged.values import EDGES, MEMBERS, Buffer, DraftStep
from geartrain.native.fused import At, Op, Step
from geartrain.native.ragged import RaggedStep, RaggedSteps, Way
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import check_inside

H = 12
LENGTHS = [[2, 3, 1], [1], [5, 0, 9], [1 + k * 7 % 30 for k in range(60)]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Sent = Callable[["Heads", Tensor, Tensor, Tensor], Tensor]


class Heads(nn.Module):
    """``way`` says what comes of rows along edges to their targets."""

    def __init__(self, way: Sent, heads: int) -> None:
        super().__init__()
        self.way, self.heads = way, heads
        self.q, self.kv, self.out = nn.Linear(H, H), nn.Linear(H, 2 * H), nn.Linear(H, H)
        self.own = nn.Parameter(torch.randn(heads, H // heads))
        self.w = nn.Parameter(torch.randn(H, heads, H // heads))

    def parted(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        source, target = inside.edges["source"], inside.edges["target"]
        return x + self.out(torch.tanh(self.way(self, x, source, target)))


def by_keys(s: Heads, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    q, (k, v) = s.q(x), s.kv(x).chunk(2, 1)
    score = torch.tanh((s.parted(q[target]) * s.parted(k[source])).sum(-1) / 3)
    weight = torch.exp(score)
    total = x.new_zeros(len(x), s.heads).index_add(0, target, weight)
    share = weight / total[target]
    sent = s.parted(v[source]) * share[:, :, None]
    return x.new_zeros(len(x), H).index_add(0, target, sent.flatten(1))


def by_own(s: Heads, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    z = s.parted(s.q(x))
    score = functional.leaky_relu((z * s.own).sum(-1)[source] - (z * s.own).sum(-1)[target], 0.2)
    sent = z[source] * torch.sigmoid(score)[:, :, None]
    return torch.zeros_like(z).index_add(0, target, sent).flatten(1)


def by_einsum(s: Heads, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    z = torch.einsum("nd,dhk->nhk", x, s.w)
    share = torch.sigmoid((z * s.own).sum(-1))
    sent = z[source] * share[target][:, :, None]
    return torch.zeros_like(z).index_add(0, target, sent).flatten(1)


def kept_besides(s: Heads, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """What is multiplied is read by others too."""
    taken = s.q(x)[source]
    weight = torch.sigmoid((s.parted(taken) * s.parted(s.q(x)[target])).sum(-1))
    sent = (s.parted(taken) * weight[:, :, None]).flatten(1)
    both = torch.tanh(sent) + sent + torch.sin(taken)
    return x.new_zeros(len(x), H).index_add(0, target, both)


WAYS = {
    by_keys: ({Way.DOT_NAMED: 1, Way.ADD_TIMES_PARTS: 1}, {Way.DOT_NAMED: 1}),
    by_own: ({Way.ADD_TIMES_PARTS: 1}, {Way.DOT_NAMED: 1, Way.ADD_TIMES_PARTS: 1}),
    by_einsum: ({Way.ADD_TIMES_PARTS: 1}, {Way.DOT_NAMED: 1, Way.ADD_TIMES_PARTS: 1}),
    kept_besides: ({Way.DOT_NAMED: 1, Way.TIMES_PARTS: 1}, {Way.ADD_TIMES_PARTS: 1}),
}
"""How often edges do so, forward and back."""


@pytest.mark.parametrize("heads", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_torch(way: Sent, heads: int) -> None:
    torch.manual_seed(0)
    check_inside(Heads(way, heads), *LENGTHS, width=H, edges=3)


@pytest.mark.parametrize("way", WAYS)
def test_edges_read_rows_where_they_lie(way: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Sequence[DraftStep]] = []

    def noted(drafts: Sequence[DraftStep], asked: set[Buffer]) -> list[DraftStep]:
        found.append(by_parts(drafts, asked))
        return list(found[-1])

    monkeypatch.setattr(cut, "by_parts", noted)
    source = torch.tensor([0, 1, 2, 3, 4, 0])
    edges = {"source": source, "target": source.flip(0)}
    made = derive_inside(Heads(way, 4), (torch.randn(5, H),), edges, pools=False)
    for drafts, counts in zip(found, WAYS[way], strict=False):
        ways = Counter(Way(d.way) for d in drafts if d.kind == EDGES)
        assert {w: ways[w] for w in counts} == counts
        wide = [d for d in drafts if d.kind == EDGES and d.way is Way.TAKE and d.width == H]
        assert bool(wide) == (way is kept_besides)
    kept = [b for b in made.residuals if b.kind == EDGES]
    assert way is kept_besides or all(b.entries == 4 for b in kept)


def _edges(bundles: int) -> dict[str, Tensor]:
    """Of bundles of nine, whose members each hear the one before."""
    target = torch.arange(9 * bundles)
    return {"source": target - 1 + 9 * (target % 9 == 0), "target": target}


@pytest.mark.parametrize("way", [by_own, by_einsum])
def test_weights_of_any_axes_learn_while_rows_are_there(
    way: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, few, many = Heads(way, 4), _edges(1), _edges(60)
    learnt = [p for n, p in module.named_parameters() if n in ("own", "w", "q.weight", "out.bias")]
    made = derive_inside(module, (torch.randn(9, H),), few, pools=False)
    program, names = RaggedProgram(made, Operands(module)), dict.fromkeys(few, True)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a product or a sum came later")

    for name in ("add_product", "add_sum", "add_sum_of_axes", "add_later"):
        monkeypatch.setattr(GradientSum, name, never)
    monkeypatch.setattr(computed, "differentiate", never)  # they are no more than viewed
    for edges, bundles in ((many, 60), (few, 1)):
        into, x = GradientSum(list(module.parameters())), torch.randn(9 * bundles, H)
        lengths = torch.full((bundles,), 9)
        inside = Inside(lengths, torch.arange(bundles).repeat_interleave(9), edges)
        (y,), kept = program.forward(call_of_inside((x,), inside, names))
        if bundles == 1:  # few rows wait for others
            with pytest.raises(AssertionError, match="came later"):
                program.backward(kept, (torch.ones_like(y),), into)
            continue
        program.backward(kept, (torch.ones_like(y),), into)
        wanted = torch.autograd.grad(module(x, inside).sum(), learnt, allow_unused=True)
        for p, d in zip(learnt, wanted, strict=True):
            found = into.take(p)
            assert (found is None) == (d is None)
            if found is not None:
                assert_close(found, d)


def _ran(
    way: Way, out: Tensor, a: Tensor, b: Tensor, index: Tensor | None, cells: Tensor | None
) -> Tensor:
    """What a step over edges makes, each with three parts."""
    parts, members = 3, 5
    given = [x for x in (index, cells) if x is not None]
    slots = (-1 if index is None else 3, -1, -1 if cells is None else 2 + len(given))
    places = tuple(At(k, 0, x.shape[1]) for k, x in enumerate((out, a, b)))
    step = Step(Op.PRODUCT, a.shape[1] // parts, places, many=parts, number=1.0)
    one = RaggedStep(way, step, EDGES, 1, MEMBERS, 1, *slots, MEMBERS)
    ragged = RaggedSteps([one], [0] * 5, [0] * 5, torch.float64, -1)
    at = [x.data_ptr() for x in (out, a, b, *given)]
    ragged.run([1, members, 7, 0, 0], at + [0] * (5 - len(at)))
    for numbers in given:
        for bad in (-1, members):
            right = int(numbers[3])
            numbers[3] = bad
            with pytest.raises(IndexError):
                ragged.run([1, members, 7, 0, 0], at + [0] * (5 - len(at)))
            numbers[3] = right
    return out


@pytest.mark.parametrize("named", [False, True], ids=["own", "named"])
@pytest.mark.parametrize("width", [1, 3, 4, 8, 12, 16, 20, 40])
def test_steps_are_products_by_parts(width: int, named: bool) -> None:
    torch.manual_seed(0)
    z, e, w = torch.randn(5, 3 * width), torch.randn(7, 3 * width), torch.randn(7, 3)
    index, cells = torch.randint(5, (2, 7))
    source, rows, other = (z, z[cells], cells) if named else (e, e, None)
    times = (rows.view(7, 3, -1) * w[:, :, None]).flatten(1)
    dots = (z[index].view(7, 3, -1) * rows.view(7, 3, -1)).sum(-1)
    assert_close(_ran(Way.DOT_NAMED, torch.zeros(7, 3), z, source, index, other), dots)
    assert_close(_ran(Way.TIMES_PARTS, torch.zeros_like(e), rows, w, None, None), times)
    out = torch.randn(5, 3 * width)
    wanted = out.index_add(0, index, times)
    assert_close(_ran(Way.ADD_TIMES_PARTS, out, source, w, index, other), wanted)


@pytest.mark.parametrize("leads", ["inside", "beyond"])
def test_rows_named_besides_may_be_of_other_bundles(leads: str) -> None:
    """Then all are done at once: some at a time, they would be read before they are made."""
    n, each = 400, 200
    index = torch.arange(n)
    cells = index.clone() if leads == "inside" else index.flip(0)
    a, b = torch.randn(n, 4), torch.randn(n, 4)
    made, out = torch.zeros(n, 4), torch.zeros(n, 1)
    rows, one = At(0, 0, 4), At(3, 0, 1)
    steps = [
        RaggedStep(Way.PLAIN, Step(Op.COPY, 4, (At(2, 0, 4), At(1, 0, 4))), MEMBERS),
        RaggedStep(
            Way.DOT_NAMED,
            Step(Op.PRODUCT, 4, (one, rows, At(2, 0, 4)), number=1.0),
            *(EDGES, 1, MEMBERS, 1, 4, -1, 5, MEMBERS),
        ),
    ]
    ends = torch.tensor([0, each, n])
    ragged = RaggedSteps(steps, [0] * 7, [0] * 7, torch.float64, 6)
    tensors = (a, b, made, out, index, cells, ends)
    ragged.run([2, n, n, 0, 0], [x.data_ptr() for x in tensors])
    assert_close(out[:, 0], (a * b[cells]).sum(1))
