"""What runs when, and where, as a user may say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from geartrain.engine.controller import AbstractRamp, Ramp
from geartrain.engine.mailbox import AbstractPolicy


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What runs when, and where.

    Args:
        ramp: How training gets to ``max_active`` instances in flight; ``Ramp(over=0)`` starts at
            once, ``Synchronous(n)`` after n instances, one at a time.
        drain: Admit only when nothing is in flight: minibatches of ``max_active``, the synchronous
            way; with ``update_every=Instances(max_active)`` and no ramp it is minibatch training.
            Not where workers share weights (``SharedWeights``), as each gathers updates by itself.
        policy: Makes the firing policy of a worker, from its index; None: ``Sweeps`` for each.
        max_rows: Most rows in one firing.
        max_rounds: How often rows of one instance may go round loops, all of them together: a cycle
            in data would have them do so for ever. None: 100,000 times, and 1,000 more for each of
            its vertices and edges.
        placement: Part or node name to worker; what is not named is placed automatically, after a
            short measurement where there are several workers.
    """

    ramp: AbstractRamp = field(default_factory=Ramp)
    drain: bool = False
    policy: Callable[[int], AbstractPolicy] | None = None
    max_rows: int = 4096
    max_rounds: int | None = None
    placement: Mapping[str, int] = field(default_factory=dict)
