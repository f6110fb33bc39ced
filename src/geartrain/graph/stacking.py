"""From modules that feed one another up to their losses to the node that computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from geartrain.frames.precision import Precision
from geartrain.graph.ends import Losing, Outputting
from geartrain.graph.operator import AbstractOperator
from geartrain.graph.through import Through
from geartrain.nodes.loss import Objective, OutputNode
from geartrain.nodes.node import Place
from geartrain.nodes.stack import Layer, StackNode
from geartrain.nodes.weights import AbstractWeights


def make_stack(
    members: Sequence[AbstractOperator],
    place: Place,
    throughs: Mapping[int, tuple[Through, AbstractWeights | None]],
    places: Mapping[int, Place],
    precision: Precision,
) -> StackNode:
    """A fresh node.

    Args:
        members: In the order in which rows come to them.
        place: Of the node.
        throughs: By number of the operator, with a copy's own function, and its weights.
        places: Of its members, by number of the operator; ends have numbers of their own.
        precision: Of the rows.
    """
    values: dict[int, int] = {}  # by operator, the number of what it makes
    layers: list[Layer] = []
    judged: list[tuple[Objective, int]] = []
    put_out: list[tuple[OutputNode, int]] = []
    for operator in members:
        source = values.get(operator.sources[0][0][0].id, 0)
        its = places[operator.id]
        if isinstance(operator, Through):
            through, weights = throughs[operator.id]
            made = through.computed(weights, precision, ends=True)
            layers.append(Layer(its.name, source, *made, weights))
            values[operator.id] = len(layers)
        elif isinstance(operator, Losing):
            judged.append((operator.objective(its), source))
        elif isinstance(operator, Outputting):
            put_out.append((operator.make(its, None), source))
        else:
            values[operator.id] = source
    return StackNode(place, layers, judged, put_out)
