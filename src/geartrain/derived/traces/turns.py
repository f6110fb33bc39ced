"""Axes of a tensor that change places."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten

TURNS: Final = frozenset({aten.transpose.int, aten.permute.default})


def order_of(x: fx.Node, rank: int) -> list[int]:
    """The axis of the source that each axis is."""
    args: Any = x.args
    if x.target is aten.permute.default:
        return [k % rank for k in args[1]]
    order = list(range(rank))
    a, b = args[1] % rank, args[2] % rank
    order[a], order[b] = order[b], order[a]
    return order


def at_once(x: fx.Node, rank: int) -> fx.Node:
    """What changes places once for it and the turn that it is a turn of, or is what both turn.

    ``einsum`` turns what it is given, and what it gives, back and forth.
    """
    before: Any = x.args[0]
    if before.target not in TURNS:
        return x
    source, first = before.args[0], order_of(before, rank)
    order = [first[k] for k in order_of(x, rank)]
    if order == sorted(order):
        return source  # type: ignore[no-any-return]
    return x.graph.call_function(aten.permute.default, (source, order))
