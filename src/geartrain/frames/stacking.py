"""What many instances bring to an input as one tensor, where all of it is alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from geartrain.frames.instance import as_column
from geartrain.frames.message import IntArray, ends_of
from geartrain.frames.packed import PackedRows
from geartrain.frames.table import Column


def stacked(
    given: Sequence[Any], known: tuple[torch.Size, torch.dtype] | None
) -> PackedRows | None:
    """Tensors of rows of the known shape and dtype, or pairs of such and their vertices; None: they
    want a closer look."""
    if known is None or len(given) == 1:
        return None
    places: Sequence[Any] | None = None
    if set(map(type, given)) == {tuple} and set(map(len, given)) == {2}:
        given, places = zip(*given, strict=True)
    if set(map(type, given)) != {Tensor}:
        return None
    shape, dtype = known
    if set(map(_DTYPE, given)) != {dtype}:
        return None
    found = _below(given, shape)
    if found is None:
        return None
    rows, lengths = found
    ends = ends_of(lengths)
    if places is None:
        return PackedRows(rows, lengths, np.arange(rows.shape[0]) - ends[:-1].repeat(lengths), ends)
    at = side_by_side(places, lengths)
    if at is None or at.dtype != np.int64:
        return None
    return PackedRows(rows, lengths, at, ends)


def _below(given: Sequence[Tensor], shape: torch.Size) -> tuple[Tensor, IntArray] | None:
    """Tensors of one dtype below one another, and how many rows each has; None: one has rows of
    another shape, or all have none."""
    n = given[0].shape[0] if given[0].ndim else 0
    if given[0].shape[1:] != shape or not n or given[-1].shape != given[0].shape:
        return _of_any_lengths(given, shape)
    try:  # torch looks at the shape of each
        rows = torch.stack(list(given))
    except RuntimeError:
        return _of_any_lengths(given, shape)
    return rows.detach().flatten(0, 1), np.full(len(given), n)


def _of_any_lengths(given: Sequence[Tensor], shape: torch.Size) -> tuple[Tensor, IntArray] | None:
    if {x.ndim for x in given} != {1 + len(shape)}:
        return None
    try:
        rows = torch.cat(list(given)).detach()
    except RuntimeError:
        return None
    if rows.shape[1:] != shape or not rows.shape[0]:
        return None
    return rows, np.array([x.shape[0] for x in given], np.int64)


def side_by_side(given: Sequence[Any], lengths: IntArray) -> Column | None:
    """Integers or floats of all instances in one column, copied.

    Args:
        given: What each brings: lists, tuples, arrays or tensors of one axis.
        lengths: int64 ``(n,)``, how many they are to be.

    Returns:
        None: They are not of one kind, of one type and so many, and want a closer look.
    """
    kinds = set(map(type, given))
    if len(kinds) != 1 or not kinds <= _JOINED.keys():
        return None
    try:
        if list(map(len, given)) != lengths.tolist():
            return None
    except TypeError:  # arrays and tensors without an axis
        return None
    return _JOINED[kinds.pop()](given)


def _of_arrays(given: Sequence[Column]) -> Column | None:
    if len({(x.dtype, x.ndim) for x in given}) != 1 or given[0].ndim != 1:
        return None
    return as_column(np.concatenate(given))


def _of_lists(given: Sequence[Sequence[Any]]) -> Column | None:
    numbers = list(chain.from_iterable(given))
    kinds = set(map(type, numbers))
    if kinds <= _WHOLE:
        try:
            return np.array(numbers, np.int64)
        except OverflowError:
            return None
    return np.array(numbers, np.float64) if kinds == {float} else None


def _of_tensors(given: Sequence[Tensor]) -> Column | None:
    if {(x.dtype, x.ndim, x.is_cpu) for x in given} != {(given[0].dtype, 1, True)}:
        return None
    if given[0].dtype not in _NUMBERS:
        return None
    return as_column(torch.cat(list(given)))


_JOINED: Final[Mapping[type, Callable[[Sequence[Any]], Column | None]]] = {
    np.ndarray: _of_arrays,
    list: _of_lists,
    tuple: _of_lists,
    Tensor: _of_tensors,
}
_DTYPE: Final = attrgetter("dtype")
_WHOLE: Final = frozenset((int, np.int64))
_NUMBERS: Final = frozenset((torch.int64, torch.int32, torch.float32, torch.float64))
