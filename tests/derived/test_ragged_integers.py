"""Integers in programs over rows of several kinds: what steps and torch say of them is the same,
also where no number of the program's dtype is that integer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geartrain.derived.operands import Operands
from geartrain.derived.ragged import exact
from geartrain.derived.ragged.calls import RaggedCall, call_of_inside, call_of_memory
from geartrain.derived.ragged.cut import RaggedCut
from geartrain.derived.ragged.derivation import derive_inside, derive_memory
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.errors import GraphError
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside

H = 4
LARGE: Mapping[torch.dtype, int] = {torch.float32: 1 << 24, torch.float64: 1 << 53}
"""Integers up to it are numbers of a dtype, and the next is none."""


@pytest.fixture(autouse=True, params=LARGE, ids=str)
def large(needs_kernels: None, request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield LARGE[request.param]
    torch.set_default_dtype(before)


class Marked(nn.Module):
    """Something is made of a column of integers, in a way of its own."""

    def __init__(self, way: Callable[..., Tensor], large: int) -> None:
        super().__init__()
        self.way, self.large = way, large
        self.map, self.table = nn.Linear(H, H), nn.Embedding(8, H)

    def forward(self, *given: Any) -> Tensor:
        return self.way(self, *given)


def _numbers(large: int) -> Tensor:
    return torch.tensor([large, large + 1, large + 2, -large, -large - 1, large + 1, 3])


def _same(module: Marked, cut: RaggedCut, call: RaggedCall, wanted: Tensor, leaf: Tensor) -> None:
    """What a program makes of rows, and what comes back to them."""
    program, total = RaggedProgram(cut, Operands(module)), GradientSum(list(module.parameters()))
    with torch.no_grad():
        (y,), kept = program.forward(call)
        sums = {k: torch.zeros_like(x) for k, x in call.held.items() if x.is_floating_point()}
        found = program.backward(kept, (wanted,), total, sums)
    assert_close(y, wanted.detach())
    assert found[0] is not None
    (mine,) = torch.autograd.grad(wanted, leaf, wanted.detach(), retain_graph=True)
    assert_close(found[0], mine)
    learnt = module.table.weight
    (each,) = torch.autograd.grad(wanted, learnt, wanted.detach(), allow_unused=True)
    assert_close(total.take(learnt), each)


# Of members and edges.


def _sent(s: Marked, x: Tensor, inside: Inside, share: Tensor) -> Tensor:
    """Rows along edges, so much of each."""
    source, target = inside.edges["source"], inside.edges["target"]
    return x + torch.zeros_like(x).index_add(0, target, s.map(x)[source] * share[:, None])


def _chosen(s: Marked, k: Tensor) -> Tensor:
    """One of two numbers of rows, as others say, also where no number is told from the next."""
    far = (k > s.large) & (k != s.large + 2)
    return torch.where(far, 7, torch.where(k < 0, k % 3, k % 5)).masked_fill(k == 3, 6)


def _kinds(inside: Inside) -> Tensor:
    return inside.edges["kind"]


def _ends(k: Tensor, inside: Inside) -> tuple[Tensor, Tensor]:
    return k[inside.edges["source"]], k[inside.edges["target"]]


def _padded(s: Marked, x: Tensor, k: Tensor, i: Inside, *, adds: bool = False) -> Tensor:
    """Members of one kind, found where they are padded."""
    mask = torch.arange(int(i.lengths.max())) < i.lengths[:, None]
    kinds, rows = torch.zeros(mask.shape, dtype=torch.int64), x.new_zeros(*mask.shape, H)
    kinds = kinds.index_put((mask,), k, accumulate=adds)
    rows[mask] = s.map(x)
    return x + (rows * (kinds == 3)[..., None])[mask]


INSIDE: Mapping[str, Callable[..., Tensor]] = {
    "padded": _padded,
    "with a number": lambda s, x, k, i: _sent(s, x, i, _kinds(i) == s.large + 1),
    "with a tensor": lambda s, x, k, i: _sent(s, x, i, _kinds(i) == torch.tensor(s.large + 1)),
    "above a number": lambda s, x, k, i: _sent(s, x, i, _kinds(i) > s.large),
    "of both ends": lambda s, x, k, i: _sent(s, x, i, torch.eq(*_ends(k, i))),
    "in order": lambda s, x, k, i: _sent(s, x, i, torch.lt(*_ends(k, i))),
    "any but nothing": lambda s, x, k, i: _sent(s, x, i, _kinds(i).bool()),
    "nothing": lambda s, x, k, i: _sent(s, x, i, _kinds(i).logical_not()),
    "both": lambda s, x, k, i: _sent(s, x, i, torch.logical_and(*_ends(k, i))),
    "what is left": lambda s, x, k, i: _sent(s, x, i, _kinds(i) % 5),
    "chosen": lambda s, x, k, i: torch.where((k == s.large + 1)[:, None], s.map(x), -x),
    "as columns": lambda s, x, k, i: s.map(x) * (k[:, None] == (k - k % 2)[:, None]),
    "of two": lambda s, x, k, i: s.map(x) * ((k == s.large + 1) | (k == -s.large - 1))[:, None],
    "a row of a table": lambda s, x, k, i: x * s.table((k == s.large + 1).long()),
    "a row that is chosen": lambda s, x, k, i: x * s.table(_chosen(s, k)),
    "there and back": lambda s, x, k, i: x * (k.to(x.dtype).long() - s.large)[:, None],
    "as numbers": lambda s, x, k, i: x * (k[:, None] / s.large + k.to(x.dtype)[:, None]),
}


def _inside(large: int) -> tuple[Tensor, Tensor, Inside]:
    lengths, rng = torch.tensor([2, 1, 4]), torch.Generator().manual_seed(2)
    source, target = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([1, 0, 2, 4, 5, 6])
    edges = {"source": source, "target": target, "kind": _numbers(large)[1:]}
    segment = torch.arange(3).repeat_interleave(lengths)
    return torch.randn(7, H, generator=rng), _numbers(large), Inside(lengths, segment, edges)


def _derived_inside(module: nn.Module, large: int) -> RaggedCut:
    """Traced and tried with small integers."""
    x, k, inside = _inside(large)
    edges = {**inside.edges, "kind": torch.arange(6) % 4}
    return derive_inside(module, (x, torch.arange(len(k)) % 4), edges, pools=False)


@pytest.mark.parametrize("name", INSIDE)
def test_integers_of_members_and_edges_are_torchs(name: str, large: int) -> None:
    torch.manual_seed(0)
    module = Marked(INSIDE[name], large)
    x, k, inside = _inside(large)
    names = dict.fromkeys(inside.edges, True)
    leaf = x.clone().requires_grad_()
    wanted = module(leaf, k, inside)
    cut = _derived_inside(module, large)
    _same(module, cut, call_of_inside((x, k), inside, names), wanted, leaf)


def test_a_small_number_is_compared_with_by_steps(large: int) -> None:
    """Torch finds nothing before; where steps may not, it finds the truths."""

    def found(number: int) -> list[bool]:
        module = Marked(lambda s, x, k, i: _sent(s, x, i, _kinds(i) == number), large)
        cut = _derived_inside(module, large)
        return [each.node.meta["dtype"] is torch.bool for each in cut.ints]

    assert not any(found(large - 1))
    assert sum(found(large)) == 1


# Of a memory, and of the rows that read it.


def _read(s: Marked, m: Tensor, share: Tensor) -> Tensor:
    return (s.map(m) * share[..., None]).sum(1)


def _places(m: Tensor) -> Tensor:
    return torch.arange(m.shape[1])[None]


def _last(s: Marked, h: Tensor, m: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    return h + _read(s, m, _places(m) == mask.sum(1, keepdim=True) - 1)


def _at(s: Marked, h: Tensor, m: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """The member of that number, if there is one."""
    return h + _read(s, m, (_places(m) * 2 <= k[:, None]) & mask)


def _near(s: Marked, h: Tensor, m: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """The members around that number."""
    return h + _read(s, m, ((_places(m) - k[:, None]).abs() <= 1) & mask)


def _ahead(s: Marked, h: Tensor, m: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    far = torch.where(mask, (k - 3)[:, None] - _places(m), 7).clamp(-4, s.large)
    return h + _read(s, m, (far + 2 >= -2) & mask)


MEMORY: Mapping[str, Callable[..., Tensor]] = {
    "around a number": _near,
    "ahead of it": _ahead,
    "above a number": lambda s, h, m, mask, k: h + _read(s, m, mask) * (k > s.large)[:, None],
    "any but nothing": lambda s, h, m, mask, k: h + _read(s, m, mask) * k.bool()[:, None],
    "for all members": lambda s, h, m, mask, k: h + _read(s, m, mask & (k == s.large + 1)[:, None]),
    "a row that is chosen": lambda s, h, m, mask, k: (
        s.table(_chosen(s, k)) * (h + _read(s, m, mask))
    ),
    "the last": _last,
    "so many": _at,
}


def _memory(large: int) -> tuple[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]]:
    rng = torch.Generator().manual_seed(2)
    h, m = (torch.randn(n, H, generator=rng) for n in (7, 20))
    return h, m, _numbers(large), [0, 2, 3, 7, 9, 9, 12], [2, 1, 4, 2, 3, 1, 5]


def _derived_memory(module: nn.Module, large: int) -> RaggedCut:
    h, m, *_ = _memory(large)
    return derive_memory(module, (h, torch.arange(7) % 4), (m,), 1)


@pytest.mark.parametrize("name", MEMORY)
def test_integers_of_rows_that_read_a_memory_are_torchs(name: str, large: int) -> None:
    torch.manual_seed(0)
    module = Marked(MEMORY[name], large)
    h, m, k, starts, lengths = _memory(large)
    leaf = h.clone().requires_grad_()
    rows = []
    for j, (a, n) in enumerate(zip(starts, lengths, strict=True)):
        mask = torch.ones(1, n, dtype=torch.bool)
        rows.append(module(leaf[j : j + 1], m[a : a + n][None], mask, k[j : j + 1]))
    call = call_of_memory((h, k), 1, (m,), np.array(starts), np.array(lengths))
    _same(module, _derived_memory(module, large), call, torch.cat(rows), leaf)


def _scaled(s: Marked, h: Tensor, m: Tensor, mask: Tensor, share: Tensor) -> Tensor:
    return h + _read(s, m, mask) * share[:, None].to(h.dtype)


def _one(h: Tensor, k: Tensor) -> Tensor:
    """Integers, or nothing, as a row says."""
    return torch.where(h[:, 0] > 0, k, 0)


REFUSED: Mapping[str, Callable[..., Tensor]] = {
    "one of two, and less": lambda s, h, m, mask, k: _scaled(s, h, m, mask, _one(h, k) - s.large),
    "one of two, and bits": lambda s, h, m, mask, k: _scaled(s, h, m, mask, _one(h, k) & k),
    "one of two, and truths": lambda s, h, m, mask, k: _scaled(
        s, h, m, mask, torch.logical_and(_one(h, k), k)
    ),
    "one of two, compared": lambda s, h, m, mask, k: _scaled(s, h, m, mask, _one(h, k) == k),
    "filled, and less": lambda s, h, m, mask, k: _scaled(
        s, h, m, mask, k.masked_fill(h[:, 0] > 0, 0) - s.large
    ),
    "places far away": lambda s, h, m, mask, k: h + _read(s, m, _places(m) + s.large == k[:, None]),
    "less, as a number": lambda s, h, m, mask, k: _scaled(s, h, m, mask, _one(h, k) - 1),
    "less, beside it": lambda s, h, m, mask, k: _scaled(
        s, h, m, mask, torch.stack([_one(h, k) - 1, k], 1).amax(1)
    ),
    "less, halved": lambda s, h, m, mask, k: (
        h + _read(s, m, mask) * (0.5 * (_one(h, k) - 1))[:, None]
    ),
    "less, twice": lambda s, h, m, mask, k: (
        h + _read(s, m, mask & (_places(m) - k[:, None] + k[:, None] > 1))
    ),
    "less, and far": lambda s, h, m, mask, k: (
        h + _read(s, m, mask & (_places(m) - k[:, None] > s.large // 2))
    ),
    "half as wide": lambda s, h, m, mask, k: _scaled(s, h, m, mask, k.int()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_steps_may_find_otherwise_is_left_to_torch(name: str, large: int) -> None:
    with pytest.raises(GraphError):
        _derived_memory(Marked(REFUSED[name], large), large)


def test_it_says_why(large: int) -> None:
    with pytest.raises(GraphError, match="integers that may be too large for a number"):
        _derived_memory(Marked(REFUSED["one of two, and less"], large), large)


def test_integers_that_are_added_up_where_they_are_padded_are_left_to_torch(large: int) -> None:
    with pytest.raises(GraphError, match="too large for a number"):
        _derived_inside(Marked(partial(_padded, adds=True), large), large)


def test_other_numbers_of_integers_are_left_to_torch(large: int) -> None:
    other = torch.float32 if large == LARGE[torch.float64] else torch.float64
    module = Marked(lambda s, x, k, i: s.map(x) * (k.to(other) * 0.5).to(x.dtype)[:, None], large)
    with pytest.raises(GraphError):
        _derived_inside(module, large)


def test_places_are_exact_as_far_as_is_said(large: int) -> None:
    def way(by: int) -> Callable[..., Tensor]:
        return lambda s, h, m, mask, k: h + _read(s, m, _places(m) * by == 0)

    most = large // exact.MOST_ROWS
    assert _derived_memory(Marked(way(most), large), large)
    with pytest.raises(GraphError, match="too large"):
        _derived_memory(Marked(way(most + 1), large), large)
