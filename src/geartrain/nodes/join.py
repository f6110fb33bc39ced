"""Nodes that wait for rows of several ports.

    port 0, port 1, ... of one key ─► columns side by side, or a longer tuple

Source: Concat of Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    Payload,
    distinct,
    join_gradient,
    join_origins,
    join_payload,
    join_states,
    marks,
    together,
)
from geartrain.frames.rows import RowStore
from geartrain.native.rows import Moves, take
from geartrain.nodes.keys import describe_key, key_columns, repeated, table_for
from geartrain.nodes.node import AbstractNode, Emission, Place

_BUFFER: Final = 16  # most tensors of one port's payload


@final
class JoinNode(AbstractNode):
    """Wait for one row from every port with an equal key; put them side by side.

    Args:
        place: Number, name, frames.
        ports: How many.
        on: State columns of the key.
        how: ``features`` concatenates the last dimension, ``tuple`` makes one longer payload.
        handles: By port, state columns of handles of memories that are taken over from it; those
            of port 0 are in any case.
        names: Of the nodes behind each port.
    """

    eager = True

    def __init__(
        self,
        place: Place,
        ports: int,
        on: Sequence[int],
        how: Literal["features", "tuple"],
        handles: Sequence[Sequence[int]] = (),
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(place)
        self._names = names
        self._handles = [list(columns) for columns in handles] or [[] for _ in range(ports)]
        self._taken_over = [column for columns in self._handles for column in columns]
        edge = place.schema.state.get("edge")
        self._on = key_columns(on, edge)
        self._table = table_for(self._on, edge)
        self._ports, self._how = ports, how
        origins = tuple(f"origin {p}" for p in range(ports))
        self._rows = RowStore(place.name, ("arrived", *origins), len(place.schema.state))
        self._widths: list[list[int]] = [[] for _ in range(ports)]
        self._bundles: dict[int, list[Payload | None]] = {}
        self._bundled = False

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        state = join_states(batches)
        rows = self._table.slots(state[self._on], lambda new: self._open(new, state))
        if distinct(rows).size < rows.size:
            self._refuse(port, int(rows[repeated(rows)][0]))
        bit = 1 << port
        arrived = self._rows["arrived"]
        if (arrived[rows] & bit).any():
            self._refuse(port, int(rows[(arrived[rows] & bit) > 0][0]))
        arrived[rows] |= bit
        self._rows[f"origin {port}"][rows] = join_origins(batches)
        if port == 0:
            kept = [(column, self._rows.state[column][rows]) for column in self._taken_over]
            self._rows.state[:, rows] = state
            for column, handles in kept:  # from ports that came before
                self._rows.state[column, rows] = handles
        for column in self._handles[port]:
            self._rows.state[column, rows] = state[column]
        self._write(port, batches, rows)
        done = rows[arrived[rows] == (1 << self._ports) - 1]
        if not done.size:
            return Emission()
        states = self._rows.state.take(done, 1)
        self._table.remove(states[self._on])
        return Emission([(0, self._result(done, states))])

    def _open(self, new: IntArray, state: IntArray) -> int:
        start = self._rows.allocate(new.size)
        end = start + new.size
        self._rows["arrived"][start:end] = 0
        self._rows.state[:, start:end] = state.take(new, 1)
        return start

    def _write(self, port: int, batches: Sequence[Forward], rows: IntArray) -> None:
        self._bundled = self._bundled or batches[0].lengths is not None
        at = 0
        for batch in batches:
            here = rows[at : at + len(batch)]
            at += len(batch)
            payload = batch.payload
            self._widths[port] = [int(c.shape[-1]) if c.ndim > 1 else 1 for c in payload]
            if batch.lengths is not None:
                self._write_bundles(port, join_payload([batch]), batch.lengths, here)
                continue
            moves = Moves()
            for j, x in enumerate(payload):
                buffer = self._rows.buffer(_BUFFER * port + j, x, len(batch))
                moves.add(buffer, here, x, batch.index)
            moves.run()

    def _write_bundles(
        self, port: int, columns: Payload, lengths: IntArray, rows: IntArray
    ) -> None:
        pieces = [c.split_with_sizes(lengths.tolist()) for c in columns]
        for i, row in enumerate(rows.tolist()):
            ports = self._bundles.setdefault(row, [None] * self._ports)
            ports[port] = tuple(p[i] for p in pieces)

    def _result(self, done: IntArray, states: IntArray) -> Forward:
        origin = done + (self.id << 40)
        if self._bundled:
            ports = [marks(self._rows[f"origin {p}"][done]) for p in range(self._ports)]
            return self._bundle_result(done, states, origin | np.bitwise_and.reduce(ports))
        if self._how == "tuple":
            payload = tuple(
                self._buffer(p, j) for p in range(self._ports) for j in range(len(self._widths[p]))
            )
            return Forward(payload, states, origin, None, done)
        side_by_side = take([self._buffer(p, 0) for p in range(self._ports)], done)
        return Forward((self._cat(side_by_side, -1),), states, origin)

    def _bundle_result(self, done: IntArray, states: IntArray, origin: IntArray) -> Forward:
        messages = []
        for row in done.tolist():
            ports = [p for p in self._bundles.pop(row) if p is not None]
            sizes = {x.shape[0] for p in ports for x in p}
            if len(sizes) > 1:
                raise GraphError(
                    f"'{self.name}': bundles of {sorted(sizes)} rows meet under {self._key(row)}; "
                    "bundles that are joined have equally many rows"
                )
            if self._how == "tuple":
                messages.append(tuple(x for p in ports for x in p))
            else:
                messages.append((self._cat([p[0] for p in ports], -1),))
        lengths = np.array([m[0].shape[0] for m in messages], np.int64)
        payload = tuple(self._cat(column, 0) for column in zip(*messages, strict=True))
        return Forward(payload, states, origin, lengths)

    def _cat(self, columns: Sequence[Tensor], dim: int) -> Tensor:
        if len(columns) == 1:
            return columns[0]
        if self.place.spread:
            columns = together(columns)
        return torch.cat(tuple(columns), dim)

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        for batch in batches:
            rows = batch.rows & ROW_MASK
            gradient = None if batch.gradient is None else join_gradient([batch])
            at = 0
            for p in range(self._ports):
                piece: tuple[Tensor | None, ...] | None = None
                n = len(self._widths[p])
                if gradient is not None and self._how == "tuple":
                    piece = gradient[at : at + n]
                    at += n
                elif gradient is not None and gradient[0] is not None:
                    piece = (gradient[0][..., at : at + self._widths[p][0]],)
                    at += self._widths[p][0]
                if piece is not None and all(g is None for g in piece):
                    piece = None
                origin = self._rows[f"origin {p}"][rows]
                lengths = None if piece is None else batch.lengths
                emission.backward.append(Backward(origin, piece, lengths))
            self._rows.release(rows)
        return emission

    @property
    def on(self) -> list[int]:
        """State columns that rows of all ports agree in."""
        return self._on

    @property
    def handles(self) -> list[list[int]]:
        """By port, state columns of handles of memories that are taken over from it."""
        return self._handles

    def twice(self, port: int, state: IntArray) -> GraphError:
        """The error for a second row of a port with the key of this state."""
        return GraphError(
            f"'{self.name}': two rows of port {port} have the key {self.key(state)}; a join wants "
            "one row a port and key: name more columns in 'on', or group the rows first"
        )

    def waits(self, state: IntArray, absent: list[int]) -> str:
        """A line about a row that is not complete."""
        streams = ", ".join([f"'{self._names[p]}'" for p in absent]) if self._names else ""
        told = f" ({streams})" if streams else ""
        return f"'{self.name}' waits for port {absent}{told} of {self.key(state)}"

    def key(self, state: IntArray) -> str:
        """The key of the row with this state, in the user's numbers."""
        return describe_key(self.place, state[:, None], self._on)

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._rows.state[INSTANCE, rows]  # a slot is its own address
        return found

    def check_empty(self) -> None:
        self._rows.check_empty()

    def story(self) -> list[str]:
        told = []
        rows = self._rows.live_rows()
        missing = self._rows["arrived"][rows] != (1 << self._ports) - 1
        for row in rows[missing][:5].tolist():
            arrived = int(self._rows["arrived"][row])
            absent = [p for p in range(self._ports) if not arrived >> p & 1]
            told.append(self.waits(self._rows.state[:, row], absent))
        if missing.sum() > 5:
            told.append(f"'{self.name}' waits for ports of {int(missing.sum()) - 5} more rows")
        if (~missing).any():
            told.append(f"'{self.name}' waits for the gradients of {int((~missing).sum())} rows")
        return told

    def nbytes(self) -> int:
        return self._rows.nbytes()

    def _buffer(self, port: int, j: int) -> Tensor:
        buffer = self._rows.existing(_BUFFER * port + j)
        assert buffer is not None
        return buffer

    def _key(self, row: int) -> str:
        return self.key(self._rows.state[:, row])

    def _refuse(self, port: int, row: int) -> None:
        raise self.twice(port, self._rows.state[:, row])
