"""Where rows go and which of them meet: the verbs of a stream that run nothing, so nothing learns.

where, route    each row to one of several streams        split     a piece of each row to each
group           rows of a key become one                  join      more rows into a loop
ungroup         one row becomes its parts                 detach    no gradient goes back
flatmap         a copy of a row for each edge             stop      nothing goes on
move            columns get other values
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from operator import attrgetter
from typing import Any, NoReturn, Self

import numpy as np

from geartrain.bounds import require_whole
from geartrain.errors import GraphError
from geartrain.frames.frame import View
from geartrain.frames.message import IntArray
from geartrain.graph.arguments import require_arguments
from geartrain.graph.draft import Draft
from geartrain.graph.ends import Stopping
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.operators import (
    Detaching,
    Flatmapping,
    Grouping,
    Merging,
    Moving,
    Routing,
    Splitting,
    Ungrouping,
)
from geartrain.kinds import require_each, require_kind
from geartrain.nodes.group import Column
from geartrain.nodes.reductions import How


def _refuse_as_tensor(who: str) -> NoReturn:
    raise TypeError(
        f"{who} got a stream, which is no tensor: its rows come when a session runs. Give "
        "through() the module or function: stream.through(torch.tanh), or lambda x: x[:, 0]; two "
        "streams meet in graph.concat(one, other, how='tuple').through(torch.add)"
    )


class AbstractRows(ABC):
    """Rows on their way from one operator to the next, which may part and meet."""

    __slots__ = ("_draft", "operator", "port")

    def __init__(self, draft: Draft, operator: AbstractOperator, port: int) -> None:
        self._draft, self.operator, self.port = draft, operator, port

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: object) -> NoReturn:
        _refuse_as_tensor(f"{getattr(function, '__name__', function)}()")

    def _as_tensor(self, *_: object) -> NoReturn:
        _refuse_as_tensor("an operator, an index or a loop of Python")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _as_tensor
    __matmul__ = __neg__ = __getitem__ = __iter__ = _as_tensor

    @abstractmethod
    def _at(self, operator: AbstractOperator, port: int = 0) -> Self:
        """Another stream of the same graph."""

    def where(
        self, predicate: Callable[[View], Any], *, name: str | None = None
    ) -> tuple[Self, Self]:
        """Split rows in two (Cond): those for which the predicate holds, and the others.

        Args:
            predicate: Gets a ``View`` of n rows, returns n booleans (numpy or torch), or integers:
                it holds where they are not 0.
        """
        require_arguments("where", predicate=predicate)
        operator = Routing(self._draft.name(name, "where"), self._source, predicate, 2, True)
        yes = self._add(operator)
        return yes, self._at(operator, 1)

    def route(
        self, choose: Callable[[View], Any], ways: int, *, name: str | None = None
    ) -> tuple[Self, ...]:
        """Split rows over several streams (Cond).

        Args:
            choose: Gets a ``View`` of n rows (state, frame, ``payload``), returns n integers in
                ``[0, ways)``.
            ways: How many streams.
        """
        require_whole(f"route(ways={ways!r})", ways, 1)
        require_arguments("route", choose=choose)
        operator = Routing(self._draft.name(name, "route"), self._source, choose, ways, False)
        self._add(operator)
        return tuple(self._at(operator, k) for k in range(ways))

    def move(self, *, name: str | None = None, **fields: Callable[[View], Any] | int) -> Self:
        """Give state columns new values (Isu): ``move(vertex=lambda m: m.parent, step=0)``.

        No inverse is needed. ``vertex`` and ``edge`` are numbered inside the instance.
        """
        for column, value in fields.items():
            wanted = "a function of a View, or a whole number"
            require_kind("move", Callable | Integral, wanted, **{column: value})
        if not fields:
            raise ValueError("move() got no column; name one: move(vertex=lambda m: m.parent)")
        for column in fields:
            self._draft.declare(column)
        return self._add(Moving(self._draft.name(name, "move"), self._source, fields))

    def group(
        self,
        by: str | Sequence[str] | Mapping[str, Callable[[View], Any] | int],
        size: int | Column,
        *,
        order: Column | None = None,
        how: How = "stack",
        name: str | None = None,
    ) -> Self:
        """Collect the members of a key into one row (Group).

        Args:
            by: State columns of the key, or column to the function that sets it first:
                ``by={"vertex": lambda m: m.parent}`` gathers children at their parent. A group
                never spans instances.
            size: How many members a group has: a number, a column, or a function of the ``View``.
            order: Position 0..size-1 of a member: a column or a function; None sorts by state. Like
                ``size`` it sees the member as it came, before ``by`` sets anything.
            how: ``stack`` makes ``(n, size, ...)``; ``sum``, ``mean``, ``max`` reduce; ``bundle``
                makes one message of all members, which may be of any number.
        """
        require_arguments("group", by=by, order=order)
        columns: Mapping[str, Callable[[View], Any] | int | None]
        if isinstance(by, Mapping):
            columns = dict(by)
            for column in columns:
                self._draft.declare(column)
        else:
            columns = dict.fromkeys((by,) if isinstance(by, str) else by)
        if not isinstance(size, str) and not callable(size):
            wanted = "1 member or more, a column, or a function of a View"
            require_whole(f"group(size={size!r})", size, 1, wanted)
        if how not in ("stack", "sum", "mean", "max", "bundle"):
            raise ValueError(f"group(how={how!r}): give one of stack, sum, mean, max, bundle")
        operator = Grouping(
            self._draft.name(name, "group"), self._source, columns, size, order, how
        )
        return self._add(operator)

    def ungroup(self, *, index: str | None = None, name: str | None = None) -> Self:
        """Turn each row of k parts ``(n, k, ...)``, or each bundle, into k rows (Ungroup).

        Args:
            index: State column that numbers the parts from 0; ``vertex`` puts part i at vertex i.
        """
        require_arguments("ungroup", index=index)
        if index is not None:
            self._draft.declare(index)
        return self._add(Ungrouping(self._draft.name(name, "ungroup"), self._source, index))

    def flatmap(
        self,
        over: str = "edge",
        *,
        count: int | Column | None = None,
        name: str | None = None,
    ) -> Self:
        """Send each row once for each edge that leaves its vertex (Flatmap); none is allowed.

        Args:
            over: ``edge``: the state column ``edge`` then names the edge. With ``count``: the
                column that numbers the copies from 0; ``vertex`` puts copy i at vertex i.
            count: How many copies a row becomes: a number, a column, or a function of the ``View``
                that gives one for each row.
        """
        require_arguments("flatmap", over=over)
        if count is not None and not isinstance(count, str) and not callable(count):
            wanted = "1 copy or more, a column, or a function of a View: lambda m: m.copies"
            require_whole(f"flatmap(count={count!r})", count, 1, wanted)
        if over == "edge" and count is None and self._draft.edge is None:
            raise GraphError(
                "flatmap over edges, but instances have none: declare Graph(edge=()) or with "
                "columns"
            )
        if over != "edge" and count is None:
            raise ValueError(
                f"flatmap(over={over!r}): give count=..., the number of copies of a row"
            )
        self._draft.declare(over)
        each = _for_each_row(count)
        return self._add(Flatmapping(self._draft.name(name, "flatmap"), self._source, over, each))

    def split(self, *sizes: int, name: str | None = None) -> tuple[Self, ...]:
        """Cut the last dimension into pieces (Split)."""
        what = f"split({', '.join(map(repr, sizes))})"
        if not sizes:
            raise ValueError(f"{what}: give one size or more")
        for size in sizes:
            require_whole(what, size, 1, "sizes of 1 or more")
        operator = Splitting(self._draft.name(name, "split"), self._source, sizes)
        self._add(operator)
        return tuple(self._at(operator, k) for k in range(len(sizes)))

    def detach(self, *, name: str | None = None) -> Self:
        """Pass the rows on and answer zero at once: no gradient crosses here."""
        return self._add(Detaching(self._draft.name(name, "detach"), [[self._source]]))

    def stop(self, *, name: str | None = None) -> None:
        """Swallow the rows; their gradient is zero."""
        self._add(Stopping(self._draft.name(name, "stop"), [[self._source]]))

    def join(self, *streams: AbstractRows) -> Self:
        """Let more streams lead into a loop (only for what ``Graph.loop`` returned)."""
        if not isinstance(self.operator, Merging):
            raise GraphError(
                f"join() is for graph.loop(), not for '{self.operator.name}' "
                f"({self.operator.kind}), and graph.merge(a, b) makes one stream of two"
            )
        self._require_one_graph(streams)
        self.operator.sources[0].extend(s._source for s in streams)
        return self

    def __repr__(self) -> str:
        return f"<stream of '{self.operator.name}' port {self.port}>"

    @property
    def _source(self) -> tuple[AbstractOperator, int]:
        return self.operator, self.port

    def _add(self, operator: AbstractOperator) -> Self:
        """The first port of what is written behind this stream."""
        self._draft.add(operator)
        return self._at(operator)

    def _require_one_graph(self, streams: Sequence[AbstractRows]) -> None:
        require_each(self.operator.name, AbstractRows, "streams of this graph", streams=streams)
        for stream in streams:
            if stream._draft is not self._draft:
                raise GraphError(f"{stream} belongs to another graph")


def _for_each_row(count: int | Column | None) -> Callable[[View], Any] | None:
    """A number of each row of a ``View``."""
    if isinstance(count, str):
        return attrgetter(count)
    return count if count is None or callable(count) else partial(_as_many, n=int(count))


def _as_many(view: View, n: int) -> IntArray:
    return np.full(len(view), n)
