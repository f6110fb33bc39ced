"""Tensors of a loop that runs whole: where rows lie, and their gradients.

AbstractTensors   what calls ask of them; FiringTensors (buffers.py) has a buffer for each value,
                  TapeTensors (pieces.py) has rows where calls have made them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.nodes.loop.numbers import Numbers

NOWHERE: Final = np.zeros(0, np.int64)


class AbstractTensors(ABC):
    """Tensors of one firing: what stored values hold, and the gradients of that.

    Args:
        numbers: Of the plan.

    Attributes:
        touched: Which rows have got a gradient, by number of the value.
    """

    __slots__ = ("numbers", "touched")

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.touched: dict[int, NDArray[np.bool_]] = {}

    @abstractmethod
    def put(
        self,
        number: int,
        name: str,
        first: int,
        columns: Sequence[Tensor],
        rows: IntArray | None = None,
    ) -> None:
        """Rows of a stored value from row ``first`` on; these of ``columns``, None: all.

        Raises:
            GraphError: They have another inner shape or dtype than those before.
        """

    def gather(self, number: int, rows: IntArray, which: Sequence[int] | None = None) -> Payload:
        """What these rows of a stored value hold, or these tensors of it; nobody may write to
        it."""
        return self.gather_places(number, self.numbers.at(number, rows), which)

    @abstractmethod
    def gather_places(
        self, number: int, places: IntArray, which: Sequence[int] | None = None
    ) -> Payload:
        """The same of places: those of what bundles hold."""

    @abstractmethod
    def width(self, number: int) -> int:
        """Tensors of the payload of a stored value that has been put."""

    def likes(self, number: int) -> Sequence[Tensor] | None:
        """Tensors like those of a stored value, where these are buffers; None: there are none."""
        return None

    def scatter(self, number: int, rows: IntArray, gradient: Gradient, at: IntArray | None) -> None:
        """Add gradients to those of rows of a stored value, as ``AbstractValue.scatter`` says."""
        if self._accumulate(number, self.numbers.at(number, rows), gradient, at):
            self.touch(number)[rows] = True

    def scatter_places(
        self, number: int, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> None:
        """The same for places: those of what bundles hold."""
        if self._accumulate(number, places, gradient, at):
            self.touch(number)[self.numbers.owners(number, places)] = True

    @abstractmethod
    def _accumulate(
        self, number: int, places: IntArray, gradient: Gradient, at: IntArray | None
    ) -> bool:
        """Add gradients to those of places; whether there were any."""

    @abstractmethod
    def gradient(self, number: int, first: int, n: int, which: IntArray | None) -> Gradient:
        """The gradients of n rows that were put together, or of these of them."""

    @abstractmethod
    def answered(self, number: int, first: int, n: int) -> None:
        """Nobody asks any more for what n rows that were put together hold, nor their gradients."""

    @abstractmethod
    def whole(self, number: int) -> Sequence[Tensor] | None:
        """All rows of a stored value, where they lie side by side."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What rows hold."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """As far as any came."""

    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for x in (*self.tensors(), *self.gradients()))

    def touch(self, number: int) -> NDArray[np.bool_]:
        """Which rows have got a gradient, to be written to."""
        found = self.touched.get(number)
        if found is None:
            found = self.touched[number] = np.zeros(self.numbers.counts[number], np.bool_)
        return found


def put_some(
    held: AbstractTensors,
    number: int,
    name: str,
    first: int,
    columns: Payload,
    which: Sequence[int] | None,
) -> None:
    """Rows of a stored value from row ``first`` on, of which some tensors are all that is read.

    Args:
        held: Gets them.
        number: Of the value, which has rows.
        name: Who puts them.
        first: The first of them.
        columns: What they hold.
        which: For each of these the tensor of the value that it is; None: they are all.
    """
    if which is not None:
        like = held.gather_places(number, NOWHERE)
        require_alike(name, columns, [like[j] for j in which])
        given = dict(zip(which, columns, strict=True))
        n = columns[0].shape[0]
        columns = tuple(
            [given[j] if j in given else x.new_empty((n, *x.shape[1:])) for j, x in enumerate(like)]
        )
    held.put(number, name, first, columns)


def some_of(payload: Gradient, which: Sequence[int] | None) -> Gradient:
    """Those of the tensors of a value that a module gives; None: all."""
    return payload if which is None else tuple([payload[j] for j in which])


def detached(payload: Sequence[Tensor]) -> Payload:
    """The same tensors without a graph."""
    return tuple([x.detach() for x in payload])


def require_alike(name: str, columns: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Rows that come to a value are like those that came before.

    Raises:
        GraphError: They have another inner shape or dtype.
    """
    if [(x.shape[1:], x.dtype) for x in found] != [(x.shape[1:], x.dtype) for x in columns]:
        raise GraphError(
            f"'{name}': rows of {_shapes(columns)} come where rows of {_shapes(found)} came first;"
            " all rows of a stream have one shape and dtype: cast or pad them"
        )


def _shapes(payload: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}" for x in payload)
