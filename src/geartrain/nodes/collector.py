"""Waiting for several answers to one row, and adding them up.

    broadcast   every row has k readers; its gradient is the sum of theirs
    flatmap     every row became k rows of its own, k from the data

The first gradient that reaches a row is copied, later ones are added, and the last one leaves with
the sum without being stored: nothing is ever cleared. Which columns of a row hold something is a
bit mask, as one reader may use payload 0 alone.

Bundles may have several inner shapes, as minibatches of sequences do. Those of a shape lie side by
side; one that comes while others wait is kept by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from torch import Tensor

from geartrain.frames.counted import consecutive, sliced
from geartrain.frames.message import (
    ROW_MASK,
    Backward,
    Gradient,
    IntArray,
    address,
    distinct,
    join_arrays,
    join_gradient,
    join_lengths,
    marks,
    ranges,
)
from geartrain.frames.rows import RowStore
from geartrain.native.rows import Moves, add, take, total


@final
class Collector:
    """Rows that expect a number of answers each; bundles keep their payload rows in a second store.

    Args:
        node: The node's number, part of the addresses it hands out.
        name: The node's name, for messages.
    """

    def __init__(self, node: int, name: str) -> None:
        self._node = node
        self._rows = RowStore(name, ("origin", "pending", "touched", "start", "length"))
        self._cells: RowStore | None = None
        self._name = name
        self._apart: dict[int, Gradient] = {}
        self._width = 0  # payload tensors of a row: a sum has a column for each, held or not

    def expect(
        self, origin: IntArray, answers: IntArray | int, lengths: IntArray | None
    ) -> IntArray:
        """Keep rows that will be answered so many times each; returns their addresses."""
        n = origin.size
        store = self._rows
        start = store.allocate(n)
        end = start + n
        store["origin"][start:end] = origin
        store["pending"][start:end] = answers
        store["touched"][start:end] = 0
        if lengths is not None:
            if self._cells is None:
                self._cells = RowStore(f"{self._name} payload", ())
            store["start"][start:end] = allocate_ragged(self._cells, lengths)
            store["length"][start:end] = lengths
            return address(self._node, start, n) | marks(origin)
        return address(self._node, start, n)

    def collect(self, batches: Sequence[Backward]) -> list[Backward]:
        """Take answers in; returns the rows that have now been answered fully, with their sums."""
        done: list[Backward] = []
        zero = [b.rows & ROW_MASK for b in batches if b.gradient is None]
        some = [b for b in batches if b.gradient is not None]
        self._width = max([self._width, *(len(b.gradient or ()) for b in some)])
        if zero:
            self._add_zero(join_arrays(zero), done)
        if some and self._cells is None:
            rows = join_arrays([b.rows for b in some]) & ROW_MASK
            rows, counts, gradient = _sum_equal_rows(rows, join_gradient(some))
            self._add(rows, counts, gradient, None, done)
        elif some:
            for batch in some:
                self._add_bundles(batch, done)
        return done

    def _add_bundles(self, batch: Backward, done: list[Backward]) -> None:
        rows = batch.rows & ROW_MASK
        gradient = join_gradient([batch])
        apart = bool(self._apart) or not self._fits(gradient)
        # Bundles of several shapes are taken one by one, and so is a row that comes twice.
        if rows.size > 1 and (apart or distinct(rows).size < rows.size):
            for i in range(rows.size):
                self._add_bundles(batch.take(np.array([i], np.int64)), done)
            return
        if apart:
            gradient = both(self._apart.pop(int(rows[0]), ()), gradient)
        self._add(rows, 1, gradient, join_lengths([batch]), done)

    def _fits(self, gradient: Gradient) -> bool:
        """Whether bundles can lie beside those that wait."""
        cells = self._buffers()
        return all(x is None or cells.fits(j, x) for j, x in enumerate(gradient))

    def _add_zero(self, rows: IntArray, done: list[Backward]) -> None:
        store = self._rows
        if self._apart:
            alone = np.array([row in self._apart for row in rows.tolist()])
            for row in rows[alone]:
                held, one = self._apart.pop(int(row), ()), row[None]
                self._add(one, 1, held, store["length"][one], done)
            rows = rows[~alone]
            if not rows.size:
                return
        counts: IntArray | int = 1
        if distinct(rows).size < rows.size:
            rows, counts = np.unique(rows, return_counts=True)
        self._count(rows, counts)
        last = rows[store["pending"][rows] == 0]
        quiet = last[store["touched"][last] == 0]
        rest = last[store["touched"][last] != 0]
        if quiet.size:
            done.append(Backward(store["origin"][quiet], None))
            self._release(quiet)
        if rest.size:
            gradient = tuple(self._earlier(rest, j, None) for j in range(self._width))
            lengths = None if self._cells is None else store["length"][rest]
            done.append(Backward(store["origin"][rest], gradient, lengths))
            self._release(rest)

    def _add(
        self,
        rows: IntArray,
        counts: IntArray | int,
        gradient: Gradient,
        lengths: IntArray | None,
        done: list[Backward],
    ) -> None:
        store, at = self._rows, sliced(rows)
        self._count(rows, counts)
        if store["touched"][at].any():
            gradient = tuple(self._earlier(rows, j, g) for j, g in enumerate(gradient))
        last = store["pending"][at] == 0
        answer = Backward(store["origin"][rows], gradient, lengths)
        if last.all():
            done.append(answer)
            self._release(rows)
            return
        if not last.any():
            self._keep(rows, gradient)
            return
        stay, leave = np.flatnonzero(~last), np.flatnonzero(last)
        self._keep(rows[stay], join_gradient([answer.take(stay)]))
        done.append(answer.take(leave))
        self._release(rows[leave])

    def _count(self, rows: IntArray, counts: IntArray | int) -> None:
        pending, at = self._rows["pending"], sliced(rows)
        pending[at] -= counts
        if (pending[at] < 0).any():
            late = rows[pending[at] < 0]
            self._rows.release(np.repeat(late, 2))  # answered too often: the store says who

    def _earlier(self, rows: IntArray, j: int, column: Tensor | None) -> Tensor | None:
        """What rows hold in column j, plus what comes now."""
        held = (self._rows["touched"][rows] >> j) & 1
        if not held.any():
            return column
        buffer = self._buffers().existing(j)
        assert buffer is not None
        if held.all():
            at = self._at(rows)
            return take([buffer], at)[0] if column is None else total(column, None, buffer, at)
        which = np.flatnonzero(held)
        where = np.flatnonzero(self._per_cell(rows, held))
        if column is None:
            column = buffer.new_zeros((self._at(rows).size, *buffer.shape[1:]))
        else:
            column = column.clone()
        return add(column, where, buffer, self._at(rows[which]))

    def _keep(self, rows: IntArray, gradient: Gradient) -> None:
        if self._cells is not None and not self._fits(gradient):
            self._apart[int(rows[0])] = gradient  # bundles that do not fit come one by one
            return
        at, bits, moves = self._at(rows), 0, Moves()
        for j, column in enumerate(gradient):
            if column is not None:
                moves.add(self._buffers().buffer(j, column), at, column, None)
                bits |= 1 << j
        moves.run()
        self._rows["touched"][rows] |= bits

    def _buffers(self) -> RowStore:
        return self._rows if self._cells is None else self._cells

    def _at(self, rows: IntArray) -> IntArray:
        if self._cells is None:
            return rows
        return ranges(self._rows["start"][rows], self._rows["length"][rows])

    def _per_cell(self, rows: IntArray, mask: IntArray) -> IntArray:
        return mask if self._cells is None else np.repeat(mask, self._rows["length"][rows])

    def _release(self, rows: IntArray) -> None:
        if self._cells is not None:
            release_ragged(self._cells, self._rows["start"][rows], self._rows["length"][rows])
        self._rows.release(rows)

    def origins(self, rows: IntArray) -> IntArray:
        """Where these rows came from."""
        found: IntArray = self._rows["origin"][rows]
        return found

    def check_empty(self) -> None:
        self._rows.check_empty()

    @property
    def waiting(self) -> int:
        return self._rows.waiting

    def nbytes(self) -> int:
        apart = [x for found in self._apart.values() for x in found if x is not None]
        return self._buffers().nbytes() + sum(x.nbytes for x in apart)


def allocate_ragged(cells: RowStore, lengths: IntArray) -> IntArray:
    """Room for bundles side by side; the start of each."""
    total = int(lengths.sum())
    start = cells.allocate(total) if total else 0
    return start + np.cumsum(lengths) - lengths


def release_ragged(cells: RowStore, starts: IntArray, lengths: IntArray) -> None:
    which = ranges(starts, lengths)
    if which.size:
        cells.release(which)


def both(held: Gradient, more: Gradient) -> Gradient:
    """The sum of two, column by column; one may have fewer."""
    if len(held) > len(more):
        held, more = more, held
    some = (*held, *(None for _ in more[len(held) :]))
    return tuple(
        b if a is None else a if b is None else a + b for a, b in zip(some, more, strict=True)
    )


def _sum_equal_rows(
    rows: IntArray, gradient: Gradient
) -> tuple[IntArray, IntArray | int, Gradient]:
    """One entry for every distinct row: gradients of equal rows added, and how many there were."""
    if rows.size < 2 or consecutive(rows) >= 0:
        return rows, 1, gradient
    ordered = np.sort(rows)
    if np.count_nonzero(ordered[1:] == ordered[:-1]) == 0:
        return rows, 1, gradient
    unique = distinct(ordered)
    at = unique.searchsorted(rows)
    counts = np.bincount(at)
    summed: list[Tensor | None] = []
    for column in gradient:
        if column is None:
            summed.append(None)
            continue
        zeros = column.new_zeros((unique.size, *column.shape[1:]))
        summed.append(add(zeros, at, column, None))
    return unique, counts, tuple(summed)
