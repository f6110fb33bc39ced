"""From the two graphs of a trace to steps in C, where every operator in them has one.

    forward graph  ─► steps     what is kept for the backward alone lies side by side, column by
    backward graph ─► steps     column, in one block
    an operator that has no step, or rows that are not first ─► Refused: torch runs them

A value is a place: so many entries of each row of some tensor. Parts, views and items are places in
another's tensor, and cost nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, cast, final

import torch
from torch import fx

from geartrain.derived.fused import MadeTensor, Pair, Routine
from geartrain.derived.steps.again import with_gradients
from geartrain.derived.steps.distances import is_within_distances
from geartrain.derived.steps.integers import is_count
from geartrain.derived.steps.places import Places, Refused, Value, called, like_of, placeholders
from geartrain.derived.steps.ways import SHARING, convert, lay_within_cats, seen
from geartrain.derived.terms import Term
from geartrain.derived.traces.constants import Constants
from geartrain.derived.traces.record import draws
from geartrain.native.fused import At, Steps

MARGIN: Final = 2.0
"""So many rows for each of a table, before it is to meet weights by itself."""
MOST_WEIGHTS: Final = 1 << 23
"""Entries of all weights in products: of larger ones nearly all the time is theirs, and they would
be packed for each firing."""


def fuse(
    forward: fx.Graph,
    backward: fx.Graph,
    operands: int,
    outputs: int,
    terms: tuple[Term, ...],
    folded: fx.Graph | None,
    constants: Constants,
) -> Pair:
    """Both graphs as steps.

    Args:
        forward: Of the number of rows, operands and inputs; nodes know what they are ``Like``.
        backward: Of the number of rows, operands, residuals and tangents.
        operands, outputs: How many.
        terms: What the operands get of the backward.
        folded: A forward that gives the same, and looks up what has met weights.
        constants: What is the same in every call.

    Raises:
        Refused: Something in them has none; says what.
    """
    return _Both(forward, backward, operands, outputs, constants).pair(terms, folded)


@final
class _Both:
    """Residuals that nobody but the backward's steps reads lie side by side in one tensor."""

    def __init__(
        self,
        forward: fx.Graph,
        backward: fx.Graph,
        operands: int,
        outputs: int,
        constants: Constants,
    ) -> None:
        self._graphs, self._constants = (forward, backward), constants
        self._operands, self._outputs = operands, outputs

    def pair(self, terms: tuple[Term, ...], folded: fx.Graph | None) -> Pair:
        forward, backward = self._graphs
        results = _results(forward)
        kept = results[self._outputs :]
        places = placeholders(backward)[1 + self._operands :]
        ways = set(_results(backward))
        every = (*results, *_results(backward))
        dtype = _dtype_of(every)
        if any(draws(x) for x in backward.nodes):
            raise Refused("chance has a part in its way back")
        block: list[int] = []
        own: list[int] = []
        for k, x in enumerate(kept):
            alone = x.op == "placeholder" or x in results[: self._outputs] or places[k] in ways
            alone = alone or (like_of(x).dtype is torch.int64 and not is_count(x))
            (own if alone else block).append(k)
        columns, width = {}, 0
        for k in block:
            columns[k] = width
            width += like_of(kept[k]).width

        def there(graph: fx.Graph) -> tuple[Routine, Places]:
            results = _results(graph)
            places = Places(graph, self._operands, dtype, self._constants)
            kept = results[self._outputs :]
            tensors = [*results[: self._outputs], *(kept[k] for k in own)]
            at_columns = {kept[k]: at for k, at in columns.items()}
            return _routine(graph, places, tensors, at_columns, width), places

        first, _ = there(forward)
        other_first, worth = None, 0
        if folded is not None:
            with suppress(Refused):
                other_first, its = there(folded)
                worth = _worth(its)
        order = [*(places[k] for k in own), *([None] if block else [])]
        order += places[len(kept) :]
        other = Places(backward, self._operands, dtype, self._constants)
        other.given_as(order, {places[k]: at for k, at in columns.items()}, width)
        back = _routine(backward, other, _results(backward), {}, 0)
        drawing = any(draws(x) for x in forward.nodes)
        return Pair(first, back, dtype, terms, other_first, worth, drawing)


def _dtype_of(every: Sequence[fx.Node]) -> torch.dtype:
    """The dtype of all floats among what both ways give.

    Raises:
        Refused: They have several, or one that has no steps; or something has no rows.
    """
    if any("like" not in x.meta for x in every):
        raise Refused("rows are not along the first axis of what it keeps for its way back")
    found = {d for d in (like_of(x).dtype for x in every) if d.is_floating_point}
    if len(found) != 1 or not found <= {torch.float32, torch.float64}:
        told = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise Refused(f"it computes with {told or 'no floating-point numbers'}")
    return found.pop()


def _worth(places: Places) -> int:
    """Rows from which on it takes less to have tables meet weights first.

    A row of a table meets one as a row of others does, and has to be written.
    """
    work = [(one.columns[1] - one.columns[0]) * places.outs[one] for one in places.tables]
    rows = [places.rows_of[one] for one in places.tables]
    all_ = sum(n * each for n, each in zip(rows, work, strict=True))
    return math.ceil(MARGIN * all_ / max(sum(work), 1))


def _routine(
    graph: fx.Graph,
    places: Places,
    results: Sequence[fx.Node],
    columns: Mapping[fx.Node, int],
    width: int,
) -> Routine:
    """One graph as a program.

    Args:
        places: Of the graph; nothing lies there yet.
        results: Each a tensor.
        columns: Results that lie side by side in one more tensor, and where.
        width: Of that.
    """
    places.take_arguments()
    found = _make_results(places, results)
    if width:
        found.append(~len(places.made))
        places.made.append(MadeTensor(places.slot(0), (width,), True))
        for x, at in columns.items():
            places.homes[x] = Value(At(places.made[-1].slot, at, width), like_of(x))
    for x, own in list(places.homes.items()):
        source = seen(x)
        places.homes.setdefault(source, Value(own.at, like_of(source)))
    lay_within_cats(places, graph)
    last = _last_uses(graph)
    for number, x in enumerate(graph.nodes):
        if x.op == "call_function" and x.target is not operator.mul and not places.is_constant(x):
            try:
                convert(places, x)
            except Refused as error:
                raise Refused(str(error) or f"{called(x)} has no step in C") from error
            places.settle(x)
        for y in last.get(number, ()):
            places.release(y)
    if places.weighed > MOST_WEIGHTS:
        raise Refused("its weights are large")
    return Routine(
        Steps(with_gradients(places.steps), places.room, places.dtype),
        len(places.room),
        places.dtype,
        [(k, slot) for k, slot, *_ in places.given if k < places.operands],
        [(*weight, slot) for weight, slot in places.weights.items()],
        [given for given in places.given if given[0] >= places.operands],
        places.made,
        found,
        [(one, places.outs[one], slot) for one, slot in places.tables.items()],
        places.fixed,
        len(places.made) - 1 if width else None,
    )


def _make_results(places: Places, results: Sequence[fx.Node]) -> list[int]:
    """Which argument each is, or what is made."""
    numbers: dict[fx.Node, int] = {}
    for x in results:
        if x not in places.argument and x not in numbers:
            like = like_of(x)
            if not like.dtype.is_floating_point:
                if not like.rows or like.dtype not in (torch.int64, torch.bool):
                    raise Refused(f"a result is {str(like.dtype).removeprefix('torch.')}")
            numbers[x] = ~len(places.made)
            places.home(x, like_of(x))
    return [places.argument[x] if x in places.argument else numbers[x] for x in results]


def _results(graph: fx.Graph) -> list[fx.Node]:
    (results,) = next(iter(reversed(graph.nodes))).args
    return list(cast("Sequence[fx.Node]", results))


def _is_read_later(x: fx.Node) -> bool:
    """Whether those that read it read what it is made of."""
    return x.target in SHARING or is_within_distances(x)


def _last_uses(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By position of a node: those that nobody reads after it, in their own place or as a view."""
    nodes = list(graph.nodes)
    at = {x: k for k, x in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for x in reversed(nodes):
        ends = [last[y] if _is_read_later(y) else at[y] for y in x.users]
        last[x] = max(ends, default=at[x])
    found: dict[int, list[fx.Node]] = {}
    for x, k in last.items():
        found.setdefault(k, []).append(x)
    return found
