"""Attention of rows to a memory that is held: ``rows.attend(held, DotAttention())``.

    dot        s = q · k / √d          additive    s = v · tanh(W q + k)
    a = softmax(s) over the memory     context = Σ a value

A memory of two tensors has keys and values; one of one tensor is both. What the keys want of
weights of their own is a node before ``hold``: so it is computed once, not at every step. Residuals
of dot products have a row for each row, whatever the lengths: q, the context, and log Σ exp(s),
from which the weights are made again.

Source: Bahdanau et al. 2015, arXiv:1409.0473; Luong et al. 2015, arXiv:1508.04025; weights made
again from the logarithm of their sum as in Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import Gradient, Payload
from geartrain.native.attention import attend_backward, attend_forward
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Recalled
from geartrain.nodes.memory import AbstractMemoryKernel


class DotAttention(nn.Module):
    """Read a memory by scaled dot products; no weights.

    Args:
        scale: Of the products; None: ``1 / √d``.
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, query: Tensor, keys: Tensor, *values_and_mask: Tensor) -> tuple[Tensor, ...]:
        """What was read, and the query: what a cell takes, ``nn.GRUCell(x, h)``.

        Args:
            query: ``(n, d)``.
            keys: ``(n, longest, d)``.
            values_and_mask: Values ``(n, longest, e)``, if the memory has some of their own, and
                the mask ``(n, longest)``.

        Returns:
            Context ``(n, e)``, zeros where there is nothing to read; and query.
        """
        *values, mask = values_and_mask
        scores = torch.bmm(keys, query.unsqueeze(2)).squeeze(2) * self.factor(query)
        return _read(scores, values[0] if values else keys, mask), query

    def factor(self, query: Tensor) -> float:
        """What products are multiplied by."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def memory_kernel(self) -> AbstractMemoryKernel:
        return DotKernel(self)


class AdditiveAttention(nn.Module):
    """Read a memory by a layer over query and key.

    Args:
        query: Width of the rows that read.
        keys: Width of the keys, which have been mapped already, before they were held.
    """

    def __init__(self, query: int, keys: int) -> None:
        super().__init__()
        self.map = nn.Linear(query, keys, bias=False)
        self.score = nn.Parameter(torch.empty(keys).uniform_(-(keys**-0.5), keys**-0.5))

    def forward(self, query: Tensor, keys: Tensor, *values_and_mask: Tensor) -> tuple[Tensor, ...]:
        """As for ``DotAttention``; keys ``(n, longest, keys)``.

        No kernel is written for it: the program that is derived of it takes less time.
        """
        *own, mask = values_and_mask
        if keys.dim() != 3:
            raise _several_queries()
        keys, values = _keys_and_values((keys, *own))
        scores = torch.tanh(keys + self.map(query).unsqueeze(1)) @ self.score
        return _read(scores, values, mask), query


@final
class DotKernel(AbstractMemoryKernel):
    """``DotAttention``; keeps query, context and the logarithm of the weights' sum."""

    derivable = True

    def __init__(self, module: DotAttention) -> None:
        self._module = module

    def forward(self, inputs: Payload, memory: Recalled) -> tuple[Payload, Payload]:
        (query,) = _taken(inputs)
        factor = self._module.factor(query)
        keys, values = _keys_and_values(memory.payload)
        query = query.contiguous()
        found = attend_forward(query, keys, values, memory.starts, memory.lengths, factor)
        if found is not None:
            return (found[0], query), (query, *found)
        tensors, mask = memory.padded()
        keys, values = _keys_and_values(tensors)
        scores = torch.bmm(keys, query.unsqueeze(2)).squeeze(2).mul_(factor)
        context, total = _weigh(scores, values, mask)
        return (context, query), (query, context, total)

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        memory: Recalled,
        into: GradientSum,
        *,
        wanted: bool = True,
    ) -> Gradient:
        (dc, dq), (query, context, total) = gradients, kept
        if dc is None:
            return (dq,)
        factor = self._module.factor(query)
        keys, values = _keys_and_values(memory.payload)
        sums = _both(memory.sums) if memory.wanted else None
        ranges = memory.starts, memory.lengths
        found = attend_backward(dc, kept, keys, values, *ranges, factor, sums)
        if found is not None:
            memory.touch()
            return (found if dq is None else found.add_(dq),)
        tensors, mask = memory.padded()
        keys, values = _keys_and_values(tensors)
        scores = torch.bmm(keys, query.unsqueeze(2)).squeeze(2).mul_(factor)
        weights, ds = _unweigh(scores, values, mask, dc, context, total)
        ds = ds.mul_(factor)
        if memory.wanted:
            dk, dv = ds.unsqueeze(2) * query.unsqueeze(1), weights.unsqueeze(2) * dc.unsqueeze(1)
            memory.add_padded((dk.add_(dv),) if len(tensors) == 1 else (dk, dv))
        read = torch.bmm(ds.unsqueeze(1), keys).squeeze(1)
        return (read if dq is None else read.add_(dq),)


def _taken(inputs: Payload) -> Payload:
    if len(inputs) != 1:
        raise _several_queries()
    return inputs


def _several_queries() -> GraphError:
    return GraphError(
        "attention reads by one query, but rows of several tensors come; choose it: "
        "attend(..., take=0), or keep the others in a module of your own"
    )


def _keys_and_values(tensors: Payload) -> tuple[Tensor, Tensor]:
    if len(tensors) > 2:
        raise GraphError(
            f"attention reads keys and values, but {len(tensors)} tensors are held; hold two, or "
            "one that is both"
        )
    return tensors[0], tensors[-1]


def _both(sums: Gradient) -> tuple[Tensor, Tensor] | None:
    """Where the gradients of keys and values are added up."""
    keys, values = sums[0], sums[-1]
    return None if keys is None or values is None else (keys, values)


def _read(scores: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The values by the softmax of their scores; zeros where there are none."""
    lowest = torch.finfo(scores.dtype).min
    weights = torch.softmax(scores.masked_fill(~mask, lowest), 1) * mask
    return torch.bmm(weights.unsqueeze(1), values).squeeze(1)


def _weigh(scores: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the logarithm of the sum ``(n, 1)``; writes into the scores."""
    scores = scores.masked_fill_(~mask, -torch.inf)
    total = scores.logsumexp(1, keepdim=True)
    total = total.masked_fill_(total == -torch.inf, 0.0)  # nothing is read: all weights are 0
    weights = scores.sub_(total).exp_()
    return torch.bmm(weights.unsqueeze(1), values).squeeze(1), total


def _unweigh(
    scores: Tensor, values: Tensor, mask: Tensor, dc: Tensor, context: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights, and the gradient of the scores; writes into the scores."""
    weights = scores.masked_fill_(~mask, -torch.inf).sub_(total).exp_()
    da = torch.bmm(values, dc.unsqueeze(2)).squeeze(2)
    return weights, da.sub_((dc * context).sum(1, keepdim=True)).mul_(weights)
