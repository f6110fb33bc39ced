"""What a graph says by itself, whoever makes nodes of it: found once, and held by the graph.

    operators as written ─► copies with broadcasts, numbered ─► readers ─► loops and sections

An engine is made for every segment of a training, and evaluations have theirs; none of them changes
what is here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias, final

from geartrain.errors import GraphError
from geartrain.graph.fusion import stacks
from geartrain.graph.loops import find_regions, reaching, readers_of
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Port
from geartrain.graph.operators import Copying
from geartrain.graph.region import Region, Run
from geartrain.graph.streams import LoopStreams, Picks
from geartrain.graph.through import Through
from geartrain.graph.visits import once


@final
class GraphLayout:
    """The operators of a graph, and what is known of them before nodes are made.

    Args:
        operators: As they were written.
        run: How loops and sections run of which nothing is said.

    Attributes:
        operators: Copies of them, numbered from 1, with a broadcast where a stream is used twice.
    """

    def __init__(self, operators: Sequence[AbstractOperator], run: Run) -> None:
        self.operators: Sequence[AbstractOperator] = with_broadcasts(operators)
        self._run = run
        self._regions: dict[frozenset[int], list[Region]] = {}
        self._reaching: dict[Hashable, list[tuple[Region, list[int]]]] = {}
        self._stacks: dict[Hashable, list[Region]] = {}
        self._streams: dict[Hashable, LoopStreams] = {}

    @cached_property
    def readers(self) -> dict[Port, Port]:
        """Output port to the input port that it leads to, merges resolved."""
        return readers_of(self.operators)

    @cached_property
    def once(self) -> frozenset[str]:
        """Names of the throughs that learn from every instance in exactly one message."""
        return once(self.operators)

    def regions(self, endings: Collection[int] = ()) -> list[Region]:
        """Loops and sections, each by itself, to write reasons into.

        Args:
            endings: Numbers of those that are computed with a loss: they are in no section.
        """
        key = frozenset(endings)
        found = self._regions.get(key)
        if found is None:
            found = find_regions(self.operators, self.readers, self._run, endings)
            self._regions[key] = found
        return [replace(region) for region in found]

    def reaching(self, regions: Sequence[Region], apart: Collection[str] = ()) -> list[Region]:
        """Those of them that run whole with what is beside them, up to the losses.

        Args:
            regions: As ``regions`` gave them, with reasons of those that shall not run whole.
            apart: Names of losses that are nodes of their own.
        """
        whole = tuple([(region.operators, region.whole) for region in regions])
        wanting = [isinstance(o, Through) and o.wants_graph for o in self.operators]
        key = whole, frozenset(apart), tuple(wanting)
        found = self._reaching.get(key)
        if found is None:
            further = reaching(regions, self.operators, self.readers, apart)
            if self._run == "steps":
                further = [region for region in further if region.made_of]
            place = {id(region): k for k, region in enumerate(regions)}
            found = [(region, [place[id(each)] for each in region.made_of]) for region in further]
            self._reaching[key] = found
        return [replace(r, made_of=[regions[k] for k in places]) for r, places in found]

    def stacks(
        self, endings: Collection[int], apart: Collection[str], taken: Collection[int]
    ) -> list[Region]:
        """Modules that feed one another up to their losses, as ``fusion.stacks`` finds them; none
        where all is to run by steps."""
        if self._run == "steps":
            return []
        key = frozenset(endings), frozenset(apart), frozenset(taken)
        found = self._stacks.get(key)
        if found is None:
            found = stacks(self.operators, self.readers, *key)
            self._stacks[key] = found
        return [replace(region) for region in found]

    def streams(self, region: Region, picks: Picks) -> LoopStreams:
        """Those of a loop or section that runs whole.

        Args:
            region: It.
            picks: Its functions that only pick.
        """
        key = region.operators, frozenset((number, *which) for number, which in picks.items())
        found = self._streams.get(key)
        if found is None:
            found = LoopStreams(region, self.operators, self.readers, picks)
            self._streams[key] = found
        return found


def with_broadcasts(given: Sequence[AbstractOperator]) -> list[AbstractOperator]:
    """Copies of the operators, numbered from 1, with a broadcast where a stream is used twice.

    Raises:
        GraphError: A stream is read by nobody, or a loop has no source.
    """
    operators = _copies(given)
    uses = _uses(operators)
    for source in list(operators):
        for port in range(source.ways):
            readers = uses.get((id(source), port), [])
            if not readers:
                raise GraphError(
                    f"the stream of '{source.name}'{_port(source, port)} is read by nobody; "
                    f"{source.remedy()}"
                )
            if len(readers) > 1:
                name = f"{source.name}{_port(source, port).replace(' port', '')} broadcast"
                broadcast = Copying(name, (source, port), len(readers))
                operators.append(broadcast)
                for k, (reader, p, i) in enumerate(readers):
                    reader.sources[p][i] = (broadcast, k)
    for number, operator in enumerate(operators, 1):
        operator.id = number
    return operators


def _copies(given: Sequence[AbstractOperator]) -> list[AbstractOperator]:
    """Copies whose sources and memories are copies; a memory knows who reads it."""
    copies = {id(o): copy.copy(o) for o in given}
    for operator in copies.values():
        operator.sources = [
            [(copies[id(source)], port) for source, port in sources] for sources in operator.sources
        ]
        if isinstance(operator, Through) and operator.memory is not None:
            memory = copies[id(operator.memory)]
            assert isinstance(memory, Holding)
            memory.readers = [*memory.readers, operator.name]
            operator.memory = memory
    return list(copies.values())


_Use: TypeAlias = tuple[AbstractOperator, int, int]
"""Who reads a stream, at which of its ports, and which of the streams there it is."""


def _uses(operators: Sequence[AbstractOperator]) -> dict[tuple[int, int], list[_Use]]:
    """Output port, by identity of its operator, to those that read it."""
    uses: dict[tuple[int, int], list[_Use]] = {}
    for operator in operators:
        for p, sources in enumerate(operator.sources):
            if not sources:
                raise GraphError(
                    f"'{operator.name}' has no source; give the loop one: "
                    f"{operator.name}.join(stream)"
                )
            for i, (source, port) in enumerate(sources):
                uses.setdefault((id(source), port), []).append((operator, p, i))
    return uses


def _port(operator: AbstractOperator, port: int) -> str:
    return f" port {operator.port_name(port)}" if operator.ways > 1 else ""
