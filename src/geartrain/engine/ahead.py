"""What workers are given ahead of time, and how much: whole instances, or rows of them in lots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from geartrain.engine.controller import ControllerState
from geartrain.engine.settings import Settings
from geartrain.parts.part import PartState
from geartrain.parts.triggers import Instances
from geartrain.sharing.assignment import Stocked, Together
from geartrain.sharing.sharing import AbstractSharingState

_LOTS: Final = 2  # that wait: while one is used up, the next is on its way
_LOT_BYTES: Final = 2 << 20
"""Of the rows of a lot; what is larger gains nothing by company."""


@final
class Ahead:
    """How an engine's workers are given instances before others have finished.

    Args:
        controller, settings, parts, sharing: The engine's.
    """

    def __init__(
        self,
        controller: ControllerState,
        settings: Settings,
        parts: Mapping[str, PartState],
        sharing: AbstractSharingState,
    ) -> None:
        self._controller, self._settings = controller, settings
        self._parts, self._sharing = parts, sharing

    def stock_up(self) -> bool:
        """Give workers instances ahead of time, where these live on one wholly; whether so."""
        assignment = self._controller.assignment
        if isinstance(assignment, Stocked):
            assignment.ahead = 1.0
            triggers = [part.trigger for part in self._parts.values() if not part.once]
            several = [each.n for each in triggers if isinstance(each, Instances)]
            assignment.update = max(several, default=1)
            return True
        return False

    def give_together(self, instances: int, nbytes: int) -> None:
        """Have workers on which instances live wholly be given so many at a time, or more.

        Args:
            instances: As above.
            nbytes: Of the rows of one instance, about.
        """
        assignment = self._controller.assignment
        if isinstance(assignment, Stocked):
            assignment.lot = min(instances, _LOT_BYTES // max(1, nbytes))

    @property
    def may_go(self) -> bool:
        """Whether workers on which instances live in parts may be given rows ahead of time.

        They then hear that instances have finished when others are in flight already. Not where
        steps count these, where a part may have admission wait, where all that are in flight go in
        together, nor with one in flight, which is to see what the one before has made of all.
        """
        settings = self._settings
        if not isinstance(self._controller.assignment, Together) or self._sharing.talks:
            return False
        return (
            settings.max_active > 1
            and not settings.drain
            and all(
                part.rules.max_staleness is None and (part.once or part.trigger.unit != "instances")
                for part in self._parts.values()
            )
        )

    def go(self, nbytes: int) -> None:
        """Have workers be given instances ahead of time, as ``may_go``.

        Args:
            nbytes: Of the rows of one instance, about.
        """
        assignment = self._controller.assignment
        if isinstance(assignment, Together):
            many = max(1, _LOT_BYTES // max(1, nbytes))
            assignment.lot = min(self._controller.limit, many)
            assignment.ahead = _LOTS * assignment.lot
