"""Frames: the integer columns that instances bring, all of them in one arena.

    slot      0        1             2
    base      0        9             14            vertices of an instance are contiguous, so
    parent  [ 1 .. -1 | 2 2 4 4 -1 | ...           ``m.parent`` is one gather
    edges   in CSR form, sorted by source: a flatmap over edges is two gathers

State columns hold absolute indices; users see and return local ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import DataError, GraphError
from geartrain.ir.instance import Instance, as_column
from geartrain.ir.message import INSTANCE, VERTEX, Forward, IntArray, ranges
from geartrain.ir.rows import Ranges

Column = NDArray[Any]


@final
class Table:
    """Named columns over ranges that come and go."""

    def __init__(self, kind: str, names: Iterable[str], capacity: int = 4096) -> None:
        self.kind = kind
        self.ranges = Ranges(capacity)
        self.columns: dict[str, Column | None] = dict.fromkeys(names)
        self._guessed: set[str] = set()  # only empty columns came: their type says nothing

    def place(self, n: int) -> int:
        """The start of n fresh entries."""
        start = self.ranges.take(n)
        if start is None:
            capacity = self.ranges.capacity
            while capacity - self.ranges.capacity < n:
                capacity *= 2
            self.grow(capacity)
            start = self.ranges.take(n)
            assert start is not None
        return start

    def grow(self, capacity: int) -> None:
        self.ranges.grow(capacity)
        for name, column in self.columns.items():
            if column is not None:
                grown = np.zeros((capacity, *column.shape[1:]), column.dtype)
                grown[: len(column)] = column
                self.columns[name] = grown

    def write(self, name: str, start: int, values: Column) -> None:
        column = self.columns[name]
        if column is None or (name in self._guessed and len(values)):
            column = np.zeros((self.ranges.capacity, *values.shape[1:]), values.dtype)
            self.columns[name] = column
            (self._guessed.discard if len(values) else self._guessed.add)(name)
        column[start : start + len(values)] = values

    def fitting(self, name: str, part: Column, before: Sequence[Column], called: str) -> Column:
        """What one instance brings, of the type that earlier ones (or those before it) brought.

        Raises:
            DataError: It is of another type, or no numbers.
        """
        like = None if name in self._guessed else self.columns[name]
        if like is None:
            like = next((b for b in before if len(b)), None)
        if len(part) == 0:  # an empty list has a type of numpy's choosing
            return np.zeros(0, np.int64) if like is None else like[:0]
        if part.dtype.kind not in "if":
            raise DataError(
                f"{called}: {self.kind} column '{name}' holds {part.dtype}; give integers or floats"
            )
        if like is not None and (like.dtype, like.shape[1:]) != (part.dtype, part.shape[1:]):
            raise DataError(
                f"{called}: {self.kind} column '{name}' came as {part.dtype} {part.shape[1:]}, "
                f"earlier instances brought {like.dtype} {like.shape[1:]}; use one type throughout"
            )
        return part

    def __getitem__(self, name: str) -> Column:
        column = self.columns[name]
        if column is None:
            raise DataError(f"{self.kind} column '{name}' was never brought by an instance")
        return column


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
        built_in = ("out_start", "out_degree", "in_degree") if self.has_edges else ()
        self.vertices = Table("vertex", (*vertex, *built_in))
        self.edges = Table("edge", self.edge_names)
        self.values = Table("value", value, capacity=64)
        self._spare = list(range(63, -1, -1))
        self.base = np.zeros(64, np.int64)
        self.size = np.zeros(64, np.int64)
        self.edge_base = np.zeros(64, np.int64)
        self.edge_size = np.zeros(64, np.int64)
        self.serial = np.full(64, -1, np.int64)
        self._cohort = np.zeros(64, np.int64)
        self._cohorts: dict[int, list[int]] = {}
        self._next_cohort = 0
        self.keys: dict[int, object] = {}
        self.optional: frozenset[str] = frozenset()  # columns that may be missing: read as 0

    def admit(self, instances: Sequence[Instance], serials: Sequence[int]) -> IntArray:
        """Give instances their slots and places; returns the slots.

        Raises:
            DataError: A column is missing, of unequal length, or points outside of its instance;
                nothing of any of these instances is kept then.
        """
        sizes = np.array([_size(i, self.vertex_names) for i in instances], np.int64)
        vertex = self._collect(instances, self.vertices, self.vertex_names, sizes)
        edge_sizes = np.zeros(len(instances), np.int64)
        edge: dict[str, Column] = {}
        if self.has_edges:
            edge_sizes = np.array([_edges(i) for i in instances], np.int64)
            edge = self._collect(instances, self.edges, self.edge_names, edge_sizes)
            _check_ends(instances, edge, sizes, edge_sizes)
        values = {n: self._values(instances, n) for n in self.value_names}

        slots = self._take_slots(len(instances))
        start = self.vertices.place(int(sizes.sum()))
        edge_start = self.edges.place(int(edge_sizes.sum())) if self.has_edges else 0
        self.base[slots] = start + np.cumsum(sizes) - sizes
        self.size[slots] = sizes
        self.edge_base[slots] = edge_start + np.cumsum(edge_sizes) - edge_sizes
        self.edge_size[slots] = edge_sizes
        self.serial[slots] = serials
        for name, column in vertex.items():
            self.vertices.write(name, start, column)
        if self.has_edges:
            self._place_edges(slots, sizes, edge_sizes, edge, start, edge_start)
        for name, column in values.items():
            for slot, row in zip(slots.tolist(), column, strict=True):
                self.values.write(name, slot, row[None])
        cohort = self._next_cohort
        self._next_cohort += 1
        self._cohort[slots] = cohort
        self._cohorts[cohort] = [
            len(instances), start, int(sizes.sum()), edge_start, int(edge_sizes.sum())
        ]  # fmt: skip
        for slot, instance in zip(slots.tolist(), instances, strict=True):
            self.keys[slot] = instance.key
        return slots

    def release(self, slots: IntArray) -> None:
        """The instances in these slots are finished."""
        for slot in slots.tolist():
            cohort = self._cohorts[int(self._cohort[slot])]
            cohort[0] -= 1
            if cohort[0] == 0:
                _, start, n, edge_start, m = cohort
                if n:
                    self.vertices.ranges.give(start, n)
                if m:
                    self.edges.ranges.give(edge_start, m)
                del self._cohorts[int(self._cohort[slot])]
            del self.keys[slot]
        self.serial[slots] = -1
        self._spare.extend(slots.tolist())

    def describe(self, slot: int) -> str:
        """What errors call the instance in a slot."""
        key = self.keys.get(slot)
        name = f"instance {int(self.serial[slot])}"
        return name if key is None else f"{name} ({key})"

    def describe_several(self, slots: IntArray) -> str:
        """The first instances of these slots by name, and how many more there are."""
        live = [s for s in np.unique(slots).tolist() if s in self.keys]
        more = f" and {len(live) - 3} more" if len(live) > 3 else ""
        return ", ".join(self.describe(s) for s in live[:3]) + more

    @property
    def active(self) -> int:
        return len(self.keys)

    def _take_slots(self, n: int) -> IntArray:
        while len(self._spare) < n:
            old = self.base.size
            for name in ("base", "size", "edge_base", "edge_size", "serial", "_cohort"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            self.values.grow(2 * old)
            self._spare[:0] = range(2 * old - 1, old - 1, -1)
        slots = [self._spare.pop() for _ in range(n)]
        return np.array(slots, np.int64)

    def _collect(
        self, instances: Sequence[Instance], table: Table, names: Sequence[str], sizes: IntArray
    ) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        kind = table.kind
        for name in names:
            parts: list[Column] = []
            for instance, n in zip(instances, sizes.tolist(), strict=True):
                given: Mapping[str, Any] = getattr(instance, kind)
                if name not in given and name in self.optional:
                    parts.append(_zeros(table, name, n))
                    continue
                if name not in given:
                    raise DataError(
                        f"{_called(instance)}: {kind} column '{name}' is missing; it has "
                        f"{sorted(given) or 'none'}"
                    )
                part = as_column(given[name])
                if part.ndim == 0 or len(part) != n:
                    raise DataError(
                        f"{_called(instance)}: {kind} column '{name}' has shape {part.shape}, "
                        f"expected {n} entries, one for every {kind}"
                    )
                parts.append(table.fitting(name, part, parts, _called(instance)))
            some = [p for p in parts if len(p)] or parts[:1]
            columns[name] = np.concatenate(some) if len(some) > 1 else some[0]
        return columns

    def _values(self, instances: Sequence[Instance], name: str) -> Column:
        parts: list[Column] = []
        for instance in instances:
            if name not in instance.value:
                if name not in self.optional:
                    raise DataError(
                        f"{_called(instance)}: value '{name}' is missing; it has "
                        f"{sorted(instance.value) or 'none'}"
                    )
                parts.append(_zeros(self.values, name, 1))
                continue
            part = as_column(instance.value[name])[None]
            parts.append(self.values.fitting(name, part, parts, _called(instance)))
        return np.concatenate(parts)

    def _place_edges(
        self,
        slots: IntArray,
        sizes: IntArray,
        edge_sizes: IntArray,
        edge: dict[str, Column],
        start: int,
        edge_start: int,
    ) -> None:
        offsets = np.repeat(self.base[slots] - start, edge_sizes)
        source, target = edge["source"] + offsets, edge["target"] + offsets
        if (np.diff(source) < 0).any():
            order = np.argsort(source, kind="stable")
            edge = {name: column[order] for name, column in edge.items()}
            source, target = source[order], target[order]
        for name, column in edge.items():
            self.edges.write(name, edge_start, column)
        total = int(sizes.sum())
        out = np.bincount(source, minlength=total).astype(np.int64)
        self.vertices.write("out_degree", start, out)
        self.vertices.write("out_start", start, edge_start + np.cumsum(out) - out)
        into = np.bincount(target, minlength=total).astype(np.int64)
        self.vertices.write("in_degree", start, into)


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
        return sorted({*self.state, *self.vertex, *self.edge, *self.value, "size", "payload"})


@final
class View:
    """The rows of a batch as a predicate, mover or key sees them: ``m.parent``, ``m.step``.

    Attributes are state columns, or frame columns looked up at the row's vertex, edge or instance;
    ``m.size`` is the number of vertices of the row's instance, ``m.payload`` the tuple of payload
    tensors. Columns are int64 arrays ``(n,)`` (frame columns of floats stay floats). Vertices and
    edges are numbered inside their instance.
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
                    "every vertex, or make it a column of whole instances: Graph(value=...)"
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
        if batch.index is None:
            return batch.payload
        rows = torch.from_numpy(batch.index)
        return tuple(p.index_select(0, rows) for p in batch.payload)

    @property
    def lengths(self) -> IntArray | None:
        """Lengths of the bundles, or None where every message is one row."""
        return self._batch.lengths


def edges_inside(
    arena: Arena, slots: IntArray, lengths: IntArray, names: Sequence[str]
) -> dict[str, IntArray]:
    """The edges of bundles of all vertices of their instances, offset to the batch.

    Raises:
        GraphError: A bundle does not hold exactly the vertices of its instance.
    """
    if not np.array_equal(arena.size[slots], lengths):
        raise GraphError(
            f"bundles of {lengths[:4].tolist()} rows came where edges are asked for, but their "
            f"instances have {arena.size[slots][:4].tolist()} vertices; one row for every vertex"
        )
    which = ranges(arena.edge_base[slots], arena.edge_size[slots])
    offsets = np.repeat(np.cumsum(lengths) - lengths, arena.edge_size[slots])
    found = {name: arena.edges[name][which] for name in names}
    found["source"] = found["source"] + offsets
    found["target"] = found["target"] + offsets
    return found


def _called(instance: Instance) -> str:
    return "instance" if instance.key is None else f"instance {instance.key}"


def _size(instance: Instance, names: Sequence[str]) -> int:
    given = [n for n in names[:1] if n in instance.vertex] or list(instance.vertex)[:1]
    for name in given:
        return _entries(instance, "vertex", name, instance.vertex[name])
    most = 1
    for brought in instance.inputs.values():
        rows, at = brought if isinstance(brought, tuple) else (brought, None)
        most = max(most, len(rows) if at is None else int(np.max(np.asarray(at), initial=-1)) + 1)
    return most


def _edges(instance: Instance) -> int:
    source = instance.edge.get("source")
    if source is None:
        raise DataError(
            f"{_called(instance)}: edge column 'source' is missing; it has "
            f"{sorted(instance.edge) or 'none'}; an instance without edges brings empty arrays"
        )
    return _entries(instance, "edge", "source", source)


def _entries(instance: Instance, kind: str, name: str, column: object) -> int:
    entries = as_column(column)
    if entries.ndim == 0:
        raise DataError(f"{_called(instance)}: {kind} column '{name}' is a number, not an array")
    return len(entries)


def _check_ends(
    instances: Sequence[Instance], edge: dict[str, Column], sizes: IntArray, edge_sizes: IntArray
) -> None:
    limit = np.repeat(sizes, edge_sizes)
    for name in ("source", "target"):
        column = edge[name]
        if column.dtype.kind != "i" and column.size:
            first = instances[int(np.argmax(edge_sizes > 0))]
            raise DataError(
                f"{_called(first)}: edge column '{name}' holds {column.dtype}; expected integers"
            )
        edge[name] = column = column.astype(np.int64, copy=False)
        bad = np.flatnonzero((column < 0) | (column >= limit))
        if bad.size:
            owner = int(np.searchsorted(np.cumsum(edge_sizes), bad[0], side="right"))
            raise DataError(
                f"{_called(instances[owner])}: an edge has {name} {int(column[bad[0]])}, but the "
                f"instance has vertices 0..{int(sizes[owner]) - 1}"
            )


def _zeros(table: Table, name: str, n: int) -> Column:
    """Stands for a column that an instance may leave out."""
    known = table.columns[name]
    return np.zeros(n, np.int64) if known is None else np.zeros((n, *known.shape[1:]), known.dtype)
