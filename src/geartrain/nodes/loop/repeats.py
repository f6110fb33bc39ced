"""Whether a loop that is planned turn by turn comes to where it was, over and over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from geartrain.frames.message import IntArray

LONG_AFTER: Final = 4096
"""Turns, a second or so, after which it is looked for."""
_OFTEN: Final = 4
_TURNS: Final = 512


@final
class Repeats:
    """Compares what waits at modules with what waited at a turn that is a power of two.

    Functions that look at columns say the same of the same rows, but where they draw numbers: so
    it has to come back again and again after as many turns, and for many of them.
    """

    def __init__(self) -> None:
        self.turns = 0
        self._was: list[list[IntArray]] = []
        self._met = self._rounds = self._period = self._times = 0

    def look(self, waiting: Sequence[Sequence[IntArray]], rounds: int) -> bool:
        """A turn after ``LONG_AFTER`` others begins.

        Args:
            waiting: By stage that lies on a loop or before one, the columns of rows.
            rounds: How often any have gone round.

        Returns:
            Whether it goes on like this without end.
        """
        if not self._was or not self.turns & (self.turns - 1):
            self._was = [list(came) for came in waiting]
            self._met, self._period, self._times = self.turns, 0, 0
            self._rounds = rounds
        elif rounds > self._rounds and self._is_as_it_was(waiting):
            self._rounds = rounds
            period, self._met = self.turns - self._met, self.turns
            self._times = self._times + 1 if period == self._period else 1
            self._period = period
            return self._times >= _OFTEN and self._times * period >= _TURNS
        return False

    def _is_as_it_was(self, waiting: Sequence[Sequence[IntArray]]) -> bool:
        return all(
            len(came) == len(was)
            and all(
                a.shape == b.shape and bool((a == b).all()) for a, b in zip(came, was, strict=True)
            )
            for came, was in zip(waiting, self._was, strict=True)
        )
