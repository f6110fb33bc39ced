"""What the engine may be told: numbers and policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch

from geartrain.bounds import ACTIVE, MOST_ACTIVE, MOST_ROWS, ROWS, require_at_most
from geartrain.engine.controller import AbstractRamp, Ramp
from geartrain.engine.instrument import AbstractMeter
from geartrain.engine.mailbox import AbstractPolicy, Sweeps
from geartrain.engine.portion import AbstractPortion, UpdatesWorth
from geartrain.frames.precision import Precision


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine may be told.

    Args:
        max_active: Most instances in flight.
        ramp: How training gets there.
        max_rows: Most rows in one firing.
        policy: Makes the policy of each worker, from its index.
        portion: How much one firing takes.
        drain: Admit only when nothing is in flight: synchronous minibatches.
        precision: Of rows and products.
        meter: Measures what nodes compute in training, or None.
        device: Where the rows of instances are fed; None: where they are, or on the host if all
            modules are there.
        max_rounds: How often rows of one instance may go round loops, as ``Rounds`` counts.
        reach: Whether loops and sections that run whole do so together with all that is near them,
            up to the losses, where it lives on one worker; else each operator beside them is a
            node, which is measured, placed and traced by itself.
    """

    max_active: int = 64
    ramp: AbstractRamp = field(default_factory=Ramp)
    max_rows: int = 4096
    policy: Callable[[int], AbstractPolicy] = lambda worker: Sweeps()
    portion: AbstractPortion = field(default_factory=UpdatesWorth)
    drain: bool = False
    precision: Precision = "full"
    meter: AbstractMeter | None = None
    device: torch.device | None = None
    max_rounds: int | None = None
    reach: bool = True

    def __post_init__(self) -> None:
        if self.max_active < 1 or self.max_rows < 1:
            raise ValueError(
                f"Settings(max_active={self.max_active}, max_rows={self.max_rows}): give 1 or more"
            )
        require_at_most(f"max_active={self.max_active}", self.max_active, MOST_ACTIVE, ACTIVE)
        require_at_most(f"max_rows={self.max_rows}", self.max_rows, MOST_ROWS, ROWS)
        if self.max_rounds is not None and self.max_rounds < 1:
            raise ValueError(f"max_rounds={self.max_rounds}: give 1 or more, or None")
