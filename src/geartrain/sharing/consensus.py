"""The model that stands for all copies of it: the mean of their weights and buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from geartrain.parts.part import PartState
from geartrain.sharing.member import Member

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def mean_weights(members: Sequence[Member]) -> list[Tensor]:
    """Of one, its weights to the bit."""
    return [_mean(column) for column in zip(*(m.weights() for m in members), strict=True)]


@torch.no_grad()
def average_buffers(parts: Sequence[PartState], into: PartState) -> None:
    """Buffers of numbers become the mean, counters the first one's."""
    for target, *given in zip(
        into.module.buffers(), *(p.module.buffers() for p in parts), strict=True
    ):
        target.copy_(_mean(given) if target.dtype in _FLOATS else given[0])


@torch.no_grad()
def distance_from_mean(parts: Iterable[Sequence[Member]]) -> float:
    """Root mean square distance of copies from their mean, all parts together.

    Args:
        parts: Of each the copies.
    """
    total, n = 0.0, 1
    for members in parts:
        n = max(n, len(members))
        if len(members) > 1:
            for column in zip(*(m.weights() for m in members), strict=True):
                mean = torch.stack(list(column)).double().mean(0)
                total += sum(float((x.double() - mean).square().sum()) for x in column)
    return math.sqrt(total / n)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Of equal ones, that one to the bit."""
    first, *others = tensors
    if all(torch.equal(first, other) for other in others):
        return first.clone()
    total = first.clone()
    for other in others:
        total.add_(other)
    return total.div_(len(tensors))
