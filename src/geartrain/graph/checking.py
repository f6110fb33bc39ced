"""Whether a graph fits together: shapes, columns, and every function run on a few rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from geartrain.errors import GraphError
from geartrain.frames.frame import Arena, Schema
from geartrain.frames.instance import Instance
from geartrain.graph.blueprint import AbstractGraph
from geartrain.graph.ends import Losing
from geartrain.graph.layout import with_broadcasts
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input, Port, Spec
from geartrain.graph.operators import Grouping, Merging, as_rows_come
from geartrain.graph.refusals import (
    named_parameters,
    reachable,
    readers_behind,
    refuse_what_cannot_run,
)
from geartrain.graph.sample_rows import sample_rows_of
from geartrain.graph.through import Through
from geartrain.nodes.uncompiled import uncompiled


@uncompiled()
def check(
    graph: AbstractGraph,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    like: Instance | None = None,
) -> None:
    """See ``Graph.check``."""
    operators = with_broadcasts(graph.operators)
    if not any(isinstance(o, Input) for o in operators):
        raise GraphError("the graph has no input; rows enter by graph.input(name)")
    refuse_what_cannot_run(graph, operators)
    schema = graph.schema()
    for operator in operators:
        if isinstance(operator, Input) and operator.shape is None and operator.name in shapes:
            operator.shape, operator.dtype = _shape_and_dtype(operator.name, shapes[operator.name])
    known: dict[Port, Spec] = {}
    seen: dict[int, list[object]] = {}
    for _ in range(len(operators) + 2):
        new = [_propagate(operator, known, seen, schema) for operator in as_rows_come(operators)]
        if not any(new):
            break
    for operator in operators:
        for sources in operator.sources:
            if not any((s.id, p) in known for s, p in sources):
                raise GraphError(
                    f"'{operator.name}' ({operator.kind}) can never get a row: its only sources "
                    "are behind it; join a stream that starts at an input"
                )
    _forget_handles_without_readers(operators, schema)
    _publish_keys(graph, operators)
    _try_out(graph, operators, known, like)


def _shape_and_dtype(name: str, given: object) -> tuple[tuple[int, ...], torch.dtype]:
    """What is told of the rows of an input.

    Raises:
        TypeError: It is no pair of these.
    """
    match given:
        case (tuple() | list() as shape, torch.dtype() as dtype):
            return tuple(shape), dtype
    raise TypeError(
        f"check({{'{name}': {given!r}}}): give shape and dtype of one row, as "
        f"{{'{name}': ((4,), torch.float32)}}"
    )


def _try_out(
    graph: AbstractGraph,
    operators: Sequence[AbstractOperator],
    known: Mapping[Port, Spec],
    like: Instance | None,
) -> None:
    """Run every function on a few rows that are made up, in the frame of an example."""
    inputs = {o.name: o for o in operators if isinstance(o, Input)}
    sample_rows = sample_rows_of(
        lambda: Arena(graph.vertex, graph.edge, graph.value), graph.schema(), inputs, like
    )
    if sample_rows is None:
        return
    weights = {
        id(p): f"{n} of '{t.name}'" for t in graph.throughs() for n, p in named_parameters(t)
    }
    rows: dict[int, torch.Tensor] = {}
    for name, entry in inputs.items():
        payload = known[entry.id, 0].payload
        if payload is not None and name in sample_rows.rows:
            rows[id(payload[0])] = sample_rows.rows[name]
    for operator in operators:
        if isinstance(operator, Through | Losing):
            (sources,) = operator.sources
            given = next(known[s.id, p] for s, p in sources if (s.id, p) in known)
            examples = [rows.get(id(p)) for p in given.payload or ()]
            operator.dry_run.weights = weights
            operator.try_out(given, sample_rows, examples)


def _propagate(
    operator: AbstractOperator,
    known: dict[Port, Spec],
    seen: dict[int, list[object]],
    schema: Schema,
) -> bool:
    """Whether an operator is given something new; then what it sends is found out.

    Args:
        operator: Its function is run, which takes its time.
        known: What is sent so far; extended.
        seen: What operators were given when they were asked last; extended.
        schema: Of the graph.
    """
    given: list[Spec] = []
    for sources in operator.sources:
        here = [known[s.id, p] for s, p in sources if (s.id, p) in known]
        if not here:
            return False
        if isinstance(operator, Merging):
            given.extend(here)
        else:
            given.append(here[0])
    facts = [_facts(spec) for spec in given]
    if seen.get(operator.id) == facts:
        return False
    seen[operator.id] = facts
    for port, spec in enumerate(operator.specs(given, schema)):
        known[operator.id, port] = spec
    return True


def _facts(spec: Spec) -> object:
    shapes = None if spec.payload is None else [(p.shape, p.dtype) for p in spec.payload]
    return spec.columns, shapes, spec.bundled


def _publish_keys(graph: AbstractGraph, operators: Sequence[AbstractOperator]) -> None:
    """What joins, ungroups and losses found was found on copies; the originals learn it."""
    found = {o.name: o for o in operators}
    for operator in graph.operators:
        same = found[operator.name]
        if isinstance(operator, Losing) and isinstance(same, Losing):
            operator.classes = same.classes
        for what in ("_key", "_handles", "parts"):
            if hasattr(same, what):
                setattr(operator, what, getattr(same, what))


def _forget_handles_without_readers(operators: Sequence[AbstractOperator], schema: Schema) -> None:
    """Members of a group need to agree only in what somebody reads further on."""
    ahead = readers_behind(operators)
    for group in operators:
        if not isinstance(group, Grouping) or not group._handles:
            continue
        read: set[int] = set()
        for memory in operators:
            if isinstance(memory, Holding):
                behind = reachable(group, ahead | {memory.id: []})  # it gives a handle of its own
                if any(isinstance(o, Through) and o.memory is memory for o in behind):
                    read.add(schema.state[memory.column])
        group._handles = sorted(read & set(group._handles))
