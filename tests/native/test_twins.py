"""A run without kernels is the run with them: same structure, residuals of then, weights of now.

Simulated, in float64, with steps between a forward and its backward: a twin that took activations,
weights or zeros of another time would end elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.native import library
from geartrain.nn import (
    GatedGraphCell,
    GatedSum,
    Recurrent,
    TokenRNN,
    Tree,
    TreeLSTMBranch,
    TreeLSTMLeaf,
    VertexChoice,
    WholeList,
    WholeTree,
    choice_loss,
    first_states,
)

Use = Callable[[library.Library | None], None]
Model = tuple[gt.Graph, list[nn.Module], list[gt.Instance]]
H, WORDS, LABELS, DATA = 6, 11, 4, 32
F64 = torch.float64


def binary_tree(draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Leaves first, then inner vertices, the root last."""
    leaves = int(draw.integers(1, 9))
    size = 2 * leaves - 1
    parent, slot, roots = np.full(size, -1), np.zeros(size, np.int64), list(range(leaves))
    for made in range(leaves, size):
        at = int(draw.integers(len(roots) - 1))
        left, right = roots[at : at + 2]
        parent[[left, right]], slot[right] = made, 1
        roots[at : at + 2] = [made]
    return {"parent": parent, "slot": slot, "label": draw.integers(0, LABELS, size)}


def words_of(tree: dict[str, np.ndarray], draw: np.random.Generator) -> np.ndarray:
    size = tree["parent"].size
    word = draw.integers(0, WORDS, size)
    word[tree["parent"][tree["parent"] >= 0]] = -1
    return word


def trees(*, whole: bool = True, words: bool = True) -> Model:
    leaf = TreeLSTMLeaf(H + 1, H, vocabulary=WORDS if words else None, dtype=F64)
    branch, readout = TreeLSTMBranch(H, dtype=F64), nn.Linear(H, LABELS, dtype=F64)
    before = nn.Linear(3, H + 1, dtype=F64)
    graph, draw, data = gt.Graph(vertex=("parent", "slot", "label")), np.random.default_rng(1), []
    stream = graph.input("word", bundle=whole)
    if not words:
        stream = stream.through(before, name="before")
    if whole:
        cells = WholeTree(leaf, branch)
        h = stream.through(cells, name="tree", read=("parent", "slot"), inside=True)
    else:
        h = Tree(branch, name="branch")(stream.through(leaf, name="leaf"))
    h.through(readout, name="readout", take=0).loss(gt.cross_entropy, "label")
    for _ in range(DATA):
        tree = binary_tree(draw)
        word, size = words_of(tree, draw), tree["parent"].size
        x: object = torch.from_numpy(word if words else draw.standard_normal((size, 3)))
        leaves = np.setdiff1d(np.arange(size), tree["parent"])
        data.append(gt.Instance({"word": x if whole else (x[leaves], leaves)}, vertex=tree))
    return graph, [leaf, branch, readout, *([] if words else [before])], data


def lists(cell: nn.Module, *, whole: bool = True, floats: bool = False) -> Model:
    cell, readout = cell.double(), nn.Linear(H, LABELS, dtype=F64)
    graph = gt.Graph(vertex=("token",), value=("label",))
    draw, data = np.random.default_rng(2), []
    if whole:
        tokens = graph.input("token", bundle=True)
        ended = tokens.through(WholeList(cell), name="cell", inside=True, pool=True)
    else:
        start = graph.input("token").through(first_states(H, dtype=F64))
        ended = Recurrent(cell, read="token", name="cell")(start)
    ended.through(nn.Sequential(nn.Linear(H, H, dtype=F64), nn.Tanh()), name="hidden").through(
        readout, name="readout"
    ).loss(gt.cross_entropy, "label")
    for _ in range(DATA):
        n = int(draw.integers(1, 9))
        token = draw.integers(0, WORDS, n)
        x: object = torch.from_numpy(draw.standard_normal((n, 3)) if floats else token)
        if not whole:
            x = (torch.zeros(1, 1, dtype=F64), np.zeros(1, np.int64))
        data.append(gt.Instance({"token": x}, {"token": token}, value={"label": token[-1] % 4}))
    return graph, [cell, readout], data


class Stepwise(nn.Module):
    """A cell of torch that reads a token."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(WORDS, 3), cell

    def forward(self, h: Tensor, token: Tensor) -> Tensor:
        y: Tensor = self.cell(self.words(token), h)
        return y


def graphs(*, choose: bool) -> Model:
    network = GatedGraphCell(H, types=2, steps=3).double()
    before = nn.Linear(3, H, dtype=F64)
    graph = gt.Graph(vertex=("kind",), edge=("type",), value=("answer", "wanted"))
    draw, data = np.random.default_rng(3), []
    rows = graph.input("x", bundle=True).through(before, name="before")
    h = rows.through(network, name="network", inside=True)
    readout: nn.Module
    if choose:
        readout = VertexChoice(H).double()
        h.through(readout, name="choice", read="answer", inside=True, pool=True).loss(
            choice_loss, "answer"
        )
    else:
        readout = GatedSum(H, 2).double()
        h.through(readout, name="sum", read="kind", inside=True, pool=True).loss(
            lambda y, wanted: (y[:, 0] - wanted) ** 2, "wanted"
        )
    for _ in range(DATA):
        n, edges = int(draw.integers(1, 9)), int(draw.integers(0, 15))
        ends = draw.integers(0, n, (2, edges))
        data.append(
            gt.Instance(
                {"x": torch.from_numpy(draw.standard_normal((n, 3)))},
                {"kind": draw.integers(0, 2, n)},
                {"source": ends[0], "target": ends[1], "type": draw.integers(0, 2, edges)},
                {"answer": int(draw.integers(n)), "wanted": float(draw.standard_normal())},
            )
        )
    return graph, [network, before, readout], data


MODELS: dict[str, Callable[[], Model]] = {
    "whole trees of words": trees,
    "whole trees of features": partial(trees, words=False),
    "trees": partial(trees, whole=False),
    "whole lists": lambda: lists(TokenRNN(WORDS, H)),
    "whole lists, tanh and an input matrix": lambda: lists(
        TokenRNN(WORDS, H, "tanh", embedding_dim=4)
    ),
    "whole lists, a table of many tokens": lambda: lists(TokenRNN(900, H, sparse=True)),
    "whole lists of features": lambda: lists(nn.RNNCell(3, H), floats=True),
    "lists": lambda: lists(TokenRNN(WORDS, H), whole=False),
    "lists, a cell that runs again": lambda: lists(Stepwise(nn.GRUCell(3, H)), whole=False),
    "graphs, a sum": partial(graphs, choose=False),
    "graphs, a choice": partial(graphs, choose=True),
}
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "Adam": partial(gt.FusedAdam, lr=0.01),
    "Adagrad": partial(gt.FusedAdagrad, lr=0.02),
}


def trained(make: Callable[[], Model], optimizer: str) -> tuple[list[Tensor], float]:
    """All weights after a run, and how stale gradients were on average in the stalest part."""
    torch.manual_seed(0)
    graph, modules, data = make()
    rules = gt.Rules(
        optimizer=OPTIMIZERS[optimizer],
        update_every=gt.Instances(2),
        average="instances",
        clip=gt.Clip(1.0),
    )
    session = gt.Session(
        graph,
        rules=rules,
        runtime=gt.Simulated(2, seed=4),
        max_active=12,
        schedule=gt.Schedule(ramp=gt.Ramp(over=0)),
    )
    fit = session.fit(data, epochs=1)
    weights: Sequence[nn.Parameter] = [p for m in modules for p in m.parameters()]
    return [p.detach().clone() for p in weights], max(s.mean for s in fit.staleness.values())


@pytest.mark.parametrize("name", MODELS)
def test_it_ends_at_the_same_weights(name: str, native: library.Library, use: Use) -> None:
    for optimizer in ("Adam", "Adagrad") if "words" in name else ("SGD",):
        use(native)
        weights, stale = trained(MODELS[name], optimizer)
        use(None)
        expected, also_stale = trained(MODELS[name], optimizer)
        assert stale == also_stale > 0.1
        assert_close(weights, expected, rtol=0, atol=1e-9)
