"""Batches of rows and of answers as records, and back.

    Forward    ints (node, port)         arrays (state, origin, lengths, payload ...)
    Backward   ints (node, port, given)  arrays (rows, lengths, gradient ...)

Only rows that are wanted travel: an index is applied before. What comes back owns its memory and
has no index. `Accepted` is what a receiver knows of its graph; a batch that does not fit is refused
before any node sees it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, final

import numpy as np
from torch import Tensor

from geartrain.bounds import MOST_ROWS
from geartrain.errors import TransportError
from geartrain.frames.message import (
    INSTANCE,
    Backward,
    Forward,
    Gradient,
    IntArray,
    join_gradient,
    join_payload,
)
from geartrain.transport.record import Array, Record

FORWARD: Final = 1
BACKWARD: Final = 2
"""Kinds of records; those from 16 on are free for others."""
ANSWERS: Final = -1
"""The port of answers."""
_MOST_PORT: Final = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class Accepted:
    """The batches that a receiver accepts.

    Args:
        nodes: Numbers of the nodes that live here.
        columns: State columns of the graph; None: not known.
        slots: Slots of instances are below this; None: not known.
    """

    nodes: Collection[int]
    columns: int | None
    slots: int | None = None


def to_record(node: int, port: int, batch: Forward | Backward) -> Record:
    """The record of a batch for a node.

    Args:
        node: Its number.
        port: 0 or more for rows, ``ANSWERS`` for answers.
        batch: Its tensors are not copied here, if no index chooses among them.

    Raises:
        ProtocolError: The index names a row that the payload has not.
    """
    if isinstance(batch, Forward):
        payload = batch.payload if batch.index is None else join_payload([batch])
        return Record(
            FORWARD, (node, port), (), (batch.state, batch.origin, batch.lengths, *payload)
        )
    if batch.gradient is None:
        return Record(BACKWARD, (node, port, 0), (), (batch.rows, batch.lengths))
    gradient = batch.gradient if batch.index is None else join_gradient([batch])
    return Record(BACKWARD, (node, port, 1), (), (batch.rows, batch.lengths, *gradient))


def to_delivery_parts(record: Record, accepted: Accepted) -> tuple[int, int, Forward | Backward]:
    """Node, port and batch of a record.

    Args:
        record: As it came.
        accepted: What it has to agree with.

    Raises:
        TransportError: It is no batch, its rows do not agree, or it is not for here.
    """
    if record.kind == FORWARD:
        return _forward(record, accepted)
    if record.kind == BACKWARD:
        return _backward(record, accepted)
    _refuse("kind", record.kind, f"{FORWARD} or {BACKWARD}")


def _forward(record: Record, accepted: Accepted) -> tuple[int, int, Forward]:
    if len(record.ints) != 2 or len(record.arrays) < 3:
        _refuse("rows", _counts(record), "2 ints; state, origin, lengths and payload")
    node, port = record.ints
    if node not in accepted.nodes:
        _refuse("node", node, "one that lives here")
    if not 0 <= port < _MOST_PORT:
        _refuse("port", port, f"0..{_MOST_PORT - 1}")
    state, origin, lengths, *payload = record.arrays
    rows = _rows("origin", origin)
    n = rows.size
    if (
        not isinstance(state, np.ndarray)
        or state.dtype != _INT64
        or state.ndim != 2
        or state.shape[1] != n
        or state.shape[0] != (accepted.columns or state.shape[0])
    ):
        _refuse("state", shape_of(state), f"int64 of shape {(accepted.columns, n)}")
    if accepted.slots is not None and state.size:
        slots = state[INSTANCE]
        if np.maximum.reduce(slots.view(np.uint64)) >= accepted.slots:  # below 0 is huge, too
            told = f"{slots.min()}..{slots.max()}"
            _refuse("slots of instances", told, f"0..{accepted.slots - 1}")
    counts, n = _bundles(lengths, n)
    columns: list[Tensor] = []
    for x in payload:
        if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != n:
            _refuse("payload", shape_of(x), f"a tensor of {n} rows")
        columns.append(x)
    return node, port, Forward(tuple(columns), state, rows, counts)


def _backward(record: Record, accepted: Accepted) -> tuple[int, int, Backward]:
    if len(record.ints) != 3 or len(record.arrays) < 2:
        _refuse("answers", _counts(record), "3 ints; rows, lengths and gradient")
    node, port, given = record.ints
    if node not in accepted.nodes:
        _refuse("node", node, "one that lives here")
    if port != ANSWERS or given not in (0, 1):
        _refuse("port of answers", f"{port}, given {given}", f"{ANSWERS}, given 0 or 1")
    first, lengths, *columns = record.arrays
    rows = _rows("rows", first)
    counts, n = _bundles(lengths, rows.size)
    if not given:
        if columns:
            _refuse("gradient", f"{len(columns)} columns", "none, as it is zero")
        return node, port, Backward(rows, None, counts)
    gradient: list[Tensor | None] = []
    for x in columns:
        if x is not None and (not isinstance(x, Tensor) or not x.dim() or x.shape[0] != n):
            _refuse("gradient", shape_of(x), f"a tensor of {n} rows, or None")
        gradient.append(x)
    found: Gradient = tuple(gradient)
    return node, port, Backward(rows, found, counts)


_INT64: Final = np.dtype(np.int64)


def _rows(what: str, array: Array | None) -> IntArray:
    if not isinstance(array, np.ndarray) or array.dtype != _INT64 or array.ndim != 1:
        _refuse(what, shape_of(array), "int64 of one dimension")
    return array


def _bundles(lengths: Array | None, n: int) -> tuple[IntArray | None, int]:
    """Lengths of n bundles, and the rows of their payload."""
    if lengths is None:
        return None, n
    found = _rows("lengths", lengths)
    # One below 0 is huge without its sign, and those that pass have a sum of 64 bits.
    if found.size != n or np.maximum.reduce(found.view(np.uint64), initial=0) > MOST_ROWS:
        told = f"{found.size}, {found.min(initial=0)}..{found.max(initial=0)}"
        _refuse("lengths", told, f"{n} of 0..{MOST_ROWS}")
    return found, int(found.sum())


def _counts(record: Record) -> str:
    return f"{len(record.ints)} ints and {len(record.arrays)} arrays"


def shape_of(x: object) -> str:
    """What a refusal calls an array; of anything else, itself."""
    if isinstance(x, np.ndarray | Tensor):
        return f"{type(x).__name__} of {x.dtype} {tuple(x.shape)}"
    return repr(x)


def refuse(carried: str, what: str, value: object, expected: str) -> NoReturn:
    """Raises:
    TransportError: Names what was carried, its part that is wrong, and what it should be.
    """
    raise TransportError(
        f"a {carried} that cannot be delivered: {what} is {value}, expected {expected}; sender and "
        "receiver do not run the same graph, or the message was damaged"
    )


_refuse = partial(refuse, "batch")
