"""How often a worker that has work looks for messages.

    something came, or its stock is used up    at once, or nearly
    nothing comes                              twice as rarely each time, down to a bound

On whom instances live wholly waits for no rows of others, and a look costs a tenth of a small
firing, as nothing of what it reads is in a cache any more.
"""

from __future__ import annotations

from typing import Final, final

SOON_S: Final = 0.002
RARELY_S: Final = 0.016


@final
class Looks:
    """Of one worker in one pass; seconds are of whatever clock its caller has."""

    def __init__(self) -> None:
        self._looked_s, self._patience_s = 0.0, SOON_S

    def due(self, now_s: float) -> bool:
        """Whether it is time to look."""
        return now_s - self._looked_s >= self._patience_s

    def looked(self, now_s: float, *, wants: bool) -> None:
        """It has looked.

        Args:
            now_s: The time.
            wants: Whether more may be on its way that is wanted soon.
        """
        self._looked_s = now_s
        self._patience_s = SOON_S if wants else min(2 * self._patience_s, RARELY_S)
