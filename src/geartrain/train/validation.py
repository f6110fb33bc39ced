"""Validation within a call of ``fit``: which copies agree, which model is best, what is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

from geartrain.engine.instrument import EpochEnded
from geartrain.errors import DataError
from geartrain.runtime.interrupt import Interruptible
from geartrain.train.results import Reached, Target
from geartrain.train.source import Source
from geartrain.train.state import State


@final
class Validation:
    """Evaluates what has been trained, and compares.

    Args:
        state: Of the session.
        data: To validate on; None: nothing is.
        until: The target of the call; None: the loss says what is better.
        epochs: Of the call.
        interrupt: Is asked before each evaluation.
    """

    def __init__(
        self,
        state: State,
        data: Source | None,
        until: Target | None,
        epochs: int,
        interrupt: Interruptible,
    ) -> None:
        self._s, self._data, self._until, self._epochs = state, data, until, epochs
        self._interrupt = interrupt
        self._target = until or Target("loss", 0.0, at_least=False)

    def metrics(self) -> Mapping[str, float]:
        """Of the model as it is; none without data."""
        return {} if self._data is None else self._validate(self._data)

    def agree(self) -> None:
        """Write the consensus of copies into the user's modules."""
        sharing = self._s.sharing
        sharing.agree()
        candidates = sharing.candidates()
        if candidates and self._data is not None:
            sharing.agree(self._best_of(candidates, self._data))

    def _best_of(self, copies: Sequence[int], data: Source) -> int:
        """The copy that validates best; each of them is evaluated."""
        best, found = math.nan, 0
        for k in copies:
            self._s.sharing.agree(k)
            value = self._validate(data).get(self._target.metric, math.nan)
            if self._target.better(value, best):
                best, found = value, k
        return found

    def is_best(self, event: EpochEnded) -> bool:
        """Whether nothing of before has validated better; it is noted then."""
        at = self._s.position
        if not event.valid:
            return False
        target = self._target
        value = event.valid.get(target.metric, math.nan)
        if at.best is None or at.best_of != target.metric or target.better(value, at.best):
            at.best, at.best_of = value, target.metric
            return True
        return False

    def reached(self, event: EpochEnded) -> Reached | None:
        """The target of the call, if it is reached."""
        if self._until is None or not self._until.reached(event.valid):
            return None
        value = event.valid[self._until.metric]
        return Reached(self._until.metric, value, self._s.position.train_seconds, event.epoch)

    def _validate(self, data: Source) -> Mapping[str, float]:
        self._interrupt.check()
        at = self._s.position
        found = self._s.evaluate(data, at.epoch, self._epochs, at.train_seconds)
        require_some(found.instances)
        return found.metrics


def require_some(instances: int | None) -> None:
    """Refuse validation data that tell nothing.

    Args:
        instances: How many there are; None: it is not known.

    Raises:
        DataError: There is none.
    """
    if instances == 0:
        raise DataError(
            "the validation data gave no instance, so there is nothing to measure: give some, or "
            "leave valid= out"
        )
