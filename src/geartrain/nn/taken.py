"""Entries of rows at places that are the same for all of them, as steps in C."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from geartrain.native.fused import At, Op
from geartrain.nn.places import Like, Places, Refused, like_of

aten = torch.ops.aten


def _take(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    source, dim, index = args
    row = places.value(source)
    at = _where(places, row.like, dim, index)
    out = places.values[x] = places.out(x)
    places.add(Op.ENTRIES, out, row.at, at, many=row.like.width)


def _take_back(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    zeros, dim, index, source = args
    came = places.value(source)
    if zeros.target not in _ZEROS or x.kwargs or not came.like.rows:
        raise Refused
    at = _where(places, like_of(x), dim, index)
    out = places.values[x] = places.out(x)
    places.add(Op.ENTRIES_BACK, out, came.at, at, many=came.like.width)


def _where(places: Places, like: Like, dim: int, index: fx.Node) -> At:
    """The places that are named of all of a row."""
    if len(like.tail) != 1 or not like.rows or dim not in (1, -1):
        raise Refused
    at, _ = places.constant(index)
    return at


_ZEROS: Final = (aten.new_zeros.default, aten.zeros.default)
ADDED: Final = {aten.index_add.default}
"""What adds to zeros."""
TAKEN: Final[Mapping[Any, Callable[[Places, fx.Node], None]]] = {
    aten.index_select.default: _take,
    aten.index_add.default: _take_back,
}
