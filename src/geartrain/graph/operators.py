"""What a user's verbs become: operators, which check themselves and make their node.

    verb            operator    makes
    input           Input       nothing: the controller feeds it   (operator.py)
    through         Through     RowNode or GraphNode   (through.py)
    where, route    Routing     Route           (a step)
    loop, merge     Merging     nothing: wiring
    move            Moving      Move            (a step)
    used twice      Copying     Broadcast
    concat, join    Joining     Join
    hold            Holding     HoldNode   (memory.py)
    attend          Through     ReadNode   (through.py)
    split           Splitting   Split
    group           Grouping    Group
    ungroup         Ungrouping  Ungroup
    flatmap         Flatmapping Flatmap
    loss            Losing      LossNode, or a ReadoutNode with the operator before it   (ends.py)
    output          Outputting  OutputNode   (ends.py)
    stop            Stopping    Stop         (a step; ends.py)
    detach          Detaching   Detach       (a step)

An operator is a description: it can be made into nodes any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema, View
from geartrain.graph.operator import (
    ROWS,
    AbstractOperator,
    Made,
    Spec,
    describe,
    handles,
    imagine,
    readable,
    without_handles,
)
from geartrain.nodes.control import Detach, Move, Route
from geartrain.nodes.group import Column, Group
from geartrain.nodes.join import JoinNode
from geartrain.nodes.node import Place
from geartrain.nodes.reductions import How
from geartrain.nodes.replay import REPLAY, ReplayNode, Replays
from geartrain.nodes.structure import Broadcast, Flatmap, SplitNode, Ungroup
from geartrain.nodes.weights import AbstractWeights


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
        self.ends: Mapping[int, frozenset[str]] = {}
        """Ports by which every row leaves in the end, as a shape knows that makes it, and the
        columns that it may have been given other values of until then."""

    def port_name(self, port: int) -> str:
        return ("yes", "no")[port] if self.halves else str(port)

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        imagine(self.name, self.choose, given[0], schema)
        return [given[0]] * self.ways

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Route(place, self.choose, self.ways, halves=self.halves)


@final
class Merging(AbstractOperator):
    """Several streams, one reader; a loop's entry."""

    kind = "merge"

    def __init__(
        self,
        name: str,
        sources: Sequence[Sequence[tuple[AbstractOperator, int]]],
        run: Literal["auto", "steps", "whole"] | None = None,
        *,
        loops: bool = False,
    ) -> None:
        super().__init__(name, sources)
        self.run, self.loops = run, loops

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
        self._handles: list[list[int]] = []
        """By port, state columns of handles that only its rows have: they are to be kept."""

    def detail(self) -> str:
        return f"on {', '.join(self._key or self.on or ())}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        shared = without_handles(frozenset.intersection(*(s.columns for s in given)))
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
            raise GraphError(
                f"'{self.name}': bundles and single rows cannot be joined; hold() the bundle, "
                "begin with a row pooled from it, and attend"
            )
        payloads = [s.payload for s in given]
        payload: tuple[Tensor, ...] | None = None
        if all(p is not None for p in payloads):
            known = [p for p in payloads if p is not None]
            payload = self._joined(known)
        self._handles = [
            sorted(schema.state[c] for c in handles(s.columns - given[0].columns)) for s in given
        ]
        columns = given[0].columns.union(*(handles(s.columns) for s in given))
        return [Spec(columns, payload, given[0].bundled)]

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
        names = [", ".join([x.name for x, _ in each]) for each in self.sources]
        return JoinNode(place, len(self.sources), columns, self.how, self._handles, names)


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
        return SplitNode(place, self.sizes)


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
        self._handles: list[int] = []
        """State columns of handles that members have: those of a group agree in them."""

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
                    f"{sorted(without_handles(spec.columns))}; by={{'{name}': function}} sets it"
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
        self._handles = sorted(schema.state[c] for c in handles(spec.columns))
        columns = frozenset({"instance", *self.by}) | handles(spec.columns)
        return [Spec(columns, payload, self.how == "bundle")]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        by = [place.schema.state[name] for name in self.by]
        move = Move(place, self.moved) if self.moved else None
        return Group(place, by, move, self.size, self.order, self.how, self._handles)


@final
class Ungrouping(AbstractOperator):
    """The parts of a row become rows.

    Attributes:
        parts: How many a row has, as far as a check has seen; else 0.
    """

    kind = "ungroup"

    def __init__(self, name: str, source: tuple[AbstractOperator, int], index: str | None) -> None:
        super().__init__(name, [[source]])
        self.index, self.parts = index, 0

    def detail(self) -> str:
        return "" if self.index is None else f"numbers them in {self.index}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        columns = spec.columns if self.index is None else spec.columns | {self.index}
        if spec.bundled or spec.payload is None:
            return [Spec(columns, spec.payload, False)]
        parts = {p.shape[1] if p.ndim > 1 else -1 for p in spec.payload}
        if len(parts) > 1 or -1 in parts:
            why = "have no parts" if -1 in parts else "have unlike numbers of parts"
            raise GraphError(
                f"'{self.name}': rows of {describe(spec.payload)} {why}; ungroup wants "
                "(n, k, ...), with one k for all tensors of a row, or a bundle"
            )
        payload = tuple(p.new_empty((ROWS, *p.shape[2:])) for p in spec.payload)
        (self.parts,) = parts
        return [Spec(columns, payload, False)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        column = None if self.index is None else place.schema.state[self.index]
        return Ungroup(place, column)


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
class Detaching(AbstractOperator):
    """Rows go on, their gradient does not come back."""

    kind = "detach"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        return [given[0]]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return Detach(place)


@final
class Replaying(AbstractOperator):
    """Rows go on, and stored ones again behind them."""

    kind = "replay"

    def __init__(self, name: str, source: tuple[AbstractOperator, int], rule: Replays) -> None:
        super().__init__(name, [[source]])
        self.rule = rule

    def detail(self) -> str:
        rule = self.rule
        what = "" if rule.fresh else ", stored rows alone"
        return f"{rule.times} times, {rule.draw} of {rule.buffer}{what}"

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        return [Spec(spec.columns | {REPLAY}, spec.payload, spec.bundled)]

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        return ReplayNode(place, self.rule)


def as_rows_come(operators: Sequence[AbstractOperator]) -> list[AbstractOperator]:
    """Numbered operators, each behind its sources but for loops: broadcasts are numbered last."""
    copied = {o.id: o.sources[0][0][0].id for o in operators if isinstance(o, Copying)}
    return sorted(operators, key=lambda o: copied.get(o.id, o.id))
