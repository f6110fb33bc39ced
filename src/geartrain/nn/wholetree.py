"""Whole trees in one firing: all heights of many trees, each height a batch.

    x, parent, slot, Inside ─► leaf at the leaves ─► branch, height by height ─► h at every vertex

An ordinary module of any two cells; for the Tree-LSTM's it also has a bundle kernel, which does all
heights in one call each way.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import DataError
from geartrain.ir.bundle import AbstractBundleKernel, AbstractPlacedKernel, Inside
from geartrain.ir.call import as_payload
from geartrain.ir.gradient import GradientSum
from geartrain.ir.kernel import AbstractRowKernel, kernel_of, may_have_kernel
from geartrain.ir.message import IntArray
from geartrain.ir.payload import Recompute
from geartrain.native import library
from geartrain.native.rows import take
from geartrain.native.transfer import upload
from geartrain.native.trees import (
    Forest,
    Grove,
    TreeWeights,
    forest_backward,
    forest_forward,
    forest_of,
    takes,
    threads_of,
)
from geartrain.nn.cells import TreeLSTMBranch, TreeLSTMLeaf

ROWS_AT_ONCE: Final = 1024
"""Vertices whose gates stay in the processor's caches: more at once are computed no faster."""


@final
class WholeTree(nn.Module):
    """A network over binary trees, from the leaves to the root, in one call.

        state(v) = leaf(x_v) at a leaf, branch(states of its two children) elsewhere

    Inputs: x ``(rows, ...)``, one row a vertex, of which those of the leaves are read (word ids
    with -1 elsewhere will do); parent and slot int64 ``(rows,)``, as ``read=("parent", "slot")``
    hands them on: the parent of each vertex in its tree, -1 at a root, and whether it is the left
    (0) or the right (1) child; an ``Inside``. Output: the first state of every vertex, h
    ``(rows, H)``:

        words = graph.input("word", bundle=True)
        tree = WholeTree(TreeLSTMLeaf(64, 64, vocabulary=9000), TreeLSTMBranch(64))
        h = words.through(tree, read=("parent", "slot"), inside=True)

    The shape ``Tree`` makes a firing of each step instead: there leaf and branch may be parts on
    workers of their own, and a vertex goes on as soon as both children are there. Here all vertices
    of a tree see the same weights, and a step costs no message.

    Args:
        leaf: ``(x) -> states``, one tensor or a tuple; such as ``TreeLSTMLeaf``.
        branch: ``(*states of children) -> states``, each ``(n, 2, ...)``, left before right; such
            as ``TreeLSTMBranch``.

    Raises:
        DataError: The columns are no binary trees; names the vertex.

    Source: Tai, Socher, Manning 2015, arXiv:1503.00075; heights as batches as in Looks et al. 2017,
    arXiv:1702.02181.
    """

    def __init__(self, leaf: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.leaf, self.branch = leaf, branch

    def forward(self, x: Tensor, parent: Tensor, slot: Tensor, inside: Inside) -> Tensor:
        forest = _forest(parent, slot, inside)
        order, child = upload(forest.order, x.device), upload(forest.child, x.device)
        leaves = forest.leaves
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0], device=order.device)
        below = place[child]
        made = as_payload(self.leaf(x.index_select(0, order[:leaves])))
        states = [y.new_empty((order.shape[0], *y.shape[1:])) for y in made]
        begin = 0
        for end in forest.bounds[1:].tolist():
            if begin:
                pairs = below[begin - leaves : end - leaves].flatten()
                chosen = [s.index_select(0, pairs) for s in states]
                given = [s.view(-1, 2, *s.shape[1:]) for s in chosen]
                made = as_payload(self.branch(*given))
            for state, y in zip(states, made, strict=True):
                state[begin:end] = y
            begin = end
        return states[0].index_select(0, place)

    def bundle_kernel(self) -> AbstractBundleKernel | None:
        """Of a Tree-LSTM: keeps x, parent, slot, gates and cells; None: run it again."""
        leaf, branch = self.leaf, self.branch
        if not (isinstance(leaf, TreeLSTMLeaf) and isinstance(branch, TreeLSTMBranch)):
            return None
        if not (may_have_kernel(leaf) and may_have_kernel(branch)):
            return None
        weights = TreeWeights(leaf.weight, leaf.bias, branch.weight, branch.bias)
        if leaf.hidden != branch.hidden or not takes(weights):
            return None
        table = None if leaf.embedding is None else kernel_of(leaf.embedding)
        if leaf.embedding is not None and table is None:
            return None
        return _TreeKernel(self, leaf, branch, table)


def _require_integers(parent: Tensor, slot: Tensor) -> None:
    for name, column in (("parent", parent), ("slot", slot)):
        if column.is_floating_point():
            raise DataError(
                f"WholeTree: column {name} holds {column.dtype}; vertices and slots are integers"
            )


def _forest(parent: Tensor, slot: Tensor, inside: Inside) -> Forest:
    _require_integers(parent, slot)
    return forest_of(*(x.cpu().numpy() for x in (parent, slot, inside.lengths)))


def _groves(parent: Tensor, slot: Tensor, inside: Inside, hidden: int) -> list[Grove]:
    """As many trees at a time as stay near between one height and the next; all threads busy."""
    _require_integers(parent, slot)
    parents, slots, lengths = (x.numpy() for x in (parent, slot, inside.lengths))
    ends, total = lengths.cumsum(), parents.size
    threads = threads_of(total, hidden)
    most = -(-total // (threads * -(-total // (threads * ROWS_AT_ONCE)))) if total else 1
    found: list[Grove] = []
    start = first = 0
    while first < lengths.size:
        last = max(int(np.searchsorted(ends, start + most, "right")), first + 1)
        if total - start <= most * 5 // 4:  # no crumbs
            last = lengths.size
        rows = slice(start, int(ends[last - 1]))
        found.append(Grove(forest_of(parents[rows], slots[rows], lengths[first:last]), rows))
        start, first = rows.stop, last
    return found


@final
class _TreeKernel(AbstractPlacedKernel):
    """All heights in C; where weights or rows are elsewhere by now, the module runs again."""

    room_for = 3

    def __init__(
        self,
        module: WholeTree,
        leaf: TreeLSTMLeaf,
        branch: TreeLSTMBranch,
        table: AbstractRowKernel | None,
        *,
        brief: bool = False,
    ) -> None:
        self._module, self._leaf, self._branch, self._table = module, leaf, branch, table
        self._brief = brief
        self.looks_up = library.current() is not None  # the module itself reads its table by torch

    def for_bf16(self) -> AbstractBundleKernel:
        return _TreeKernel(self._module, self._leaf, self._branch, self._table, brief=True)

    def forward(
        self, *inputs: Tensor, inside: Inside, room: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        x, parent, slot = inputs
        weights = self._weights()
        kept = room
        if kept is None:
            kept = weights.leaf.new_empty((x.shape[0], weights.kept()))
        h = kept.new_empty((x.shape[0], weights.hidden))
        done = False
        if weights.suit() and x.is_cpu:
            groves = _groves(parent, slot, inside, weights.hidden)
            entering = [self._entering(x[g.rows].index_select(0, g.leaves)) for g in groves]
            done = forest_forward(groves, entering, weights, kept, h)
        if not done:
            h = self._module(*inputs, inside)
        return (h,), (x, parent, slot, kept)

    def backward_at(
        self,
        gradients: tuple[Tensor | None, ...],
        residuals: tuple[Tensor, ...],
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside,
        *,
        wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        (dh,), (x, parent, slot, kept) = gradients, residuals
        if dh is None:
            return None, None, None
        if rows is not None:
            x, parent, slot = take((x, parent, slot), rows)
        weights, has_table = self._weights(), self._table is not None
        wanted = self._table_learns() if has_table else wanted
        found = None
        if weights.suit() and dh.is_cpu:
            groves = _groves(parent, slot, inside, weights.hidden)
            found = forest_backward(groves, dh.contiguous(), kept, rows, weights, wanted=wanted)
        if found is None:
            again = Recompute(self._module, list(self._module.parameters()))
            return again.backward(gradients, (x, parent, slot), into, inside)
        if groves:
            _give(self._leaf.weight, found.leaf, into)
            _give(self._leaf.bias, found.leaf_bias, into)
            _give(self._branch.weight, found.branch, into)
            _give(self._branch.bias, found.branch_bias, into)
        dx = x.new_zeros(x.shape) if wanted and not has_table else None
        for grove, each in zip(groves, found.x, strict=False):
            if self._table is not None:
                ids = x[grove.rows].index_select(0, grove.leaves)
                self._table.backward((each,), (ids,), into)
            elif dx is not None:
                dx[grove.rows].index_copy_(0, grove.leaves, each)
        return dx, None, None

    def _entering(self, x: Tensor) -> Tensor:
        if self._table is not None:
            (x,), _ = self._table.forward(x)
        return x.contiguous()

    def _weights(self) -> TreeWeights:
        leaf, branch = self._leaf, self._branch
        return TreeWeights(leaf.weight, leaf.bias, branch.weight, branch.bias, brief=self._brief)

    def _table_learns(self) -> bool:
        embedding: Any = self._leaf.embedding
        return embedding is not None and embedding.weight.requires_grad


def _give(parameter: nn.Parameter, gradient: Tensor, into: GradientSum) -> None:
    if parameter.requires_grad:
        into.add(parameter, gradient, given=True)


__all__ = ["WholeTree"]
