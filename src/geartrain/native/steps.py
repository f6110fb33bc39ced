"""Steps of optimisers for rows of a table, in one pass."""

from __future__ import annotations

from torch import Tensor

from geartrain.native import library


def adagrad_rows(
    table: Tensor, total: Tensor, rows: Tensor, gradient: Tensor, rate: float, eps: float
) -> None:
    """Adagrad where a gradient is: total += g², table -= rate g / (√total + eps).

    Args:
        table, total: ``(limit, width)``, are changed in place.
        rows: int64 ``(n,)``, each once.
        gradient: ``(n, width)``, of those rows.
        rate, eps: Adagrad's.

    Raises:
        IndexError: A row is out of range.
    """
    native = library.current()
    typed = None if native is None else native.typed.get(table.dtype)
    same = all(
        x.is_cpu and x.is_contiguous() and x.dtype is table.dtype for x in (table, total, gradient)
    )
    if typed is None or "adagrad_rows" not in typed or not same or not rows.is_contiguous():
        s = total.index_select(0, rows).addcmul_(gradient, gradient)
        total.index_copy_(0, rows, s)
        table.index_add_(0, rows, gradient / s.sqrt_().add_(eps), alpha=-rate)
        return
    n, limit = rows.shape[0], table.shape[0]
    width = table[0].numel() if limit else 0
    bad = typed["adagrad_rows"][n * width > library.SMALL](
        n,
        width,
        rows.data_ptr(),
        limit,
        gradient.data_ptr(),
        rate,
        eps,
        table.data_ptr(),
        total.data_ptr(),
    )
    if bad:
        raise IndexError(f"a gradient is for rows {rows.tolist()[:8]}..., the table has {limit}")
