"""From modules that feed one another up to their losses to the node that computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from geartrain.frames.precision import Precision
from geartrain.graph.ends import Losing
from geartrain.graph.operator import AbstractOperator, Port
from geartrain.graph.through import Through
from geartrain.nodes.loss import Objective
from geartrain.nodes.node import Place
from geartrain.nodes.stack import Layer, StackNode
from geartrain.nodes.weights import AbstractWeights


def in_order(
    operators: Sequence[AbstractOperator], readers: Mapping[Port, Port], first: int
) -> list[AbstractOperator]:
    """An operator, numbered from 1, and all behind it, each behind the one whose rows it gets."""
    found = [operators[first - 1]]
    for operator in found:  # grows meanwhile
        ahead = [readers[operator.id, port][0] for port in range(operator.ways)]
        found += [operators[number - 1] for number in ahead]
    return found


def make_stack(
    members: Sequence[AbstractOperator],
    place: Place,
    throughs: Mapping[int, tuple[Through, AbstractWeights | None]],
    losses: Mapping[int, int],
    precision: Precision,
) -> StackNode:
    """A fresh node.

    Args:
        members: In the order in which rows come to them.
        place: Of the node.
        throughs: By number of the operator, with a copy's own function, and its weights.
        losses: By number of the operator, the number that each loss has among nodes.
        precision: Of the rows.
    """
    copy = place.name[len(members[0].name) :]
    values: dict[int, int] = {}  # by operator, the number of what it makes
    layers: list[Layer] = []
    judged: list[tuple[Objective, int]] = []
    for operator in members:
        source = values.get(operator.sources[0][0][0].id, 0)
        name = operator.name + copy
        if isinstance(operator, Through):
            through, weights = throughs[operator.id]
            made = through.computed(weights, precision, ends=True)
            layers.append(Layer(name, source, *made, weights))
            values[operator.id] = len(layers)
        elif isinstance(operator, Losing):
            its = replace(place, id=losses[operator.id], name=name)
            judged.append((operator.objective(its), source))
        else:
            values[operator.id] = source
    return StackNode(place, layers, judged)
