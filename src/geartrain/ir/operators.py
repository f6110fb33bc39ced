"""What a user's verbs become: operators, which check themselves and make their node.

    verb            operator    makes
    input           Input       nothing: the controller feeds it
    through         Through     RowNode or GraphNode
    where, route    Routing     Route           (a step)
    loop, merge     Merging     nothing: wiring
    move            Moving      Move            (a step)
    used twice      Copying     Broadcast
    concat, join    Joining     Join
    split           Splitting   Split
    group           Grouping    Group
    ungroup         Ungrouping  Ungroup
    flatmap         Flatmapping Flatmap
    loss            Losing      LossNode
    output          Outputting  OutputNode
    stop, detach    Stopping, Detaching   steps

An operator is a description: it can be made into nodes any number of times.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.ir.bundle import AbstractBundleKernel, Inside, bundle_kernel_of
from geartrain.ir.control import AbstractStep, Detach, Move, Route, Stop
from geartrain.ir.frame import Schema, View
from geartrain.ir.gather import Column, Group, How, Join
from geartrain.ir.kernel import AbstractRowKernel, kernel_of
from geartrain.ir.loss import LossNode, Metric, OutputNode, Target
from geartrain.ir.node import AbstractNode, Place
from geartrain.ir.payload import Call, GraphNode, Recompute, RowNode, as_payload
from geartrain.ir.structure import Broadcast, Flatmap, Split, Ungroup
from geartrain.ir.weights import AbstractWeights

Keep: TypeAlias = Literal["auto", "inputs", "activations", "graph"]
Made: TypeAlias = AbstractNode | AbstractStep | None
ROWS = 3
"""Rows of the batch that a dry run imagines."""


class PartLike(Protocol):
    """What the graph must know of a part (the class itself lives one floor up)."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def name(self) -> str | None: ...
    @property
    def keep(self) -> Keep: ...


@final
@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of a stream before it runs.

    Args:
        columns: State columns that are defined.
        payload: Meta tensors of ``ROWS`` rows, or None where the shape is unknown.
        bundled: Whether messages own several rows.
    """

    columns: frozenset[str]
    payload: tuple[Tensor, ...] | None
    bundled: bool


class AbstractOperator(ABC):
    """One verb, as it was written.

    Args:
        name: Unique in the graph.
        sources: For each input port, the output ports that lead to it.
    """

    kind: ClassVar[str]
    ways = 1

    def __init__(
        self, name: str, sources: Sequence[Sequence[tuple[AbstractOperator, int]]]
    ) -> None:
        self.name = name
        self.id = 0
        self.sources = [list(s) for s in sources]

    def port_name(self, port: int) -> str:
        """How drawings call an output port."""
        return str(port) if self.ways > 1 else ""

    def detail(self) -> str:
        """What the printed graph says besides kind and name."""
        return ""

    @abstractmethod
    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        """What leaves, by output port, when this comes in, by input port.

        Raises:
            GraphError: What comes in does not fit.
        """

    @abstractmethod
    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        """A fresh node or step; None for what is only wiring."""


@final
class Input(AbstractOperator):
    """Where rows enter.

    Args:
        name: The name that instances use.
        shape: Shape of one payload row, or None: learned from the first instance.
        dtype: Its dtype.
        bundle: Whether each instance brings one message of many rows.
        fields: Constants for user columns that rows start with.
    """

    kind = "input"

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype | None,
        bundle: bool,
        fields: Mapping[str, int],
    ) -> None:
        super().__init__(name, [])
        self.shape, self.dtype, self.bundle, self.fields = shape, dtype, bundle, dict(fields)

    def detail(self) -> str:
        return "one bundle an instance" if self.bundle else ""

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        payload = None
        if self.shape is not None and self.dtype is not None:
            payload = (torch.empty((ROWS, *self.shape), dtype=self.dtype, device="meta"),)
        return [Spec(frozenset({"instance", "vertex", *self.fields}), payload, self.bundle)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return None


@final
class Through(AbstractOperator):
    """Run a module or a function on the rows."""

    kind = "through"

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        function: Callable[..., Any],
        part: PartLike | None,
        keep: Keep,
        read: Sequence[str],
        inside: bool,
        pool: bool,
        take: tuple[int, ...] | None = None,
        alone: bool = False,
    ) -> None:
        super().__init__(name, [[source]])
        self.function, self.part, self.keep = function, part, keep
        self.call = Call(function, tuple(read), inside, pool, take, alone)

    def with_function(self, function: Callable[..., Any]) -> Through:
        """The same node around another function: a copy's own module."""
        if function is self.function:
            return self
        other = copy.copy(self)
        other.function, other.call = function, replace(self.call, function=function)
        return other

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.function.parameters()) if isinstance(self.function, nn.Module) else []

    def detail(self) -> str:
        function = self.function
        called = (
            type(function).__name__
            if isinstance(function, nn.Module)
            else getattr(function, "__name__", type(function).__name__)
        )
        reads = f", reads {', '.join(self.call.read)}" if self.call.read else ""
        return f"{called}{reads}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        for name in self.call.read:
            readable(self.name, name, spec.columns, schema)
        bundled = spec.bundled and not self.call.pool
        if (self.call.inside or self.call.pool) and not spec.bundled:
            raise GraphError(
                f"'{self.name}': inside and pool are for bundles, but single rows come in; declare "
                "the input with bundle=True, or group(..., how='bundle') first"
            )
        self._refuse_row_mixers()
        payload = None if spec.payload is None else self._dry_run(spec.payload, schema)
        return [Spec(spec.columns, payload, bundled)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        keep = self.keep
        if keep == "graph":
            return GraphNode(place, self.call, weights)
        kernel = None if keep == "inputs" else self._kernel()
        if kernel is None and keep == "activations":
            kind = "bundle" if self.call.inside else "row"
            raise GraphError(
                f"'{self.name}': keep='activations' wants a {kind} kernel and {self.detail()} has "
                f"none; give it a {kind}_kernel() method, or use keep='inputs' (runs the module "
                "again)"
            )
        if kernel is not None:
            return RowNode(place, self.call, kernel, weights)
        return RowNode(place, self.call, Recompute(self.function, self.parameters), weights)

    def _kernel(self) -> AbstractRowKernel | AbstractBundleKernel | None:
        if not isinstance(self.function, nn.Module):
            return None
        return bundle_kernel_of(self.function) if self.call.inside else kernel_of(self.function)

    def _refuse_row_mixers(self) -> None:
        if self.keep == "graph" or not isinstance(self.function, nn.Module):
            return
        if self.keep != "inputs" and self._kernel() is not None:
            return
        for inner, module in self.function.named_modules():
            where = f"'{self.name}': {type(module).__name__} ({inner or 'the module itself'})"
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise GraphError(
                    f"{where} mixes rows of different instances; use LayerNorm or GroupNorm, or "
                    "send whole minibatches as bundles with keep='graph'"
                )
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise GraphError(
                    f"{where} would draw another mask when the module is run again for its "
                    "gradient; use geartrain.nn.RowDropout as a node of its own (it keeps its "
                    "mask), or keep='graph' with bundles"
                )

    def _dry_run(self, payload: tuple[Tensor, ...], schema: Schema) -> tuple[Tensor, ...] | None:
        if self.call.take is not None and max(self.call.take) >= len(payload):
            raise GraphError(
                f"'{self.name}': takes payload {max(self.call.take)}, but rows of "
                f"{describe(payload)} come, payload 0..{len(payload) - 1}"
            )
        payload = tuple(payload[j] for j in self.call.taken(len(payload)))
        args: list[object] = [*payload]
        args += [torch.empty(ROWS, dtype=torch.int64, device="meta") for _ in self.call.read]
        rows = ROWS
        if self.call.inside:
            args.append(_imagined_inside(schema))
        try:
            outputs = as_payload(_on_meta(self.function, args))
        except NotImplementedError:
            return None
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if "meta" in str(error) or self.call.read or self.call.inside:
                return None  # needs values: only a real run can tell
            raise GraphError(
                f"'{self.name}': {self.detail()} does not take rows of {describe(payload)}: {error}"
            ) from error
        if self.call.pool:
            return tuple(y.new_empty((ROWS, *y.shape[1:])) for y in outputs)
        for y in outputs:
            if y.ndim == 0 or y.shape[0] != rows:
                raise GraphError(
                    f"'{self.name}': {self.detail()} made {tuple(y.shape)} of {rows} rows of "
                    f"{describe(payload)}; it must keep the leading dimension, one row for each"
                )
        return outputs


@final
class Routing(AbstractOperator):
    """Split rows by a function."""

    kind = "route"

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        choose: Callable[[View], Any],
        ways: int,
        halves: bool,
    ) -> None:
        super().__init__(name, [[source]])
        self.choose, self.ways, self.halves = choose, ways, halves

    def port_name(self, port: int) -> str:
        return ("yes", "no")[port] if self.halves else str(port)

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        imagine(self.name, self.choose, given[0], schema)
        return [given[0]] * self.ways

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Route(place, self.choose, self.ways)


@final
class Merging(AbstractOperator):
    """Several streams, one reader; a loop's entry."""

    kind = "merge"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        columns = frozenset.intersection(*(s.columns for s in given))
        if len({s.bundled for s in given}) > 1:
            raise GraphError(
                f"'{self.name}': bundles and single rows meet; ungroup the bundles first"
            )
        known = [s.payload for s in given if s.payload is not None]
        for other in known[1:]:
            if [(p.shape[1:], p.dtype) for p in other] != [
                (p.shape[1:], p.dtype) for p in known[0]
            ]:
                raise GraphError(
                    f"'{self.name}': rows of {describe(other)} come where rows of "
                    f"{describe(known[0])} came first; all sources of a merge have one shape"
                )
        return [Spec(columns, known[0] if known else None, given[0].bundled)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return None


@final
class Moving(AbstractOperator):
    """New state columns."""

    kind = "move"

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        fields: Mapping[str, Callable[[View], Any] | int],
    ) -> None:
        super().__init__(name, [[source]])
        self.fields = dict(fields)

    def detail(self) -> str:
        return ", ".join(self.fields)

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        for function in self.fields.values():
            if callable(function):
                imagine(self.name, function, spec, schema)
        return [Spec(spec.columns | frozenset(self.fields), spec.payload, spec.bundled)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Move(place, self.fields)


@final
class Copying(AbstractOperator):
    """A stream that is used several times."""

    kind = "broadcast"

    def __init__(self, name: str, source: tuple[AbstractOperator, int], readers: int) -> None:
        super().__init__(name, [[source]])
        self.ways = readers

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        return [given[0]] * self.ways

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Broadcast(place, self.ways)


@final
class Joining(AbstractOperator):
    """One row from every port under one key."""

    kind = "join"

    def __init__(
        self,
        name: str,
        sources: Sequence[tuple[AbstractOperator, int]],
        on: Sequence[str] | None,
        how: Literal["features", "tuple"],
    ) -> None:
        super().__init__(name, [[s] for s in sources])
        self.on, self.how = on, how
        self._key: list[str] = list(on or ())

    def detail(self) -> str:
        return f"on {', '.join(self._key or self.on or ())}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        shared = frozenset.intersection(*(s.columns for s in given))
        if self.on is None:
            self._key = sorted(shared, key=lambda name: schema.state[name])
        else:
            for name in self.on:
                if name not in shared:
                    raise GraphError(
                        f"'{self.name}': key column '{name}' is not on every port; all of them "
                        f"have {sorted(shared)}"
                    )
            self._key = list(self.on)
        if len({s.bundled for s in given}) > 1:
            raise GraphError(f"'{self.name}': bundles and single rows cannot be joined")
        payloads = [s.payload for s in given]
        payload: tuple[Tensor, ...] | None = None
        if all(p is not None for p in payloads):
            known = [p for p in payloads if p is not None]
            payload = self._joined(known)
        return [Spec(given[0].columns, payload, given[0].bundled)]

    def _joined(self, known: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self.how == "tuple":
            return tuple(x for p in known for x in p)
        if any(len(p) != 1 for p in known):
            raise GraphError(
                f"'{self.name}': concat takes streams of one payload tensor, but "
                f"{[len(p) for p in known]} tensors come; use how='tuple'"
            )
        try:
            return (torch.cat([p[0] for p in known], -1),)
        except (RuntimeError, IndexError) as error:
            shapes = " and ".join(describe(p) for p in known)
            raise GraphError(f"'{self.name}': cannot concatenate {shapes}: {error}") from error

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        if not self._key:
            raise GraphError(
                f"'{self.name}': its key is not known yet; call graph.check(), which finds the "
                "columns that its streams share, or name them: concat(..., on=...)"
            )
        columns = [place.schema.state[name] for name in self._key]
        return Join(place, len(self.sources), columns, self.how)


@final
class Splitting(AbstractOperator):
    """Columns cut into pieces."""

    kind = "split"

    def __init__(
        self, name: str, source: tuple[AbstractOperator, int], sizes: Sequence[int]
    ) -> None:
        super().__init__(name, [[source]])
        self.sizes = tuple(sizes)
        self.ways = len(self.sizes)

    def detail(self) -> str:
        return f"sizes {self.sizes}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        if spec.bundled:
            raise GraphError(f"'{self.name}': bundles cannot be split; split inside a module")
        if spec.payload is None:
            return [spec] * self.ways
        if len(spec.payload) != 1 or spec.payload[0].shape[-1] != sum(self.sizes):
            raise GraphError(
                f"'{self.name}': pieces {self.sizes} add up to {sum(self.sizes)}, but rows of "
                f"{describe(spec.payload)} come"
            )
        pieces = spec.payload[0].split_with_sizes(self.sizes, -1)
        return [Spec(spec.columns, (piece,), False) for piece in pieces]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Split(place, self.sizes)


@final
class Grouping(AbstractOperator):
    """The members of a key become one row."""

    kind = "group"

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        by: Mapping[str, Callable[[View], Any] | int | None],
        size: int | Column,
        order: Column | None,
        how: How,
    ) -> None:
        super().__init__(name, [[source]])
        self.by, self.size, self.order, self.how = tuple(by), size, order, how
        self.moved = {name: f for name, f in by.items() if f is not None}

    def detail(self) -> str:
        size = self.size if isinstance(self.size, (int, str)) else "computed"
        return f"by {', '.join(self.by)}, size {size}, {self.how}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        if spec.bundled:
            raise GraphError(f"'{self.name}': bundles cannot be grouped; ungroup them first")
        for name in self.by:
            if name not in spec.columns and name not in self.moved:
                raise GraphError(
                    f"'{self.name}': key column '{name}' is not defined here; rows have "
                    f"{sorted(spec.columns)}; by={{'{name}': function}} sets it"
                )
        for function in self.moved.values():
            if callable(function):
                imagine(self.name, function, spec, schema)
        for column in (self.size, self.order):
            if isinstance(column, str):
                readable(self.name, column, spec.columns, schema)
            elif callable(column):
                imagine(self.name, column, spec, schema)
        payload = spec.payload
        if payload is not None and self.how == "stack":
            k = self.size if isinstance(self.size, int) else 1
            payload = tuple(p.new_empty((ROWS, k, *p.shape[1:])) for p in payload)
            if not isinstance(self.size, int):
                payload = None  # the number of members comes from the data
        columns = frozenset({"instance", *self.by})
        return [Spec(columns, payload, self.how == "bundle")]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        by = [place.schema.state[name] for name in self.by]
        move = Move(place, self.moved) if self.moved else None
        return Group(place, by, move, self.size, self.order, self.how)


@final
class Ungrouping(AbstractOperator):
    """The parts of a row become rows."""

    kind = "ungroup"

    def __init__(self, name: str, source: tuple[AbstractOperator, int], index: str | None) -> None:
        super().__init__(name, [[source]])
        self.index = index

    def detail(self) -> str:
        return "" if self.index is None else f"numbers them in {self.index}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        columns = spec.columns if self.index is None else spec.columns | {self.index}
        if spec.bundled or spec.payload is None:
            return [Spec(columns, spec.payload, False)]
        if any(p.ndim < 2 for p in spec.payload):
            raise GraphError(
                f"'{self.name}': rows of {describe(spec.payload)} have no parts; ungroup wants "
                "(n, k, ...) or a bundle"
            )
        payload = tuple(p.new_empty((ROWS, *p.shape[2:])) for p in spec.payload)
        return [Spec(columns, payload, False)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        if self.index == "vertex":
            return Ungroup(place, None, vertices=True)
        column = None if self.index is None else place.schema.state[self.index]
        return Ungroup(place, column, vertices=False)


@final
class Flatmapping(AbstractOperator):
    """A row becomes the rows of its edges, or a computed number of copies."""

    kind = "flatmap"

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        index: str,
        count: Callable[[View], Any] | None,
    ) -> None:
        super().__init__(name, [[source]])
        self.index, self.count = index, count

    def detail(self) -> str:
        return "over edges" if self.count is None else f"numbers copies in {self.index}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        if self.count is not None:
            imagine(self.name, self.count, spec, schema)
        elif "vertex" not in spec.columns:
            raise GraphError(f"'{self.name}': rows are at no vertex here, so they have no edges")
        return [Spec(spec.columns | {self.index}, spec.payload, spec.bundled)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Flatmap(place, place.schema.state[self.index], self.count)


@final
class Losing(AbstractOperator):
    """Loss, and its gradient at once."""

    kind = "loss"
    ways = 0

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        criterion: Callable[..., Any],
        target: Target,
        metrics: Mapping[str, Metric],
        weight: Target,
    ) -> None:
        super().__init__(name, [[source]])
        self.criterion, self.target = criterion, target
        self.metrics, self.weight = dict(metrics), weight

    def detail(self) -> str:
        called = getattr(self.criterion, "__name__", None) or repr(self.criterion)
        target = self.target if isinstance(self.target, str) else None
        return f"{called}{f' against {target}' if target else ''}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        for column in (self.target, self.weight):
            if isinstance(column, str):
                readable(self.name, column, given[0].columns, schema)
            elif callable(column):
                imagine(self.name, column, given[0], schema)
        for metric in self.metrics.values():
            if metric.where is not None:
                imagine(self.name, metric.where, given[0], schema)
        return []

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return LossNode(place, self.criterion, self.target, self.metrics, self.weight)


@final
class Outputting(AbstractOperator):
    """Rows that a prediction returns."""

    kind = "output"
    ways = 0

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        return []

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return OutputNode(place)


@final
class Stopping(AbstractOperator):
    """Rows end here with a zero gradient."""

    kind = "stop"
    ways = 0

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        return []

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Stop(place)


@final
class Detaching(AbstractOperator):
    """Rows go on, their gradient does not come back."""

    kind = "detach"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        return [given[0]]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Detach(place)


def readable(node: str, name: str, columns: frozenset[str], schema: Schema) -> None:
    """Whether rows with these state columns can read a name.

    Raises:
        GraphError: They cannot; says what they can read.
    """
    here = set(columns) | {"size", "payload", "lengths"} | schema.value
    if "vertex" in columns:
        here |= schema.vertex
    if "edge" in columns:
        here |= schema.edge
    if name in here:
        return
    known = name in schema.state or name in schema.vertex or name in schema.edge
    why = "is not defined on the rows that come here" if known else "is unknown"
    raise GraphError(
        f"'{node}': column '{name}' {why}; rows can read {sorted(here)}. Columns of instances are "
        "declared in Graph(vertex=..., edge=..., value=...), columns of rows by move(...)"
    )


def imagine(node: str, function: Callable[[View], Any], spec: Spec, schema: Schema) -> None:
    """Call a predicate with an imagined batch, to see which columns it asks for."""
    try:
        function(_Imagined(node, spec, schema))  # type: ignore[arg-type]
    except GraphError:
        raise
    except Exception:  # noqa: BLE001 - it needs real values; only the columns are of interest here
        return


class _Imagined:
    """Answers every column that rows can read with zeros."""

    def __init__(self, node: str, spec: Spec, schema: Schema) -> None:
        self._asked = (node, spec, schema)

    def __len__(self) -> int:
        return ROWS

    def __getattr__(self, name: str) -> object:
        node, spec, schema = self._asked
        readable(node, name, spec.columns, schema)
        if name == "payload":
            return spec.payload or ()
        return np.zeros(ROWS, np.int64)


def describe(payload: Sequence[Tensor]) -> str:
    """``float32 (n, 128), int64 (n,)``."""
    parts = []
    for p in payload:
        inner = "".join(f", {d}" for d in p.shape[1:]) or ","
        parts.append(f"{str(p.dtype).removeprefix('torch.')} (n{inner})")
    return ", ".join(parts)


def _on_meta(function: Callable[..., Any], args: Sequence[object]) -> object:
    with torch.no_grad():
        if not isinstance(function, nn.Module):
            return function(*args)
        tensors = dict(function.named_parameters(remove_duplicate=False))
        tensors.update(function.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
        meta = {name: t.detach().to("meta") for name, t in tensors.items()}
        modes = {inner: inner.training for inner in function.modules()}
        function.eval()  # shapes are the same, and nothing random is drawn or refused
        try:
            return torch.func.functional_call(function, meta, tuple(args))
        finally:
            for inner, mode in modes.items():
                inner.training = mode


def _imagined_inside(schema: Schema) -> Inside:
    def column(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int64, device="meta")

    edges = {name: column(4) for name in schema.edge}
    return Inside(column(2), column(ROWS), edges)
