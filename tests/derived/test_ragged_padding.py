"""Modules that pad their bundles by themselves have programs, in which nothing is padded; beside
torch in float64, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import geartrain as gt
from geartrain.derived.ragged.derivation import derive_inside, derive_memory
from geartrain.errors import GraphError
from tests.rigs.ragged import check_inside

H = 6
LENGTHS = [[2, 3, 1], [1], [5], [1 + k * 7 % 30 for k in range(60)]]
Pad = Callable[[Tensor, gt.Inside], tuple[Tensor, Tensor]]
Way = Callable[["Padded", Tensor, Tensor, gt.Inside], Tensor]


pytestmark = pytest.mark.usefixtures("needs_kernels", "in_float64")


# How to pad.


def _mask(inside: gt.Inside, most: int) -> Tensor:
    return torch.arange(most)[None] < inside.lengths[:, None]


def _place(x: Tensor, inside: gt.Inside) -> Tensor:
    first = inside.lengths.cumsum(0) - inside.lengths
    return torch.arange(len(x)) - first[inside.segment]


def written(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    most = int(inside.lengths.max())
    out = x.new_zeros(len(inside.lengths), most, x.shape[1])
    out[inside.segment, _place(x, inside)] = x
    return out, _mask(inside, most)


def by_item(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    most = inside.lengths.amax().item()
    out = torch.zeros(len(inside.lengths), most, x.shape[1])
    return out.index_put((inside.segment, _place(x, inside)), x), _mask(inside, most)


def by_mask(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    mask = _mask(inside, int(inside.lengths.max()))
    out = x.new_full((*mask.shape, x.shape[1]), -7.0)
    out[mask] = x
    return out * mask[..., None], mask


def scattered(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    mask = _mask(inside, int(inside.lengths.max()))
    return x.new_zeros(*mask.shape, x.shape[1]).masked_scatter(mask[..., None], x), mask


def gathered(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    lengths = inside.lengths
    each = torch.arange(int(lengths.max()))
    at = (lengths.cumsum(0) - lengths)[:, None] + torch.minimum(each[None], lengths[:, None] - 1)
    mask = each < lengths[:, None]
    return x[at] * mask[..., None], mask


def flat(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    n, most = len(inside.lengths), int(inside.lengths.max())
    at = inside.segment * most + _place(x, inside)
    out = x.new_zeros(n * most, x.shape[1]).index_add(0, at, x)
    return out.view(n, most, x.shape[1]), _mask(inside, most)


def in_a_list(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    out = pad_sequence(x.split(inside.lengths.tolist()), batch_first=True)
    return out, _mask(inside, out.shape[1])


def one_list_turned(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
    parts = torch.split(x, inside.lengths.tolist())
    out = pad_sequence(parts, padding_value=3.0).transpose(0, 1)
    mask = _mask(inside, out.shape[1])
    return out.masked_fill(~mask[..., None], 0.0), mask


PADS: Mapping[str, Pad] = {
    f.__name__: f
    for f in (written, by_item, by_mask, scattered, gathered, flat, in_a_list, one_list_turned)
}


# What to do with it.


class Padded(nn.Module):
    """Pads its bundles, and does something with them."""

    def __init__(self, pad: Pad, way: Way) -> None:
        super().__init__()
        self.pad, self.way = pad, way
        self.l, self.places, self.query = nn.Linear(H, H), nn.Embedding(100, H), nn.Linear(H, 1)
        self.table = nn.Parameter(torch.randn(100, H))

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        padded, mask = self.pad(self.l(x), inside)
        return self.way(self, padded, mask, inside)


def mean(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return torch.tanh(x).sum(1) / inside.lengths[:, None]


def attention(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    share = s.query(x)[..., 0].masked_fill(~mask, -1e9).softmax(1)
    return (share[..., None] * s.l(x)).sum(1)


def mask_as_numbers(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    score = s.query(x)[..., 0] + (1 - mask.to(x.dtype)) * -1e9
    share = score.masked_fill(mask == 0, -1e9).softmax(1)
    return (share[..., None] * s.l(x)).sum(1)


def most(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return x.masked_fill(~mask[..., None], -1e9).amax(1)


def places(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    x = x + s.places(torch.arange(x.shape[1]))[None]
    return (torch.tanh(s.l(x)) * mask[..., None]).sum(1)


def made_of_places(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    x = x * torch.tanh(s.l(s.places(torch.arange(x.shape[1]))))
    return functional.gelu(s.l(x)).mul(mask[..., None]).sum(1)


def a_table_of_places(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    x = (x + s.table[: x.shape[1]]).sigmoid() * mask.unsqueeze(2)
    return x.sum(1)


def one_by_one(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return torch.tanh(s.l(x + x.sum(1, keepdim=True)))[mask]


POOLS: Mapping[str, Way] = {
    f.__name__: f
    for f in (mean, attention, mask_as_numbers, most, places, made_of_places, a_table_of_places)
}


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}")
@pytest.mark.parametrize("pad", PADS)
def test_ways_to_pad(pad: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    check_inside(Padded(PADS[pad], attention), lengths, width=H, pools=True)


@pytest.mark.parametrize("lengths", LENGTHS[1:], ids=lambda x: f"{len(x)}")
@pytest.mark.parametrize("way", POOLS)
def test_what_is_done_with_what_is_padded(way: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    check_inside(Padded(written, POOLS[way]), lengths, width=H, pools=True)


@pytest.mark.parametrize("pad", PADS)
def test_members_may_be_taken_out_again(pad: str) -> None:
    torch.manual_seed(0)
    check_inside(Padded(PADS[pad], one_by_one), [2, 3, 1, 7], width=H)


# What is refused.


def minds_the_padding(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return s.l(x).sum(1)


def few_at_most(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return x[:, :50].sum(1)


def another_way(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return x.sum(1) * (2.0 if x.shape[1] > 200 else 1.0)


def last_ones(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return x[:, -9:].sum(1)


def from_the_end(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    at = torch.arange(x.shape[1]).flip(0)
    return ((x + s.places(at)) * mask[..., None]).sum(1)


def of_other_lengths(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return x.sum(1) * int(inside.lengths.min())


def first_length(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return x.sum(1) * int(inside.lengths[0])


def one_after_another(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
    return torch.stack([y.sum(0) for y in x[mask].split(inside.lengths.tolist())])


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (minds_the_padding, "several sizes"),
        (few_at_most, "several sizes"),
        (another_way, "several sizes"),
        (last_ones, "so many rows at most"),
        (from_the_end, "embedding"),
        (of_other_lengths, "of lengths only the longest may be asked for"),
        (first_length, "of lengths only the longest may be asked for"),
        (one_after_another, "otherwise for other numbers of rows"),
    ],
)
def test_what_is_no_program_says_why(way: Way, why: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(GraphError, match=why):
        derive_inside(Padded(written, way), (torch.randn(5, H),), {}, pools=True)


def test_members_in_another_order_are_not_the_members() -> None:
    def turned(x: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
        padded, mask = written(x, inside)
        at = (inside.lengths - 1)[inside.segment] - _place(x, inside)
        return padded[inside.segment, at][None].expand(1, -1, -1)[0], mask

    def itself(s: Padded, x: Tensor, mask: Tensor, inside: gt.Inside) -> Tensor:
        return torch.tanh(x)

    with pytest.raises(GraphError, match="rows are taken by numbers that are computed"):
        derive_inside(Padded(turned, itself), (torch.randn(5, H),), {}, pools=False)


class Few(nn.Module):
    """Of a memory a few members at most."""

    def __init__(self, few: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.few = few

    def forward(self, h: Tensor, m: Tensor, mask: Tensor) -> Tensor:
        return h + self.few(m * mask[..., None]).sum(1)


@pytest.mark.parametrize(
    ("few", "why"),
    [
        (lambda m: m[:, :50], "several sizes"),
        (lambda m: m[:, -50:], "so many rows at most"),
        (lambda m: m * (m.shape[1] > 64), "several sizes"),
    ],
)
def test_a_memory_of_which_few_are_read_at_most_has_no_program(
    few: Callable[[Tensor], Tensor], why: str
) -> None:
    with pytest.raises(GraphError, match=why):
        derive_memory(Few(few), (torch.randn(2, H),), (torch.randn(5, H),), 0)


def test_all_of_a_memory_may_be_cut() -> None:
    for few in (lambda m: m[:, : m.shape[1]], lambda m: m.narrow(1, 0, m.shape[1])):
        assert derive_memory(Few(few), (torch.randn(2, H),), (torch.randn(5, H),), 0)
