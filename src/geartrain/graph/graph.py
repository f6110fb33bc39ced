"""Streams of messages: what a user writes, and the wiring that comes out of it.

    graph = Graph(vertex=("parent", "slot", "label"))
    nodes = graph.loop()                                   a Phi: sources are joined later
    nodes.join(graph.input("word").through(leaf))
    nodes.through(readout).loss(cross_entropy, target="label")
    inner, root = nodes.where(lambda m: m.parent >= 0)     a Cond
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
    nodes.join(pairs.through(branch))
    root.stop()

A stream is an output port of an operator. Used twice, it is broadcast. ``check`` finds what cannot
work before anything moves; ``wire`` makes fresh nodes, as often as one likes.

Source: static graphs for dynamic control flow, Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, final

import torch
from torch import nn

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema
from geartrain.frames.instance import Instance
from geartrain.graph import checking, drawing
from geartrain.graph.arguments import require_arguments
from geartrain.graph.draft import RESERVED, Draft
from geartrain.graph.layout import GraphLayout
from geartrain.graph.operator import AbstractOperator, Input
from geartrain.graph.operators import Joining, Merging
from geartrain.graph.region import Run
from geartrain.graph.through import Through
from geartrain.graph.verbs import AbstractStream
from geartrain.kinds import require_each, require_kind, require_word
from geartrain.nodes.method import weights_of


@final
class Stream(AbstractStream):
    """Rows on their way from one operator to the next; every verb gives the stream behind it."""

    __slots__ = ("_graph",)

    def __init__(self, graph: Graph, operator: AbstractOperator, port: int = 0) -> None:
        super().__init__(graph._draft, operator, port)
        self._graph = graph

    @property
    def graph(self) -> Graph:
        """The graph that the stream belongs to."""
        return self._graph

    def _at(self, operator: AbstractOperator, port: int = 0) -> Stream:
        return Stream(self._graph, operator, port)


@final
class Graph:
    """A static graph for dynamic control flow.

    Args:
        vertex: Columns with one entry a vertex, which every instance brings.
        edge: Columns with one entry an edge, besides ``source`` and ``target``; None: no edges.
        value: Columns with one entry an instance.
        run: How loops run of which nothing is said, and what has no loop: ``auto``, each loop as
            ``loop`` says, operators between which rows part or meet as one that takes whole
            instances, and modules that feed one another up to their losses there and back in one
            firing; ``steps``, each operator for itself. ``print(graph)`` says which.
    """

    def __init__(
        self,
        *,
        vertex: Sequence[str] = (),
        edge: Sequence[str] | None = None,
        value: Sequence[str] = (),
        run: Literal["auto", "steps"] = "auto",
    ) -> None:
        if run not in ("auto", "steps"):
            raise ValueError(f"Graph(run={run!r}): give 'auto' or 'steps'")
        self.run: Run = run
        self.vertex, self.value = _names(vertex, "vertex"), _names(value, "value")
        self.edge = None if edge is None else _names(edge, "edge")
        taken = [*self.vertex, *(self.edge or ()), *self.value]
        for name in taken:
            if taken.count(name) > 1:
                raise GraphError(
                    f"column '{name}' is declared twice; columns of vertices, edges and instances "
                    "are one set of names"
                )
            if name in RESERVED:
                raise GraphError(
                    f"column '{name}' is what m.{name} gives by itself; choose another name, none "
                    f"of {sorted(RESERVED)}"
                )
        self._draft = Draft(self.vertex, self.edge, self.value)
        self._laid: tuple[object, GraphLayout] | None = None

    def input(
        self,
        name: str,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        bundle: bool = False,
        alone: bool = False,
        **fields: int,
    ) -> Stream:
        """Where rows enter: instances bring them under this name.

        Args:
            name: The key in ``Instance.inputs``.
            shape, dtype: Of one row; learned from the first instance when not given.
            bundle: All rows of an instance travel as one message.
            alone: For bundles that are minibatches: instances are admitted one at a time, so that
                theirs may differ in shape from one to the next.
            fields: User columns and the constant that rows start with: ``step=0``.
        """
        require_kind("input", str, "the key of its rows in Instance.inputs", name=name)
        require_arguments("input", shape=shape, dtype=dtype, bundle=bundle, alone=alone)
        if any(isinstance(o, Input) and o.name == name for o in self._draft.operators):
            raise GraphError(f"input '{name}' is declared twice; use its stream twice instead")
        for column, value in fields.items():
            require_kind("input", Integral, "a whole number to start with", **{column: value})
            if column in ("vertex", "edge"):
                raise GraphError(
                    f"input('{name}', {column}={fields[column]}): instances say at which vertex a "
                    f"row is, {{'{name}': (rows, [{fields[column]}])}}; and move() changes it"
                )
            self._draft.declare(column)
        inner = None if shape is None else tuple(shape)
        return self._add(Input(self._draft.name(name, name), inner, dtype, bundle, fields, alone))

    def loop(self, *, name: str | None = None, run: Run | None = None) -> Stream:
        """A stream whose sources come later, by ``join`` (Phi).

        Args:
            name: In errors, traces and drawings; default: ``loop``.
            run: How the operators run that feed one another through this stream. ``steps``: each
                one fires for itself, with whatever rows have come. ``whole``: one firing takes
                instances through all turns; refused where that cannot be. ``auto``: whole where it
                can be. ``print(graph)`` says which, and why. Loops that share operators are one.
                Default: what the others of these say, else what the graph does, but by steps where
                a part in the loop counts rows or has a window: updates of rows would end with
                whole instances.
        """
        if run not in (None, "auto", "steps", "whole"):
            raise ValueError(f"loop(run={run!r}): give 'auto', 'steps' or 'whole'")
        return self._add(Merging(self._draft.name(name, "loop"), [[]], run, loops=True))

    def merge(self, *streams: Stream, name: str | None = None) -> Stream:
        """One stream of several (Phi)."""
        if not streams:
            raise ValueError("merge() got no stream")
        sources = self._sources(streams)
        return self._add(Merging(self._draft.name(name, "merge"), [sources]))

    def concat(
        self,
        *streams: Stream,
        on: str | Sequence[str] | None = None,
        how: Literal["features", "tuple"] = "features",
        name: str | None = None,
    ) -> Stream:
        """Wait for one row of every stream with an equal key, and put them side by side (Concat).

        Args:
            streams: Two or more; the state is that of the first.
            on: State columns of the key; default: all columns that the streams share.
            how: ``features`` concatenates the last dimension; ``tuple`` hands all payload tensors
                on, for a module of several arguments.
        """
        if len(streams) < 2:
            raise ValueError(f"concat() got {len(streams)} streams; two or more")
        sources = self._sources(streams)
        require_word("concat", ("features", "tuple"), how=how)
        if on is not None and not isinstance(on, str):
            require_each("concat", str, "a state column, or several", on=on)
        columns = (on,) if isinstance(on, str) else None if on is None else tuple(on)
        operator = Joining(self._draft.name(name, "concat"), sources, columns, how)
        return self._add(operator)

    @property
    def operators(self) -> Sequence[AbstractOperator]:
        return tuple(self._draft.operators)

    def schema(self) -> Schema:
        return Schema(self._draft.columns, self.vertex, self.edge, self.value)

    def throughs(self) -> Iterator[Through]:
        return self._draft.throughs()

    def modules(self) -> list[nn.Module]:
        """The modules of the graph, each once."""
        found = [weights_of(o.function) for o in self.throughs()]
        return list(dict.fromkeys(module for module in found if module is not None))

    def layout(self) -> GraphLayout:
        """The operators with broadcasts and numbers, and the loops and sections among them.

        Nobody is to change what it gives: it is held until something is added to the graph, or the
        graph is checked.

        Raises:
            GraphError: A stream is read by nobody, or a loop has no source.
        """
        written = self.run, [(id(o), *map(len, o.sources)) for o in self._draft.operators]
        if self._laid is None or self._laid[0] != written:
            self._laid = written, GraphLayout(self._draft.operators, self.run)
        return self._laid[1]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_laid": None}

    def check(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        like: Instance | None = None,
    ) -> None:
        """Find what cannot work, before anything moves.

        Functions run on meta tensors, and then on a few rows of random numbers: neither they nor
        any generator of random numbers is changed by it.

        Args:
            shapes: Input name to shape and dtype of one row, for inputs declared without.
            like: An instance of the data, whose columns and edges such rows shall have. Without it
                what reads columns is tried on the first real rows.

        Raises:
            GraphError: Unknown columns, unread streams, payloads that do not fit, weights that
                belong to no part, modules that mix rows, endless loops; names node and port, what
                came and what was expected.
            TypeError: A shape is given without a dtype, or otherwise.
        """
        self._laid = None  # operators learn what is found
        checking.check(self, shapes or {}, like)

    def __str__(self) -> str:
        return drawing.text(self)

    def mermaid(self) -> str:
        """The graph as Mermaid flowchart source."""
        return drawing.mermaid(self)

    def dot(self) -> str:
        """The graph as Graphviz DOT source."""
        return drawing.dot(self)

    def _add(self, operator: AbstractOperator) -> Stream:
        self._draft.add(operator)
        return Stream(self, operator)

    def _sources(self, streams: Sequence[Stream]) -> list[tuple[AbstractOperator, int]]:
        require_each("Graph", Stream, "streams of this graph", streams=streams)
        for stream in streams:
            if stream.graph is not self:
                raise GraphError(f"{stream} belongs to another graph")
        return [(s.operator, s.port) for s in streams]


def _names(names: Sequence[str], kind: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"Graph({kind}={names!r}): give a tuple of names, ({names!r},)")
    found = tuple(names) if isinstance(names, Iterator) else names
    require_each("Graph", str, "a tuple of names, ('label',)", **{kind: found})
    return tuple(found)
