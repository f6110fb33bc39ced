"""How long a worker has had nothing to do in a pass: it counts, and the parent knows the end.

    worker   |began|  work  |wait|  work  |wait ........|  hears that the pass is over
    parent                                       |over

Clocks are those of each; the parent knows how far a worker's is behind its own.
"""

from __future__ import annotations

from typing import Any, final


@final
class Waiting:
    """Of a worker; seconds of its own clock.

    Args:
        now_s: When it begins to work.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = self._since_s = self._until_s = now_s
        self._before_s = 0.0

    def add(self, since_s: float, until_s: float) -> None:
        """It has waited for so long."""
        self._before_s += self._until_s - self._since_s
        self._since_s, self._until_s = since_s, until_s

    def document(self) -> dict[str, Any]:
        """What the parent is told, JSON."""
        latest = [self._since_s, self._until_s]
        return {"began": self._began_s, "waited": self._before_s, "latest": latest}


def waited_of(told: Any, *, ahead_s: float, apart_s: float, over_s: float) -> float:
    """Seconds of a pass in which a worker waited.

    To hear of the end takes a while, on a busy machine longer, and is not of the pass any more.

    Args:
        told: What ``Waiting.document`` told.
        ahead_s: What is to be added to its clock for that of the pass.
        apart_s: When all had what they were handed; until then nobody works.
        over_s: When the pass was over; 0: it has not come to its end.
    """
    began, (since, until) = told["began"] + ahead_s, (each + ahead_s for each in told["latest"])
    latest = min(until, over_s or until) - since
    return float(max(apart_s, began) + told["waited"] + max(latest, 0.0))
