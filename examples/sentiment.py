"""Sentiment of every phrase of a sentence: a binary Tree-LSTM that follows each tree.

    words ─► leaf ─► ((nodes)) ─► readout ─► loss at every vertex
                        ▲  └──► has a parent? ─► group the two children ─► branch ─┐
                        └──────────────────────────────────────────────────────────┘

    python examples/sentiment.py                   a few hundred generated trees, seconds
    python examples/sentiment.py --data DIR        the Stanford Sentiment Treebank in DIR/sst

Every tree has its own shape, and nobody pads or sorts anything: rows of different trees and depths
meet in the queue of ``branch`` and run as one matrix product.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch

import geartrain as gt
from geartrain.data.sst import SentimentTree, load_sst
from geartrain.nn import TreeLSTMBranch, TreeLSTMLeaf


def build(vocabulary: int, hidden: int) -> gt.Graph:
    """The model: three parts and the streams between them."""
    leaf = TreeLSTMLeaf(hidden, hidden, vocabulary=vocabulary)
    branch = TreeLSTMBranch(hidden)
    readout = torch.nn.Linear(hidden, 5)

    graph = gt.Graph(vertex=("parent", "slot", "label"))  # integers that every tree brings
    nodes = graph.loop(name="nodes")  # (h, c) of a vertex, as soon as it is known
    nodes.join(graph.input("word").through(leaf, name="leaf"))
    nodes.through(readout, name="readout", take=0).loss(
        gt.cross_entropy,
        target="label",
        metrics={
            "all": gt.accuracy,
            "root": gt.Metric(gt.accuracy, where=lambda m: m.parent < 0),
        },
    )
    inner, root = nodes.where(lambda m: m.parent >= 0)
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
    nodes.join(pairs.through(branch, name="branch"))
    root.stop()
    return graph


def to_instance(tree: SentimentTree) -> gt.Instance:
    """Words enter at the leaves; the frame says where each vertex goes next."""
    return gt.Instance(
        inputs={"word": (torch.from_numpy(tree.word), tree.leaf)},
        vertex={"parent": tree.parent, "slot": tree.slot, "label": tree.label},
    )


def generate_tree(random: np.random.Generator, vocabulary: int) -> SentimentTree:
    """A random tree; its labels are clipped sums of its words: word w is worth w % 5 - 2."""
    leaves = int(random.integers(2, 12))
    word = random.integers(0, vocabulary, leaves)
    size = 2 * leaves - 1
    parent, slot, value = np.full(size, -1), np.zeros(size, int), np.zeros(size, int)
    value[:leaves] = word % 5 - 2
    free = list(range(leaves))
    for vertex in range(leaves, size):
        k = int(random.integers(len(free) - 1))
        for side, child in enumerate((free[k], free.pop(k + 1))):
            parent[child], slot[child] = vertex, side
            value[vertex] += value[child]
        free[k] = vertex
    return SentimentTree(word, np.arange(leaves), parent, slot, np.clip(value, -2, 2) + 2)


def main(argv: list[str] | None = None) -> gt.Fit:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--data", type=Path, help="folder that holds sst/train.txt, sst/dev.txt")
    arguments.add_argument(
        "--trees", type=int, default=500, help="generated trees (without --data)"
    )
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--workers", type=int, default=1)
    options = arguments.parse_args(argv)

    torch.manual_seed(0)
    if options.data is not None:
        sst = load_sst(options.data)
        train, valid, vocabulary = sst.train, sst.dev, len(sst.vocabulary)
    else:
        random, vocabulary = np.random.default_rng(0), 50
        trees = [generate_tree(random, vocabulary) for _ in range(options.trees)]
        cut = len(trees) * 4 // 5
        train, valid = trees[:cut], trees[cut:]

    session = gt.Session(
        build(vocabulary, options.hidden),
        rules=gt.Rules(optimizer=partial(torch.optim.Adagrad, lr=0.05), update_every=500),
        runtime=gt.Threads(options.workers, kernel_threads=1),
        reading=gt.Reading(convert=to_instance),
    )
    fit = session.fit(train, epochs=options.epochs, valid=valid)
    for epoch in fit.history:
        print(
            f"epoch {epoch.epoch}: loss {epoch.loss:.3f}, "
            f"accuracy {epoch.valid['all']:.3f} at all vertices, {epoch.valid['root']:.3f} at the "
            f"roots, {epoch.instances / epoch.seconds:.0f} trees/s"
        )
    return fit


if __name__ == "__main__":
    main()
