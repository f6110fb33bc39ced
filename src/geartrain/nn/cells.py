"""Cells for trees and sequences: ordinary modules, whose row kernels are derived.

    TreeLSTMLeaf     x, or a word id              ─► h, c
    TreeLSTMBranch   h (n, 2, H), c (n, 2, H)     ─► h, c      two children, left before right
    TokenRNN         h, token id                  ─► h'

Gates lie side by side in one weight, the sigmoid ones first and the tanh one last, so that one
matrix product makes them all.
"""

from __future__ import annotations

import math
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geartrain.graph.admission import Brought, require_range


@final
class TreeLSTMLeaf(nn.Module):
    """The Tree-LSTM cell of a leaf: no children, hence no forget gate.

        i, o, u = σ σ tanh (W x + b)      c = i u      h = o tanh(c)

    Input: x float ``(n, embedding_dim)``; with a vocabulary, ids int64 ``(n,)``, and x is the row
    of ``embedding.weight``. Outputs: h and c, ``(n, hidden)``.

    Args:
        embedding_dim: Width of x.
        hidden: Width H of h and c.
        vocabulary: Number of words; None if x comes from outside.
        sparse: Whether the embedding's gradient is a sparse tensor of the rows that were used.

    Weight ``(3H, embedding_dim)`` and bias ``(3H,)`` have their rows in the order i, o, u.

    Source: Tai, Socher, Manning 2015, arXiv:1503.00075.
    """

    def __init__(
        self,
        embedding_dim: int,
        hidden: int,
        *,
        vocabulary: int | None = None,
        sparse: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = (
            None
            if vocabulary is None
            else nn.Embedding(vocabulary, embedding_dim, sparse=sparse, device=device, dtype=dtype)
        )
        self.weight = nn.Parameter(
            torch.empty(3 * hidden, embedding_dim, device=device, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.zeros(3 * hidden, device=device, dtype=dtype))
        _spread(self.weight, embedding_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.embedding is not None:
            x = self.embedding(x)
        gates = F.linear(x, self.weight, self.bias)
        i, o = gates[:, : 2 * self.hidden].sigmoid().chunk(2, 1)
        c = i * gates[:, 2 * self.hidden :].tanh()
        return o * c.tanh(), c

    def check_instances(self, brought: Brought) -> None:
        """Words of the vocabulary.

        Raises:
            DataError: One of the instances brings another.
        """
        if self.embedding is not None and brought.payload is not None:
            require_range("word", brought.payload[0], self.embedding.num_embeddings)


@final
class TreeLSTMBranch(nn.Module):
    """The Tree-LSTM cell of an inner vertex with two children.

        i, f_l, f_r, o, u = σ σ σ σ tanh (W [h_l, h_r] + b)
        c = i u + f_l c_l + f_r c_r       h = o tanh(c)

    Inputs: h and c of the children, ``(n, 2, hidden)``, left before right. Outputs: h and c,
    ``(n, hidden)``.

    Args:
        hidden: Width H of h and c.
        forget_bias: What the biases of both forget gates start at; the others start at 0.

    Weight ``(5H, 2H)`` and bias ``(5H,)`` have their rows in the order i, f_l, f_r, o, u.

    Source: Tai, Socher, Manning 2015, arXiv:1503.00075 (N-ary, N = 2).
    """

    def __init__(
        self,
        hidden: int,
        *,
        forget_bias: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight = nn.Parameter(torch.empty(5 * hidden, 2 * hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(5 * hidden, device=device, dtype=dtype))
        _spread(self.weight, 2 * hidden)
        with torch.no_grad():
            self.bias[hidden : 3 * hidden] = forget_bias

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = F.linear(h.flatten(1), self.weight, self.bias)
        i, left, right, o = gates[:, : 4 * self.hidden].sigmoid().chunk(4, 1)
        u = gates[:, 4 * self.hidden :].tanh()
        c_new = i * u + left * c[:, 0] + right * c[:, 1]
        return o * c_new.tanh(), c_new


@final
class TokenRNN(nn.Module):
    """A plain recurrent cell that reads one token a step.

        h' = φ(E[token] + W h + b)            the embedding is already what the map would make of it
        h' = φ(U E[token] + W h + b)          with ``embedding_dim``: a table and an input matrix

    Folded, the first form can be all that the second can when ``embedding_dim`` is at least
    ``hidden`` or the number of tokens, with one matrix product less each way.

    Inputs: h float ``(n, hidden)``, token int64 ``(n,)``. Output: h' ``(n, hidden)``.

    Args:
        tokens: Number of tokens.
        hidden: Width of h.
        nonlinearity: φ.
        embedding_dim: Width of E; None folds U into E.
        sparse: Whether the embedding's gradient is a sparse tensor of the rows that were used.

    ``weight`` is W ``(hidden, hidden)``, ``input_weight`` U ``(hidden, embedding_dim)`` or None.
    """

    def __init__(
        self,
        tokens: int,
        hidden: int,
        nonlinearity: Literal["relu", "tanh"] = "relu",
        *,
        embedding_dim: int | None = None,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if nonlinearity not in ("relu", "tanh"):
            raise ValueError(
                f"TokenRNN: nonlinearity is {nonlinearity!r}; expected 'relu' or 'tanh'"
            )
        self.nonlinearity = nonlinearity
        self.embedding = nn.Embedding(
            tokens, embedding_dim or hidden, sparse=sparse, device=device, dtype=dtype
        )
        self.weight = nn.Parameter(torch.empty(hidden, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype))
        _spread(self.weight, hidden)
        self.input_weight: nn.Parameter | None = None
        if embedding_dim is None:
            _spread(self.embedding.weight, hidden)
        else:
            shape = (hidden, embedding_dim)
            self.input_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            _spread(self.input_weight, embedding_dim)

    def forward(self, h: Tensor, token: Tensor) -> Tensor:
        read: Tensor = self.embedding(token)
        if self.input_weight is not None:
            read = F.linear(read, self.input_weight)
        total = read + F.linear(h, self.weight, self.bias)
        return total.relu() if self.nonlinearity == "relu" else total.tanh()

    def check_instances(self, brought: Brought) -> None:
        """Tokens of the table; they come as a column, or as the second of the payload.

        Raises:
            DataError: One of the instances brings another.
        """
        read: list[Any] = [*(brought.payload or ())[1:], *brought.columns.values()]
        if read:
            require_range("token", read[0], self.embedding.num_embeddings)


def _spread(weight: Tensor, fan_in: int) -> None:
    """Uniform within 1/√fan_in, as torch's own linear maps and cells start."""
    nn.init.uniform_(weight, -1.0 / math.sqrt(fan_in), 1.0 / math.sqrt(fan_in))
