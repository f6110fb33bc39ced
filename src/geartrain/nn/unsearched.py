"""Graphs of operators that are put together without a look through what each is given.

torch looks for symbols of shapes among all that a node gets, to warn of them: a fifth of the time
that a module takes to be cut. There are none in what is recorded here.
"""

from __future__ import annotations

from typing import Any, final

from torch import fx


@final
class Unsearched(fx.Graph):
    """A graph whose nodes get what they are given once they are there."""

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
            node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node
