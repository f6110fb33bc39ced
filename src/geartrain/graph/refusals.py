"""Graphs that cannot be run, each refused with what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from geartrain.errors import GraphError
from geartrain.graph.blueprint import AbstractGraph
from geartrain.graph.ends import Losing
from geartrain.graph.gear import Gear, Geared, refuse_idle_replays, refuse_starving
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.operators import Copying, Detaching, Merging, Replaying
from geartrain.graph.overlap import Overlapped
from geartrain.graph.synthetic import Synthesizing
from geartrain.graph.through import Through


def refuse_what_cannot_run(graph: AbstractGraph, operators: Sequence[AbstractOperator]) -> None:
    """Look at the graph as a whole; shapes and functions are looked at by ``checking``.

    Raises:
        GraphError: Parts share a weight, a loop never ends, a gear starves, and so on.
    """
    _refuse_shared_parameters(graph)
    _refuse_endless_loops(operators)
    _refuse_frames_behind_replays(operators)
    _refuse_gears_that_starve(operators)
    _refuse_memories_answered_early(operators)


_PASSING = frozenset(
    (
        *("through", "move", "merge", "detach", "replay", "broadcast", "ungroup", "split", "join"),
        "hold",
    )
)
"""Kinds whose every row comes out again; a flatmap ends rows that have no edges."""


def _refuse_endless_loops(operators: Sequence[AbstractOperator]) -> None:
    """A cycle that no row can leave and that uses none up would turn for ever."""
    ahead = readers_behind(operators)
    passing = {o.id for o in operators if o.kind in _PASSING}
    for start in operators:
        if start.id not in passing or not isinstance(start, Merging):
            continue
        stack: list[tuple[AbstractOperator, list[str]]] = [(start, [start.name])]
        seen = {start.id}
        while stack:
            operator, path = stack.pop()
            for reader in ahead[operator.id]:
                if reader is start:
                    raise GraphError(
                        f"the loop {' → '.join([*path, start.name])} can never end: every row goes "
                        "round for ever; split off those that are done with where(), or group them"
                    )
                if reader.id in passing and reader.id not in seen:
                    seen.add(reader.id)
                    stack.append((reader, [*path, reader.name]))


def _refuse_frames_behind_replays(operators: Sequence[AbstractOperator]) -> None:
    """Replayed rows carry another instance's frame: what they need is in their payload."""
    ahead = readers_behind(operators)
    for start in operators:
        if not isinstance(start, Replaying) or not start.rule.times:
            continue
        for operator in reachable(start, ahead):
            reads: object = None
            if isinstance(operator, Losing):
                reads = operator.target if operator.target is not None else operator.weight
            elif isinstance(operator, Through):
                reads = operator.call.read or ("edges" if operator.call.inside else None)
            if reads is not None and reads != ():
                raise GraphError(
                    f"'{operator.name}' reads {reads!r} of the instance, but rows that "
                    f"'{start.name}' replays come from other instances; let it ride along in the "
                    "payload: concat(stream, targets, how='tuple')"
                )


def _refuse_memories_answered_early(operators: Sequence[AbstractOperator]) -> None:
    """A memory is held until its bundle is answered: nobody between it and a reader may be first.

    Raises:
        GraphError: An operator between answers before what is behind it has been answered.
    """
    ahead = readers_behind(operators)
    for memory in operators:
        if not isinstance(memory, Holding):
            continue
        if not memory.readers:
            raise GraphError(
                f"memory '{memory.name}' is read by nobody; read it with "
                f"rows.attend({memory.name}, module), or leave hold() out"
            )
        for between in reachable(memory, ahead):
            if not (
                isinstance(between, Detaching | Replaying)
                or (isinstance(between, Through) and between.use is not None)
            ):
                continue
            anew = ahead | {memory.id: []}  # it gives a handle of its own
            for reader in reachable(between, anew):
                if isinstance(reader, Through) and reader.memory is memory:
                    raise GraphError(
                        f"'{reader.name}' reads memory '{memory.name}' behind '{between.name}' "
                        f"({between.kind}), which answers before what is behind it has been, so "
                        "the memory would be gone: read it before, or hold what is read behind it"
                    )


def _refuse_gears_that_starve(operators: Sequence[AbstractOperator]) -> None:
    """See ``gear.check_gears``; here wherever gradients alone of one part feed another."""
    ahead = readers_behind(operators)
    for upper in operators:
        above = gear_of(upper)
        if above is None or not above.slow:
            continue
        for lower in _fed_by(upper):
            if isinstance(lower, Through) and lower.has_parameters:
                refuse_starving(upper.name, above, lower.name, gear_of(lower) or Gear())
    for start in operators:
        if isinstance(start, Replaying):
            for upper in _only_ahead(start, ahead):
                if (above := gear_of(upper)) is not None:
                    refuse_idle_replays(upper.name, above, start.name, start.rule.times)


def gear_of(operator: AbstractOperator) -> Gear | None:
    """The gear of a ``through``, or None."""
    use = operator.use if isinstance(operator, Through) else None
    return use.gear if isinstance(use, Geared) else None


def _fed_by(start: AbstractOperator) -> list[AbstractOperator]:
    """Whoever has gradients from this operator and nowhere else."""
    found: list[AbstractOperator] = []
    queue = [start]
    while queue:
        for sources in queue.pop().sources:
            for source, _ in sources:
                if _has_other_teachers(source) or source in found:
                    continue
                found.append(source)
                queue.append(source)
    return found


def _has_other_teachers(operator: AbstractOperator) -> bool:
    if isinstance(operator, Copying | Detaching):
        return True
    if isinstance(operator, Replaying):
        return not operator.rule.fresh
    return isinstance(operator, Through) and isinstance(operator.use, Overlapped | Synthesizing)


def _only_ahead(
    start: AbstractOperator, ahead: Mapping[int, Sequence[AbstractOperator]]
) -> list[AbstractOperator]:
    """Operators that follow one another behind this one, up to the first with several readers."""
    found: list[AbstractOperator] = []
    while len(ahead[start.id]) == 1 and ahead[start.id][0] not in found:
        start = ahead[start.id][0]
        found.append(start)
    return found


def _refuse_shared_parameters(graph: AbstractGraph) -> None:
    owners: dict[int, tuple[object, str]] = {}
    for through in graph.throughs():
        owner = through.owner
        for name, parameter in named_parameters(through):
            other = owners.setdefault(id(parameter), (owner, through.name))
            if other[0] is not owner:
                raise GraphError(
                    f"parameter '{name}' of '{through.name}' also belongs to '{other[1]}': weights "
                    "have one owner; make one Part of both modules and name it in both through()s"
                )


def readers_behind(operators: Sequence[AbstractOperator]) -> dict[int, list[AbstractOperator]]:
    ahead: dict[int, list[AbstractOperator]] = {o.id: [] for o in operators}
    for operator in operators:
        for sources in operator.sources:
            for source, _ in sources:
                ahead[source.id].append(operator)
    return ahead


def reachable(
    start: AbstractOperator, ahead: Mapping[int, Sequence[AbstractOperator]]
) -> list[AbstractOperator]:
    """All operators behind this one."""
    found: list[AbstractOperator] = []
    queue = [start]
    while queue:
        for reader in ahead[queue.pop().id]:
            if reader not in found:
                found.append(reader)
                queue.append(reader)
    return found


def named_parameters(through: Through) -> list[tuple[str, torch.nn.Parameter]]:
    return [] if through.module is None else list(through.module.named_parameters())
