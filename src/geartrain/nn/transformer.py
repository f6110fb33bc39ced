"""Decoder-only Transformer, as a list of blocks that can be cut anywhere.

    tokens (B, T)
      embedding  vector of the token + vector of its place      (B, T, d)
      block      x + attention(norm(x)), to earlier places only
                 x + MLP(norm(x))                               (B, T, d)
      readout    norm, linear map                               (B, T, tokens)

Source: Vaswani et al. 2017, arXiv:1706.03762; norms stand before what they feed, and weights are
drawn, as in Radford et al. 2019 (GPT-2), whose 0.02 is for 768 entries.
"""

from __future__ import annotations

import math
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.errors import DataError
from geartrain.graph.admission import Brought, require_range

SPREAD: Final = 0.02 * math.sqrt(768)  # of initial weights, times the root of the dimension
WIDER: Final = 4  # the middle of the MLP


@final
class TokenEmbedding(nn.Module):
    """A learned vector for every token, and one for every place.

    Args:
        tokens: Size of the vocabulary.
        dim: Of the vectors.
        length: Most places.
        dropout: Share of the entries that training leaves out.
    """

    def __init__(self, tokens: int, dim: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, dim)
        self.place = nn.Embedding(length, dim)
        self.dropout = nn.Dropout(dropout)

    def check_instances(self, brought: Brought) -> None:
        """Tokens of the vocabulary, in no more places than there are.

        Raises:
            DataError: One of the instances brings others, or more.
        """
        if brought.payload is not None:
            x, places = brought.payload[0], self.place.num_embeddings
            require_range("token", x, self.token.num_embeddings)
            if x.ndim > 1 and x.shape[1] > places:
                raise DataError(f"{x.shape[1]} tokens in a row; there are {places} places")

    def forward(self, x: Tensor) -> Tensor:
        """int64 ``(B, T)``, T up to ``length``, to ``(B, T, dim)``."""
        places = torch.arange(x.shape[1], device=x.device)
        embedded: Tensor = self.dropout(self.token(x) + self.place(places))
        return embedded


@final
class DecoderBlock(nn.Module):
    """Causal self-attention and an MLP, each beside a shortcut.

    Args:
        dim: Of the vectors; a multiple of ``heads``.
        heads: Of the attention.
        dropout: Share of the entries that training leaves out, in both branches and among the
            places attended to.

    Raises:
        ValueError: ``dim`` is no multiple of ``heads``.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(
                f"DecoderBlock({dim}, {heads}): every head gets as many entries; give a dim that "
                "is a multiple of heads"
            )
        self.heads, self.rate = heads, dropout
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, WIDER * dim)
        self.down = nn.Linear(WIDER * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, dim)`` to the same; place t sees places 0..t."""
        x = x + self.dropout(self._attended(self.norm1(x)))
        y: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))
        return x + y

    def _attended(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        mixed: Tensor = self.mix(seen.transpose(1, 2).reshape(b, t, d))
        return mixed


@final
class TokenReadout(nn.Module):
    """Scores of the next token at every place.

    Args:
        dim: Of the vectors that come, ``(B, T, dim)``.
        tokens: Size of the vocabulary.
    """

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, dim)`` to ``(B, T, tokens)``."""
        scores: Tensor = self.linear(self.norm(x))
        return scores


def decoder(
    tokens: int,
    *,
    dim: int = 64,
    blocks: int = 8,
    heads: int = 4,
    length: int = 128,
    dropout: float = 0.0,
    tied: bool = False,
) -> nn.Sequential:
    """Embedding, blocks, readout, in a row: ``blocks + 2`` modules.

    Args:
        tokens: Size of the vocabulary.
        dim: Of the vectors.
        blocks: How many.
        heads: Of the attention.
        length: Most places.
        dropout: Share of the entries that training leaves out.
        tied: The readout has the weights of the embedding; both then belong to one part.

    Raises:
        ValueError: ``dim`` is no multiple of ``heads``, or a number below 1.
    """
    if min(tokens, dim, blocks, heads, length) < 1:
        raise ValueError(
            f"decoder({tokens}, dim={dim}, blocks={blocks}, heads={heads}, length={length}): give "
            "1 or more for each"
        )
    first = TokenEmbedding(tokens, dim, length, dropout)
    last = TokenReadout(dim, tokens)
    if tied:
        last.linear.weight = first.token.weight
    net = nn.Sequential(first, *(DecoderBlock(dim, heads, dropout) for _ in range(blocks)), last)
    spread = SPREAD / math.sqrt(dim)
    for module in net.modules():
        _draw(module, spread)
    for block in net:
        if isinstance(block, DecoderBlock):
            for linear in (block.mix, block.down):  # added to the shortcut, 2 * blocks times
                _draw(linear, spread / math.sqrt(2 * blocks))
    return net


def _draw(module: nn.Module, spread: float) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=spread)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
