"""Cells for trees and sequences: ordinary modules that also have a row kernel.

    TreeLSTMLeaf     x, or a word id              ─► h, c
    TreeLSTMBranch   h (n, 2, H), c (n, 2, H)     ─► h, c      two children, left before right
    TokenRNN         h, token id                  ─► h'

Gates lie side by side in one weight, the sigmoid ones first and the tanh one last, so that one
matrix product makes them all and two calls squash them.
"""

from __future__ import annotations

import math
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.graph.admission import Brought, require_range
from geartrain.native.cells import tree_backward, tree_forward
from geartrain.native.rows import take_whole
from geartrain.nn.elementwise import sigmoid_backward_, squash_into, tanh_backward_, tanh_into
from geartrain.nn.recurrent import cell_gradient, hidden_gradient, squash_hidden_
from geartrain.nodes.casts import in_bf16
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered, kernel_of
from geartrain.nodes.products import affine, matching, times, whole_rows


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

    def row_kernel(self) -> AbstractKernel | None:
        """Keeps x (and the ids) and ``(n, 4, H)``: i, o, u, tanh(c)."""
        if self.embedding is None:
            return _LeafKernel(self, None)
        table = kernel_of(self.embedding)
        return None if table is None else _LeafKernel(self, table)


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

    def row_kernel(self) -> AbstractKernel:
        """Keeps h, c and ``(n, 6, H)``: i, f_l, f_r, o, u, tanh(c)."""
        return _BranchKernel(self)


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

    def row_kernel(self) -> AbstractKernel | None:
        """Keeps h, token and h'; with an input matrix also E[token]."""
        table = kernel_of(self.embedding)
        return None if table is None else _TokenKernel(self, table)


@final
class _LeafKernel(AbstractKernel):
    looks_up = True
    room_for = 1

    def __init__(
        self,
        module: TreeLSTMLeaf,
        table: AbstractKernel | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._module, self._table, self._dtype = module, table, dtype
        self.residuals = 2 if table is None else 3

    def for_bf16(self) -> AbstractKernel:
        table = None if self._table is None else in_bf16(self._table)
        return _LeafKernel(self._module, table, torch.bfloat16)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        module, width = self._module, self._module.hidden
        kept = room
        if kept is None:
            kept = module.weight.new_empty((inputs[0].shape[0], 4, width), dtype=self._dtype)
        ids: Payload = ()
        if self._table is not None:
            inputs, ids = self._table.forward(inputs)
        (x,) = inputs
        made = affine(x, module.weight, module.bias)
        if (outputs := tree_forward(made, None, kept)) is not None:
            return outputs, (x, kept, *ids)
        squash_into(made, 2 * width, kept.view(-1, 4 * width)[:, : 3 * width])
        i, o, u, t = kept.unbind(1)
        c = i * u
        tanh_into(c, t)
        return (o * t, c), (x, kept, *ids)

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        (dh, dc), (x, gates, *ids) = gradients, kept
        if dh is None and dc is None:
            return (None,)
        if rows is not None:
            found = tree_backward(dh, dc, gates, None, rows, whole_rows(rows.size))
            if found is not None:
                d_gates, _, total = found
                module = self._module
                _add_whole(module.weight, module.bias, d_gates, total, x, rows, into)
                return self._below(d_gates, gathered(tuple(ids), rows), into, rows.size)
        return self._backward(dh, dc, gathered(kept, rows), into)

    def _backward(
        self, dh: Tensor | None, dc: Tensor | None, residuals: Payload, into: GradientSum
    ) -> Gradient:
        """In torch."""
        x, kept, *ids = residuals
        module, width = self._module, self._module.hidden
        i, o, u, t = kept.unbind(1)
        d = kept.new_empty((kept.shape[0], 3, width))
        d_i, d_o, d_u = d.unbind(1)
        dc = cell_gradient(dh, dc, o, t, d_o)
        torch.mul(dc, u, out=d_i)
        torch.mul(dc, i, out=d_u)
        sigmoid_backward_(d[:, :2], kept[:, :2])
        tanh_backward_(d_u, u)
        d_gates = d.view(-1, 3 * width)
        _add_affine(module.weight, module.bias, d_gates, x, into)
        return self._below(d_gates, tuple(ids), into)

    def _below(
        self, d_gates: Tensor, ids: Payload, into: GradientSum, n: int | None = None
    ) -> Gradient:
        """What the first n rows of the gradient at the gates mean for x, or for its table."""
        module = self._module
        if self._table is None:
            return (times(d_gates, module.weight)[:n],)
        if _table_learns(module.embedding):
            self._table.backward((times(d_gates, module.weight)[:n],), ids, None, into)
        return (None,)


@final
class _BranchKernel(AbstractKernel):
    residuals = 3
    looks_up = True
    room_for = 2

    def __init__(self, module: TreeLSTMBranch) -> None:
        self._module = module

    def for_bf16(self) -> AbstractKernel:
        return self

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        module, width = self._module, self._module.hidden
        h, c = inputs
        kept = h.new_empty((h.shape[0], 6, width)) if room is None else room
        made = affine(h.flatten(1), module.weight, module.bias)
        if (outputs := tree_forward(made, c, kept)) is not None:
            return outputs, (h, c, kept)
        squash_into(made, 4 * width, kept.view(-1, 6 * width)[:, : 5 * width])
        i, left, right, o, u, t = kept.unbind(1)
        c_left, c_right = c.unbind(1)
        c_new = (i * u).addcmul_(left, c_left).addcmul_(right, c_right)
        tanh_into(c_new, t)
        return (o * t, c_new), (h, c, kept)

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        (dh, dc), (h, c, gates) = gradients, kept
        if dh is None and dc is None:
            return None, None
        if rows is not None:
            found = tree_backward(dh, dc, gates, c, rows, whole_rows(rows.size))
            if found is not None:
                d_gates, d_c, total = found
                module = self._module
                _add_whole(module.weight, module.bias, d_gates, total, h.flatten(1), rows, into)
                d_h = times(d_gates, module.weight)[: rows.size]
                return d_h.view(-1, 2, module.hidden), d_c
        return self._backward(dh, dc, gathered(kept, rows), into)

    def _backward(
        self, dh: Tensor | None, dc: Tensor | None, residuals: Payload, into: GradientSum
    ) -> Gradient:
        """In torch."""
        h, c, kept = residuals
        module, width = self._module, self._module.hidden
        i, _, _, o, u, t = kept.unbind(1)
        d = kept.new_empty((kept.shape[0], 5, width))
        d_i, _, _, d_o, d_u = d.unbind(1)
        dc = cell_gradient(dh, dc, o, t, d_o)
        dc_twice = dc.unsqueeze(1)
        torch.mul(dc, u, out=d_i)
        torch.mul(dc_twice, c, out=d[:, 1:3])
        torch.mul(dc, i, out=d_u)
        sigmoid_backward_(d[:, :4], kept[:, :4])
        tanh_backward_(d_u, u)
        d_gates = d.view(-1, 5 * width)
        _add_affine(module.weight, module.bias, d_gates, h.flatten(1), into)
        d_h = times(d_gates, module.weight).view(-1, 2, width)
        return d_h, dc_twice * kept[:, 1:3]


@final
class _TokenKernel(AbstractKernel):
    looks_up = True

    def __init__(self, module: TokenRNN, table: AbstractKernel) -> None:
        self._module, self._table = module, table
        self.residuals = 3 if module.input_weight is None else 4

    def for_bf16(self) -> AbstractKernel:
        return _TokenKernel(self._module, in_bf16(self._table))

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        module = self._module
        h, token = inputs
        (read,), _ = self._table.forward((token,))
        y = affine(h, module.weight, module.bias)
        if module.input_weight is None:
            y.add_(read)
        else:
            y.addmm_(read, matching(module.input_weight, read).t())
        squash_hidden_(y, module.nonlinearity)
        return (y,), (h, token, y) if module.input_weight is None else (h, token, y, read)

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        (dy,), (h, token, y, *reads) = gradients, gathered(kept, rows)
        if dy is None:
            return None, None
        module = self._module
        d = hidden_gradient(dy, y, module.nonlinearity)
        _add_affine(module.weight, module.bias, d, h, into)
        learns = _table_learns(module.embedding)
        d_read = d
        if module.input_weight is not None:
            _add_affine(module.input_weight, None, d, reads[0], into)
            d_read = times(d, module.input_weight) if learns else d
        if learns:
            self._table.backward((d_read,), (token,), None, into)
        return times(d, module.weight), None


def _table_learns(embedding: nn.Embedding | None) -> bool:
    return embedding is not None and embedding.weight.requires_grad


def _add_affine(
    weight: nn.Parameter, bias: nn.Parameter | None, d: Tensor, x: Tensor, into: GradientSum
) -> None:
    if weight.requires_grad:
        into.add_product(weight, d, x)
    if bias is not None and bias.requires_grad:
        into.add_sum(bias, d)


def _add_whole(
    weight: nn.Parameter,
    bias: nn.Parameter,
    d: Tensor,
    total: Tensor,
    x: Tensor,
    rows: IntArray,
    into: GradientSum,
) -> None:
    """The gradients of an affine map whose inputs are rows of x.

    d may have rows of zeros after those; ``total`` is the sum of its rows.
    """
    if weight.requires_grad:
        into.add_product(weight, d, take_whole(x, rows, d.shape[0]))
    if bias.requires_grad:
        into.add(bias, total)


def _spread(weight: Tensor, fan_in: int) -> None:
    """Uniform within 1/√fan_in, as torch's own linear maps and cells start."""
    nn.init.uniform_(weight, -1.0 / math.sqrt(fan_in), 1.0 / math.sqrt(fan_in))
