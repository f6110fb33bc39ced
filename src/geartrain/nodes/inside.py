"""What a module sees of the bundles whose rows it gets, looked up when it asks.

slots, lengths ─► Inside ─► lengths, segment            at once
                         ├► lengths_on_host()           the array that they came from
                         ├► on_host("type"), ...        a column when it is first read
                         └► edges["type"], ...          the same, on the device of the module
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.device import upload, uploads
from geartrain.errors import GraphError
from geartrain.frames.frame import Arena
from geartrain.frames.message import IntArray, ranges
from geartrain.nodes.node import Place


@final
@dataclass(frozen=True, slots=True)
class Inside:
    """What a module may know of the bundles whose rows it gets.

    Args:
        lengths: int64 ``(n,)``, rows of each bundle.
        segment: int64 ``(rows,)``, the bundle of each row.
        edges: Edge columns ``(E,)``, int64 or float, one instance's edges after the other's and in
            the order that it gives them; ``source`` and ``target`` number the rows of
            this batch. Empty where instances have no edges.
        host: Edge columns as arrays, where they are at hand.
        sizes: Lengths as an array, where they are at hand.

    Tensors are on the device where the module computes.
    """

    lengths: Tensor
    segment: Tensor
    edges: Mapping[str, Tensor]
    host: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    sizes: IntArray | None = None

    def lengths_on_host(self) -> IntArray:
        """Lengths for numpy, int64 ``(n,)``; waits as ``on_host`` does."""
        return self.lengths.cpu().numpy() if self.sizes is None else self.sizes

    def on_host(self, column: str) -> NDArray[Any]:
        """An edge column for numpy; waits for a device only where the engine did not make this."""
        found = self.host.get(column)
        return np.asarray(self.edges[column].cpu()) if found is None else found

    def edge_called(self, k: int) -> str:
        """What errors call edge k of this batch: with its instance, where that is known."""
        called: Callable[[int], str] | None = getattr(self.host, "edge_called", None)
        return f"edge {k}" if called is None else called(k)


def look_inside(
    place: Place, slots: IntArray, lengths: IntArray | None, device: torch.device | None
) -> Inside:
    """Lengths, segments and edges of bundles, as tensors.

    Args:
        place: Of the node that asks.
        slots: int64 ``(n,)``, the instances of the bundles.
        lengths: int64 ``(n,)``; None: one row each.
        device: Where the tensors are to be; None: on the host.

    A bundle of some of an instance's vertices, as a group makes, has no edges: who reads a column
    of them there gets a ``GraphError``.
    """
    if lengths is None:
        lengths = np.ones(slots.size, np.int64)
    segment = np.arange(lengths.size).repeat(lengths)
    at, of = uploads((lengths, segment), device)
    if not place.arena.has_edges:
        return Inside(at, of, {}, {}, lengths)
    columns = ColumnsInside(place.arena, slots, lengths)
    return Inside(at, of, EdgesInside(columns, device), columns, lengths)


@final
class ColumnsInside(Mapping[str, NDArray[Any]]):
    """Edge columns of whole instances; ``source`` and ``target`` number the rows of the batch.

    It is for the firing that it is made in: afterwards the frames may be another instance's.

    Args:
        arena: The frames.
        slots: int64 ``(n,)``, the instances.
        lengths: int64 ``(n,)``, rows of each; of who reads a column, those of the instances.
    """

    def __init__(self, arena: Arena, slots: IntArray, lengths: IntArray) -> None:
        self._arena, self._slots, self._lengths = arena, slots, lengths
        self._where: tuple[IntArray, IntArray] | None = None
        self._found: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        found = self._found.get(name)
        if found is None:
            if name not in self._arena.edge_names:
                raise KeyError(name)
            found = self._found[name] = self._column(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arena.edge_names)

    def __len__(self) -> int:
        return len(self._arena.edge_names)

    def edge_called(self, k: int) -> str:
        """``the edge 2 → 0 of instance 7 (line 8)``, for edge k of the batch."""
        arena, slots = self._arena, self._slots
        ends = arena.edge_size[slots].cumsum()
        owner = int(np.searchsorted(ends, k, side="right"))
        first = int((self._lengths[:owner]).sum())
        source, target = (int(self[name][k]) - first for name in ("source", "target"))
        return f"the edge {source} → {target} of {arena.describe(int(slots[owner]))}"

    def _column(self, name: str) -> NDArray[Any]:
        """Read a column.

        Raises:
            GraphError: A bundle does not hold exactly its instance's vertices.
        """
        arena, slots = self._arena, self._slots
        if self._where is None:
            size = arena.size[slots]
            if not np.array_equal(size, self._lengths):
                raise GraphError(
                    f"bundles of {self._lengths[:4].tolist()} rows came where edges are asked for, "
                    f"but their instances have {size[:4].tolist()} vertices; one row for every "
                    "vertex"
                )
            counts, lengths = arena.edge_size[slots], self._lengths
            offsets = (lengths.cumsum() - lengths).repeat(counts)
            self._where = ranges(arena.edge_base[slots], counts), offsets
        which, offsets = self._where
        column: NDArray[Any] = arena.edges[name][which]
        return column + offsets if name in ("source", "target") else column


@final
class EdgesInside(Mapping[str, Tensor]):
    """The same columns as tensors, on the host in the same memory.

    Args:
        columns: Of the firing.
        device: Where the tensors are to be; None: on the host.
    """

    def __init__(self, columns: ColumnsInside, device: torch.device | None) -> None:
        self._columns, self._device = columns, device
        self._found: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._uploaded(name)
        return found

    def _uploaded(self, name: str) -> Tensor:
        """A column on the device; who reads one end of the edges reads the other."""
        ends = ("source", "target")
        if name not in ends:
            return upload(self._columns[name], self._device)
        both = uploads([self._columns[end] for end in ends], self._device)
        self._found.update(zip(ends, both, strict=True))
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
