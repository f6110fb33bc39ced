"""Which losses are computed by the node before them, and which modules by that of the first.

    x ─► through ─► loss        two nodes: rows, residuals and gradients wait between them
    x ─► (through loss)         one node: one firing makes losses and gradients, nothing waits

A loss is fused with a ``through`` that has a row or bundle kernel and no other reader, and whose
rows all go there. A module that runs again from its inputs, or keeps autograd's graph, stays a node
of its own, as does a loss that judges messages one at a time.

    x ─► through ─► through ─┬─► through ─► loss        six nodes, as before, or
                             └─► through ─► loss        one: all of it at once

Modules whose rows all go on to such modules, and in the end to losses, are a stack. They compute
the same rows, so one firing makes all of it, there and back. A module is in one if its rows may
come back apart: it looks into no bundle or memory, and keeps no graph of autograd's. Beside losses
rows may be put out, or stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from geartrain.graph.cycles import furthest_first
from geartrain.graph.ends import Losing, Outputting, Stopping
from geartrain.graph.operator import AbstractOperator, Port
from geartrain.graph.operators import Copying
from geartrain.graph.region import Region
from geartrain.graph.through import Through


def fused(operators: Sequence[AbstractOperator], apart: Collection[str] = ()) -> dict[int, Losing]:
    """Number of a ``through`` to the loss that is computed in it.

    Args:
        operators: With broadcasts and numbers; a stream has one reader.
        apart: Names of losses that are left alone.
    """
    found: dict[int, Losing] = {}
    for operator in operators:
        if not isinstance(operator, Losing) or operator.alone or operator.name in apart:
            continue
        (sources,) = operator.sources
        before = sources[0][0]
        if len(sources) == 1 and isinstance(before, Through) and _may_end(before):
            found[before.id] = operator
    return found


def _may_end(through: Through) -> bool:
    return through.has_kernel()


def stacks(
    operators: Sequence[AbstractOperator],
    readers: Mapping[Port, Port],
    endings: Collection[int],
    apart: Collection[str] = (),
    taken: Collection[int] = (),
) -> list[Region]:
    """The stacks of a graph, each as large as it can be, and named as its first module.

    Args:
        operators: With broadcasts and numbers; a stream has one reader.
        readers: Output port to the input port that it leads to, merges resolved.
        endings: Numbers of those that are computed with a loss in any case.
        apart: Names of losses that are left alone.
        taken: Numbers of operators that are computed otherwise.
    """
    known = {o.id: o for o in operators}
    able = {
        o.id for o in operators if o.id not in taken and o.name not in apart and _may_be_stacked(o)
    }
    sources = Counter(readers.values())
    ahead = {k: [readers[k, port] for port in range(known[k].ways)] for k in able}
    whole: set[int] = set()  # whose rows all go on to such, and meet no others
    for number in furthest_first(able, lambda k: [reader for reader, _ in ahead.get(k, ())]):
        met = any(sources[port] > 1 or port[0] not in whole for port in ahead.get(number, ()))
        if number in able and not met:
            whole.add(number)
    inside = {reader for number in whole for reader, _ in ahead[number]}
    found = []
    for number in sorted(whole - inside):
        ordered = in_order(operators, readers, number)
        throughs = [o for o in ordered if isinstance(o, Through)]
        losing = any(isinstance(o, Losing) for o in ordered)
        if losing and (len(throughs) > 1 or not {o.id for o in throughs} <= set(endings)):
            members = frozenset(o.id for o in ordered)
            region = Region(throughs[0].name, "auto", members, loops=False)
            region.entries.append((number, 0))
            found.append(region)
    return found


def in_order(
    operators: Sequence[AbstractOperator], readers: Mapping[Port, Port], first: int
) -> list[AbstractOperator]:
    """An operator, numbered from 1, and all behind it, each behind the one whose rows it gets."""
    found = [operators[first - 1]]
    for operator in found:  # grows meanwhile
        ahead = [readers[operator.id, port][0] for port in range(operator.ways)]
        found += [operators[number - 1] for number in ahead]
    return found


def _may_be_stacked(operator: AbstractOperator) -> bool:
    if isinstance(operator, Losing | Outputting):
        return not operator.alone
    if not isinstance(operator, Through):
        return isinstance(operator, Copying | Stopping)
    call, plain = operator.call, operator.use is None and operator.memory is None
    apart = not (call.inside or call.pool or call.alone)
    return plain and apart and operator.keep in ("auto", "activations")
