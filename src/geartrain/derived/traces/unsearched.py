"""Graphs of operators that are put together without a look through what each is given.

torch looks for symbols of shapes among all that a node gets, to warn of them: a fifth of the time
that a module takes to be cut. There are none in what is recorded here. It also takes a node out of
its table of operators and puts it back whenever something is written to it; what is written here
changes no operator.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from torch import fx

_HERE: Final = threading.local()
"""Of this thread: the graphs that are to be taken apart."""


_put = object.__setattr__


@final
class Unsearched(fx.Graph):
    """A graph whose nodes get what they are given once they are there."""

    def __init__(self) -> None:
        super().__init__()
        graphs: list[Unsearched] | None = getattr(_HERE, "graphs", None)
        if graphs is not None:
            graphs.append(self)

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        node = super().create_node(op, target, None, None, name, type_expr)
        if args:
            _put(node, "args", args)
        if kwargs:
            _put(node, "kwargs", kwargs)
        return node

    def take_apart(self) -> None:
        """It has no nodes any more, and none of them knows of another that reads it."""
        for x in (*self.nodes, self._root):
            x.users.clear()
            _put(x, "_prev", None)
            _put(x, "_next", None)
        vars(self).clear()


@contextmanager
def taken_apart() -> Iterator[None]:
    """Graphs that this thread makes meanwhile are taken apart afterwards.

    Their nodes hold one another, so they would stay until Python collects garbage: half a mebibyte
    of a few modules.
    """
    before: list[Unsearched] | None = getattr(_HERE, "graphs", None)
    graphs: list[Unsearched] = []
    _HERE.graphs = graphs
    try:
        yield
    finally:
        _HERE.graphs = before
        for graph in graphs:
            graph.take_apart()
