"""The clock of a baseline: what is trained from one evaluation to the next.

    lap ─► add, add, ... ─► ends here? ─ yes ─► clock stands ─► validate ─► entry ─► resume ─► add
                                  └─ no ─► add

The clock runs while the network is trained, the order of an epoch and collation included, and
stands while it is validated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import final

from geartrain.baselines.baseline import Epoch
from geartrain.data.points import evaluation_points


@final
class Lap:
    """Counts from one evaluation to the next; the clock starts at once.

    Evaluations come after the first minibatch that is at or past one of the points at which a
    ``Session`` evaluates, and at the end of an epoch.

    Args:
        length: Examples of an epoch.
        every: Share of an epoch between two evaluations; None: the end alone.
        instances: Of an epoch, as the recipe counts them; None: as many as examples.
    """

    def __init__(
        self, length: int, every: float | None = None, *, instances: int | None = None
    ) -> None:
        self._length = length
        self._points = evaluation_points(length, every)
        self._share = 1.0 if instances is None else instances / length
        self._epoch, self._done, self._entered = 1, 0, 0
        self._loss, self._weight = 0.0, 0
        self._seconds, self._begin = 0.0, time.perf_counter()

    def add(self, loss: float, examples: int, weight: int | None = None) -> None:
        """Count a minibatch.

        Args:
            loss: Summed over it.
            examples: In it.
            weight: What the mean of the losses is over; None: examples.
        """
        self._done += examples
        self._loss += loss
        self._weight += examples if weight is None else weight

    def ends(self) -> bool:
        """Whether to evaluate now; the clock then stands."""
        point = next(p for p in self._points if p > self._entered)
        if self._done < point:
            return False
        self._seconds += time.perf_counter() - self._begin
        return True

    def entry(self, valid: Mapping[str, float]) -> Epoch:
        """What the lap came to; the next one counts from zero."""
        is_whole = self._done == self._length
        found = Epoch(
            epoch=self._epoch if is_whole else self._epoch - 1 + self._done / self._length,
            seconds=self._seconds,
            instances=self._share * (self._done - self._entered),
            loss=self._loss / self._weight,
            valid=valid,
        )
        self._entered, self._loss, self._weight = self._done, 0.0, 0
        if is_whole:
            self._epoch, self._done, self._entered = self._epoch + 1, 0, 0
        return found

    def resume(self) -> None:
        """Let the clock run again."""
        self._begin = time.perf_counter()
