"""From operators to wires: who reads what, what is defined where, and fresh nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

from geartrain.errors import GraphError
from geartrain.frames.frame import Arena, Schema
from geartrain.frames.precision import Precision
from geartrain.graph.admission import Admission
from geartrain.graph.blueprint import AbstractGraph
from geartrain.graph.ends import Losing
from geartrain.graph.fusion import fused, in_order
from geartrain.graph.looping import Looping, door_name, make_loop, memories_of
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input, Made, Port
from geartrain.graph.owners import Owner, devices_of, why_not_there
from geartrain.graph.region import Refusal, Region
from geartrain.graph.stacking import make_stack
from geartrain.graph.through import Through
from geartrain.nodes.control import AbstractStep
from geartrain.nodes.held import Held
from geartrain.nodes.memory import HoldNode
from geartrain.nodes.node import AbstractNode, Place


@final
@dataclass(frozen=True, slots=True)
class Wiring:
    """A graph made into nodes.

    Args:
        arena: The frames that all nodes share.
        schema: Its columns.
        nodes: By number; the controller is 0.
        steps: Store-less operators by number.
        readers: Output port to the input port that it leads to, merges resolved.
        inputs: Input name to its operator.
        operators: All, by number.
        copies: Operator number to the numbers of its nodes, one a copy; none where the node of
            another operator does its work.
        operator_of: Node number to operator number.
        precision: Of the rows that enter.
        admission: What the nodes demand of instances.
        together: Numbers of nodes that share a store, a memory and its readers: they live on one
            worker.
        loops: Of nodes that run a loop whole the output ports in it, and where they lead.
        stacks: Operator number to those that its nodes compute, itself among them, where these are
            several.
    """

    arena: Arena
    schema: Schema
    nodes: Mapping[int, AbstractNode]
    steps: Mapping[int, AbstractStep]
    readers: Mapping[Port, Port]
    inputs: Mapping[str, Input]
    operators: Mapping[int, AbstractOperator]
    copies: Mapping[int, tuple[int, ...]]
    operator_of: Mapping[int, int]
    precision: Precision
    admission: Admission
    together: Sequence[Sequence[int]] = ()
    loops: Mapping[int, Mapping[Port, Port]] = field(default_factory=dict)
    stacks: Mapping[int, Sequence[AbstractOperator]] = field(default_factory=dict)

    def throughs(self, operator: int) -> list[Through]:
        """The modules that the nodes of an operator run."""
        found = self.operators[operator]
        if isinstance(found, Looping):
            return found.throughs
        return [o for o in self.stacks.get(operator, [found]) if isinstance(o, Through)]


def wire(
    graph: AbstractGraph,
    owners: Callable[[Through], Sequence[Owner]],
    copies_of_all: int = 1,
    precision: Precision = "full",
    apart: Collection[str] = (),
    spread: bool = False,
    by_steps: Refusal | None = None,
    apiece: Refusal | None = None,
) -> Wiring:
    """Make fresh nodes.

    Rows choose a copy by their instance. A node without weights has as many copies as the nodes
    that write to it, so that rows of one instance meet.

    Args:
        graph: A checked graph.
        owners: What the copies of a ``through`` run with; one where it is not replicated.
        copies_of_all: Least copies of every node.
        precision: Of the rows.
        apart: Names of losses that get a node of their own; others may be fused with what is
            before them.
        spread: Whether rows may lie elsewhere than on the host.
        by_steps: Says why a loop that could run whole shall not; None: each runs whole that can.
        apiece: Likewise of modules that one node could compute up to their losses.

    Raises:
        GraphError: A loop that is to run whole cannot.
    """
    layout = graph.layout()
    operators = layout.operators
    owned = {o.id: list(owners(o)) for o in operators if isinstance(o, Through)}
    how_many = _count_copies(operators, owned, layout.readers, copies_of_all)
    endings = fused(operators, apart)
    regions = layout.regions(endings)
    loops = _whole_loops(regions, operators, owned, how_many, spread, by_steps)
    for reach in layout.reaching(regions, apart):
        if set(map(id, reach.made_of)) <= set(map(id, loops)):
            why = by_steps if reach.made_of else apiece
            more = _whole_loops([reach], operators, owned, how_many, spread, why)
            loops = [r for r in loops if not more or r not in reach.made_of] + more
    taken = {number for region in loops for number in region.operators}
    stacked = layout.stacks(endings, apart, taken)
    stacked = _whole_loops(stacked, operators, owned, how_many, spread, apiece)
    inside = taken | {loss.id for loss in endings.values()}
    inside |= {number for region in stacked for number in region.operators}
    wires = _Wires(graph, precision, spread, owned, how_many, endings, len(loops))
    for operator in operators:
        wires.add(operator, inside=operator.id in inside)
    for region in stacked:
        wires.add_stack(region)
    for region in loops:
        wires.add_loop(region)
    return wires.wiring()


@final
class _Wires:
    """What is wired so far.

    Args:
        graph, precision, spread: As for ``wire``.
        owned: Number of a ``through`` to what its copies run with.
        how_many: Copies, by number of the operator.
        endings: Number of a ``through`` to the loss that is computed in it.
        loops: How many will be added.
    """

    def __init__(
        self,
        graph: AbstractGraph,
        precision: Precision,
        spread: bool,
        owned: Mapping[int, Sequence[Owner]],
        how_many: Mapping[int, int],
        endings: Mapping[int, Losing],
        loops: int,
    ) -> None:
        self._layout = layout = graph.layout()
        self._precision, self._spread = precision, spread
        self._owned, self._how_many, self._endings = owned, how_many, endings
        self._schema = graph.schema()
        self._arena = Arena(graph.vertex, graph.edge, graph.value)
        self._operators = [*layout.operators]
        self._readers: Mapping[Port, Port] = layout.readers
        self._admission = Admission(layout.operators, self._schema)
        self._next_number = len(layout.operators) + 2 * loops + 1
        self._nodes: dict[int, AbstractNode] = {}
        self._steps: dict[int, AbstractStep] = {}
        self._copies: dict[int, tuple[int, ...]] = {}
        self._operator_of: dict[int, int] = {}
        self._held: dict[tuple[int, int], Held] = {}
        self._together: dict[tuple[int, int], list[int]] = {}
        self._inner_readers: dict[int, Mapping[Port, Port]] = {}
        self._stacks: dict[int, Sequence[AbstractOperator]] = {}

    def wiring(self) -> Wiring:
        """All of it."""
        return Wiring(
            self._arena,
            self._schema,
            self._nodes,
            self._steps,
            self._readers,
            {o.name: o for o in self._operators if isinstance(o, Input)},
            {o.id: o for o in self._operators},
            self._copies,
            self._operator_of,
            self._precision,
            self._admission,
            [numbers for numbers in self._together.values() if len(numbers) > 1],
            self._inner_readers,
            self._stacks,
        )

    def add(self, operator: AbstractOperator, *, inside: bool) -> None:
        """The nodes of an operator; none where another one's do its work."""
        numbers: list[int] = []
        for k in range(0 if inside else self._how_many[operator.id]):
            number = self._number(operator.id, k)
            place = self._place(number, operator.name, k)
            if isinstance(operator, Through):
                made: Made = self._through(operator, place, k)
            else:
                made = operator.make(place, None)
                if isinstance(made, HoldNode):
                    self._held[operator.id, k] = made.held
                    self._together[operator.id, k] = [number]
            if isinstance(made, AbstractStep):
                self._steps[operator.id] = made
                break
            if made is not None:
                self._nodes[number], self._operator_of[number] = made, operator.id
                numbers.append(number)
        self._copies[operator.id] = tuple(numbers)

    def _number(self, first: int, copy: int, more: int = 1) -> int:
        """The number of a copy, when so many are wanted: the first copy has its operator's."""
        if copy == 0:
            return first
        self._next_number += more
        return self._next_number - more

    def _place(self, number: int, name: str, copy: int) -> Place:
        return Place(number, copy_name(name, copy), self._arena, self._schema, self._spread)

    def _place_of(self, region: Region, number: int, copy: int) -> Place:
        """That of the node which runs a region whole."""
        device = next(iter(devices_of(region, self._owned))) if self._spread else None
        return replace(self._place(number, region.name, copy), device=device)

    def _through(self, operator: Through, place: Place, copy: int) -> Made:
        owners = self._owned[operator.id]
        owner = owners[copy % len(owners)]
        loss = self._endings.get(operator.id)
        objective = held = None
        if loss is not None:
            objective = loss.objective(replace(place, name=copy_name(loss.name, copy)))
        if operator.memory is not None:
            held = self._held[operator.memory.id, copy]
            self._together[operator.memory.id, copy].append(place.id)
        function = operator.with_function(owner.function)
        return function.make(place, owner.weights, self._precision, objective, held)

    def add_stack(self, region: Region) -> None:
        """The nodes of modules that feed one another, up to their losses."""
        ((first, _),) = region.entries
        members = in_order(self._operators, self._readers, first)
        self._stacks[first], numbers = members, []
        for k in range(max(self._how_many[number] for number in region.operators)):
            number = self._number(first, k)
            place = self._place_of(region, number, k)
            throughs = {
                o.id: (o.with_function(self._owned[o.id][k].function), self._owned[o.id][k].weights)
                for o in members
                if isinstance(o, Through)
            }
            places = {
                o.id: self._place(number if o.ways else self._number(o.id, k), o.name, k)
                for o in members
            }
            self._nodes[number] = make_stack(members, place, throughs, places, self._precision)
            self._operator_of[number] = first
            numbers.append(number)
        self._copies[first] = tuple(numbers)

    def add_loop(self, region: Region) -> None:
        """The nodes of a loop that runs whole, and of its door."""
        members = [o for o in self._operators if o.id in region.operators]
        door = Looping(door_name(region.name), region, [])
        looping = Looping(region.name, region, members)
        door.id, looping.id = len(self._operators) + 1, len(self._operators) + 2
        self._operators += [door, looping]
        inner = {p: r for p, r in self._readers.items() if p[0] in region.operators}
        # Of a loop's modules there are equally many; others have as many as rows come from.
        counted = [t.id for t in looping.throughs] or list(region.operators)
        doors, numbers = [], []
        for k in range(max(self._how_many[number] for number in counted)):
            here = self._number(looping.id, k, more=2)
            entrance = door.id if k == 0 else here + 1
            place = self._place_of(region, here, k)
            throughs = {
                t.id: (t.with_function(self._owned[t.id][k].function), self._owned[t.id][k].weights)
                for t in looping.throughs
            }
            losses = {loss: self._next_number + j for j, loss in enumerate(looping.losses)}
            self._next_number += len(losses)
            self._nodes[entrance], self._nodes[here] = make_loop(
                looping,
                place,
                replace(place, id=entrance, name=copy_name(door.name, k)),
                inner,
                partial(self._layout.streams, region),
                throughs,
                self._precision,
                {number: self._held[number, k] for number in looping.memories},
                losses,
            )
            for number in looping.memories:
                self._together[number, k].append(here)
            self._operator_of[entrance], self._operator_of[here] = door.id, looping.id
            self._inner_readers[here] = inner
            doors.append(entrance)
            numbers.append(here)
        self._copies[door.id], self._copies[looping.id] = tuple(doors), tuple(numbers)
        self._readers = _around(self._readers, region, door.id, looping.id)


def _whole_loops(
    regions: Sequence[Region],
    operators: Sequence[AbstractOperator],
    owned: Mapping[int, Sequence[Owner]],
    how_many: Mapping[int, int],
    spread: bool,
    by_steps: Refusal | None,
) -> list[Region]:
    """The loops and sections that run whole.

    Raises:
        GraphError: One that is to cannot.
    """
    found = []
    for region in regions:
        copies = {len(owned[number]) for number in region.operators if number in owned}
        copies |= {how_many[m.id] for m in memories_of(operators, region)}
        if region.whole and len(copies) > 1:
            region.reason = "its parts have different numbers of copies"
        elif region.whole and spread:
            region.reason = why_not_there(region, owned)
        if region.whole and by_steps is not None:
            region.reason = by_steps(region)
        if region.whole:
            found.append(region)
        elif region.run == "whole" and not region.made_of:
            raise GraphError(
                f"'{region.name}' is to run whole, but {region.reason}; give run='auto' or 'steps'"
            )
    return found


def _around(readers: Mapping[Port, Port], region: Region, door: int, node: int) -> dict[Port, Port]:
    """The wires with a loop's node in place of its operators."""
    mine, found = region.operators, dict[Port, Port]()
    for port, reader in readers.items():
        if port[0] not in mine:
            if reader[0] not in mine:
                found[port] = reader
            elif reader in region.entries:  # else it is a merge inside, which no row leaves by
                found[port] = door, region.entries.index(reader)
        elif reader[0] not in mine:
            found[node, region.exits.index(port)] = reader
    found[door, 0] = node, 0
    return found


def copy_name(name: str, copy: int) -> str:
    """What the copies of a node or part are called: ``branch``, ``branch#1``."""
    return f"{name}#{copy}" if copy else name


def _count_copies(
    operators: Sequence[AbstractOperator],
    owned: Mapping[int, Sequence[Owner]],
    readers: Mapping[Port, Port],
    least: int,
) -> dict[int, int]:
    count = {o.id: len(owned[o.id]) if o.id in owned else least for o in operators}
    settled = set(owned)
    for memory in operators:
        if isinstance(memory, Holding):
            count[memory.id] = _count_readers(memory, operators, owned, least)
            settled.add(memory.id)
    for operator in operators:
        if isinstance(operator, Through) and operator.memory is not None:
            count[operator.id] = count[operator.memory.id]
    changed = True
    while changed:
        changed = False
        for (source, _), (reader, _) in readers.items():
            if reader not in settled and count[source] > count[reader]:
                count[reader] = count[source]
                changed = True
    return count


def _count_readers(
    memory: Holding,
    operators: Sequence[AbstractOperator],
    owned: Mapping[int, Sequence[Owner]],
    least: int,
) -> int:
    """Copies of a memory: of its readers, as a copy reads what the copy beside it holds.

    Raises:
        GraphError: Parts that read it have different numbers of copies.
    """
    found = {
        o.name: len(owned[o.id])
        for o in operators
        if isinstance(o, Through) and o.memory is memory and o.has_state
    }
    if len(set(found.values())) > 1:
        told = ", ".join(f"'{name}' has {n}" for name, n in found.items())
        raise GraphError(
            f"memory '{memory.name}' is read by parts of different numbers of copies: {told}; who "
            "reads a memory has as many as its other readers: give their parts equal replicas"
        )
    return max([least, *found.values()])
