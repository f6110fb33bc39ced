"""What wiring and drawing must know of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from geartrain.frames.frame import Schema
from geartrain.graph.layout import GraphLayout
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.region import Run
from geartrain.graph.through import Through


class AbstractGraph(Protocol):
    """A graph as it has been written; ``graph.graph.Graph`` is one.

    Attributes:
        vertex, edge, value: Names of columns; without edges None.
        operators: In the order in which they were made.
        run: How loops and sections run of which nothing is said.
    """

    vertex: tuple[str, ...]
    edge: tuple[str, ...] | None
    value: tuple[str, ...]
    run: Run

    @property
    def operators(self) -> Sequence[AbstractOperator]: ...

    def layout(self) -> GraphLayout:
        """What is known of the operators before nodes are made."""

    def schema(self) -> Schema:
        """The columns."""

    def throughs(self) -> Iterable[Through]:
        """The operators that run modules and functions."""
