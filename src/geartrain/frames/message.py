"""Messages are columns: a batch of rows going forward, or of gradients going back.

    Forward                                      Backward
    payload  tensors (n, ...)   one row each     rows      int64 (n,)  addresses that are answered
    state    int64 (columns, n) where it is      gradient  tensors (n, ...), or None: all zero
    origin   int64 (n,)         return address

A **return address** packs the node that keeps a row and the row's place in that node's store into
one int64, with two marks between. Address 0 << 40 | slot belongs to the controller: the instance
itself.

A **bundle** is a message that owns several payload rows which travel together; ``lengths`` then
says how many. ``index`` delays copying: the payload of row i is ``payload[index[i]]``, so a chain
of routes costs integer arithmetic until a node that computes takes the rows.

Payloads and gradients may lie on any device; all that routes stays with the host.

Source: the message with state of Gaunt et al. 2017, arXiv:1705.09786, here many to a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.device import moved
from geartrain.errors import GraphError
from geartrain.frames.counted import consecutive
from geartrain.native.rows import Moves, take

IntArray: TypeAlias = NDArray[np.int64]
Payload: TypeAlias = tuple[Tensor, ...]
Gradient: TypeAlias = tuple[Tensor | None, ...]

ROW_BITS = 40
QUIET = 1 << 38
"""Mark in an address: an answer is awaited there, but no gradient is of use."""
SKIPPED = 1 << 39
"""Mark in an address of the controller: a slow gear below has left this turn out."""
ROW_MASK = QUIET - 1
CONTROLLER = 0
_MANY = 1 << 13  # numbers that are as much memory as is lent by itself
INSTANCE, VERTEX = 0, 1
"""The state columns that every graph has: the instance's slot and the absolute vertex."""


def address(node: int, start: int, n: int) -> IntArray:
    """The addresses of n consecutive rows of a node's store."""
    base = (node << ROW_BITS) + start
    return np.arange(base, base + n, dtype=np.int64)


def marks(origin: IntArray) -> IntArray:
    """What whoever passes rows on under addresses of its own should mark these with."""
    found = origin & (QUIET | SKIPPED)
    found[origin >> ROW_BITS == CONTROLLER] |= QUIET
    return found


def wants_gradient(origin: IntArray) -> bool:
    """Whether the gradient of one message is of use where it goes."""
    return not int(marks(origin)[0]) & QUIET


@final
@dataclass(slots=True, eq=False)
class Forward:
    """A batch of rows on their way to the losses; never changed.

    Not frozen, as that makes each one three times as dear, and there are several in every firing.
    """

    payload: Payload
    state: IntArray
    origin: IntArray
    lengths: IntArray | None = None
    index: IntArray | None = None

    def __len__(self) -> int:
        return self.origin.size

    def take(self, rows: IntArray) -> Forward:
        """The given rows, in the given order; copies no payload."""
        if self.lengths is None:
            lengths, inner = None, rows
        else:
            lengths, inner = self.lengths[rows], ragged_index(self.lengths, rows)
        index = inner if self.index is None else self.index[inner]
        return Forward(self.payload, self.state.take(rows, 1), self.origin[rows], lengths, index)

    def cut(self, n: int) -> tuple[Forward, Forward]:
        """The first n rows, and the others; copies nothing."""
        payload, index, lengths = _cut(self.payload, self.index, self.lengths, n)
        state, origin = self.state, self.origin
        return (
            Forward(payload[0], state[:, :n], origin[:n], lengths[0], index[0]),
            Forward(payload[1], state[:, n:], origin[n:], lengths[1], index[1]),
        )

    def with_state(self, state: IntArray) -> Forward:
        return Forward(self.payload, state, self.origin, self.lengths, self.index)

    def with_origin(self, origin: IntArray) -> Forward:
        return Forward(self.payload, self.state, origin, self.lengths, self.index)

    def payload_rows(self) -> int:
        """Rows of the payload: the number of messages, or the sum of the bundles' lengths."""
        return self.origin.size if self.lengths is None else int(self.lengths.sum())


@final
@dataclass(slots=True, eq=False)
class Backward:
    """A batch of answers; ``gradient`` None means that all of them are zero. Never changed."""

    rows: IntArray
    gradient: Gradient | None
    lengths: IntArray | None = None
    index: IntArray | None = None

    def __len__(self) -> int:
        return self.rows.size

    def take(self, rows: IntArray) -> Backward:
        """The given rows, in the given order; copies no gradient."""
        if self.gradient is None:
            return Backward(self.rows[rows], None)
        if self.lengths is None:
            lengths, inner = None, rows
        else:
            lengths, inner = self.lengths[rows], ragged_index(self.lengths, rows)
        index = inner if self.index is None else self.index[inner]
        return Backward(self.rows[rows], self.gradient, lengths, index)

    def cut(self, n: int) -> tuple[Backward, Backward]:
        """The first n rows, and the others; copies nothing."""
        rows, given = self.rows, self.gradient
        if given is None:
            return Backward(rows[:n], None), Backward(rows[n:], None)
        gradient, index, lengths = _cut(given, self.index, self.lengths, n)
        return (
            Backward(rows[:n], gradient[0], lengths[0], index[0]),
            Backward(rows[n:], gradient[1], lengths[1], index[1]),
        )


_Tensors: TypeAlias = tuple[Any, ...]


def _cut(
    columns: _Tensors, index: IntArray | None, lengths: IntArray | None, n: int
) -> tuple[
    tuple[_Tensors, _Tensors],
    tuple[IntArray | None, IntArray | None],
    tuple[IntArray | None, IntArray | None],
]:
    """Columns, index and lengths of the first n messages, and of the others."""
    rows = n
    parts: tuple[IntArray | None, IntArray | None] = None, None
    if lengths is not None:
        rows, parts = int(lengths[:n].sum()), (lengths[:n], lengths[n:])
    if index is not None:
        return (columns, columns), (index[:rows], index[rows:]), parts
    first = tuple(None if x is None else x[:rows] for x in columns)
    other = tuple(None if x is None else x[rows:] for x in columns)
    return (first, other), (None, None), parts


def by_owner(batch: Backward) -> list[tuple[int, Backward]]:
    """Cut a batch of answers by the node that waits for them."""
    rows = batch.rows
    first = int(rows[0]) >> ROW_BITS
    if first == int(rows[-1]) >> ROW_BITS and consecutive(rows) >= 0:
        return [(first, batch)]
    owners = rows >> ROW_BITS
    if np.count_nonzero(owners == first) == owners.size:
        return [(first, batch)]
    return [
        (owner, batch.take(np.flatnonzero(owners == owner))) for owner in distinct(owners).tolist()
    ]


def ragged_index(lengths: IntArray, rows: IntArray) -> IntArray:
    """Positions, in the concatenation of bundles, of all rows of the chosen bundles."""
    starts = np.cumsum(lengths) - lengths
    return ranges(starts[rows], lengths[rows])


def ends_of(lengths: IntArray) -> IntArray:
    """Where each of so many begins, side by side, and the last one ends: int64 ``(n + 1,)``."""
    ends = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """``concatenate([arange(s, s + n) for s, n in zip(starts, lengths)])``, vectorised."""
    ends = lengths.cumsum()
    total = int(ends[-1]) if ends.size else 0
    found: IntArray = np.arange(total, dtype=np.int64) + (starts - ends + lengths).repeat(lengths)
    return found


def write_ranges(out: IntArray, starts: IntArray, lengths: IntArray) -> None:
    """Likewise, to where there is room for all: where they are many, nothing as large is made
    meanwhile."""
    if out.size < _MANY:
        out[:] = ranges(starts, lengths)
        return
    some = np.flatnonzero(lengths)
    starts, lengths = starts[some], lengths[some]
    out.fill(1)
    out[0] = starts[0]
    out[lengths.cumsum()[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    np.cumsum(out, out=out)


def distinct(values: IntArray) -> IntArray:
    """The distinct values, ascending: ``np.unique`` without its overhead on short arrays."""
    if values.size < 2:
        return values
    ordered = np.sort(values)
    first = np.empty(ordered.size, np.bool_)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def join_arrays(arrays: Sequence[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def join_states(batches: Sequence[Forward]) -> IntArray:
    if len(batches) == 1:
        return batches[0].state
    return np.concatenate([b.state for b in batches], axis=1)


def join_origins(batches: Sequence[Forward]) -> IntArray:
    return join_arrays([b.origin for b in batches])


def join_lengths(batches: Sequence[Forward] | Sequence[Backward]) -> IntArray | None:
    first = batches[0].lengths
    if first is None or len(batches) == 1:
        return first
    return np.concatenate([b.lengths for b in batches if b.lengths is not None])


def device_of(batches: Sequence[Forward]) -> torch.device:
    """Where nodes without weights compute: where the rows are, the host being the last choice."""
    for batch in batches:
        for x in batch.payload:
            if not x.is_cpu:
                return x.device
    return _HOST


def together(columns: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors on one device, that of the first which is not on the host."""
    elsewhere = next((x for x in columns if not x.is_cpu), None)
    return columns if elsewhere is None else [moved(x, elsewhere.device) for x in columns]


_HOST = torch.device("cpu")


def join_column(
    parts: Sequence[tuple[Tensor, IntArray | None]],
    out: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Concatenate (tensor, index) parts along the rows, into ``out`` if given.

    Args:
        parts: Of one inner shape.
        out: Room for all rows.
        device: Where the result is to be; None: where the first part is.

    Raises:
        ProtocolError: An index names a row that its tensor has not.
        GraphError: The parts have several dtypes.
    """
    moves = Moves()
    _require_one_dtype(parts)
    joined = _join_later(moves, parts, out, device)
    moves.run()
    return joined


def join_columns(
    columns: Sequence[Sequence[tuple[Tensor, IntArray | None]]],
    outs: Sequence[Tensor | None],
    device: torch.device | None = None,
) -> Payload:
    """``join_column`` of several columns, all copies in one call."""
    moves = Moves()
    for parts in columns:
        _require_one_dtype(parts)
    joined = tuple(
        _join_later(moves, parts, o, device) for parts, o in zip(columns, outs, strict=True)
    )
    moves.run()
    return joined


def _require_one_dtype(parts: Sequence[tuple[Tensor, IntArray | None]]) -> None:
    """A copy would cast all to that of the first, and of floats integers would be left."""
    dtype = parts[0][0].dtype
    for tensor, _ in parts:
        if tensor.dtype is not dtype:
            raise GraphError(
                f"rows of {dtype} and of {tensor.dtype} meet in one batch; all rows of a stream "
                "have one dtype: cast them where they are made"
            )


def _join_later(
    moves: Moves,
    parts: Sequence[tuple[Tensor, IntArray | None]],
    out: Tensor | None,
    device: torch.device | None,
) -> Tensor:
    first, index = parts[0]
    if len(parts) == 1:
        if index is None and out is None:
            return first if device is None else moved(first, device)
        if out is None:
            assert index is not None
            if device is None or first.device == device:
                return take((first,), index)[0]
            out = _room(first, index.size, device)
        moves.add(out, None, first, index)
        return out
    sizes = [t.shape[0] if rows is None else rows.size for t, rows in parts]
    if out is None:
        out = _room(first, sum(sizes), device)
    at = 0
    for (tensor, rows), n in zip(parts, sizes, strict=True):
        moves.add(out, None, tensor, rows, at)
        at += n
    return out


def _room(like: Tensor, rows: int, device: torch.device | None) -> Tensor:
    shape = (rows, *like.shape[1:])
    return like.new_empty(shape) if device is None else like.new_empty(shape, device=device)


def join_payload(batches: Sequence[Forward], device: torch.device | None = None) -> Payload:
    """The payload of several batches, rows side by side.

    Args:
        batches: Equally wide.
        device: Where it is to be; None: each column where its first part is.
    """
    width = len(batches[0].payload)
    columns = [[(b.payload[j], b.index) for b in batches] for j in range(width)]
    return join_columns(columns, [None] * width, device)


def join_gradient(batches: Sequence[Backward], device: torch.device | None = None) -> Gradient:
    """The gradients of several batches (none of them zero), rows side by side.

    Args:
        batches: Each with a gradient.
        device: Where the gradients are to be; None: each column where its first part is.
    """
    first = batches[0]
    if len(batches) == 1 and first.index is None:
        found = first.gradient or ()
        if device is None:
            return found
        return tuple(None if g is None else moved(g, device) for g in found)
    moves = Moves()
    columns: list[Tensor | None] = []
    width = len(first.gradient or ())
    for j in range(width):
        column = [None if b.gradient is None else b.gradient[j] for b in batches]
        if all(c is None for c in column):
            columns.append(None)
            continue
        like = next(c for c in column if c is not None)
        parts = [_part(b, c, like) for b, c in zip(batches, column, strict=True)]
        columns.append(_join_later(moves, parts, None, device))
    moves.run()
    return tuple(columns)


def _part(batch: Backward, column: Tensor | None, like: Tensor) -> tuple[Tensor, IntArray | None]:
    if column is not None:
        return column, batch.index
    rows = batch.rows.size if batch.lengths is None else int(batch.lengths.sum())
    return like.new_zeros((rows, *like.shape[1:])), None


def shapes_of(tensors: Sequence[Tensor | None]) -> str:
    """Dtypes and shapes, for messages; those that are None are zero, and left out."""
    return ", ".join(
        f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors if x is not None
    )
