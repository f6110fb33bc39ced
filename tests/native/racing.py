"""Run by ``test_racing``: workers as threads on kernels that watch for races.

    trees, lists, molecules, vertex by vertex and whole; loops whose calls C makes; bundles by
    programs; tables that meet weights ─► four threads ─► one another's memory?

A program of its own, as kernels that watch themselves want the sanitizer loaded first. Arguments:
the files of kernels, as of a path of the system, and ``train``, or ``race`` for a race on purpose.
Kernels let go of the interpreter's lock however small their work, as if there were none.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import geartrain as gt
from geartrain.derived.ragged import choice
from geartrain.native import calls, library
from geartrain.native.ragged import RaggedSteps
from geartrain.native.rows import add
from geartrain.native.sums import SumsById
from geartrain.nn import (
    GatedGraphCell,
    Tree,
    TreeLSTMBranch,
    TreeLSTMLeaf,
    WholeTree,
)
from geartrain.nodes.loss import cross_entropy
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting
from tests.rigs import called, models
from tests.rigs import ragged_modules as ragged

HIDDEN, WORDS, CLASSES = 16, 11, 5
WORKERS = 4
MADE: Counter[str] = Counter()


def main(files: str, what: str) -> None:
    """Train, or race."""
    ctypes.PyDLL = ctypes.CDLL  # type: ignore[misc]
    kernels = library.Library([*map(Path, files.split(os.pathsep))])
    library._settled, library._library = True, kernels
    library.load = lambda *_, **__: kernels
    {"train": train, "race": race}[what]()


def counted(where: Any, name: str, what: str) -> None:
    """Count how often something is called from now on."""
    before: Callable[..., Any] = getattr(where, name)

    def counting(*args: Any, **named: Any) -> Any:
        MADE[what] += 1
        return before(*args, **named)

    setattr(where, name, counting)


def train() -> None:
    """Every program, with parts spread and with weights that are shared."""
    counted(calls, "forward", "forwards")
    counted(calls, "backward", "backwards")
    counted(RaggedSteps, "run", "ragged")
    counted(SumsById, "add", "sums by id")
    choice.FIRINGS, choice.ROWS = 3, 8  # type: ignore[attr-defined,misc]
    choice._ratio = lambda *_: 0.5
    for graph, instances in programs():
        for sharing in (gt.Alone(), gt.SharedWeights()):
            session = gt.Session(
                graph,
                rules=gt.Rules(optimizer=partial(torch.optim.Adam, lr=0.01), update_every=50),
                runtime=gt.Threads(WORKERS, kernel_threads=1),
                sharing=sharing,
                max_active=24,
            )
            fit = session.fit(instances, epochs=2)
            print(f"trained, loss {fit.history[-1].loss:.4f}", flush=True)
    print("in C: " + ", ".join(f"{n} {what}" for what, n in sorted(MADE.items())), flush=True)


def programs() -> Iterator[tuple[gt.Graph, Sequence[gt.Instance]]]:
    """Graphs and what they are trained on."""
    for whole in (False, True):
        given = models.trees(60).data
        yield trees(whole), [with_inner(each) for each in given] if whole else given
    listreduce = find_recipe("listreduce")
    for whole in (0, 1):
        options = listreduce.complete({"whole": whole, "train_size": 120, "hidden": HIDDEN})
        task = listreduce.build(
            Setting(seed=0, epochs=2, update_every=50, options=options, data=None)
        )
        yield task.graph, list(task.load("train"))
    yield molecules(), models.molecules(60, 2)
    make, data = called.CASES["sums of children"]
    yield make("whole"), data() * 12
    yield called.turning(called.tagged, "whole"), called.sets() * 10
    yield bundled(), sets(60)


def trees(whole: bool) -> gt.Graph:
    """A Tree-LSTM over ``models.trees``."""
    torch.manual_seed(0)
    leaf = TreeLSTMLeaf(HIDDEN, HIDDEN, vocabulary=WORDS)
    branch, readout = TreeLSTMBranch(HIDDEN), nn.Linear(HIDDEN, CLASSES)
    graph = gt.Graph(vertex=("parent", "slot", "label"))
    if whole:
        words = graph.input("word", shape=(), dtype=torch.int64, bundle=True)
        h = words.through(WholeTree(leaf, branch), read=("parent", "slot"), inside=True)
    else:
        states = graph.input("word", shape=(), dtype=torch.int64).through(leaf, name="leaf")
        h = Tree(branch, name="branch", run="steps")(states)
    h.through(readout, name="readout", take=0).loss(cross_entropy, "label")  # h, not c
    return graph


def with_inner(tree: gt.Instance) -> gt.Instance:
    """The same with a word for every vertex: none at inner ones, which follow the leaves."""
    words = tree.inputs["word"]
    none = words.new_full((len(tree.vertex["parent"]) - len(words),), -1)
    return gt.Instance({"word": torch.cat([words, none])}, tree.vertex)


def molecules() -> gt.Graph:
    """A gated graph network over ``models.molecules``."""
    torch.manual_seed(0)
    graph = gt.Graph(edge=("type",), value=("aim",))
    h = graph.input("h", shape=(models.H,), dtype=torch.float64, bundle=True)
    h = h.through(GatedGraphCell(models.H, 2, steps=2).double(), name="cell", inside=True)
    h = h.through(nn.Linear(models.H, 1).double(), name="readout")
    h.loss(models.squared, "aim")
    return graph


def bundled() -> gt.Graph:
    """Rows hear of their bundle, and are pooled."""
    torch.manual_seed(0)
    graph = gt.Graph()
    x = graph.input("x", bundle=True)
    x = x.through(ragged.Mix().double(), name="mix", inside=True)
    pooled = x.through(ragged.Pool().double(), name="pool", inside=True, pool=True)
    pooled.loss(called.squared)
    return graph


def sets(n: int) -> list[gt.Instance]:
    """Of two to five rows."""
    torch.manual_seed(3)
    rows = [torch.randn(2 + k % 4, ragged.H, dtype=torch.float64) for k in range(n)]
    return [gt.Instance({"x": x}) for x in rows]


def race() -> None:
    """Two threads add to the same rows."""
    into, rows = torch.zeros(4, 64), torch.ones(200, 64)
    at = np.random.default_rng(0).integers(0, 4, 200)

    def work() -> None:
        for _ in range(50):
            add(into, at, rows, None)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("raced", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
