"""Two traces of one module, at two sizes: which nodes are the same, and where their rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from geartrain.derived.ragged.values import Axes, TraceCounts
from geartrain.derived.steps.places import Refused
from geartrain.derived.traces.counted import needed_by
from geartrain.derived.traces.record import Trace

aten = torch.ops.aten

SAME: Final = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        aten._to_copy.default,
        aten.expand.default,
    }
)
"""The same numbers, in the same order; or some of them again and again."""


class TwoTraces:
    """A module that was traced twice; what differs counts rows.

    Args:
        traces: At two sizes.
        counts: The sizes.

    Attributes:
        nodes: What is given, results, and what they are made of, in the smaller.
        twin: Of each of them that in the larger.
        shapes, constants: Of the smaller.
        counts: The sizes.

    Raises:
        Refused: It calls other operators at another size.
    """

    def __init__(self, traces: tuple[Trace, Trace], counts: TraceCounts) -> None:
        small, large = traces
        self.counts = counts
        self.shapes, self.constants = small.shapes, small.constants
        self.nodes, others = _read_nodes(small), _read_nodes(large)
        if [(x.op, x.target) for x in self.nodes if x.op == "call_function"] != [
            (x.op, x.target) for x in others if x.op == "call_function"
        ]:
            raise Refused("it computes otherwise for other numbers of rows")
        self.twin = dict(zip(self.nodes, others, strict=True))
        self._large = large.shapes

    def like(self, x: fx.Node) -> Axes:
        """Its axes."""
        return self.counts.like(self.shapes[x], self._large[self.twin[x]])

    def has_rows_first(self, x: fx.Node) -> bool:
        """Whether its axes begin with those of rows, or it has none; else one of what they have
        is before them."""
        try:
            self.like(x)
        except Refused:
            return False
        return True

    def behind(self, x: fx.Node) -> Axes:
        """The axes behind its first."""
        return self.counts.like(self.shapes[x][1:], self._large[self.twin[x]][1:])

    def shapes_of_twin(self, x: fx.Node) -> tuple[int, ...]:
        """The shape of a node in the larger trace."""
        return self._large[self.twin[x]]

    def stretched(self, x: fx.Node) -> Axes | None:
        """The axes of a node, of which that of members has some entries more or fewer; None: it has
        no such axis."""
        padded, both = self.counts.padded, [self.shapes[x], self.shapes_of_twin(x)]
        if padded is None:
            return None
        for k, (a, b) in enumerate(zip(*both, strict=True)):
            if b - a == padded[1] - padded[0] and a != padded[0]:
                whole = [(*y[:k], n, *y[k + 1 :]) for y, n in zip(both, padded, strict=True)]
                like = self._like_members(whole)
                if like is not None and like.members == k:
                    return like
        return None

    def _like_members(self, shapes: Sequence[tuple[int, ...]]) -> Axes | None:
        try:
            like = self.counts.like(*shapes)
        except Refused:
            return None
        return like if like.is_padded else None

    def varies(self, x: fx.Node) -> bool:
        """Whether its shape depends on how many rows there are."""
        return self.shapes[x] != self._large[self.twin[x]]


def _read_nodes(trace: Trace) -> list[fx.Node]:
    """What is given, results, and what they are made of."""
    *every, output = trace.graph.nodes
    read = needed_by(output.all_input_nodes)
    return [*(x for x in every if x.op == "placeholder" or x in read), output]


def numbers_of(x: fx.Node) -> list[Any]:
    """Arguments of a node that are no nodes."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for each in value:
                look(each)
        elif not isinstance(value, fx.Node):
            found.append(value)

    look(list(x.args))
    look(list(x.kwargs.values()))
    return found


def same_numbers(x: fx.Node, twin: fx.Node, but: int | None = None) -> None:
    """Raises:
    Refused: It depends on how many rows there are.
    """
    for k, (a, b) in enumerate(zip(x.args, twin.args, strict=True)):
        if k != but and not isinstance(a, (fx.Node, tuple, list)) and a != b:
            raise Refused(f"{x.target} with {a} in one trace and {b} in another")
