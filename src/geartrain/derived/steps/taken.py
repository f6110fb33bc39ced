"""Entries of rows at places that are the same for all of them, as steps in C."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from geartrain.derived.steps.named import added_to, by_numbers, put_by_numbers
from geartrain.derived.steps.places import Like, Places, Refused, like_of
from geartrain.native.fused import At, Op

aten = torch.ops.aten

LISTED: Final = 2
"""Entries that come to each place, on the mean, from which on they are listed by place."""


def _take(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    source, dim, index = args
    _write(places, x, source, _selected(places, places.value(source).like, dim, index))


def _take_back(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    zeros, dim, index, source = args
    if x.kwargs:
        raise Refused
    _write_back(places, x, zeros, source, _selected(places, like_of(x), dim, index))


def _selected(places: Places, like: Like, dim: int, index: fx.Node) -> tuple[At, Tensor]:
    """The places of all of a row that are left of an axis: where they lie, and they."""
    if len(like.tail) == 1 and like.rows and dim in (1, -1):
        return places.constant(index, torch.int64)
    at, named = dim % (len(like.tail) + 1), [None] * (len(like.tail) + 1)
    return _indexed(places, like, [*named[:at], index, *named[at + 1 :]])


def _index(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    if _are_constant(places, args[1]):
        _write(places, x, args[0], _indexed(places, places.value(args[0]).like, args[1]))
    else:
        by_numbers(places, x)


def _put(places: Places, x: fx.Node) -> None:
    args: Any = x.args
    zeros, index, source, *adds = args
    if not _are_constant(places, index):
        put_by_numbers(places, x)
        return
    if x.kwargs or adds != [True]:
        raise Refused
    _write_back(places, x, zeros, source, _indexed(places, like_of(x), index))


def _are_constant(places: Places, index: Sequence[Any]) -> bool:
    """Whether all rows are indexed alike, none of them as a row."""
    given = [k for k in index if k is not None]
    return index[0] is None and all(places.is_constant(k) for k in given)


def _indexed(places: Places, like: Like, index: Sequence[fx.Node | None]) -> tuple[At, Tensor]:
    """The places of all of a row that are left of it, indexed so."""
    if not like.rows or index[0] is not None:
        raise Refused
    given = [None if k is None else places.constant(k)[1] for k in index]
    every = torch.arange(like.width).view(1, *like.tail)
    found: Tensor = aten.index.Tensor(every, given)
    own = found.flatten()
    return places.held_for(own), own


def _write(places: Places, x: fx.Node, source: fx.Node, found: tuple[At, Tensor]) -> None:
    row = places.value(source)
    out = places.values[x] = places.out(x)
    places.add(Op.ENTRIES, out, row.at, found[0], many=row.like.width)


def _write_back(
    places: Places, x: fx.Node, zeros: fx.Node, source: fx.Node, found: tuple[At, Tensor]
) -> None:
    """Added up where they belong; where many come together, by lists of who does."""
    came, (at, own), width = places.value(source), found, like_of(x).width
    if not came.like.rows:
        raise Refused
    listed = own.numel() >= LISTED * width and not places.alien
    if listed:
        at = places.held_for(torch.cat([_starts(own, width), own.argsort(stable=True)]))
    with added_to(places, x, zeros) as out:
        places.add(Op.ENTRIES_BACK, out, came.at, at, many=came.like.width, inner=int(listed))


def _starts(at: Tensor, width: int) -> Tensor:
    """Of lists one behind the other of who is added up at each place; and where the last ends."""
    ends: Tensor = at.bincount(minlength=width).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


ADDED: Final = {aten.index_add.default}
"""What adds to zeros."""
TAKEN: Final[Mapping[Any, Callable[[Places, fx.Node], None]]] = {
    aten.index_select.default: _take,
    aten.index_add.default: _take_back,
    aten.index.Tensor: _index,
    aten.index_put.default: _put,
}
