"""How long a worker without work waits before it says that it has none.

in a pass      a moment: rows of others may come at once, and a message has a cost
as it ends     not at all: all have been asked, and each of several rounds would be as late
"""

from __future__ import annotations

from typing import Final, final

IDLE_S: Final = 0.02


@final
class Patience:
    """Of one worker in one pass."""

    def __init__(self) -> None:
        self._asked = False

    @property
    def seconds(self) -> float:
        """Without work, until it says so."""
        return 0.0 if self._asked else IDLE_S

    def asked(self) -> None:
        """The parent wants to know how things stand."""
        self._asked = True

    def fired(self, *, letters: bool) -> None:
        """There was something to fire: the pass is not at its end, or goes on.

        Args:
            letters: Whether that was to take letters: what is left of updates comes at the end.
        """
        self._asked &= letters
