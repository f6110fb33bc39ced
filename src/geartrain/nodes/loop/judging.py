"""Losses in a loop that runs whole: its rows are judged as soon as they have been computed.

    rows that come to a loss ─► one loss a row ─► their gradient, where they are held

From there the way back begins. Nothing leaves, so nothing waits: instances go forward and back in
one firing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from geartrain.nodes.loop.plan import joined
from geartrain.nodes.loop.tensors import detached
from geartrain.nodes.loop.turn import Turn
from geartrain.nodes.loop.values import AbstractValue
from geartrain.nodes.loss import Objective


@final
@dataclass(frozen=True, slots=True)
class Judged:
    """A loss in a loop.

    Args:
        objective: What it computes.
        source: What rows that come to it hold.
    """

    objective: Objective
    source: AbstractValue


def judge(turn: Turn, losses: Sequence[Judged], *, train: bool) -> None:
    """Count the losses of a turn; in training rows get their gradients.

    Args:
        turn: All of it has been computed.
        losses: Those of its loop.
        train: Whether gradients are wanted.

    Raises:
        GeartrainError: As ``Objective.measure``.
    """
    held = turn.held
    for each, came in zip(losses, turn.plan.judged, strict=True):
        if not came:
            continue
        rows = joined(came)
        lengths = each.source.lengths(turn.plan.numbers, rows.numbers)
        payload = each.source.gather(held, rows.numbers)
        if turn.tape is not None:
            payload = detached(payload)
        gradient = each.objective.measure(payload, rows.state, lengths, train)
        if gradient is not None:
            each.source.scatter(held, rows.numbers, gradient)
