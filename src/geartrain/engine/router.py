"""Where rows go next: through steps without a store, straight to the nodes that keep them.

    node ─► (where ─► move ─► ...) ─► node, node, controller

Steps run where the rows were made, so a chain of them costs index arithmetic and no message.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from geartrain.engine.rounds import Passed, Rounds
from geartrain.errors import GeartrainError, WorkerError
from geartrain.frames.message import (
    CONTROLLER,
    INSTANCE,
    ROW_BITS,
    ROW_MASK,
    Backward,
    Forward,
    IntArray,
    by_owner,
    distinct,
    join_arrays,
)
from geartrain.graph.operator import Port
from geartrain.graph.wiring import Wiring
from geartrain.nodes.control import AbstractStep, Passage, by_columns
from geartrain.nodes.node import Emission

BACKWARD = -1
"""Stands for the port of a delivery that goes back."""

_TURNS: Final = 1000  # of one firing, after which it is looked at


@final
@dataclass(slots=True, eq=False)
class Delivery:
    """A batch for a node: rows for a port, or answers (port ``BACKWARD``). Never changed."""

    node: int
    port: int
    batch: Forward | Backward


@final
@dataclass(slots=True)
class Outbox:
    """What a firing causes.

    Args:
        deliveries: For nodes.
        answered: Slots of instances, one entry for each fed row that has been answered.
        spawned: Slots for which one answer more is to be awaited; counts before ``answered``.
        rounds: Rows that have entered a loop again.
    """

    deliveries: list[Delivery] = field(default_factory=list)
    answered: list[IntArray] = field(default_factory=list)
    spawned: list[IntArray] = field(default_factory=list)
    rounds: list[Passed] = field(default_factory=list)

    def add(self, other: Outbox) -> None:
        """All of another one, after what is here."""
        self.deliveries += other.deliveries
        self.answered += other.answered
        self.spawned += other.spawned
        self.rounds += other.rounds

    def take_news(self) -> Outbox:
        """What the controller is to know, which is here no longer; deliveries stay."""
        news = Outbox([], self.answered, self.spawned, self.rounds)
        self.answered, self.spawned, self.rounds = [], [], []
        return news


@final
class Router:
    """Follows the wires.

    Args:
        wiring: The graph made into nodes.
        rounds: Knows the loops.
        apart: Whether copy k of a node writes to copy k of its readers alone.
    """

    def __init__(self, wiring: Wiring, rounds: Rounds, *, apart: bool = False) -> None:
        self._copy_of = (
            {n: k for numbers in wiring.copies.values() for k, n in enumerate(numbers)}
            if apart
            else {}
        )
        self._steps, self._readers = wiring.steps, wiring.readers
        self._copies, self._operator_of = wiring.copies, wiring.operator_of
        self._arena, self._apart = wiring.arena, apart
        self._rounds, self._back = rounds, rounds.ports
        self._nodes = wiring.nodes
        self.here: Collection[int] = wiring.nodes
        """Nodes whose stores are in this process."""

    def emit(self, node: int, emission: Emission, out: Outbox) -> None:
        """Route what a node has sent."""
        if emission.spawned is not None:
            out.spawned.append(emission.spawned)
        for batch in emission.backward:
            self.answer(batch, out)
        operator = self._operator_of[node]
        for port, rows in emission.forward:
            self.send(operator, port, rows, out, self._copy_of.get(node))

    def send(
        self, operator: int, port: int, batch: Forward, out: Outbox, copy: int | None = None
    ) -> None:
        """Route rows that leave an output port.

        Args:
            operator, port: Where they leave.
            batch: The rows.
            out: Gets the deliveries.
            copy: The copy that all of them go to; None: by their instances.

        Raises:
            EndlessLoopError: Rows go round steps without end.
        """
        ahead = [((operator, port), batch)]
        while ahead:  # not by recursion: a loop of steps alone may be long
            here, batch = ahead.pop()
            if here in self._back:
                self._round(here, batch, out)
            reader, into = self._readers[here]
            step = self._steps.get(reader)
            if step is None:
                copies = self._copies[reader]
                if copy is not None or len(copies) == 1:
                    out.deliveries.append(Delivery(copies[copy or 0], into, batch))
                else:
                    self._spread(copies, into, batch, out)
                continue
            passage = _apply(step, batch)
            if passage.spawned is not None:
                out.spawned.append(passage.spawned)
            for answer in passage.backward:
                self.answer(answer, out)
            ahead += [((reader, way), rows) for way, rows in reversed(passage.forward)]

    def _round(self, port: Port, batch: Forward, out: Outbox) -> None:
        self._rounds.look(port, batch)
        out.rounds.append((port, batch.state[INSTANCE]))
        if len(out.rounds) % _TURNS == 0:  # in one firing: nobody will count them
            self._rounds.refuse(out.rounds)

    def _spread(self, copies: tuple[int, ...], into: int, batch: Forward, out: Outbox) -> None:
        """Give every row to the copy that its instance belongs to."""
        slots = batch.state[INSTANCE]
        if self._apart:
            which = self._arena.copy[slots]
        else:
            which = self._arena.serial[slots] % len(copies)
        first = int(which[0])
        if (which == first).all():
            out.deliveries.append(Delivery(copies[first], into, batch))
            return
        for k, node in enumerate(copies):
            rows = np.flatnonzero(which == k)
            if rows.size:
                out.deliveries.append(Delivery(node, into, batch.take(rows)))

    def answer(self, batch: Backward, out: Outbox) -> None:
        """Route answers to their return addresses."""
        if not batch.rows.size:
            return
        for owner, part in by_owner(batch):
            if owner == CONTROLLER:
                out.answered.append(part.rows & ROW_MASK)
            else:
                out.deliveries.append(Delivery(owner, BACKWARD, part))

    def told(self, rows: IntArray) -> str:
        """The instances that answers are of, for errors.

        Args:
            rows: int64, return addresses; they are followed to where the rows were fed.
        """
        slots: list[IntArray] = []
        for _ in range(_FAR):
            owners = rows >> ROW_BITS
            slots.append(rows[owners == CONTROLLER] & ROW_MASK)
            found: list[IntArray] = []
            for owner in distinct(owners[owners != CONTROLLER]).tolist():
                if owner not in self.here:
                    continue
                origins = self._nodes[owner].origins(rows[owners == owner] & ROW_MASK)
                if origins is not None:
                    found.append(origins)
            if not found:
                break
            rows = distinct(join_arrays(found))
        return self._arena.describe_several(join_arrays(slots))


_FAR: Final = 100_000  # nodes that a row may have come through


def _apply(step: AbstractStep, batch: Forward) -> Passage:
    """Run a step; what a user's function raises is told with the name of the step."""
    try:
        return step.apply(batch)
    except GeartrainError:
        raise
    except Exception as error:
        whose = step.place.arena.describe_several(batch.state[INSTANCE])
        raise WorkerError(
            f"{type(error).__name__} in '{step.name}', {len(batch)} rows of {whose}: {error}"
            f"{by_columns(error)}"
        ) from error
