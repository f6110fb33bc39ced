"""Instances that lie in columns; none of them is an object until somebody asks for one.

    lengths   [ 3      2    4        ]
    tokens    [ a a a  b b  c c c c  ]      columns[1] ─► Instance({"tokens": [b b]}, ...)
    label     [ 7      0    3        ]      pack([2, 0]) ─► the columns of both, in one gather each

What reads them as a list of instances sees one. The engine takes them in blocks, at a cost for a
block and hardly one for an instance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from geartrain.errors import DataError
from geartrain.frames.instance import Instance, as_column
from geartrain.frames.message import IntArray
from geartrain.kinds import require_entries, require_kind


@final
class Columns(Sequence[Instance]):
    """Instances one below the other.

    Args:
        lengths: int ``(n,)``, vertices of each, 1 or more.
        inputs: Input name to rows ``(vertices of all, ...)``: every vertex brings one, as one
            bundle where the input is declared so.
        vertex: Name to ``(vertices of all, ...)``.
        value: Name to ``(n, ...)``.
        edge: Name to ``(edges of all, ...)``; ``source`` and ``target`` count the vertices of their
            instance.
        edge_lengths: int ``(n,)``, edges of each; None: there are none.
        called: What errors call them: this word and a number from 0, or what a function of that
            number gives.

    Nothing is copied but the lengths; do not write to the columns while a session reads them.

    Raises:
        DataError: A length is below 1 (of edges: below 0), or a column has not as many entries as
            there are vertices, edges or instances.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        inputs: Mapping[str, Tensor],
        vertex: Mapping[str, ArrayLike] | None = None,
        value: Mapping[str, ArrayLike] | None = None,
        *,
        edge: Mapping[str, ArrayLike] | None = None,
        edge_lengths: ArrayLike | None = None,
        called: str | Callable[[int], object] = "instance",
    ) -> None:
        named = "names with columns: {'x': ...}"
        require_entries("Columns", str, Tensor, "names with tensors: {'x': ...}", inputs=inputs)
        for name, given in (("vertex", vertex), ("value", value), ("edge", edge)):
            if given is not None:
                require_entries("Columns", str, object, named, **{name: given})
        wanted = "a word, or a function of an instance's number"
        require_kind("Columns", str | Callable, wanted, called=called)
        self.lengths: IntArray = _whole("lengths", lengths)
        if self.lengths.ndim != 1 or (self.lengths < 1).any():
            raise DataError(
                f"Columns: lengths of shape {self.lengths.shape}, the least "
                f"{self.lengths.min(initial=1)}; give one for each instance, 1 or more"
            )
        ends = np.cumsum(self.lengths)
        self.starts: IntArray = ends - self.lengths
        self.inputs = dict(inputs)
        self.vertex = {name: as_column(column) for name, column in (vertex or {}).items()}
        self.value = {name: as_column(column) for name, column in (value or {}).items()}
        total = int(ends[-1]) if ends.size else 0
        self._check(self.inputs, total, "vertices")
        self._check(self.vertex, total, "vertices")
        self._check(self.value, self.lengths.size, "instances")
        self.edge = {name: as_column(column) for name, column in (edge or {}).items()}
        none = np.zeros_like(self.lengths)
        self.edge_lengths: IntArray = (
            none if edge_lengths is None else _whole("edge_lengths", edge_lengths)
        )
        self._check({"edge_lengths": self.edge_lengths}, self.lengths.size, "instances")
        if self.edge_lengths.min(initial=0) < 0:
            raise DataError(
                f"Columns: edge_lengths has {self.edge_lengths.min()}; give one for each instance, "
                "0 or more"
            )
        self.edge_starts: IntArray = self.edge_lengths.cumsum() - self.edge_lengths
        self._check(self.edge, int(self.edge_lengths.sum()), "edges")
        self._called = called

    @staticmethod
    def _check(columns: Mapping[str, Any], n: int, what: str) -> None:
        for name, column in columns.items():
            if column.shape[:1] != (n,):
                raise DataError(
                    f"Columns: '{name}' has shape {tuple(column.shape)}, and there are {n} {what}; "
                    "give one entry for each"
                )

    def __len__(self) -> int:
        return self.lengths.size

    @overload
    def __getitem__(self, at: int) -> Instance: ...
    @overload
    def __getitem__(self, at: slice) -> list[Instance]: ...
    def __getitem__(self, at: int | slice) -> Instance | list[Instance]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        start = int(self.starts[i])
        here = slice(start, start + int(self.lengths[i]))
        first = int(self.edge_starts[i])
        edges = slice(first, first + int(self.edge_lengths[i]))
        return Instance(
            {name: rows[here] for name, rows in self.inputs.items()},
            vertex={name: column[here] for name, column in self.vertex.items()},
            edge={name: column[edges] for name, column in self.edge.items()},
            value={name: column[i] for name, column in self.value.items()},
            key=self.key(i),
        )

    def key(self, i: int) -> object:
        """What errors call an instance."""
        return f"{self._called} {i}" if isinstance(self._called, str) else self._called(i)

    def keys(self, places: IntArray) -> NDArray[np.object_]:
        """The same of several, in an array."""
        return np.fromiter(map(self.key, places.tolist()), np.object_, places.size)


def _whole(name: str, given: object) -> IntArray:
    """Raises:
    DataError: They are no whole numbers.
    """
    found = np.asarray(given)
    if found.size and found.dtype.kind not in "iu":
        raise DataError(f"Columns({name}={given!r:.80}): give whole numbers, one for each instance")
    return found.astype(np.int64)


__all__ = ["Columns"]
