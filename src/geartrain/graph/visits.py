"""Where every instance comes by in exactly one message.

    one bundle an instance ─► through ─► through ─► loss          whole as far as this
                                 └─► ungroup, route, loop ...     here a message is no instance

Who counts instances may count messages there, and need not wait until instances have finished
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.graph.gear import Geared
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input
from geartrain.graph.operators import (
    Copying,
    Detaching,
    Joining,
    Moving,
    Replaying,
    Splitting,
    as_rows_come,
)
from geartrain.graph.through import Through


def once(operators: Sequence[AbstractOperator]) -> frozenset[str]:
    """Names of the throughs that learn from every instance in exactly one message.

    Not those behind a second input, as an instance may leave one out, and not those behind routes,
    merges, loops, groups, ungroups, flatmaps or replays. With broadcasts in between.
    """
    given = as_rows_come(operators)
    inputs = [o for o in given if isinstance(o, Input)]
    whole = {o.id for o in inputs if o.bundle and len(inputs) == 1}
    found = True
    while found:
        found = False
        for operator in given:
            if operator.id not in whole and _passes(operator):
                sources = [s.id for sources in operator.sources for s, _ in sources]
                if whole.issuperset(sources):
                    whole.add(operator.id)
                    found = True
    return frozenset(
        o.name for o in given if isinstance(o, Through) and o.id in whole and not _skips(o)
    )


def _passes(operator: AbstractOperator) -> bool:
    """Whether each message that comes leaves by every port, and nothing else does."""
    if isinstance(operator, Replaying):
        return not operator.rule.times
    kinds = Through | Moving | Detaching | Copying | Joining | Splitting | Holding
    return isinstance(operator, kinds)


def _skips(through: Through) -> bool:
    return isinstance(through.use, Geared) and through.use.gear.slow
