"""What an error says of the call that it was raised in, in a loop that runs whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from geartrain.errors import GeartrainError, WorkerError
from geartrain.frames.message import INSTANCE, IntArray, shapes_of
from geartrain.nodes.loop.plan import JointCall
from geartrain.nodes.loop.turn import Inner, Turn


def story_of(
    inner: Inner,
    way: str,
    tensors: Sequence[Tensor | None],
    slots: IntArray,
    number: int,
    turn: Turn,
) -> str:
    """Module, part, direction, which call, shapes, instances."""
    part = f" of part '{inner.weights.name}'" if inner.weights is not None else ""
    of = "" if turn.plan.run is not None else f" of {len(turn.plan.calls)}"
    return (
        f"'{inner.name}'{part}, {way}, call {number + 1}{of} of its loop, "
        f"{slots.size} rows, payload {shapes_of(tensors) or 'none'}, "
        f"{inner.place.arena.describe_several(slots)}"
    )


def blame(
    error: Exception,
    inner: Sequence[Inner],
    way: str,
    tensors: Sequence[Tensor | None],
    together: JointCall,
    turn: Turn,
) -> None:
    """Say in an error of calls that were taken together whose rows they were.

    Raises:
        WorkerError: In place of one that is not ours.
    """
    names = "', '".join(one.name for one in inner)
    slots = together.rows.state[INSTANCE]
    one = replace(inner[0], name=names, weights=None)
    story = story_of(one, way, tensors, slots, together.number, turn)
    if not isinstance(error, GeartrainError):
        raise WorkerError(f"{type(error).__name__} in nodes {story}: {error}") from error
    error.add_note(story)
