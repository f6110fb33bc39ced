"""What copies of a model have said and done, for those who watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from geartrain.sharing.letters import Ledger


@final
@dataclass(frozen=True, slots=True)
class Totals:
    """Since the beginning; an entry a copy.

    Args:
        ledgers: Of letters, all parts together.
        rounds: Own gradients.
        finished: Instances finished in training.
        present: Whether it takes part now.
        exchange: How they exchange.
        distance: Root mean square distance of the copies from their mean, all parts together.
    """

    ledgers: tuple[Ledger, ...]
    rounds: tuple[int, ...]
    finished: tuple[int, ...]
    present: tuple[bool, ...]
    exchange: str
    distance: float
