"""What integers that are made of the bundles say of them, found by computing them.

0, 1, ...; lengths; the bundle of each member ─► integers ─► the first of each bundle, its last,
                                                             or something of each by itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from geartrain.derived.ragged.base import AbstractLowering
from geartrain.derived.ragged.lengths import TRIED, numbers_of_rows, places_of, segment_of
from geartrain.derived.traces.counted import needed_by

aten = torch.ops.aten

COUNTS: Final = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})

_FEW: Final = 1024
"""Up to which it is known that numbers from there on are exact."""


def counts_rows(x: fx.Node, shape: Sequence[int]) -> bool:
    """Whether it is 0, 1, ..., one for each row."""
    args: Any = x.args
    begin, end = (0, args[0]) if x.target is aten.arange.default else args[:2]
    return (begin, end) == (0, shape[0]) and (*args, 1)[2:3] in ((), (1,))


def begins_with(x: fx.Node, twin: fx.Node, shape: Sequence[int]) -> int:
    """The number from which on it counts rows, if it is the same however many there are; or 0."""
    args: Any = x.args
    if x.target is not aten.arange.start or args[0] != twin.args[0]:
        return 0
    begin, end = args[:2]
    whole = isinstance(begin, int) and isinstance(end, int) and end - begin == shape[0]
    return begin if whole and 0 < begin <= _FEW else 0


def counts(low: AbstractLowering, x: fx.Node) -> Callable[[Tensor], Tensor]:
    """What computes integers that count rows, of what they count."""
    return places_of if x in low.placing else numbers_of_rows


def above(low: AbstractLowering, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are made of."""
    return needed_by(nodes, low.operands, low.counting)


def end_of_bundles(low: AbstractLowering, node: fx.Node) -> int | None:
    """0: integers name the first member of each bundle; -1: its last; None: neither."""
    for end in (0, -1):
        if all(_is_end(_computed(low, node, lengths), lengths, end) for lengths in TRIED):
            return end
    return None


def _is_end(found: Tensor | None, lengths: Sequence[int], end: int) -> bool:
    ends = torch.tensor(lengths).cumsum(0)
    wanted = ends - 1 if end else ends - torch.tensor(lengths)
    return found is not None and torch.equal(found, wanted)


def are_of_each(low: AbstractLowering, node: fx.Node) -> bool:
    """Whether integers of a bundle are the same in whatever company it comes."""
    if not above(low, [node]) & {low.segment, *low.counting}:
        return True
    for k, lengths in enumerate(TRIED):
        other = TRIED[k - 1]
        one, two = (_computed(low, node, each) for each in (lengths, other))
        both = _computed(low, node, (*lengths, *other))
        if (
            one is None
            or two is None
            or both is None
            or not torch.equal(both, torch.cat([one, two]))
        ):
            return False
    return True


def _computed(low: AbstractLowering, node: fx.Node, lengths: Sequence[int]) -> Tensor | None:
    """Integers for bundles of these lengths; None: they are made of more than that."""
    if low.lengths is None or low.segment is None:
        return None
    at = torch.tensor(lengths)
    known: dict[fx.Node, Any] = {low.lengths: at, low.segment: segment_of(at)}
    wanted = above(low, [node])
    try:
        for x in low.nodes:
            if x not in wanted or x in known:
                continue
            if x in low.counting:
                known[x] = counts(low, x)(known[low.counting[x]])
            elif x.op != "call_function":
                return None
            else:
                target: Any = x.target
                args, kwargs = fx.map_arg((x.args, x.kwargs), known.__getitem__)
                known[x] = target(*args, **kwargs)
    except (RuntimeError, IndexError):  # for so many bundles it is no program
        return None
    found: Tensor = known[node]
    return found
