"""What befalls imagined workers: they pause, leave, join and die."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from geartrain.bounds import require_number, require_whole


@final
@dataclass(frozen=True, slots=True)
class Pause:
    """A worker stops for a while; what comes for it waits.

    Args:
        worker: Which.
        at_s: From then on, in virtual seconds of training.
        for_s: So long.
    """

    worker: int
    at_s: float
    for_s: float


@final
@dataclass(frozen=True, slots=True)
class Leave:
    """The copies on a worker take part no more: what they have in flight finishes, letters to them
    are lost and counted."""

    worker: int
    at_s: float


@final
@dataclass(frozen=True, slots=True)
class Join:
    """The copies on a worker take part from then on, with weights and optimiser of one of those
    that do; before it they are absent, unless they have left earlier and come back."""

    worker: int
    at_s: float


@final
@dataclass(frozen=True, slots=True)
class Die:
    """A worker dies: its copies take part no more, and what they had in flight is fed to others.

    A firing that is under way is lost, and letters that it would have sent; those to the copies are
    lost and counted. After a ``Join`` they begin with weights and optimiser of another copy.
    """

    worker: int
    at_s: float


Event: TypeAlias = Pause | Leave | Join | Die


def require_event(event: Event, workers: int) -> None:
    what = f"Simulated(events=[{event}])"
    wanted = f"a worker from 0 to {workers - 1} and at least 0 seconds"
    require_whole(what, event.worker, 0, wanted, most=workers - 1)
    for seconds in (event.at_s, event.for_s if isinstance(event, Pause) else 0):
        require_number(what, seconds, wanted, least=0)
