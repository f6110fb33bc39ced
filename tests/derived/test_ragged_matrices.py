"""Matrices of rows and of bundles, learnt queries, and what is the same in every call: ways to
attend, beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import geartrain as gt
from geartrain.derived.ragged.derivation import derive_inside
from tests.rigs.ragged import check_inside, check_memory

H, HEADS, KINDS = 6, 2, 3
LENGTHS = [[4, 3, 5], [9] * 30, [3, 90, 4]]

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")

Looking = Callable[["Looks", Tensor, gt.Inside], Tensor]
Reading = Callable[["Reads", Tensor, Tensor, Tensor], Tensor]


class Looks(nn.Module):
    """Members, or bundles, and what they find."""

    def __init__(self, way: Looking) -> None:
        super().__init__()
        self.way, self.scale = way, nn.Parameter(torch.rand(HEADS) + 0.5)
        self.q, self.k, self.v = (nn.Linear(H, H) for _ in range(3))
        self.few = nn.Linear(H, H // HEADS)
        self.seeds = nn.Parameter(torch.randn(1, 3, H))
        self.maps = nn.Parameter(torch.randn(KINDS, HEADS, H // HEADS, H // HEADS))
        self.one, self.other = (nn.MultiheadAttention(H, HEADS, batch_first=True) for _ in "ab")

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        return self.way(self, x, inside)


def _padded(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
    y = x.new_zeros(*mask.shape, x.shape[1])
    y[mask] = x
    return y, mask


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def _beside(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def by_kernel(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """Linear attention: members meet a matrix for each head of their bundle."""
    y, mask = _padded(x, inside)
    q, k = (functional.elu(_heads(f(y))) + 1 for f in (s.q, s.k))
    k = k * mask[:, None, :, None]
    met = torch.einsum("bhnd,bhne->bhde", k, _heads(s.v(y)))
    total = torch.einsum("bhnd,bhd->bhn", q, k.sum(2)) + 1
    return x + _beside(torch.einsum("bhnd,bhde->bhne", q, met) / total[..., None])[mask]


def by_kernel_of_segments(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """The same, of matrices that rows have."""
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (s.q, s.k, s.v))
    made = torch.einsum("nhd,nhe->nhde", k.sigmoid(), v)
    met = x.new_zeros(len(inside.lengths), *made.shape[1:]).index_add(0, inside.segment, made)
    return x + torch.einsum("nhd,nhde->nhe", q.sigmoid(), met[inside.segment]).flatten(1)


def by_seeds(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """Members attend to what some learnt queries have found."""
    y, mask = _padded(x, inside)
    seeds = s.seeds.expand(len(y), -1, -1)
    found = s.one(seeds, y, y, key_padding_mask=~mask, need_weights=False)[0]
    return x + s.other(y, found, found, need_weights=False)[0][mask]


def by_seed_vectors(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    y, mask = _padded(x, inside)
    scores = torch.einsum("sd,bnd->bsn", s.seeds[0], s.k(y)).masked_fill(~mask[:, None], -1e9)
    return x + (scores.softmax(-1) @ s.v(y)).sum(1)[inside.segment]


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    return x * angle.cos() + torch.cat([-x[..., 1:], x[..., :1]], -1) * angle.sin()


def by_places(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """Rotated by angles of places, and less for who is far off."""
    y, mask = _padded(x, inside)
    place, d = torch.arange(mask.shape[1]), H // HEADS
    angle = place[:, None] / 7 ** (torch.arange(d) / d)
    q, k = (_rotated(_heads(f(y)), angle) for f in (s.q, s.k))
    far = (place[None] - place[:, None]).abs() * torch.tensor([0.5, 0.25])[:, None, None]
    scores = q @ k.transpose(-1, -2) - far
    shares = scores.masked_fill(~mask[:, None, None], -1e9).softmax(-1)
    return x + _beside(shares @ _heads(s.v(y)))[mask]


def by_the_most(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """Shares of three members alone, put where these are."""
    y, mask = _padded(x, inside)
    scores = (s.q(y) @ s.k(y).transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
    top, at = scores.topk(3, -1)
    shares = torch.zeros_like(scores).scatter(-1, at, top.softmax(-1))
    return x + (shares @ s.v(y))[mask]


def of_groups(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """Heads that have keys and values in common."""
    y, mask = _padded(x, inside)
    few = s.few(y)[:, None]
    found = functional.scaled_dot_product_attention(
        _heads(s.q(y)), few, few, mask[:, None, None], enable_gqa=True
    )
    return x + _beside(found)[mask]


def _by_edges(s: Looks, x: Tensor, inside: gt.Inside, scores: Tensor, v: Tensor) -> Tensor:
    to = inside.edges["target"]
    shares = scores.sigmoid()[..., None] * v[inside.edges["source"]]
    return x + torch.zeros_like(v).index_add(0, to, shares).flatten(1)


def by_kind(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """A matrix for each head and kind of edge between queries and keys."""
    source, to = inside.edges["source"], inside.edges["target"]
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (s.q, s.k, s.v))
    maps = s.maps[inside.edges["kind"]]
    return _by_edges(s, x, inside, torch.einsum("ehd,ehdf,ehf->eh", q[to], maps, k[source]), v)


def by_head(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    """A vector for each head."""
    source, to = inside.edges["source"], inside.edges["target"]
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (s.q, s.k, s.v))
    alone = torch.einsum("nhd,hd->nh", k, s.maps[1, :, 0])[source]
    scores = torch.einsum("ehd,ehd->eh", q[to], k[source]) + alone
    return _by_edges(s, x, inside, scores * s.scale, v)


BUNDLES: dict[str, Looking] = {
    f.__name__: f
    for f in (
        *(by_kernel, by_kernel_of_segments, by_seeds, by_seed_vectors),
        *(by_places, by_the_most, of_groups),
    )
}


@pytest.mark.parametrize("name", BUNDLES)
def test_ways_to_attend_inside_bundles(name: str) -> None:
    torch.manual_seed(0)
    check_inside(Looks(BUNDLES[name]), *LENGTHS, width=H)


@pytest.mark.parametrize("way", [by_kind, by_head], ids=["by kind", "by head"])
def test_ways_to_attend_along_edges(way: Looking) -> None:
    torch.manual_seed(0)
    check_inside(Looks(way), *LENGTHS, width=H, edges=KINDS)


def matrix(s: Looks, x: Tensor, inside: gt.Inside) -> Tensor:
    y, mask = _padded(x, inside)
    return torch.einsum("bnd,bne->bde", s.k(y) * mask[..., None], s.v(y)).sum(1)


def test_a_bundle_of_nothing_has_a_matrix_of_nothing() -> None:
    torch.manual_seed(0)
    check_inside(Looks(matrix), [2, 0, 1], [0, 1, 0], [9] * 30, width=H, pools=True)


class Reads(nn.Module):
    """Rows and what they find in a memory."""

    def __init__(self, way: Reading) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v = (nn.Linear(H, H) for _ in range(3))

    def forward(self, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
        return self.way(self, h, m, mask)


def matrix_of_memory(s: Reads, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    k = s.k(m).sigmoid() * mask[..., None]
    return h + torch.einsum("bd,bde->be", s.q(h), torch.einsum("bnd,bne->bde", k, s.v(m)))


def several_queries(s: Reads, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    """Of which each meets all that members have: parts of these are for one head."""
    q = torch.stack([s.q(h), s.k(h)], 1)
    shares = (q @ m.transpose(1, 2)).masked_fill(~mask[:, None], -1e9).softmax(-1)
    return h + (shares @ s.v(m)).sum(1)


def turned_heads(s: Reads, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
    """Axes of what a row has change places."""
    x = (s.k(m) * mask[..., None]).sum(1).view(-1, HEADS, H // HEADS)
    return h + x.transpose(1, 2).flatten(1)


@pytest.mark.parametrize(
    "way",
    [matrix_of_memory, several_queries, turned_heads],
    ids=["matrix", "queries", "turned"],
)
def test_ways_to_read_memories(way: Reading) -> None:
    torch.manual_seed(0)
    for lengths in LENGTHS:
        check_memory(Reads(way), lengths, H)


def test_what_is_the_same_in_every_call_is_computed_before_and_learns_nothing() -> None:
    torch.manual_seed(0)
    cut = derive_inside(Looks(by_places), (torch.randn(5, H),), {}, pools=False)
    assert cut.computed is not None
    angles, slopes = cut.computed.likes
    torch.testing.assert_close(angles, 7 ** (torch.arange(H // HEADS) / (H // HEADS)))
    assert slopes.flatten().tolist() == [0.5, 0.25]
    assert cut.computed.same == {0, 1}
    operands = len([*Looks(by_places).parameters()])
    assert cut.terms
    assert all(term.operand < operands for term in cut.terms)
