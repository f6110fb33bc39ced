"""What attention and set models of users are made of, as programs over rows of several kinds.

Each is beside torch in float64, row by row, outputs and gradients, with memories of one member and
of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import geartrain as gt
from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import call_of_inside
from geartrain.derived.ragged.derivation import derive_inside, derive_memory
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.errors import GraphError
from tests.rigs.ragged import check_inside, check_memory

H, HEADS = 6, 2
Forward = Callable[["Attends", Tensor, Tensor, Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")


class Attends(nn.Module):
    """Reads a memory in a way of its own."""

    def __init__(self, way: Forward) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v, self.o = (nn.Linear(H, H) for _ in range(4))
        self.two, self.norm, self.bare = nn.Linear(2 * H, H), nn.LayerNorm(H), _bare()
        self.heads = nn.MultiheadAttention(H, HEADS, batch_first=True)
        self.drop = nn.Dropout(0.0)

    def forward(self, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
        return self.way(self, h, m, mask)


def _bare() -> nn.Module:
    return nn.LayerNorm(H, elementwise_affine=False)


def _apart(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, HEADS, H // HEADS).transpose(1, 2)


def own_heads(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    q, k, v = _apart(s.q(h)[:, None]), _apart(s.k(m)), _apart(s.v(m))
    score = (q @ k.transpose(-2, -1) / math.sqrt(H / HEADS)).masked_fill(~mask[:, None, None], -1e9)
    return s.o((score.softmax(-1) @ v).transpose(1, 2).reshape(h.shape[0], H))


def keys_times_query(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    q, k = s.q(h).view(-1, HEADS, H // HEADS, 1), _apart(s.k(m))
    share = (k @ q).masked_fill(~mask[:, None, :, None], -math.inf).softmax(2)
    return s.o((share.transpose(2, 3) @ _apart(s.v(m))).flatten(1))


def einsum_heads(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    n, members = mask.shape
    q, k = s.q(h).view(n, HEADS, -1), s.k(m).view(n, members, HEADS, -1)
    v = s.v(m).view(n, members, HEADS, -1)
    share = torch.einsum("nhd,nlhd->nhl", q, k).masked_fill(~mask[:, None], -math.inf).softmax(-1)
    return s.o(torch.einsum("nhl,nlhd->nhd", share, v).reshape(n, H))


def heads_last(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    n, members = mask.shape
    q, k = s.q(h).view(n, 1, HEADS, -1), s.k(m).view(n, members, HEADS, -1)
    share = (q * k).sum(-1).masked_fill(~mask[..., None], -math.inf).softmax(1)
    return s.o((share[..., None] * s.v(m).view(n, members, HEADS, -1)).sum(1).flatten(1))


def fused(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    q, k, v = _apart(s.q(h)[:, None]), _apart(s.k(m)), _apart(s.v(m))
    found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    return s.o(found.transpose(1, 2).flatten(2)[:, 0])


def fused_one(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    far = torch.zeros_like(m[..., 0]).masked_fill(~mask, -math.inf)[:, None]
    attend = functional.scaled_dot_product_attention
    return attend(s.q(h)[:, None], s.k(m), s.v(m), attn_mask=far, scale=0.7).squeeze(1)


def block(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    x = s.norm(h)
    x = h + s.heads(x[:, None], m, m, key_padding_mask=~mask, need_weights=False)[0][:, 0]
    return x + s.drop(s.o(functional.gelu(s.q(s.bare(x)))))


def shares_of_heads(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    found, share = s.heads(h[:, None], m, m, key_padding_mask=~mask)
    return found[:, 0] * (share @ s.k(m)).squeeze(1)


def norm_of_members(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    return h + (s.norm(s.k(m)) * mask[..., None]).sum(1)


def most(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    return h + s.o(s.k(m).masked_fill(~mask[..., None], -1e9).amax(1))


def first_most(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    """Where several are the most, the first of them gets the gradient."""
    x = torch.relu(s.k(m)).masked_fill(~mask[..., None], -math.inf)
    return h + s.o(x.max(1).values) + torch.relu(s.q(h)).max(1).values[:, None]


def least(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    x = s.k(m).masked_fill(~mask[..., None], math.inf)
    return s.o(x.amin(1)) + torch.min(x, dim=1)[0]


def most_of_each(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    return h.amax(1, keepdim=True) + (s.k(m).amax(2) * mask).sum(1, keepdim=True) * h


def row_beside_members(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    x = torch.cat([m, h[:, None].expand(-1, m.shape[1], -1)], -1)
    share = torch.tanh(s.two(x)).sum(2).masked_fill(~mask, -1e9).softmax(1)
    return h + (share[..., None] * m).sum(1)


def means(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    w = mask.to(m.dtype).unsqueeze(-1)
    one = (m * w).sum(1) / w.sum(1).clamp(min=1)
    return s.o(one) + (m * w).sum(1) / mask.sum(1, keepdim=True)


def gated(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    gate = torch.sigmoid(s.k(m) + s.q(h).unsqueeze(1))
    return h + (gate * s.v(m) * mask.unsqueeze(-1)).sum(1)


def logs(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    score = torch.einsum("nd,nld->nl", h, s.k(m)).masked_fill(~mask, -math.inf)
    share = functional.log_softmax(score, 1).exp()
    found = torch.bmm(share.unsqueeze(1), m).squeeze(1) * score.logsumexp(1, keepdim=True)
    return s.o(found) + functional.log_softmax(s.q(h), -1)


def twice(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    """Weights that are met twice."""
    score = (s.k(m) * s.k(h)[:, None]).sum(2).masked_fill(~mask, -1e9)
    return s.k(h) + (score.softmax(1)[:, None] @ s.k(m))[:, 0]


def near(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    """Members up to a place of the row's own; the further off, the less."""
    at = torch.arange(m.shape[1])
    own = 4 * h[:, :1].detach().sigmoid()
    seen = mask & (at[None] <= own)
    q, k, v = _apart(s.q(h)[:, None]), _apart(s.k(m)), _apart(s.v(m))
    score = q @ k.mT - 0.2 * (own - at).abs()[:, None, None]
    share = score.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    return s.o((share @ v).transpose(1, 2).reshape(h.shape[0], H))


def by_place(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    """Waves of the place are added to what is held."""
    at = torch.arange(0, m.shape[1], dtype=m.dtype)
    wave = torch.sin(at.view(1, -1, 1) / 3)
    share = torch.einsum("nd,nmd->nm", h, s.k(m) + wave).masked_fill(~mask, -1e9).softmax(1)
    return s.o(torch.einsum("nm,nmd->nd", share * (1 + at / 7), m))


def mask_compared(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    score = torch.bmm(s.k(m), h.unsqueeze(2)).squeeze(2)
    share = score.masked_fill(mask == 0, -math.inf).softmax(1)
    return s.o(torch.bmm(share.unsqueeze(1), m).squeeze(1))


def mask_added(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    score = (s.q(h)[:, None] * m).sum(2) + (1.0 - mask.to(m.dtype)) * -1e9
    seen = torch.where(mask.to(m.dtype) > 0.5, score, score.new_full((), -1e9))
    return ((score + seen).softmax(1)[..., None] * s.v(m)).sum(1)


WAYS: Mapping[str, Forward] = {
    f.__name__: f
    for f in (
        *(own_heads, keys_times_query, einsum_heads, heads_last, fused, fused_one, block),
        *(shares_of_heads, norm_of_members, most, first_most, least, most_of_each),
        *(row_beside_members, means, gated, logs, twice, near, by_place),
        *(mask_compared, mask_added),
    )
}
ENTRIES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "elu": functional.elu,
    "celu": lambda x: functional.celu(x, 0.5),
    "selu": functional.selu,
    "leaky": lambda x: functional.leaky_relu(x, 0.2),
    "relu6": lambda x: functional.relu6(8 * x),
    "softplus": lambda x: functional.softplus(12 * x),
    "logsigmoid": functional.logsigmoid,
    "mish": functional.mish,
    "hardtanh": functional.hardtanh,
    "hardswish": functional.hardswish,
    "glu": lambda x: functional.glu(torch.cat([x, 2 * x], -1)),
    "abs": lambda x: x.abs(),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "power": lambda x: (x * x + 1) ** 1.5 + x**3,
    "root": lambda x: (x * x + 1).sqrt() + (x * x + 2).rsqrt(),
    "log": lambda x: (x * x + 1).log() + 1 / (x * x + 1),
    "softmax": lambda x: functional.softmax(x, -1) * functional.log_softmax(x, -1),
    "compared": lambda x: torch.where((x > -0.5) & (x <= 0.4), x * x, 2 * x) + (x < 0.1) * x,
    "larger": lambda x: torch.maximum(x, x * x) + torch.minimum(x, x * x),
    "between two": lambda x: torch.lerp(x, x * x, x.sigmoid()),
    "alike": lambda x: functional.cosine_similarity(x, x * x + 1, -1)[..., None] * x,
    "rms": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
}


@pytest.mark.parametrize("name", WAYS)
def test_ways_to_read_a_memory(name: str) -> None:
    torch.manual_seed(0)
    module = Attends(WAYS[name])
    for lengths in ([2, 1, 4], [1], [3, 300, 2]):
        check_memory(module, lengths, H)


@pytest.mark.parametrize("name", ENTRIES)
def test_functions_of_entries(name: str) -> None:
    def way(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
        return ENTRIES[name](h) + (ENTRIES[name](s.k(m)) * mask[..., None]).sum(1)

    torch.manual_seed(0)
    check_memory(Attends(way), [2, 1, 4], H)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["own_heads", "block", "first_most", "logs", "row_beside_members"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=70),
)
def test_memories_of_any_lengths(name: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    check_memory(Attends(WAYS[name]), lengths, H)


class Pool(nn.Module):
    """Of each bundle the mean, and what a query finds; a bundle of nothing adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.norm = nn.Linear(H, H), nn.LayerNorm(H)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        n, to = len(inside.lengths), inside.segment
        x = self.norm(functional.silu(self.key(x)))
        total = x.new_zeros(n, H).index_add(0, to, x)
        return total / inside.lengths.clamp(min=1)[:, None] + torch.tanh(total)


class Mix(nn.Module):
    """Each member meets the mean of its bundle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * H, H)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        total = x.new_zeros(len(inside.lengths), H).index_add(0, inside.segment, x)
        return functional.gelu(self.inner(torch.cat([x, total[inside.segment]], 1)))


class Shares(nn.Module):
    """A softmax over each bundle, of which the largest is taken off before."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.value = nn.Linear(H, 1), nn.Linear(H, H)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        n, to = len(inside.lengths), inside.segment
        score = self.weigh(x)
        far = torch.full((n, 1), -math.inf).scatter_reduce(0, to[:, None], score, "amax")
        weight = (score - far[to]).exp()
        total = x.new_zeros(n, 1).index_add(0, to, weight)
        found = x.new_zeros(n, H).index_add_(0, to, weight / total[to] * self.value(x))
        each = torch.full((n, H), 1e9).index_reduce(0, to, x, "amin")
        return found + each / inside.lengths.to(x.dtype).sqrt()[:, None]


class Turned(nn.Module):
    """A weight that is no module's, the other way round."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.seed, self.turn = nn.Parameter(torch.randn(3, H)), turn

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        score = x @ self.turn(self.seed)
        total = x.new_zeros(len(inside.lengths), 3).index_add(0, inside.segment, score.sigmoid())
        return total @ self.seed


@pytest.mark.parametrize(
    "turn",
    [lambda w: w.T, lambda w: w.transpose(-1, 0), lambda w: w.permute(1, -2), Tensor.t],
)
def test_a_weight_may_be_turned_in_any_way(turn: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check_inside(Turned(turn), [2, 1, 4, 3], width=H, pools=True)


@pytest.mark.filterwarnings("ignore:index_reduce")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=70))
def test_softmax_over_bundles_of_any_lengths(lengths: list[int]) -> None:
    torch.manual_seed(0)
    check_inside(Shares(), lengths, width=H, pools=True)


ENDS: Mapping[str, Callable[[gt.Inside], Tensor]] = {
    "first": lambda i: i.lengths.cumsum(0) - i.lengths,
    "first, moved on": lambda i: functional.pad(i.lengths.cumsum(0)[:-1], (1, 0)),
    "first, joined": lambda i: torch.cat([torch.zeros(1).long(), i.lengths.cumsum(0)[:-1]]),
    "last": lambda i: i.lengths.cumsum(0) - 1,
    "last, added": lambda i: torch.cumsum(i.lengths, 0) + (-1),
}


class Asks(nn.Module):
    """One member of each bundle asks all of them, and hears how far off each of them is."""

    def __init__(self, end: Callable[[gt.Inside], Tensor]) -> None:
        super().__init__()
        self.query, self.far, self.end = nn.Linear(H, H), nn.Embedding(10, H), end

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        to, first = inside.segment, inside.lengths.cumsum(0) - inside.lengths
        one = x[self.end(inside)]
        place = torch.arange(len(x)) - first[to]
        weight = (self.query(one)[to] * x + self.far(place)).sum(1, keepdim=True).sigmoid()
        return one + torch.zeros_like(one).index_add(0, to, weight * x)


@pytest.mark.parametrize("end", ENDS)
def test_the_first_or_the_last_member_of_each_bundle_is_taken_within_it(end: str) -> None:
    torch.manual_seed(0)
    module = Asks(ENDS[end])
    cut = derive_inside(module, (torch.randn(2, H),), {}, pools=True)
    assert cut.forward.steps.apart
    assert cut.back.steps.apart
    assert all(each.apart for each in cut.ints)
    for lengths in ([2, 1, 4], [1], [9] * 60):
        check_inside(module, lengths, width=H, pools=True)


def test_another_member_is_found_among_all_rows() -> None:
    """Where that is its first or its last for some lengths, it is neither."""
    for end in (
        lambda i: i.lengths.cumsum(0) - (i.lengths + 1) // 2,
        lambda i: i.lengths.cumsum(0) - i.lengths.clamp(max=4),
    ):
        torch.manual_seed(0)
        module = Asks(end)
        cut = derive_inside(module, (torch.randn(2, H),), {}, pools=True)
        assert not cut.forward.steps.apart
        check_inside(module, [2, 1, 4, 9], width=H, pools=True)


def test_a_bundle_of_nothing_has_no_first_member() -> None:
    module = Asks(ENDS["first"])
    cut = derive_inside(module, (torch.randn(2, H),), {}, pools=True)
    inside = gt.Inside(torch.tensor([2, 0, 1]), torch.tensor([0, 0, 2]), {})
    with pytest.raises(IndexError, match="not there"):
        RaggedProgram(cut, Operands(module)).forward(
            call_of_inside((torch.randn(3, H),), inside, {})
        )


class Numbered(nn.Module):
    """Something of each member, by its number among all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, H)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        return torch.zeros(len(inside.lengths), H).index_add(
            0, inside.segment, x * self.table(torch.arange(len(x)))
        )


def test_numbers_among_all_rows_depend_on_the_company_of_a_bundle() -> None:
    module = Numbered()
    cut = derive_inside(module, (torch.randn(2, H),), {}, pools=True)
    assert [each.apart for each in cut.ints] == [False]
    check_inside(module, [2, 1, 4], width=H, pools=True)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=70).filter(any))
def test_bundles_of_any_lengths(pools: bool, lengths: list[int]) -> None:
    torch.manual_seed(0)
    check_inside(Pool() if pools else Mix(), lengths, width=H, pools=pools)


def _between_members(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    met = (s.k(m) @ m.transpose(1, 2)) * mask[:, None]
    return h + (met @ met @ m).sum(1)


def _bundles_behind(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    return h + (h @ (s.k(m) * mask[..., None]).sum(1).t()).sum(1, keepdim=True)


def _every_other(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    return h + torch.arange(0, 2 * m.shape[1], 2).sum() + (m * mask[..., None]).sum(1)


def _sorted(s: Attends, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    return h + (m.sort(1).values * mask[..., None]).sum(1)


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (_between_members, "bmm: a product of matrices"),
        (_bundles_behind, r"of shape \(3, 3\) in one trace and \(5, 5\) in another"),
        (_sorted, "sort"),
        (_every_other, "numbers that do not count rows"),
    ],
)
def test_what_has_no_steps_says_why(way: Forward, why: str) -> None:
    with pytest.raises(GraphError, match=why):
        derive_memory(Attends(way), (torch.randn(2, H),), (torch.randn(5, H),), 0)


def test_a_bias_that_a_softmax_does_not_see_has_a_gradient_of_rounding() -> None:
    """It is not taken for another gradient, in float32 neither."""
    torch.manual_seed(0)
    module = Attends(heads_last).float()
    derive_memory(module, (torch.randn(2, H).float(),), (torch.randn(5, H).float(),), 0)
