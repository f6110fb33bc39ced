"""The Tree-LSTM of sentiment trees in DGL: a batch of trees is one graph, messages pass by levels.

    python -m benchmarks.peers.dgl_trees    the request on stdin, the reply on stdout; see protocol

DGL collates the trees of an update, finds the levels, and moves the children's states to their
parent's mailbox ``(n, 2, hidden)``, left before right; what is done there is the cell of
``geartrain_baselines.sentiment``. Nothing of geartrain is needed, so any interpreter that has torch
and DGL will do. The trees come with the request.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("DGLBACKEND", "pytorch")

import dgl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.protocol import Checked, Request, Training, serve


class TreeLstm(nn.Module):
    """Scores ``(V, 5)`` of a batch of trees.

    Args:
        words: Size of the vocabulary.
        hidden: Width of the state and of the word vectors.
    """

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(words, hidden, sparse=True)
        nn.init.normal_(self.embedding.weight, std=0.03)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.branch = nn.Linear(2 * hidden, 5 * hidden)
        self.readout = nn.Linear(hidden, 5)

    def forward(self, trees: Any) -> Tensor:
        leaves, *levels = dgl.topological_nodes_generator(trees)
        gates, u = self.leaf(self.embedding(trees.ndata["word"][leaves])).tensor_split(
            (2 * self.hidden,), -1
        )
        i, o = gates.sigmoid().chunk(2, -1)
        c = i * u.tanh()
        first = torch.zeros(trees.num_nodes(), self.hidden)
        with trees.local_scope():
            trees.ndata["h"] = first.index_copy(0, leaves, o * c.tanh())
            trees.ndata["c"] = first.index_copy(0, leaves, c)
            for level in levels:
                trees.pull(level, self._send, self._receive)
            scores: Tensor = self.readout(trees.ndata["h"])
        return scores

    def _send(self, edges: Any) -> dict[str, Tensor]:
        return {"h": edges.src["h"], "c": edges.src["c"]}

    def _receive(self, nodes: Any) -> dict[str, Tensor]:
        gates, u = self.branch(nodes.mailbox["h"].flatten(1)).tensor_split((4 * self.hidden,), -1)
        i, f_left, f_right, o = gates.sigmoid().chunk(4, -1)
        c_left, c_right = nodes.mailbox["c"].unbind(1)
        c = torch.addcmul(torch.addcmul(i * u.tanh(), f_left, c_left), f_right, c_right)
        return {"h": o * c.tanh(), "c": c}


def graph_of(tree: dict[str, list[int]]) -> Any:
    """A tree whose edges lead from the children, left before right, to their parent."""
    parent, slot = np.array(tree["parent"]), np.array(tree["slot"])
    child = np.flatnonzero(parent >= 0)
    child = child[np.lexsort((slot[child], parent[child]))]
    graph = dgl.graph(
        (torch.from_numpy(child), torch.from_numpy(parent[child])), num_nodes=len(parent)
    )
    word = torch.zeros(len(parent), dtype=torch.int64)
    word[torch.tensor(tree["leaf"])] = torch.tensor(tree["word"])
    graph.ndata["word"], graph.ndata["label"] = word, torch.tensor(tree["label"])
    return graph


def answer(request: Request) -> Training | Checked:
    """Make the system that is asked for."""
    torch.set_num_threads(request["threads"])
    torch.sparse.check_sparse_tensor_invariants.disable()
    torch.manual_seed(request["seed"])
    net = TreeLstm(request["words"], request["options"]["hidden"])
    graphs = [graph_of(tree) for tree in request["trees"]]
    if "check" in request:
        return check(net, dgl.batch(graphs))
    dense = [p for n, p in net.named_parameters() if not n.startswith("embedding")]
    optimizers = (
        torch.optim.Adagrad(dense, lr=0.05, fused=True),
        torch.optim.Adagrad(net.embedding.parameters(), lr=0.05),
    )
    random, batch = np.random.default_rng(request["seed"]), request["system"]["batch"]
    updates = 0

    def passes() -> Iterator[float]:
        nonlocal updates
        while True:
            begin = time.perf_counter()
            order = random.permutation(len(graphs)).tolist()
            for first in range(0, len(graphs), batch):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(
                    net, dgl.batch([graphs[i] for i in order[first : first + batch]])
                ).backward()
                for optimizer in optimizers:
                    optimizer.step()
                updates += 1
            yield time.perf_counter() - begin

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"dgl": dgl.__version__}
    return Training(len(graphs), passes(), versions, lambda: {"levels": updates})


def loss_of(net: TreeLstm, trees: Any) -> Tensor:
    """Cross entropy, summed over all vertices."""
    return F.cross_entropy(net(trees), trees.ndata["label"], reduction="sum")


def check(net: TreeLstm, trees: Any) -> Checked:
    """The loss at the agreed weights; see ``benchmarks.peers.child.check``."""
    with torch.no_grad():
        for parameter in net.parameters():
            values = 0.1 * np.sin(np.arange(parameter.numel(), dtype=np.float64))
            parameter.copy_(torch.from_numpy(values).view_as(parameter))
        return Checked(loss_of(net, trees).item())


if __name__ == "__main__":
    serve(answer)
