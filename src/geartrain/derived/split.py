"""A forward and a backward program for rows, cut out of one trace of a function and its gradient.

    function ─► joint graph (operands, inputs, tangents ─► outputs, gradients), of 3 and of 5 rows
                    │ numbers that differ are multiples of the number of rows
                    ├─► forward   what does not depend on tangents       ─► outputs, residuals
                    └─► backward  what does, and what is known without inputs ─► gradients

What the backward reads of the forward are *residuals*, and each must have one row for each row.
What it can make of weights alone it makes of the weights of now: the mixed view of
``nodes/kernel.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import Tensor, fx

from geartrain.derived.fused import Pair
from geartrain.derived.residuals import Residuals
from geartrain.derived.steps.fold import Columns, Folding, Summand, affine_columns, times_columns
from geartrain.derived.steps.lower import fuse
from geartrain.derived.steps.places import Like, Refused
from geartrain.derived.terms import Term
from geartrain.derived.traces.constants import Constants
from geartrain.derived.traces.counted import PRODUCTS, SIZES, VIEWS, CountedGraph, Function
from geartrain.derived.traces.emit import emit
from geartrain.derived.traces.joint import trace
from geartrain.derived.traces.record import draws
from geartrain.errors import GraphError
from geartrain.nodes.products import affine, times

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class TraceSplit:
    """What a trace was cut into.

    Args:
        forward: ``(n, *operands, *inputs)`` to outputs and then residuals.
        backward: ``(n, *operands, *residuals, *tangents)``, a tangent for each floating output, to
            the gradients of the floating inputs that have one and then what the terms need.
        outputs: Number of outputs.
        tangents: The output of each tangent.
        gradients: For each input that has a gradient, the tangents that it comes from.
        terms: What the operands get.
        draws: Whether the forward draws random numbers.
        alien: Whether they read tensors that are neither arguments nor made by the code.
        windows: As of ``Trace``; torch's part is without then.
        fused: The same in C, with residuals and terms of its own; None: something in it is not to
            be had.
        unfused: What that is.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    outputs: int
    tangents: tuple[int, ...]
    gradients: Mapping[int, frozenset[int]]
    terms: tuple[Term, ...]
    draws: bool
    alien: bool
    windows: bool
    fused: Pair | None = None
    unfused: str = ""


def split(
    function: Function,
    operands: Sequence[Tensor],
    learns: Sequence[bool],
    samples: tuple[Sequence[Tensor], Sequence[Tensor]],
    computed: int = 0,
    *,
    windows: bool = True,
) -> TraceSplit:
    """Trace a function at two numbers of rows and cut it.

    Args:
        function: Maps rows to rows; what it reads besides its arguments is taken as constant.
        operands: Weights and buffers.
        learns: Which of them are differentiated.
        samples: Inputs of ``SIZES`` rows, of one kind.
        computed: How many of the operands, the last ones, are computed of the others.
        windows: As of ``record``.

    Raises:
        GraphError: It cannot be cut, and why.
    """
    outputs = [function(operands, [x.clone() for x in inputs]) for inputs in samples]
    tangents = tuple(j for j, y in enumerate(outputs[0]) if y.is_floating_point())
    wanted = tuple(i for i, x in enumerate(samples[0]) if x.is_floating_point())
    if not tangents or not (wanted or any(learns)):
        raise GraphError("it has no gradient: its outputs, or all that it reads, are integers")
    traces = [
        trace(
            *(function, operands, learns, inputs, [torch.ones_like(y[j]) for j in tangents]),
            windows=windows,
        )
        for inputs, y in zip(samples, outputs, strict=True)
    ]
    whole = CountedGraph(traces, len(operands), len(samples[0]))
    return _Cut(whole, len(operands) - computed, len(outputs[0]), tangents).split(
        [k for k, yes in enumerate(learns) if yes], wanted
    )


@final
class _Cut:
    """One joint graph on its way to two.

    Every node is one of three kinds: it depends on a tangent; else on an input, or on chance; or on
    neither, and then a backward may compute it anew.
    """

    def __init__(
        self, whole: CountedGraph, own: int, outputs: int, tangents: tuple[int, ...]
    ) -> None:
        self._all, self._own = whole, own
        whole.number_draws()
        self._graph, self._constants, self._n = whole.graph, whole.constants, whole.n
        self._outputs, self._of_output = outputs, tangents
        self._operands, self._inputs = whole.operands, whole.inputs
        self._tangents = whole.others
        self._shapes, self._rows, self._axis = whole.shapes, whole.rows, whole.axis
        self._mark()
        self._residuals = Residuals(whole, self._of, self._here)
        self._use_products()
        for x in self._graph.nodes:
            dtype, rows = x.meta.get("dtype"), self._rows.get(x, 0)
            if dtype is not None and not self._axis.get(x):
                tail = self._shapes[x][1:] if rows else self._shapes[x]
                several = (rows,) if rows > 1 else ()
                x.meta["like"] = Like((*several, *tail), rows > 0, dtype, bool(several))
            elif dtype is not None:
                x.meta["aside"] = True

    def split(self, learned: Sequence[int], wanted: Sequence[int]) -> TraceSplit:
        """``learned`` operands and ``wanted`` inputs are those that were differentiated."""
        results = self._all.results()
        outputs, answers = results[: self._outputs], results[self._outputs :]
        for y in outputs:
            if not self._all.is_whole(y):
                raise GraphError(f"an output has shape {self._shapes.get(y)} of {SIZES[0]} rows")
        self._wanted = len(wanted)
        gradients = {
            i: self._of[d]
            for i, d in zip(wanted, answers[len(learned) :], strict=True)
            if self._of[d]
        }
        summands = [
            summand
            for k, d in zip(learned, answers, strict=False)
            for summand in self._terms(k, d, self._shapes[self._operands[k]])
        ]
        roots, terms = self._roots(summands)
        kept = self._residuals.of(roots)
        done = TraceSplit(
            emit(self._forward(outputs, kept), self._constants),
            emit(self._backward(roots, kept), self._constants),
            len(outputs),
            self._of_output,
            gradients,
            terms,
            any(draws(x) for x in self._graph.nodes),
            self._all.alien,
            self._all.windows,
        )
        try:
            return replace(done, fused=self._fused(summands))
        except Refused as error:
            return replace(done, unfused=str(error) or "an operator has no step")

    def _roots(self, summands: Sequence[Summand]) -> tuple[list[fx.Node], tuple[Term, ...]]:
        """What the backward is to find: gradients of inputs, then what the terms need."""
        answers = self._all.results()[self._outputs :]
        roots = [d for d in answers[len(answers) - self._wanted :] if self._of[d]]
        terms = []
        for summand in summands:
            terms.append(summand.term(len(roots)))
            roots += summand.tensors
        return roots, tuple(terms)

    def _fused(self, summands: Sequence[Summand]) -> Pair:
        """Both in C. It changes the graph: what is looked up in tables meets weights there.

        Raises:
            Refused: Something in them has no steps.
        """
        known = self._graph, self._operands, self._inputs, self._shapes, self._of
        folding = Folding(*known, self._make, len(self._operands) - self._own)
        summands = folding.back(summands)
        roots, terms = self._roots(summands)
        folding.narrow([*self._all.results()[: self._outputs], *roots])
        roots, terms = self._roots(summands)
        kept = self._residuals.of(roots)
        forward = self._forward(self._all.results()[: self._outputs], kept)
        backward = self._backward(roots, kept)
        instead = folding.there([*self._all.results()[: self._outputs], *kept])
        folded = None
        if instead:
            outputs = self._all.results()[: self._outputs]
            folded = self._forward(outputs, [instead.get(x, x) for x in kept])
        operands = len(self._operands)
        given = terms, folded, Constants(self._constants, alien=self._all.alien)
        return fuse(forward, backward, operands, self._outputs, *given)

    def _make(self, target: Any, args: tuple[Any, ...], width: int) -> fx.Node:
        """A node with a row for each row, after what it reads."""
        x = self._graph.create_node("call_function", target, args)
        sources = x.all_input_nodes
        order = {y: k for k, y in enumerate(self._graph.nodes)}
        max(sources, key=order.__getitem__).append(x)
        self._of[x] = frozenset[int]().union(*(self._of[s] for s in sources))
        if any(s in self._here for s in sources):
            self._here.add(x)
        self._shapes[x], self._rows[x], self._axis[x] = (SIZES[0], width), 1, 0
        dtypes = [d for s in sources if (d := s.meta.get("dtype")) is not None]
        dtype = next(d for d in dtypes if d.is_floating_point)
        x.meta.update(dtype=dtype, like=Like((width,), True, dtype))
        return x

    def _forward(self, outputs: Sequence[fx.Node], kept: Sequence[fx.Node]) -> fx.Graph:
        graph, made = self._all.begun(self._inputs)
        self._all.copy([*outputs, *kept], graph, made)
        found = [made[y] for y in outputs]
        for x in kept:
            y = made[x]
            if self._rows[x] != 1:
                shape: Any = (made[self._n], self._rows[x], *self._shapes[x][1:])
                y = graph.call_function(aten.reshape.default, (y, shape))
                if (like := made[x].meta.get("like")) is not None:
                    y.meta["like"] = replace(like, merged=False)
            elif self._axis[x]:
                y = graph.call_function(torch.movedim, (y, self._axis[x], 0))
            found.append(y)
        return _finished(graph, found)

    def _backward(self, roots: Sequence[fx.Node], kept: Sequence[fx.Node]) -> fx.Graph:
        graph, made = self._all.begun([*kept, *self._tangents])
        for x in kept:
            if self._rows[x] != 1:
                made[x] = graph.call_function(torch.flatten, (made[x], 0, 1))
                made[x].meta.update(x.meta)
            elif self._axis[x]:
                made[x] = graph.call_function(torch.movedim, (made[x], 0, self._axis[x]))
        for x, (whole, first, end) in self._residuals.within.items():
            made[x] = graph.call_function(aten.slice.Tensor, (made[whole], 1, first, end))
            made[x].meta.update(x.meta)
        for x, view in self._residuals.apart.items():
            shape: list[Any] = list(self._shapes[x])
            shape[self._axis[x]] = graph.call_function(operator.mul, (made[self._n], self._rows[x]))
            made[x] = graph.call_function(aten.reshape.default, (made[view], shape))
            made[x].meta.update(x.meta)
        self._all.copy(roots, graph, made)
        return _finished(graph, [made[d] for d in roots])

    def _mark(self) -> None:
        self._of: dict[fx.Node, frozenset[int]] = {}
        self._here: set[fx.Node] = set(self._inputs)
        for x in self._graph.nodes:
            sources = x.all_input_nodes
            own = {self._tangents.index(x)} if x in self._tangents else set()
            self._of[x] = frozenset(own.union(*(self._of[s] for s in sources)))
            if draws(x) or any(s in self._here for s in sources):
                self._here.add(x)
            if x.op == "call_function" and x.target is aten.copy_.default:
                raise GraphError("its forward writes into a weight, a buffer or an input")

    def _use_products(self) -> None:
        """Products of rows and weights by ``products``, which knows the faster library."""
        for x in self._graph.nodes:
            if x.target not in PRODUCTS or x.kwargs:
                continue
            args: Any = x.args
            *bias, rows, weight = args
            if weight in self._here or weight in self._rows or self._of[weight]:
                continue
            if weight.target is aten.t.default:
                if bias and (bias[0] in self._here or len(self._shapes[bias[0]]) != 1):
                    continue
                of, columns = self._columns_of(weight.args[0])
                x.args = (rows, of, bias[0] if bias else None, *columns)
                x.target = affine_columns if columns else affine
            elif not bias:
                of, columns = self._columns_of(weight)
                x.args = (rows, of, *columns)
                x.target = times_columns if columns else times

    def _columns_of(self, weight: fx.Node) -> tuple[fx.Node, Columns | tuple[()]]:
        """Of what operand a weight is some columns, and which; else itself."""
        args: Any = weight.args
        if weight.target is not aten.slice.Tensor or args[0] not in self._operands:
            return weight, ()
        columns = _sliced(args[1:], self._shapes[args[0]])
        return (weight, ()) if columns is None else (args[0], columns)

    def _terms(
        self, k: int, d: fx.Node, shape: tuple[int, ...], turned: bool = False
    ) -> Iterator[Summand]:
        """The summands of an operand's gradient, as the sum of gradients likes to have them."""
        of, target = self._of[d], d.target
        args: Any = d.args
        if not of:
            return
        if target is aten.add.Tensor and not d.kwargs and self._alike(d, args):
            yield from self._terms(k, args[0], shape, turned)
            yield from self._terms(k, args[1], shape, turned)
        elif target is aten.t.default and args[0].target in (aten.mm.default, aten.add.Tensor):
            yield from self._terms(k, args[0], shape, not turned)
        elif len(shape) > 2 and (flat := self._flat(d)) is not None:
            yield from self._terms(k, flat, self._shapes[flat])
        elif target is aten.slice_backward.default and (some := self._of_columns(k, d, turned)):
            yield from some
        elif target is aten.mm.default and (pair := self._pair(args, turned)):
            yield Summand(k, "product", pair, of)
        elif (rows := self._summed(d)) is not None and len(shape) == 1:
            yield Summand(k, "sum", (rows,), of)
        elif not turned and (found := self._by_row(k, d, shape)) is not None:
            yield found
        elif turned:
            with self._graph.inserting_after(d):
                whole = self._graph.call_function(aten.t.default, (d,))
            self._of[whole] = of
            yield Summand(k, "value", (whole,), of)
        else:
            yield Summand(k, "value", (d,), of)

    def _by_row(self, k: int, d: fx.Node, shape: Sequence[int]) -> Summand | None:
        """Of a table: rows and which they are, if that has some for each row."""
        while d.target in VIEWS:  # it has other axes, and is seen as a table
            d = cast(fx.Node, d.args[0])
        if d.target is not aten.embedding_dense_backward.default:
            return None
        args: Any = d.args
        if args[4]:
            raise GraphError("an embedding's scale_grad_by_freq mixes rows")
        if not self._all.is_many(args[1]):
            return None
        rows = args[0]
        if len(shape) != 2 or args[2] != shape[0]:
            return Summand(k, "rows", (rows, args[1]), self._of[d], args[3], table=args[2])
        while rows.target in VIEWS and self._all.is_whole(rows.args[0]):
            rows = rows.args[0]
        return Summand(k, "rows", (rows, args[1]), self._of[d], args[3])

    def _of_columns(self, k: int, d: fx.Node, turned: bool) -> list[Summand]:
        """The summands of some columns of a weight's gradient, if they are products."""
        inner, shape, *how = cast("Any", d.args)
        columns = None if turned else _sliced(how, shape)
        if columns is None:
            return []
        found = list(self._terms(k, inner, (shape[0], columns[1] - columns[0])))
        if any(each.how != "product" or each.columns is not None for each in found):
            return []
        return [replace(each, columns=(columns,)) for each in found]

    def _alike(self, d: fx.Node, args: Sequence[Any]) -> bool:
        return all(isinstance(x, fx.Node) and self._shapes[x] == self._shapes[d] for x in args)

    def _pair(self, args: Sequence[Any], turned: bool) -> tuple[fx.Node, fx.Node] | None:
        """l and r with lᵀ r the product, or its transpose, if they have rows."""
        left, right = args
        if left.target is not aten.t.default or not self._all.is_many(right):
            return None
        return (right, left.args[0]) if turned else (left.args[0], right)

    def _flat(self, d: fx.Node) -> fx.Node | None:
        """The product that d is a view of, with more axes behind the first."""
        inner: Any = d.args[0]
        if d.target not in VIEWS or inner.target not in (aten.mm.default, aten.t.default):
            return None
        return inner if self._shapes[inner][0] == self._shapes[d][0] else None

    def _summed(self, d: fx.Node) -> fx.Node | None:
        """The matrix whose rows d is the sum of."""
        while d.target is aten.view.default:
            d = cast(fx.Node, d.args[0])
        args: Any = d.args
        if d.target is not aten.sum.dim_IntList or not self._all.is_many(args[0]):
            return None
        rows: fx.Node = args[0]
        rank = len(self._shapes[rows])
        first, *others = sorted(dim % rank for dim in args[1] or range(rank))
        if first != 0 or len(others) != rank - 2:
            return None
        if not others:
            return rows
        if not self._all.is_whole(rows):
            return None
        (axis,) = set(range(1, rank)).difference(others)
        return self._make(aten.sum.dim_IntList, (rows, others), self._shapes[rows][axis])


def _finished(graph: fx.Graph, results: Sequence[fx.Node]) -> fx.Graph:
    graph.output(tuple(results))
    return graph


def _sliced(args: Sequence[Any], shape: Sequence[int]) -> Columns | None:
    """Which columns of a matrix are left where an axis of it is cut; None: it is another axis."""
    given = [*args, *[0, 0, shape[-1], 1][len(args) :]]
    axis, first, end, step = given
    if len(shape) != 2 or axis not in (1, -1) or step != 1:
        return None
    if not (isinstance(first, int) and isinstance(end, int)) or first < 0:
        return None
    end = min(end if end >= 0 else end + shape[1], shape[1])
    return (first, end) if first < end else None
