"""Weights that modules over bundles and memories compute of their weights, and single numbers that
they learn, beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.derived.operands import Operands
from geartrain.derived.ragged import choice
from geartrain.derived.ragged.calls import call_of_inside
from geartrain.derived.ragged.cut import RaggedCut
from geartrain.derived.ragged.derivation import derive_inside, derive_memory
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.errors import GraphError
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import check_inside, check_memory, tangents

H, HEADS = 6, 2
LENGTHS = [[2, 3, 1], [1], [3, 0, 2, 1], [9] * 60, [1, 300, 2]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Looking = Callable[["Looks", Tensor, Inside], Tensor]
Reading = Callable[["Reads", Tensor, Tensor], Tensor]


def number(of: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(of))


class Looks(nn.Module):
    """What ``way`` makes of members, added up in their bundle."""

    def __init__(self, way: Looking) -> None:
        super().__init__()
        self.way, self.map = way, nn.Parameter(torch.randn(H, HEADS, H // HEADS) / 3)
        self.near, self.eps, self.one = (
            nn.Parameter(torch.randn(HEADS, 3)),
            number(0.4),
            number(0.7),
        )
        self.register_buffer("fixed", torch.randn(H, H))
        self.low = nn.Parameter(torch.randn(H, 2) / 2)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        y = self.way(self, x, inside)
        total = y.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, y)
        return torch.tanh(total)[inside.segment] + x


def in_heads(s: Looks, x: Tensor, inside: Inside) -> Tensor:
    z = torch.einsum("nd,dhk->nhk", x, s.map)
    return (z * torch.sigmoid((z * s.near).sum(-1, keepdim=True))).flatten(1)


def more_than_one(s: Looks, x: Tensor, inside: Inside) -> Tensor:
    return (1 + s.eps) * torch.sin(x)


def low_rank(s: Looks, x: Tensor, inside: Inside) -> Tensor:
    return torch.relu(x @ (s.low @ s.low.t() + s.fixed)) * s.eps.exp()


def by_a_number(s: Looks, x: Tensor, inside: Inside) -> Tensor:
    return torch.sin(x * s.one) * s.one


def by_one_in_brackets(s: Looks, x: Tensor, inside: Inside) -> Tensor:
    return torch.cos(x) * s.one[None, None]


COMPUTED = [in_heads, more_than_one, low_rank]
PLAIN = [by_a_number, by_one_in_brackets]


def cut_of(module: nn.Module) -> RaggedCut:
    return derive_inside(module, (torch.randn(5, H),), {}, pools=False)


@pytest.mark.parametrize("way", [*COMPUTED, *PLAIN])
def test_modules_that_look_inside_are_torchs(way: Looking) -> None:
    torch.manual_seed(1)
    module = Looks(way)
    assert (cut_of(module).computed is not None) == (way in COMPUTED)
    check_inside(module, *LENGTHS, width=H)


class Reads(nn.Module):
    """Rows that attend, with scores that ``way`` makes."""

    def __init__(self, way: Reading) -> None:
        super().__init__()
        self.way, self.map = way, nn.Parameter(torch.randn(H, HEADS, H // HEADS) / 3)
        self.query, self.heat = nn.Parameter(torch.randn(H, H) / 3), number(0.8)

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        score = self.way(self, h, memory).masked_fill(~mask, -1e9)
        return h + torch.einsum("nk,nkd->nd", score.softmax(-1), memory)


def warm(s: Reads, h: Tensor, memory: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", h @ s.query, memory) * s.heat


def warm_before(s: Reads, h: Tensor, memory: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", s.heat * (h @ s.query), memory)


def exponential(s: Reads, h: Tensor, memory: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", h @ s.query, memory) / s.heat.exp()


def of_heads(s: Reads, h: Tensor, memory: Tensor) -> Tensor:
    query = torch.einsum("nd,dhk->nhk", h, s.map)
    return torch.einsum("nhk,nmhk->nm", query, memory.unflatten(2, (HEADS, -1)))


@pytest.mark.parametrize("way", [warm, warm_before, exponential, of_heads])
def test_modules_that_read_a_memory_are_torchs(way: Reading) -> None:
    torch.manual_seed(1)
    for lengths in ([2, 1, 4], [1], [3, 300, 2], [4] * 150):
        check_memory(Reads(way), lengths, H)


@pytest.mark.parametrize("way", COMPUTED)
def test_updates_that_come_together_are_told_apart(way: Looking) -> None:
    torch.manual_seed(1)
    module, x = Looks(way), torch.randn(9, H)
    program = RaggedProgram(cut_of(module), Operands(module))
    sizes, updates = torch.tensor([2, 3, 4]), torch.tensor([0, 2, 1])
    segment = torch.arange(3).repeat_interleave(sizes)
    weights = [p for p in module.parameters() if p.requires_grad]
    into = GradientSum(weights)
    with torch.no_grad():
        ys, kept = program.forward(call_of_inside((x,), Inside(sizes, segment, {}), {}))
        with into.of_updates(updates[segment].numpy()):
            program.backward(kept, tangents(ys), into)
    (dy,) = tangents(ys)
    for update in range(3):
        at = segment == int((updates == update).nonzero())
        its = torch.tensor([int(at.sum())])
        y = module(x[at], Inside(its, torch.zeros(int(its), dtype=torch.int64), {}))
        wanted = torch.autograd.grad(y, weights, dy[at], allow_unused=True)
        for p, d in zip(weights, wanted, strict=True):
            found = into.take(p)
            assert (found is None or not found.any()) if d is None else found is not None
            if d is not None and found is not None:
                assert_close(found, d)
        into.next_update()


def test_what_is_left_without_steps_is_still_told() -> None:
    def ranked(s: Looks, x: Tensor, inside: Inside) -> Tensor:
        return in_heads(s, x, inside).sort(0).values

    with pytest.raises(GraphError, match="sort"):
        cut_of(Looks(ranked))


def _turned(s: Reads, h: Tensor, memory: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", h @ torch.linalg.qr(s.query)[0], memory)


def test_any_operator_of_weights_alone_will_do() -> None:
    """It is torch that computes it."""
    torch.manual_seed(1)
    module = Reads(_turned)
    cut = derive_memory(module, (torch.randn(2, H),), (torch.randn(5, H),), 0)
    assert cut.computed is not None
    check_memory(module, [2, 1, 4], H)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs are found at once, and win."""
    choice.RAGGED_REGISTRY.forget()
    monkeypatch.setattr(choice, "FIRINGS", 1)
    monkeypatch.setattr(choice, "ROWS", 1)
    monkeypatch.setattr(choice, "_ratio", lambda *_: 0.5)
    yield
    choice.RAGGED_REGISTRY.forget()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("run", ["auto", "steps"])
def test_a_loop_that_attends_learns_as_plain_torch(run: Literal["auto", "steps"]) -> None:
    """Three turns over a memory, updates of four instances each."""
    torch.manual_seed(3)
    module, readout = Reads(exponential), nn.Linear(H, 2)
    own = [*module.parameters(), *readout.parameters()]
    data = [(torch.randn(1 + k % 4, H), k % 2) for k in range(8)]
    begun = [p.detach().clone() for p in own]
    graph = gt.Graph(value=("label",))
    held = graph.input("x", bundle=True).hold()
    turns = graph.loop(run=run)
    turns.join(
        held.through(
            lambda x, inside: x[inside.lengths.cumsum(0) - 1], name="last", inside=True, pool=True
        ).move(step=0)
    )
    after = turns.attend(held, module, name="read").move(step=lambda m: m.step + 1)
    done, more = after.where(lambda m: m.step >= 3)
    turns.join(more)
    done.through(readout, name="readout").loss(gt.cross_entropy, target="label")
    session = gt.Session(
        graph,
        rules=gt.Rules(
            optimizer=partial(torch.optim.SGD, lr=0.1),
            update_every=gt.Instances(4),
            average="instances",
        ),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=4,
        schedule=gt.Schedule(drain=True, ramp=gt.Ramp(over=0)),
        reading=gt.Reading(shuffle=False),
    )
    many = 3
    session.fit([gt.Instance({"x": x}, value={"label": y}) for x, y in data] * many, epochs=1)
    assert "attends to memory [auto: derived, 0.50 of autograd]" in str(graph)
    ours = [p.detach().clone() for p in own]
    with torch.no_grad():
        for p, first in zip(own, begun, strict=True):
            p.copy_(first)
    optimizer = torch.optim.SGD(own, lr=0.1)
    for start in (0, 4) * many:
        loss = torch.zeros(())
        for x, y in data[start : start + 4]:
            h, mask = x[-1:], torch.ones(1, len(x), dtype=torch.bool)
            for _ in range(3):
                h = module(h, x[None], mask)
            loss = loss + nn.functional.cross_entropy(readout(h), torch.tensor([y]))
        optimizer.zero_grad()
        (loss / 4).backward()
        optimizer.step()
    for mine, theirs in zip(ours, own, strict=True):
        assert_close(mine, theirs.detach(), rtol=1e-8, atol=1e-10)
