"""Instances in columns, as the packer makes them; they are cut as they are admitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geartrain.frames.message import IntArray
from geartrain.frames.table import Column


@final
@dataclass(frozen=True, slots=True)
class PackedRows:
    """What instances bring to one input.

    Args:
        payload: Their rows ``(rows, ...)``, or None: they bring none.
        lengths: int64 ``(n,)``, rows of each instance.
        at: int64 ``(rows,)``, the vertex of each row, counted inside its instance.
        ends: int64 ``(n + 1,)``, where each instance's rows end, before them the start of all.
    """

    payload: Tensor | None
    lengths: IntArray
    at: IntArray
    ends: IntArray

    def part(self, i: int, j: int) -> PackedRows:
        """The instances i to j (exclusive); copies nothing."""
        first, start, end = int(self.ends[0]), int(self.ends[i]), int(self.ends[j])
        here = slice(start - first, end - first)
        payload = None if self.payload is None or start == end else self.payload[here]
        return PackedRows(payload, self.lengths[i:j], self.at[here], self.ends[i : j + 1])

    def nbytes(self) -> int:
        return self.at.nbytes + (0 if self.payload is None else self.payload.nbytes)


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """Instances that have been checked against a graph, in columns.

    Args:
        keys: objects ``(n,)``, what errors call them.
        sizes, edge_sizes: int64 ``(n,)``, vertices and edges of each.
        vertex_ends, edge_ends: int64 ``(n + 1,)``, where each one's entries end.
        vertex: Name to entries of all vertices; with edges also the degrees and ``FIRST_OUT``.
        edge: Name to entries of all edges, and ``BY_SOURCE``.
        value: Name to ``(n, ...)``.
        inputs: Input name to rows.
        counts: int64 ``(n,)``, messages that each feeds: its rows, a bundle counting as one.
    """

    keys: NDArray[np.object_]
    sizes: IntArray
    edge_sizes: IntArray
    vertex_ends: IntArray
    edge_ends: IntArray
    vertex: Mapping[str, Column]
    edge: Mapping[str, Column]
    value: Mapping[str, Column]
    inputs: Mapping[str, PackedRows]
    counts: IntArray

    def __len__(self) -> int:
        return self.sizes.size

    def part(self, i: int, j: int) -> Packed:
        """The instances i to j (exclusive); copies nothing."""
        if i == 0 and j == self.sizes.size:
            return self
        here = slice(i, j)
        vertices, edges = _between(self.vertex_ends, i, j), _between(self.edge_ends, i, j)
        return Packed(
            self.keys[here],
            self.sizes[here],
            self.edge_sizes[here],
            self.vertex_ends[i : j + 1],
            self.edge_ends[i : j + 1],
            {name: column[vertices] for name, column in self.vertex.items()},
            {name: column[edges] for name, column in self.edge.items()},
            {name: column[here] for name, column in self.value.items()},
            {name: rows.part(i, j) for name, rows in self.inputs.items()},
            self.counts[here],
        )

    def nbytes(self) -> int:
        """Bytes of the columns and rows."""
        columns = [*self.vertex.values(), *self.edge.values(), *self.value.values()]
        return sum(c.nbytes for c in columns) + sum(r.nbytes() for r in self.inputs.values())


def _between(ends: IntArray, i: int, j: int) -> slice:
    first = int(ends[0])
    return slice(int(ends[i]) - first, int(ends[j]) - first)
