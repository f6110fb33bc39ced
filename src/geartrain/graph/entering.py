"""What enters a region of a graph: bundles or rows, and how many for each that an instance brings.

    input ─► ... ─► entry              as many as the input has
    input ─► pooled ─► entry           one for each bundle
    all ways of a route ─► entries     as many as come to the route

Of anything else, the operator that makes them knows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias, final

from geartrain.graph.cycles import furthest_first, reached
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
        return any(number in self._bundled for number, _ in self._sources(region))

    def bundles_enter(self, number: int) -> bool:
        """Whether an operator is given bundles."""
        sources = (source for port in self._operators[number].sources for source, _ in port)
        return any(source.id in self._bundled for source in sources)

    def count_into(self, region: Region) -> int | None:
        """Tell a region the rows that enter it.

        Returns:
            The operator who knows alone how many it makes; None: all are known.
        """
        total: _Count = {}
        for source, port in self._sources(region):
            _add(total, self._whole(source, port))
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
                    for one, way in operator.sources[0]:
                        _add(before, self._whole(one.id, way))
                    (often,) = times
                    _add(total, {key: often * n for key, n in before.items()})
                    settled = False
        for kind, key in total:
            if kind not in ("input", "bundle"):
                return int(key[0])
        region.inputs = {key: n for (kind, key), n in total.items() if kind == "input"}
        region.bundles = {key: n for (kind, key), n in total.items() if kind == "bundle"}
        return None

    def _whole(self, number: int, port: int) -> _Count:
        """The rows that leave an operator by a port, a bundle being one."""
        counts: dict[Port, _Count] = {}
        for place in furthest_first([(number, port)], self._before):
            counts[place] = self._count(place, counts)
        found = counts[number, port]
        if number not in self._bundled:
            return found
        return {("bundle" if kind == "input" else kind, key): n for (kind, key), n in found.items()}

    def _before(self, place: Port) -> list[Port]:
        """Output ports whose rows are as many, all together, as leave by this one."""
        operator = self._operators[place[0]]
        passes = Copying | Detaching | Holding | Joining | Merging | Moving | Splitting | Through
        if isinstance(operator, passes) or (
            isinstance(operator, Ungrouping) and operator.sources[0][0][0].id in self._bundled
        ):
            return [(source.id, port) for source, port in operator.sources[0]]
        return []

    def _count(self, place: Port, counts: Mapping[Port, _Count]) -> _Count:
        """The rows that leave by a port, rows of a bundle each.

        Args:
            place: The port.
            counts: Of those before it; on a cycle some are missing.
        """
        operator, before = self._operators[place[0]], self._before(place)
        if isinstance(operator, Input):
            return {("input", operator.name): 1}
        if isinstance(operator, Routing):
            return {("way", place): 1}
        if not before:
            return {("out", place): 1}
        total: _Count = {}
        for port in before:
            _add(total, counts.get(port, {("out", port): 1}))
        if not (isinstance(operator, Through) and operator.call.pool):
            return total
        if any(kind != "input" for kind, _ in total):
            return {("out", place): 1}
        return {("bundle", name): n for (_, name), n in total.items()}

    @cached_property
    def _bundled(self) -> frozenset[int]:
        """Operators by which bundles leave."""
        begins = {o.id for o in self._operators.values() if _begins_bundles(o)}
        ahead: dict[int, set[int]] = {}
        for operator in self._operators.values():
            ends = isinstance(operator, Grouping | Ungrouping | Input)
            if ends or (isinstance(operator, Through) and operator.call.pool):
                continue
            for source, _ in operator.sources[0]:
                ahead.setdefault(source.id, set()).add(operator.id)
        return reached(begins, ahead)

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


def _begins_bundles(operator: AbstractOperator) -> bool:
    if isinstance(operator, Input):
        return operator.bundle
    return isinstance(operator, Grouping) and operator.how == "bundle"


def _add(total: _Count, more: _Count) -> None:
    for key, n in more.items():
        total[key] = total.get(key, 0) + n
