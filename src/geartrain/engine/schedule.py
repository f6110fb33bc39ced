"""What runs when, and where, as a user may say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import final

from geartrain.bounds import require_whole
from geartrain.engine.controller import AbstractRamp, Ramp
from geartrain.engine.mailbox import AbstractPolicy
from geartrain.kinds import require_entries, require_truth


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

    Raises:
        ValueError: A number is out of range.
        TypeError: A number is not whole, or something is of another kind.
    """

    ramp: AbstractRamp = field(default_factory=Ramp)
    drain: bool = False
    policy: Callable[[int], AbstractPolicy] | None = None
    max_rows: int = 4096
    max_rounds: int | None = None
    placement: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole(f"Schedule(max_rows={self.max_rows!r})", self.max_rows, 1)
        if self.max_rounds is not None:
            what = f"Schedule(max_rounds={self.max_rounds!r})"
            require_whole(what, self.max_rounds, 1, "1 or more, or None")
        require_truth("Schedule", drain=self.drain)
        wanted = "part or node names with their workers: {'cell': 0}"
        if self.placement is not None:
            require_entries("Schedule", str, Integral, wanted, placement=self.placement)
        for name, fits, wanted in (
            ("ramp", isinstance(self.ramp, AbstractRamp), "a ramp, such as Ramp(over=0)"),
            (
                "policy",
                self.policy is None or callable(self.policy),
                "what makes a policy of a worker's index: lambda worker: BackwardFirst()",
            ),
        ):
            if not fits:
                raise TypeError(f"Schedule({name}={getattr(self, name)!r:.80}): give {wanted}")
