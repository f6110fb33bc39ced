"""Which losses are computed by the node before them.

    x ─► through ─► loss        two nodes: rows, residuals and gradients wait between them
    x ─► (through loss)         one node: one firing makes losses and gradients, nothing waits

A loss is fused with a ``through`` that has a row or bundle kernel and no other reader, and whose
rows all go there. A module that runs again from its inputs, or keeps autograd's graph, stays a node
of its own, as does a loss that judges messages one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from geartrain.graph.ends import Losing
from geartrain.graph.operator import AbstractOperator
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
