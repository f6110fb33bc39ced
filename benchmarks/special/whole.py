"""What is computed whole by C of its own, against the same network as a loop of one's own.

    PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.special.whole [TASK] ... [--data DIR]
        [--evaluate | --bf16 | --workers N] [--kernel-threads N]

    special   WholeTree, WholeList, GatedGraphCell(steps=): all steps in one call of C
    loop      the same cells, with the row kernels that are written, in a loop that runs whole
    own       cells of one's own, of plain torch, in that loop: derived kernels

Sizes, data, optimiser and updates are the recipe's, one worker, one kernel thread; several workers
share all weights. All take turns in one process, a pass over the same instances each; a line has
processor time an instance, the median of the passes, and the median of the ratios of neighbours
with the least and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.data.babi import TASKS
from geartrain.data.listreduce import CLASSES, SYMBOLS, generate
from geartrain.data.qm9 import BONDS, ELEMENTS
from geartrain.nn import (
    GatedGraphCell,
    GatedSum,
    MessagePassing,
    Recurrent,
    TokenRNN,
    Tree,
    TreeLSTMBranch,
    TreeLSTMLeaf,
    VertexChoice,
    choice_accuracy,
    choice_loss,
)
from geartrain.recipes import babi, find_recipe, listreduce, qm9
from geartrain.recipes.recipe import Recipe, Setting, Task

TURNS: Final = 7


class Leaf(nn.Module):
    """Of a Tree-LSTM, in plain torch."""

    def __init__(self, hidden: int, words: int) -> None:
        super().__init__()
        self.embedding, self.gates = nn.Embedding(words, hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.gates(self.embedding(word)).chunk(3, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class Branch(nn.Module):
    """Of a Tree-LSTM, in plain torch."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o, u = self.gates(h.flatten(1)).chunk(5, 1)
        state = torch.sigmoid(i) * torch.tanh(u)
        state = state + torch.sigmoid(f) * c[:, 0] + torch.sigmoid(g) * c[:, 1]
        return torch.sigmoid(o) * torch.tanh(state), state


class Step(nn.Module):
    """Of a list, in plain torch."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.embedding, self.of_token = nn.Embedding(tokens, hidden), nn.Linear(hidden, hidden)
        self.of_state = nn.Linear(hidden, hidden, bias=False)

    def forward(self, h: Tensor, token: Tensor) -> Tensor:
        return torch.tanh(self.of_token(self.embedding(token)) + self.of_state(h))


class Passing(nn.Module):
    """A step of message passing, in plain torch."""

    def __init__(self, hidden: int, types: int) -> None:
        super().__init__()
        self.hidden, self.types = hidden, types
        self.message = nn.Linear(hidden, types * hidden)
        self.of_heard, self.of_state = (nn.Linear(hidden, 3 * hidden) for _ in range(2))

    def forward(self, h: Tensor, inside: gt.Inside) -> Tensor:
        at = inside.edges["source"] * self.types + inside.edges["type"]
        sent = self.message(h).view(-1, self.hidden).index_select(0, at)
        heard = torch.zeros_like(h).index_add(0, inside.edges["target"], sent)
        (a, b, c), (d, e, f) = self.of_heard(heard).chunk(3, 1), self.of_state(h).chunk(3, 1)
        reset, keep = torch.sigmoid(a + d), torch.sigmoid(b + e)
        return (1 - keep) * torch.tanh(c + reset * f) + keep * h


def tree(leaf: nn.Module, branch: nn.Module, hidden: int) -> gt.Graph:
    """The Tree-LSTM as a loop."""
    graph = gt.Graph(vertex=("parent", "slot", "label"))
    nodes = Tree(branch, name="branch")(graph.input("word").through(leaf, name="leaf"))
    scores = nodes.through(nn.Linear(hidden, 5), name="readout", take=0)
    at_root = gt.Metric(gt.accuracy, where=lambda m: m.parent < 0)
    scores.loss(gt.cross_entropy, "label", metrics={"all": gt.accuracy, "root": at_root})
    return graph


def along(cell: nn.Module, hidden: int) -> gt.Graph:
    """List reduction as a loop."""
    graph = gt.Graph(vertex=("token",), value=("label",))
    ended = Recurrent(cell, read="token", name="cell")(graph.input("start"))
    scores = ended.through(nn.Linear(hidden, CLASSES), name="readout")
    scores.loss(gt.cross_entropy, "label", metrics={"accuracy": gt.accuracy})
    return graph


def molecules(cell: nn.Module, hidden: int, steps: int) -> gt.Graph:
    """The dipole moments, as a loop."""
    graph = gt.Graph(vertex=("element",), edge=("type",), value=("mu",))
    elements = graph.input("elements", shape=(), dtype=torch.int64, bundle=True)
    atoms = elements.through(partial(qm9.one_hot, hidden=hidden), name="one-hot")
    last = MessagePassing(cell, steps=steps, name="cell")(atoms)
    readout = GatedSum(hidden, len(ELEMENTS))
    moment = last.through(readout, name="readout", read="element", inside=True, pool=True)
    units = qm9.Units()
    metrics = {"mae": units.error, "error_ratio": units.error_ratio}
    moment.loss(qm9.HalfSquaredError(units), "mu", metrics=metrics)
    return graph


def questions(cell: nn.Module, hidden: int, steps: int) -> gt.Graph:
    """Task 15 of bAbI, as a loop."""
    graph = gt.Graph(edge=("type",), value=("answer",))
    start = graph.input("start", bundle=True)
    states = MessagePassing(cell, steps=steps, name="cell")(start)
    choice = VertexChoice(hidden)
    chosen = states.through(choice, name="readout", read="answer", inside=True, pool=True)
    chosen.loss(choice_loss, "answer", metrics={"accuracy": choice_accuracy})
    return graph


def trees_of(whole: Sequence[gt.Instance]) -> list[gt.Instance]:
    """The same trees with a word at the leaves alone."""
    found = []
    for each in whole:
        words = each.inputs["word"]
        leaves = np.flatnonzero(words.numpy() >= 0)
        found.append(gt.Instance({"word": (words[leaves], leaves)}, vertex=each.vertex))
    return found


Way = tuple[str, gt.Graph, Sequence[gt.Instance]]


def ways(recipe: Recipe, task: Task, limit: int) -> Iterator[Way]:
    """The recipe's own graph, and the loops, with what each trains on."""
    whole, hidden = task.load("train")[:limit], int(recipe.options[0].default)
    yield "special", task.graph, whole
    if recipe.name == "sentiment":
        trees = trees_of(whole)
        words = 1 + max(int(each.inputs["word"][0].max()) for each in trees)
        leaf = TreeLSTMLeaf(hidden, hidden, vocabulary=words)
        yield "loop", tree(leaf, TreeLSTMBranch(hidden), hidden), trees
        yield "own", tree(Leaf(hidden, words), Branch(hidden), hidden), trees
    elif recipe.name == "listreduce":
        lists = listreduce.instances_of(generate(limit, 0, "train"), hidden)
        yield "loop", along(TokenRNN(SYMBOLS, hidden, embedding_dim=hidden), hidden), lists
        yield "own", along(Step(SYMBOLS, hidden), hidden), lists
    elif recipe.name == "qm9":
        yield "loop", molecules(GatedGraphCell(hidden, len(BONDS)), hidden, 4), whole
        yield "own", molecules(Passing(hidden, len(BONDS)), hidden, 4), whole
    else:
        types, size = 2 * len(TASKS[15].relations), babi.SIZES[15]
        for way, cell in (("loop", GatedGraphCell), ("own", Passing)):
            yield way, questions(cell(size.hidden, types), size.hidden, size.steps), whole


UPDATES: Final = {"sentiment": 25, "listreduce": 100, "qm9": 20, "babi": 8}
"""Instances an update."""
SIZES: Final = {"sentiment": 1000, "listreduce": 10_000, "qm9": 2000, "babi": 800}
"""Instances a pass."""


@dataclass(frozen=True)
class How:
    """In which way.

    Args:
        data: Where real data are.
        evaluate: Measure evaluations, and not training.
        bf16: Compute in bfloat16.
        workers, kernel_threads: How many.
    """

    data: Path | None
    evaluate: bool
    bf16: bool
    workers: int
    kernel_threads: int

    def session(self, graph: gt.Graph, rules: gt.Rules, max_active: int) -> gt.Session:
        """Of one graph."""
        return gt.Session(
            graph,
            rules=rules,
            runtime=gt.Threads(self.workers, kernel_threads=self.kernel_threads),
            sharing=gt.SharedWeights() if self.workers > 1 else None,
            compute=gt.Compute(precision="bf16" if self.bf16 else "full"),
            max_active=max_active,
        )


def measure(name: str, how: How) -> None:
    """All ways of a task, by turns."""
    recipe, limit = find_recipe(name), SIZES[name]
    setting = Setting(
        seed=0,
        epochs=1,
        update_every=UPDATES[name],
        data=how.data,
        options={option.name: option.default for option in recipe.options},
    )
    task = recipe.build(setting)
    rules = replace(task.rules, update_every=gt.Instances(UPDATES[name]), average="instances")
    found = []
    for way, graph, instances in ways(recipe, task, limit):
        found.append((way, how.session(graph, rules, recipe.max_active), instances))
    took: dict[str, list[float]] = {way: [] for way, _, _ in found}
    for turn in range(-2, TURNS):
        for way, session, instances in found:
            began = time.process_time()
            if turn < -1 or not how.evaluate:
                session.fit(instances, epochs=turn + 3)
            else:
                session.evaluate(instances)
            if turn >= 0:
                took[way].append((time.process_time() - began) / len(instances))
    base = took["special"]
    for way, each in took.items():
        ratios = sorted(b / a for a, b in zip(base, each, strict=True))
        print(
            f"{name:12s}{way:9s}{1e6 * statistics.median(each):9.1f} us an instance, "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) times special",
            flush=True,
        )


def main() -> None:
    """Measure what is named, or all."""
    parser = argparse.ArgumentParser(description="what is computed whole, against loops")
    parser.add_argument("tasks", nargs="*", help=", ".join(SIZES))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kernel-threads", type=int, default=1)
    given = parser.parse_args()
    how = How(given.data, given.evaluate, given.bf16, given.workers, given.kernel_threads)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in given.tasks or SIZES:
        measure(name, how)


if __name__ == "__main__":
    main()
