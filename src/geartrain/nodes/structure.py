"""Nodes that change how many rows there are.

    Broadcast   1 row to k readers                    gradients add
    Flatmap     1 row to as many rows as it has edges  gradients add; none is answered zero at once
    Split       1 row to k ports, columns cut          pieces side by side
    Join        k ports, equal keys, to 1 row          the columns of each go back to it
    Group       the members of a key to 1 row          each member gets its share
    Ungroup     1 row of k parts to k rows             parts side by side

Source: Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from geartrain.device import upload
from geartrain.errors import DataError, GraphError
from geartrain.frames.frame import BY_SOURCE, FIRST_OUT, View
from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    VERTEX,
    Backward,
    Forward,
    Gradient,
    IntArray,
    address,
    join_arrays,
    join_gradient,
    join_lengths,
    join_origins,
    join_payload,
    join_states,
    ranges,
)
from geartrain.frames.rows import RowStore
from geartrain.native.rows import Moves, take
from geartrain.nodes.collector import Collector, allocate_ragged
from geartrain.nodes.node import AbstractNode, Emission, Place

_MOST_COPIES: Final = 1 << 24


@final
class Broadcast(AbstractNode):
    """Send every row to several readers; its gradient is the sum of theirs."""

    eager = True

    def __init__(self, place: Place, readers: int) -> None:
        super().__init__(place)
        self._readers = readers
        self._waiting = Collector(place.id, place.name)

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        emission = Emission()
        for batch in batches:
            origin = self._waiting.expect(batch.origin, self._readers, batch.lengths)
            sent = batch.with_origin(origin)
            emission.forward.extend((k, sent) for k in range(self._readers))
        return emission

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return Emission(backward=self._waiting.collect(batches))

    def origins(self, rows: IntArray) -> IntArray:
        return self._waiting.origins(rows)

    def check_empty(self) -> None:
        self._waiting.check_empty()

    def story(self) -> list[str]:
        n = self._waiting.waiting
        return [f"'{self.name}' waits for gradients of {n} rows from its readers"] if n else []

    def nbytes(self) -> int:
        return self._waiting.nbytes()


def first_parts(place: Place, column: int, state: IntArray, counts: IntArray) -> IntArray:
    """What a column begins with that numbers the parts of rows, so many each, from 0.

    Raises:
        GraphError: The column is that of vertices or edges, and the instance has fewer of them.
    """
    arena, slots = place.arena, state[INSTANCE]
    if column == VERTEX:
        kind, base, size = "vertex", arena.base, arena.size
    elif column == place.schema.state.get("edge"):
        kind, base, size = "edge", arena.edge_base, arena.edge_size
    else:
        return np.zeros(slots.size, np.int64)
    if (counts > size[slots]).any():
        i = int(np.flatnonzero(counts > size[slots])[0])
        last = int(size[slots[i]]) - 1
        raise GraphError(
            f"'{place.name}': a row of {arena.describe(int(slots[i]))} becomes {int(counts[i])}, "
            f"one at each {kind}, but the instance has {kind} 0..{last}; number them in a column "
            "of another name"
        )
    first: IntArray = base[slots]
    return first


@final
class Flatmap(AbstractNode):
    """Send a row once for each of its edges, or a computed number of times.

    Args:
        place: Number, name, frames.
        column: State column that numbers the copies: ``edge`` (absolute edge of the arena) or any
            name.
        count: None for the edges that leave the row's vertex; else a function of the ``View`` that
            gives each row's number of copies, which are numbered from 0; of ``vertex`` and ``edge``
            inside the instance.
    """

    eager = True

    def __init__(
        self, place: Place, column: int, count: Callable[[View], Any] | None = None
    ) -> None:
        super().__init__(place)
        self.column, self._count = column, count
        self._waiting = Collector(place.id, place.name)

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        emission = Emission()
        for batch in batches:
            self._forward(batch, emission)
        return emission

    def _forward(self, batch: Forward, emission: Emission) -> None:
        starts, counts = self.copies(batch)
        none = np.flatnonzero(counts == 0)
        if none.size:
            emission.backward.append(Backward(batch.origin[none], None))
            some = np.flatnonzero(counts)
            if not some.size:
                return
            batch, starts, counts = batch.take(some), starts[some], counts[some]
        origin = self._waiting.expect(batch.origin, counts, batch.lengths)
        sent = batch.with_origin(origin).take(np.repeat(np.arange(len(batch)), counts))
        sent.state[self.column] = self.numbers(starts, counts)
        emission.forward.append((0, sent))

    def copies(self, batch: Forward) -> tuple[IntArray, IntArray]:
        """What the copies of each row are numbered from, and how many there are."""
        arena = self.place.arena
        if self._count is None:
            at = batch.state[VERTEX]
            return arena.vertices[FIRST_OUT][at], arena.vertices["out_degree"][at]
        counts = np.array(self._count(self.place.view(batch)))  # ours: checked is what is used
        if counts.shape != (len(batch),) or counts.dtype.kind not in "iub" or counts.min() < 0:
            raise GraphError(
                f"'{self.name}': its count gave {counts.dtype} {counts.shape} for {len(batch)} "
                "rows; it gives each row a number of copies, 0 or more"
            )
        if int(counts.max()) > _MOST_COPIES:
            slot = int(batch.state[INSTANCE, int(counts.argmax())])
            raise DataError(
                f"'{self.name}': a row of {arena.describe(slot)} asks for {int(counts.max()):,} "
                f"copies; at most {_MOST_COPIES:,}, as each of them is a row"
            )
        counts = counts.astype(np.int64, copy=False)
        return first_parts(self.place, self.column, batch.state, counts), counts

    def numbers(self, starts: IntArray, counts: IntArray) -> IntArray:
        """What the column is for each copy, of what ``copies`` gave."""
        numbers = ranges(starts, counts)
        return numbers if self._count is not None else self.place.arena.edges[BY_SOURCE][numbers]

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return Emission(backward=self._waiting.collect(batches))

    def origins(self, rows: IntArray) -> IntArray:
        return self._waiting.origins(rows)

    def check_empty(self) -> None:
        self._waiting.check_empty()

    def story(self) -> list[str]:
        n = self._waiting.waiting
        return [f"'{self.name}' waits for the gradients of the copies of {n} rows"] if n else []

    def nbytes(self) -> int:
        return self._waiting.nbytes()


@final
class Cells:
    """Rows whose gradient comes in numbered parts: a cell for each part, side by side.

    Args:
        node: Number of the node; addresses are those of cells.
        name: For messages.
    """

    def __init__(self, node: int, name: str) -> None:
        self._node = node
        self._rows = RowStore(name, ("origin", "pending", "start", "length", "some"))
        self._cells = RowStore(f"{name} parts", ("row", "filled"))
        self._width = 0  # payload tensors of a part, whether they got a gradient or not

    def expect(self, origin: IntArray, lengths: IntArray) -> IntArray:
        """Keep rows with so many parts each; returns the addresses of all parts, in order."""
        n = origin.size
        row = self._rows.allocate(n)
        starts = allocate_ragged(self._cells, lengths)
        end = row + n
        rows = self._rows
        rows["origin"][row:end], rows["pending"][row:end] = origin, lengths
        rows["start"][row:end], rows["length"][row:end] = starts, lengths
        rows["some"][row:end] = 0
        first, total = int(starts[0]), int(lengths.sum())
        self._cells["row"][first : first + total] = np.repeat(np.arange(row, end), lengths)
        self._cells["filled"][first : first + total] = 0
        return address(self._node, first, total)

    def collect(
        self, batches: Sequence[Backward]
    ) -> list[tuple[IntArray, Gradient | None, IntArray]]:
        """Take parts in; returns (origins, gradients of all parts or None, lengths)."""
        ready: list[IntArray] = []
        for batch in batches:
            cells = batch.rows & ROW_MASK
            if batch.gradient is not None:
                bits, moves = 0, Moves()
                self._width = max(self._width, len(batch.gradient))
                for j, column in enumerate(join_gradient([batch])):
                    if column is not None:
                        moves.add(self._cells.buffer(j, column), cells, column, None)
                        bits |= 1 << j
                moves.run()
                self._cells["filled"][cells] = bits
            owners = self._cells["row"][cells]
            if batch.gradient is not None:
                self._rows["some"][owners] = 1
            rows, counts = np.unique(owners, return_counts=True)
            self._rows["pending"][rows] -= counts
            if (self._rows["pending"][rows] < 0).any():
                self._cells.release(np.repeat(cells, 2))
            ready.append(rows[self._rows["pending"][rows] == 0])
        whole = join_arrays(ready)
        done: list[tuple[IntArray, Gradient | None, IntArray]] = []
        some = self._rows["some"][whole] > 0
        for rows, quiet in ((whole[~some], True), (whole[some], False)):
            if not rows.size:
                continue
            origin, lengths = self._rows["origin"][rows], self._rows["length"][rows]
            cells = ranges(self._rows["start"][rows], lengths)
            done.append((origin, None if quiet else self._gather(cells), lengths))
            self._cells.release(cells)
            self._rows.release(rows)
        return done

    def _gather(self, cells: IntArray) -> Gradient:
        filled = self._cells["filled"][cells]
        columns: list[Tensor | None] = []
        for j in range(self._width):
            bit = (filled >> j) & 1
            buffer = self._cells.existing(j)
            if buffer is None or not bit.any():
                columns.append(None)
                continue
            (column,) = take([buffer], cells)
            if not bit.all():
                column.index_fill_(0, upload(np.flatnonzero(bit == 0), column.device), 0)
            columns.append(column)
        return tuple(columns)

    def origins(self, cells: IntArray) -> IntArray:
        """Where the rows came from that these are parts of."""
        found: IntArray = self._rows["origin"][self._cells["row"][cells]]
        return found

    def check_empty(self) -> None:
        self._rows.check_empty()

    @property
    def waiting(self) -> int:
        return self._rows.waiting

    def nbytes(self) -> int:
        return self._cells.nbytes()


@final
class SplitNode(AbstractNode):
    """Cut the columns of a payload into pieces, one a port.

    Args:
        place: Number, name, frames.
        sizes: Columns of each piece; they add up to the payload's last dimension.
    """

    eager = True

    def __init__(self, place: Place, sizes: Sequence[int]) -> None:
        super().__init__(place)
        self._sizes = tuple(sizes)
        self._cells = Cells(place.id, place.name)

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        (x,) = join_payload(batches, self.place.device_for(batches))
        if x.shape[-1] != sum(self._sizes):
            raise GraphError(
                f"'{self.name}': a payload of {x.shape[-1]} columns came, but the pieces "
                f"{self._sizes} add up to {sum(self._sizes)}"
            )
        origin, k = join_origins(batches), len(self._sizes)
        state = join_states(batches)
        addresses = self._cells.expect(origin, np.full(origin.size, k, np.int64)).reshape(-1, k)
        pieces = x.split_with_sizes(self._sizes, -1)
        return Emission(
            [
                (p, Forward((piece,), state, np.ascontiguousarray(addresses[:, p])))
                for p, piece in enumerate(pieces)
            ]
        )

    def backward(self, batches: Sequence[Backward]) -> Emission:
        return Emission(backward=self._whole(batches))

    def _whole(self, batches: Sequence[Backward]) -> list[Backward]:
        widest = max(self._sizes)
        padded = [self._pad(b, widest) for b in batches]
        done = []
        for origin, gradient, _ in self._cells.collect(padded):
            if gradient is None or gradient[0] is None:
                done.append(Backward(origin, None))
                continue
            parts = gradient[0].reshape(origin.size, len(self._sizes), *gradient[0].shape[1:])
            pieces = [parts[:, p, ..., :size] for p, size in enumerate(self._sizes)]
            done.append(Backward(origin, (torch.cat(pieces, -1),)))
        return done

    def _pad(self, batch: Backward, widest: int) -> Backward:
        """Pieces of unequal width share one buffer."""
        if batch.gradient is None:
            return batch
        (column,) = join_gradient([batch])
        if column is None:
            return Backward(batch.rows, None)
        missing = widest - column.shape[-1]
        return Backward(batch.rows, (torch.nn.functional.pad(column, (0, missing)),))

    def origins(self, rows: IntArray) -> IntArray:
        return self._cells.origins(rows)

    def check_empty(self) -> None:
        self._cells.check_empty()

    def story(self) -> list[str]:
        n = self._cells.waiting
        return [f"'{self.name}' waits for the gradients of the pieces of {n} rows"] if n else []

    def nbytes(self) -> int:
        return self._cells.nbytes()


@final
class Ungroup(AbstractNode):
    """Turn one row of k parts into k rows: a payload ``(n, k, ...)``, or a bundle.

    Args:
        place: Number, name, frames.
        column: State column that gets the part's number, 0..k-1, of ``vertex`` and ``edge`` inside
            the instance; None keeps none.
    """

    eager = True

    def __init__(self, place: Place, column: int | None) -> None:
        super().__init__(place)
        self._column = column
        self._cells = Cells(place.id, place.name)
        self._bundled = False

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        payload = join_payload(batches, self.place.device_for(batches))
        state, origin = join_states(batches), join_origins(batches)
        lengths = join_lengths(batches)
        self._bundled = lengths is not None
        if lengths is None:
            lengths = np.full(origin.size, payload[0].shape[1], np.int64)
            payload = tuple(x.flatten(0, 1) for x in payload)
        none = np.flatnonzero(lengths == 0)
        emission = Emission()
        if none.size:
            emission.backward.append(Backward(origin[none], None))
            some = np.flatnonzero(lengths)
            if not some.size:
                return emission
            origin, state, lengths = origin[some], state.take(some, 1), lengths[some]
        addresses = self._cells.expect(origin, lengths)
        state = self.parts(state, lengths)
        emission.forward.append((0, Forward(payload, state, addresses)))
        return emission

    def parts(self, state: IntArray, lengths: IntArray) -> IntArray:
        """The columns of the parts of rows with these columns, that have so many each."""
        if self._column is None:
            return np.repeat(state, lengths, axis=1)
        first = first_parts(self.place, self._column, state, lengths)
        state = np.repeat(state, lengths, axis=1)
        state[self._column] = ranges(first, lengths)
        return state

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        for origin, gradient, lengths in self._cells.collect(batches):
            if gradient is None:
                emission.backward.append(Backward(origin, None))
            elif self._bundled:
                emission.backward.append(Backward(origin, gradient, lengths))
            else:
                k = int(lengths[0])
                parts = tuple(
                    None if g is None else g.reshape(origin.size, k, *g.shape[1:]) for g in gradient
                )
                emission.backward.append(Backward(origin, parts))
        return emission

    def origins(self, rows: IntArray) -> IntArray:
        return self._cells.origins(rows)

    def check_empty(self) -> None:
        self._cells.check_empty()

    def story(self) -> list[str]:
        n = self._cells.waiting
        return [f"'{self.name}' waits for the gradients of the parts of {n} rows"] if n else []

    def nbytes(self) -> int:
        return self._cells.nbytes()
