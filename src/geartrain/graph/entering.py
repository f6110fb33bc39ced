"""What enters a region of a graph: bundles or rows, and how many for each that an instance brings.

    input ─► ... ─► entry              as many as the input has
    input ─► pooled ─► entry           one for each bundle
    all ways of a route ─► entries     as many as come to the route

Of anything else, the operator that makes them knows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, final

from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input, Port
from geartrain.graph.operators import (
    Copying,
    Detaching,
    Grouping,
    Joining,
    Merging,
    Moving,
    Routing,
    Splitting,
    Ungrouping,
)
from geartrain.graph.region import Region
from geartrain.graph.through import Through

_Count: TypeAlias = dict[tuple[str, Any], int]
"""Rows as a sum: of inputs, and their bundles, by name; of routes' ports and others by number."""


@final
class Entering:
    """The operators of a graph, asked for what enters regions of it."""

    def __init__(
        self, operators: Mapping[int, AbstractOperator], readers: Mapping[Port, Port]
    ) -> None:
        self._operators, self._readers = operators, readers

    def are_bundles(self, region: Region) -> bool:
        """Whether bundles enter a region."""
        return any(self._bundled(*port, frozenset()) for port in self._sources(region))

    def bundles_enter(self, number: int) -> bool:
        """Whether an operator is given bundles."""
        sources = [each for port in self._operators[number].sources for each in port]
        return any(self._bundled(s.id, p, frozenset()) for s, p in sources)

    def count_into(self, region: Region) -> int | None:
        """Tell a region the rows that enter it.

        Returns:
            The operator who knows alone how many it makes; None: all are known.
        """
        total: _Count = {}
        for source, port in self._sources(region):
            _add(total, self._whole(source, port, frozenset()))
        settled = False
        while not settled:
            settled = True
            routes = {key[0] for kind, key in total if kind == "way"}
            for number in routes:
                operator = self._operators[number]
                times = {total.get(("way", (number, k)), 0) for k in range(operator.ways)}
                if len(times) == 1 and 0 not in times:
                    for k in range(operator.ways):
                        del total["way", (number, k)]
                    before: _Count = {}
                    for source, port in ((s.id, p) for s, p in operator.sources[0]):
                        _add(before, self._whole(source, port, frozenset({number})))
                    (often,) = times
                    _add(total, {key: often * n for key, n in before.items()})
                    settled = False
        for kind, key in total:
            if kind not in ("input", "bundle"):
                return int(key[0])
        region.inputs = {key: n for (kind, key), n in total.items() if kind == "input"}
        region.bundles = {key: n for (kind, key), n in total.items() if kind == "bundle"}
        return None

    def _whole(self, number: int, port: int, seen: frozenset[int]) -> _Count:
        """What ``_count`` says, a bundle being one."""
        found = self._count(number, port, seen)
        if not self._bundled(number, port, frozenset()):
            return found
        return {("bundle" if kind == "input" else kind, key): n for (kind, key), n in found.items()}

    def _count(self, number: int, port: int, seen: frozenset[int]) -> _Count:
        operator = self._operators[number]
        if isinstance(operator, Input):
            return {("input", operator.name): 1}
        if isinstance(operator, Routing):
            return {("way", (number, port)): 1}
        unpacks = isinstance(operator, Ungrouping) and self._bundled(
            operator.sources[0][0][0].id, operator.sources[0][0][1], frozenset()
        )
        passes = Copying | Detaching | Holding | Joining | Merging | Moving | Splitting | Through
        unknown: _Count = {("out", (number, port)): 1}
        if not (isinstance(operator, passes) or unpacks) or number in seen:
            return unknown
        total: _Count = {}
        for source, k in operator.sources[0]:
            _add(total, self._count(source.id, k, seen | {number}))
        if not (isinstance(operator, Through) and operator.call.pool):
            return total
        if any(kind != "input" for kind, _ in total):
            return unknown
        return {("bundle", name): n for (_, name), n in total.items()}

    def _bundled(self, number: int, port: int, seen: frozenset[int]) -> bool:
        operator = self._operators[number]
        if isinstance(operator, Input):
            return operator.bundle
        if isinstance(operator, Grouping):
            return operator.how == "bundle"
        if isinstance(operator, Ungrouping) or (
            isinstance(operator, Through) and operator.call.pool
        ):
            return False
        if number in seen:
            return False
        sources = operator.sources[0]
        return any(self._bundled(s.id, p, seen | {number}) for s, p in sources)

    def _sources(self, region: Region) -> list[Port]:
        """Output ports outside whose rows enter."""
        mine = region.operators
        return [
            (source, port)
            for (source, port), (reader, _) in self._readers.items()
            if source not in mine
            and reader in mine
            and not isinstance(self._operators[source], Merging)
        ]


def _add(total: _Count, more: _Count) -> None:
    for key, n in more.items():
        total[key] = total.get(key, 0) + n
