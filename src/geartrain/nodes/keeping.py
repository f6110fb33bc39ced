"""What nodes with a module share: rows that are kept until their gradient comes.

origin, version, instance of each message     KeepingNode
where its bundle lies, among payload rows     BundleKeepingNode
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    join_arrays,
    ranges,
)
from geartrain.frames.rows import RowStore
from geartrain.nodes.call import Call
from geartrain.nodes.collector import allocate_ragged, release_ragged
from geartrain.nodes.node import AbstractNode, Emission, Place
from geartrain.nodes.weights import AbstractWeights


class KeepingNode(AbstractNode):
    """Knows of each message that waits here where it came from, what it saw and whose it is.

    Args:
        place: Number, name, frames.
        call: The module and how it is called.
        weights: The part, or None where there are no parameters.
        columns: Kept of each message besides ``origin``, ``version`` and ``instance``.
    """

    kept_are: ClassVar[str] = "rows"

    def __init__(
        self,
        place: Place,
        call: Call,
        weights: AbstractWeights | None,
        columns: tuple[str, ...] = (),
    ) -> None:
        super().__init__(place)
        self._call, self._weights = call, weights
        self.part_name = None if weights is None else weights.name
        self._rows = RowStore(place.name, ("origin", "version", "instance", *columns))
        self._device: torch.device | None = None  # None: the host, and so is everything

    def slots(self, batch: Forward | Backward) -> IntArray:
        if isinstance(batch, Forward):
            return super().slots(batch)
        found: IntArray = self._rows["instance"][batch.rows & ROW_MASK]
        return found

    @property
    def open(self) -> bool:
        return self._weights is None or self._weights.open

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._rows["origin"][rows]
        return found

    def check_empty(self) -> None:
        self._rows.check_empty()

    def story(self) -> list[str]:
        n = self._rows.waiting
        return [f"'{self.name}' waits for the gradients of {n} {self.kept_are}"] if n else []


class BundleKeepingNode(KeepingNode):
    """Messages may be bundles: their payload rows lie together in a store of their own.

    Attributes:
        _cells: That store; None: every message has been one row so far.
        _width: Payload tensors of the messages that have come.
    """

    def __init__(
        self,
        place: Place,
        call: Call,
        weights: AbstractWeights | None,
        columns: tuple[str, ...] = (),
    ) -> None:
        super().__init__(place, call, weights, ("start", "length", *columns))
        self.alone = call.alone
        self._cells: RowStore | None = None
        self._width = 1

    @property
    def bundled(self) -> bool:
        return self._cells is not None

    def lengths(self, batch: Forward | Backward) -> IntArray | None:
        if isinstance(batch, Forward) or self._cells is None:
            return batch.lengths
        found: IntArray = self._rows["length"][batch.rows & ROW_MASK]
        return found  # a pooled answer has one row itself

    def nbytes(self) -> int:
        return self._buffers.nbytes()

    @property
    def _buffers(self) -> RowStore:
        """Where payload rows lie."""
        return self._cells or self._rows

    def _keep(
        self, origin: IntArray, state: IntArray, lengths: IntArray | None
    ) -> tuple[int, int, int]:
        """Messages leave, and are kept.

        Returns:
            First message and first payload row of the stores, number of payload rows.
        """
        n, store = origin.size, self._rows
        start = first = store.allocate(n)
        end, total = start + n, n
        store["origin"][start:end] = origin
        store["instance"][start:end] = state[INSTANCE]
        if self._weights is not None:
            store["version"][start:end] = self._weights.version
            self._weights.sent(n)
        if lengths is not None:
            cells = self._cells = self._cells or RowStore(f"{self.name} payload", ())
            starts = allocate_ragged(cells, lengths)
            first, total = int(starts[0]), int(lengths.sum())
            store["start"][start:end], store["length"][start:end] = starts, lengths
        return start, first, total

    def _found(self, rows: IntArray) -> tuple[IntArray | None, IntArray]:
        """Lengths of messages that are kept, if they are bundles, and where their payload lies."""
        if self._cells is None:
            return None, rows
        lengths = self._rows["length"][rows]
        return lengths, ranges(self._rows["start"][rows], lengths)

    def _answer_zero(self, batches: Sequence[Backward], emission: Emission) -> Sequence[Backward]:
        """Answer those that bring no gradient; returns the others."""
        zero = [b.rows for b in batches if b.gradient is None]
        if not zero:
            return batches
        rows = join_arrays(zero) & ROW_MASK
        emission.backward.append(Backward(self._rows["origin"][rows], None))
        if self._weights is not None:
            self._weights.dropped(self._rows["version"][rows])
        self._release(rows)
        return [b for b in batches if b.gradient is not None]

    def _release(self, rows: IntArray) -> None:
        self._rows.release(rows)
        if self._cells is not None:
            release_ragged(self._cells, self._rows["start"][rows], self._rows["length"][rows])
