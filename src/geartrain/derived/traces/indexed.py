"""Entries of weights by number, told as what is looked up in a table.

    w (k, a, b), r (n,)          w[r]     ─►  embedding(r, w (k, a b)) (n, a b)  ─►  (n, a, b)
    w (a, b), i (n,), j (n,)     w[i, j]  ─►  embedding(b i + j, w (a b, 1))  ─►  (n,)
    w (k, a), r (n,)             w[:, r]  ─►  embedding(r, wᵀ)ᵀ

It is done as a function is called for a trace, above autograd, which has the gradient by itself.
There are steps for rows of tables, and sums for their gradients. What is made of weights alone, a
part, a view or a softmax of them, is indexed as they are.

By several numbers, one below 0 counts from the end, as indexing has it, and one out of range stays
so. By one number it is the table's own: there is no row -1, and what is looked up is refused as
out of range, when it is traced or, by an ``IndexError``, when it comes. ``keep="inputs"`` calls the
module as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Found: TypeAlias = tuple[Tensor, Tensor]
"""What is looked up, rows first, and the same as indexing lays it."""
_Index: TypeAlias = Sequence[Any]
"""What stands between brackets: for each axis a number, a slice, or row numbers."""


_FAR_BELOW: Final = -(1 << 40)
"""Below 0 still, where rows of as many as a table may have are added."""
_OWN: Final[Any] = torch.library.Library("geartrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_OWN.define("within(Tensor numbers, SymInt many) -> Tensor")


def _within(numbers: Tensor, many: int) -> Tensor:
    """int64 of any shape, counted from the end if below 0; far below 0 where out of range."""
    outside = (numbers >= many) | (numbers < -many)
    return torch.where(numbers < 0, numbers + many, numbers).masked_fill_(outside, _FAR_BELOW)


_OWN.impl("within", _within, "CompositeExplicitAutograd")
WITHIN: Final = torch.ops.geartrain.within.default
"""What does that, as one operator of a trace."""


@final
class RowsOfTables(TorchFunctionMode):
    """Has indexing of some tensors by row numbers computed as embeddings.

    Args:
        tables: Those tensors; and what is made of nothing else.
        rows: Whether rows by one number each are, too; else who reads them knows of them.
    """

    def __init__(self, tables: Iterable[Tensor], *, rows: bool = True) -> None:
        super().__init__()
        self._rows = rows
        self._tables = {id(x): x for x in tables}
        self._turned: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in _NUMBERS and id(args[0]) in self._tables:
            found = _NUMBERS[function](*args, **kwargs)
            if found is not None and (self._rows or not _is_row(function, *args)):
                source, turned = found
                self._turned[id(turned)] = found
                return turned
        found = function(*args, **kwargs)
        if function in _TURNS and id(args[0]) in self._turned:
            source, _ = self._turned[id(args[0])]
            if (found.shape, found.stride()) == (source.shape, source.stride()):
                return source
        given = _tensors((args, *kwargs.values()))
        if given and all(id(x) in self._tables for x in given):
            self._tables.update((id(x), x) for x in _tensors(found))
        return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in _tensors(each)]
    return [value] if isinstance(value, Tensor) else []


def _is_row(function: Any, _: Tensor, index: Any = None, *rest: Any) -> bool:
    """Whether that is what indexing by one number gives."""
    return function is Tensor.__getitem__ and isinstance(index, Tensor)


def _indexed(table: Tensor, index: Any) -> _Found | None:
    """Indexed so, if any of it is row numbers."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(x is None or x is ... or isinstance(x, (int, slice, Tensor)) for x in index):
        return None
    if any(isinstance(x, bool) for x in index):
        return None
    numbers = [x for x in index if isinstance(x, Tensor)]
    if not numbers or not all(x.ndim and x.dtype is torch.int64 for x in numbers):
        return None
    part, axes = _part(table, index)
    return None if not _has_rows(part) else _looked_up(part, axes, numbers)


def _has_rows(x: Tensor) -> bool:
    return bool(x.ndim and x.numel() and x.is_floating_point())


def _part(table: Tensor, index: _Index) -> tuple[Tensor, list[int]]:
    """What is left without looking at row numbers, and which of its axes they name."""
    axes, at = [], 0
    for x in index:
        if isinstance(x, Tensor):
            axes.append(at)
        if x is ...:
            at += table.ndim - sum(y is not None and y is not ... for y in index)
        elif not isinstance(x, int):
            at += 1
    rest = [slice(None) if isinstance(x, Tensor) else x for x in index]
    whole = all(x is ... or x == slice(None) for x in rest)
    return (table if whole else table[tuple(rest)]), axes


def _looked_up(part: Tensor, axes: Sequence[int], numbers: Sequence[Tensor]) -> _Found:
    """Of some axes, what row numbers name together: where these were, or else in front."""
    others = [k for k in range(part.ndim) if k not in axes]
    order, sizes = [*axes, *others], [part.shape[k] for k in axes]
    turned = part if order == sorted(order) else part.permute(order)
    which = numbers[0] if len(axes) == 1 else _places(numbers, sizes)
    table, tail = math.prod(sizes), turned.shape[len(axes) :]
    flat = turned if turned.ndim == 2 and len(axes) == 1 else turned.reshape(table, -1)
    found = torch.nn.functional.embedding(which, flat)
    found = found if len(tail) == 1 else found.reshape(*which.shape, *tail)
    first = axes[0] if list(axes) == list(range(axes[0], axes[-1] + 1)) else 0
    if not first:
        return found, found
    many = which.ndim
    before, behind = range(many, many + first), range(many + first, found.ndim)
    return found, found.permute([*before, *range(many), *behind])


def _places(numbers: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Where numbers along several axes are, one after another; below 0: out of range."""
    found: Tensor = WITHIN(numbers[0], sizes[0])
    for k, size in zip(numbers[1:], sizes[1:], strict=True):
        found = found * size + WITHIN(k, size)
    return found


def _selected(input: Tensor, dim: Any, index: Any) -> _Found | None:
    if not isinstance(dim, int) or not isinstance(index, Tensor) or not input.ndim:
        return None
    return _indexed(input, (*[slice(None)] * (dim % input.ndim), index))


def _taken(input: Tensor, index: Any) -> _Found | None:
    flat = isinstance(index, Tensor) and _has_rows(input)
    return _indexed(input.reshape(-1), index) if flat else None


_NUMBERS: Final[Mapping[Any, Callable[..., _Found | None]]] = {
    Tensor.__getitem__: _indexed,
    Tensor.index_select: _selected,
    torch.index_select: _selected,
    Tensor.take: _taken,
    torch.take: _taken,
}
"""What looks up entries of its first argument by number; None, and it is to be called."""
_TURNS: Final = frozenset(
    {
        *(Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes),
        *(Tensor.permute, torch.permute, Tensor.movedim, torch.movedim),
        cast(Any, Tensor.T).__get__,
    }
)
"""What may turn back what indexing has turned."""
