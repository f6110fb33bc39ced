"""The controller: admits instances, counts answers, ends a pass. It waits for nothing.

    want() ─► 3       admit(instances) ─► deliveries       answered(slots) ─► finished instances

An instance is finished when every row that was fed for it has been answered. How many may be in
flight grows from a few to ``max_active`` at the start of training: the first, most stale steps of
an adaptive optimiser otherwise spoil its statistics for good.

Source: max_active_keys of Gaunt et al. 2017, arXiv:1705.09786; it counts instances, so ours is
``max_active``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from geartrain.engine.router import Outbox, Router
from geartrain.errors import DataError, ProtocolError
from geartrain.ir.instance import Instance
from geartrain.ir.message import INSTANCE, VERTEX, Forward, IntArray
from geartrain.ir.operator import Input
from geartrain.ir.wiring import Wiring


@final
@dataclass(frozen=True, slots=True)
class Ramp:
    """How many instances may be in flight while training begins.

    Args:
        start: At the first instance.
        over: Instances finished when ``max_active`` is reached; growth is geometric. 0: at once.
    """

    start: int = 4
    over: int = 1500

    def __post_init__(self) -> None:
        if self.start < 1 or self.over < 0:
            raise ValueError(
                f"Ramp(start={self.start}, over={self.over}): start with 1 or more, over 0 or more"
            )

    def limit(self, max_active: int, finished: int) -> int:
        if finished >= self.over or max_active <= self.start:
            return max_active
        return int(self.start * (max_active / self.start) ** (finished / self.over))


@final
class ControllerState:
    """Instances in flight.

    Args:
        wiring: The graph made into nodes.
        router: Follows the wires.
        max_active: Most instances in flight.
        ramp: How training gets there.
        finished: Instances finished in training before (of a resumed run).
        drain: Admit only when nothing is in flight: synchronous minibatches of ``max_active``.
    """

    def __init__(
        self,
        wiring: Wiring,
        router: Router,
        max_active: int,
        ramp: Ramp,
        finished: int = 0,
        *,
        drain: bool = False,
    ) -> None:
        if max_active < 1:
            raise ValueError(f"max_active={max_active}: give 1 or more")
        self._wiring, self._arena, self._router = wiring, wiring.arena, router
        self._max_active, self._ramp, self._drain = max_active, ramp, drain
        self._pending = np.zeros(64, np.int64)
        self.trained = finished
        self.active = 0
        self.finished = 0
        self.fed_rows = self.answered_rows = 0
        self.training = True
        self._serial = 0
        self._holding: set[str] = set()
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def begin(self, *, training: bool) -> None:
        """A new pass: counts and serial numbers start from 0."""
        self.training = training
        self.finished = self._serial = 0
        self.fed_rows = self.answered_rows = 0

    @property
    def limit(self) -> int:
        """How many instances may be in flight now."""
        if not self.training:
            return self._max_active
        return self._ramp.limit(self._max_active, self.trained)

    def want(self) -> int:
        """How many more instances may be admitted now."""
        if self._drain and self.active:
            return 0
        if self._holding and self.active:
            return 0
        return max(0, self.limit - self.active)

    def hold(self, part: str, holds: bool) -> None:
        """A part holds a step back until older rows have returned, or has ceased to."""
        (self._holding.add if holds else self._holding.discard)(part)

    def admit(self, instances: Sequence[Instance]) -> Outbox:
        """Feed the rows of instances.

        Raises:
            DataError: An instance is refused; nothing of any of these has entered the graph.
        """
        feeds = {
            name: _InputRows(operator, instances, self._shapes)
            for name, operator in self._wiring.inputs.items()
        }
        total = np.zeros(len(instances), np.int64)
        for feed in feeds.values():
            total += feed.counts
        if (total == 0).any():
            empty = instances[int(np.flatnonzero(total == 0)[0])]
            raise DataError(f"instance {_key(empty)} brings no row to any input")
        for instance in instances:
            for name in instance.inputs:
                if name not in feeds:
                    raise DataError(
                        f"instance {_key(instance)} brings input '{name}'; the graph has "
                        f"{sorted(feeds)}"
                    )
        serials = range(self._serial, self._serial + len(instances))
        slots = self._arena.admit(instances, serials)
        try:
            for feed in feeds.values():
                feed.check_vertices(self._arena.size[slots])
        except DataError:
            self._arena.release(slots)
            raise
        self._serial += len(instances)
        top = int(slots.max())
        if top >= self._pending.size:
            self._pending = np.concatenate(
                [self._pending, np.zeros(max(top + 1, self._pending.size), np.int64)]
            )
        self._pending[slots] = total
        self.active += len(instances)
        self.fed_rows += int(total.sum())
        out = Outbox()
        for feed in feeds.values():
            if feed.rows:
                batch = feed.batch(slots, self._arena.base[slots], self._wiring)
                self._router.send(feed.operator.id, 0, batch, out)
        return out

    def settle(self, out: Outbox) -> int:
        """Take in what an outbox says of instances; returns how many have finished by it.

        Raises:
            ProtocolError: An instance got more answers than rows were fed for it.
        """
        finished = 0
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
                finished += done.size
        self.active -= finished
        self.finished += finished
        if self.training:
            self.trained += finished
        return finished

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


@final
class _InputRows:
    """The rows that some instances bring to one input, joined and checked."""

    def __init__(
        self,
        operator: Input,
        instances: Sequence[Instance],
        shapes: dict[str, tuple[torch.Size, torch.dtype]],
    ) -> None:
        self.operator, self._instances = operator, instances
        name = operator.name
        parts: list[Tensor] = []
        places: list[IntArray] = []
        for instance in instances:
            given = instance.inputs.get(name)
            rows, at = given if isinstance(given, tuple) else (given, None)
            if rows is None:
                places.append(np.zeros(0, np.int64))
                continue
            if not isinstance(rows, Tensor) or rows.ndim == 0:
                raise DataError(
                    f"instance {_key(instance)}: input '{name}' is {type(rows).__name__}; bring a "
                    "tensor (n, ...) or a pair (tensor, vertices)"
                )
            here = np.arange(len(rows)) if at is None else np.asarray(at, np.int64)
            if here.shape != (len(rows),):
                raise DataError(
                    f"instance {_key(instance)}: input '{name}' has {len(rows)} rows and vertices "
                    f"of shape {here.shape}; one vertex for each row"
                )
            known = shapes.setdefault(name, _declared(operator, rows))
            if known != (rows.shape[1:], rows.dtype) and not operator.bundle:
                raise DataError(
                    f"instance {_key(instance)}: input '{name}' has rows of {rows.dtype} "
                    f"{tuple(rows.shape[1:])}; the input (or its first instance) says {known[1]} "
                    f"{tuple(known[0])}"
                )
            parts.append(rows)
            places.append(here)
        self._lengths = np.array([p.size for p in places], np.int64)
        self.counts = np.minimum(self._lengths, 1) if operator.bundle else self._lengths
        self.rows = int(self.counts.sum())
        self._at = np.concatenate(places)
        self._payload = self._joined(parts)

    def check_vertices(self, sizes: IntArray) -> None:
        limit = np.repeat(sizes, self._lengths)
        if self.operator.bundle:
            return
        bad = np.flatnonzero((self._at < 0) | (self._at >= limit))
        if bad.size:
            owner = self._owner(int(bad[0]))
            raise DataError(
                f"instance {_key(self._instances[owner])}: input '{self.operator.name}' has a row "
                f"at vertex {int(self._at[bad[0]])}, but the instance has vertices "
                f"0..{int(sizes[owner]) - 1}"
            )

    def batch(self, slots: IntArray, base: IntArray, wiring: Wiring) -> Forward:
        assert self._payload is not None
        state = np.zeros((len(wiring.schema.state), self.rows), np.int64)
        if self.operator.bundle:
            some = np.flatnonzero(self._lengths)
            state[INSTANCE], state[VERTEX] = slots[some], base[some]
            lengths = self._lengths[some]
        else:
            state[INSTANCE] = np.repeat(slots, self._lengths)
            state[VERTEX] = self._at + np.repeat(base, self._lengths)
            lengths = None
        for field, value in self.operator.fields.items():
            state[wiring.schema.state[field]] = value
        return Forward((self._payload,), state, state[INSTANCE].copy(), lengths)

    def _joined(self, parts: list[Tensor]) -> Tensor | None:
        if not parts:
            return None
        try:
            payload = parts[0] if len(parts) == 1 else torch.cat(parts)
        except RuntimeError as error:
            shapes = sorted({tuple(p.shape[1:]) for p in parts})
            raise DataError(f"input '{self.operator.name}' has rows of shapes {shapes}") from error
        if payload.is_floating_point() and not torch.isfinite(payload).all():
            broken = (
                (~torch.isfinite(payload)).flatten(1).any(1)
                if payload.ndim > 1
                else ~payload.isfinite()
            )
            row = int(torch.nonzero(broken)[0, 0])
            owner = self._owner(row)
            raise DataError(
                f"instance {_key(self._instances[owner])}: input '{self.operator.name}' holds NaN "
                "or infinity; clean the features before they are fed"
            )
        return payload

    def _owner(self, row: int) -> int:
        return int(np.searchsorted(np.cumsum(self._lengths), row, side="right"))


def _declared(operator: Input, rows: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of one row: as declared, else as the first instance brings them."""
    shape = rows.shape[1:] if operator.shape is None else torch.Size(operator.shape)
    return shape, rows.dtype if operator.dtype is None else operator.dtype


def _key(instance: Instance) -> str:
    return "without a key" if instance.key is None else str(instance.key)
