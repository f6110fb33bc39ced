"""What many instances bring to an input as one tensor, where all of it is alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geartrain.frames.message import IntArray, ends_of
from geartrain.frames.packed import PackedRows


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
    if {x.dtype for x in given} != {dtype} or {x.ndim for x in given} != {1 + len(shape)}:
        return None
    try:
        rows = torch.cat(list(given)).detach()
    except RuntimeError:
        return None
    if rows.shape[1:] != shape or not rows.shape[0]:
        return None
    lengths = np.array([x.shape[0] for x in given], np.int64)
    ends = ends_of(lengths)
    if places is None:
        return PackedRows(rows, lengths, np.arange(rows.shape[0]) - ends[:-1].repeat(lengths), ends)
    at = _side_by_side(places, lengths)
    return None if at is None else PackedRows(rows, lengths, at, ends)


def _side_by_side(places: Sequence[Any], lengths: IntArray) -> IntArray | None:
    """Vertices of the rows of all instances, copied; None: they are no lists or arrays of integers,
    or not one for each row."""
    kinds = set(map(type, places))
    if kinds == {np.ndarray}:
        if {(x.dtype, x.ndim) for x in places} != {(np.dtype(np.int64), 1)}:
            return None
    elif kinds != {list} or not set(map(type, chain.from_iterable(places))) <= {int}:
        return None
    if list(map(len, places)) != lengths.tolist():
        return None
    if kinds == {list}:
        return np.array(list(chain.from_iterable(places)), np.int64)
    return np.concatenate(places)
