"""The controller: admits instances, counts answers, ends a pass. It waits for nothing.

    want() ─► 3       admit(instances) ─► deliveries       answered(slots) ─► finished instances

An instance is finished when every row that was fed for it has been answered. How many may be in
flight grows from a few to ``max_active`` at the start of training: the first, most stale steps of
an adaptive optimiser otherwise spoil its statistics for good.

Source: max_active_keys of Gaunt et al. 2017, arXiv:1705.09786; it counts instances, so ours is
``max_active``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.bounds import require_whole
from geartrain.device import moved
from geartrain.engine.rounds import Rounds
from geartrain.engine.router import Outbox, Router
from geartrain.errors import ProtocolError
from geartrain.frames.instance import Instance
from geartrain.frames.message import INSTANCE, VERTEX, Forward, IntArray, join_arrays
from geartrain.frames.packed import Packed, PackedRows
from geartrain.frames.packer import Packer
from geartrain.frames.precision import narrowed
from geartrain.graph.operator import Input
from geartrain.graph.wiring import Wiring
from geartrain.sharing.assignment import AbstractAssignment, Together


class AbstractRamp(ABC):
    """How many instances may be in flight while training begins."""

    @abstractmethod
    def limit(self, max_active: int, finished: int) -> int:
        """At most so many, 1 or more, when so many have finished in training."""


@final
@dataclass(frozen=True, slots=True)
class Ramp(AbstractRamp):
    """How many instances may be in flight while training begins.

    Args:
        start: At the first instance.
        over: Instances finished when ``max_active`` is reached; growth is geometric. 0: at once.
    """

    start: int = 4
    over: int = 1500

    def __post_init__(self) -> None:
        what = f"Ramp(start={self.start!r}, over={self.over!r})"
        for value, least in ((self.start, 1), (self.over, 0)):
            require_whole(what, value, least, "start=1 or more, over=0 or more")

    def limit(self, max_active: int, finished: int) -> int:
        if finished >= self.over or max_active <= self.start:
            return max_active
        return int(self.start * (max_active / self.start) ** (finished / self.over))


@final
@dataclass(frozen=True, slots=True)
class Synchronous(AbstractRamp):
    """One instance at a time until so many have finished, then all at once or by another ramp.

    With minibatches as instances that is a synchronous first phase (T3 of PipeMare).

    Args:
        instances: Finished in training when the first phase ends.
        then: Begins there.

    Source: Yang et al. 2021, arXiv:1910.05124.
    """

    instances: int
    then: AbstractRamp = Ramp(over=0)

    def __post_init__(self) -> None:
        require_whole(f"Synchronous(instances={self.instances!r})", self.instances, 0)
        if not isinstance(self.then, AbstractRamp):
            raise TypeError(f"Synchronous(then={self.then!r:.80}): give a ramp, such as Ramp()")

    def limit(self, max_active: int, finished: int) -> int:
        if finished < self.instances:
            return 1
        return self.then.limit(max_active, finished - self.instances)


_SHARE = 16
"""Room for one in so many of the instances in flight is awaited before more are admitted: an
admission has a cost of its own, whatever it admits."""


@final
class ControllerState:
    """Instances in flight.

    Args:
        wiring: The graph made into nodes.
        router: Follows the wires.
        max_active: Most instances in flight.
        ramp: How training gets there.
        finished: Instances finished in training before (of a resumed run).
        drain: Admit only when nothing is in flight, and all that are wanted then: synchronous
            minibatches of ``max_active``. It is called ``whole`` here.
        device: Where rows are fed; None: where instances have them.
        assignment: Which copy of the graph gets which instance; where copies are limited each by
            itself, ``max_active`` and ``drain`` apply to each.
        rounds: Counts the loops' turns.
    """

    def __init__(
        self,
        wiring: Wiring,
        router: Router,
        rounds: Rounds,
        max_active: int,
        ramp: AbstractRamp,
        finished: int = 0,
        *,
        drain: bool = False,
        device: torch.device | None = None,
        assignment: AbstractAssignment | None = None,
    ) -> None:
        if max_active < 1:
            raise ValueError(f"max_active={max_active}: give 1 or more")
        self._wiring, self._arena, self._router = wiring, wiring.arena, router
        self.rounds = rounds
        self._max_active, self._ramp, self.whole = max_active, ramp, drain
        self._device = device
        self._pending = np.zeros(64, np.int64)
        self.trained = finished
        self.active = 0
        self.finished = 0
        self.fed_rows = self.answered_rows = 0
        self.training = True
        self._holding: set[str] = set()
        self.packer = Packer(wiring.arena, wiring.inputs, wiring.admission)
        self.one_by_one = any(o.alone for o in wiring.inputs.values())
        self.assignment = assignment or Together()
        self.again: deque[Packed] = deque()
        """Instances that were lost with a copy, and are to be admitted again; not among
        ``active``."""
        self._packed: NDArray[np.object_] | None = None  # what brought an instance, by slot
        self._place = np.zeros(0, np.int64)  # which of it
        self.finished_slots: IntArray = np.zeros(0, np.int64)  # of those of the last settling
        self.finished_turns: IntArray = np.zeros(0, np.int64)  # that they had
        self.finished_copies: IntArray = np.zeros(0, np.int64)  # that had them

    def begin(self, *, training: bool) -> None:
        """A new pass: counts start from 0."""
        self.training = training
        self.finished = 0
        self.rounds.begin()
        self.assignment.begin(self.trained, training=training)
        self.fed_rows = self.answered_rows = 0
        self.again.clear()

    @property
    def limit(self) -> int:
        """How many instances may be in flight now."""
        if not self.training:
            return self._max_active
        return self._ramp.limit(self._max_active, self.trained)

    def want(self) -> int:
        """How many more instances may be admitted now; 0 while there is room for a few only."""
        if self.whole and self.active:
            return 0
        if self._holding and self.active:
            return 0
        limit = self.limit
        room = self.assignment.room(limit)
        return room if room >= max(1, limit // _SHARE) else 0

    @property
    def in_flight(self) -> int:
        """Instances in flight, without those that wait at workers until there is room."""
        return int(np.minimum(self.assignment.active, self.limit).sum())

    @property
    def copies(self) -> int:
        """Those that are limited each by itself."""
        return self.assignment.active.size

    def want_of(self, copy: int) -> int:
        """``want`` of one copy."""
        active = int(self.assignment.active[copy])
        if not self.assignment.open[copy] or (active and (self.whole or self._holds(copy))):
            return 0
        limit = self.limit
        room = limit - active
        return room if room >= max(1, limit // _SHARE) else 0

    def _holds(self, copy: int) -> bool:
        return any(name.endswith(f"#{copy}") for name in self._holding)

    def hold(self, part: str, holds: bool) -> None:
        """A part holds a step back until older rows have returned, or has ceased to."""
        (self._holding.add if holds else self._holding.discard)(part)

    def admit(self, instances: Sequence[Instance] | Packed, copy: int | None = None) -> Outbox:
        """Feed the rows of instances.

        Args:
            instances: Some.
            copy: The copy of the graph that all of them go to; None: as they are assigned.

        Raises:
            DataError: An instance is refused; nothing of any of these has entered the graph.
        """
        packed = instances if isinstance(instances, Packed) else self.packer.pack(instances)
        at, n = copy or 0, len(packed)
        slots = self._arena.admit(packed, self.assignment.number(at))
        self.rounds.admitted(slots)
        self.assignment.admit(self._arena, slots, at)
        top = int(slots.max())
        if top >= self._pending.size:
            self._pending = np.concatenate([self._pending, np.zeros(top, np.int64)])
        self._pending[slots] = packed.counts
        self._note(slots, packed)
        self.active += n
        self.fed_rows += int(packed.counts.sum())
        out = Outbox()
        for name, rows in packed.inputs.items():
            if rows.payload is not None:
                operator = self._wiring.inputs[name]
                batch = self._batch(operator, rows.payload, rows, slots)
                self._router.send(operator.id, 0, batch, out, copy)
        return out

    def _batch(
        self, operator: Input, payload: Tensor, rows: PackedRows, slots: IntArray
    ) -> Forward:
        """The rows of some instances for one input."""
        columns, base = self._wiring.schema.state, self._arena.base[slots]
        if operator.bundle:
            some = np.flatnonzero(rows.lengths)
            instance, vertex, lengths = slots[some], base[some], rows.lengths[some]
        else:
            instance, lengths = slots.repeat(rows.lengths), None
            vertex = rows.at + base.repeat(rows.lengths)
        state = np.zeros((len(columns), instance.size), np.int64)
        state[INSTANCE], state[VERTEX] = instance, vertex
        for field, value in operator.fields.items():
            state[columns[field]] = value
        if self._wiring.precision == "bf16":
            payload = narrowed(payload)
        if self._device is not None:
            payload = moved(payload, self._device)
        return Forward((payload,), state, instance, lengths)

    def keep_packed(self) -> None:
        """From now on remember what instances in flight have brought, so that they can be lost."""
        self._packed = np.full(64, None, np.object_)
        self._place = np.zeros(64, np.int64)

    def _note(self, slots: IntArray, packed: Packed) -> None:
        if self._packed is None:
            return
        while int(slots.max()) >= self._packed.size:
            self._packed = np.concatenate([self._packed, np.full_like(self._packed, None)])
            self._place = np.concatenate([self._place, self._place])
        holder = np.empty(1, np.object_)
        holder[0] = packed
        self._packed[slots] = holder
        self._place[slots] = np.arange(slots.size)

    def lose(self, copy: int) -> int:
        """A copy is gone, and what it had in flight with it: that waits to be admitted ``again``.

        Returns:
            How many instances.
        """
        assert self._packed is not None, "keep_packed comes first"
        slots = np.flatnonzero(self._pending > 0)
        slots = slots[self._arena.copy[slots] == copy]
        self.assignment.open[copy] = False
        self._holding = {name for name in self._holding if not name.endswith(f"#{copy}")}
        if not slots.size:
            return 0
        for slot in slots.tolist():
            place = int(self._place[slot])
            self.again.append(self._packed[slot].part(place, place + 1))
        self.fed_rows -= int(self._pending[slots].sum())
        self._pending[slots] = 0
        self.assignment.drop(self._arena, slots)
        self._arena.release(slots)
        self._packed[slots] = None
        lost = int(slots.size)
        self.active -= lost
        return lost

    def admit_again(self) -> Outbox | None:
        """Admit an instance that was lost, where there is room for it; None: none, or nowhere."""
        if not self.again:
            return None
        copies = np.argsort(self.assignment.active, kind="stable").tolist()
        room = [k for k in copies if self.assignment.open[k] and self._has_room(k)]
        return self.admit(self.again.popleft(), room[0]) if room else None

    def _has_room(self, copy: int) -> bool:
        return int(self.assignment.active[copy]) < self.limit and not (
            self.assignment.active[copy] and self._holds(copy)
        )

    @property
    def over(self) -> bool:
        """Whether nothing is in flight, or waits to be again."""
        return not (self.active or self.again)

    def settle(self, out: Outbox) -> int:
        """Take in what an outbox says of instances; returns how many have finished by it.

        Raises:
            ProtocolError: An instance got more answers than rows were fed for it.
            EndlessLoopError: Rows of an instance have gone round a loop too often.
        """
        if out.rounds:
            self.rounds.add(out.rounds)
        finished: list[IntArray] = []
        for slots in out.spawned:
            np.add.at(self._pending, slots, 1)
            self.fed_rows += slots.size
        for slots in out.answered:
            counts = np.bincount(slots)
            touched = np.flatnonzero(counts)
            self._pending[touched] -= counts[touched]
            self.answered_rows += slots.size
            left = self._pending[touched]
            if (left < 0).any():
                slot = int(touched[left < 0][0])
                raise ProtocolError(
                    f"{self._arena.describe(slot)} got {-int(left.min())} answers more than rows "
                    "were fed for it"
                )
            done = touched[left == 0]
            if done.size:
                self._arena.release(done)
                finished.append(done)
        if not finished:
            return 0
        done = join_arrays(finished)
        if self._packed is not None:
            self._packed[done] = None
        self.finished_slots = done
        self.finished_turns = self._arena.turn[done]
        self.finished_copies = self.assignment.finish(self._arena, done)
        self.active -= done.size
        self.finished += done.size
        if self.training:
            self.trained += done.size
        return done.size

    def waits_for(self, slots: IntArray) -> IntArray:
        """How many answers the instances in these slots still wait for."""
        found: IntArray = self._pending[slots]
        return found

    def check_empty(self) -> None:
        """Raises:
        ProtocolError: Instances are unfinished, or rows fed and answered differ.
        """
        if self.active or self.fed_rows != self.answered_rows:
            raise ProtocolError(
                f"{self.active} instances are unfinished; {self.fed_rows} rows were fed and "
                f"{self.answered_rows} answered"
            )

    def unfinished(self) -> list[str]:
        """The first instances in flight, for a story."""
        slots = np.flatnonzero(self._pending > 0)[:5].tolist()
        return [f"{self._arena.describe(s)}: {int(self._pending[s])} rows open" for s in slots]
