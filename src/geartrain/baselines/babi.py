"""Questions on graphs with a gated graph network in plain PyTorch.

    marks ─► gated graph network over the facts ─┬─► score of each vertex, softmax in a graph
                                                 ├─► gated sum ─► no or yes
                                                 └─► gated sum ─► a move; marks again, second move

    block     a minibatch of graphs as one block-diagonal graph; messages of all types from every
              vertex, one matrix product
    sparse    the same; messages along the facts only

Adam 5e-3, the gradient clipped at norm 1. The questions are cut into two parts by the recipe, whose
sizes apply. The network is that of Li et al. 2016, arXiv:1511.05493.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.baselines.baseline import Baseline, Epoch, Terms, shuffler
from geartrain.baselines.graphs import Block, GatedGraphNet, GatedSum, Graphs, Method
from geartrain.baselines.lap import Lap
from geartrain.data.babi import TASKS, Task
from geartrain.ir.instance import Instance
from geartrain.recipes.babi import BABI, SIZES
from geartrain.recipes.recipe import Setting

RATE: Final = 5e-3
CLIP_NORM: Final = 1.0
_AT_ONCE: Final = 200  # graphs of a block in validation


@final
class Answerer(nn.Module):
    """Marks in, an answer out, of the kind that the task wants.

    Args:
        kind: The task.
        hidden: Width of a vertex's state.
        steps: Of message passing.
    """

    def __init__(self, kind: Task, hidden: int, steps: int) -> None:
        super().__init__()
        self.kind = kind
        self.net = GatedGraphNet(hidden, 2 * len(kind.relations), steps)
        if kind.answer == "vertex":
            self.score = nn.Linear(hidden, 1, bias=False)
        else:
            self.sum = GatedSum(hidden, out=len(kind.classes))
        if kind.answer == "classes":
            self.marks = nn.Linear(hidden, hidden)

    def forward(self, block: Block, answer: Tensor, method: Method) -> tuple[Tensor, Tensor]:
        """Losses ``(g,)`` and whether the answers are right, bool ``(g,)``.

        Args:
            block: The graphs.
            answer: int64 ``(g, answers)``: a vertex of the graph, a class, or a class each move.
            method: How messages are made.
        """
        h = self.net(block, method)
        if self.kind.answer == "vertex":
            return choose(self.score(h)[:, 0], block, answer[:, 0])
        scores = [self.sum(h, block)]
        if self.kind.answer == "classes":
            again = replace(block, start=self.marks(h).tanh())
            scores.append(self.sum(self.net(again, method), block))
        found = torch.stack(scores, 1)  # (g, answers, classes)
        losses = F.cross_entropy(found.flatten(0, 1), answer.flatten(), reduction="none")
        return losses.view_as(answer).sum(1), (found.argmax(2) == answer).all(1)


def choose(scores: Tensor, block: Block, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of a softmax over the vertices of each graph, and whether its top is right.

    Args:
        scores: ``(v,)``.
        block: The graphs.
        answer: int64 ``(g,)``, vertices within their graphs.
    """
    graphs, at = len(block.first), block.first + answer
    top = scores.new_full((graphs,), -torch.inf)
    top = top.scatter_reduce(0, block.segment, scores.detach(), "amax")
    shares = torch.exp(scores - top[block.segment])
    total = shares.new_zeros(graphs).index_add(0, block.segment, shares)
    # The first of equal scores is the choice.
    is_top = scores.detach() == top[block.segment]
    places = torch.where(is_top, torch.arange(len(scores)), len(scores))
    choice = torch.full((graphs,), len(scores)).scatter_reduce(0, block.segment, places, "amin")
    return total.log() + top - scores[at], choice == at


def train(terms: Terms, method: Method) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation; the metric is ``accuracy``.

    Args:
        terms: With the options of the recipe.
        method: How messages are made.

    Raises:
        ValueError: The recipe refuses an option.
    """
    setting = Setting(
        seed=terms.seed,
        epochs=terms.epochs,
        update_every=terms.batch,
        data=terms.data,
        options=terms.options,
    )
    task = BABI.build(setting)
    number = int(terms.options["task"])
    graphs, answer = _columns(task.load("train"))
    held, truth = _columns(task.load("valid"))
    torch.manual_seed(terms.seed)
    steps = int(terms.options["steps"]) or SIZES[number].steps
    net = Answerer(TASKS[number], graphs.start.shape[1], steps)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, fused=True)
    lap = Lap(len(graphs), terms.evaluate_every)
    for epoch in range(1, terms.epochs + 1):
        order = shuffler(terms.seed, epoch).permutation(len(graphs))
        for first in range(0, len(order), terms.batch):
            rows = order[first : first + terms.batch]
            losses, _ = net(graphs.block(rows), answer[torch.from_numpy(rows)], method)
            optimizer.zero_grad()
            losses.mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
            optimizer.step()
            lap.add(losses.detach().sum().item(), len(rows))
            if lap.ends():
                yield lap.entry({"accuracy": share_right(net, held, truth)})
                lap.resume()


def share_right(net: Answerer, graphs: Graphs, answer: Tensor) -> float:
    """Return the share of the questions answered right."""
    right = 0
    with torch.no_grad():
        for first in range(0, len(graphs), _AT_ONCE):
            rows = np.arange(first, min(first + _AT_ONCE, len(graphs)))
            right += int(net(graphs.block(rows), answer[torch.from_numpy(rows)], "sparse")[1].sum())
    return right / len(graphs)


def _columns(questions: Sequence[Instance]) -> tuple[Graphs, Tensor]:
    """Questions in columns, and their answers int64 ``(G, answers)``."""
    starts = [cast(Tensor, each.inputs["start"]) for each in questions]

    def joined(name: str) -> Any:
        return np.concatenate([np.asarray(each.edge[name], np.int64) for each in questions])

    def offsets(sizes: Sequence[int]) -> Any:
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    graphs = Graphs(
        start=torch.cat(starts),
        offsets=offsets([len(start) for start in starts]),
        edge_offsets=offsets([len(np.asarray(each.edge["source"])) for each in questions]),
        source=joined("source"),
        target=joined("target"),
        type=joined("type"),
    )
    answers = [np.atleast_1d(np.asarray(each.value["answer"], np.int64)) for each in questions]
    return graphs, torch.from_numpy(np.stack(answers))


def _baseline(name: str, what: str, method: Method, *, slow: bool = False) -> Baseline:
    return Baseline(name=name, what=what, batch=10, train=partial(train, method=method), slow=slow)


BASELINES: Final = (
    _baseline("block", "block-diagonal minibatches", "dense"),
    _baseline("sparse", "block, messages along the facts only", "sparse", slow=True),
)
