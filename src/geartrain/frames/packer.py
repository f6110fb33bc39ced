"""Instances in columns: many are checked and joined at once, and cut into what is admitted.

    instances    [ A        B     C            ]      pack: one pass over each column
    sizes        [ 3        2     4            ]
    vertex       [ a a a    b b   c c c c      ]      part(1, 3) ─► views of B and C
    rows         [ a        b     c c          ]

Joining asks C loops of numpy for types, lengths and values of a whole column. Only where these are
irregular (lists instead of arrays, several types, a column that is left out) or wrong is an
instance looked at by itself, and an error then names it.

Integers are copied before they are checked: they become places in memory further on, where nobody
checks them again, and the user may write over his own while they are in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import DataError
from geartrain.frames.checks import add_sources, check_ends, check_finite, check_places
from geartrain.frames.columns import Columns
from geartrain.frames.frame import Arena
from geartrain.frames.instance import Instance, as_column, called, is_plain, require_plain
from geartrain.frames.message import IntArray, ends_of, ranges
from geartrain.frames.packed import Packed, PackedRows
from geartrain.frames.stacking import side_by_side, stacked
from geartrain.frames.table import Column, Table


class Entrance(Protocol):
    """What the packer must know of an input; ``graph.operator.Input`` is one.

    Attributes:
        name: Of the input.
        bundle: Whether all rows of an instance come as one message.
        shape: Of a row, or None: that of the first instance.
        dtype: Of rows, or None: that of the first instance.
    """

    name: str
    bundle: bool
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


class AbstractAdmission(Protocol):
    """What nodes demand of instances before these enter; ``graph.admission`` has it."""

    def check(self, packed: Packed, optional: frozenset[str]) -> None: ...


@final
class Packer:
    """Packs instances for the arena and the inputs of one graph.

    The type of a column, and the shape and dtype of an input's rows, are those that the first
    instance brought, or as the input declares them.

    Args:
        arena: Knows the columns, and the types of those that were admitted.
        inputs: By name.
        admission: What nodes demand of what is brought; None: nothing.
    """

    def __init__(
        self,
        arena: Arena,
        inputs: Mapping[str, Entrance],
        admission: AbstractAdmission | None = None,
    ) -> None:
        self._arena, self._inputs, self._admission = arena, inputs, admission
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def pack(self, instances: Sequence[Instance]) -> Packed:
        """Join the columns of instances.

        Args:
            instances: One or more.

        Raises:
            DataError: A column or an input is missing, unknown, of unequal length or of another
                type, points outside of its instance, holds NaN, or is not what a node can compute;
                names the instance.
        """
        try:
            return self._admissible(self._packed(instances))
        except (AttributeError, TypeError, RuntimeError):
            for instance in instances:
                require_plain(instance)
            raise

    def _packed(self, instances: Sequence[Instance]) -> Packed:
        """What instances bring, in columns."""
        arena = self._arena
        inputs = {name: self._rows(o, instances) for name, o in self._inputs.items()}
        counts = self._counts(instances, inputs)
        sizes = _sizes(instances, arena.vertex_names, inputs)
        vertex = self._columns(instances, arena.vertices, arena.vertex_names, sizes)
        edge_sizes = np.zeros(len(instances), np.int64)
        edge: dict[str, Column] = {}
        if arena.has_edges:
            edge_sizes = _lengths([_edges(i) for i in instances])
            edge = self._columns(instances, arena.edges, arena.edge_names, edge_sizes)
            check_ends(instances, edge, sizes, edge_sizes)
            add_sources(vertex, edge, sizes, edge_sizes)
        value = {n: self._value(instances, n) for n in arena.value_names}
        for name, rows in inputs.items():
            if not self._inputs[name].bundle:
                check_places(instances, name, rows, sizes)
        return Packed(
            np.fromiter([i.key for i in instances], np.object_, len(instances)),
            sizes,
            edge_sizes,
            ends_of(sizes),
            ends_of(edge_sizes),
            vertex,
            edge,
            value,
            inputs,
            counts,
        )

    def pack_columns(self, columns: Columns, places: IntArray) -> Packed:
        """Take some of many columns.

        Args:
            columns: Of all instances.
            places: int64 ``(n,)``, which are taken, one or more.

        Raises:
            DataError: They are not what the graph wants; packing them one by one says which.
        """
        arena, n = self._arena, places.size
        if (
            (arena.has_edges and not columns.edge.keys() >= set(arena.edge_names))
            or not columns.vertex.keys() >= set(arena.vertex_names)
            or not columns.value.keys() >= set(arena.value_names)
            or not columns.inputs
            or not columns.inputs.keys() <= self._inputs.keys()
        ):
            raise DataError("columns are missing, or unknown to the graph")
        sizes = columns.lengths[places]
        ends = ends_of(sizes)
        which = ranges(columns.starts[places], sizes)
        at = np.arange(which.size) - ends[:-1].repeat(sizes)
        vertex = {m: columns.vertex[m][which] for m in arena.vertex_names}
        value = {m: columns.value[m][places] for m in arena.value_names}
        self._require_types(arena.vertices, vertex)
        self._require_types(arena.values, value)
        rows = torch.from_numpy(which)
        inputs: dict[str, PackedRows] = {}
        counts = np.zeros(n, np.int64)
        for name, operator in self._inputs.items():
            given = columns.inputs.get(name)
            if given is None:
                nothing = np.zeros(n, np.int64)
                inputs[name] = PackedRows(None, nothing, _NOWHERE, ends_of(nothing))
                continue
            self._require_shape(operator, given)
            payload = given.detach().index_select(0, rows)
            if payload.is_floating_point() and not payload.isfinite().all():
                raise DataError(f"input '{name}' holds NaN or infinity")
            inputs[name] = PackedRows(payload, sizes, at, ends)
            counts += 1 if operator.bundle else sizes
        edge, edge_sizes = self._edges_of(columns, places, vertex, sizes)
        packed = Packed(
            columns.keys(places),
            sizes,
            edge_sizes,
            ends,
            ends_of(edge_sizes),
            vertex,
            edge,
            value,
            inputs,
            counts,
        )
        return self._admissible(packed)

    def _admissible(self, packed: Packed) -> Packed:
        if self._admission is not None:
            self._admission.check(packed, self._arena.optional)
        return packed

    def _edges_of(
        self, columns: Columns, places: IntArray, vertex: dict[str, Column], sizes: IntArray
    ) -> tuple[dict[str, Column], IntArray]:
        """Edge columns and numbers of edges of some; adds degrees to the vertices' columns."""
        arena = self._arena
        if not arena.has_edges:
            return {}, np.zeros(places.size, np.int64)
        edge_sizes = columns.edge_lengths[places]
        which = ranges(columns.edge_starts[places], edge_sizes)
        edge = {m: columns.edge[m][which] for m in arena.edge_names}
        self._require_types(arena.edges, edge)
        limit = sizes.repeat(edge_sizes)
        for name in ("source", "target"):
            if (edge[name] < 0).any() or (edge[name] >= limit).any():
                raise DataError(f"edge column '{name}' leads out of its instance")
        add_sources(vertex, edge, sizes, edge_sizes)
        return edge, edge_sizes

    def _require_types(self, table: Table, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            if not table.takes(name, column):
                raise DataError(f"{table.kind} column '{name}' is of another type")

    def _require_shape(self, operator: Entrance, rows: Tensor) -> None:
        known = self._shapes.get(operator.name)
        if known is None:
            known = self._shapes[operator.name] = _declared(operator, rows)
        if not _are_such(rows, known, operator):
            raise DataError(f"input '{operator.name}' has rows of another shape or type")

    def _counts(self, instances: Sequence[Instance], inputs: Mapping[str, PackedRows]) -> IntArray:
        """Messages that each instance feeds."""
        known = inputs.keys()
        if not known >= set().union(*[i.inputs for i in instances]):
            stranger = next(i for i in instances if not known >= i.inputs.keys())
            name = next(n for n in stranger.inputs if n not in known)
            raise DataError(
                f"{called(stranger)} brings input '{name}'; the graph has {sorted(known)}"
            )
        counts = np.zeros(len(instances), np.int64)
        for name, rows in inputs.items():
            counts += np.minimum(rows.lengths, 1) if self._inputs[name].bundle else rows.lengths
        if not counts.all():
            raise DataError(
                f"{called(instances[int(np.argmin(counts))])} brings no row to any input"
            )
        return counts

    def _rows(self, operator: Entrance, instances: Sequence[Instance]) -> PackedRows:
        name = operator.name
        given = [i.inputs.get(name) for i in instances]
        if name not in self._shapes and given[0] is not None:
            self._pair(operator, instances[0], given[0])  # the first says what rows look like
        packed = stacked(given, self._shapes.get(name))
        if packed is not None:
            assert packed.payload is not None
            check_finite(instances, name, packed.payload, packed.lengths)
            return packed
        looked: dict[int, tuple[Tensor, IntArray]] = {}  # instances may share what they bring
        parts: list[Tensor] = []
        places: list[IntArray] = []
        for instance, brought in zip(instances, given, strict=True):
            if brought is None:
                places.append(_NOWHERE)
                continue
            pair = looked.get(id(brought))
            if pair is None:
                pair = looked[id(brought)] = self._pair(operator, instance, brought)
            parts.append(pair[0])
            places.append(pair[1])
        lengths = _lengths(places)
        joined = _join_rows(name, parts) if lengths.any() else None
        if joined is not None:
            check_finite(instances, name, joined, lengths)
        return PackedRows(joined, lengths, np.concatenate(places), ends_of(lengths))

    def _pair(
        self, operator: Entrance, instance: Instance, brought: Any
    ) -> tuple[Tensor, IntArray]:
        """What one instance brings to an input: rows, and the vertex of each."""
        rows, at = brought if isinstance(brought, tuple) else (brought, None)
        if not isinstance(rows, Tensor) or rows.ndim == 0:
            raise DataError(
                f"{called(instance)}: input '{operator.name}' is {type(rows).__name__}; bring a "
                "tensor (n, ...) or a pair (tensor, vertices); where a row is several tensors, an "
                "input each, and concat(), or a function: through(lambda h: (h, h * 0))"
            )
        if not is_plain(rows):
            require_plain(instance)
        shape = rows.shape
        here = np.arange(shape[0]) if at is None else np.asarray(at, np.int64)
        if here.shape != shape[:1]:
            raise DataError(
                f"{called(instance)}: input '{operator.name}' has {shape[0]} rows and vertices of "
                f"shape {here.shape}; one vertex for each row"
            )
        known = self._shapes.get(operator.name)
        if known is None:
            known = self._shapes[operator.name] = _declared(operator, rows)
        if not _are_such(rows, known, operator):
            raise DataError(
                f"{called(instance)}: input '{operator.name}' has rows of {rows.dtype} "
                f"{tuple(shape[1:])}; the input (or its first instance) says {known[1]} "
                f"{tuple(known[0])}"
            )
        # To autograd what is fed is data, whatever it was made from.
        return rows.detach() if rows.requires_grad else rows, here

    def _columns(
        self, instances: Sequence[Instance], table: Table, names: Sequence[str], sizes: IntArray
    ) -> dict[str, Column]:
        """The vertex or edge columns of all instances."""
        brought: list[Mapping[str, Any]] = [getattr(i, table.kind) for i in instances]
        found: dict[str, Column] = {}
        for name in names:
            columns = [given.get(name) for given in brought]
            joined = side_by_side(columns, sizes)
            if joined is None or not table.takes(name, joined):
                joined = self._looked_at(instances, table, name, columns, sizes)
            found[name] = joined
        return found

    def _looked_at(
        self,
        instances: Sequence[Instance],
        table: Table,
        name: str,
        columns: Sequence[Any],
        sizes: IntArray,
    ) -> Column:
        """One vertex or edge column, of which each instance's is looked at."""
        kind = table.kind
        parts: list[Column] = []
        for k, (column, n) in enumerate(zip(columns, sizes.tolist(), strict=True)):
            if column is None:
                if name not in self._arena.optional:
                    given = getattr(instances[k], kind)
                    raise _missing(instances[k], f"{kind} column", name, given)
                parts.append(table.zeros(name, n))
                continue
            part = as_column(column)
            if part.ndim == 0 or len(part) != n:
                raise DataError(
                    f"{called(instances[k])}: {kind} column '{name}' has shape {part.shape}, "
                    f"expected {n} entries, one for every {kind}"
                )
            parts.append(table.fitting(name, part, parts, called(instances[k])))
        return np.concatenate([p for p in parts if len(p)] or parts[:1])

    def _value(self, instances: Sequence[Instance], name: str) -> Column:
        table = self._arena.values
        values = [i.value.get(name) for i in instances]
        kinds = {*map(type, values)}
        whole = kinds <= {int, np.int64}
        if whole or (len(kinds) == 1 and kinds <= _FLOATS):
            joined = _numbers(values, np.int64 if whole else None)
            if joined is not None and table.takes(name, joined):
                return joined
        parts: list[Column] = []
        for instance, value in zip(instances, values, strict=True):
            if value is None:
                if name not in self._arena.optional:
                    raise _missing(instance, "value", name, instance.value)
                parts.append(table.zeros(name, 1))
                continue
            parts.append(table.fitting(name, as_column(value)[None], parts, called(instance)))
        return np.concatenate(parts)


_NDIM: Final = attrgetter("ndim")
_NOWHERE = np.zeros(0, np.int64)
_LISTS: Final = frozenset((list, tuple))
_ARRAYS: Final = frozenset((np.ndarray, Tensor))
_FLOATS: Final = frozenset((float, np.float32, np.float64))


def _numbers(values: Sequence[Any], dtype: Any) -> Column | None:
    """None: one is too large, and wants a closer look."""
    try:
        return np.array(values, dtype)
    except OverflowError:
        return None


def _lengths(arrays: Sequence[Any]) -> IntArray:
    return np.fromiter(map(len, arrays), np.int64, len(arrays))


def _missing(instance: Instance, what: str, name: str, brought: Mapping[str, Any]) -> DataError:
    return DataError(
        f"{called(instance)}: {what} '{name}' is missing; it has {sorted(brought) or 'none'}"
    )


def _sizes(
    instances: Sequence[Instance], names: Sequence[str], inputs: Mapping[str, PackedRows]
) -> IntArray:
    """Vertices of each instance: as many as its columns have entries, or its rows need."""
    if not any(i.vertex for i in instances):
        return _reached(len(instances), inputs)
    first = names[0] if names else None
    sizes = np.zeros(len(instances), np.int64)
    columns: list[Any] = [i.vertex.get(first) for i in instances]  # type: ignore[arg-type]
    kinds = set(map(type, columns))
    if kinds <= _LISTS or (kinds <= _ARRAYS and all(map(_NDIM, columns))):
        return _lengths(columns)
    reached = _reached(len(instances), inputs)
    for k, instance in enumerate(instances):
        name = first if first in instance.vertex else next(iter(instance.vertex), None)
        sizes[k] = (
            reached[k]
            if name is None
            else _entries(instance, "vertex", name, instance.vertex[name])
        )
    return sizes


def _reached(n: int, inputs: Mapping[str, PackedRows]) -> IntArray:
    """Vertices of instances without vertex columns: up to the last that a row enters at."""
    sizes = np.ones(n, np.int64)
    for rows in inputs.values():
        some = np.flatnonzero(rows.lengths)
        if some.size:
            last = np.maximum.reduceat(rows.at, rows.ends[:-1][some])
            sizes[some] = np.maximum(sizes[some], last + 1)
    return sizes


def _edges(instance: Instance) -> Any:
    source: Any = instance.edge.get("source")
    if type(source) in _LISTS or (type(source) in _ARRAYS and source.ndim):
        return source
    if source is None:
        raise DataError(
            f"{called(instance)}: edge column 'source' is missing; it has "
            f"{sorted(instance.edge) or 'none'}; an instance without edges brings empty arrays"
        )
    _entries(instance, "edge", "source", source)
    return as_column(source)


def _entries(instance: Instance, kind: str, name: str, column: object) -> int:
    entries = as_column(column)
    if entries.ndim == 0:
        raise DataError(f"{called(instance)}: {kind} column '{name}' is a number, not an array")
    return len(entries)


def _join_rows(name: str, parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:  # floats stay where they are: whatever is written there is a number
        (rows,) = parts
        return rows.detach() if rows.is_floating_point() else rows.clone()
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        shapes = sorted({tuple(p.shape[1:]) for p in parts})
        raise DataError(f"input '{name}' has rows of shapes {shapes}") from error


def _are_such(rows: Tensor, known: tuple[torch.Size, torch.dtype], operator: Entrance) -> bool:
    """Whether rows have the dtype that is known, and the shape, which bundles may each have."""
    shape, dtype = known
    return rows.dtype is dtype and (operator.bundle or rows.shape[1:] == shape)


def _declared(operator: Entrance, rows: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of one row: as declared, else as the first instance brings them."""
    shape = rows.shape[1:] if operator.shape is None else torch.Size(operator.shape)
    return shape, rows.dtype if operator.dtype is None else operator.dtype
