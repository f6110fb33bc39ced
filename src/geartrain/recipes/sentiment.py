"""Sentiment trees: a binary Tree-LSTM over the Stanford Sentiment Treebank, every vertex labelled.

By default a whole tree is one message and its Tree-LSTM one firing (``nn.WholeTree``):

    word ─► tree ─► readout ─► cross entropy; accuracy over all and over roots

With ``whole=0`` vertices travel alone, and leaf, branch and readout are parts of their own:

    word ─► leaf ─► nodes ─┬─► readout ─► cross entropy; accuracy over all and over roots
                      ▲    └─► has a parent? ─ yes ─► group the two at their parent ─► branch ─┐
                      │                  └─ no ─► stop                                         │
                      └────────────────────────────────────────────────────────────────────────┘

Every number of the recipe stands at the top.

Source: the network is that of Tai et al. 2015, arXiv:1503.00075, trained asynchronously as in Gaunt
et al. 2017, arXiv:1705.09786; the trees are those of Socher et al. 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import nn

from geartrain.data.sst import CLASSES, SentimentTree, Split, Vocabulary, load_sst
from geartrain.engine.controller import Ramp
from geartrain.frames.columns import Columns
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nn import Tree, TreeLSTMBranch, TreeLSTMLeaf, WholeTree
from geartrain.nodes.loss import Metric, accuracy, cross_entropy
from geartrain.parts.optimizers import FusedAdagrad
from geartrain.parts.rules import Rules
from geartrain.recipes.recipe import (
    AVERAGE_EVERY,
    LoadSplit,
    Option,
    Recipe,
    Setting,
    Task,
)
from geartrain.sharing.shared_weights import SharedWeights

RATE: Final = 0.05  # Adagrad's
WORD_SPREAD: Final = 0.03  # standard deviation of the initial word vectors
RAMP: Final = Ramp(start=16, over=500)
NO_WORD: Final = -1  # at inner vertices
_VOCABULARY: Final = "vocabulary.json"


def build(setting: Setting) -> Task:
    """The task; reads the training trees, whose words are the vocabulary; see ``Recipe.build``."""
    # Embeddings give sparse gradients; torch warns unless it is told whether to check them.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    most, whole = int(setting.options["trees"]) or None, bool(setting.options["whole"])
    read: dict[Split, Sequence[SentimentTree]] = {}
    if _VOCABULARY in setting.files:
        vocabulary = Vocabulary.from_json(setting.files[_VOCABULARY])
    else:
        found = load_sst(setting.data, ("train",))
        vocabulary, read["train"] = found.vocabulary, found.train

    def split(name: Split) -> LoadSplit:
        def load() -> Sequence[Instance]:
            if name not in read:
                sst = load_sst(setting.data, (name,), vocabulary=vocabulary)
                read[name] = getattr(sst, name)
            trees = read[name][:most] if name == "train" else read[name]
            if whole:
                return columns_of(trees, f"{name} tree")
            return [instance_of(tree, f"{name} tree {i}") for i, tree in enumerate(trees, 1)]

        return load

    rate = float(setting.options["learning_rate"])
    shared = SharedWeights() if whole else None
    return Task(
        graph=make_graph(int(setting.options["hidden"]), len(vocabulary), whole=whole),
        rules=Rules(optimizer=partial(FusedAdagrad, lr=rate), update_every=setting.update_every),
        splits={"train": split("train"), "dev": split("dev"), "test": split("test")},
        validation="dev",
        ramp=RAMP,
        files={_VOCABULARY: vocabulary.to_json()},
        sharing=setting.copies_of("tree" if whole else "branch") or shared,
    )


def make_graph(hidden: int, words: int, *, whole: bool = True) -> Graph:
    """Whole trees, or the loop from leaves to roots.

    Args:
        hidden: Width of h, c and the word vectors.
        words: In the vocabulary.
        whole: Whether trees are computed whole.
    """
    leaf = TreeLSTMLeaf(hidden, hidden, vocabulary=words)
    assert leaf.embedding is not None
    nn.init.normal_(leaf.embedding.weight, std=WORD_SPREAD)
    readout, branch = nn.Linear(hidden, CLASSES), TreeLSTMBranch(hidden)
    graph = Graph(vertex=("parent", "slot", "label"))
    if whole:
        tree = WholeTree(leaf, branch)
        vertices = graph.input("word", shape=(), dtype=torch.int64, bundle=True)
        h = vertices.through(tree, name="tree", read=("parent", "slot"), inside=True)
        scores = h.through(readout, name="readout")
    else:
        leaves = graph.input("word").through(leaf, name="leaf")
        nodes = Tree(branch, name="branch", run="steps")(leaves)
        scores = nodes.through(readout, name="readout", take=0)  # h, not c
    at_root = Metric(accuracy, where=lambda m: m.parent < 0)
    scores.loss(cross_entropy, "label", metrics={"all": accuracy, "root": at_root})
    return graph


def columns_of(trees: Sequence[SentimentTree], called: str) -> Columns:
    """Trees as instances that are computed whole: a word id or ``NO_WORD`` at every vertex.

    Args:
        trees: One or more.
        called: What errors call them, before a number from 1.
    """
    lengths = np.array([tree.vertices for tree in trees])
    starts = lengths.cumsum() - lengths
    words = np.full(int(lengths.sum()), NO_WORD)
    at = np.concatenate([tree.leaf for tree in trees])
    words[at + starts.repeat([len(tree.leaf) for tree in trees])] = np.concatenate(
        [tree.word for tree in trees]
    )
    columns = ("parent", "slot", "label")
    return Columns(
        lengths,
        {"word": torch.from_numpy(words)},
        vertex={name: np.concatenate([getattr(tree, name) for tree in trees]) for name in columns},
        called=lambda i: f"{called} {i + 1}",
    )


def instance_of(tree: SentimentTree, key: str) -> Instance:
    """A tree as an instance that goes vertex by vertex: word ids enter at the leaves."""
    return Instance(
        inputs={"word": (torch.from_numpy(tree.word), tree.leaf)},
        vertex={"parent": tree.parent, "slot": tree.slot, "label": tree.label},
        key=key,
    )


SENTIMENT: Final = Recipe(
    name="sentiment",
    summary="label every phrase of a sentence from very negative to very positive",
    paper="Socher et al. 2013; Tai et al. 2015, arXiv:1503.00075",
    metrics=("all", "root"),
    target="all>=0.81",
    max_active=96,
    # Whole trees are trained at a rate and with an update that suit them; vertex by vertex, rows of
    # many ages meet in an update, and smaller ones reach the target.
    update_every=lambda options: 750 if options["whole"] else 300,
    unit="rows",
    epochs=3,
    make=build,
    draw=lambda: make_graph(hidden=128, words=1),
    needs=("sst/train.txt", "sst/dev.txt"),
    options=(
        Option("hidden", 128, 1, "width of the state and of the word vectors"),
        Option("whole", 1, 0, "1: every tree in one firing; 0: vertex by vertex, as in AMPNet"),
        Option("trees", 0, 0, "train on the first so many trees; 0 takes all"),
        Option("learning_rate", RATE, 0.0, "Adagrad's rate"),
        Option(AVERAGE_EVERY, 1000, 0, "instances between meetings of copies; 0: once an epoch"),
    ),
    bottleneck="tree",
    why="two workers as threads that share all weights: 1.6 to 1.7 times one, as processes too",
)
