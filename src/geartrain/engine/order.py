"""Where in the graph a queue stands: the order in which a sweep comes by, and the loops around it.

    leaf 1 ─► ⟲ group 2 ─► cell 3 ⟲ ─► readout 4 ─► loss 5        forward, and back again
    leaf 10 ◄─ ⟲ group 9 ◄─ cell 8 ⟲ ◄─ readout 7 ◄─ (loss answers where it stands)

A loop takes up places that follow one another, from where rows enter it to where they enter again,
and so does a loop in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from geartrain.graph.wiring import Wiring

Loop: TypeAlias = tuple[int, int]
"""The first and the last place of a loop."""


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Where a queue stands.

    Args:
        place: In the order of the graph, there and back.
        loops: Around it, the innermost first.
    """

    place: int
    loops: tuple[Loop, ...] = ()


def standings(wiring: Wiring) -> dict[int, tuple[Standing, Standing]]:
    """Node number to where it stands: with its rows, and with its answers behind all rows."""
    readers: dict[int, set[int]] = {number: set() for number in wiring.operators}
    for (source, _), (reader, _) in wiring.readers.items():
        readers[source].add(reader)
    line = _Line(readers)
    last = 2 * len(readers)
    return {
        number: (line.there(operator), line.back(operator, last))
        for number, operator in wiring.operator_of.items()
    }


@final
class _Line:
    """Operators one behind the other.

    Args:
        readers: Operator to those that its rows may go to next.
    """

    def __init__(self, readers: Mapping[int, Collection[int]]) -> None:
        self._places: dict[int, int] = {}
        self._loops: list[Loop] = []
        self._lay(readers)
        self._loops.sort(key=lambda loop: loop[1] - loop[0])

    def there(self, operator: int) -> Standing:
        place = self._places[operator]
        return Standing(place, tuple((a, b) for a, b in self._loops if a <= place <= b))

    def back(self, operator: int, last: int) -> Standing:
        there = self.there(operator)
        return Standing(last - there.place, tuple((last - b, last - a) for a, b in there.loops))

    def _lay(self, readers: Mapping[int, Collection[int]]) -> None:
        """Give places to these operators, behind those that have some."""
        reached = {operator: _reached(operator, readers) for operator in readers}
        before = dict.fromkeys(readers, 0)  # from how many of them rows may come here
        for all_ in reached.values():
            for operator in all_:
                before[operator] += 1
        for operator in sorted(readers, key=lambda o: (before[o], o)):
            if operator in self._places:
                continue
            loop = {o for o in reached[operator] if operator in reached[o]}
            if not loop:
                self._places[operator] = len(self._places)
                continue
            first = len(self._places)
            entry = min(
                loop, key=lambda o: (not any(o in readers[s] for s in readers.keys() - loop), o)
            )
            self._lay({o: (loop & set(readers[o])) - {entry} for o in loop})
            self._loops.append((first, len(self._places) - 1))


def _reached(start: int, readers: Mapping[int, Collection[int]]) -> set[int]:
    """The operators that rows may come to from this one; itself, if by a loop."""
    seen: set[int] = set()
    ahead = [start]
    while ahead:
        for reader in readers[ahead.pop()]:
            if reader not in seen:
                seen.add(reader)
                ahead.append(reader)
    return seen
