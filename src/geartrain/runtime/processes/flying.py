"""How many bytes are under way between processes, and whether more instances may be admitted.

    a worker      tells the parent when much of what it has sent is not read yet, and when it is
    the parent    adds up, its own too, and admits nothing for as long as that is too much

A send never waits, as two that wait for one another would wait for ever; so what cannot travel yet
lies in memory, and admission is all that bounds it.
"""

from __future__ import annotations

import logging
from typing import Final, final

log = logging.getLogger("geartrain.runtime")

MOST_FLYING: Final = 256 << 20
"""Bytes between all processes; well above what receivers have read and not said, 1 MiB each."""
_TOLD: Final = 8  # a worker tells of one in so many of them


@final
class Flying:
    """What is under way, as the parent knows it.

    Args:
        most: Bytes.

    Attributes:
        limits: Whether this bound keeps instances from being admitted now.
        limited: How many times it has begun to.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._told: dict[int, int] = {}
        self.limits = False
        self.limited = 0

    def told(self, worker: int, nbytes: int) -> None:
        """A worker has so many under way to others."""
        self._told[worker] = nbytes

    def has_room(self, own: int, active: int) -> bool:
        """Whether more may be admitted.

        Args:
            own: Bytes under way from this process.
            active: Instances in flight; without any, all that is under way will be read.
        """
        total = own + sum(self._told.values())
        before, self.limits = self.limits, active > 0 and total >= self._most
        if self.limits and not before:
            self.limited += 1
            if self.limited == 1:
                log.info(
                    "%.3g MiB are under way between processes, and no more instances are admitted "
                    "before others have read some: memory is what limits, not max_active",
                    total / 2**20,
                    extra={"screen": True},
                )
        return not self.limits


@final
class Unread:
    """What one worker has under way: says when the parent should hear of it.

    Args:
        most: Bytes between all processes.
    """

    def __init__(self, most: int) -> None:
        self._much = max(1, most // _TOLD)
        self._told = 0

    def news(self, flying: int) -> int | None:
        """What to tell: so many bytes; None: nothing that matters has changed."""
        grown = flying >= max(self._much, 2 * self._told)
        read = self._told > 0 and flying < max(self._much, self._told) // 2
        if not (grown or read):
            return None
        self._told = flying if grown or flying >= self._much else 0
        return self._told
