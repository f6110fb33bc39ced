"""Modules of users that look inside bundles: they pool them, answer them, or see none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import geartrain as gt

WIDTH = 4


class Weighs(nn.Module):
    """The mean of each bundle, weighed, by how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.value = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        n, to = len(inside.lengths), inside.segment
        weight = torch.exp(torch.tanh(self.weigh(h)))
        total = weight.new_zeros(n, 1).index_add(0, to, weight)
        value = h.new_zeros(n, WIDTH).index_add(0, to, weight * self.value(h))
        return torch.tanh(value / total) / inside.lengths[:, None]


class Asks(nn.Module):
    """The last member of each bundle asks all of them, by how far off they are."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.far = nn.Linear(WIDTH, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        ends, to = inside.lengths.cumsum(0), inside.segment
        place = torch.arange(len(h)) - (ends - inside.lengths)[to]
        last = h[ends - 1]
        weight = torch.tanh((self.query(last)[to] * h + self.far(place)).sum(1, keepdim=True))
        return torch.tanh(last + torch.zeros_like(last).index_add(0, to, weight * h))


class Mixes(nn.Module):
    """Each member, and the mean of its bundle, by how many there are; and something of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)

    def forward(self, h: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
        n, to = len(inside.lengths), inside.segment
        total = h.new_zeros(n, 2).index_add(0, to, h)
        return torch.tanh(self.map(h + (total / inside.lengths[:, None])[to])), h.square()


class Follows(nn.Module):
    """Each member, and the last one of its bundle, among all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        last = (inside.lengths.cumsum(0) - 1)[inside.segment]
        return torch.tanh(self.map(h + h[last]))


class Meets(nn.Module):
    """Members attend to one another, by two heads; the squares too."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.heads = nn.Linear(2, 2), nn.MultiheadAttention(2, 2, batch_first=True)

    def forward(self, h: Tensor, inside: gt.Inside) -> tuple[Tensor, Tensor]:
        mask = torch.arange(int(inside.lengths.max())) < inside.lengths[:, None]
        x = h.new_zeros(*mask.shape, 2)
        x[mask] = torch.sin(self.map(h))
        heard = self.heads(x, x, x, key_padding_mask=~mask, need_weights=False)[0][mask]
        return h + heard, heard.square()


class Apart(nn.Module):
    """Sees no bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.words = nn.Linear(4, 2), nn.Embedding(8, 2)

    def forward(self, h: Tensor, squares: Tensor, turn: Tensor) -> Tensor:
        return torch.tanh(self.map(torch.cat([h, squares], 1)) + self.words(turn))


class Sum(nn.Module):
    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        return h.new_zeros(len(inside.lengths), 2).index_add(0, inside.segment, h)


class Shifts(nn.Module):
    """The gradient of its input is that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2))

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        return h + self.shift
