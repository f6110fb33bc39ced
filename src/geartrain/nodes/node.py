"""What every node is: batches in, an emission out.

    forward(port, batches) ─► Emission    rows for the readers, and answers that are due at once
    backward(batches)      ─► Emission    answers for the origins

A node answers one firing at a time and knows no thread, queue or clock. The engine gives it batches
that arrived separately; joining them is the node's business, so that it can join them in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch

from geartrain.frames.frame import Arena, Schema, View
from geartrain.frames.message import (
    INSTANCE,
    VERTEX,
    Backward,
    Forward,
    IntArray,
    device_of,
    ranges,
)


@final
@dataclass(frozen=True, slots=True)
class Spared:
    """A message whose way back slow gears have made shorter, for whoever counts.

    Args:
        function: The module that ran.
        inputs: Shape and dtype of its arguments.
        done: Of which gradients are computed all the same.
        input_wanted: Whether that of the input would be, without gears.
    """

    function: Callable[..., Any]
    inputs: tuple[tuple[torch.Size, torch.dtype], ...]
    done: Literal["nothing", "input", "weights"]
    input_wanted: bool


@final
@dataclass(slots=True)
class Emission:
    """What a firing sends.

    Args:
        forward: Batches by output port.
        backward: Answers to return addresses.
        spawned: Slots of the instances for which the controller must await one answer more, one
            entry a row; it learns of them before the answers travel. None: of none.
        spared: Work that was left out.
    """

    forward: list[tuple[int, Forward]] = field(default_factory=list)
    backward: list[Backward] = field(default_factory=list)
    spawned: IntArray | None = None
    spared: list[Spared] | None = None

    def spawn(self, slots: IntArray) -> None:
        """The controller must await one answer more of each of these."""
        self.spawned = slots if self.spawned is None else np.concatenate([self.spawned, slots])


Memory: TypeAlias = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""What a node remembers from pass to pass: tensors by name, and JSON."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands: its number, its name, and the frames that its rows refer to.

    ``spread`` says whether rows may lie elsewhere than on the host; where not, nobody asks.
    ``device`` is that of all modules of a loop or a stack that runs whole, to which its rows are
    brought; None: nobody brings any.
    """

    id: int
    name: str
    arena: Arena
    schema: Schema
    spread: bool = False
    device: torch.device | None = None

    @property
    def on_host(self) -> bool:
        """Whether what runs whole here is all on the host, where C can read it."""
        return self.device is None or self.device.type == "cpu"

    def device_for(self, batches: Sequence[Forward]) -> torch.device | None:
        """Where a node without weights joins these; None: they are all on the host."""
        return device_of(batches) if self.spread else None

    def view(self, batch: Forward) -> View:
        return View(batch, self.arena, self.schema)

    def row_view(self, state: IntArray, lengths: IntArray | None) -> View:
        """The payload rows of messages, each where it is.

        The rows of a bundle that has all vertices of its instance are at them, in order; those of
        another bundle are at no vertex, and reading a vertex column is refused.
        """
        if lengths is None:
            return self.view(Forward((), state, state[INSTANCE]))
        slots = state[INSTANCE]
        sizes = self.arena.size[slots]
        rows = np.repeat(state, lengths, axis=1)
        if np.array_equal(sizes, lengths):
            rows[VERTEX] = ranges(self.arena.base[slots], lengths)
            nowhere = None
        else:
            nowhere = (
                f"'{self.name}': bundles of {lengths[:4].tolist()} rows came, but their instances "
                f"have {sizes[:4].tolist()} vertices"
            )
        return View(Forward((), rows, rows[INSTANCE]), self.arena, self.schema, nowhere)


class AbstractNode(ABC):
    """A node of the running graph; has a store, so it belongs to one worker.

    Args:
        place: Number, name, frames.
    """

    eager = False
    """Whether the engine fires this node as soon as something arrives: batches gain it nothing."""

    alone = False
    """Whether every message is fired by itself: it is a batch already, or keeps its graph."""

    loss_name: str | None = None
    """The loss that is computed in this node: in training a forward firing then adds gradients."""

    @property
    def apart(self) -> bool:
        """Whether what adds gradients here costs less for messages of several updates at once."""
        return False

    @property
    def calls_a_firing(self) -> int:
        """Calls of modules in one firing, about: so many times is what they cost by themselves."""
        return 1

    @property
    def keeps_graphs(self) -> bool:
        """Whether its firings run again unless their messages come back together."""
        return False

    @property
    def bundled(self) -> bool:
        """Whether the messages that it waits for are bundles, seen so far."""
        return False

    def lengths(self, batch: Forward | Backward) -> IntArray | None:
        """Payload rows of each message of a batch that waits for this node; None: one each."""
        return batch.lengths

    def rows_of(self, batch: Forward | Backward, part: str) -> IntArray | None:
        """``lengths``, of those rows that one of its parts computes."""
        return self.lengths(batch)

    def left_by(self, batch: Backward) -> IntArray | None:
        """The forward firing by which each message left; None: it is all the same.

        Where it matters, messages that wait for their way back go by the latest first: what left
        together then comes back together, as the last turn of a loop goes back before the others.
        """
        return None

    def slots(self, batch: Forward | Backward) -> IntArray:
        """The instance's slot of each message of a batch that waits for this node.

        Of answers only a node with weights can tell.
        """
        if isinstance(batch, Backward):
            raise AssertionError(f"'{self.name}' does not know whose answers these are")
        found: IntArray = batch.state[INSTANCE]
        return found

    @property
    def grain(self) -> int:
        """Rows of a firing are best a multiple of this; the rest may wait for company."""
        return 1

    @property
    def open(self) -> bool:
        """Whether it may be given rows in training now; answers always."""
        return True

    part_name: str | None = None
    """The part whose weights this node uses; None: none, or several."""

    beside: int | None = None
    """Number of the node that it lives with, wherever that is placed."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """All parts whose weights this node uses."""
        return () if self.part_name is None else (self.part_name,)

    def __init__(self, place: Place) -> None:
        self.place = place
        self.id, self.name = place.id, place.name

    @abstractmethod
    def forward(self, port: int, batches: Sequence[Forward], train: bool) -> Emission:
        """Rows have come in at a port; ``train`` says whether gradients will follow."""

    @abstractmethod
    def backward(self, batches: Sequence[Backward]) -> Emission:
        """Rows that this node sent have been answered."""

    def origins(self, rows: IntArray) -> IntArray | None:
        """Return addresses of rows that wait here, for errors: followed, they lead to instances.

        Args:
            rows: int64 ``(n,)``, without marks.

        Returns:
            int64, of any number: one row may stand for several. None: nobody knows.
        """
        return None

    @abstractmethod
    def check_empty(self) -> None:
        """Raises:
        LeakError: Rows still wait here after a drain.
        """

    def story(self) -> list[str]:
        """Who waits here for what, a line each; empty when nothing does."""
        return []

    def nbytes(self) -> int:
        """Bytes of tensors held for rows that wait."""
        return 0

    def memory(self) -> Memory | None:
        """What outlives a pass and belongs into a checkpoint; None for nearly all nodes."""
        return None

    def recall(self, memory: Memory) -> None:
        """Take up what ``memory`` of an earlier node of this name gave."""
        raise AssertionError(f"'{self.name}' remembers nothing")
