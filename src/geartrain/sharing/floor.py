"""How old rows may get where whoever steps does not see them leave.

    worker   rows in flight, gradients not handed in, version to look at ─► the oldest: its floor
    owner    steps to version v + 1 if no floor is more than ``max_staleness`` below that

A floor only rises, and is told after the gradients that it has left behind. So a floor that has
come holds for whatever is still to come from there, and nobody is asked or waited for. It is the
bound of SSP, Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel
parameter server", for each part, with steps that wait in place of workers that do.
"""

from __future__ import annotations

from typing import final

from geartrain.frames.message import IntArray
from geartrain.parts.staleness import Flights


@final
class Floor:
    """The oldest version that rows of one worker saw, or may yet see.

    Args:
        version: That it has.
    """

    def __init__(self, version: int) -> None:
        self._flights = Flights()
        self._gathered: int | None = None
        self._told = version

    def leave(self, version: int, messages: int) -> None:
        """So many have left that saw this version."""
        self._flights.leave(version, messages)

    def gather(self, versions: IntArray, *, left: bool) -> None:
        """Their gradients are there, and wait to be handed in.

        Args:
            versions: That they saw.
            left: Whether they had left before.
        """
        if left:
            self._flights.come_back(versions)
        if versions.size:
            oldest = int(versions.min())
            self._gathered = oldest if self._gathered is None else min(self._gathered, oldest)

    def hand_in(self) -> None:
        """All that was gathered goes to the owner."""
        self._gathered = None

    def holds_up(self, version: int) -> bool:
        """Whether what has been gathered is older than this."""
        return self._gathered is not None and self._gathered < version

    def at(self, version: int) -> int:
        """The floor of a worker that has this version."""
        found = (version, self._flights.oldest, self._gathered)
        return min(x for x in found if x is not None)

    def news(self, version: int) -> int | None:
        """The floor, if it has risen since this was last asked."""
        now = self.at(version)
        if now == self._told:
            return None
        self._told = now
        return now
