"""How long a worker has had nothing to do in a pass: it counts, and the parent knows the end.

    worker   |began|  work  |wait|  work  |wait ........|  hears that the pass is over
    parent                                       |over

Clocks are those of each; the parent knows how far a worker's is behind its own.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, final

_LATEST: Final = 16
"""Waits that are told one by one: the pass may have been over before some of them."""


@final
class Waiting:
    """Of a worker; seconds of its own clock.

    Args:
        now_s: When it begins to work.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s, self._before_s = now_s, 0.0
        self._latest: deque[tuple[float, float]] = deque()

    def add(self, since_s: float, until_s: float) -> None:
        """It has waited for so long."""
        if len(self._latest) == _LATEST:
            since, until = self._latest.popleft()
            self._before_s += until - since
        self._latest.append((since_s, until_s))

    def document(self) -> dict[str, Any]:
        """What the parent is told, JSON."""
        return {"began": self._began_s, "waited": self._before_s, "latest": [*self._latest]}


def waited_of(told: Any, *, ahead_s: float, apart_s: float, over_s: float) -> float:
    """Seconds of a pass in which a worker waited.

    To hear of the end takes a while, on a busy machine longer, and is not of the pass any more.

    Args:
        told: What ``Waiting.document`` told.
        ahead_s: What is to be added to its clock for that of the pass.
        apart_s: When all had what they were handed; until then nobody works.
        over_s: When the pass was over; 0: it has not come to its end.
    """
    waited = told["waited"]
    for since, until in told["latest"]:
        end = until + ahead_s
        waited += max(min(end, over_s or end) - since - ahead_s, 0.0)
    return float(max(apart_s, told["began"] + ahead_s) + waited)
