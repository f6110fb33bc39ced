"""A graph of operators that holds for any number of rows, of two traces at different numbers.

    trace at 3 rows ─┐ numbers that differ are multiples
    trace at 5 rows ─┘ of the number of rows ─► one graph, whose first argument is that number

Two traces with plain numbers instead of one with symbols need no guards, and what is not a multiple
of the number of rows is refused instead of specialised.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast, final

import torch
from torch import Tensor, fx

from geartrain.derived.draws import drawn, evenly_drawn
from geartrain.derived.traces.emit import emit
from geartrain.derived.traces.record import Trace
from geartrain.derived.traces.unsearched import Unsearched
from geartrain.errors import GraphError
from geartrain.frames.message import Payload

aten = torch.ops.aten
Function: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Payload]
"""Outputs of operands and inputs."""

SIZES: Final = (3, 5)
"""Numbers of rows that are traced."""

PRODUCTS: Final = (aten.mm.default, aten.addmm.default)
"""Of two matrices, the weight last."""
VIEWS: Final = frozenset({aten.view.default, aten._unsafe_view.default})
_SAME: Final = {
    *(aten.detach.default, aten.alias.default),
    *(aten.lift_fresh.default, aten.lift_fresh_copy.default),
}

ONCE: Final = "once"
"""What a node of a scatter has in its meta, if no entry is written twice."""
_RANKS: Final = (aten.topk.default, aten.sort.default, aten.sort.stable)
_EVEN: Final = (aten.rand_like.default, aten.rand.default)
_AXES: Final = (aten.unsqueeze.default, aten.squeeze.dim)
_ZEROS: Final = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


@final
class CountedGraph:
    """One graph of operators for any number of rows.

    Args:
        traces: Of ``SIZES`` rows.
        operands, inputs: How many of the arguments are weights and buffers, and then inputs.

    Attributes:
        graph: It.
        n: The number of rows in it.
        operands, inputs, others: Its placeholders.
        constants: Tensors that it reads besides, by name.
        alien: Whether one of those is somebody's, and not made by the code.
        windows: As of ``Trace``.
        shapes: Of its nodes at three rows.
        rows, axis: How many rows a tensor has for each row, and along which axis.

    Raises:
        GraphError: What is computed depends on the number of rows in another way.
    """

    def __init__(self, traces: Sequence[Trace], operands: int, inputs: int) -> None:
        small, large = traces
        self.graph, self.constants = small.graph, small.constants
        self.alien = small.alien or large.alien
        self.windows = small.windows
        places = [x for x in self.graph.nodes if x.op == "placeholder"]
        self.operands, self.inputs = places[:operands], places[operands : operands + inputs]
        self.others = places[operands + inputs :]
        self.shapes = dict(small.shapes)
        self._both: dict[fx.Node, tuple[tuple[int, ...], ...]] = {}
        self.rows: dict[fx.Node, int] = {}
        self.axis: dict[fx.Node, int] = {}
        self._large = _twins(self.graph, large.graph)
        for x, y in self._large.items():
            if x in small.shapes and y in large.shapes:
                self._both[x] = small.shapes[x], large.shapes[y]
                self._note_rows(x, small.shapes[x], large.shapes[y])
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            self.n = self.graph.placeholder("rows")
        self._merge(large.constants)
        self._simplify()

    def results(self) -> list[fx.Node]:
        """What it gives."""
        (results,) = next(iter(reversed(self.graph.nodes))).args
        return list(cast("Sequence[fx.Node]", results))

    def is_whole(self, x: fx.Node | None) -> bool:
        """Whether x has one row for each row, first axis."""
        return x is not None and self.rows.get(x) == 1 and self.axis[x] == 0

    def is_many(self, x: fx.Node) -> bool:
        """Whether x has rows, one or several for each, first axis."""
        return x in self.rows and self.axis[x] == 0

    def number_draws(self) -> None:
        """What is drawn for each row has a number, and follows from that and the row's seed."""
        number = 0
        for x in self.graph.nodes:
            even = x.target in _EVEN
            usual = even or (x.target is aten.bernoulli.p and not x.kwargs)
            if usual and "dtype" in x.meta and self.is_whole(x):
                args: Any = x.args
                tail = tuple(self.shapes[x][1:])
                share = () if even else (float(args[1]),)
                x.args = (self.n, tail, *share, number, x.meta["dtype"])
                x.target, x.kwargs = evenly_drawn if even else drawn, {}
                number += 1

    def begun(self, given: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """Another graph of n and the operands, then ``given``; what its nodes are made of."""
        graph = Unsearched()
        made = {}
        for k, x in enumerate([self.n, *self.operands, *given]):
            made[x] = graph.placeholder(f"given_{k}")
            made[x].meta.update(x.meta)
        return graph, made

    def copy(self, roots: Sequence[fx.Node], graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> None:
        """Have roots, and what they are computed from, in another graph."""
        needed = needed_by(roots, made)
        for x in self.graph.nodes:
            if x in needed:
                made[x] = graph.node_copy(x, made.__getitem__)
                if x.target in VIEWS:  # what is kept is contiguous, whatever it was
                    made[x].target = aten.reshape.default

    def code(self, given: Sequence[fx.Node], results: Sequence[fx.Node]) -> Callable[..., Payload]:
        """What computes results, as a function of n, the operands, and then ``given``."""
        graph, made = self.begun(given)
        self.copy(results, graph, made)
        graph.output(tuple([made[x] for x in results]))
        return emit(graph, self.constants)

    def function(self, given: Sequence[fx.Node], results: Sequence[fx.Node]) -> Function:
        """The same of operands and inputs, which are ``given``; there is one at least."""
        code = self.code(given, results)

        def function(operands: Sequence[Tensor], inputs: Sequence[Tensor]) -> Payload:
            return code(inputs[0].shape[0], *operands, *inputs)

        return function

    def _note_rows(self, x: fx.Node, small: tuple[int, ...], large: tuple[int, ...]) -> None:
        differs = [k for k, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
        if len(small) == len(large) and len(differs) == 1:
            (axis,) = differs
            if small[axis] * SIZES[1] == large[axis] * SIZES[0]:
                self.rows[x], self.axis[x] = small[axis] // SIZES[0], axis

    def _merge(self, large: Mapping[str, Tensor]) -> None:
        """Let the small graph count rows: what differs in the large one is a multiple of them."""
        multiples: dict[int, fx.Node] = {1: self.n}
        for x, y in self._large.items():
            if x.op == "get_attr":
                _refuse_constant(self.constants[str(x.target)], large[str(y.target)])
            x.args = self._merged(x.args, y.args, multiples)
            x.kwargs = self._merged(x.kwargs, y.kwargs, multiples)

    def _merged(self, a: Any, b: Any, multiples: dict[int, fx.Node]) -> Any:
        if isinstance(a, fx.Node):
            if self._large.get(a) is b:
                return a
        elif isinstance(a, (tuple, list)) and len(a) == len(b):
            found = [self._merged(x, y, multiples) for x, y in zip(a, b, strict=True)]
            return tuple(found) if isinstance(a, tuple) else found
        elif isinstance(a, dict) and a.keys() == b.keys():
            return {name: self._merged(x, b[name], multiples) for name, x in a.items()}
        elif a == b or (a != a and b != b):  # the latter: no numbers
            return a
        elif type(a) is type(b) is int and a * SIZES[1] == b * SIZES[0]:
            times_ = a // SIZES[0]
            if times_ not in multiples:
                with self.graph.inserting_after(self.n):
                    multiples[times_] = self.graph.call_function(operator.mul, (self.n, times_))
            return multiples[times_]
        raise GraphError(f"it computes with {a} for {SIZES[0]} rows and with {b} for {SIZES[1]}")

    def _simplify(self) -> None:
        """Without copies of inputs, tensors under another name, and what is turned twice."""
        for x in list(self.graph.nodes):
            args: Any = x.args
            same = x.target in _SAME or (
                x.target is aten.clone.default and args[0] in self.inputs and not x.kwargs
            )
            same = same or self._is_as_it_was(x)
            if x.target is aten.scatter.src and self._is_ranked(args[2], args[1]):
                x.meta[ONCE] = True
                if args[0].target in _ZEROS:
                    x.target = aten.scatter_add.default
            twice = _is_turned_back(x)
            if same or twice:
                x.replace_all_uses_with(args[0].args[0] if twice else args[0])
                self.graph.erase_node(x)

    def _is_ranked(self, x: fx.Node, dim: int) -> bool:
        """Whether it says which entries of an axis come first in an order: none of them twice."""
        index = x
        while x.target in VIEWS or x.target in _AXES:
            x = cast("fx.Node", x.args[0])
        args: Any = x.args
        if x.target is not operator.getitem or args[0].target not in _RANKS or args[1] != 1:
            return False
        rank, found = args[0], len(self.shapes[x])
        own = rank.args[2:3] if rank.target is aten.topk.default else rank.args[1:2]
        (along,) = own or (rank.kwargs.get("dim", -1),)
        return x is not index or along % found == dim % found

    def _is_as_it_was(self, x: fx.Node) -> bool:
        """Whether it is a view of the same shape, at both sizes, or of axes in the same order."""
        args: Any = x.args
        if x.target is aten.permute.default:
            return list(args[1]) == [*range(len(args[1]))]
        if x.target not in VIEWS:
            return False
        source: fx.Node = args[0]
        return self._both[x] == self._both.get(source)


def _is_turned_back(x: fx.Node) -> bool:
    """Whether it swaps two axes that were swapped just before."""
    args: Any = x.args
    if x.target not in (aten.t.default, aten.transpose.int) or args[0].target is not x.target:
        return False
    return set(args[1:]) == set(args[0].args[1:])


def needed_by(
    roots: Iterable[fx.Node],
    made: Collection[fx.Node] = (),
    also: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> set[fx.Node]:
    """What roots are computed from, and they.

    Args:
        roots: Nodes.
        made: Those that there are already, and so all that nothing else is computed from.
        also: What a node wants besides its arguments.
    """
    needed: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        x = waiting.pop()
        if x not in made and x not in needed:
            needed.add(x)
            waiting += x.all_input_nodes
            if x in also:
                waiting.append(also[x])
    return needed


def _twins(small: fx.Graph, large: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes of two graphs, side by side."""
    pairs = list(zip(small.nodes, large.nodes, strict=False))
    for x, y in pairs:
        if x.op != y.op or (x.target != y.target and x.op == "call_function"):
            raise GraphError(
                f"it computes {x.target} for {SIZES[0]} rows and {y.target} for {SIZES[1]}"
            )
    if len(small.nodes) != len(large.nodes):
        raise GraphError(f"it computes otherwise for {SIZES[0]} rows than for {SIZES[1]}")
    return dict(pairs)


def _refuse_constant(small: Tensor, large: Tensor) -> None:
    if small is not large and (small.shape != large.shape or not torch.equal(small, large)):
        raise GraphError("it makes a tensor whose values depend on the number of rows")
