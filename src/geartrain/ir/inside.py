"""What a module sees of the bundles whose rows it gets, looked up when it asks.

slots, lengths ─► Inside ─► lengths, segment            at once
                         └► edges["type"], ...          a column when it is first read
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.ir.bundle import Inside
from geartrain.ir.frame import Arena
from geartrain.ir.message import IntArray, ranges
from geartrain.ir.node import Place


def look_inside(place: Place, slots: IntArray, lengths: IntArray | None) -> Inside:
    """Lengths, segments and edges of bundles, as tensors.

    Args:
        place: Of the node that asks.
        slots: int64 ``(n,)``, the instances of the bundles.
        lengths: int64 ``(n,)``; None: one row each.

    Raises:
        GraphError: There are edges, and a bundle does not hold exactly its instance's vertices.
    """
    if lengths is None:
        lengths = np.ones(slots.size, np.int64)
    segment = np.arange(lengths.size).repeat(lengths)
    arena = place.arena
    return Inside(
        torch.from_numpy(lengths),
        torch.from_numpy(segment),
        EdgesInside(arena, slots, lengths) if arena.has_edges else {},
    )


@final
class EdgesInside(Mapping[str, Tensor]):
    """Edge columns of whole instances; ``source`` and ``target`` number the rows of the batch.

    It is for the firing that it is made in: afterwards the frames may be another instance's.

    Args:
        arena: The frames.
        slots: int64 ``(n,)``, the instances.
        lengths: int64 ``(n,)``, rows of each.

    Raises:
        GraphError: The lengths are not those of the instances.
    """

    def __init__(self, arena: Arena, slots: IntArray, lengths: IntArray) -> None:
        size = arena.size[slots]
        if not np.array_equal(size, lengths):
            raise GraphError(
                f"bundles of {lengths[:4].tolist()} rows came where edges are asked for, but their "
                f"instances have {size[:4].tolist()} vertices; one row for every vertex"
            )
        self._arena, self._slots, self._lengths = arena, slots, lengths
        self._where: tuple[IntArray, IntArray] | None = None
        self._found: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        found = self._found.get(name)
        if found is None:
            if name not in self._arena.edge_names:
                raise KeyError(name)
            found = self._found[name] = torch.from_numpy(self._column(name))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arena.edge_names)

    def __len__(self) -> int:
        return len(self._arena.edge_names)

    def _column(self, name: str) -> IntArray:
        arena, slots = self._arena, self._slots
        if self._where is None:
            counts, lengths = arena.edge_size[slots], self._lengths
            offsets = (lengths.cumsum() - lengths).repeat(counts)
            self._where = ranges(arena.edge_base[slots], counts), offsets
        which, offsets = self._where
        column: IntArray = arena.edges[name][which]
        return column + offsets if name in ("source", "target") else column
