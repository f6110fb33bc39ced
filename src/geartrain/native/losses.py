"""Losses with their gradients, in one pass over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.native import library, pool


def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Softmax cross entropy, one a row ``(n,)``, and its gradient ``(n, classes)``.

    None, and torch is to do it (and to complain), where there are no kernels for these tensors, or
    a target is no class.

    Args:
        logits: ``(n, classes)``.
        target: int64 ``(n,)``.
    """
    native = library.current()
    typed = None if native is None else native.typed.get(logits.dtype)
    if (
        typed is None
        or "cross_entropy" not in typed
        or logits.dim() != 2
        or not logits.shape[1]
        or target.dtype != torch.int64
        or target.shape != logits.shape[:1]
        or not (logits.is_cpu and target.is_cpu)
        or not (logits.is_contiguous() and target.is_contiguous())
    ):
        return None
    n, classes = logits.shape
    losses, gradient = logits.new_empty(n), pool.made((n, classes), logits.dtype)
    bad = typed["cross_entropy"][4 * n * classes > library.SMALL](
        n,
        classes,
        logits.data_ptr(),
        target.data_ptr(),
        losses.data_ptr(),
        gradient.data_ptr(),
    )
    return None if bad else (losses, gradient)
