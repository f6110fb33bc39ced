"""A derived program as two: what some inputs decide by themselves, and the rest.

    tanh(W h + T[bond])          h first, for each bond    ─►  early  c = W h       once a row of h
                                                               late   tanh(c + T[bond])
    W cat(h, e) + b              h first                   ─►  early  c = W₁ h + b
                                                               late   c + W₂ e

Moved is what follows from such inputs behind a product with a weight: products are worth it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx

from geartrain.derived.computed import forward_of
from geartrain.derived.cut import HoistedCuts
from geartrain.derived.derivation import Derivation, call_of, guarded, made, own_copy, sample
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.derived.traces.counted import PRODUCTS, SIZES, CountedGraph, Function, needed_by
from geartrain.derived.traces.record import draws
from geartrain.derived.traces.unsearched import taken_apart
from geartrain.errors import GraphError
from geartrain.nodes.hoisted import Hoisted
from geartrain.nodes.kernel import AbstractKernel

log = logging.getLogger("geartrain.nn")
aten = torch.ops.aten


def hoist(
    kernel: AbstractKernel,
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    early: frozenset[int],
) -> Hoisted | None:
    """See ``nodes.hoisted.hoisted``; of programs alone."""
    if not isinstance(kernel, Program):
        return None
    cut, operands = kernel.cut, kernel.own
    if early not in cut.hoists:
        cut.hoists[early] = _cuts(function, operands, inputs, early)
    found = cut.hoists[early]
    if found is None:
        return None
    return Hoisted(
        Program(found.early, operands),
        Program(found.late, operands),
        found.early_reads,
        found.late_reads,
    )


@taken_apart()
def _cuts(
    function: Callable[..., Any],
    operands: Operands,
    inputs: Sequence[Tensor],
    early: frozenset[int],
) -> HoistedCuts | None:
    """A function as two; None: nothing is gained, or a piece cannot be derived."""
    samples = sample(inputs, SIZES[0]), sample(inputs, SIZES[1])
    call = call_of(own_copy(function, operands), operands)
    tensors = [x.detach().clone() for x in operands.tensors()]
    try:
        with guarded(inputs):
            pieces = _InTwo(forward_of(call, tensors, samples), early)
        if not pieces.cut:
            return None
        early_, late = pieces.early(), pieces.late()
        firsts = [[some[i] for i in pieces.early_reads] for some in samples]
        with torch.no_grad():
            between = [early_(tensors, given) for given in firsts]
        rests = [[some[i] for i in pieces.late_reads] for some in samples]
        lasts = [[*found, *rest] for found, rest in zip(between, rests, strict=True)]
        first, last = (
            made(Derivation(piece, operands, (given[0], given[1])))
            for piece, given in ((early_, firsts), (late, lasts))
        )
    except GraphError as error:
        log.info("nothing is computed before the rest: %s", error)
        return None
    return HoistedCuts(first, last, pieces.early_reads, pieces.late_reads)


@final
class _InTwo:
    """A function in two.

    Args:
        whole: It.
        early: Which inputs are known before.

    Attributes:
        cut: Values of the one that the other reads; none: there is nothing worth it.
        early_reads, late_reads: Which inputs they read.
    """

    def __init__(self, whole: CountedGraph, early: frozenset[int]) -> None:
        self._whole = whole
        self._first = {whole.inputs[i] for i in early}
        self._mark()
        if self._part_products():
            self._mark()
        self.cut = self._edge()
        self.early_reads = self._read(self.cut, ())
        self.late_reads = self._read(whole.results(), self.cut)

    def early(self) -> Function:
        """Of operands and the inputs that it reads: the cut."""
        inputs = [self._whole.inputs[i] for i in self.early_reads]
        return self._whole.function(inputs, self.cut)

    def late(self) -> Function:
        """Of operands, the cut, and the inputs that it reads: the results."""
        inputs = [self._whole.inputs[i] for i in self.late_reads]
        return self._whole.function([*self.cut, *inputs], self._whole.results())

    def _read(self, roots: Iterable[fx.Node], given: Iterable[fx.Node]) -> tuple[int, ...]:
        """Which inputs some nodes follow from, if others are given."""
        needed = needed_by(roots, {x: x for x in given})
        return tuple([i for i, x in enumerate(self._whole.inputs) if x in needed])

    def _mark(self) -> None:
        """Which nodes follow from inputs that are known before, and which from others."""
        self._is_early: set[fx.Node] = set(self._first)
        self._is_late: set[fx.Node] = set(self._whole.inputs) - self._first
        for x in self._whole.graph.nodes:
            sources = x.all_input_nodes
            empty = x.target is aten.empty_like.default  # to be drawn into
            if x.op == "output" or draws(x) or empty or any(y in self._is_late for y in sources):
                self._is_late.add(x)
            elif any(y in self._is_early for y in sources):
                self._is_early.add(x)

    def _edge(self) -> list[fx.Node]:
        """What is behind a product, early, and read by others."""
        inner: set[fx.Node] = set()
        for x in self._whole.graph.nodes:
            if x in self._is_early:
                product = x.target in PRODUCTS and x.args[-1] not in self._is_early
                if product or any(y in inner for y in x.all_input_nodes):
                    inner.add(x)
        while True:
            edge = [x for x in self._whole.graph.nodes if x in inner and set(x.users) - inner]
            bad = [x for x in edge if not self._may_be_kept(x)]
            if not bad:
                return edge
            inner -= set(bad)

    def _may_be_kept(self, x: fx.Node) -> bool:
        dtype = x.meta.get("dtype")
        return self._whole.is_whole(x) and dtype is not None and dtype.is_floating_point

    def _part_products(self) -> bool:
        """Make products of columns side by side sums of products, where some columns are early.

        Returns:
            Whether there were any.
        """
        found = False
        for x in list(self._whole.graph.nodes):
            args: Any = x.args
            if x.target not in PRODUCTS or x not in self._is_late or x.kwargs:
                continue
            *bias, rows, weight = args
            side_by_side = rows.target is aten.cat.default and list(rows.args[1:]) in ([1], [-1])
            turned = weight.target is aten.t.default and weight.args[0] in self._whole.operands
            if side_by_side and turned and not (bias and bias[0] not in self._whole.operands):
                found = self._part(x, rows.args[0], weight.args[0], bias) or found
        return found

    def _part(
        self,
        x: fx.Node,
        pieces: Sequence[fx.Node],
        weight: fx.Node,
        bias: Sequence[fx.Node],
    ) -> bool:
        """Make one product a sum."""
        runs: list[tuple[list[fx.Node], int, int]] = []
        first, were = 0, False
        for piece in pieces:
            end, is_early = first + self._whole.shapes[piece][1], piece in self._is_early
            if runs and were == is_early:
                runs[-1] = [*runs[-1][0], piece], runs[-1][1], end
            else:
                runs.append(([piece], first, end))
            first, were = end, is_early
        early = [run for run in runs if run[0][0] in self._is_early]
        if not early:
            return False
        shape = self._whole.shapes[x]
        total: fx.Node | None = None
        with self._whole.graph.inserting_before(x):
            for own, first, end in [*early, *(run for run in runs if run not in early)]:
                rows = own[0]
                if len(own) > 1:
                    rows = self._new(aten.cat.default, (own, 1), (shape[0], end - first), x)
                columns = self._new(aten.slice.Tensor, (weight, 1, first, end), (), x)
                turned = self._new(aten.t.default, (columns,), (), x)
                if bias and total is None:
                    one = self._new(aten.addmm.default, (*bias, rows, turned), shape, x)
                else:
                    one = self._new(aten.mm.default, (rows, turned), shape, x)
                total = one if total is None else self._new(aten.add.Tensor, (total, one), shape, x)
        assert total is not None
        x.replace_all_uses_with(total)
        self._whole.graph.erase_node(x)
        return True

    def _new(
        self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], like: fx.Node
    ) -> fx.Node:
        """A node; of such a shape it has rows."""
        x = self._whole.graph.call_function(target, args)
        x.meta.update(like.meta)
        if shape:
            self._whole.shapes[x] = shape
            self._whole.rows[x], self._whole.axis[x] = 1, 0
        return x
