"""Modules that read memories or look inside bundles, and have programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from geartrain.nodes.inside import Inside

H, WORDS = 6, 9


class Point(nn.Module):
    """Scores all of a memory, and takes one member of it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.score = nn.Linear(H, H), nn.Linear(H, 1, bias=False)
        self.new = nn.Linear(2 * H, H)

    def forward(
        self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        score = self.score(torch.tanh(keys + self.query(h)[:, None]))[..., 0]
        share = score.masked_fill(~mask, -1e9).log_softmax(1)
        where = right[:, None, None].expand(-1, 1, values.shape[2])
        both = torch.cat([h, values.gather(1, where)[:, 0]], 1)
        return torch.tanh(self.new(both)), -share.gather(1, right[:, None])


class Look(nn.Module):
    """Attention with a word of the row's own, by masks of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(WORDS, H), nn.Parameter(torch.rand(H))

    def forward(self, h: Tensor, keys: Tensor, mask: Tensor, word: Tensor) -> Tensor:
        score = (keys * (h * self.scale + self.words(word))[:, None]).sum(2)
        far = torch.full_like(score, -1e9)
        share = torch.where(mask, score, far).softmax(1)
        mean = (keys * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.sigmoid(h) * mean + (share[..., None] * keys).sum(1)


class Products(nn.Module):
    """The same products of rows and members, in three ways of writing them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.cell = nn.Linear(H, H), nn.GRUCell(H, H)

    def forward(self, h: Tensor, keys: Tensor, mask: Tensor, _: Tensor) -> Tensor:
        query = self.query(h)
        one = (keys @ query[:, :, None])[..., 0].masked_fill(~mask, -1e9).softmax(1)
        two = (query[:, None] @ keys.transpose(1, 2)).masked_fill(~mask[:, None], -1e9).softmax(2)
        three = torch.einsum("nld,nd->nl", keys, query).exp() * mask
        found = (two @ keys).squeeze(1) + torch.einsum("nl,nld->nd", three, keys)
        return self.cell(found / (1 + three.sum(1, keepdim=True)), (one[:, None] @ keys)[:, 0] + h)


class Pool(nn.Module):
    """The mean of each bundle, weighed, beside what its last member says."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.value = nn.Linear(H, 1), nn.Linear(H, H)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        n, to = len(inside.lengths), inside.segment
        weight = torch.exp(torch.tanh(self.weigh(x)))
        total = weight.new_zeros(n, 1).index_add(0, to, weight)
        value = x.new_zeros(n, H).index_add(0, to, weight * self.value(x))
        last = x.index_select(0, inside.lengths.cumsum(0) - 1)
        return value / total + last / inside.lengths[:, None]


class Mix(nn.Module):
    """Each row meets the mean of its bundle, and no other bundle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * H, H)
        self.calls = 0

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        n = len(inside.lengths)
        mean = x.new_zeros(n, H).index_add(0, inside.segment, x) / inside.lengths[:, None]
        return torch.tanh(self.inner(torch.cat([x, mean[inside.segment]], 1)))


class Meet(nn.Module):
    """Members of a bundle attend to one another, and weights meet their pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(H, H), nn.Linear(H, 1)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        most = int(inside.lengths.max()) if len(inside.lengths) else 0
        mask = torch.arange(most) < inside.lengths[:, None]
        padded = x.new_zeros(*mask.shape, H)
        padded[mask] = torch.tanh(x)
        query = self.query(padded)
        score = self.pair(torch.tanh(query[:, :, None] - padded[:, None]))[..., 0]
        score = score + query @ padded.transpose(1, 2)
        share = score.masked_fill(~mask[:, None], -torch.inf).softmax(2)
        return torch.sigmoid((share @ padded)[mask])


class Pass(nn.Module):
    """Messages along typed edges."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.gate = nn.Linear(H, 3 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        edges = inside.edges
        sent = self.send(x).view(-1, H)[edges["source"] * 3 + edges["bond"]]
        heard = torch.zeros_like(x).index_add(0, edges["target"], sent)
        gate = torch.sigmoid(self.gate(torch.cat([x, heard], 1)))
        return gate * x + (1 - gate) * heard
