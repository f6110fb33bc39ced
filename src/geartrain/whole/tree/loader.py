"""Tree-LSTMs over whole trees in C: all heights, products included, in one call.

    forest     parent, slot of many trees ─► Forest: vertices by height, children of each branch
    forward    Forest, x at the leaves    ─► h at every vertex        kept: gates, tanh(c), c, x
    backward   Forest, dh at every vertex ─► dx at the leaves, and the gradients of all weights

Tensors contiguous on the CPU, float32 or float64; for others the answer of the last two is None,
and the caller does it in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import DataError
from geartrain.native import library
from geartrain.native.build import Sources
from geartrain.native.library import BYTES, POINTER, SMALL_WORK, WORD, Function, threads_for
from geartrain.native.rows import Rows, alike, contiguous, out_of_range, pointer

NATIVE: Final = library.add(
    library.Extension(
        Sources("tree", Path(__file__).with_name("tree.c")),
        typed={
            "forest_forward": (BYTES, *[WORD] * 6, *[POINTER] * 4),
            "forest_backward": (BYTES, *[WORD] * 6, *[POINTER] * 3),
        },
        plain={"forest": (WORD, POINTER, WORD, *[POINTER] * 6)},
    )
)


@final
@dataclass(frozen=True, slots=True)
class Forest:
    """Vertices of many trees by their height, and who is below whom; numbers are rows.

    Args:
        order: int64 ``(rows,)``: the leaves, then the vertices above them, height by height.
        child: int64 ``(rows - leaves, 2)``: the children of a branch, left before right, by its
            place in ``order`` behind the leaves.
        bounds: Vertices of height k are ``order[bounds[k]:bounds[k + 1]]``.
    """

    order: NDArray[np.int64]
    child: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def leaves(self) -> int:
        """How many leaves there are."""
        return int(self.bounds[1])

    @property
    def heights(self) -> int:
        """How many heights there are, that of the leaves included."""
        return self.bounds.size - 1


def forest_of(parent: NDArray[np.int64], slot: NDArray[np.int64], lengths: Rows) -> Forest:
    """The heights of all vertices.

    Args:
        parent: int64 ``(rows,)``, the parent of each vertex, counted from 0 in its tree; -1: none.
        slot: int64 ``(rows,)``, whether it is the left (0) or the right (1) child.
        lengths: int64 ``(trees,)``, vertices of each tree.

    Raises:
        DataError: A parent is no vertex, has two children in one slot, one child alone, or is
            below itself; or lengths, parents and slots are not of the same vertices.
    """
    rows = parent.size
    if slot.shape != (rows,) or any(x.dtype.kind not in "iu" for x in (parent, slot)):
        raise DataError(
            f"parents of shape {parent.shape} and {parent.dtype} came with slots of {slot.shape} "
            f"and {slot.dtype}; give one integer of each for every vertex"
        )
    parent, slot, lengths = (np.ascontiguousarray(x, np.int64) for x in (parent, slot, lengths))
    run = NATIVE.function("forest")
    if run is None:
        return _forest(parent, slot, lengths)
    memory = np.empty(8 * rows + 2, np.int64)
    order, child, bounds = memory[:rows], memory[rows : 3 * rows], memory[3 * rows : 4 * rows + 2]
    heights = run(
        lengths.size,
        lengths.ctypes.data,
        rows,
        parent.ctypes.data,
        slot.ctypes.data,
        order.ctypes.data,
        child.ctypes.data,
        bounds.ctypes.data,
        memory[4 * rows + 2 :].ctypes.data,
    )
    if heights < 0:
        raise _fault(parent, slot, lengths, -1 - heights)
    bounds = bounds[: max(heights, 1) + 1]
    return Forest(order, child[: 2 * (rows - int(bounds[1]))].reshape(-1, 2), bounds)


def _forest(parent: NDArray[np.int64], slot: NDArray[np.int64], lengths: Rows) -> Forest:
    """What ``forest`` does, in numpy."""
    rows = parent.size
    if (lengths < 0).any() or lengths.sum(dtype=np.float64) != rows:
        raise _fault(parent, slot, lengths, rows)
    starts = (lengths.cumsum() - lengths).repeat(lengths)
    has = parent >= 0
    wrong = has & ((parent >= lengths.repeat(lengths)) | (slot < 0) | (slot > 1))
    if wrong.any():
        raise _fault(parent, slot, lengths, int(np.flatnonzero(wrong)[0]))
    below = np.full((rows, 2), -1, np.int64)
    children = np.flatnonzero(has)
    up = parent + starts
    below[up[children], slot[children]] = children
    left = (below >= 0).sum(1)
    twice = children[below[up[children], slot[children]] != children]
    alone = np.flatnonzero(left == 1)
    if twice.size or alone.size:
        raise _fault(parent, slot, lengths, int([*twice, *alone][0]))
    now = np.flatnonzero(left == 0)
    order, bounds = [now], [0, now.size]
    while now.size:
        above = up[now[has[now]]]
        left -= np.bincount(above, minlength=rows)
        now = np.unique(above[left[above] == 0])
        if now.size:
            order.append(now)
            bounds.append(bounds[-1] + now.size)
    if bounds[-1] < rows:
        raise _fault(parent, slot, lengths, int(np.flatnonzero(left)[0]))
    joined = np.concatenate(order)
    return Forest(joined, below[joined[bounds[1] :]], np.array(bounds))


def _fault(
    parent: NDArray[np.int64], slot: NDArray[np.int64], lengths: Rows, row: int
) -> DataError:
    if row == parent.size:
        return DataError(
            f"trees of {lengths[:4].tolist()} vertices came with {row} rows; one row for every "
            "vertex"
        )
    tree = int(np.searchsorted(lengths.cumsum(), row, "right"))
    start = int(lengths[:tree].sum())
    above, which, size = int(parent[row]), int(slot[row]), int(lengths[tree])
    which_tree = f" of tree {tree} of this firing" if lengths.size > 1 else ""
    found = f"vertex {row - start}{which_tree}"
    if above >= size:
        said = f"{found} has parent {above}; expected -1 or 0..{size - 1}"
    elif above >= 0 and which not in (0, 1):
        said = f"{found} has slot {which}; expected 0 (left) or 1 (right)"
    else:
        mine = slice(start, start + size)
        below = parent[mine] == row - start
        beside = (parent[mine] == above) & (slot[mine] == which)
        if above >= 0 and beside.sum() > 1:
            said = f"{found} is not the only child of {above} in slot {which}"
        elif below.sum() == 1:
            said = f"{found} has one child; expected two, or none"
        else:
            said = f"{found} is below itself"
    return DataError(
        f"{said}: give binary trees by the columns parent and slot, or use the shape Tree, whose "
        "vertices may have other numbers of children"
    )


@final
@dataclass(frozen=True, slots=True)
class TreeWeights:
    """Of a leaf and of a branch.

    Args:
        leaf: ``(3 H, E)``: i, o, u.
        leaf_bias: ``(3 H,)``.
        branch: ``(5 H, 2 H)``: i, f_l, f_r, o, u.
        branch_bias: ``(5 H,)``.
        bf16: Whether products may round their operands to bfloat16; their sums are float32.
    """

    leaf: Tensor
    leaf_bias: Tensor
    branch: Tensor
    branch_bias: Tensor
    bf16: bool = False

    @property
    def hidden(self) -> int:
        """H."""
        return self.branch.shape[1] // 2

    @property
    def depth(self) -> int:
        """E."""
        return self.leaf.shape[1]

    def trained(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Leaf, its bias, branch, its bias."""
        return self.leaf, self.leaf_bias, self.branch, self.branch_bias

    def kept(self) -> int:
        """How many numbers are kept of a vertex."""
        return 5 * self.hidden + max(2 * self.hidden, self.depth)

    def suit(self) -> bool:
        """Whether C can read them."""
        dtype, width = self.leaf.dtype, self.hidden
        shapes = (3 * width, self.depth), (3 * width,), (5 * width, 2 * width), (5 * width,)
        return all(
            w.dtype is dtype and w.is_cpu and w.is_contiguous() and w.shape == shape
            for w, shape in zip(self.trained(), shapes, strict=True)
        )


def takes(weights: TreeWeights) -> bool:
    """Whether there are kernels for such weights."""
    return NATIVE.functions(weights.leaf.dtype) is not None and weights.suit()


@final
@dataclass(frozen=True, slots=True)
class TreeGroup:
    """Some trees of a call, and their rows; a thread goes through several.

    Args:
        forest: Numbers count from the first of the rows.
        rows: Of the call.
    """

    forest: Forest
    rows: slice

    @property
    def leaves(self) -> Tensor:
        """int64, the leaves' places among the rows."""
        return torch.from_numpy(self.forest.order[: self.forest.leaves])


def threads_of(rows: int, hidden: int) -> int:
    """As many threads as torch may use here, and as so many vertices are worth."""
    return threads_for(6 * rows * hidden**2)


def forest_forward(
    groups: Sequence[TreeGroup], x: Sequence[Tensor], weights: TreeWeights, kept: Tensor, h: Tensor
) -> bool:
    """Compute h at every vertex; False: torch is to do it.

    Args:
        groups: Of the call, one below the other.
        x: ``(leaves, E)`` of each, in the order of the leaves.
        weights: Of leaf and branch.
        kept: ``(rows, weights.kept())``, is written.
        h: ``(rows, H)``, is written.
    """
    rows, width, depth = h.shape[0], weights.hidden, weights.depth
    run = _function("forest_forward", weights, rows)
    if run is None or (kept.shape, h.shape) != ((rows, weights.kept()), (rows, width)):
        return False
    if not alike(weights.leaf, *x, kept, h):
        return False
    words: list[int] = []
    for group, entering in zip(groups, x, strict=True):
        if entering.shape != (group.forest.leaves, depth):
            return False
        at, size = group.rows.start, kept.element_size()
        words += _words(group)
        words += (
            entering.data_ptr(),
            kept.data_ptr() + at * kept.shape[1] * size,
            h.data_ptr() + at * width * size,
            *[0] * 5,
        )
    bad = run(
        pack(f"{len(words)}q", *words),
        len(groups),
        threads_of(rows, width),
        width,
        depth,
        kept.shape[1],
        weights.bf16,
        weights.leaf.data_ptr(),
        weights.leaf_bias.data_ptr(),
        weights.branch.data_ptr(),
        weights.branch_bias.data_ptr(),
    )
    if bad:
        raise _no_memory(rows)
    return True


@final
@dataclass(frozen=True, slots=True)
class TreeSlopes:
    """Gradients: of x ``(leaves, E)`` of each group, or none; and of the weights, by their name."""

    x: Sequence[Tensor]
    leaf: Tensor
    leaf_bias: Tensor
    branch: Tensor
    branch_bias: Tensor


def forest_backward(
    groups: Sequence[TreeGroup],
    dh: Tensor,
    kept: Tensor,
    rows: Rows | None,
    weights: TreeWeights,
    *,
    wanted: bool = True,
) -> TreeSlopes | None:
    """The way back through all heights; None: torch is to do it. No groups have no gradients.

    Args:
        groups: Of the vertices that come back, one below the other.
        dh: ``(n, H)``.
        kept: ``(m, weights.kept())``, what ``forest_forward`` wrote.
        rows: int64 ``(n,)``, the rows of ``kept``; None: all.
        weights: Of now.
        wanted: Whether the gradient of x is.

    Raises:
        ProtocolError: A row is out of range.
    """
    n, width, depth = dh.shape[0], weights.hidden, weights.depth
    run = _function("forest_backward", weights, n)
    rows, limit = contiguous(rows), kept.shape[0]
    fits = (dh.shape[1], kept.shape[1]) == (width, weights.kept())
    if run is None or not fits or (limit if rows is None else rows.size) != n:
        return None
    if not alike(weights.leaf, dh, kept):
        return None
    d, size = dh.clone(), dh.element_size()
    leaves = [g.forest.leaves for g in groups]
    dx: Sequence[Tensor] = ()
    if wanted:
        dx = torch.split_with_sizes(dh.new_empty((sum(leaves), depth)), leaves)
    words: list[int] = []
    for k, group in enumerate(groups):
        at = group.rows.start
        start = None if rows is None else pointer(rows[group.rows])
        stored = kept.data_ptr() + (at * kept.shape[1] * size if rows is None else 0)
        words += _words(group)
        words += (0, 0, 0, stored, start or 0, limit, d.data_ptr() + at * width * size)
        words.append(dx[k].data_ptr() if wanted else 0)
    threads = threads_of(n, width)
    sizes = [3 * width * depth, 10 * width * width, 3 * width, 5 * width]
    found = dh.new_empty((max(1, min(threads, len(groups))), sum(sizes)))
    bad = run(
        pack(f"{len(words)}q", *words),
        len(groups),
        threads,
        width,
        depth,
        kept.shape[1],
        weights.bf16,
        weights.leaf.data_ptr(),
        weights.branch.data_ptr(),
        found.data_ptr(),
    )
    if bad == 1 and rows is not None:
        raise out_of_range(rows, limit, "read")
    if bad:
        raise _no_memory(n)
    leaf, branch, of_leaf, of_branch = torch.split_with_sizes(found[0], sizes)
    return TreeSlopes(
        dx,
        leaf.view(3 * width, depth),
        of_leaf,
        branch.view(5 * width, 2 * width),
        of_branch,
    )


def _function(name: str, weights: TreeWeights, rows: int) -> Function | None:
    typed = NATIVE.functions(weights.leaf.dtype)
    if typed is None or not weights.suit():
        return None
    return typed[name][6 * rows * weights.hidden**2 > SMALL_WORK]


def _words(group: TreeGroup) -> tuple[int, ...]:
    forest = group.forest
    arrays = forest.bounds, forest.order, forest.child
    return forest.order.size, forest.heights, *(a.ctypes.data for a in arrays)


def _no_memory(rows: int) -> MemoryError:
    return MemoryError(f"no memory for trees of {rows} vertices; lower max_active or max_rows")
