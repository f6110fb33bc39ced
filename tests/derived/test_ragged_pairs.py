"""Members of a bundle that attend to one another have programs, in which nothing is padded; beside
torch in float64, outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from geartrain.derived.operands import Operands
from geartrain.derived.ragged.calls import RaggedCall, call_of_inside
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.derived.ragged.values import BUNDLES, PAIRS
from geartrain.errors import GraphError, ProtocolError
from geartrain.native.fused import At, Op, Step
from geartrain.native.ragged import RaggedStep, RaggedSteps, Way
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from tests.rigs.ragged import check_inside, check_memory

H, HEADS = 6, 2
LENGTHS = [[2, 3, 1], [1], [5], [3, 0, 2, 1], [1 + k * 7 % 30 for k in range(30)]]
FULL = [each for each in LENGTHS if all(each)]
"""Without bundles of nothing, of which torch's attention makes no numbers."""

pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")


Meeting = Callable[["Meets", Tensor, Tensor], Tensor]


class Meets(nn.Module):
    """Pads its bundles; ``way`` says how members meet."""

    def __init__(self, way: Meeting) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v = (nn.Linear(H, H) for _ in range(3))
        self.far, self.own = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.randn(HEADS))
        self.heads = nn.MultiheadAttention(H, HEADS, batch_first=True)
        self.turned = nn.MultiheadAttention(H, HEADS)
        self.layer = nn.TransformerEncoderLayer(H, HEADS, 9, dropout=0.0, batch_first=True)
        self.last = nn.TransformerEncoderLayer(
            H, HEADS, 9, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.both, self.out = nn.Linear(2 * H, H), nn.Linear(H, 4)
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
        out = x.new_zeros(*mask.shape, H)
        out[mask] = x
        return self.way(self, out, mask)[mask]


def scores(s: Meets, x: Tensor) -> Tensor:
    return s.q(x) @ s.k(x).transpose(1, 2) / math.sqrt(H)


def plain(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    return scores(s, x).masked_fill(~mask[:, None], -1e9).softmax(2) @ s.v(x)


def from_before(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    sees = (at[None] <= at[:, None]) & mask[:, None]
    return scores(s, x).masked_fill(~sees, -1e9).softmax(-1) @ s.v(x)


def chosen(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    score = torch.where(mask[:, None] & mask[..., None], scores(s, x), -1e9)
    return score.log_softmax(2).exp() @ s.v(x)


def heads_apart(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def several_heads(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = map(heads_apart, (s.q(x), s.k(x), s.v(x)))
    score = (q @ k.transpose(-1, -2)) * s.own[:, None, None]
    share = score.masked_fill(~mask[:, None, None], -1e9).softmax(-1)
    return (share @ v).transpose(1, 2).reshape(x.shape)


def heads_by_einsum(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (y.view(*x.shape[:2], HEADS, -1) for y in (s.q(x), s.k(x), s.v(x)))
    score = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(~mask[:, None, None], -1e9)
    return torch.einsum("bhij,bjhd->bihd", score.softmax(3), v).flatten(2)


def of_torch(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = map(heads_apart, (s.q(x), s.k(x), s.v(x)))
    found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    return found.transpose(1, 2).reshape(x.shape)


def causal_of_torch(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(s.q(x), s.k(x), s.v(x), is_causal=True)


def multihead(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = s.heads(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
    return found


def multihead_turned(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    found, share = s.turned(y, s.q(y), y, key_padding_mask=~mask)
    return torch.cat([found.transpose(0, 1), share.transpose(1, 2) @ x], 2)


def encoder_layer(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = s.layer(x, src_key_padding_mask=~mask)
    return found


def causal_layer(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    before = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    behind = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    found: Tensor = s.last(x, before, behind, is_causal=True)
    return found


def by_distance(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    bias = (at[:, None] - at).abs() * s.far
    return (scores(s, x) - bias).masked_fill(~mask[:, None], -1e9).softmax(2) @ s.v(x)


def apart(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    q = s.q(x)
    far = (q[:, :, None] - q[:, None]).square().sum(3)
    return (-far).masked_fill(~mask[:, None], -1e9).softmax(2) @ s.v(x)


def not_to_themselves(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    own = torch.eye(x.shape[1], dtype=torch.bool)
    score = scores(s, x).masked_fill(own, -3.0).masked_fill(~mask[:, None], -1e9)
    return score.softmax(2) @ s.v(x)


def triangles(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    both = (mask[:, None] & mask[..., None]).to(x.dtype)
    score, v = scores(s, x) * both, s.v(x)
    later = score.tril(-1).transpose(1, 2) @ v
    return torch.cat([later, score.triu(2) @ v, score.triu(-1).tril(1) @ v], 2)


def over_the_first(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    share = scores(s, x).masked_fill(~mask[..., None], -1e9).softmax(1)
    return torch.einsum("bij,bid->bjd", share, s.v(x))


def rows_and_back(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    share = scores(s, x).masked_fill(~mask[:, None], -1e9)[mask].softmax(1)
    out = x.new_zeros(*mask.shape, x.shape[1])
    out[mask] = share
    return out @ s.v(x)


def added_up(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    both = (mask[:, None] & mask[..., None])[..., None]
    e = torch.tanh(s.q(x)[:, :, None] + s.k(x)[:, None]) * both
    every = e.sum((1, 2))[:, None] * x
    return torch.cat([e.sum(2), e.square().sum(1), every], 2)


def relations(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    """Weights meet pairs: their gradients are of as many rows."""
    n, most, _ = x.shape
    sides = x[:, :, None].expand(n, most, most, H), x[:, None].expand(n, most, most, H)
    y = s.out(s.norm(s.both(torch.cat(sides, 3)).relu()))
    return (y * (mask[:, None] & mask[..., None])[..., None]).sum(2)


WAYS: Sequence[Meeting] = (
    *(plain, from_before, chosen, several_heads, heads_by_einsum, causal_of_torch),
    *(by_distance, apart, not_to_themselves, triangles, over_the_first, rows_and_back),
    *(added_up, relations),
)
OF_TORCH: Sequence[Meeting] = (of_torch, multihead, multihead_turned, encoder_layer, causal_layer)


def made(way: Meeting) -> Meets:
    torch.manual_seed(0)
    return Meets(way)


@pytest.mark.parametrize("way", WAYS)
def test_members_meet_as_with_torch(way: Meeting) -> None:
    check_inside(made(way), *LENGTHS, width=H)


@pytest.mark.parametrize("way", OF_TORCH)
def test_attention_of_torchs_own(way: Meeting) -> None:
    check_inside(made(way), *FULL, width=H)


@pytest.mark.parametrize("way", [plain, several_heads, added_up])
def test_bundles_that_no_cache_holds_are_the_same(way: Meeting) -> None:
    check_inside(made(way), [300, 2, 280, 1], width=H)


class Reads(nn.Module):
    """Members of a memory meet before they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
        share = (self.q(m) @ m.transpose(1, 2)).masked_fill(~mask[:, None], -1e9).softmax(2)
        m = torch.tanh(self.k(share @ m))
        score = (m @ h[:, :, None])[..., 0].masked_fill(~mask, -1e9)
        return h + (score.softmax(1)[:, None] @ m)[:, 0]


@pytest.mark.parametrize("lengths", [[2, 3, 1], [1], [5, 1 + 4, 2]])
def test_members_of_a_memory_meet(lengths: list[int]) -> None:
    torch.manual_seed(0)
    check_memory(Reads(), lengths, H)


class Listens(nn.Module):
    """Each member takes the best of its bundle by a score, and what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, 4), nn.Linear(H, 4)
        self.edge, self.out = nn.Linear(2 * H, H), nn.Linear(2 * H, H)

    def forward(self, h: Tensor, inside: Inside) -> Tensor:
        lengths = inside.lengths
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        q, k = (h.new_zeros(*mask.shape, 4) for _ in range(2))
        q[mask], k[mask] = self.q(h), self.k(h)
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)[mask]
        worth, who = scores.topk(3, 1)
        near = h[(lengths.cumsum(0) - lengths)[inside.segment][:, None] + who]
        sent = torch.relu(self.edge(torch.cat([near, near - h[:, None]], 2)))
        heard = (worth.softmax(1)[:, :, None] * sent).sum(1)
        return torch.tanh(self.out(torch.cat([h, heard], 1)))


def test_the_best_by_a_score_are_listened_to() -> None:
    torch.manual_seed(0)
    lengths = [3], [6, 4, 8], [3 + k * 7 % 30 for k in range(30)]
    check_inside(Listens(), *lengths, width=H)


def test_where_there_are_fewer_the_rest_is_none() -> None:
    """The longest bundle alone need have so many; torch takes rows of other bundles then."""
    torch.manual_seed(0)
    check_inside(Listens(), [1, 4, 2, 3, 1, 9], width=H)


def over_the_least_of_the_best(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    score = scores(s, x).masked_fill(~mask[:, None], -math.inf)
    least = score.topk(2, -1).values[..., -1:]
    share = score.masked_fill(score < least, -1e9).softmax(2)
    return share @ s.v(x) + score.amax(2, keepdim=True).tanh()


def parts(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    """Along axes that are not the first that a row has, of members and of pairs."""
    q, v = (y.view(*x.shape[:2], HEADS, -1) for y in (s.q(x), s.v(x)))
    a, b, c = q.unbind(3)
    y = torch.cat([torch.stack([a, b * c], 3), q.tanh()[..., 1:] * v[..., :2]], 3).flatten(2)
    both = (mask[:, None] & mask[..., None])[..., None, None]
    e = torch.stack([y[:, :, None] - y[:, None], y[:, :, None] * y[:, None]], -1) * both
    return e[..., 0].sum(2).sin() + e[..., 1].tanh().sum(1)


@pytest.mark.parametrize("way", [over_the_least_of_the_best, parts])
def test_parts_and_the_most_of_pairs(way: Meeting) -> None:
    lengths = [2], [3, 2, 4], [2 + k * 7 % 30 for k in range(30)]
    check_inside(made(way), *lengths, width=H)


# What is not.


def unmasked(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    return scores(s, x).softmax(2) @ s.v(x)


def twice(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    share = scores(s, x) * (mask[:, None] & mask[..., None])
    return share @ share @ s.v(x)


def a_wide_band(s: Meets, x: Tensor, mask: Tensor) -> Tensor:
    """In bundles as short as those of a trace it is all."""
    near = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(9).clone()
    return scores(s, x).masked_fill(~(near & mask[:, None]), -1e9).softmax(2) @ s.v(x)


@pytest.mark.parametrize(
    ("way", "why"),
    [(unmasked, "rows of several sizes give other outputs"), (twice, "a product of matrices")],
)
def test_what_has_no_program_says_why(way: Meeting, why: str) -> None:
    with pytest.raises(GraphError, match=why):
        derive_inside(made(way), (torch.randn(5, H),), {}, pools=False)


def test_a_band_that_a_trace_does_not_see_is_told_or_refused() -> None:
    check_inside(made(a_wide_band), [30, 1, 12], width=H)


# How.


def program_of(module: Meets) -> RaggedProgram:
    cut = derive_inside(module, (torch.randn(5, H),), {}, pools=False)
    return RaggedProgram(cut, Operands(module))


def call_of(x: Tensor, lengths: Sequence[int]) -> RaggedCall:
    at = torch.tensor(lengths)
    inside = Inside(at, torch.arange(len(at)).repeat_interleave(at), {})
    return call_of_inside((x,), inside, {})


@pytest.mark.parametrize("way", [plain, several_heads, relations])
def test_pairs_are_not_kept(way: Meeting) -> None:
    """So what is kept grows with the members, and not with their square."""
    program, sizes = program_of(made(way)), []
    for lengths in ([2] * 20, [40]):
        x = torch.randn(40, H)
        _, kept = program.forward(call_of(x, lengths))
        sizes.append(kept.residuals.numel())
    of_bundles = sum(b.entries for b in program.cut.residuals if b.kind == BUNDLES)
    assert sizes[0] - sizes[1] == 19 * of_bundles
    assert all(b.kind != PAIRS for b in program.cut.residuals)


@pytest.mark.parametrize("way", [plain, by_distance, relations])
def test_updates_are_told_apart(way: Meeting) -> None:
    """What weights learn of pairs too is of the update of their bundle."""
    module, lengths = made(way), [2, 3, 1, 4]
    program, weights = program_of(module), list(module.parameters())
    x, dy = torch.randn(10, H), torch.randn(10, 4 if way is relations else H)
    wanted = []
    for few in (slice(0, 5), slice(5, 10)):
        into = GradientSum(weights)
        _, kept = program.forward(call_of(x[few], lengths[:2] if few.start == 0 else lengths[2:]))
        program.backward(kept, (dy[few],), into)
        wanted.append([into.take(p) for p in weights])
    into = GradientSum(weights)
    _, kept = program.forward(call_of(x, lengths))
    with into.of_updates(np.array([0] * 5 + [1] * 5)):
        program.backward(kept, (dy,), into)
    for each in wanted:
        for p, d in zip(weights, each, strict=True):
            found = into.take(p)
            assert (found is None) == (d is None)
            if found is not None and d is not None:
                assert_close(found, d)
        into.next_update()


def test_pairs_of_bundles_of_which_nobody_says_where_they_end_are_refused() -> None:
    rows = torch.zeros(9)
    steps = [RaggedStep(Way.PLAIN, Step(Op.ZERO, 1, (At(0, 0, 1),)), PAIRS)]
    ragged = RaggedSteps(steps, [0], [PAIRS], torch.float64, -1)
    with pytest.raises(ProtocolError, match="do not add up"):
        ragged.run([1, 3, 0, 0, 9], [rows.data_ptr()])
