"""Frames: the integer columns that instances bring, all of them in one arena.

    slot      0        1             2
    base      0        9             14            vertices of an instance are contiguous, so
    parent  [ 1 .. -1 | 2 2 4 4 -1 | ...           ``m.parent`` is one gather
    edges   as their instance numbers them; ``BY_SOURCE`` has them sorted by source, in CSR form:
            a flatmap over edges is three gathers

State columns hold absolute indices; users see and return local ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geartrain.device import upload
from geartrain.errors import GraphError
from geartrain.frames.message import INSTANCE, VERTEX, Forward, IntArray
from geartrain.frames.packed import Packed
from geartrain.frames.precision import widened
from geartrain.frames.table import Table

# Columns of the arena's own; no attribute of a view is called so.
FIRST_OUT: Final = "first out"  # of a vertex: where its edges begin in BY_SOURCE
BY_SOURCE: Final = "by source"  # edges, those of a vertex one after the other


@final
@dataclass(frozen=True, slots=True)
class Cohort:
    """The places of instances that were admitted together; given back with the last of them."""

    start: int
    vertices: int
    edge_start: int
    edges: int


@final
@dataclass(frozen=True, slots=True)
class Admitted:
    """Instances that have come into an arena together, as another arena adopts them.

    Args:
        slots: int64 ``(n,)``.
        places: int64 ``(7, n)``: base, size, edge base, edge size, serial, copy, turn of each.
        start, edge_start: Where their vertices and edges begin.
        names: What errors call them; empty: their numbers alone.
        vertex, edge, value: Columns of all of them; of values an entry each.
        fed: Input name to the rows that each brought, where somebody counts these.
    """

    slots: IntArray
    places: IntArray
    start: int
    edge_start: int
    names: Sequence[str]
    vertex: Mapping[str, NDArray[Any]]
    edge: Mapping[str, NDArray[Any]]
    value: Mapping[str, NDArray[Any]]
    fed: Mapping[str, IntArray]

    @property
    def copy(self) -> int:
        """Of the graph, that has the first of them."""
        return int(self.places[5, 0])


@final
class Arena:
    """The frames of all instances in flight.

    Args:
        vertex: Vertex columns that every instance brings.
        edge: Edge columns besides ``source`` and ``target``; None when instances have no edges.
        value: Columns with one entry per instance.
    """

    def __init__(
        self,
        vertex: Sequence[str] = (),
        edge: Sequence[str] | None = None,
        value: Sequence[str] = (),
    ) -> None:
        self.has_edges = edge is not None
        self.vertex_names, self.value_names = tuple(vertex), tuple(value)
        self.edge_names = ("source", "target", *edge) if edge is not None else ()
        built_in = (FIRST_OUT, "out_degree", "in_degree") if self.has_edges else ()
        self.vertices = Table("vertex", (*vertex, *built_in))
        self.edges = Table("edge", (*self.edge_names, BY_SOURCE))
        self.values = Table("value", value, capacity=64)
        self._spare = list(range(63, -1, -1))
        self.base = np.zeros(64, np.int64)
        self.size = np.zeros(64, np.int64)
        self.edge_base = np.zeros(64, np.int64)
        self.edge_size = np.zeros(64, np.int64)
        self.serial = np.full(64, -1, np.int64)
        self.copy = np.zeros(64, np.int64)  # of the graph, that has the instance
        self.turn = np.zeros(64, np.int64)  # its number among those of its copy, or of all
        self.keys: NDArray[np.object_] = np.full(64, None, np.object_)
        self.fed: dict[str, IntArray] = {}  # input name to the rows that each brought, by slot
        self.active = 0
        self.latest = -1
        """No instance that has come has a later turn."""
        self._cohort = np.zeros(64, np.int64)
        self._cohorts = [Cohort(0, 0, 0, 0)] * 64
        self._left = np.zeros(64, np.int64)  # instances of a cohort that are unfinished
        self._spare_cohorts = list(range(63, -1, -1))
        self.optional: frozenset[str] = frozenset()  # columns that may be missing: read as 0
        self.news: list[tuple[IntArray, Cohort]] | None = None  # admitted; None: nobody asks

    def admit(self, packed: Packed, first_serial: int) -> IntArray:
        """Give instances their slots and places.

        Args:
            packed: What they bring.
            first_serial: The number of the first; the others count on from it.

        Returns:
            Their slots.
        """
        n = len(packed)
        slots = self._take_slots(n)
        vertices = int(packed.vertex_ends[-1] - packed.vertex_ends[0])
        edges = int(packed.edge_ends[-1] - packed.edge_ends[0])
        start = self.vertices.place(vertices)
        edge_start = self.edges.place(edges) if self.has_edges else 0
        self.base[slots] = packed.vertex_ends[:-1] + (start - int(packed.vertex_ends[0]))
        self.size[slots] = packed.sizes
        self.serial[slots] = np.arange(first_serial, first_serial + n)
        self.turn[slots] = self.serial[slots]
        self.latest = max(self.latest, first_serial + n - 1)  # turns of a copy are no later
        for name, column in packed.vertex.items():
            self.vertices.write(name, start, column)
        if self.has_edges:
            shift = edge_start - int(packed.edge_ends[0])
            self.edge_base[slots] = packed.edge_ends[:-1] + shift
            self.edge_size[slots] = packed.edge_sizes
            for name, column in packed.edge.items():
                self.edges.write(name, edge_start, column)
            self.vertices[FIRST_OUT][start : start + vertices] += shift
            self.edges[BY_SOURCE][edge_start : edge_start + edges] += shift
        for name, column in packed.value.items():
            self.values.put(name, slots, column)
        for name, fed in self.fed.items():
            fed[slots] = packed.inputs[name].lengths
        self.keys[slots] = packed.keys
        self.active += n
        cohort = Cohort(start, vertices, edge_start, edges)
        self._open_cohort(slots, cohort)
        if self.news is not None:
            self.news.append((slots, cohort))
        return slots

    def take_news(self) -> list[Admitted]:
        """What was admitted since the last call, if ``news`` is kept."""
        found, self.news = self.news or [], []
        return [self._told(slots, cohort) for slots, cohort in found]

    def _told(self, slots: IntArray, cohort: Cohort) -> Admitted:
        vertices = slice(cohort.start, cohort.start + cohort.vertices)
        edges = slice(cohort.edge_start, cohort.edge_start + cohort.edges)
        keys = self.keys[slots]
        named = any(key is not None for key in keys.tolist())
        return Admitted(
            slots,
            np.stack([column[slots] for column in self._places()]),
            cohort.start,
            cohort.edge_start,
            ["" if key is None else str(key) for key in keys.tolist()] if named else (),
            {n: x[vertices] for n, x in self.vertices.columns.items() if x is not None},
            {n: x[edges] for n, x in self.edges.columns.items() if x is not None},
            {n: x[slots] for n, x in self.values.columns.items() if x is not None},
            {name: fed[slots] for name, fed in self.fed.items()},
        )

    def _places(self) -> list[IntArray]:
        return [
            *(self.base, self.size, self.edge_base, self.edge_size),
            *(self.serial, self.copy, self.turn),
        ]

    def adopt(self, told: Admitted) -> None:
        """Have these instances where another arena has them; for an arena that admits none."""
        slots = told.slots
        self.latest = max(self.latest, int(told.places[-1].max(initial=-1)))
        while self.base.size <= int(slots.max(initial=0)):
            self._grow_slots()
        for column, given in zip(self._places(), told.places, strict=True):
            column[slots] = given
        self.keys[slots] = None
        for slot, name in zip(slots.tolist(), told.names, strict=False):
            self.keys[slot] = name or None
        for table, columns, start in (
            (self.vertices, told.vertex, told.start),
            (self.edges, told.edge, told.edge_start),
        ):
            for name, column in columns.items():
                while table.ranges.capacity < start + len(column):
                    table.grow(2 * table.ranges.capacity)
                table.write(name, start, column)
        for name, column in told.value.items():
            self.values.put(name, slots, column)
        for name, column in told.fed.items():
            self.count_fed(name)
            self.fed[name][slots] = column

    def forget(self, slots: IntArray) -> None:
        """Adopted instances have finished."""
        self.serial[slots] = -1

    def count_fed(self, name: str) -> None:
        """From now on know how many rows each instance brings to an input."""
        self.fed.setdefault(name, np.zeros(self.base.size, np.int64))

    def release(self, slots: IntArray) -> None:
        """The instances in these slots, each named once, are finished."""
        cohorts = self._cohort[slots]
        counts = np.bincount(cohorts)
        touched = np.flatnonzero(counts)
        self._left[touched] -= counts[touched]
        for number in touched[self._left[touched] == 0].tolist():
            self._close_cohort(number)
        self.serial[slots] = -1
        self.keys[slots] = None
        self.active -= slots.size
        self._spare.extend(slots.tolist())

    def describe(self, slot: int) -> str:
        """What errors call the instance in a slot."""
        return _called(int(self.serial[slot]), self.keys[slot])

    def describer(self, slots: IntArray) -> Callable[[int], str]:
        """``describe`` for one of these slots, by its place among them, whatever comes of it."""
        serial, keys = self.serial[slots], self.keys[slots]
        return lambda i: _called(int(serial[i]), keys[i])

    def describe_several(self, slots: IntArray) -> str:
        """The first instances of these slots by name, and how many more there are."""
        live = [s for s in np.unique(slots).tolist() if self.serial[s] >= 0]
        more = f" and {len(live) - 3} more" if len(live) > 3 else ""
        return ", ".join(self.describe(s) for s in live[:3]) + more

    def _take_slots(self, n: int) -> IntArray:
        while len(self._spare) < n:
            self._grow_slots()
        slots = np.array(self._spare[: -n - 1 : -1], np.int64)
        del self._spare[-n:]
        return slots

    def _grow_slots(self) -> None:
        old = self.base.size
        names = (
            *("base", "size", "edge_base", "edge_size", "serial", "copy", "turn"),
            *("_cohort", "keys"),
        )
        for name in names:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        for name, fed in self.fed.items():
            self.fed[name] = np.concatenate([fed, np.zeros_like(fed)])
        self.serial[old:] = -1
        self.values.grow(2 * old)
        self._spare[:0] = range(2 * old - 1, old - 1, -1)

    def _open_cohort(self, slots: IntArray, cohort: Cohort) -> None:
        if not self._spare_cohorts:
            old = len(self._cohorts)
            self._left = np.concatenate([self._left, np.zeros(old, np.int64)])
            self._cohorts += [cohort] * old
            self._spare_cohorts = list(range(2 * old - 1, old - 1, -1))
        number = self._spare_cohorts.pop()
        self._cohort[slots] = number
        self._cohorts[number] = cohort
        self._left[number] = slots.size

    def _close_cohort(self, number: int) -> None:
        cohort = self._cohorts[number]
        if cohort.vertices:
            self.vertices.ranges.give(cohort.start, cohort.vertices)
        if cohort.edges:
            self.edges.ranges.give(cohort.edge_start, cohort.edges)
        self._spare_cohorts.append(number)


def _called(serial: int, key: object) -> str:
    name = f"instance {serial}"
    return name if key is None else f"{name} ({key})"


@final
class Schema:
    """Which names mean what: state columns of the graph, and columns of its frames."""

    def __init__(
        self,
        state: Sequence[str],
        vertex: Sequence[str],
        edge: Sequence[str] | None,
        value: Sequence[str],
    ) -> None:
        self.state = {name: i for i, name in enumerate(state)}
        self.vertex = frozenset(vertex) | (
            {"out_degree", "in_degree"} if edge is not None else frozenset()
        )
        self.edge = frozenset(("source", "target", *edge)) if edge is not None else frozenset()
        self.value = frozenset(value)

    def names(self) -> list[str]:
        """All names that a predicate may read."""
        state = (name for name in self.state if name.isidentifier())  # no handles of memories
        return sorted({*state, *self.vertex, *self.edge, *self.value, "size", "payload"})


@final
class View:
    """The rows of a batch as a predicate, mover or key sees them: ``m.parent``, ``m.step``.

    Attributes are state columns, or frame columns looked up at the row's vertex, edge or instance;
    ``m.size`` is the number of vertices of the row's instance, ``m.payload`` the tuple of payload
    tensors. Columns are int64 arrays ``(n,)`` (frame columns of floats stay floats). Vertices and
    edges are numbered inside their instance. Of bundles columns have an entry each, and payload
    tensors the rows of all, one bundle below the other: ``m.lengths`` says how many each has.
    """

    __slots__ = ("_arena", "_batch", "_nowhere", "_schema")

    def __init__(
        self, batch: Forward, arena: Arena, schema: Schema, nowhere: str | None = None
    ) -> None:
        self._batch, self._arena, self._schema = batch, arena, schema
        self._nowhere = nowhere  # why the rows are at no vertex, if they are not

    def __len__(self) -> int:
        return len(self._batch)

    def __getattr__(self, name: str) -> Any:
        schema, arena, state = self._schema, self._arena, self._batch.state
        at = schema.state.get(name)
        if at is not None:
            if at == VERTEX:
                return state[VERTEX] - arena.base[state[INSTANCE]]
            if name == "edge":
                return state[at] - arena.edge_base[state[INSTANCE]]
            if at == INSTANCE:
                return arena.serial[state[INSTANCE]]
            return state[at]
        if name in schema.vertex:
            if self._nowhere is not None:
                raise GraphError(
                    f"{self._nowhere}, so vertex column '{name}' cannot be read; send one row for "
                    "every vertex, make it a column of whole instances, Graph(value=...), or read "
                    "it where rows are at a vertex: before the group, or behind who pools"
                )
            return arena.vertices[name].take(state[VERTEX], 0)
        if name in schema.edge:
            if "edge" not in schema.state:
                raise GraphError(
                    f"'{name}' is an edge column, and no row of this graph is at an edge; "
                    "flatmap('edge') puts rows there"
                )
            return arena.edges[name].take(state[schema.state["edge"]], 0)
        if name in schema.value:
            return arena.values[name].take(state[INSTANCE], 0)
        if name == "size":
            return arena.size[state[INSTANCE]]
        raise AttributeError(f"rows have no '{name}'; they have {schema.names()}")

    @property
    def payload(self) -> tuple[Tensor, ...]:
        batch = self._batch
        if not batch.payload:
            raise GraphError(
                "m.payload was read where rows are told apart by their columns alone, as in the "
                "functions of a group, and in a loop that runs whole where no function was seen to "
                "read it: name m.payload in the function itself, or give graph.loop(run='steps')"
            )
        if batch.index is None:
            return tuple(map(widened, batch.payload))
        index = batch.index
        return tuple(widened(p.index_select(0, upload(index, p.device))) for p in batch.payload)

    @property
    def lengths(self) -> IntArray | None:
        """Lengths of the bundles, or None where every message is one row."""
        return self._batch.lengths
