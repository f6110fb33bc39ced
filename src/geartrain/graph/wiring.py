"""From operators to wires: who reads what, what is defined where, and fresh nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

from geartrain.errors import GraphError
from geartrain.frames.frame import Arena, Schema
from geartrain.frames.precision import Precision
from geartrain.graph.admission import Admission
from geartrain.graph.blueprint import AbstractGraph
from geartrain.graph.fusion import fused
from geartrain.graph.looping import Looping, door_name, make_loop, memories_of
from geartrain.graph.loops import Refusal, Region, find_regions, reaching, readers_of
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input, Port
from geartrain.graph.operators import Copying
from geartrain.graph.through import Through
from geartrain.nodes.control import AbstractStep
from geartrain.nodes.memory import Held, HoldNode
from geartrain.nodes.node import AbstractNode, Place
from geartrain.nodes.weights import AbstractWeights


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


@final
@dataclass(frozen=True, slots=True)
class Owner:
    """What one copy of a ``through`` runs with.

    Args:
        function: Its module or function.
        weights: Its part's, or None.
    """

    function: Callable[..., Any]
    weights: AbstractWeights | None


def wire(
    graph: AbstractGraph,
    owners: Callable[[Through], Sequence[Owner]],
    copies_of_all: int = 1,
    precision: Precision = "full",
    apart: Collection[str] = (),
    spread: bool = False,
    by_steps: Refusal | None = None,
    operators: Sequence[AbstractOperator] | None = None,
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
        operators: Of the graph, with broadcasts, where they are known; they are not changed.

    Raises:
        GraphError: A loop that is to run whole cannot.
    """
    if operators is None:
        operators = graph.copy_with_broadcasts()
    schema = graph.schema()
    arena = Arena(graph.vertex, graph.edge, graph.value)
    nodes: dict[int, AbstractNode] = {}
    steps: dict[int, AbstractStep] = {}
    readers = readers_of(operators)
    owned = {o.id: list(owners(o)) for o in operators if isinstance(o, Through)}
    how_many = _count_copies(operators, owned, readers, copies_of_all)
    endings = fused(operators, apart)
    regions = find_regions(operators, readers, graph.run, endings)
    loops = _whole_loops(regions, operators, owned, how_many, spread, by_steps)
    for reach in reaching(regions, operators, readers, apart):
        if set(map(id, reach.made_of)) <= set(map(id, loops)):
            more = _whole_loops([reach], operators, owned, how_many, spread, by_steps)
            loops = [r for r in loops if not more or r not in reach.made_of] + more
    copies: dict[int, tuple[int, ...]] = {}
    operator_of: dict[int, int] = {}
    next_number = len(operators) + 2 * len(loops) + 1
    held: dict[tuple[int, int], Held] = {}
    together: dict[tuple[int, int], list[int]] = {}
    inside = {loss.id for loss in endings.values()}
    inside |= {number for region in loops for number in region.operators}
    for operator in operators:
        numbers = []
        if operator.id in inside:
            copies[operator.id] = ()
            continue
        for k in range(how_many[operator.id]):
            number = operator.id if k == 0 else next_number
            next_number += k > 0
            place = Place(number, copy_name(operator.name, k), arena, schema, spread)
            made: AbstractNode | AbstractStep | None
            if isinstance(operator, Through):
                owners_of = owned[operator.id]
                owner = owners_of[k % len(owners_of)]
                loss = endings.get(operator.id)
                objective = None
                if loss is not None:
                    objective = loss.objective(replace(place, name=copy_name(loss.name, k)))
                memory = None if operator.memory is None else (operator.memory.id, k)
                made = operator.with_function(owner.function).make(
                    place,
                    owner.weights,
                    precision,
                    objective,
                    None if memory is None else held[memory],
                )
                if memory is not None:
                    together[memory].append(number)
            else:
                made = operator.make(place, None)
                if isinstance(made, HoldNode):
                    held[operator.id, k], together[operator.id, k] = made.held, [number]
            if isinstance(made, AbstractStep):
                steps[operator.id] = made
                break
            if made is not None:
                nodes[number] = made
                numbers.append(number)
                operator_of[number] = operator.id
        copies[operator.id] = tuple(numbers)
    admission = Admission(operators, schema)
    inner_readers: dict[int, Mapping[Port, Port]] = {}
    whole = [*operators]
    for region in loops:
        members = [o for o in operators if o.id in region.operators]
        door = Looping(door_name(region.name), region, [])
        looping = Looping(region.name, region, members)
        door.id, looping.id = len(whole) + 1, len(whole) + 2
        whole += [door, looping]
        inner = {p: r for p, r in readers.items() if p[0] in region.operators}
        numbers, doors = [], []
        # Of a loop's modules there are equally many; others have as many as rows come from.
        counted = [t.id for t in looping.throughs] or list(region.operators)
        for k in range(max(how_many[number] for number in counted)):
            here = looping.id if k == 0 else next_number
            entrance = door.id if k == 0 else next_number + 1
            next_number += 2 * (k > 0)
            name = partial(copy_name, copy=k)
            here_place = Place(here, name(looping.name), arena, schema, spread)
            throughs = {
                t.id: (t.with_function(owned[t.id][k].function), owned[t.id][k].weights)
                for t in looping.throughs
            }
            made_door, made_loop = make_loop(
                looping,
                here_place,
                replace(here_place, id=entrance, name=name(door.name)),
                inner,
                throughs,
                precision,
                {number: held[number, k] for number in looping.memories},
                {loss: next_number + j for j, loss in enumerate(looping.losses)},
            )
            next_number += len(looping.losses)
            for number in looping.memories:
                together[number, k].append(here)
            nodes[entrance], nodes[here] = made_door, made_loop
            operator_of[entrance], operator_of[here] = door.id, looping.id
            doors.append(entrance)
            numbers.append(here)
            inner_readers[here] = inner
        copies[door.id], copies[looping.id] = tuple(doors), tuple(numbers)
        readers = _around(readers, region, door.id, looping.id)
    operators = whole
    return Wiring(
        arena,
        schema,
        nodes,
        steps,
        readers,
        {o.name: o for o in operators if isinstance(o, Input)},
        {o.id: o for o in operators},
        copies,
        operator_of,
        precision,
        admission,
        [numbers for numbers in together.values() if len(numbers) > 1],
        inner_readers,
    )


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
            region.reason = "rows may lie on a device"
        elif region.whole and by_steps is not None:
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
        if isinstance(o, Through) and o.memory is memory and o.parameters
    }
    if len(set(found.values())) > 1:
        told = ", ".join(f"'{name}' has {n}" for name, n in found.items())
        raise GraphError(
            f"memory '{memory.name}' is read by parts of different numbers of copies: {told}; who "
            "reads a memory has as many as its other readers: give their parts equal replicas"
        )
    return max([least, *found.values()])


def with_broadcasts(given: Sequence[AbstractOperator]) -> list[AbstractOperator]:
    """Copies of the operators, numbered from 1, with a broadcast where a stream is used twice."""
    copies = {id(o): copy.copy(o) for o in given}
    operators = list(copies.values())
    for operator in operators:
        operator.sources = [
            [(copies[id(source)], port) for source, port in sources] for sources in operator.sources
        ]
        if isinstance(operator, Through) and operator.memory is not None:
            memory = copies[id(operator.memory)]
            assert isinstance(memory, Holding)
            memory.readers = [*memory.readers, operator.name]
            operator.memory = memory
    uses: dict[tuple[int, int], list[tuple[AbstractOperator, int, int]]] = {}
    for operator in operators:
        for p, sources in enumerate(operator.sources):
            if not sources:
                raise GraphError(
                    f"'{operator.name}' has no source; give the loop one: "
                    f"{operator.name}.join(stream)"
                )
            for i, (source, port) in enumerate(sources):
                uses.setdefault((id(source), port), []).append((operator, p, i))
    for source in list(operators):
        for port in range(source.ways):
            readers = uses.get((id(source), port), [])
            if not readers:
                raise GraphError(
                    f"the stream of '{source.name}'{_port(source, port)} is read by nobody; end it "
                    "with .loss(...), .output() or .stop()"
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


def _port(operator: AbstractOperator, port: int) -> str:
    return f" port {operator.port_name(port)}" if operator.ways > 1 else ""
