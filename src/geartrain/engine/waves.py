"""How many instances begin together on a worker that has a stock of them: those of whole updates.

    update    |    0    |    1    |    2    |    3    |
    begin     =========== 0 and 1 =|======= 2 and 3 ==|     when the worker has nothing else to do

Rows of a loop that enter at one time go round as one wave. If others began as soon as an update's
were through, waves would be of one update each, and firings as few rows as that; and of an update
that is begun in two waves each goes back by itself.
"""

from __future__ import annotations

from typing import Final, final

_MOST: Final = 4  # updates in a wave: more rows gain little, and make gradients older


@final
class Waves:
    """Of one worker in one pass.

    Args:
        update: Instances of an update.
        begun: Of the present update, in the pass before.
    """

    def __init__(self, update: int, begun: int) -> None:
        self._update, self._begun = update, begun % update

    def next(self, room: int) -> int:
        """Instances of the next wave.

        Args:
            room: For how many there is room.
        """
        whole = min(_MOST, (self._begun + room) // self._update)
        return min(room, whole * self._update - self._begun) if whole else room

    def begin(self, instances: int) -> None:
        """So many have begun."""
        self._begun = (self._begun + instances) % self._update
