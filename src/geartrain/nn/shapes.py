"""Ready-made shapes: the loops that most models want, each a line.

    Recurrent       h0 ─► cell ─► cell ─► ... ─► h at the last vertex         along a list
    Tree            leaves ─► branch ─► ... ─► every vertex of the tree       from the leaves up
    MessagePassing  vertices ─► cell ─► ... ─► vertices, after some steps     over the edges

A shape is called with a stream and returns one; around it one writes inputs, read-outs and losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from geartrain.graph.graph import Stream
from geartrain.graph.operator import Keep, PartLike
from geartrain.graph.operators import Routing
from geartrain.graph.region import Run
from geartrain.graph.through import Through
from geartrain.nodes.reductions import How


@final
class Recurrent:
    """Apply a cell along the vertices of each instance, 0 to the last.

    Args:
        cell: ``(state, *read) -> state``, each one tensor or a tuple of equal length; a ``Part``
            or a module.
        read: Vertex columns given to the cell at each vertex (tokens).
        name: Of the cell's node; the nodes of the loop are named after it.
        part, keep: As in ``Stream.through``.
        run: As in ``Graph.loop``.

    Called with the stream of first states, one row an instance at vertex 0.

    Returns:
        The stream of states behind the last vertex. ``every(stream)`` returns the states behind
        each vertex instead.
    """

    def __init__(
        self,
        cell: nn.Module | PartLike,
        *,
        read: str | Sequence[str] = (),
        name: str | None = None,
        part: PartLike | None = None,
        keep: Keep | None = None,
        run: Run | None = None,
    ) -> None:
        self._cell, self._read, self._name = cell, read, name
        self._part, self._keep, self._run = part, keep, run

    def __call__(self, start: Stream) -> Stream:
        return self._wire(start)[1]

    def every(self, start: Stream) -> Stream:
        """The states behind each vertex; the last one goes no further."""
        states, last = self._wire(start)
        last.stop()
        return states

    def _wire(self, start: Stream) -> tuple[Stream, Stream]:
        loop = start.graph.loop(name=_beside(self._name, "loop"), run=self._run)
        loop.join(start)
        states = loop.through(
            self._cell, read=self._read, name=self._name, part=self._part, keep=self._keep
        )
        assert isinstance(states.operator, Through)
        states.operator.every_vertex = True
        on, last = states.where(lambda m: m.vertex + 1 < m.size, name=_beside(self._name, "again"))
        _ends(last, "vertex")
        loop.join(on.move(vertex=lambda m: m.vertex + 1, name=_beside(self._name, "next vertex")))
        return states, last


@final
class Tree:
    """Apply a branch cell from the leaves of each tree to its root.

    Args:
        branch: ``(*children, *read) -> states``: gets what came of the children's states, gives
            those of their parents; a ``Part`` or a module.
        children: How many children an inner vertex has: a number, or the name of a vertex column of
            the *child* that holds it (its siblings, itself included).
        how: What comes of them: ``stack`` gives ``(n, children, ...)`` in the order of their slots;
            ``sum``, ``mean``, ``max`` reduce them to ``(n, ...)``. Default: ``stack`` for a number,
            ``sum`` for a column, as numbers that differ cannot be stacked.
        read: Vertex columns of the parent given to the branch.
        parent: Vertex column with the parent, -1 at the root.
        slot: Vertex column with the position among its siblings, from 0.
        name: Of the branch's node; the nodes of the loop are named after it.
        part, keep: As in ``Stream.through``.
        run: As in ``Graph.loop``.

    Called with the stream of leaf states. Returns the stream of all vertices' states.

    Source: the tree of Gaunt et al. 2017, arXiv:1705.09786; cells as of Tai et al. 2015,
    arXiv:1503.00075.
    """

    def __init__(
        self,
        branch: nn.Module | PartLike,
        *,
        children: int | str = 2,
        how: How | None = None,
        read: str | Sequence[str] = (),
        parent: str = "parent",
        slot: str = "slot",
        name: str | None = None,
        part: PartLike | None = None,
        keep: Keep | None = None,
        run: Run | None = None,
    ) -> None:
        self._branch, self._children, self._read = branch, children, read
        self._how: How = how or ("stack" if isinstance(children, int) else "sum")
        self._parent, self._slot, self._name = parent, slot, name
        self._part, self._keep, self._run = part, keep, run

    def __call__(self, leaves: Stream) -> Stream:
        parent, name = self._parent, self._name
        vertices = leaves.graph.loop(name=_beside(name, "loop"), run=self._run)
        vertices.join(leaves)
        inner, root = vertices.where(
            lambda m: getattr(m, parent) >= 0, name=_beside(name, "has a parent")
        )
        family = inner.group(
            by={"vertex": lambda m: getattr(m, parent)},
            size=self._children,
            order=self._slot,
            how=self._how,
            name=_beside(name, "children"),
        )
        states = family.through(
            self._branch, read=self._read, name=name, part=self._part, keep=self._keep
        )
        vertices.join(states)
        root.stop(name=_beside(name, "root"))
        return vertices


@final
class MessagePassing:
    """Apply a cell to all vertices of a graph, a number of times.

    Args:
        cell: ``(h, inside) -> h``: gets the vertices of many instances ``(rows, hidden)`` and an
            ``Inside`` with their edges; a ``Part`` or a module, such as ``GatedGraphCell``.
        steps: How often.
        read: Vertex columns given to the cell before ``inside``.
        name: Of the cell's node; the nodes of the loop are named after it.
        part, keep: As in ``Stream.through``.

    Called with a stream of bundles, the vertices of an instance each (``input(bundle=True)``).
    Returns the stream of bundles after the last step. Rows count their steps in the state column
    ``step``, which starts at 0 each time that they come in.

    Source: Gilmer et al. 2017, arXiv:1704.01212; gated: Li et al. 2016, arXiv:1511.05493.
    """

    def __init__(
        self,
        cell: nn.Module | PartLike,
        *,
        steps: int,
        read: str | Sequence[str] = (),
        name: str | None = None,
        part: PartLike | None = None,
        keep: Keep | None = None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"MessagePassing(steps={steps}): give 1 or more")
        self._cell, self._steps, self._read = cell, steps, read
        self._name, self._part, self._keep = name, part, keep

    def __call__(self, vertices: Stream) -> Stream:
        steps, name = self._steps, self._name
        loop = vertices.graph.loop(name=_beside(name, "loop"))
        loop.join(vertices.move(step=0, name=_beside(name, "first step")))
        passed = loop.through(
            self._cell, read=self._read, inside=True, name=name, part=self._part, keep=self._keep
        )
        on, done = passed.where(lambda m: m.step + 1 < steps, name=_beside(name, "again"))
        _ends(done, "step")
        loop.join(on.move(step=lambda m: m.step + 1, name=_beside(name, "next step")))
        return done


def first_states(hidden: int, *, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    """A function for ``through`` that makes zero states ``(n, hidden)`` of any rows."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], hidden, dtype=dtype, device=x.device)

    return zeros


def _ends(stream: Stream, moved: str) -> None:
    """Every row leaves the loop by this stream in the end, with a column moved."""
    assert isinstance(stream.operator, Routing)
    stream.operator.ends = {stream.port: frozenset((moved,))}


def _beside(name: str | None, what: str) -> str | None:
    """A name for a node of the loop around a named one; None lets the graph choose."""
    return None if name is None else f"{name}: {what}"


__all__ = [
    "MessagePassing",
    "Recurrent",
    "Tree",
    "first_states",
]
