"""What a forward keeps for its backward, of all that the backward reads of it.

    what is read ─► is a view of something? keep that, once for all its views (or the smallest part)
                 ─► side by side with others in what is kept anyway? read it there
                 ─► one pass over what is kept anyway, or a row of a table? make it again

Each residual has one row for each row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast, final

import torch
from torch import fx

from geartrain.derived.traces.counted import SIZES, VIEWS, CountedGraph
from geartrain.errors import GraphError

aten = torch.ops.aten

_CHEAP = {
    *VIEWS,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.index_select.default,
    aten.select.int,
    aten.unbind.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.clone.default,
    operator.getitem,
}
"""Made again in the backward of what they are made of, rather than kept."""

_PASSES = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.neg.default,
    aten.relu.default,
    aten.gelu.default,
    aten.silu.default,
}
"""Made again too, where what they read is kept anyway."""


@final
class Residuals:
    """Chooses them in a graph that has both.

    Args:
        whole: The graph.
        of: Node to the tangents that it depends on.
        here: Nodes that depend on inputs, or on chance.

    Attributes:
        apart: Node of which an axis is rows and others in one, to the view of it that is kept.
        within: Node that lies in one that is kept, or before it in here, to that, its first column
            there and the one after its last.
    """

    def __init__(
        self,
        whole: CountedGraph,
        of: Mapping[fx.Node, frozenset[int]],
        here: AbstractSet[fx.Node],
    ) -> None:
        self._all, self._of, self._here = whole, of, here
        self.apart: dict[fx.Node, fx.Node] = {}
        self.within: dict[fx.Node, tuple[fx.Node, int, int]] = {}

    def of(self, roots: Sequence[fx.Node]) -> list[fx.Node]:
        """What the forward must keep for a backward that finds these, inputs first."""
        edge = [x for x in self._reached(roots) if x in self._here and not self._of[x]]
        self.within = self._lying_within(edge)
        views: dict[fx.Node, dict[fx.Node, None]] = {}
        for x in edge:
            if any(y in self.within for y in self._chain(x)):
                continue
            views.setdefault(self._anchor(x), {})[self._smallest(x)] = None
        kept: dict[fx.Node, None] = {}
        for base, parts in views.items():
            # Of a product that is read in part, that part.
            less = base not in self._all.inputs and self._all.is_whole(base)
            less = less and sum(map(self._size, parts)) < self._size(base)
            kept |= parts if less else {base: None}
        for x in reversed(self._all.graph.nodes):
            if x in kept and self._is_made_of(x, kept):
                del kept[x]
        return sorted(kept, key=lambda x: x not in self._all.inputs)

    def _lying_within(self, edge: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, int, int]]:
        """What is put side by side in rows that are kept, those that hold others of them first."""
        found: dict[fx.Node, tuple[fx.Node, int, int]] = {}
        wanted = {x for x in edge if x.target is aten.cat.default and self._is_matrix(x)}
        for x in reversed(self._all.graph.nodes):
            args: Any = x.args
            if x not in wanted or args[1:] not in ((1,), (-1,)):
                continue
            end = 0
            for y in args[0]:
                first, end = end, end + self._all.shapes[y][1]
                if self._is_matrix(y) and y.meta.get("dtype") is x.meta.get("dtype"):
                    found.setdefault(y, (x, first, end))
        return found

    def _is_matrix(self, x: fx.Node) -> bool:
        return self._all.is_whole(x) and len(self._all.shapes[x]) == 2

    def _smallest(self, x: fx.Node) -> fx.Node:
        """Of x and what it is a view of, what has fewest numbers, of those with rows first."""
        found = [y for y in self._chain(x) if self._all.is_whole(y)]
        return min(found, key=self._size, default=x)

    def _size(self, x: fx.Node) -> int:
        return math.prod(self._all.shapes[x])

    def _is_made_of(self, x: fx.Node, kept: Mapping[fx.Node, None]) -> bool:
        """Whether it costs one pass over what is kept anyway, or a table: less than to keep it."""
        others = [y for y in kept if y is not x]
        if x.target is aten.embedding.default:  # of weights, which are those of now
            args: Any = x.args
            return self._chain(args[0])[-1] in self._all.operands and args[1] in others
        if x.target not in _PASSES or not self._all.is_whole(x):
            return False
        return all(
            source in self._here
            and any(y in others or y in self.within for y in self._chain(source))
            for source in x.all_input_nodes
            if source is not self._all.n
        )

    def _chain(self, x: fx.Node) -> list[fx.Node]:
        """x, what it is a view or a copy of, and so on."""
        chain = [x]
        while x.target in _CHEAP:
            x = cast(fx.Node, x.args[0])
            chain.append(x)
        return chain

    def _reached(self, roots: Sequence[fx.Node]) -> list[fx.Node]:
        """Nodes with a tangent behind the roots, and at the edge those without."""
        seen: dict[fx.Node, None] = {}
        waiting = list(roots)
        while waiting:
            x = waiting.pop()
            if x not in seen:
                seen[x] = None
                if self._of[x]:
                    waiting += x.all_input_nodes
        return list(seen)

    def _anchor(self, x: fx.Node) -> fx.Node:
        """What is kept for x: the first that it is a view of, of those with one row for each row.

        Else x itself, if one of its axes counts rows. Of an axis where rows and others are one, a
        view of x that keeps them apart is wanted; without it rows are taken to come first, and the
        trial of the programs tells.
        """
        chain = self._chain(x)
        for wanted in (self._all.is_whole, lambda y: self._all.rows.get(y) == 1):
            if found := [y for y in chain if wanted(y)]:
                return found[-1]
        for y in chain:
            for view in y.users if y in self._all.rows else ():
                if view.target in VIEWS and self._all.rows.get(view) == 1:
                    self.apart[y] = view
                    return view
        if self._all.is_many(x):
            return x
        raise GraphError(
            f"its gradient needs {x.target} of shape {self._all.shapes.get(x)} of {SIZES[0]} rows, "
            "which has not one row for each"
        )
