"""Whole trees: the kernel gives what autograd gives, and what the loop over vertices gives."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.errors import DataError, ProtocolError
from geartrain.native import library
from geartrain.nn import Tree, TreeLSTMBranch, TreeLSTMLeaf, WholeTree
from geartrain.nn.kernels import EmbeddingKernel
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside
from geartrain.nodes.kernel import bundle_kernel_of
from geartrain.whole.tree.loader import (
    TreeGroup,
    TreeWeights,
    forest_backward,
    forest_forward,
    forest_of,
)

H, E, WORDS = 7, 5, 11
SHAPES = ([1], [3], [1, 2, 1], [9, 1, 30, 4], [200], [40] * 30, [2, 900, 1, 1])


def random_trees(leaves: Sequence[int], seed: int = 0) -> tuple[np.ndarray, ...]:
    """Parent, slot and lengths of trees whose vertices are in a random order."""
    draw = np.random.default_rng(seed)
    parents, slots = [], []
    for count in leaves:
        size = 2 * count - 1
        name = draw.permutation(size)
        parent, slot, roots = np.full(size, -1), np.zeros(size, np.int64), list(range(count))
        for made in range(count, size):
            at = int(draw.integers(len(roots) - 1))
            left, right = roots[at : at + 2]
            parent[name[left]] = parent[name[right]] = name[made]
            slot[name[right]] = 1
            roots[at : at + 2] = [made]
        parents.append(parent)
        slots.append(slot)
    lengths = np.array([2 * count - 1 for count in leaves])
    return np.concatenate(parents), np.concatenate(slots), lengths


def batch(leaves: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor, Inside]:
    parent, slot, lengths = (torch.from_numpy(x) for x in random_trees(leaves, seed))
    segment = torch.repeat_interleave(torch.arange(len(leaves)), lengths)
    return parent, slot, Inside(lengths, segment, {})


def network(*, words: bool = True, depth: int = E, sparse: bool = False) -> WholeTree:
    torch.manual_seed(0)
    vocabulary = WORDS if words else None
    leaf = TreeLSTMLeaf(depth, H, vocabulary=vocabulary, sparse=sparse, dtype=torch.float64)
    return WholeTree(leaf, TreeLSTMBranch(H, dtype=torch.float64))


def entering(rows: int, *, words: bool = True, depth: int = E) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    if words:
        return torch.randint(WORDS, (rows,), generator=draw)
    return torch.randn(rows, depth, dtype=torch.float64, generator=draw)


@pytest.fixture(params=["native", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels and without: torch does the same."""
    if request.param == "torch":
        monkeypatch.setattr(library, "current", lambda: None)
    elif library.current() is None:
        pytest.skip("no native kernels")


class TestKernel:
    @pytest.mark.usefixtures("either")
    @pytest.mark.parametrize("leaves", SHAPES, ids=str)
    @pytest.mark.parametrize(("words", "depth"), [(True, E), (False, E), (False, 3 * H)])
    def test_gives_what_autograd_gives(
        self, leaves: Sequence[int], words: bool, depth: int
    ) -> None:
        module = network(words=words, depth=depth)
        parent, slot, inside = batch(leaves)
        x = entering(parent.shape[0], words=words, depth=depth)
        if not words:
            x.requires_grad_()
        y = module(x, parent, slot, inside)
        dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        learning = list(module.parameters())
        wanted = [*learning, x] if not words else learning
        expected = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        kernel = bundle_kernel_of(module)
        assert kernel is not None
        with torch.no_grad():
            inputs = x.detach(), parent, slot
            _, residuals = kernel.forward(inputs, inside=inside)
            room = torch.full_like(residuals[kernel.room_for], torch.nan)
            (h,), residuals = kernel.forward(inputs, inside=inside, room=room)
            into = GradientSum(learning)
            dx, *nothing = kernel.backward((dy,), residuals, None, into, inside)
        assert residuals[kernel.room_for] is room
        assert_close(h, y.detach())
        assert nothing == [None, None]
        for parameter, want in zip(learning, expected, strict=False):
            found = into.take(parameter)
            if want is None:  # a single leaf has no branch
                assert found is None or not found.any()
            else:
                assert_close(found, want)
        if not words:
            assert_close(dx, expected[-1])

    @pytest.mark.usefixtures("either")
    def test_rows_that_come_back_may_lie_anywhere(self) -> None:
        module, (parent, slot, inside) = network(words=False), batch([4, 9, 2])
        x = entering(parent.shape[0], words=False)
        kernel = bundle_kernel_of(module)
        assert kernel is not None
        lengths = inside.lengths.tolist()
        with torch.no_grad():
            _, residuals = kernel.forward((x, parent, slot), inside=inside)
            spread = np.random.default_rng(0).permutation(40)[: x.shape[0]]
            stores = [r.new_full((40, *r.shape[1:]), -7) for r in residuals]
            for store, r in zip(stores, residuals, strict=True):
                store[spread] = r
            # The third tree and then the first, as if they came from other forwards.
            rows = np.r_[len(spread) - lengths[2] : len(spread), 0 : lengths[0]]
            sizes = torch.tensor([lengths[2], lengths[0]])
            back = Inside(sizes, torch.repeat_interleave(torch.arange(2), sizes), {})
            dy = torch.randn(rows.size, H, dtype=torch.float64)
            into, beside = GradientSum(module.parameters()), GradientSum(module.parameters())
            found = kernel.backward((dy,), tuple(stores), spread[rows], into, back)
            taken = tuple(r[torch.from_numpy(rows)] for r in residuals)
            expected = kernel.backward((dy,), taken, None, beside, back)
        assert_close(found[0], expected[0], rtol=0, atol=0)
        for p in module.parameters():
            assert_close(into.take(p), beside.take(p), rtol=0, atol=0)

    @pytest.mark.usefixtures("needs_kernels")
    def test_products_of_bfloat16_round_their_operands_alone(self) -> None:
        parent, slot, inside = batch([9, 1, 30, 4])
        leaf, branch = TreeLSTMLeaf(32, 32, vocabulary=WORDS, sparse=False), TreeLSTMBranch(32)
        module = WholeTree(leaf, branch)
        exact = WholeTree(copy.deepcopy(leaf).double(), copy.deepcopy(branch).double())
        x = entering(parent.shape[0])
        y = exact(x, parent, slot, inside)
        dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        expected = torch.autograd.grad(y, list(exact.parameters()), dy)
        kernel = bundle_kernel_of(module)
        assert kernel is not None
        bf16 = kernel.rounded()
        with torch.no_grad():
            (h,), residuals = bf16.forward((x, parent, slot), inside=inside)
            into = GradientSum(module.parameters())
            bf16.backward((dy.float(),), residuals, None, into, inside)
        assert_close(h.double(), y, rtol=0, atol=0.01)
        for parameter, want in zip(module.parameters(), expected, strict=True):
            found = into.take(parameter)
            assert found is not None
            assert (found.double() - want).norm() < 0.02 * want.norm()

    @pytest.mark.usefixtures("needs_kernels")
    @pytest.mark.parametrize("words", [True, False])
    def test_threads_share_the_trees_out(self, words: bool) -> None:
        module = network(words=words)
        parent, slot, inside = batch([40, 1, 300, 2, *[9] * 150])
        x = entering(parent.shape[0], words=words)
        kernel = bundle_kernel_of(module)
        assert kernel is not None
        before, made = torch.get_num_threads(), []
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                into = GradientSum(module.parameters())
                with torch.no_grad():
                    (h,), residuals = kernel.forward((x, parent, slot), inside=inside)
                    dx, *_ = kernel.backward((h,), residuals, None, into, inside)
                made.append([h, *(into.take(p) for p in module.parameters()), dx])
        finally:
            torch.set_num_threads(before)
        for one, other in zip(*made, strict=True):
            assert_close(one, other)

    @pytest.mark.usefixtures("either")
    def test_frozen_weights_get_no_gradient(self) -> None:
        module, (parent, slot, inside) = network(), batch([4])
        module.branch.weight.requires_grad_(False)
        module.leaf.embedding.weight.requires_grad_(False)
        kernel = bundle_kernel_of(module)
        assert kernel is not None
        with torch.no_grad():
            x = entering(parent.shape[0])
            (h,), residuals = kernel.forward((x, parent, slot), inside=inside)
            into = GradientSum(module.parameters())
            assert kernel.backward((h,), residuals, None, into, inside) == (None, None, None)
        took = {name: into.take(p) is not None for name, p in module.named_parameters()}
        assert [name for name, some in took.items() if not some] == [
            "leaf.embedding.weight",
            "branch.weight",
        ]

    @pytest.mark.usefixtures("either")
    def test_a_gradient_of_zero_is_passed_on_as_zero(self) -> None:
        module, (parent, slot, inside) = network(), batch([4])
        kernel = bundle_kernel_of(module)
        assert kernel is not None
        with torch.no_grad():
            _, residuals = kernel.forward((entering(parent.shape[0]), parent, slot), inside=inside)
            into = GradientSum(module.parameters())
            assert kernel.backward((None,), residuals, None, into, inside) == (None, None, None)

    @pytest.mark.usefixtures("needs_kernels")
    def test_refuses_rows_that_the_store_does_not_have(self) -> None:
        parent, slot, lengths = random_trees([2])
        groups = [TreeGroup(forest_of(parent, slot, lengths), slice(0, 3))]
        module = network(words=False)
        leaf, branch = module.leaf, module.branch
        with torch.no_grad():
            weights = TreeWeights(leaf.weight, leaf.bias, branch.weight, branch.bias)
            kept = torch.zeros(3, weights.kept(), dtype=torch.float64)
            x, h = [entering(2, words=False)], torch.zeros(3, H, dtype=torch.float64)
            assert forest_forward(groups, x, weights, kept, h)
            assert not forest_forward(groups, x, weights, kept[:2], h)
            with pytest.raises(ProtocolError, match=r"rows \[3\]"):
                forest_backward(groups, h, kept, np.array([0, 1, 3]), weights)

    def test_only_the_cells_of_a_tree_lstm_have_one(self) -> None:
        class Mean(nn.Module):
            def forward(self, h: Tensor) -> Tensor:
                return h.mean(1)

        assert WholeTree(nn.Linear(3, 3), Mean()).bundle_kernel() is None
        other = WholeTree(TreeLSTMLeaf(3, 4), TreeLSTMBranch(5))
        assert other.bundle_kernel() is None
        hooked = network()
        hooked.leaf.register_forward_hook(lambda *_: None)
        assert hooked.bundle_kernel() is None


class TestForest:
    @pytest.mark.parametrize("native", [True, False])
    @pytest.mark.parametrize("leaves", SHAPES, ids=str)
    def test_children_come_before_their_parents(
        self, leaves: Sequence[int], native: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not native:
            monkeypatch.setattr(library, "current", lambda: None)
        parent, slot, lengths = random_trees(leaves, seed=4)
        forest = forest_of(parent, slot, lengths)
        rows = parent.size
        assert sorted(forest.order) == list(range(rows))
        assert forest.leaves == sum(leaves)
        assert forest.bounds[-1] == rows
        height = np.empty(rows, np.int64)
        for k in range(forest.heights):
            height[forest.order[forest.bounds[k] : forest.bounds[k + 1]]] = k
        starts = (lengths.cumsum() - lengths).repeat(lengths)
        for at, (left, right) in enumerate(forest.child.tolist()):
            v = int(forest.order[forest.leaves + at])
            assert [parent[left] + starts[left], parent[right] + starts[right]] == [v, v]
            assert (slot[left], slot[right]) == (0, 1)
            assert height[v] == 1 + max(height[left], height[right])

    @pytest.mark.parametrize("native", [True, False])
    @pytest.mark.parametrize(
        ("parent", "slot", "said"),
        [
            ([3, 3, -1, -1], [0, 1, 0, 0], None),  # two roots are two trees in one
            ([2, 2, 5], [0, 1, 0], r"vertex 2 of tree 1 .* has parent 5; expected -1 or 0\.\.2"),
            ([-1, 2**63 - 1, -1], [0] * 3, r"vertex 1 of tree 1 .* has parent 9223372036854775807"),
            ([2, 2, -1], [0, 2, 0], r"vertex 1 .* has slot 2; expected 0 \(left\) or 1"),
            ([2, 2, -1], [1, 1, 0], r"vertex [01] .* is not the only child of 2 in slot 1"),
            ([2, -1, -1], [0, 0, 0], r"vertex 2 .* has one child; expected two, or none"),
            ([2, 2, 4, 4, 2, -1], [0, 0, 0, 1, 1, 0], r"not the only child of 2 in slot 0"),
            ([1, 0, 1, 0], [0, 0, 1, 1], r"vertex 0 .* is below itself"),
        ],
    )
    def test_what_is_no_tree_is_refused(
        self,
        parent: list[int],
        slot: list[int],
        said: str | None,
        native: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if not native:
            monkeypatch.setattr(library, "current", lambda: None)
        columns = np.array([-1, *parent]), np.array([0, *slot]), np.array([1, len(parent)])
        if said is None:
            assert forest_of(*columns).leaves == 4
            return
        with pytest.raises(DataError, match=said):
            forest_of(*columns)

    @pytest.mark.usefixtures("either")
    @pytest.mark.parametrize(
        ("lengths", "slot", "said"),
        [
            ([3, 1], [0, 1, 0], r"trees of \[3, 1\] vertices came with 3 rows"),
            ([2], [0, 1, 0], r"trees of \[2\] vertices came with 3 rows"),
            ([4, -1], [0, 1, 0], r"trees of \[4, -1\] vertices"),
            ([2**62] * 4 + [3], [0, 1, 0], r"came with 3 rows"),
            ([3], [0, 1], r"parents of shape \(3,\) and int64 came with slots of \(2,\)"),
            ([3], [0.0, 1.0, 0.0], r"slots of \(3,\) and float64; give one integer of each"),
        ],
    )
    def test_columns_that_are_not_of_the_same_vertices_are_refused(
        self, lengths: list[int], slot: list[float], said: str
    ) -> None:
        with pytest.raises(DataError, match=said):
            forest_of(np.array([2, 2, -1]), np.array(slot), np.array(lengths))

    @pytest.mark.parametrize("native", [True, False])
    def test_no_trees_are_no_heights(self, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not native:
            monkeypatch.setattr(library, "current", lambda: None)
        none = np.zeros(0, np.int64)
        forest = forest_of(none, none, none)
        assert (forest.leaves, forest.order.size) == (0, 0)


class Mean(nn.Module):
    """A branch that is no Tree-LSTM's: the mean of what a map makes of the children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(H, H, dtype=torch.float64)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h)).mean(1)


def cells(*, lstm: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    if lstm:
        leaf = TreeLSTMLeaf(E, H, vocabulary=WORDS, dtype=torch.float64)
        return leaf, TreeLSTMBranch(H, dtype=torch.float64)
    return nn.Embedding(WORDS, H, dtype=torch.float64, sparse=True), Mean()


def gradients(*, whole: bool, lstm: bool, workers: int = 1) -> tuple[float, dict[str, Tensor]]:
    """The loss of some trees, and the change that one plain step makes to each weight."""
    leaf, branch = cells(lstm=lstm)
    readout = nn.Linear(H, 3, dtype=torch.float64)
    graph = gt.Graph(vertex=("parent", "slot", "label"))
    if whole:
        words = graph.input("word", bundle=True)
        tree = WholeTree(leaf, branch)
        h = words.through(tree, name="tree", read=("parent", "slot"), inside=True)
    else:
        h = Tree(branch, name="branch")(graph.input("word").through(leaf, name="leaf"))
    h.through(readout, name="readout", take=0).loss(gt.cross_entropy, "label")
    draw, instances = np.random.default_rng(5), []
    for number, leaves in enumerate([3, 1, 8, 5, 2, 13]):
        parent, slot, _ = random_trees([leaves], seed=number)
        size = parent.size
        word, label = draw.integers(0, WORDS, size), draw.integers(0, 3, size)
        at = np.setdiff1d(np.arange(size), parent)
        word[np.setdiff1d(np.arange(size), at)] = -1
        entering = torch.from_numpy(word) if whole else (torch.from_numpy(word[at]), at)
        columns = {"parent": parent, "slot": slot, "label": label}
        instances.append(gt.Instance({"word": entering}, vertex=columns))
    modules = {"leaf": leaf, "branch": branch, "readout": readout}
    before = {
        f"{name}.{inner}": p.detach().clone()
        for name, module in modules.items()
        for inner, p in module.named_parameters()
    }
    rules = gt.Rules(
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        update_every=gt.Instances(6),
        average="instances",
    )
    session = gt.Session(graph, rules=rules, runtime=gt.Threads(workers), max_active=6, seed=0)
    result = session.fit(instances, epochs=1)
    after = {
        f"{name}.{inner}": p.detach() - before[f"{name}.{inner}"]
        for name, module in modules.items()
        for inner, p in module.named_parameters()
    }
    return result.history[-1].loss, after


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("lstm", [True, False])
def test_the_loop_over_vertices_computes_the_same(
    lstm: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(library, "current", lambda: None)
    loss, changes = gradients(whole=True, lstm=lstm)
    expected_loss, expected = gradients(whole=False, lstm=lstm)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    for name, change in changes.items():
        assert_close(change, expected[name], msg=name)
        assert change.abs().max() > 0


def test_a_broken_tree_is_named() -> None:
    graph = gt.Graph(vertex=("parent", "slot", "label"))
    tree = WholeTree(*cells(lstm=True))
    words = graph.input("word", bundle=True)
    h = words.through(tree, name="tree", read=("parent", "slot"), inside=True)
    h.through(nn.Linear(H, 3, dtype=torch.float64), name="readout").loss(gt.cross_entropy, "label")
    columns = {"parent": [2, -1, -1], "slot": [0, 1, 0], "label": [0, 0, 0]}
    bad = gt.Instance({"word": torch.tensor([1, 2, -1])}, vertex=columns, key="line 7")
    session = gt.Session(graph, rules=gt.Rules(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))
    with pytest.raises(DataError, match=r"^instance line 7: 'tree': vertex 2 has one child"):
        session.fit([bad], epochs=1)


def test_the_table_kernel_reads_the_leaves_alone() -> None:
    """Words of inner vertices are no words: -1 would be refused by the table."""
    module, (parent, slot, inside) = network(), batch([5, 2])
    x = entering(parent.shape[0])
    inner = torch.isin(torch.arange(len(x)), _parents(parent, inside))
    kernel = bundle_kernel_of(module)
    with torch.no_grad():
        expected = module(x, parent, slot, inside)
        assert_close(module(x.masked_fill(inner, -1), parent, slot, inside), expected)
        if kernel is not None:
            assert isinstance(kernel._table, EmbeddingKernel)  # type: ignore[attr-defined]
            (h,), _ = kernel.forward((x.masked_fill(inner, -1), parent, slot), inside=inside)
            assert_close(h, expected)


def _parents(parent: Tensor, inside: Inside) -> Tensor:
    starts = (inside.lengths.cumsum(0) - inside.lengths)[inside.segment]
    return (parent + starts)[parent >= 0]
