"""Rows of weights and buffers by number, told as what is looked up in a table.

    w (k, a, b), r (n,)     w[r]  ─►  embedding(r, w (k, a b)) (n, a b)  ─►  (n, a, b)

It is done as a function is called for a trace, above autograd, which has the gradient by itself.
There are steps for rows of tables, and sums for their gradients. A table has no row -1: where
indexing counts such numbers from the end, what is looked up is refused as out of range, when it is
traced or, by an ``IndexError``, when it comes. ``keep="inputs"`` calls the module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@final
class RowsOfTables(TorchFunctionMode):
    """Has indexing of some tensors by row numbers computed as embeddings.

    Args:
        tables: Those tensors.
    """

    def __init__(self, tables: Iterable[Tensor]) -> None:
        super().__init__()
        self._tables = {id(x): x for x in tables if x.numel() and x.ndim and x.is_floating_point()}

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in _NUMBERS and id(args[0]) in self._tables:
            numbers = _NUMBERS[function](*args[1:], **kwargs)
            if isinstance(numbers, Tensor) and numbers.ndim and numbers.dtype is torch.int64:
                return _rows(args[0], numbers)
        return function(*args, **kwargs)


def _rows(table: Tensor, numbers: Tensor) -> Tensor:
    flat = table if table.ndim == 2 else table.reshape(table.shape[0], -1)
    found = torch.nn.functional.embedding(numbers, flat)
    return found if table.ndim == 2 else found.reshape(*numbers.shape, *table.shape[1:])


def _first(index: Any) -> Any:
    """What indexes the first axis, if the others are whole."""
    if not isinstance(index, tuple):
        return index
    whole = all(x is ... or (isinstance(x, slice) and x == slice(None)) for x in index[1:])
    return index[0] if index and whole else None


def _selected(dim: Any, index: Any) -> Any:
    return index if dim == 0 else None


_NUMBERS: Final[Mapping[Any, Callable[..., Any]]] = {
    Tensor.__getitem__: _first,
    Tensor.index_select: _selected,
    torch.index_select: _selected,
}
"""Row numbers among the arguments after a table, or something else."""
