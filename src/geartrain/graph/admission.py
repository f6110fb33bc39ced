"""What nodes demand of instances, asked before anything of these enters.

    input ─► broadcast, move, a loop's entry ─► through(tree)    tree.check_instances(brought)
       what instances bring comes here in any case ─┘              DataError: names the instance

A module that looks something up (a word in a table, a child in a tree, an edge in a graph) says by
a method ``check_instances`` what it can. It is asked where all that an instance brings to an input
comes to it, whatever is computed; not behind a ``where`` or a ``group``, as nobody knows beforehand
which rows will come there. Many instances are asked about at once. Where one of them is refused,
each is looked at alone, so that the error comes with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from geartrain.errors import DataError
from geartrain.frames.frame import Schema
from geartrain.frames.message import IntArray, ranges
from geartrain.graph.cycles import furthest_first
from geartrain.graph.ends import Losing
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input
from geartrain.graph.operators import Copying, Detaching, Joining, Merging, Moving, Routing
from geartrain.graph.through import Through
from geartrain.kinds import require_class, require_kind
from geartrain.nodes.kernel import may_have_kernel
from geartrain.nodes.loss import CrossEntropy, per_row

if TYPE_CHECKING:
    from geartrain.frames.packed import Packed

M = TypeVar("M", bound=nn.Module)


@final
@dataclass(frozen=True, slots=True)
class Brought:
    """What instances bring to a module, before any of them enters.

    Args:
        lengths: int64 ``(n,)``, rows of each instance, one or more.
        payload: Tensors ``(rows, ...)`` as the module will get them; None where another module
            makes them first, or where they are no plain tensors on the host.
        columns: The columns that it reads, in the order of ``read``, ``(rows, ...)`` each.
        edges: Of a module that looks inside, edge columns ``(edges,)``; ``source`` and ``target``
            number the rows. Empty where instances have no edges.
    """

    lengths: IntArray
    payload: tuple[Tensor, ...] | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    edges: Mapping[str, NDArray[Any]] = field(default_factory=dict)


Check: TypeAlias = Callable[[Brought], None]
"""Raises ``DataError`` with the reason if one of the instances cannot be computed."""


def require_range(what: str, found: NDArray[Any] | Tensor, n: int) -> None:
    """Refuse numbers that are no places in a table.

    Args:
        what: What errors call them, such as ``word``.
        found: Of any shape; what is no integers is not looked at.
        n: They may be 0 to n - 1.

    Raises:
        DataError: One is something else.
    """
    require_kind("require_range", Tensor | np.ndarray, "an array or a tensor", found=found)
    column = found.numpy() if isinstance(found, Tensor) else found
    if column.dtype.kind not in "iu" or not column.size:
        return
    low, high = int(column.min()), int(column.max())
    if low < 0 or high >= n:
        raise DataError(f"{what} {low if low < 0 else high}; expected 0..{n - 1}")


def register_check(kind: type[M], check: Callable[[M, Brought], None]) -> None:
    """Let modules whose type is exactly ``kind`` be asked so; for modules that are not yours."""
    require_class("register_check", kind)
    wanted = "a function of a module and what is brought to it"
    require_kind("register_check", Callable, wanted, check=check)
    _CHECKS[kind] = cast("Callable[[nn.Module, Brought], None]", check)


def check_of(module: object) -> Check | None:
    """What a module demands of instances; None: nothing.

    A module that is hooked, or whose class overrides ``forward`` below the check, may look at
    something else; it is not asked then.
    """
    if not isinstance(module, nn.Module):
        return None
    kind = type(module)
    registered = _CHECKS.get(kind)
    if registered is None and not hasattr(kind, "check_instances"):
        return None
    if not may_have_kernel(module):
        return None
    order = kind.__mro__
    at = next((k for k, c in enumerate(order) if "check_instances" in vars(c)), None)
    if at is None:
        return None if registered is None else lambda brought: registered(module, brought)
    if any("forward" in vars(c) for c in order[:at]):
        return None
    return cast(Check, module.check_instances)


def _check_of_targets(loss: Losing) -> Check | None:
    """Whether targets are classes of the prediction."""
    target, classes = loss.target, loss.classes
    if not isinstance(target, str) or classes is None:
        return None
    if not isinstance(per_row(loss.criterion, loss.name), CrossEntropy):
        return None
    name, n = target, classes
    return lambda brought: _require_classes(name, brought.columns[name], n)


def _require_classes(name: str, found: NDArray[Any], n: int) -> None:
    """Refuse targets that are no classes, or several, of rows whose prediction is a row of ``n``.

    Raises:
        DataError: One is none.
    """
    if found.dtype.kind in "iu" and found.ndim > 1:
        raise DataError(
            f"target '{name}' has the shape {found.shape[1:]}; expected one class for each "
            f"prediction, a whole number from 0 to {n - 1}: give 2 rather than [2]"
        )
    require_range(f"target '{name}' is", found, n)


_CHECKS: Final[dict[type[nn.Module], Callable[[nn.Module, Brought], None]]] = {}


@final
class Admission:
    """What the nodes of a graph demand of instances.

    Args:
        operators: Wired.
        schema: Their columns.
    """

    def __init__(self, operators: Sequence[AbstractOperator], schema: Schema) -> None:
        asking: dict[AbstractOperator, _Wanted] = {}
        for operator in operators:
            if isinstance(operator, Through):
                call = operator.call
                taken = call.take is None or call.take == (0,)
                check = check_of(operator.function) if taken else None
                known = _Wanted(call.read, call.inside, operator.every_vertex, check)
            elif isinstance(operator, Losing):
                read = tuple(c for c in (operator.target, operator.weight) if isinstance(c, str))
                known = _Wanted(read, False, False, _check_of_targets(operator), judges=True)
            else:
                continue
            if known.check is None and not known.inside and schema.vertex.isdisjoint(known.read):
                continue
            asking[operator] = known
        demands = [
            _Demand(operator.name, origin, asking[operator], schema)
            for operator, origins in _origins(asking).items()
            for origin in origins
        ]
        self._demands = [demand for demand in demands if demand.asks]

    def check(self, packed: Packed, optional: frozenset[str]) -> None:
        """Look at instances.

        Args:
            packed: Their columns.
            optional: Columns that nobody will look at.

        Raises:
            DataError: One of them brings what a node cannot compute; names both.
        """
        for demand in self._demands:
            if demand.wanted.judges and not optional.isdisjoint(demand.wanted.read):
                continue
            try:
                demand.check(packed)
            except DataError as error:
                self._blame(demand, packed, error)

    def _blame(self, demand: _Demand, packed: Packed, error: DataError) -> None:
        for i, key in enumerate(packed.keys):
            try:
                demand.check(packed.part(i, i + 1))
            except DataError as own:
                called = "instance without a key" if key is None else f"instance {key}"
                raise DataError(f"{called}: '{demand.node}': {own}") from error
        raise DataError(
            f"'{demand.node}' refuses instances together that it takes one by one: {error}; mend "
            "its check_instances"
        ) from error


@final
@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a node reads, and its module's check.

    Args:
        read: Columns, a row each.
        inside: Whether it looks inside bundles.
        every: Whether each of its rows goes to all vertices of its instance.
        check: None: nothing is asked of it.
        judges: Whether it is a loss.
    """

    read: tuple[str, ...]
    inside: bool
    every: bool
    check: Check | None
    judges: bool = False


@final
@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the rows of a place have entered, all of them and in any case.

    Args:
        source: The input.
        untouched: Whether they are still as they were brought.
        pooled: Whether a module has made one row of each bundle.
        moved: State columns that have been given other values.
        beside: Inputs of bundles whose payload has been put behind this one's.
    """

    source: Input
    untouched: bool = True
    pooled: bool = False
    moved: frozenset[str] = frozenset()
    beside: tuple[Input, ...] = ()


_Place: TypeAlias = tuple[AbstractOperator, int]
"""An output port."""

_Origins: TypeAlias = dict[_Origin, int]
"""On how many ways rows have come from each, all of them and in any case; of what may come or not,
none."""


def _origins(operators: Iterable[AbstractOperator]) -> dict[AbstractOperator, _Origins]:
    """Of what comes to the first port of each operator."""
    wanted = {operator: operator.sources[0] for operator in operators}
    found: dict[_Place, _Origins] = {}
    starts = [place for sources in wanted.values() for place in sources]
    for place in furthest_first(starts, _behind):
        found[place] = _origins_of(place, found)
    return {operator: _summed(sources, found) for operator, sources in wanted.items()}


def _behind(place: _Place) -> list[_Place]:
    """From where all rows of a place have come; none, if that is not known."""
    source, port = place
    if isinstance(source, Joining):
        return [each for sources in source.sources for each in sources]
    passes = isinstance(source, Copying | Detaching | Holding | Merging | Moving | Through)
    if passes or (isinstance(source, Routing) and port in source.ends):
        return source.sources[0]
    return []


def _origins_of(place: _Place, found: Mapping[_Place, _Origins]) -> _Origins:
    """Those of the rows of a place, as those are found of the ones behind it."""
    source, port = place
    if isinstance(source, Input):
        return {_Origin(source): 1}
    if not _behind(place):
        return {}
    if isinstance(source, Joining):
        return _joined(source, found)
    origins: _Origins = {}
    for origin, ways in _summed(source.sources[0], found).items():
        if isinstance(source, Through):
            pooled = origin.pooled or source.call.pool
            origin = replace(origin, untouched=False, pooled=pooled)
        elif isinstance(source, Moving):
            origin = replace(origin, moved=origin.moved | set(source.fields))
        elif isinstance(source, Routing):
            origin = replace(origin, moved=origin.moved | source.ends[port])
        origins[origin] = origins.get(origin, 0) + ways
    return origins


def _joined(join: Joining, found: Mapping[_Place, _Origins]) -> _Origins:
    """Bundles of several inputs, one of each an instance, as of minibatches and their targets."""
    ports = [_summed(sources, found) for sources in join.sources]
    if join.how != "tuple" or any(sum(origins.values()) != 1 for origins in ports):
        return {}
    first, *others = (origin for (origin,) in ports)
    plain = all(o == _Origin(o.source) and o.source.bundle for o in (first, *others))
    return {replace(first, beside=tuple(o.source for o in others)): 1} if plain else {}


def _summed(sources: Sequence[_Place], found: Mapping[_Place, _Origins]) -> _Origins:
    """Those of several places; on a cycle some are missing."""
    origins: _Origins = {}
    for place in sources:
        for origin, ways in found.get(place, {}).items():
            origins[origin] = origins.get(origin, 0) + ways
    return origins


@final
class _Demand:
    """What one node wants of what comes by one input.

    Args:
        node: Its name.
        origin: The input, and what was done to its rows.
        wanted: By the node.
        schema: The columns.
    """

    def __init__(self, node: str, origin: _Origin, wanted: _Wanted, schema: Schema) -> None:
        self.node, self.origin, self.wanted, self._schema = node, origin, wanted, schema
        source, read = origin.source, set(wanted.read)
        whole = source.bundle and not origin.pooled
        self._edges = wanted.inside and whole and bool(schema.edge)
        self._all = whole and (self._edges or bool(read & schema.vertex))
        self._fields = {n: v for n, v in source.fields.items() if n not in origin.moved}
        known = schema.value | {"size"} | self._fields.keys()
        if self._all or wanted.every or "vertex" not in origin.moved:
            known |= schema.vertex
        self._check = wanted.check if read <= known else None

    @property
    def asks(self) -> bool:
        """Whether there is anything to look at."""
        return self._all or self._check is not None

    def check(self, packed: Packed) -> None:
        """Raises:
        DataError: An instance brings what the node cannot compute.
        """
        rows = packed.inputs[self.origin.source.name]
        if rows.payload is None:
            return
        some = None if rows.lengths.all() else np.flatnonzero(rows.lengths)
        lengths, sizes = _chosen(rows.lengths, some), _chosen(packed.sizes, some)
        if self._all and not np.array_equal(lengths, sizes):
            wrong = int(np.flatnonzero(lengths != sizes)[0])
            raise DataError(
                f"input '{self.origin.source.name}' has {int(lengths[wrong])} rows, the instance "
                f"{int(sizes[wrong])} vertices; it wants a row for every vertex"
            )
        if self._check is None:
            return
        starts = _chosen(packed.vertex_ends[:-1] - packed.vertex_ends[0], some)
        at: IntArray | None
        if self.origin.pooled:
            at, lengths = starts, np.ones_like(sizes)
        elif self.wanted.every or self._all:
            at, lengths = None if some is None else ranges(starts, sizes), sizes
        else:
            at = rows.at + starts.repeat(lengths)
        payload = None
        if self.origin.untouched and not self.wanted.every:
            payload = self._payload(packed)
        self._check(
            Brought(
                lengths,
                payload,
                {name: self._column(packed, name, at, some, lengths) for name in self.wanted.read},
                _Edges(packed, some, lengths) if self._edges else {},
            )
        )

    def _payload(self, packed: Packed) -> tuple[Tensor, ...] | None:
        """As the module will get it; None where that is not known, or no plain numbers."""
        inputs = [packed.inputs[o.name] for o in (self.origin.source, *self.origin.beside)]
        if any(not np.array_equal(i.lengths, inputs[0].lengths) for i in inputs[1:]):
            return None
        tensors = [i.payload for i in inputs]
        if any(type(x) is not Tensor or not x.is_cpu for x in tensors):
            return None
        return cast("tuple[Tensor, ...]", tuple(tensors))

    def _column(
        self,
        packed: Packed,
        name: str,
        at: IntArray | None,
        some: IntArray | None,
        lengths: IntArray,
    ) -> NDArray[Any]:
        if name in self._schema.vertex:
            return _chosen(packed.vertex[name], at)
        if name in self._fields:
            return np.full(int(lengths.sum()), self._fields[name], np.int64)
        column = packed.sizes if name == "size" else packed.value[name]
        return _chosen(column, some).repeat(lengths, 0)


@final
class _Edges(Mapping[str, NDArray[Any]]):
    """Edge columns of whole instances, each made when it is read.

    Args:
        packed: Has them.
        some: The instances; None: all.
        lengths: int64 ``(n,)``, rows of each of these.
    """

    def __init__(self, packed: Packed, some: IntArray | None, lengths: IntArray) -> None:
        self._columns, self._lengths = packed.edge, lengths
        self._counts = _chosen(packed.edge_sizes, some)
        starts = packed.edge_ends[:-1] - packed.edge_ends[0]
        self._which = None if some is None else ranges(starts[some], self._counts)

    def __getitem__(self, name: str) -> NDArray[Any]:
        column = _chosen(self._columns[name], self._which)
        if name not in ("source", "target"):
            return column
        shifted: NDArray[Any] = column + (self._lengths.cumsum() - self._lengths).repeat(
            self._counts
        )
        return shifted

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _chosen(column: NDArray[Any], which: IntArray | None) -> NDArray[Any]:
    return column if which is None else column[which]
