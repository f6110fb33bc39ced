"""Questions on graphs with a gated graph network in plain PyTorch.

    marks ─► gated graph network over the facts ─┬─► score of each vertex, softmax in a graph
                                                 ├─► gated sum ─► no or yes
                                                 └─► gated sum ─► a move; marks again, second move

    block     a minibatch of graphs as one block-diagonal graph; messages of all types from every
              vertex, one matrix product
    sparse    the same; messages along the facts only
    pyg       block, messages passed by PyTorch Geometric
    pyg-batch the same, minibatches collated by PyTorch Geometric as well
    single    one graph after another, added up to an update; an adjacency matrix for each graph

Adam, the gradient clipped at norm 1; rates and update size for task 15 are those of
``benchmarks/tuning``. The questions are cut into two parts by the recipe, whose sizes apply. The
network is that of Li et al. 2016, arXiv:1511.05493.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.data.babi import TASKS, BabiTask
from geartrain.frames.instance import Instance
from geartrain.recipes.babi import BABI, SIZES
from geartrain.recipes.recipe import Setting
from geartrain_baselines.baseline import Baseline, Epoch, Terms, rate_at, segments
from geartrain_baselines.graphs import (
    DENSE,
    PYG,
    SINGLE,
    SPARSE,
    Build,
    Form,
    GatedReadout,
    GraphBatch,
    Graphs,
)
from geartrain_baselines.pyg_forms import pyg_form

RATES: Final = {1: 0.01, 4: 0.04, 10: 0.04, 20: 0.08, 50: 0.08}  # Adam's for task 15, by batch
RATE: Final = 5e-3  # for the other tasks, which do not bear as much
CLIP_NORM: Final = 1.0
_AT_ONCE: Final = 200  # graphs of a block in validation


@final
class Answerer(nn.Module):
    """Marks in, an answer out, of the kind that the task wants.

    Args:
        kind: The task.
        hidden: Width of a vertex's state.
        steps: Of message passing.
        build: Makes the network that passes messages.
    """

    def __init__(self, kind: BabiTask, hidden: int, steps: int, build: Build) -> None:
        super().__init__()
        self.kind = kind
        self.net = build(hidden, types_of(kind), steps)
        if kind.answer == "vertex":
            self.score = nn.Linear(hidden, 1, bias=False)
        else:
            self.sum = GatedReadout(hidden, out=len(kind.classes))
        if kind.answer == "classes":
            self.marks = nn.Linear(hidden, hidden)

    def forward(self, block: GraphBatch, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``(g,)`` and whether the answers are right, bool ``(g,)``.

        Args:
            block: The graphs.
            answer: int64 ``(g, answers)``: a vertex of the graph, a class, or a class each move.
        """
        h = self.net(block)
        if self.kind.answer == "vertex":
            return choose(self.score(h)[:, 0], block, answer[:, 0])
        scores = [self.sum(h, block)]
        if self.kind.answer == "classes":
            again = replace(block, start=self.marks(h).tanh())
            scores.append(self.sum(self.net(again), block))
        found = torch.stack(scores, 1)  # (g, answers, classes)
        losses = F.cross_entropy(found.flatten(0, 1), answer.flatten(), reduction="none")
        return losses.view_as(answer).sum(1), (found.argmax(2) == answer).all(1)


def types_of(kind: BabiTask) -> int:
    """Number of edge types: each relation and its reverse."""
    return 2 * len(kind.relations)


def choose(scores: Tensor, block: GraphBatch, answer: Tensor) -> tuple[Tensor, Tensor]:
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


def train(terms: Terms, form: Form, rate: float | None = None) -> Iterator[Epoch]:
    """Train a fresh network, and yield after every evaluation; the metric is ``accuracy``.

    Args:
        terms: With the options of the recipe.
        form: How the network is run.
        rate: Adam's; None takes the tuned one, or the recipe's where none was tuned.

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
    columns, answer = _columns(task.load("train"))
    held, truth = _columns(task.load("valid"))
    torch.manual_seed(terms.seed)
    steps = int(terms.options["steps"]) or SIZES[number].steps
    net = Answerer(TASKS[number], columns.start.shape[1], steps, form.build)
    parameters = list(net.parameters())
    tuned = rate_at(terms.batch, RATES) if number == 15 else RATE
    optimizer = torch.optim.Adam(parameters, lr=tuned if rate is None else rate, fused=True)
    begin = time.perf_counter()
    graphs = form.collating(columns, types_of(TASKS[number]))
    seconds = time.perf_counter() - begin
    order = segments(
        len(graphs),
        terms.batch,
        seed=terms.seed,
        epochs=terms.epochs,
        evaluate_every=terms.evaluate_every,
    )
    for segment in order:
        begin, loss_sum = time.perf_counter(), 0.0
        for rows in segment.batches:
            optimizer.zero_grad()
            for part in form.parts(rows):
                losses, _ = net(graphs.block(part), answer[torch.from_numpy(part)])
                total = losses.sum()
                (total / len(rows)).backward()
                loss_sum += total.item()
            nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
        seconds += time.perf_counter() - begin
        yield Epoch(
            epoch=segment.epoch,
            seconds=seconds,
            instances=len(segment),
            loss=loss_sum / len(segment),
            updates=len(segment.batches),
            valid={"accuracy": share_right(net, held, truth)},
        )


def share_right(net: Answerer, graphs: Graphs, answer: Tensor) -> float:
    """Return the share of the questions answered right."""
    right = 0
    with torch.no_grad():
        for first in range(0, len(graphs), _AT_ONCE):
            rows = np.arange(first, min(first + _AT_ONCE, len(graphs)))
            right += int(net(graphs.block(rows), answer[torch.from_numpy(rows)])[1].sum())
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


def _baseline(
    name: str, what: str, batch: int = 20, *, slow: bool = False, needs: str | None = None
) -> Baseline:
    run = partial(train, form=FORMS[name])
    return Baseline(name=name, what=what, batch=batch, train=run, slow=slow, needs=needs)


FORMS: Final[Mapping[str, Form]] = {
    "block": DENSE,
    "sparse": SPARSE,
    "pyg": pyg_form("dense"),
    "pyg-batch": pyg_form("dense", batches=True),
    "single": SINGLE,
}

BASELINES: Final = (
    _baseline("block", "block-diagonal minibatches"),
    _baseline("sparse", "block, messages along the facts only", slow=True),
    _baseline("pyg", "block, messages passed by PyTorch Geometric", needs=PYG),
    _baseline("pyg-batch", "pyg, collated by its Batch", slow=True, needs=PYG),
    _baseline("single", "one graph after another", BABI.update_size({}), slow=True),
)
