"""Models of modules that take whole trees, lists and graphs; their plain form is their module's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nn import (
    GatedGraphCell,
    GatedSum,
    TokenRNN,
    TreeLSTMBranch,
    TreeLSTMLeaf,
    VertexChoice,
    WholeList,
    WholeTree,
)
from geartrain.nodes.loss import accuracy, cross_entropy
from geartrain.whole.graph.choice import choice_accuracy, choice_loss
from tests.rigs import models

H = models.H
WORDS = 11


class Mean(nn.Module):
    """A branch with a state of its own kind: the mean of what a map makes of both children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(H, H)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h)).mean(1)


def trees(*, lstm: bool) -> models.Model:
    """Binary trees with a label at every vertex, all heights in one firing."""
    torch.manual_seed(2)
    leaf = TreeLSTMLeaf(H, H, vocabulary=WORDS, sparse=False) if lstm else nn.Embedding(WORDS, H)
    tree = WholeTree(leaf, TreeLSTMBranch(H) if lstm else Mean()).double()
    readout = nn.Linear(H, 5).double()
    graph = Graph(vertex=("parent", "slot", "label"))
    words = graph.input("word", bundle=True)
    h = words.through(tree, name="tree", read=("parent", "slot"), inside=True)
    h.through(readout, name="readout").loss(
        cross_entropy, target="label", metrics={"accuracy": accuracy}
    )
    draw = np.random.default_rng(2)
    data = []
    for leaves in draw.integers(1, 7, 12).tolist():
        word = np.r_[draw.integers(0, WORDS, leaves), np.full(leaves - 1, -1)]
        data.append(Instance({"word": torch.from_numpy(word)}, models.tree(draw, leaves)))
    return models.Model(graph, {"tree": tree, "readout": readout}, None, data, {})


def lists(cell: Callable[[], nn.Module], *, tokens: bool) -> models.Model:
    """Lists of tokens or of features, all steps in one firing."""
    torch.manual_seed(1)
    whole, readout = WholeList(cell()).double(), nn.Linear(H, 5).double()
    graph = Graph(value=("label",))
    rows = graph.input("x", bundle=True)
    ended = rows.through(whole, name="list", inside=True, pool=True)
    ended.through(readout, name="readout", take=0).loss(
        cross_entropy, target="label", metrics={"accuracy": accuracy}
    )
    draw = np.random.default_rng(1)
    data = []
    for n in draw.integers(1, 9, 12).tolist():
        x = draw.integers(0, WORDS, n) if tokens else draw.standard_normal((n, H))
        label = int(draw.integers(5))
        data.append(Instance({"x": torch.from_numpy(x)}, value={"label": label}))
    return models.Model(graph, {"list": whole, "readout": readout}, None, data, {})


def gated(types: int = 3) -> models.Model:
    """``bundles`` by the ready modules."""
    model = models.bundles()
    torch.manual_seed(3)
    cell, readout = GatedGraphCell(H, types, steps=2), GatedSum(H, 0, 1)
    cell, readout = cell.double(), readout.double()
    graph = Graph(edge=("type",), value=("aim",))
    state = graph.loop(name="state", run="steps")
    state.join(graph.input("h", bundle=True, step=0))
    after = state.through(cell, name="cell", inside=True)
    more, done = after.move(step=lambda m: m.step + 1).where(lambda m: m.step < 3)
    state.join(more)
    pooled = done.through(readout, name="readout", inside=True, pool=True)
    pooled.loss(lambda y, aim: (y[:, 0] - aim) ** 2, target="aim")
    return models.Model(graph, {"cell": cell, "readout": readout}, None, model.data, {})


def choice() -> models.Model:
    """A vertex of every bundle."""
    model = models.bundles()
    torch.manual_seed(3)
    first, chooser = nn.Linear(H, H).double(), VertexChoice(H).double()
    graph = Graph(edge=("type",), value=("aim",))
    rows = graph.input("h", bundle=True).through(first, name="first")
    rows.through(chooser, name="choice", read="vertex", inside=True, pool=True).loss(
        choice_loss, "aim", metrics={"accuracy": choice_accuracy}
    )
    return models.Model(graph, {"choice": chooser, "first": first}, None, model.data, {})


MODELS: Mapping[str, Callable[[], models.Model]] = {
    "whole trees": lambda: trees(lstm=True),
    "whole trees, own cells": lambda: trees(lstm=False),
    "whole lists": lambda: lists(lambda: TokenRNN(WORDS, H, "tanh"), tokens=True),
    "whole lists, RNN": lambda: lists(lambda: nn.RNNCell(H, H), tokens=False),
    "whole lists, LSTM": lambda: lists(lambda: nn.LSTMCell(H, H), tokens=False),
    "gated": gated,
    "choice": choice,
}
