"""Plain recurrent networks over whole lists in C: all steps, products included, in one call.

    forward    h = f(x + W h before), from zero along every list ─► all states, the last of each
    backward   the same steps back; d_x, and d_W of all steps as one sum of products

x is a row of a table that tokens name, or there is one for every vertex. Lists lie one below the
other, of any lengths; many are spread over as many threads as torch has. All tensors contiguous on
the CPU, float32 or float64; for others the answer is None, and the caller does it in torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from geartrain.errors import DataError
from geartrain.native import library
from geartrain.native.build import Sources
from geartrain.native.library import POINTER, SMALL_WORK, WORD, Function
from geartrain.native.rows import Rows, address, contiguous, out_of_range, pointer

_N, _P = WORD, POINTER
NATIVE: Final = library.add(
    library.Extension(
        Sources("list", Path(__file__).with_name("list.c")),
        typed={
            "lists_forward": (*[_N] * 3, *[_P] * 2, _N, *[_P] * 2, _N, *[_P] * 2, _N),
            "lists_backward": (
                *(*[_N] * 3, *[_P] * 2, _N, *[_P] * 2, _N),
                *(_P, *[_N] * 2, *[_P] * 3, _N),
            ),
        },
    )
)

_MUCH_WORK: Final = 1 << 25  # from which on several threads are worth their beginning


def lists_forward(
    driven: Tensor,
    tokens: Tensor | None,
    lengths: Tensor,
    weight: Tensor,
    kept: Tensor,
    *,
    is_tanh: bool,
) -> Tensor | None:
    """The last state of every list, ``(n, H)``; that of an empty one is zero.

    Args:
        driven: x, ``(tokens, H)``, or ``(rows, H)`` without tokens.
        tokens: int64 ``(rows,)``, rows of ``driven``; None: one for every vertex.
        lengths: int64 ``(n,)``, vertices of each list.
        weight: W, ``(H, H)``.
        kept: ``(rows, H)``, the states, is written.
        is_tanh: Whether f is tanh; else relu.

    Raises:
        DataError: A token is none, or the lengths are not those of the rows.
    """
    rows, width = kept.shape
    run = _function("lists_forward", rows, (driven, weight, kept), (tokens, lengths))
    if run is None or weight.shape != (width, width) or driven.shape[1:] != (width,):
        return None
    if (driven if tokens is None else tokens).shape[0] != rows:
        raise _no_lengths(lengths, (driven if tokens is None else tokens).shape[0])
    last = kept.new_empty((lengths.shape[0], width))
    bad = run(
        lengths.shape[0],
        rows,
        width,
        lengths.data_ptr(),
        address(tokens),
        driven.shape[0],
        driven.data_ptr(),
        weight.data_ptr(),
        is_tanh,
        kept.data_ptr(),
        last.data_ptr(),
        _threads(rows, width),
    )
    if bad:
        _refuse(bad, rows, tokens, lengths, driven.shape[0])
    return last


def lists_backward(
    dy: Tensor,
    kept: Tensor,
    tokens: Tensor | None,
    rows: Rows | None,
    lengths: Tensor,
    weight: Tensor,
    table: int,
    *,
    is_tanh: bool,
    every: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """The gradients of ``driven`` and of W.

    Args:
        dy: At the last states, ``(n, H)``, or at all of them, ``(rows, H)``.
        kept: ``(m, H)``, what ``lists_forward`` wrote.
        tokens: int64 ``(m,)``, or None.
        rows: int64 ``(rows,)``, the rows of ``kept`` and ``tokens``; None: all.
        lengths: int64 ``(n,)``, vertices of each list.
        weight: W of now, ``(H, H)``.
        table: Rows of ``driven``, where there are tokens.
        is_tanh: As for ``lists_forward``.
        every: Whether dy is at all states.

    Raises:
        DataError: As for ``lists_forward``.
        ProtocolError: A row is out of range.
    """
    limit, width = kept.shape
    n = limit if rows is None else rows.size
    run = _function("lists_backward", n, (dy, kept, weight), (tokens, lengths))
    came = n if every else lengths.shape[0]
    if run is None or weight.shape != (width, width) or dy.shape != (came, width):
        return None
    if tokens is not None and tokens.shape[0] != limit:
        return None
    rows = contiguous(rows)
    driven = kept.new_empty((n if tokens is None else table, width))
    d_weight = torch.empty_like(weight)
    bad = run(
        lengths.shape[0],
        n,
        width,
        lengths.data_ptr(),
        address(tokens),
        table,
        kept.data_ptr(),
        pointer(rows),
        limit,
        weight.data_ptr(),
        is_tanh,
        every,
        dy.data_ptr(),
        driven.data_ptr(),
        d_weight.data_ptr(),
        _threads(2 * n, width),
    )
    if bad == _BAD_ROW and rows is not None:
        raise out_of_range(rows, limit, "read")
    if bad:
        _refuse(bad, n, tokens, lengths, table)
    return driven, d_weight


def require_tokens(tokens: Tensor, table: int) -> None:
    """What C checks, for whoever computes without it; off the host torch checks in its way.

    Raises:
        DataError: A token is none of the table's.
    """
    if tokens.is_cpu and tokens.numel():
        low, high = torch.aminmax(tokens)
        if int(low) < 0 or int(high) >= table:
            raise _no_token(tokens, table)


_BAD_TOKEN, _BAD_LENGTHS, _BAD_ROW = 1, 2, 3


def _refuse(bad: int, rows: int, tokens: Tensor | None, lengths: Tensor, table: int) -> None:
    if bad == _BAD_TOKEN and tokens is not None:
        raise _no_token(tokens, table)
    if bad == _BAD_LENGTHS:
        raise _no_lengths(lengths, rows)
    raise MemoryError(f"no memory for lists of {rows} vertices; lower max_active or max_rows")


def _no_token(tokens: Tensor, table: int) -> DataError:
    wrong = tokens[(tokens < 0) | (tokens >= table)]
    token = int(wrong[0]) if wrong.numel() else "out of range"
    return DataError(
        f"a list has token {token}; expected 0..{table - 1}: number the tokens from 0, or give "
        "the cell more of them"
    )


def _no_lengths(lengths: Tensor, rows: int) -> DataError:
    return DataError(
        f"lists of {lengths[:4].tolist()} vertices, {int(lengths.sum())} together, came with "
        f"{rows} rows; one row for every vertex"
    )


def _function(
    name: str, rows: int, floats: tuple[Tensor, ...], integers: tuple[Tensor | None, ...]
) -> Function | None:
    """The kernel for these tensors, or None if it is not for them."""
    like = floats[0]
    typed = NATIVE.functions(like.dtype)
    if typed is None:
        return None
    for x in floats:
        if x.dtype is not like.dtype or not x.is_cpu or not x.is_contiguous():
            return None
    for i in integers:
        if i is not None and not _is_column(i):
            return None
    return typed[name][rows * floats[-1].shape[1] ** 2 > SMALL_WORK]


def _is_column(x: Tensor) -> bool:
    return x.ndim == 1 and x.dtype is torch.int64 and x.is_cpu and x.is_contiguous()


def _threads(rows: int, width: int) -> int:
    """How many threads products of so many rows are worth, of those that torch has."""
    return torch.get_num_threads() if rows * width**2 > _MUCH_WORK else 1
