"""Sentiment trees with a binary Tree-LSTM in plain PyTorch: what a synchronous trainer reaches.

    leaf    word ─► embedding ─► i, o, u              c = i u                       h = o tanh(c)
    branch  [h_l, h_r] ───────► i, f_l, f_r, o, u     c = i u + f_l c_l + f_r c_r   h = o tanh(c)
    readout h ─► five scores at every vertex; cross-entropy, summed over all vertices

Three ways to run one and the same network, equal in gradients:

    node    vertex by vertex, one tree after another; one update per minibatch of trees
    level   all vertices of one height in a minibatch together, from the leaves up; autograd
    fused   level by level in preallocated buffers, with the backward pass written by hand: each
            weight's gradient is one matrix product for the whole minibatch

Rate and batch are those of ``benchmarks/tuning``; the initial word vectors were chosen by the sweep
beside ``benchmarks.baselines.sentiment``, which runs one form alone. The network is that of Tai et
al. 2015, arXiv:1503.00075, with the leaf and the branch as cells of their own, as in Gaunt et al.
2017, arXiv:1705.09786.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.data.sst import CLASSES, SentimentTree, load_sst
from geartrain_baselines.baseline import Baseline, Epoch, Terms, rate_at, segments

Method = Literal["node", "level", "fused"]

RATES: Final = {10: 0.1, 25: 0.05, 50: 0.03, 100: 0.05}  # Adagrad's, by batch
BATCH: Final = 50


@final
@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """Some trees, their vertices sorted by height and, within a height, by their parent's height.

    Args:
        word: int64 ``(L,)``, of the leaves, which are the first L of the V vertices.
        child: int64 ``(V - L, 2)``, left and right child of each branch, among the V vertices.
        label: int64 ``(V,)``.
        root: int64 ``(trees,)``, the roots among the V vertices.
        levels: Number of vertices of each height; the leaves' height is 0.
        segments: For each height, how many of its vertices have a parent of height 1, 2, ...; the
            roots come last.
        taken: For each height from 1 on, int64 ``(2 n,)``: where its n left and right children
            stand, in turn, among all vertices whose parents have this height.
    """

    word: Tensor
    child: Tensor
    label: Tensor
    root: Tensor
    levels: list[int]
    segments: list[list[int]]
    taken: Sequence[Tensor]


@final
class TreeColumns:
    """Trees in columns, ready to be cut into minibatches without a loop over vertices."""

    def __init__(self, trees: Sequence[SentimentTree]) -> None:
        sizes = np.array([tree.vertices for tree in trees])
        self.trees = trees
        self._end = np.cumsum(sizes)
        self._begin = self._end - sizes
        self._label = np.concatenate([tree.label for tree in trees])
        self._parent = np.concatenate([tree.parent for tree in trees])
        self._slot = np.concatenate([tree.slot for tree in trees])
        self._height = np.concatenate([_heights(tree) for tree in trees])
        self._word = np.full(len(self._label), -1)
        for tree, begin in zip(trees, self._begin, strict=True):
            self._word[begin + tree.leaf] = tree.word
        # A root's parent is given a height above all others, so that roots sort last.
        above = int(self._height.max()) + 1
        to_parent = np.arange(len(self._label)) - _ranges(sizes) + self._parent
        is_root = self._parent < 0
        self._parent_height = np.where(
            is_root, above, self._height[np.where(is_root, 0, to_parent)]
        )
        self._above = above

    def __len__(self) -> int:
        return len(self.trees)

    @property
    def vertices(self) -> int:
        """Number of vertices of all trees."""
        return len(self._label)

    def count(self, chosen: NDArray[np.int64]) -> int:
        """Number of vertices of the trees of these numbers."""
        return int((self._end[chosen] - self._begin[chosen]).sum())

    def minibatch(self, chosen: NDArray[np.int64]) -> Minibatch:
        """Collate the trees of these numbers."""
        sizes = self._end[chosen] - self._begin[chosen]
        within = _ranges(sizes)
        row = within + np.repeat(self._begin[chosen], sizes)
        height, parent_height = self._height[row], self._parent_height[row]
        above = self._above + 1
        key = height * above + parent_height
        order = np.argsort(key, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        parent = np.arange(len(row)) - within + self._parent[row]
        is_child = self._parent[row] >= 0
        top = int(height.max())
        counts = np.bincount(key, minlength=(top + 1) * above)[: (top + 1) * above]
        segments = counts.reshape(top + 1, above)
        leaves = int(segments[0].sum())
        child = np.empty((len(row) - leaves, 2), np.int64)
        child[place[parent[is_child]] - leaves, self._slot[row][is_child]] = place[is_child]
        # Vertices sorted by their parent's height first: where each stands among those.
        by_parent = np.argsort(parent_height[order], kind="stable")
        waiting = np.empty_like(order)
        waiting[by_parent] = np.arange(len(order))
        consumed = segments.sum(0)[1 : top + 1]
        first = np.repeat(np.cumsum(consumed) - consumed, consumed)
        taken = torch.from_numpy(waiting[child].reshape(-1) - first)
        return Minibatch(
            word=torch.from_numpy(self._word[row][order[:leaves]]),
            child=torch.from_numpy(child),
            label=torch.from_numpy(self._label[row][order]),
            root=torch.from_numpy(place[~is_child]),
            levels=segments.sum(1).tolist(),
            segments=[[*line[1 : top + 1], line[-1]] for line in segments.tolist()],
            taken=taken.split(consumed.tolist()),  # type: ignore[no-untyped-call]
        )


def _ranges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0..sizes[0]-1, 0..sizes[1]-1, ... in one array."""
    end = np.cumsum(sizes)
    return np.arange(end[-1]) - np.repeat(end - sizes, sizes)


def _heights(tree: SentimentTree) -> NDArray[np.int64]:
    heights = [0] * tree.vertices
    for vertex, parent in enumerate(tree.parent[:-1].tolist()):
        heights[parent] = max(heights[parent], heights[vertex] + 1)
    return np.array(heights)


@final
class TreeLstm(nn.Module):
    """The network, with PyTorch's own initial values but for the words'.

    Args:
        words: Size of the vocabulary.
        hidden: Width of the state and of the embedding.
        spread: Standard deviation of the normal numbers that words start from.
    """

    def __init__(self, words: int, hidden: int = 128, spread: float = 0.03) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(words, hidden, sparse=True)
        nn.init.normal_(self.embedding.weight, std=spread)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.branch = nn.Linear(2 * hidden, 5 * hidden)
        self.readout = nn.Linear(hidden, CLASSES)

    def node(self, tree: SentimentTree) -> Tensor:
        """Return scores ``(V, 5)`` of one tree, its vertices in post-order."""
        embedded = iter(self.embedding(torch.from_numpy(tree.word)).unbind())
        is_leaf = np.zeros(tree.vertices, bool)
        is_leaf[tree.leaf] = True
        stack: list[tuple[Tensor, Tensor]] = []
        states: list[Tensor] = []
        for leaf in is_leaf.tolist():
            if leaf:
                h, c = self._leaf(next(embedded))
            else:
                (h_right, c_right), (h_left, c_left) = stack.pop(), stack.pop()
                h, c = self._branch(torch.cat((h_left, h_right)), c_left, c_right)
            stack.append((h, c))
            states.append(h)
        return cast(Tensor, self.readout(torch.stack(states)))

    def level(self, batch: Minibatch) -> Tensor:
        """Return scores ``(V, 5)`` of a minibatch, its vertices in the minibatch's order."""
        h, c = self._leaf(self.embedding(batch.word))
        waiting: list[list[Tensor]] = [[] for _ in batch.segments]
        states = [h]
        for height, taken in enumerate(batch.taken, 1):
            _send(torch.stack((h, c), 1), batch.segments[height - 1], waiting)
            # (n, child, h or c, hidden)
            pairs = torch.cat(waiting[height]).index_select(0, taken)
            pairs = pairs.view(-1, 2, 2, self.hidden)
            c_left, c_right = pairs[:, :, 1].unbind(1)
            h, c = self._branch(pairs[:, :, 0].flatten(1), c_left, c_right)
            states.append(h)
        return cast(Tensor, self.readout(torch.cat(states)))

    def fused(self, batch: Minibatch) -> Tensor:
        """Do as ``level`` does, in preallocated buffers."""
        x = self.embedding(batch.word)
        parameters = self.leaf.weight, self.leaf.bias, self.branch.weight, self.branch.bias
        h = cast(Tensor, _Climb.apply(batch, x, *parameters))  # type: ignore[no-untyped-call]
        return cast(Tensor, self.readout(h))

    def _leaf(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, u = self.leaf(x).tensor_split((2 * self.hidden,), -1)
        i, o = gates.sigmoid().chunk(2, -1)
        c = i * u.tanh()
        return o * c.tanh(), c

    def _branch(self, h: Tensor, c_left: Tensor, c_right: Tensor) -> tuple[Tensor, Tensor]:
        gates, u = self.branch(h).tensor_split((4 * self.hidden,), -1)
        i, f_left, f_right, o = gates.sigmoid().chunk(4, -1)
        c = torch.addcmul(torch.addcmul(i * u.tanh(), f_left, c_left), f_right, c_right)
        return o * c.tanh(), c


def _send(states: Tensor, sizes: list[int], waiting: list[list[Tensor]]) -> None:
    """Cut the states of one height by their parents' heights, and let each piece wait there."""
    # Views; their gradients are joined by one concatenation.
    pieces = states.split(sizes)  # type: ignore[no-untyped-call]
    for height in range(1, len(waiting)):
        if sizes[height - 1]:
            waiting[height].append(pieces[height - 1])


@final
class _Climb(torch.autograd.Function):
    """States h ``(V, H)`` of a minibatch; its gradient by hand, from the roots down.

    Per branch the gates and the children's h are kept, per vertex c and tanh(c).
    """

    @staticmethod
    def forward(
        ctx: Any,
        batch: Minibatch,
        x: Tensor,
        leaf_weight: Tensor,
        leaf_bias: Tensor,
        branch_weight: Tensor,
        branch_bias: Tensor,
    ) -> Tensor:
        vertices, leaves, width = len(batch.label), len(x), leaf_weight.shape[0] // 3
        h, c, t = (x.new_empty(vertices, width) for _ in range(3))
        leaf = torch.addmm(leaf_bias, x, leaf_weight.t())
        leaf[:, : 2 * width].sigmoid_()
        leaf[:, 2 * width :].tanh_()
        i, o, u = leaf.chunk(3, 1)
        torch.mul(i, u, out=c[:leaves])
        torch.tanh(c[:leaves], out=t[:leaves])
        torch.mul(o, t[:leaves], out=h[:leaves])
        gates = x.new_empty(vertices - leaves, 5 * width)
        below = x.new_empty(vertices - leaves, 2 * width)
        transposed = branch_weight.t()
        end = leaves
        for count in batch.levels[1:]:
            begin, end = end, end + count
            here = slice(begin - leaves, end - leaves)
            child = batch.child[here].view(-1)
            torch.index_select(h, 0, child, out=below[here].view(-1, width))
            g = torch.addmm(branch_bias, below[here], transposed, out=gates[here])
            g[:, : 4 * width].sigmoid_()
            g[:, 4 * width :].tanh_()
            fc = c.index_select(0, child).view(count, 2 * width).mul_(g[:, width : 3 * width])
            cells = torch.add(fc[:, :width], fc[:, width:], out=c[begin:end])
            cells.addcmul_(g[:, :width], g[:, 4 * width :])
            torch.tanh(cells, out=t[begin:end])
            torch.mul(g[:, 3 * width : 4 * width], t[begin:end], out=h[begin:end])
        ctx.batch = batch
        ctx.save_for_backward(x, leaf_weight, branch_weight, leaf, gates, below, c, t)
        return h

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        x, leaf_weight, branch_weight, leaf, gates, below, c, t = ctx.saved_tensors
        batch, leaves, width = ctx.batch, len(x), c.shape[1]
        dh = outer[0].clone()
        dc = torch.zeros_like(c)
        dgates = torch.empty_like(gates)
        begin = len(c)
        for count in reversed(batch.levels[1:]):
            begin, end = begin - count, begin
            here = slice(begin - leaves, end - leaves)
            child = batch.child[here].view(-1)
            g, dg = gates[here], dgates[here]
            total = _through_output(
                g[:, 3 * width : 4 * width],
                t[begin:end],
                dh[begin:end],
                dg[:, 3 * width : 4 * width],
            )
            total += dc[begin:end]
            torch.mul(total, g[:, 4 * width :], out=dg[:, :width])
            torch.mul(total, g[:, :width], out=dg[:, 4 * width :])
            cells = c.index_select(0, child).view(count, 2, width)
            both = total.unsqueeze(1)
            torch.mul(cells, both, out=dg[:, width : 3 * width].unflatten(1, (2, width)))  # type: ignore[no-untyped-call]
            # Every vertex has one parent, so nothing is added up here.
            forget = g[:, width : 3 * width].unflatten(1, (2, width))
            dc.index_copy_(0, child, (forget * both).view(-1, width))
            _through_gates(g, dg, 4 * width)
            dh.index_add_(0, child, (dg @ branch_weight).view(-1, width))
        dleaf = torch.empty_like(leaf)
        i, o, u = leaf.chunk(3, 1)
        total = _through_output(o, t[:leaves], dh[:leaves], dleaf[:, width : 2 * width])
        total += dc[:leaves]
        torch.mul(total, u, out=dleaf[:, :width])
        torch.mul(total, i, out=dleaf[:, 2 * width :])
        _through_gates(leaf, dleaf, 2 * width)
        return (
            None,
            dleaf @ leaf_weight,
            dleaf.t() @ x,
            dleaf.sum(0),
            dgates.t() @ below,
            dgates.sum(0),
        )


def _through_output(o: Tensor, t: Tensor, dh: Tensor, do: Tensor) -> Tensor:
    """Write the gradient of the gate o, and return what h = o t, t = tanh(c), sends to c."""
    torch.mul(dh, t, out=do)
    return cast(Tensor, torch.ops.aten.tanh_backward(dh * o, t))


def _through_gates(g: Tensor, dg: Tensor, sigmoids: int) -> None:
    """Turn gradients of the gates' values into those of what goes into sigmoid and tanh."""
    s, ds, u, du = g[:, :sigmoids], dg[:, :sigmoids], g[:, sigmoids:], dg[:, sigmoids:]
    torch.ops.aten.sigmoid_backward.grad_input(ds, s, grad_input=ds)
    torch.ops.aten.tanh_backward.grad_input(du, u, grad_input=du)


def evaluate(net: TreeLstm, forest: TreeColumns, batch: int = 200) -> tuple[float, float]:
    """Return the shares of all vertices and of roots that are labelled right."""
    right = roots = 0
    with torch.no_grad():
        for begin in range(0, len(forest), batch):
            chosen = np.arange(begin, min(begin + batch, len(forest)))
            trees = forest.minibatch(chosen)
            hit = net.fused(trees).argmax(1) == trees.label
            right += int(hit.sum())
            roots += int(hit[trees.root].sum())
    return right / forest.vertices, roots / len(forest)


def summed_loss(
    net: TreeLstm, method: Method, forest: TreeColumns, chosen: NDArray[np.int64]
) -> Tensor:
    """Return the cross-entropy of these trees, summed over all vertices.

    With the method ``node`` the gradient has been added up by then, one tree after another, and the
    value that is returned has none.
    """
    if method != "node":
        trees = forest.minibatch(chosen)
        scores = net.level(trees) if method == "level" else net.fused(trees)
        return F.cross_entropy(scores, trees.label, reduction="sum")
    total = torch.zeros(())
    for number in chosen.tolist():
        tree = forest.trees[number]
        loss = F.cross_entropy(net.node(tree), torch.from_numpy(tree.label), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def train(
    method: Method = "fused",
    *,
    batch: int = BATCH,
    epochs: int = 2,
    lr: float | None = None,
    spread: float = 0.03,
    seed: int = 0,
    data: Path | None = None,
    trees: int | None = None,
    hidden: int = 128,
    evaluate_every: float | None = None,
) -> Iterator[Epoch]:
    """Train a fresh network with Adagrad, and yield after every evaluation.

    The metrics are ``all`` and ``root``: the shares of all development vertices, and of the roots
    among them, that are labelled right.

    The loss is summed over the vertices of a minibatch; Adagrad's steps do not depend on its scale.

    Args:
        method: One of the three above.
        batch: Trees per update.
        epochs: Passes over the training trees.
        lr: Adagrad's rate; None takes the one that was tuned at this batch.
        spread: Standard deviation of the normal numbers that words start from.
        seed: Of the initial values and of the order.
        data: Folder that holds ``sst/``; None takes ``$GEARTRAIN_DATA``.
        trees: Train on the first so many trees; None takes all.
        hidden: Width of the state and of the word vectors.
        evaluate_every: Share of an epoch between two evaluations; None: the end alone.
    """
    rate = rate_at(batch, RATES) if lr is None else lr
    # Embeddings give sparse gradients; torch warns unless it is told whether to check them.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    sst = load_sst(data)
    forest, dev = TreeColumns(sst.train[:trees]), TreeColumns(sst.dev)
    torch.manual_seed(seed)
    net = TreeLstm(len(sst.vocabulary), hidden, spread)
    dense = [p for name, p in net.named_parameters() if not name.startswith("embedding")]
    optimizers = (
        torch.optim.Adagrad(dense, lr=rate, fused=True),
        torch.optim.Adagrad(net.embedding.parameters(), lr=rate),  # touches the batch's words alone
    )
    seconds = 0.0
    order = segments(len(forest), batch, seed=seed, epochs=epochs, evaluate_every=evaluate_every)
    for segment in order:
        begin, loss_sum, vertices = time.perf_counter(), 0.0, 0
        for rows in segment.batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = summed_loss(net, method, forest, rows)
            if method != "node":
                loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
            loss_sum += loss.item()
            vertices += forest.count(rows)
        seconds += time.perf_counter() - begin
        every, root = evaluate(net, dev)
        yield Epoch(
            epoch=segment.epoch,
            seconds=seconds,
            instances=len(segment),
            loss=loss_sum / vertices,
            updates=len(segment.batches),
            valid={"all": every, "root": root},
        )


def train_under(terms: Terms, method: Method, rate: float | None = None) -> Iterator[Epoch]:
    """Do as ``train`` does, under the terms of a comparison.

    Args:
        terms: With the options ``trees`` and ``hidden``.
        method: One of the three above.
        rate: Adagrad's; None takes the tuned one.
    """
    return train(
        method,
        lr=rate,
        evaluate_every=terms.evaluate_every,
        batch=terms.batch,
        epochs=terms.epochs,
        seed=terms.seed,
        data=terms.data,
        trees=int(terms.options["trees"]) or None,
        hidden=int(terms.options["hidden"]),
    )


def _baseline(name: Method, what: str, *, slow: bool = False) -> Baseline:
    return Baseline(
        name=name, what=what, batch=BATCH, train=partial(train_under, method=name), slow=slow
    )


BASELINES: Final = (
    _baseline("node", "vertex by vertex, one tree after another", slow=True),
    _baseline("level", "all vertices of one height together, autograd"),
    _baseline("fused", "level by level in place, backward by hand"),
)
