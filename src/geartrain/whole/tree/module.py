"""Whole trees in one firing: all heights of many trees, each height a batch.

    x, parent, slot, Inside ─► leaf at the leaves ─► branch, height by height ─► h at every vertex

An ordinary module of any two cells; for the Tree-LSTM's it also has a bundle kernel, which does all
heights in one call of C each way, where there are native kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.device import uploads
from geartrain.errors import DataError
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.graph.admission import Brought, check_of
from geartrain.native.rows import take
from geartrain.nn.cells import TreeLSTMBranch, TreeLSTMLeaf
from geartrain.nodes.call import as_payload
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import AbstractKernel, gathered, kernel_of, may_have_kernel
from geartrain.nodes.products import affine
from geartrain.whole.tree.loader import (
    Forest,
    TreeGroup,
    TreeSlopes,
    TreeWeights,
    forest_backward,
    forest_forward,
    forest_of,
    takes,
    threads_of,
)

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
        DataError: The columns are no binary trees; names the vertex. Behind an input that is found
            before the instance enters.

    Source: Tai, Socher, Manning 2015, arXiv:1503.00075; heights as batches as in Looks et al. 2017,
    arXiv:1702.02181.
    """

    reads_on_host = True

    def __init__(self, leaf: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.leaf, self.branch = leaf, branch

    def forward(self, x: Tensor, parent: Tensor, slot: Tensor, inside: Inside) -> Tensor:
        at = _Placed(_forest(parent, slot, inside), x.device)
        made = as_payload(self.leaf(x.index_select(0, at.leaves)))
        states = [y.new_empty((x.shape[0], *y.shape[1:])) for y in made]
        for v, pair in at.heights():
            if pair is not None:
                chosen = [s.index_select(0, pair) for s in states]
                given = [s.view(-1, 2, *s.shape[1:]) for s in chosen]
                made = as_payload(self.branch(*given))
            for state, y in zip(states, made, strict=True):
                state[v] = y
        return states[0].index_select(0, at.place)

    def check_instances(self, brought: Brought) -> None:
        """Binary trees, and what the leaf demands of those of its rows that are leaves.

        Raises:
            DataError: One of the instances brings something else.
        """
        if len(brought.columns) != 2:
            return
        parent, slot = (np.ascontiguousarray(c, np.int64) for c in brought.columns.values())
        forest = forest_of(parent, slot, brought.lengths)
        check = check_of(self.leaf)
        if check is not None and brought.payload is not None:
            leaves = forest.order[: forest.leaves]  # ascending
            lengths = np.diff(np.searchsorted(leaves, brought.lengths.cumsum()), prepend=0)
            check(Brought(lengths, gathered(brought.payload, leaves)))

    def bundle_kernel(self) -> AbstractKernel | None:
        """Of a Tree-LSTM: keeps x, parent, slot, gates and cells; None: run it again.

        Gradients are those of the gates and cells of then, with the weights of now.
        """
        leaf, branch = self.leaf, self.branch
        if not (isinstance(leaf, TreeLSTMLeaf) and isinstance(branch, TreeLSTMBranch)):
            return None
        if not (may_have_kernel(leaf) and may_have_kernel(branch)):
            return None
        if leaf.hidden != branch.hidden:
            return None
        table = None if leaf.embedding is None else kernel_of(leaf.embedding)
        if leaf.embedding is not None and table is None:
            return None
        return _TreeKernel(leaf, branch, table)


def _require_integers(parent: Tensor, slot: Tensor) -> None:
    for name, column in (("parent", parent), ("slot", slot)):
        if column.is_floating_point():
            raise DataError(
                f"WholeTree: column {name} holds {column.dtype}; vertices and slots are integers"
            )


def _forest(parent: Tensor, slot: Tensor, inside: Inside) -> Forest:
    _require_integers(parent, slot)
    return forest_of(parent.cpu().numpy(), slot.cpu().numpy(), inside.lengths_on_host())


def _groups(parent: Tensor, slot: Tensor, inside: Inside, hidden: int) -> list[TreeGroup]:
    """As many trees at a time as stay near between one height and the next; all threads busy."""
    _require_integers(parent, slot)
    parents, slots, lengths = parent.numpy(), slot.numpy(), inside.lengths_on_host()
    ends, total = lengths.cumsum(), parents.size
    threads = threads_of(total, hidden)
    most = -(-total // (threads * -(-total // (threads * ROWS_AT_ONCE)))) if total else 1
    found: list[TreeGroup] = []
    start = first = 0
    while first < lengths.size:
        last = max(int(np.searchsorted(ends, start + most, "right")), first + 1)
        if total - start <= most * 5 // 4:  # no small rest
            last = lengths.size
        rows = slice(start, int(ends[last - 1]))
        found.append(TreeGroup(forest_of(parents[rows], slots[rows], lengths[first:last]), rows))
        start, first = rows.stop, last
    if start != total:  # refused, as there are other vertices than trees say
        forest_of(parents, slots, lengths)
    return found


@final
class _TreeKernel(AbstractKernel):
    """All heights in C, or in torch where there are no kernels or the tensors are elsewhere."""

    residuals = 4
    looks_up = True
    room_for = 3

    def __init__(
        self,
        leaf: TreeLSTMLeaf,
        branch: TreeLSTMBranch,
        table: AbstractKernel | None,
        *,
        bf16: bool = False,
    ) -> None:
        self._leaf, self._branch, self._table, self._bf16 = leaf, branch, table, bf16

    def rounded(self) -> AbstractKernel:
        return _TreeKernel(self._leaf, self._branch, self._table, bf16=True)

    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        assert inside is not None
        x, parent, slot = inputs
        weights = self._weights()
        kept = room
        if kept is None:
            kept = weights.leaf.new_empty((x.shape[0], weights.kept()))
        h = kept.new_empty((x.shape[0], weights.hidden))
        done = False
        if x.is_cpu and takes(weights):
            groups = _groups(parent, slot, inside, weights.hidden)
            entering = [self._entering(x[g.rows].index_select(0, g.leaves)) for g in groups]
            done = forest_forward(groups, entering, weights, kept, h)
        if not done:
            at = _Placed(_forest(parent, slot, inside), x.device)
            for whole, made in zip((kept, h), self._heights(x, at, weights), strict=True):
                whole.index_copy_(0, at.order, made)
        return (h,), (x, parent, slot, kept)

    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        assert inside is not None
        (dh,), (x, parent, slot, gates) = gradients, kept
        if dh is None:
            return None, None, None
        x, parent, slot = gathered((x, parent, slot), rows)
        weights, has_table = self._weights(), self._table is not None
        wanted = self._table_learns() if has_table else wanted
        found, places = None, []
        if dh.is_cpu and takes(weights):
            groups = _groups(parent, slot, inside, weights.hidden)
            found = forest_backward(groups, dh.contiguous(), gates, rows, weights, wanted=wanted)
            places = [(g.rows, g.leaves) for g in groups]
        if found is None:
            forest = _forest(parent, slot, inside)
            at = _Placed(forest, dh.device)
            (gates,) = take((gates,), forest.order if rows is None else rows[forest.order])
            found = self._heights_back(dh, at, weights, gates, wanted=wanted)
            places = [(slice(0, x.shape[0]), at.leaves)] if x.shape[0] else []
        if places:
            _give(self._leaf.weight, found.leaf, into)
            _give(self._leaf.bias, found.leaf_bias, into)
            _give(self._branch.weight, found.branch, into)
            _give(self._branch.bias, found.branch_bias, into)
        dx = x.new_zeros(x.shape) if wanted and not has_table else None
        for (mine, leaves), each in zip(places, found.x, strict=False):
            if self._table is not None:
                ids = x[mine].index_select(0, leaves)
                self._table.backward((each,), (ids,), None, into)
            elif dx is not None:
                dx[mine].index_copy_(0, leaves, each)
        return dx, None, None

    def _heights(self, x: Tensor, at: _Placed, weights: TreeWeights) -> tuple[Tensor, Tensor]:
        """What ``forest_forward`` does, in torch: what is kept, and h, in the order of heights."""
        width, entering = weights.hidden, self._entering(x.index_select(0, at.leaves))
        kept = entering.new_empty((x.shape[0], weights.kept()))
        h = entering.new_empty((x.shape[0], width))
        cells = kept[:, _C * width : _REST * width]
        for v, pair in at.heights():
            if pair is None:
                forget = entering
                made = affine(entering, weights.leaf, weights.leaf_bias)
                i, o = made[:, : 2 * width].sigmoid().chunk(2, 1)
                u = made[:, 2 * width :].tanh()
                c = i * u
            else:
                below = h.index_select(0, pair).view(-1, 2 * width)
                made = affine(below, weights.branch, weights.branch_bias)
                gates = made[:, : 4 * width].sigmoid()
                i, forget, o = gates.split([width, 2 * width, width], 1)  # type: ignore[no-untyped-call]
                u = made[:, 4 * width :].tanh()
                f, c_below = (
                    each.view(-1, 2, width)
                    for each in (forget.contiguous(), cells.index_select(0, pair))
                )
                c = i * u + (f * c_below).sum(1)
            t = c.tanh()
            row = [i, o, u, t, c, forget]
            torch.cat(row, 1, out=kept[v, : _REST * width + forget.shape[1]])
            torch.mul(o, t, out=h[v])
        return kept, h

    def _heights_back(
        self, dh: Tensor, at: _Placed, weights: TreeWeights, kept: Tensor, *, wanted: bool
    ) -> TreeSlopes:
        """What ``forest_backward`` does, in torch; kept in the order of heights.

        What a height adds to the weights waits for one product of all, and what does not depend on
        the height above is computed for all vertices at once.
        """
        width, depth = weights.hidden, weights.depth
        branches, leaves = at.below.shape[0], kept.shape[0] - at.below.shape[0]
        i, o, u, t, c = kept[:, : _REST * width].chunk(_REST, 1)
        f = kept[leaves:, _REST * width : (_REST + 2) * width]
        below = at.below.flatten()
        c_below, h_below = (
            each.index_select(0, below).view(branches, 2 * width) for each in (c, o * t)
        )
        into_c, of_o = o * (1 - t * t), t * (o * (1 - o))
        of_i, of_u = u * (i * (1 - i)), i * (1 - u * u)
        of_f = c_below * (f * (1 - f))
        of_leaf = torch.cat([of_i[:leaves], of_o[:leaves], of_u[:leaves]], 1)
        of_branch = torch.cat([of_i[leaves:], of_f, of_o[leaves:], of_u[leaves:]], 1)
        d, dc = dh.index_select(0, at.order), torch.zeros_like(dh)
        for v, pair in reversed(list(at.heights())):
            dc[v].addcmul_(d[v], into_c[v])
            if pair is None:
                of_leaf.mul_(torch.cat([dc[v], d[v], dc[v]], 1))
                continue
            mine = slice(v.start - leaves, v.stop - leaves)
            whole = dc[v]
            gates = of_branch[mine].mul_(torch.cat([whole, whole, whole, d[v], whole], 1))
            passed = f[mine].view(-1, 2, width) * whole[:, None]
            dc.index_copy_(0, pair, passed.view(-1, width))  # a vertex has one parent
            d.index_add_(0, pair, (gates @ weights.branch).view(-1, width))
        return TreeSlopes(
            [of_leaf @ weights.leaf] if wanted else [],
            of_leaf.t() @ kept[:leaves, _REST * width : _REST * width + depth],
            of_leaf.sum(0),
            of_branch.t() @ h_below,
            of_branch.sum(0),
        )

    def _entering(self, x: Tensor) -> Tensor:
        if self._table is not None:
            (x,), _ = self._table.forward((x,))
        return x.contiguous()

    def _weights(self) -> TreeWeights:
        leaf, branch = self._leaf, self._branch
        return TreeWeights(leaf.weight, leaf.bias, branch.weight, branch.bias, bf16=self._bf16)

    def _table_learns(self) -> bool:
        embedding: Any = self._leaf.embedding
        return embedding is not None and embedding.weight.requires_grad


_C, _REST = 4, 5  # of what is kept of a vertex, in widths: i, o, u, tanh(c), c and the rest


@final
class _Placed:
    """A forest as tensors where the rows are, which get there in one copy.

    Attributes:
        order: int64 ``(rows,)``, the vertices height by height.
        place: int64 ``(rows,)``, where in that order each vertex is.
        below: int64 ``(branches, 2)``, where in that order the children of each branch are.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        place = np.empty_like(forest.order)
        place[forest.order] = np.arange(place.size)
        self.order, self.place, self.below = uploads(
            (forest.order, place, place[forest.child]), device
        )
        self._bounds: list[int] = forest.bounds.tolist()
        self.leaves = self.order[: forest.leaves]

    def heights(self) -> Iterator[tuple[slice, Tensor | None]]:
        """For each height which of the order they are, and their children there in pairs; None:
        leaves."""
        begin, leaves = 0, self._bounds[1]
        for end in self._bounds[1:]:
            pair = self.below[begin - leaves : end - leaves].flatten() if begin else None
            yield slice(begin, end), pair
            begin = end


def _give(parameter: nn.Parameter, gradient: Tensor, into: GradientSum) -> None:
    if parameter.requires_grad:
        into.add(parameter, gradient, given=True)


__all__ = ["WholeTree"]
