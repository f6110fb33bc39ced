"""What a user feeds: one instance with its rows and the integers that steer them.

    Instance(
        inputs={"word": (tensor (5, ...), vertices (5,))},   rows that enter, and where
        vertex={"parent": (9,), "slot": (9,), "label": (9,)},  one entry a vertex
        edge={"source": (14,), "target": (14,), "type": (14,)},  one entry an edge
        value={"target": 2.5},                                one entry for the whole instance
    )

Vertices and edges are numbered from 0 inside the instance; nobody outside the engine sees other
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from geartrain.errors import DataError


@final
@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """One training example.

    Args:
        inputs: Input name to its rows: a tensor ``(n, ...)`` whose row i enters at vertex i, or a
            pair (tensor, int array ``(n,)`` of vertices). For an input declared as a bundle the
            tensor is one message, which enters at vertex 0.
        vertex: Name to an array ``(V,)``: integers, or floats, as features that modules read and
            as targets; also ``(V, k)``. Without such columns there are as many vertices as inputs
            reach.
        edge: Name to an array ``(E,)``, or floats as above; ``source`` and ``target`` hold
            vertices. Edges are numbered as they come here.
        value: Name to one number (or a short array) of the whole instance.
        key: What errors call this instance: a line number, a file name.
    """

    inputs: Mapping[str, Tensor | tuple[Tensor, ArrayLike]]
    vertex: Mapping[str, ArrayLike] = field(default_factory=dict)
    edge: Mapping[str, ArrayLike] = field(default_factory=dict)
    value: Mapping[str, Any] = field(default_factory=dict)
    key: object = None


def called(instance: Instance) -> str:
    """What errors call it."""
    return "instance without a key" if instance.key is None else f"instance {instance.key}"


def require_plain(instance: Instance) -> None:
    """Refuse what is of another kind than an instance is made of.

    It is looked at where something has failed, and for a first instance: millions are made.

    Raises:
        DataError: A field is no mapping of names, or rows are no dense tensor with values.
    """
    for field_, wanted in (
        ("inputs", "{'x': tensor (n, ...)}"),
        ("vertex", "{'parent': [2, 2, -1]}"),
        ("edge", "{'source': [0], 'target': [1]}"),
        ("value", "{'label': 3}"),
    ):
        given = getattr(instance, field_)
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise DataError(f"{called(instance)}: {field_}={given!r:.80}: give names: {wanted}")
    for name, brought in instance.inputs.items():
        rows = brought[0] if isinstance(brought, tuple) and brought else brought
        if isinstance(rows, Tensor) and not is_plain(rows):
            kind = "nested" if rows.is_nested else f"of layout {rows.layout}, on {rows.device}"
            raise DataError(
                f"{called(instance)}: input '{name}' is {kind}: give a dense tensor (n, ...) with "
                "values, as by to_dense(), or a pair (tensor, vertices)"
            )


def is_plain(rows: Tensor) -> bool:
    """Whether it is dense, and has values."""
    return rows.layout is torch.strided and not rows.is_nested and not rows.is_meta


def as_column(array: object) -> NDArray[Any]:
    """Integers as int64, floats as they are, and what is neither."""
    if isinstance(array, Tensor):
        array = array.detach()
    column = array if isinstance(array, np.ndarray) else np.asarray(array)
    if column.dtype.kind in "iub" and column.dtype != np.int64:
        if column.dtype == np.uint64 and column.size and column.max() > _LARGEST:
            return column  # which no table takes
        return column.astype(np.int64)
    return column


_LARGEST: Final = np.uint64(2**63 - 1)


def stopped(where: str) -> DataError:
    """What a ``StopIteration`` is that came out of an item: it would end an epoch silently."""
    return DataError(
        f"{where} raised StopIteration, which would pass for the end of the data; next(...) in it "
        "has found nothing: give it a default, or catch StopIteration there"
    )


@final
class InOrder(Iterator[Any]):
    """Items of a list in some order, which may be looked at before they are taken.

    Args:
        items: A list, a tuple, or instances in columns.
        order: Places in it.
    """

    def __init__(self, items: Sequence[Any], order: Sequence[int] | NDArray[np.int64]) -> None:
        self.items, self._order, self._at = items, order, 0

    def __next__(self) -> Any:
        if self._at >= len(self._order):
            raise StopIteration
        self._at += 1
        place = int(self._order[self._at - 1])
        try:
            return self.items[place]
        except StopIteration as error:
            raise stopped(f"item {place} of a {type(self.items).__name__}") from error

    @property
    def left(self) -> int:
        """How many have not been taken."""
        return len(self._order) - self._at

    def places(self, n: int) -> Sequence[int] | NDArray[np.int64]:
        """Where the next n items are, or as many as are left."""
        return self._order[self._at : self._at + n]

    def ahead(self, n: int) -> list[Any]:
        """The next n items, or as many as are left."""
        return [self.items[i] for i in self.places(n)]

    def skip(self, n: int) -> None:
        """Take n items that ``ahead`` has shown."""
        self._at += n
