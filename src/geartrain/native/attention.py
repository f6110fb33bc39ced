"""Attention by dot products over ranges of rows, read where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from geartrain.errors import ProtocolError
from geartrain.native import library
from geartrain.native.rows import Rows, address, alike, contiguous, pointer


def attend_forward(
    query: Tensor, keys: Tensor, values: Tensor, starts: Rows, lengths: Rows, factor: float
) -> tuple[Tensor, Tensor] | None:
    """What each row reads, ``(n, e)``, and the logarithm of the sum of its weights, ``(n, 1)``.

    None, and torch is to do it, where there are no kernels for these tensors.

    Args:
        query: ``(n, d)``.
        keys: ``(capacity, d)``.
        values: ``(capacity, e)``; may be the keys.
        starts, lengths: int64 ``(n,)``: row i reads rows ``starts[i] .. starts[i] + lengths[i]``.
        factor: Of the products.

    Raises:
        ProtocolError: A range is not within the memory.
    """
    typed = _typed(query, keys, values)
    if typed is None:
        return None
    context, total = (
        query.new_empty((len(query), values.shape[1])),
        query.new_empty((len(query), 1)),
    )
    work = int(lengths.sum()) * (query.shape[1] + values.shape[1])
    at, many = contiguous(starts), contiguous(lengths)
    bad = typed["attend_forward"][work > library.SMALL_WORK](
        len(query),
        query.shape[1],
        values.shape[1],
        factor,
        pointer(at),
        pointer(many),
        keys.shape[0],
        *(x.data_ptr() for x in (keys, values, query, context, total)),
    )
    _refuse(bad, starts, lengths, keys)
    return context, total


def attend_backward(
    gradient: Tensor,
    kept: Sequence[Tensor],
    keys: Tensor,
    values: Tensor,
    starts: Rows,
    lengths: Rows,
    factor: float,
    sums: tuple[Tensor, Tensor] | None,
) -> Tensor | None:
    """The gradient of the query; None, and torch is to do it, as above.

    Args:
        gradient: Of what was read, ``(n, e)``.
        kept: Query, what was read, and the logarithm ``(n, 1)``.
        keys, values, starts, lengths, factor: As in the forward.
        sums: Gradients of keys and values, as they lie; these of the ranges are added.

    Raises:
        ProtocolError: A range is not within the memory.
    """
    query, context, total = kept
    gradient = gradient.contiguous()
    typed = _typed(query, keys, values, context, total, gradient, *(sums or ()))
    if typed is None:
        return None
    found = torch.empty_like(query)
    work = int(lengths.sum()) * (query.shape[1] + values.shape[1])
    at, many = contiguous(starts), contiguous(lengths)
    tensors = (keys, values, query, context, total, gradient, found)
    d_keys, d_values = sums or (None, None)
    bad = typed["attend_backward"][2 * work > library.SMALL_WORK](
        len(query),
        query.shape[1],
        values.shape[1],
        factor,
        pointer(at),
        pointer(many),
        keys.shape[0],
        *(x.data_ptr() for x in tensors),
        address(d_keys),
        address(d_values),
    )
    _refuse(bad, starts, lengths, keys)
    return found


def _typed(query: Tensor, *others: Tensor) -> dict[str, tuple[library.Function, ...]] | None:
    native = library.current()
    if native is None or not (query.is_cpu and query.is_contiguous()):
        return None
    if any(x.ndim != 2 for x in (query, *others)) or not alike(query, *others):
        return None
    typed = native.typed.get(query.dtype)
    return typed if typed is not None and "attend_forward" in typed else None


def _refuse(bad: int, starts: Rows, lengths: Rows, keys: Tensor) -> None:
    if bad < 0:
        raise MemoryError("no memory for the weights of an attention")
    if bad:
        last = starts + lengths
        wrong = (lengths < 0) | ((starts < 0) | (last > keys.shape[0])) & (lengths != 0)
        at = int(wrong.argmax())
        raise ProtocolError(
            f"rows {int(starts[at])} to {int(last[at])} are to be read, but the memory has rows "
            f"0..{keys.shape[0] - 1}"
        )
