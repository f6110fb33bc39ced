"""The door of a loop that runs whole: where rows wait for others of their instance.

    rows ─► LoopDoor ─► an instance, when all of its rows are there ─► LoopNode
    answers to rows that left ─► LoopDoor ─► an instance, when all are there ─► LoopNode

Where nothing in the loop brings rows together, an instance goes in with those that have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from geartrain.device import moved
from geartrain.frames.message import (
    INSTANCE,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    Payload,
    address,
    distinct,
    join_gradient,
    join_lengths,
    join_origins,
    join_states,
    ranges,
)
from geartrain.frames.rows import RowStore
from geartrain.native.rows import Moves
from geartrain.nodes.collector import allocate_ragged
from geartrain.nodes.loop.plan import RowNumbers
from geartrain.nodes.loop.turn import Turn, zero_answers
from geartrain.nodes.loop.values import AbstractValue
from geartrain.nodes.node import AbstractNode, Emission, Place


@final
@dataclass(frozen=True, slots=True)
class Came:
    """Rows that have come in by one entry.

    Args:
        columns: Buffers with their payload.
        at: Where in these it lies.
        rows: Of the door's store.
        state: Their columns.
        origin: Where to answer each.
        lengths: Of the bundles that they are, or None.
    """

    columns: Payload
    at: IntArray
    rows: IntArray
    state: IntArray
    origin: IntArray
    lengths: IntArray | None


def _ready(slots: IntArray, columns: int, turn: IntArray) -> Emission:
    """The messages that tell a loop of instances whose rows wait at its door.

    Those that were admitted first come first: instances of one update then go in together.
    """
    slots = slots[turn[slots].argsort()]
    states = np.zeros((columns, slots.size), np.int64)
    states[INSTANCE] = slots
    return Emission([(0, Forward((), states, slots))])


@final
class LoopDoor(AbstractNode):
    """Lets instances in when all of their rows are there, and out when all answers are.

    Args:
        place: Number, name, frames.
        counts: Input name to how many rows enter for each of the instance's there; and to how many
            for all of them, if there are any. None: that is not known, and an instance goes in with
            the rows that have come.
        entries: By how many ways rows enter.
        exits: What rows of each exit hold.
    """

    eager = True

    def __init__(
        self,
        place: Place,
        counts: tuple[Mapping[str, int], Mapping[str, int]] | None,
        entries: int,
        exits: Sequence[AbstractValue],
    ) -> None:
        super().__init__(place)
        self._counts, self._exits = counts, exits
        states = len(place.schema.state)
        columns = "origin", "start", "length"
        self._stores = [RowStore(place.name, columns, states) for _ in range(entries)]
        self._bundles: list[RowStore | None] = [None] * entries
        self._widths = [0] * entries
        self._missing = np.zeros(64, np.int64)  # by slot, while some of its rows are here
        self._begun = np.zeros(64, np.bool_)
        self._awaited = RowStore(place.name, ("turn", "exit", "at", "slot"))
        self._turns: dict[int, Turn] = {}
        self._next = 0

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        state, origin = join_states(batches), join_origins(batches)
        store = self._stores[port]
        first, n = store.allocate(origin.size), origin.size
        store["origin"][first : first + n] = origin
        store.state[:, first : first + n] = state
        self._keep(port, first, batches)
        counts = np.bincount(state[INSTANCE])
        (slots,) = counts.nonzero()
        counts = counts[slots]
        self._grow(int(slots[-1]) + 1)
        if self._counts is None:
            return self._go_on(slots, counts, state.shape[0])
        new = slots[~self._begun[slots]]
        if new.size:
            self._missing[new] = self._expected(new)
            self._begun[new] = True
        self._missing[slots] -= counts
        ready = slots[self._missing[slots] == 0]
        if not ready.size:
            return Emission()
        self._begun[ready] = False
        return _ready(ready, state.shape[0], self.place.arena.turn)

    def _keep(self, port: int, first: int, batches: Sequence[Forward]) -> None:
        """Keep the payload of rows that have come."""
        store, buffers, at = self._stores[port], self._stores[port], first
        lengths = join_lengths(batches)
        if lengths is not None:
            bundles = self._bundles[port]
            if bundles is None:
                bundles = self._bundles[port] = RowStore(f"{self.name} payload", ())
            starts, end = allocate_ragged(bundles, lengths), first + lengths.size
            store["start"][first:end], store["length"][first:end] = starts, lengths
            buffers, at = bundles, int(starts[0])
        moves = Moves()
        self._widths[port] = len(batches[0].payload)
        device = self.place.device
        for batch in batches:
            n = batch.payload_rows()
            payload = batch.payload
            if device is not None:
                payload = tuple([moved(x, device) for x in payload])
            for j, x in enumerate(payload):
                moves.add(buffers.buffer(j, x, n), None, x, batch.index, at)
            at += n
        moves.run()

    def _go_on(self, slots: IntArray, counts: IntArray, columns: int) -> Emission:
        """Tell of instances with rows of which the loop knows nothing yet."""
        told = self._begun[slots]
        self._missing[slots[~told]] = 0
        self._missing[slots] -= counts  # below zero: so many are here
        new = slots[~told]
        self._begun[new] = True
        return _ready(new, columns, self.place.arena.turn) if new.size else Emission()

    def take(self, slots: IntArray) -> list[Came]:
        """The rows of instances that are ready, by entry; they are to be released."""
        found = []
        mine = np.zeros(self._missing.size, np.bool_)
        mine[slots] = True
        if self._counts is None:
            self._begun[slots] = False
        for store, bundles, width in zip(self._stores, self._bundles, self._widths, strict=True):
            live = store.live_rows()
            rows = live[mine[store.state[INSTANCE, live]]]
            state, origin = store.state.take(rows, 1), store["origin"][rows]
            lengths, at, buffers = None, rows, store
            if bundles is not None:
                lengths, buffers = store["length"][rows], bundles
                at = ranges(store["start"][rows], lengths)
            columns = buffers.buffers()[:width] if rows.size else ()
            found.append(Came(columns, at, rows, state, origin, lengths))
        return found

    def release(self, came: Sequence[Came]) -> None:
        """What ``take`` gave has been copied; what nobody waits in has no memory until rows
        come."""
        for store, bundles, each in zip(self._stores, self._bundles, came, strict=True):
            if each.rows.size:
                store.release(each.rows)
                store.rest()
            if bundles is not None and each.at.size:
                bundles.release(each.at)
                bundles.rest()

    def expect(self, k: int, rows: RowNumbers) -> IntArray:
        """Addresses for rows that leave by exit k."""
        n = len(rows)
        first = self._awaited.allocate(n)
        store, end = self._awaited, first + n
        store["turn"][first:end], store["exit"][first:end] = self._next, k
        store["at"][first:end], store["slot"][first:end] = rows.numbers, rows.state[INSTANCE]
        return address(self.id, first, n)

    def open_turn(self, turn: Turn) -> None:
        """The rows that are to be expected next are of this one."""
        self._next += 1
        self._turns[self._next] = turn

    def close_turn(self) -> None:
        """All rows of the last turn are expected, and it may be that there are none."""
        if not self._turns[self._next].awaited:
            del self._turns[self._next]

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        for batch in batches:
            rows = batch.rows & ROW_MASK
            store = self._awaited
            key = store["turn"][rows] * len(self._exits) + store["exit"][rows]
            for each in distinct(key).tolist():
                mine = batch
                if (key != each).any():
                    mine = batch.take(np.flatnonzero(key == each))
                number, k = divmod(each, len(self._exits))
                self._answered(number, k, mine, emission)
            store.release(rows)
        return emission

    def _answered(self, number: int, k: int, batch: Backward, emission: Emission) -> None:
        turn, rows = self._turns[number], batch.rows & ROW_MASK
        if batch.gradient is not None:
            with torch.no_grad():
                gradient = join_gradient([batch], self.place.device)
                self._exits[k].scatter(turn.held, self._awaited["at"][rows], gradient)
        local, counts = np.unique(turn.local[self._awaited["slot"][rows]], return_counts=True)
        turn.pending[local] -= counts
        done = local[turn.pending[local] == 0]
        if not done.size:
            return
        turn.awaited -= done.size
        if not turn.awaited:
            del self._turns[number]
        if turn.addresses is None:
            emission.backward += zero_answers(turn, done)
        else:
            emission.backward.append(Backward(turn.addresses[done], ()))

    def _expected(self, slots: IntArray) -> IntArray:
        """Rows that enter of these instances."""
        fed = self.place.arena.fed
        total = np.zeros(slots.size, np.int64)
        if self._counts is None:
            return -self._missing[slots]
        each, together = self._counts
        for name, times in each.items():
            total += times * fed[name][slots]
        for name, times in together.items():
            total += times * (fed[name][slots] > 0)
        return total

    def _grow(self, slots: int) -> None:
        if slots > self._missing.size:
            more = max(slots, 2 * self._missing.size) - self._missing.size
            self._missing = np.concatenate([self._missing, np.zeros(more, np.int64)])
            self._begun = np.concatenate([self._begun, np.zeros(more, np.bool_)])

    def entering(self, slots: IntArray) -> IntArray:
        """How many rows each of these instances has here, when it is ready."""
        return self._expected(slots)

    def origins(self, rows: IntArray) -> IntArray:
        found: IntArray = self._awaited["slot"][rows]  # a slot is its own address
        return found

    def _all_stores(self) -> Iterator[RowStore]:
        yield from self._stores
        yield from (store for store in self._bundles if store is not None)

    def check_empty(self) -> None:
        for store in (*self._all_stores(), self._awaited):
            store.check_empty()

    def story(self) -> list[str]:
        slots = np.flatnonzero(self._begun & (self._missing > 0))
        told = [
            f"'{self.name}' waits for {int(self._missing[s])} more rows of "
            f"{self.place.arena.describe(int(s))} to enter"
            for s in slots[:5].tolist()
        ]
        n = self._awaited.waiting
        return [*told, f"'{self.name}' waits for the gradients of {n} rows"] if n else told

    def nbytes(self) -> int:
        return sum(store.nbytes() for store in self._all_stores())
