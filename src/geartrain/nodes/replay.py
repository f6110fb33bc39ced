"""Replay: rows at the inlet of a part are kept, and sent again.

    part below ─ h ─► ┌────────┐ ─ h ────────► part above          the fresh minibatch
               ◄─ δ ─ │ buffer │ ◄─ δ ──────
                      │        │ ─ h' ───────► part above   × e    stored ones, after δ went down
                      └────────┘ ◄─ δ' (ends here)

The fresh gradient goes down before the replays, so a slow part never waits for a fast one. An
instance stays open until its replays are done; with one in flight they come before the next one.
Replayed rows carry the state of the instance that caused them, with a number in column ``replay``;
what belongs to the rows themselves, such as targets, must be in their payload. A buffer outlives
passes and is part of checkpoints.

Source: gears as in ``graph.gear``; the buffers of Belilovsky et al. 2020, arXiv:1901.08164, who
draw the freshest of the least used.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias, final

import numpy as np
import torch

from geartrain.bounds import require_whole
from geartrain.errors import CheckpointError
from geartrain.frames.message import (
    CONTROLLER,
    INSTANCE,
    QUIET,
    ROW_BITS,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    Payload,
    address,
    join_column,
    marks,
)
from geartrain.frames.rows import RowStore
from geartrain.nodes.call import one_by_one
from geartrain.nodes.node import AbstractNode, Emission, Memory, Place
from geartrain.schema import Count, Mismatch, Range, read

Draw: TypeAlias = Literal["newest", "least_used", "uniform"]
REPLAY: Final = "replay"
"""State column: 0 for fresh rows; another number for each replay of an instance, wherever."""

_NUMBERS: Final = 20  # bits for the replays of one node


@final
@dataclass(frozen=True, slots=True)
class Replays:
    """What a replay node is told; see ``Stream.replay``.

    Raises:
        ValueError: A number is out of range, or there is no such draw.
    """

    times: int = 1
    buffer: int = 1
    draw: Draw = "newest"
    max_age: int | None = None
    fresh: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        least = 0 if self.fresh else 1
        what = (
            f"replay(times={self.times!r}, buffer={self.buffer!r}, max_age={self.max_age!r}, "
            f"seed={self.seed!r})"
        )
        wanted = (
            f"times {least} or more, buffer 1 or more, max_age 0 or more or None, seed 0 or more"
        )
        max_age = 0 if self.max_age is None else self.max_age
        for value, at_least in (
            (self.times, least),
            (self.buffer, 1),
            (max_age, 0),
            (self.seed, 0),
        ):
            require_whole(what, value, at_least, wanted)
        if self.draw not in ("newest", "least_used", "uniform"):
            raise ValueError(
                f"replay(draw={self.draw!r}): give 'newest', 'least_used' or 'uniform'"
            )


@final
@dataclass(slots=True)
class Entry:
    """A stored message.

    Args:
        minibatch: The number of its instance in training.
        payload: Its tensors.
        lengths: int64 ``(1,)`` for a bundle, else None.
        uses: How often it has been sent.
    """

    minibatch: int
    payload: Payload
    lengths: IntArray | None
    uses: int


@final
class ReplayBuffer:
    """The last few messages that came.

    Args:
        rule: Capacity, age, and which is drawn.
        name: Of the node; two nodes draw differently.
    """

    def __init__(self, rule: Replays, name: str) -> None:
        self.node, self._rule, self._number = name, rule, zlib.crc32(name.encode())
        self.entries: deque[Entry] = deque(maxlen=rule.buffer)

    def put(self, entry: Entry) -> None:
        """Store; the oldest makes room."""
        self.entries.append(entry)

    def draw(self, minibatch: int, k: int) -> Entry | None:
        """The entry for draw k of a minibatch; None where all are too old."""
        oldest = None if self._rule.max_age is None else minibatch - self._rule.max_age
        while oldest is not None and self.entries and self.entries[0].minibatch < oldest:
            self.entries.popleft()
        if not self.entries:
            return None
        entry = self.entries[self._choose(minibatch, k)]
        entry.uses += 1
        return entry

    def _choose(self, minibatch: int, k: int) -> int:
        n = len(self.entries)
        match self._rule.draw:
            case "uniform":
                seed = (self._rule.seed, self._number, minibatch, k)
                return int(np.random.default_rng(seed).integers(n))
            case "least_used":
                return min(range(n), key=lambda i: (self.entries[i].uses, -i))
            case _:
                return n - 1

    def memory(self) -> Memory:
        """Tensors ``entry/payload number``, and JSON."""
        tensors = {
            f"{i}/{j}": x for i, e in enumerate(self.entries) for j, x in enumerate(e.payload)
        }
        entries = [
            {
                "minibatch": e.minibatch,
                "uses": e.uses,
                "width": len(e.payload),
                "rows": None if e.lengths is None else int(e.lengths[0]),
            }
            for e in self.entries
        ]
        return tensors, {"entries": entries}

    def recall(self, memory: Memory) -> None:
        """Put back what ``memory`` gave; of more than fit, the newest.

        Raises:
            CheckpointError: It is damaged.
        """
        tensors, document = memory
        kept = require_memory(tensors, document, self.node)
        self.entries.clear()
        for i, e in enumerate(kept.entries):
            rows = None if e.rows is None else np.array([e.rows], np.int64)
            payload = tuple(tensors[f"{i}/{j}"] for j in range(e.width))
            self.entries.append(Entry(e.minibatch, payload, rows, e.uses))

    def require_like(self, entry: Entry) -> None:
        """Refuse stored messages that are not like this one, which has just come.

        Raises:
            CheckpointError: One has other tensors.
        """
        wanted = _kind(entry)
        for other in self.entries:
            if _kind(other) != wanted:
                raise CheckpointError(
                    f"the buffer of '{self.node}' holds {_described(other)}, and what comes there "
                    f"is {_described(entry)}; the checkpoint is of another graph or other data: "
                    "load it with weights_only=True"
                )

    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(x.nelement() * x.element_size() for e in self.entries for x in e.payload)


@final
@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An ``Entry`` as JSON has it.

    Args:
        minibatch, uses: As there.
        width: Tensors.
        rows: Of a bundle.
    """

    minibatch: Count
    uses: Count
    width: Annotated[int, Range(1, 1000)]
    rows: Count | None


@final
@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """The messages of a buffer as JSON has them."""

    entries: Sequence[StoredEntry]


def require_memory(
    tensors: Mapping[str, torch.Tensor], document: object, node: str
) -> StoredBuffer:
    """What ``ReplayBuffer.memory`` gave.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        kept = read(StoredBuffer, document, f"the buffer of '{node}'")
        expected = {f"{i}/{j}" for i, e in enumerate(kept.entries) for j in range(e.width)}
        if expected != tensors.keys():
            differing = sorted(expected ^ tensors.keys())
            raise Mismatch(f"the buffer of '{node}' has or lacks tensors {differing[:3]}")
        for i, e in enumerate(kept.entries):
            rows = 1 if e.rows is None else e.rows
            for j in range(e.width):
                shape = tuple(tensors[f"{i}/{j}"].shape)
                if shape[:1] != (rows,):
                    raise Mismatch(
                        f"the buffer of '{node}': tensor {i}/{j} has shape {shape}, expected {rows}"
                        " rows"
                    )
    except Mismatch as error:
        raise CheckpointError(f"{error}; use another checkpoint of the run") from error
    return kept


def _kind(entry: Entry) -> tuple[object, ...]:
    return entry.lengths is None, *((x.dtype, x.dim()) for x in entry.payload)


def _described(entry: Entry) -> str:
    what = "a row" if entry.lengths is None else "a bundle"
    return f"{what} of " + ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in entry.payload)


@final
@dataclass(slots=True)
class _Open:
    """An instance whose fresh rows or replays are under way."""

    minibatch: int
    slot: IntArray
    state: IntArray
    below: IntArray | None  # who waits for the gradient of the fresh rows
    drawn: int = 0


@final
class ReplayNode(AbstractNode):
    """Pass messages on, keep them, and send kept ones again.

    Args:
        place: Number, name, frames.
        rule: How often, and which.
    """

    eager = True

    def __init__(self, place: Place, rule: Replays) -> None:
        super().__init__(place)
        self._rule, self._column = rule, place.schema.state[REPLAY]
        self.buffer = ReplayBuffer(rule, place.name)
        self._rows = RowStore(place.name, ())
        self._open: dict[int, _Open] = {}
        self._recalled = False  # and not yet compared with what comes

    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        if not train or not self._rule.times:
            return Emission([(0, batch) for batch in batches])
        emission = Emission()
        for one in one_by_one(batches):
            if one.state[self._column, 0]:  # a replay from further down: it is nobody's fresh row
                emission.forward.append((0, one))
            else:
                self._fresh(one, emission)
        return emission

    def _fresh(self, one: Forward, emission: Emission) -> None:
        slot = one.state[INSTANCE].copy()
        minibatch = int(self.place.arena.serial[slot[0]])
        payload = tuple(_kept(x, one.index) for x in one.payload)
        entry = Entry(minibatch, payload, one.lengths, int(self._rule.fresh))
        if self._recalled:
            self.buffer.require_like(entry)
            self._recalled = False
        self.buffer.put(entry)
        row = self._rows.allocate(1)
        opened = _Open(minibatch, slot, one.state, one.origin if self._rule.fresh else None)
        self._open[row] = opened
        if self._rule.fresh:
            origin = address(self.id, row, 1) | marks(one.origin)
            emission.forward.append((0, one.with_origin(origin)))
        else:
            emission.backward.append(Backward(one.origin, None))
            self._next(row, opened, emission)

    def backward(self, batches: Sequence[Backward]) -> Emission:
        emission = Emission()
        for one in one_by_one(batches):
            row = int(one.rows[0] & ROW_MASK)
            opened = self._open[row]
            if opened.below is not None:
                answer = Backward(opened.below, one.gradient, one.lengths, one.index)
                opened.below = None
            else:
                answer = Backward(opened.slot | (CONTROLLER << ROW_BITS), None)
            emission.backward.append(answer)
            self._next(row, opened, emission)
        return emission

    def _next(self, row: int, opened: _Open, emission: Emission) -> None:
        """Send the next replay of an instance, or be done with it."""
        entry = None
        if opened.drawn < self._rule.times:
            entry = self.buffer.draw(opened.minibatch, opened.drawn)
        if entry is None:
            del self._open[row]
            self._rows.release(np.array([row], np.int64))
            return
        state = opened.state.copy()
        again = opened.drawn + self._rule.fresh
        state[self._column] = again and again + (self.id << _NUMBERS)
        opened.drawn += 1
        emission.spawn(opened.slot)
        origin = address(self.id, row, 1) | QUIET
        sent = Forward(entry.payload, state, origin, entry.lengths)
        emission.forward.append((0, sent))

    def origins(self, rows: IntArray) -> IntArray | None:
        slots = [self._open[row].slot for row in rows.tolist() if row in self._open]
        return np.concatenate(slots) if slots else None

    def check_empty(self) -> None:
        self._rows.check_empty()

    def story(self) -> list[str]:
        n = self._rows.waiting
        return [f"'{self.name}' waits for the gradients of {n} messages or replays"] if n else []

    def nbytes(self) -> int:
        return self.buffer.nbytes()

    def memory(self) -> Memory | None:
        return self.buffer.memory()

    def recall(self, memory: Memory) -> None:
        self.buffer.recall(memory)
        self._recalled = True


def _kept(x: torch.Tensor, index: IntArray | None) -> torch.Tensor:
    """A copy that nobody else writes to."""
    return x.clone() if index is None else join_column([(x, index)])
