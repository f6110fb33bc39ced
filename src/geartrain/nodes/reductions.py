"""What becomes of the members of a group: their sum, mean or max, and the way back."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from geartrain.device import moved, upload
from geartrain.frames.message import Gradient, IntArray
from geartrain.frames.precision import widened
from geartrain.native.rows import add

How: TypeAlias = Literal["stack", "sum", "mean", "max", "bundle"]


def _column(sizes: IntArray, like: Tensor) -> Tensor:
    return upload(sizes, like.device).to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def reduced(how: How, x: Tensor, sizes: IntArray) -> Tensor:
    """Members ``(sum of sizes, ...)`` made one a group: their sum, mean or max."""
    if (sizes == sizes[0]).all():
        x = x.reshape(sizes.size, int(sizes[0]), *x.shape[1:])
        if how == "max":
            return x.amax(1)
        return x.sum(1) if how == "sum" else x.mean(1)
    owner = np.repeat(np.arange(sizes.size), sizes)
    if how == "max":
        return _segment_max(x, upload(owner, x.device), sizes.size)
    wide = widened(x)
    total = add(wide.new_zeros((sizes.size, *x.shape[1:])), owner, wide, None)
    if how == "mean":
        total /= _column(sizes, total)
    return total.to(x.dtype)


def shared_out(how: How, gradient: Gradient, sizes: IntArray) -> Gradient:
    """What each member of a sum or mean gets of its group's gradient."""
    if how == "sum":
        return gradient
    return tuple(None if g is None else g / _column(sizes, g) for g in gradient)


def _segment_max(x: Tensor, segment: Tensor, n: int) -> Tensor:
    index = segment.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
    empty = x.new_full((n, *x.shape[1:]), -torch.inf)
    return empty.scatter_reduce_(0, index, x, "amax")


def share_of_max(x: Tensor, owner: IntArray, n: int, gradient: Tensor) -> Tensor:
    """The gradient to the members that hold the maximum; equal ones share it."""
    segment, gradient = upload(owner, x.device), moved(gradient, x.device)
    holds = (x == _segment_max(x, segment, n).index_select(0, segment)).to(gradient.dtype)
    shares = holds.new_zeros((n, *x.shape[1:])).index_add_(0, segment, holds)
    return gradient.index_select(0, segment) * holds / shares.index_select(0, segment)
