"""Where in the graph a queue stands: the order in which a sweep comes by, and the loops around it.

    leaf 1 ─► ⟲ group 2 ─► cell 3 ⟲ ─► readout 4 ─► loss 5        forward, and back again
    leaf 10 ◄─ ⟲ group 9 ◄─ cell 8 ⟲ ◄─ readout 7 ◄─ (loss answers where it stands)

A loop takes up places that follow one another, from where rows enter it to where they enter again,
and so does a loop in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, final

from geartrain.graph.cycles import components
from geartrain.graph.operator import Port
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
    line, there_is = _line(tuple(wiring.operators), tuple(wiring.readers.items()))
    last = 2 * there_is
    return {
        number: (line.there(operator), line.back(operator, last))
        for number, operator in wiring.operator_of.items()
    }


@lru_cache(maxsize=16)
def _line(operators: Sequence[int], leads: Sequence[tuple[Port, Port]]) -> tuple[_Line, int]:
    """Operators one behind the other, and how many; engines of one graph have the same ones.

    Args:
        operators: Their numbers.
        leads: Output ports, and the input ports that these lead to.
    """
    readers: dict[int, set[int]] = {number: set() for number in operators}
    for (source, _), (reader, _) in leads:
        readers[source].add(reader)
    return _Line(readers), len(readers)


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
        found = components(readers)
        before = _before(readers, found)
        loop_of = {operator: loop for loop in found for operator in loop}
        for operator in sorted(readers, key=lambda o: (before[o], o)):
            if operator in self._places:
                continue
            loop = loop_of[operator]
            if len(loop) == 1 and operator not in readers[operator]:
                self._places[operator] = len(self._places)
                continue
            first = len(self._places)
            entered = {o for s in readers.keys() - loop for o in readers[s]}
            entry = min(loop, key=lambda o: (o not in entered, o))
            self._lay({o: (loop & set(readers[o])) - {entry} for o in loop})
            self._loops.append((first, len(self._places) - 1))


def _before(
    readers: Mapping[int, Collection[int]], components: Sequence[frozenset[int]]
) -> dict[int, int]:
    """From how many operators rows may come to each.

    Args:
        readers: Operator to those that its rows may go to next.
        components: Those that feed one another, together, in the order in which rows come.
    """
    bit = {operator: 1 << k for k, operator in enumerate(readers)}
    come = dict.fromkeys(readers, 0)  # from which, a bit each: thousands are a few hundred bytes
    found: dict[int, int] = {}
    for members in components:
        ahead = {reader for operator in members for reader in readers[operator]}
        mine = sum(bit[operator] for operator in members)
        all_ = 0
        for operator in members:
            all_ |= come[operator]
        if ahead & members:
            all_ |= mine
        for operator in members:
            found[operator] = all_.bit_count()
        for reader in ahead - members:
            come[reader] |= all_ | mine
    return found
