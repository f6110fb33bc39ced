"""What a module that looks inside bundles, or reads a memory, computes of its weights alone, or of
tensors that are the same in every call: angles of positions, slopes of heads.

traces at two sizes ─► what is of those alone, and of no size   ─► once a firing, as operands more
                       all else, at each of the sizes           ─► traced anew, with its gradient
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, fx

from geartrain.derived.computed import ComputedWeights
from geartrain.derived.ragged.traced import SAME
from geartrain.derived.traces.counted import PRODUCTS, Function, needed_by
from geartrain.derived.traces.emit import emit
from geartrain.derived.traces.record import Trace, draws
from geartrain.derived.traces.unsearched import Unsearched
from geartrain.frames.message import Payload

aten = torch.ops.aten

_COUNTED: Final = frozenset(
    {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default}
)
_VIEWS: Final = SAME | {aten.expand.default}


@final
class _Forward:
    """A trace of a function of operands and inputs, at one size.

    Args:
        trace: It.
        operands: How many of its arguments are weights and buffers.
    """

    def __init__(self, trace: Trace, operands: int) -> None:
        self.trace, self.nodes = trace, list(trace.graph.nodes)
        places = [x for x in self.nodes if x.op == "placeholder"]
        self.operands, self.inputs = places[:operands], places[operands:]

    def code(self, given: Sequence[fx.Node], results: Sequence[fx.Node]) -> Callable[..., Payload]:
        """What computes results of what is given."""
        graph, made = Unsearched(), {}
        for k, x in enumerate(given):
            made[x] = graph.placeholder(f"given_{k}")
        needed = needed_by(results, made)
        for x in self.nodes:
            if x in needed:
                made[x] = graph.node_copy(x, made.__getitem__)
        graph.output(tuple([made[x] for x in results]))
        return emit(graph, self.trace.constants)

    def rest(self, computed: Sequence[fx.Node]) -> Function:
        """The function, of operands with what is computed of them behind them, and inputs."""
        (results,) = self.nodes[-1].args
        code = self.code([*self.operands, *computed, *self.inputs], results)

        def function(operands: Sequence[Tensor], inputs: Sequence[Tensor]) -> Payload:
            return code(*operands, *inputs)

        return function


def apart(
    traces: Sequence[Trace], operands: Sequence[Tensor]
) -> tuple[ComputedWeights, list[Function]] | None:
    """What a function computes of operands alone; and it, of operands, those, and inputs.

    Args:
        traces: Of the function, without its gradient, at two sizes.
        operands: Its weights and buffers.

    Returns:
        The latter at each of the sizes. None: it computes nothing of them alone, or draws.
    """
    small, large = (_Forward(trace, len(operands)) for trace in traces)
    if len(small.nodes) != len(large.nodes) or any(map(draws, small.nodes)):
        return None
    constant = _constant(small, large)
    places = _computed(small, large, constant)
    if not places:
        return None
    code = small.code(small.operands, [small.nodes[k] for k in places])

    def compute(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(code(*given))

    with torch.no_grad():
        likes = tuple([x.detach().contiguous() for x in compute(operands)])
    rests = [each.rest([each.nodes[k] for k in places]) for each in (small, large)]
    same = frozenset([k for k, at in enumerate(places) if small.nodes[at] in constant])
    return ComputedWeights(compute, likes, same), rests


def _constant(small: _Forward, large: _Forward) -> set[fx.Node]:
    """What is the same in every call, if it has several numbers: tensors that the code has, numbers
    that are counted up, and what is made of them alone."""
    found: set[fx.Node] = set()
    for x, twin in zip(small.nodes, large.nodes, strict=True):
        if x.op == "get_attr" and twin.op == "get_attr":
            both = [f.trace.constants[str(y.target)] for f, y in ((small, x), (large, twin))]
            same = torch.equal(*both)
        else:
            made = bool(x.all_input_nodes) and all(y in found for y in x.all_input_nodes)
            alone = x.op == "call_function" and (made or x.target in _COUNTED)
            same = alone and _is_of_no_size(x, twin, small.trace, large.trace)
        if same:
            found.add(x)
    several = {x for x in found if math.prod(small.trace.shapes.get(x, ())) > 1}
    return {x for x in several if (dtype := x.meta.get("dtype")) and dtype.is_floating_point}


def _computed(small: _Forward, large: _Forward, constant: set[fx.Node]) -> list[int]:
    """The places of what readers of rows read of operands and constants alone, but for operands
    themselves."""
    of_weights, own = set(small.operands) | constant, set(small.operands)
    for x, twin in zip(small.nodes, large.nodes, strict=True):
        alone = x.op == "call_function" and all(y in of_weights for y in x.all_input_nodes)
        if alone and x.all_input_nodes and _is_of_no_size(x, twin, small.trace, large.trace):
            of_weights.add(x)
    found: set[fx.Node] = set()
    for x in small.nodes:
        if x in of_weights or x.op != "call_function":
            continue
        for y in x.all_input_nodes:
            if y not in of_weights:
                continue
            read: Any = y
            if x.target in PRODUCTS and y is x.args[-1]:
                read = y.args[0] if y.target is aten.t.default else y
            if (viewed(y) if read is y and x.target not in PRODUCTS else read) not in own:
                found.add(read)
    return [k for k, x in enumerate(small.nodes) if x in found]


def _is_of_no_size(x: fx.Node, twin: fx.Node, small: Trace, large: Trace) -> bool:
    """Whether it has the same shape, and the same numbers, at both sizes."""
    if x.target is not twin.target or small.shapes.get(x) != large.shapes.get(twin):
        return False
    numbers = [[a for a in each.args if not isinstance(a, fx.Node)] for each in (x, twin)]
    return repr(numbers[0]) == repr(numbers[1])


def viewed(x: Any) -> Any:
    """What a node is a view of that costs nothing."""
    while isinstance(x, fx.Node) and x.target in _VIEWS:
        x = x.args[0]
    return x
