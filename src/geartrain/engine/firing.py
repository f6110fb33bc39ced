"""What one call of a worker's ``fire`` did, as whoever called it reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from geartrain.engine.router import BACKWARD, Delivery, Outbox, Router
from geartrain.frames.message import INSTANCE, Backward, Forward, IntArray, shapes_of
from geartrain.nodes.node import AbstractNode
from geartrain.parts.trained import StepTaken
from geartrain.sharing.communicator import Taken
from geartrain.sharing.letters import Letter


@final
@dataclass(slots=True)
class Firing:
    """What one call of ``fire`` did.

    Args:
        node: Name of the node that the policy picked.
        part: Its part, or None.
        forward: Which way.
        rows: Messages in the batch.
        cells: Rows of their payload; a bundle has as many as it holds.
        nbytes: About how many bytes these are, or those of the gradients that have come back.
        elsewhere: Deliveries for other workers, by worker.
        outbox: What concerns the controller (its deliveries are done).
        steps: Optimiser steps taken.
        both: Whether a forward firing was the backward of its rows too: a loss is inside.
        held: Parts that have begun or ceased to hold a step back: name to whether it holds.
        letters: For other copies of the model.
        taken: Letters that were taken, where that is what it did; its rows are their number.
    """

    node: str
    part: str | None
    forward: bool
    rows: int
    both: bool = False
    cells: int = 0
    nbytes: int = 0
    elsewhere: list[tuple[int, Delivery]] = field(default_factory=list)
    outbox: Outbox = field(default_factory=Outbox)
    steps: list[StepTaken] = field(default_factory=list)
    held: dict[str, bool] = field(default_factory=dict)
    letters: list[Letter] = field(default_factory=list)
    taken: list[Letter] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """Instances that have finished.

    Args:
        turns: int64, an entry for each: its number among those of its copy of the graph, or of all.
        trained: All that have finished in training so far.
        copy: The copy of the graph that they were of; None: parts of all copies hear of them.
    """

    turns: IntArray
    trained: int
    copy: int | None = None


def cells_of(batches: Sequence[Forward | Backward]) -> int:
    """Payload rows, those of bundles counted each."""
    return sum(len(b) if b.lengths is None else int(b.lengths.sum()) for b in batches)


def nbytes_of(first: Forward | Backward, messages: int) -> int:
    """Bytes of so many messages, of which the first batch stands for all."""
    columns = first.payload if isinstance(first, Forward) else first.gradient or ()
    total = 0
    for x in columns:
        if x is not None and x.shape[0]:
            total += x.nbytes if first.index is None else x.nbytes * len(first.index) // x.shape[0]
    return total * messages // len(first)


def taking(taken: Taken) -> Firing:
    """An exchange has had letters; that is a firing of its own."""
    letters = [*taken.letters]
    rows = sum(x.count for x in letters)
    return Firing(f"{taken.part} exchange", taken.part, True, rows, taken=letters)


def story_of(
    node: AbstractNode, port: int, batches: Sequence[Forward | Backward], router: Router
) -> str:
    """Node, part, direction, shapes, instances."""
    part = f" of part '{node.part_name}'" if node.part_name is not None else ""
    way = "backward" if port == BACKWARD else f"forward (port {port})"
    first = batches[0]
    columns = first.payload if isinstance(first, Forward) else first.gradient or ()
    rows = sum(map(len, batches))
    loss = f" with loss '{node.loss_name}'" if node.loss_name is not None else ""
    told = f"'{node.name}'{loss}{part}, {way}, {rows} rows, payload {shapes_of(columns) or 'zero'}"
    if isinstance(first, Forward):
        slots = np.concatenate([b.state[INSTANCE] for b in batches if isinstance(b, Forward)])
        return f"{told}, {node.place.arena.describe_several(slots)}"
    answered = np.concatenate([b.rows for b in batches if isinstance(b, Backward)])
    return f"{told}, {router.told(answered)}"
