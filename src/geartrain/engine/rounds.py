"""How often rows go round a loop: a bound, as a loop that data steer may never end.

    parent = [1, 0]      where(parent >= 0) ─► cell ─► move(vertex=parent) ─┐
                              ▲                                             │ counted here, by
                              └─────────────────────────────────────────────┘ instance

Rows are counted where they enter a loop again. A firing hands in whose rows these were; they are
counted many firings at a time, so that it costs next to nothing, and an instance may have gone
round an eighth more often when that shows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, final

import numpy as np

from geartrain.errors import EndlessLoopError
from geartrain.frames.message import Forward, IntArray
from geartrain.graph.cycles import back_ports
from geartrain.graph.operator import Port
from geartrain.graph.wiring import Wiring

log = logging.getLogger("geartrain.engine")

Passed: TypeAlias = tuple[Port, IntArray]
"""Where rows have entered a loop again, and the slots of their instances, one entry a row."""

ROUNDS: Final = 100_000
ROUNDS_EACH: Final = 1_000
"""What an instance may do, and more for each of its vertices and edges. A list, tree or graph goes
once a vertex, or once a step, edge and vertex; a loop that ends by what it computes takes tens or
hundreds of steps. At some 100 µs for a firing of one row, a cycle is told after ten seconds or so,
and has left 100 MB behind where a row keeps a kilobyte."""

MANY: Final = 10_000
"""Rounds of an instance that are told of long before they are too many."""

_LOOK_FOR: Final = (
    "Look for a cycle in its columns, such as a vertex that is its own ancestor, and for a where() "
    "that never ends a row"
)
_REMEDY: Final = "Schedule(max_rounds=...)"
_WINDOW: Final = 4096  # rows, or
_RECORDS: Final = 512  # batches that wait to be counted
_GROWN_BYTES: Final = 1 << 26
_GROWN_TIMES: Final = 1000


@final
class Rounds:
    """Counts rows that go round loops, by instance.

    Args:
        wiring: The graph made into nodes.
        most: Of one instance, all its rows and loops together; None: ``ROUNDS``, and
            ``ROUNDS_EACH`` for each of its vertices and edges.

    Attributes:
        ports: Where rows enter a loop again; every cycle of the graph has one.
        window: Rows that go round uncounted, at most.
        patient: Whether a user has said how often they may.
    """

    def __init__(self, wiring: Wiring, most: int | None = None) -> None:
        # Not the wiring, whose loops hold this: what an engine has is to go as soon as it does.
        self._operators, self._arena, self._most = wiring.operators, wiring.arena, most
        self.ports = frozenset(back_ports(wiring.readers))
        self._readers = dict(wiring.readers)
        for inner in wiring.loops.values():
            self._readers.update(inner)
        self.window = _WINDOW if most is None else min(_WINDOW, max(1, most // 8))
        self.patient = most is not None
        self._waiting: list[Passed] = []
        self._rows = 0
        self._counts = np.zeros(64, np.int64)  # by slot
        self._first: dict[Port, float] = {}  # bytes of a message that came round first
        self._warned = False

    def begin(self) -> None:
        """A pass begins: nothing is in flight."""
        self._waiting.clear()
        self._rows = 0

    def admitted(self, slots: IntArray) -> None:
        """Other instances are in these slots now; all that has been added was of those before."""
        if self.ports:
            if self._waiting:
                self._count()
            self._grow(int(slots.max()) + 1)
            self._counts[slots] = 0

    def add(self, passed: Sequence[Passed]) -> None:
        """Rows have gone round.

        Raises:
            EndlessLoopError: One instance's have too often.
        """
        self._waiting += passed
        for _, slots in passed:
            self._rows += slots.size
        if self._rows >= self.window or len(self._waiting) >= _RECORDS:
            self._refuse(*self._count())

    def refuse(self, passed: Sequence[Passed]) -> None:
        """Look at what one firing alone has done; counts nothing.

        Raises:
            EndlessLoopError: One instance's rows have gone round too often in it.
        """
        self._refuse(np.bincount(np.concatenate([slots for _, slots in passed])), passed)

    def refuse_all(self, passed: Sequence[Passed]) -> None:
        """Rows have gone round in one firing, and the last of them would without end.

        Raises:
            EndlessLoopError: Always.
        """
        self.refuse(passed)
        port, last = passed[-1]
        slot = int(last[0])
        times = sum(int(np.count_nonzero(slots == slot)) for _, slots in passed)
        raise EndlessLoopError(
            f"rows of {self._arena.describe(slot)} have gone round the loop of {self._loop(port)} "
            f"{times:,} times, and come again and again to where they have been. {_LOOK_FOR}; or, "
            f"if a function of it draws numbers, say how often they may: {_REMEDY}"
        )

    def look(self, port: Port, batch: Forward) -> None:
        """Look at rows that go round.

        Raises:
            EndlessLoopError: They are much larger than those that came round first.
        """
        first = self._first.get(port)
        total = 0
        for x in batch.payload:
            total += x.nbytes
        if first is None:
            self._first[port] = _message_bytes(batch)
        elif total > _GROWN_BYTES:
            grown = _message_bytes(batch)
            if grown > max(_GROWN_BYTES, _GROWN_TIMES * first):
                raise EndlessLoopError(
                    f"rows of {self._arena.describe_several(batch.state[0])} grow in the loop of "
                    f"{self._loop(port)}: one has {grown:,.0f} bytes, the first that came round "
                    f"had {first:,.0f}; look for a module that makes its rows longer at each turn, "
                    "as one that joins them to what it has had"
                )

    def _count(self) -> tuple[IntArray, Sequence[Passed]]:
        """Count what waits; by slot, and what it was."""
        waiting, self._waiting, self._rows = self._waiting, [], 0
        counts = np.bincount(np.concatenate([slots for _, slots in waiting]))
        self._counts[: counts.size] += counts
        return self._counts[: counts.size], waiting

    def _grow(self, slots: int) -> None:
        if slots > self._counts.size:
            self._counts = np.concatenate([self._counts, np.zeros(slots, np.int64)])

    def _refuse(self, counts: IntArray, passed: Sequence[Passed]) -> None:
        arena, n = self._arena, counts.size
        size = arena.size[:n] + arena.edge_size[:n]
        most = ROUNDS + ROUNDS_EACH * size if self._most is None else np.full(n, self._most)
        over = (counts > most) & (arena.serial[:n] >= 0)  # who has finished has found an end
        if not over.any():
            if not self._warned and self._most is None:
                self._warn(counts, most, passed)
            return
        slot = int(np.flatnonzero(over)[0])
        port = next(port for port, slots in reversed(passed) if (slots == slot).any())
        limit = (
            f"the {int(most[slot]):,} that it may ({ROUNDS:,}, and {ROUNDS_EACH:,} for each of its "
            f"{int(size[slot]):,} vertices and edges)"
            if self._most is None
            else f"max_rounds={self._most:,}"
        )
        raise EndlessLoopError(
            f"rows of {arena.describe(slot)} have gone round the loop of {self._loop(port)} "
            f"{int(counts[slot]):,} times, more than {limit}. {_LOOK_FOR}; or allow more: {_REMEDY}"
        )

    def _warn(self, counts: IntArray, most: IntArray, passed: Sequence[Passed]) -> None:
        """Tell once of an instance that has gone round often, and may be about to without end."""
        many = (counts > most // (ROUNDS // MANY)) & (self._arena.serial[: counts.size] >= 0)
        if many.any():
            self._warned = True
            slot = int(np.flatnonzero(many)[0])
            port = next(port for port, slots in reversed(passed) if (slots == slot).any())
            log.warning(
                "rows of %s have gone round the loop of %s %s times so far; at %s they are "
                "refused, or as %s says",
                *(self._arena.describe(slot), self._loop(port)),
                *(f"{int(counts[slot]):,}", f"{int(most[slot]):,}", _REMEDY),
            )

    def _loop(self, port: Port) -> str:
        """The operators that lie on a loop, as far as it has a place to end."""
        members = sorted(loop_of(port, self._readers))
        names = [repr(self._operators[number].name) for number in members]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def loop_of(port: Port, readers: Mapping[Port, Port]) -> set[int]:
    """The operators on any way from where a port leads back to it."""
    forward: dict[int, set[int]] = {}
    backward: dict[int, set[int]] = {}
    for (source, _), (reader, _) in readers.items():
        forward.setdefault(source, set()).add(reader)
        backward.setdefault(reader, set()).add(source)
    return _reached(readers[port][0], forward) & _reached(port[0], backward)


def _reached(start: int, ahead: Mapping[int, set[int]]) -> set[int]:
    seen, stack = {start}, [start]
    while stack:
        for reader in ahead.get(stack.pop(), set()) - seen:
            seen.add(reader)
            stack.append(reader)
    return seen


def _message_bytes(batch: Forward) -> float:
    """Bytes of one message, the longest if they are bundles."""
    row = sum(x.nbytes / max(1, x.shape[0]) for x in batch.payload)
    return row if batch.lengths is None else row * int(batch.lengths.max(initial=0))
