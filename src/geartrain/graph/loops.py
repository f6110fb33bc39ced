"""Regions of a graph: loops and sections, and whether they may run over whole instances.

    operators ─► strongly connected ones, and of those before them as many as say how many rows
    enter ─► a loop: a ``Region`` with the reason why it cannot run whole, or none
    the others ─► those that lead into one another, as far as they can run whole ─► a section, if
    rows part or meet in it
    both, where all of it lives on one worker ─► with what is before, between and behind them, the
    losses too: one firing from the inputs to the gradients; so are modules up to their losses
    between which rows meet, or that look inside bundles, though there is neither

A loop may run whole where every module in it takes rows that may come back apart, and the number of
rows that an instance sends in is known when it enters. Where control flow looks at columns alone it
is planned before anything is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import final

from geartrain.graph.cycles import components, reached
from geartrain.graph.deciding import functions_of, reads_payload
from geartrain.graph.ends import Losing, Outputting, Stopping
from geartrain.graph.entering import Entering
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input, Port
from geartrain.graph.operators import (
    Copying,
    Flatmapping,
    Grouping,
    Joining,
    Merging,
    Moving,
    Replaying,
    Routing,
    Ungrouping,
)
from geartrain.graph.region import DEFAULT, STRONGEST, Deciders, Region, Run, overlap
from geartrain.graph.through import Through


def readers_of(operators: Sequence[AbstractOperator]) -> dict[Port, Port]:
    """Output port to the input port that it leads to, merges resolved."""
    direct: dict[Port, tuple[AbstractOperator, int]] = {}
    for operator in operators:
        for p, sources in enumerate(operator.sources):
            for source, port in sources:
                direct[source.id, port] = (operator, p)
    readers: dict[Port, Port] = {}
    for start, (reader, port) in direct.items():
        passed: set[int] = set()
        while isinstance(reader, Merging) and reader.id not in passed:
            passed.add(reader.id)
            reader, port = direct[reader.id, 0]
        readers[start] = (reader.id, port)
    return readers


def find_regions(
    operators: Sequence[AbstractOperator],
    readers: Mapping[Port, Port],
    run: Run = DEFAULT,
    endings: Collection[int] = (),
) -> list[Region]:
    """The loops and sections of a graph.

    Args:
        operators: With broadcasts and numbers.
        readers: Output port to the input port that it leads to, merges resolved.
        run: How those run of which nothing is said.
        endings: Numbers of those that are computed with a loss: they are in no section.
    """
    known = _Known(operators, readers, run)
    found: list[Region] = []
    for loop in known.loops():
        found.append(known.region(loop))
    kept: list[Region] = []
    for region in sorted(found, key=lambda r: (not r.whole, -len(r.operators))):
        inside = next((r for r in kept if r.whole and region.operators <= r.operators), None)
        if inside is not None:
            continue
        if region.whole:
            region = known.joined(region, kept)
        kept.append(region)
    for region in kept:
        known.end_in(region)
    if run != "steps":
        kept += known.sections([r.operators for r in kept], endings)
    return sorted(kept, key=lambda r: min(r.operators))


def reaching(
    regions: Sequence[Region],
    operators: Sequence[AbstractOperator],
    readers: Mapping[Port, Port],
    apart: Collection[str] = (),
) -> list[Region]:
    """Those that run whole, with all that is near them and can, up to the losses.

    Args:
        regions: Of the graph.
        operators, readers: As for ``find_regions``.
        apart: Names of losses that are nodes of their own.

    Returns:
        Those that reach further than the regions that they are ``made_of``, if there are any; they
        overlap with nothing else.
    """
    return _Known(operators, readers, DEFAULT).reaching(regions, apart)


@final
class _Known:
    """A graph's operators, and who is before and behind whom."""

    def __init__(
        self, operators: Sequence[AbstractOperator], readers: Mapping[Port, Port], run: Run
    ) -> None:
        self._run = run
        self._operators = {o.id: o for o in operators}
        self._readers = readers
        self._entering = Entering(self._operators, readers)
        self._ahead: dict[int, set[int]] = {}
        self._before: dict[int, set[int]] = {}
        for (source, _), (reader, _) in readers.items():
            if not isinstance(self._operators[source], Merging):
                self._ahead.setdefault(source, set()).add(reader)
                self._before.setdefault(reader, set()).add(source)

    def named(self, number: int) -> str:
        return self._operators[number].name

    def loops(self) -> list[frozenset[int]]:
        """Operators that feed one another, loop by loop."""
        return list(dict.fromkeys(filter(None, map(self._loop_of, self._ahead))))

    def _loop_of(self, number: int) -> frozenset[int]:
        """Those that feed this one and are fed by it; none where it is on no cycle."""
        return self._loops.get(number, frozenset())

    @cached_property
    def _loops(self) -> dict[int, frozenset[int]]:
        """By operator on a cycle, those that feed it and are fed by it."""
        return {
            number: members
            for members in self._components
            for number in members
            if len(members) > 1 or number in self._ahead.get(number, ())
        }

    @cached_property
    def _components(self) -> list[frozenset[int]]:
        return components(self._ahead)

    def region(self, loop: frozenset[int]) -> Region:
        """The loop with what has to run with it."""
        merges = [
            o
            for o in self._operators.values()
            if isinstance(o, Merging) and self._readers[o.id, 0][0] in loop
        ]
        asked = {o.run for o in merges if o.run is not None}
        first = next((o for o in merges if o.loops), merges[0])
        run: Run = next((r for r in STRONGEST if r in asked), self._run)
        region = Region(first.name, run, loop, said=bool(asked), look=self.deciders)
        if run == "steps":
            region.reason = "it is to run by steps"
        while region.reason is None:
            region.reason = self._obstacle(region.operators)
            if region.reason is not None:
                break
            outside = self._reading_outside(region.operators)
            if outside is not None:
                more = {outside} | self._loop_of(outside)
                region.operators = self._closed(region.operators | more)
                continue
            self._find_ports(region)
            gathering = self._gathering(region)
            if gathering is None and self._entering.are_bundles(region):
                region.counted = False
                break
            unknown = self._entering.count_into(region)
            if unknown is None:
                break
            operator = self._operators[unknown]
            why = self._why_not(operator)
            stays = why is not None or isinstance(operator, Ungrouping)
            if gathering is None and (stays or self._entering.bundles_enter(unknown)):
                region.counted = False
                break
            if why is not None:
                region.reason = f"how many rows enter it is known to '{operator.name}' alone"
                break
            region.operators = self._with(unknown, region.operators)
        self._find_ports(region)
        return region

    def joined(self, region: Region, kept: list[Region]) -> Region:
        """One loop of it and of those that run whole and share operators with it, which are taken
        out of ``kept``: no row goes round in one of them alone."""
        while (other := next((r for r in kept if overlap(r, region)), None)) is not None:
            both = self._closed(region.operators | other.operators)
            union = self.region(both)
            if not union.whole:
                shared = min(region.operators & other.operators)
                region.reason = f"the loop '{other.name}' has '{self.named(shared)}' too"
                return region
            kept.remove(other)
            region = union
        return region

    def end_in(self, region: Region) -> None:
        """Take in where rows of a loop that runs whole end: then nobody answers for them."""
        if not region.whole:
            return
        ends = {
            reader
            for (source, _), (reader, _) in self._readers.items()
            if source in region.operators and isinstance(self._operators[reader], Stopping)
        }
        region.operators |= {number for number in ends if self._before[number] <= region.operators}
        self._find_ports(region)

    def _closed(self, operators: frozenset[int]) -> frozenset[int]:
        """These, and those on a way from one of them to another."""
        return operators | reached(operators, self._ahead) & reached(operators, self._before)

    def sections(self, loops: Sequence[frozenset[int]], endings: Collection[int]) -> list[Region]:
        """What may run whole outside the loops.

        No row that has left a section comes back to it, so that it can wait for all rows of an
        instance: each operator has a depth, the most others that do not run whole on a way to it,
        and those of a section have one depth.

        Args:
            loops: Operators of each; loops that share some are taken as one.
            endings: Others that are in no section.
        """
        looped = {number for loop in loops for number in loop}
        able = {
            number
            for number in self._operators
            if number not in looped and number not in endings and self._may_be_inside(number)
        }
        near = self._near(able, loops)
        return [self._section(members) for members in near if self._parts_rows(members)]

    def reaching(self, regions: Sequence[Region], apart: Collection[str]) -> list[Region]:
        """Those that run whole, with all near them that can, up to the losses.

        Args:
            regions: Loops and sections.
            apart: Names of losses that stay outside.
        """
        looped = {n for r in regions if r.whole for n in r.operators}
        stuck = {n for r in regions if not (r.whole or r.uncounted) for n in r.operators}
        able = set(looped)
        for number, operator in self._operators.items():
            ends = isinstance(operator, Losing) and not operator.alone
            holds = isinstance(operator, Holding)
            if holds or self._may_be_inside(number) or (ends and operator.name not in apart):
                able.add(number)
        able -= stuck
        held = {n for n, o in self._operators.items() if isinstance(o, Holding)} - looped
        uncounted = {n for r in regions if r.uncounted for n in r.operators}
        rows = {number for number in able if not self._entering.bundles_enter(number)}
        found: list[Region] = []
        for some in (able, able - held, able - uncounted - held, rows, rows - uncounted):
            for region in self._reach(some, regions):
                if not any(overlap(region, other) for other in found):
                    found.append(region)
        return found

    def _reach(self, able: Collection[int], regions: Sequence[Region]) -> Iterator[Region]:
        """Those that reach as far as these operators do."""
        for members in self._near(able, [r.operators for r in regions if r.loops]):
            inner = [r for r in regions if r.whole and r.operators <= members]
            if inner and members == inner[0].operators:
                continue
            cut = [r for r in regions if r.operators & members and r not in inner]
            if any(r.whole for r in cut):  # one that runs whole does so with all of it
                continue
            region = self._around(inner, members) if inner else self._alone(members)
            if region is None or self._reading_outside(members) is not None:
                continue
            if not self._admitted(region).whole:
                continue
            if not any(self._loses(r, region) for r in inner):
                yield region

    def _around(self, inner: Sequence[Region], members: frozenset[int]) -> Region:
        """What some of which reaches further."""
        first = min(inner, key=lambda r: (not r.loops, min(r.operators)))
        run = next(run for run in STRONGEST if any(r.run == run for r in inner))
        region = Region(first.name, run, members, made_of=inner, look=self.deciders)
        region.said, region.loops = any(r.said for r in inner), any(r.loops for r in inner)
        return region

    def _alone(self, members: frozenset[int]) -> Region | None:
        """Modules up to their losses that hold neither loop nor section; None: nodes will do."""
        inside = [self._operators[number] for number in sorted(members)]
        modules = [o for o in inside if isinstance(o, Through)]
        if len(modules) < 2 or not any(isinstance(o, Losing) for o in inside):
            return None
        meet = any(isinstance(o, Grouping | Joining) for o in inside)
        inside_bundles = [o for o in modules if o.call.inside]
        if any(o.written_kernel() is not None for o in inside_bundles):
            return None  # a call of C each, which what runs whole makes dearer
        if not (meet or inside_bundles):
            return None
        return Region(modules[0].name, DEFAULT, members, loops=False, look=self.deciders)

    def _loses(self, inner: Region, region: Region) -> bool:
        """Whether a loop or section runs worse with what is around it: its many rounds are planned
        before they are computed, and those around are not, which a section bears, as each of its
        modules is called once or twice; or it goes back by one graph of autograd's, which that
        cannot."""
        planned = not (inner.deciding or inner.deciders.parting)
        if inner.loops and planned and region.deciding:
            return True
        return self._may_tape(inner) and not self._may_tape(region)

    def _may_tape(self, region: Region) -> bool:
        """Whether autograd may follow it, and modules in it want that."""
        inside = [self._operators[number] for number in region.operators]
        if region.deciders.parting or any(isinstance(o, Grouping | Holding) for o in inside):
            return False
        return any(isinstance(o, Through) and o.wants_graph for o in inside)

    def _near(
        self, able: Collection[int], loops: Sequence[frozenset[int]]
    ) -> Iterator[frozenset[int]]:
        """Those that are able, of one depth, that lead into one another."""
        edges = [
            (a, b) for some in self._components for a in some for b in self._ahead.get(a, ())
        ]  # in the order in which rows come, so that depths are found in few passes
        depth = self._depths(edges, able, loops)
        near: dict[int, set[int]] = {number: set() for number in able}
        for a, b in edges:
            if a in able and b in able and depth[a] == depth[b]:
                near[a].add(b)
                near[b].add(a)
        seen: set[int] = set()
        for number in sorted(able):
            if number not in seen:
                members = reached([number], near)
                seen |= members
                yield members

    def _depths(
        self,
        edges: Sequence[tuple[int, int]],
        able: Collection[int],
        loops: Sequence[frozenset[int]],
    ) -> dict[int, int]:
        """The most operators that are not able on a way to each; a loop counts as one."""
        whose = {number: number for number in self._operators}
        for loop in loops:
            roots = {whose[number] for number in loop}
            whose |= {k: min(roots) for k, root in whose.items() if root in roots}
        between = [(whose[a], whose[b], a in able and b in able) for a, b in edges]
        between = [(a, b, both) for a, b, both in between if a != b]
        depth = dict.fromkeys(self._operators, 0)
        settled = False
        while not settled:
            settled = True
            for a, b, both in between:
                if depth[b] < depth[a] + (not both):
                    depth[b], settled = depth[a] + (not both), False
        return {number: depth[root] for number, root in whose.items()}

    def _may_be_inside(self, number: int) -> bool:
        operator = self._operators[number]
        ends = isinstance(operator, Holding | Input | Losing | Merging | Outputting)
        return not ends and self._why_not(operator) is None

    def _parts_rows(self, members: Collection[int]) -> bool:
        """Whether rows part or meet among these, and several modules compute them."""
        inside = [self._operators[number] for number in members]
        modules = sum(isinstance(o, Through) for o in inside)
        parting = Routing | Grouping | Joining | Flatmapping | Ungrouping
        parts = (isinstance(o, parting) and not self._counts_parts(o.id) for o in inside)
        return modules > 1 and any(parts)

    def _section(self, members: frozenset[int]) -> Region:
        name = f"{self._operators[min(members)].name} section"
        return self._admitted(Region(name, self._run, members, loops=False, look=self.deciders))

    def _admitted(self, region: Region) -> Region:
        """It, when it is known which rows enter, or why it cannot run whole."""
        self._find_ports(region)
        gathering = self._gathering(region)
        bundled = gathering is None and self._entering.are_bundles(region)
        unknown = None if bundled else self._entering.count_into(region)
        region.counted = not bundled and unknown is None
        if unknown is not None and gathering is not None:
            named, region.uncounted = self.named(unknown), not region.loops
            region.reason = f"how many rows enter it is known to '{named}' alone"
        return region

    def deciders(self, region: Region) -> Deciders:
        """Who in a region decides."""
        inside = sorted(region.operators)
        parting = [number for number in inside if self._counts_parts(number)]
        deciding = [
            number
            for number in inside
            if (number in parting and not self._parts_enter(number, region))
            or any(map(reads_payload, functions_of(self._operators[number])))
        ]
        return Deciders(deciding, parting)

    def _counts_parts(self, number: int) -> bool:
        """Whether it makes rows of parts of a row: how many there are, the row alone says."""
        operator = self._operators[number]
        return isinstance(operator, Ungrouping) and not self._entering.bundles_enter(number)

    def _parts_enter(self, number: int, region: Region) -> bool:
        """Whether its rows have entered a region as they are: their shape is known before."""
        passing = Copying | Flatmapping | Merging | Moving | Routing
        before = {
            k: {s for s in sources if s in region.operators}
            for k, sources in self._before.items()
            if k == number or isinstance(self._operators[k], passing)
        }
        found = reached(before.get(number, ()), before)
        return all(isinstance(self._operators[k], passing) for k in found)

    def _with(self, number: int, region: frozenset[int]) -> frozenset[int]:
        """A region with one more operator, its loop, and what is between."""
        more = {number} | self._loop_of(number)
        between = reached(more, self._ahead) & reached(region, self._before)
        return region | more | between

    def _find_ports(self, region: Region) -> None:
        mine = region.operators
        entries: set[Port] = set()
        region.exits = []
        for (source, port), (reader, into) in sorted(self._readers.items()):
            if isinstance(self._operators[source], Merging):
                continue
            if source not in mine and reader in mine:
                entries.add((reader, into))
            elif source in mine and reader not in mine:
                region.exits.append((source, port))
        region.entries = sorted(entries)

    # Whether it can.

    def _obstacle(self, operators: Collection[int]) -> str | None:
        for number in sorted(operators):
            operator = self._operators[number]
            why = self._why_not(operator)
            if why is not None:
                return f"'{operator.name}' {why}"
        return None

    def _why_not(self, operator: AbstractOperator) -> str | None:
        """Why an operator cannot be in a loop that runs whole; None: it can."""
        if isinstance(operator, Through):
            return _why_not_through(operator)
        if isinstance(operator, Joining) and self._entering.bundles_enter(operator.id):
            return "joins bundles"
        if isinstance(operator, Replaying):
            return "sends rows again"
        return None

    def _reading_outside(self, operators: Collection[int]) -> int | None:
        """An operator outside that reads what is held among these: it is gone when they are."""
        for number in sorted(self._operators):
            operator = self._operators[number]
            memory = operator.memory if isinstance(operator, Through) else None
            if memory is not None and memory.id in operators and number not in operators:
                return number
        return None

    def _gathering(self, region: Region) -> str | None:
        """The name of an operator in it whose rows wait for others, or None."""
        for number in sorted(region.operators):
            if isinstance(self._operators[number], Grouping | Joining):
                return self._operators[number].name
        return None


def _why_not_through(through: Through) -> str | None:
    if through.use is not None or through.keep == "graph":
        return "keeps autograd's graph of whole messages"
    if through.call.pool and not through.call.inside:
        return "makes one row of all that it gets"
    return "takes one message at a time" if through.call.alone else None
