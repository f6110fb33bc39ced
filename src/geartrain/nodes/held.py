"""What a memory holds, by handle: rows of bundles, and the sum of their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from geartrain.device import moved, upload
from geartrain.errors import GraphError, ProtocolError
from geartrain.frames.message import ROW_MASK, Gradient, IntArray, Payload, ranges
from geartrain.frames.precision import widened
from geartrain.frames.rows import RowStore
from geartrain.native.rows import Moves, add
from geartrain.nodes.collector import allocate_ragged, release_ragged

_MOST_TENSORS: Final = 63
"""Which of them have got gradients are the bits of a number."""


class AbstractHeld(ABC):
    """Bundles that rows read by handle, and the sums of their gradients."""

    @abstractmethod
    def spans(self, handles: IntArray) -> tuple[IntArray, IntArray]:
        """Where these bundles begin in ``payload``, and how many rows each has.

        Raises:
            ProtocolError: One of them is held no more.
        """

    @abstractmethod
    def payload(self) -> Payload:
        """The tensors ``(capacity, ...)`` in which the rows lie."""

    @abstractmethod
    def sums(self) -> Gradient:
        """The sums of the gradients, as ``payload`` lies; None for integers."""

    @abstractmethod
    def wanted(self, handles: IntArray) -> bool:
        """Whether anybody reads the gradient of some of these bundles."""

    @abstractmethod
    def add(
        self, handles: IntArray, gradient: Gradient, cells: IntArray, rows: IntArray | None
    ) -> None:
        """Add to the sums.

        Args:
            handles: Of the bundles whose gradient it is.
            gradient: By tensor of the memory; None is zero.
            cells: Where to add.
            rows: Rows of the gradient that are added there; None: all, in order.
        """

    @abstractmethod
    def touch(self, handles: IntArray, gradient: Gradient) -> None:
        """Remember which tensors of these bundles have got a gradient: those that are not None."""


@final
class Held(AbstractHeld):
    """The bundles that one memory holds, and the sums of their gradients.

    Tensor j of the bundles lies in buffer 2j, the sum of its gradients in buffer 2j + 1.

    Args:
        name: Of the node, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = RowStore(name, ("origin", "start", "length", "touched"))
        self.cells = RowStore(f"{name} payload", ())
        self.width = 0

    def hold(self, payload: Payload, origin: IntArray, lengths: IntArray, *, sums: bool) -> int:
        """Keep bundles; ``sums`` says whether gradients will come. Returns the first handle."""
        if len(payload) > _MOST_TENSORS:
            raise GraphError(
                f"'{self.name}' is to hold bundles of {len(payload)} tensors; it holds at most "
                f"{_MOST_TENSORS}: put some of them side by side"
            )
        n, rows, cells = origin.size, self.rows, self.cells
        start = rows.allocate(n)
        starts = allocate_ragged(cells, lengths)
        end = start + n
        rows["origin"][start:end], rows["touched"][start:end] = origin, 0
        rows["start"][start:end], rows["length"][start:end] = starts, lengths
        total = int(lengths.sum())
        first = int(starts[0])
        self.width = len(payload)
        for j, x in enumerate(payload):
            cells.buffer(2 * j, x)[first : first + total] = x
            if sums and x.is_floating_point():
                like = widened(x[:0])
                cells.buffer(2 * j + 1, like, total)[first : first + total].zero_()
        return start

    def spans(self, handles: IntArray) -> tuple[IntArray, IntArray]:
        if not self.rows.are_waiting(handles):
            raise ProtocolError(
                f"rows read a bundle of '{self.name}' that it holds no more: it was answered "
                "before all that reads it"
            )
        return self.rows["start"][handles], self.rows["length"][handles]

    def payload(self) -> Payload:
        found = (self.cells.existing(2 * j) for j in range(self.width))
        return tuple(x for x in found if x is not None)

    def sums(self) -> Gradient:
        return tuple(self.cells.existing(2 * j + 1) for j in range(self.width))

    def wanted(self, handles: IntArray) -> bool:
        return bool((self.rows["origin"][handles] > ROW_MASK).any())

    def add(
        self, handles: IntArray, gradient: Gradient, cells: IntArray, rows: IntArray | None
    ) -> None:
        for g, total in zip(gradient, self.sums(), strict=True):
            if g is not None and total is not None and cells.size:
                add(total, cells, moved(g, total.device).to(total.dtype), rows)
        self.touch(handles, gradient)

    def touch(self, handles: IntArray, gradient: Gradient) -> None:
        bits = sum(1 << j for j, g in enumerate(gradient) if g is not None)
        self.rows["touched"][handles] |= bits

    def at(self, handles: IntArray) -> IntArray:
        """Where the rows of these bundles lie, bundle by bundle."""
        return ranges(self.rows["start"][handles], self.rows["length"][handles])

    def release(self, handles: IntArray) -> None:
        starts, lengths = self.rows["start"][handles], self.rows["length"][handles]
        self.rows.release(handles)
        release_ragged(self.cells, starts, lengths)


@final
class Recalled:
    """What the rows of one firing read of a memory.

    Args:
        held: The memory.
        handles: int64 ``(n,)``, the bundle that each row reads.
        device: Where it is read; None: on the host.

    Attributes:
        held, handles: As given.
        starts, lengths: int64 ``(n,)``: row i reads rows ``starts[i]`` to ``starts[i] +
            lengths[i]`` of ``payload``.
        longest: Of the lengths, at least 1.
        reached: Bundles that get a gradient, where not all rows have got one.

    Raises:
        ProtocolError: A bundle is held no more.
    """

    def __init__(
        self, held: AbstractHeld, handles: IntArray, device: torch.device | None = None
    ) -> None:
        self.held, self.handles, self._device = held, handles, device
        self.reached = handles
        self.starts, self.lengths = held.spans(handles)
        self.longest = max(int(self.lengths.max(initial=1)), 1)
        self._cells: tuple[IntArray, IntArray | None] | None = None

    @property
    def payload(self) -> Payload:
        """The memory's tensors ``(capacity, ...)``; rows that nobody holds have no meaning."""
        return self.held.payload()

    def some(self, most: int) -> Payload:
        """So many of the rows that are read, at most, in order."""
        at = torch.from_numpy(self._places()[0][:most])
        return tuple(x[at.to(x.device)] for x in self.payload)

    @property
    def wanted(self) -> bool:
        """Whether anybody reads the gradient of what is held."""
        return self.held.wanted(self.handles)

    def padded(self) -> tuple[Payload, Tensor]:
        """What each row reads, ``(n, longest, ...)``, with zeros behind its end; and the mask.

        Returns:
            The tensors, and bool ``(n, longest)``, which is False behind the end.
        """
        n, cells, places = self.lengths.size, *self._places()
        out, moves = [], Moves()
        for x in self.payload:
            shape = (n * self.longest, *x.shape[1:])
            target = x.new_empty(shape) if places is None else x.new_zeros(shape)
            moves.add(target, places, x, cells)
            out.append(target)
        moves.run()
        mask = np.arange(self.longest) < self.lengths[:, None]
        tensors = tuple(x.view(n, self.longest, *x.shape[1:]) for x in out)
        if self._device is not None:
            tensors = tuple(moved(x, self._device) for x in tensors)
        return tensors, upload(mask, self._device)

    def add_padded(self, gradients: Gradient) -> None:
        """Add gradients of what ``padded`` gave; those behind the ends are left out."""
        cells, places = self._places()
        found: list[Tensor | None] = []
        for g in gradients:
            found.append(None if g is None else g.reshape(-1, *g.shape[2:]))
        self.held.add(self.reached, tuple(found), cells, places)

    @property
    def sums(self) -> Gradient:
        """The sums of gradients, as ``payload`` lies, for a kernel that adds to them by itself."""
        return self.held.sums()

    def touch(self) -> None:
        """A kernel has added to the sums, if anybody wants them."""
        if self.wanted:
            self.held.touch(self.reached, self.held.sums())

    def _places(self) -> tuple[IntArray, IntArray | None]:
        """The rows that are read, in order, and where they stand in the padded; None: all over."""
        if self._cells is None:
            places = None
            if (self.lengths != self.longest).any():
                first = np.arange(self.lengths.size) * self.longest
                places = ranges(first, self.lengths)
            self._cells = ranges(self.starts, self.lengths), places
        return self._cells
