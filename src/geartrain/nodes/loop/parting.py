"""How many parts rows have that become rows themselves: a plan made ahead has to know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from geartrain.nodes.loop.door import Came
from geartrain.nodes.loop.values import AbstractValue, Parted, Stored


@final
class Parting:
    """That of a loop: rows that enter tell it; those that modules make have as many as in the turn
    before, or as the check of the graph has seen, unless a module is changed.

    Args:
        parted: Values whose rows are parts of others.
        entries: What rows hold that enter.
    """

    def __init__(self, parted: Sequence[Parted], entries: Sequence[AbstractValue]) -> None:
        self._entering = [
            (each, k) for each in parted for k, v in enumerate(entries) if v is each.source
        ]
        self._parted = parted
        self.made = len({id(each) for each, _ in self._entering}) < len(parted)
        """Whether modules make some of these rows, so that their parts are those of before."""

    def count(self, came: Sequence[Came]) -> dict[int, int] | None:
        """The parts of a row of each value that has some, as far as is known before anything is
        computed; None: of some value they are not.

        Args:
            came: By entry, rows that enter.
        """
        for parted, k in self._entering:
            if came[k].rows.size:
                parted.parts = came[k].columns[0].shape[1]
        found = {p.source.number: p.parts for p in self._parted if isinstance(p.source, Stored)}
        known = len(found) == len(self._parted) and all(found.values())
        return found if known else None
