"""Kinds of messages, with what each instance brings to each part: for tests of updates.

Kind   graph, instances, and for each part the payload rows of every message of every instance
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.instrument import Updated
from geartrain.nn import TreeLSTMBranch, TreeLSTMLeaf, WholeTree
from tests.rigs.models import Reader, bundles, lists, trees


@dataclass(frozen=True)
class Kind:
    """What travels.

    Args:
        graph: Freshly made.
        data: In the order in which they are admitted.
        brings: Part to, for each instance, the payload rows of its messages.
    """

    graph: gt.Graph
    data: Sequence[gt.Instance]
    brings: Mapping[str, Sequence[Sequence[int]]]


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def _two_maps(sizes: Sequence[int], **given: bool) -> tuple[gt.Graph, list[gt.Instance]]:
    torch.manual_seed(0)
    graph, generator = gt.Graph(), torch.Generator().manual_seed(1)
    lower, upper = nn.Linear(2, 3).double(), nn.Linear(3, 2).double()
    x = graph.input("x", **given).through(lower, name="lower").through(torch.tanh, name="curve")
    x.through(upper, name="upper").loss(squares)
    data = [
        gt.Instance({"x": torch.randn(n, 2, generator=generator, dtype=torch.float64)})
        for n in sizes
    ]
    return graph, data


def one_row(n: int) -> Kind:
    graph, data = _two_maps([1] * n)
    return Kind(graph, data, {"lower": [[1]] * n, "upper": [[1]] * n})


def several_rows(n: int) -> Kind:
    sizes = [1 + i * i % 5 for i in range(n)]
    graph, data = _two_maps(sizes)
    rows = [[1] * s for s in sizes]
    return Kind(graph, data, {"lower": rows, "upper": rows})


def equal_bundles(n: int) -> Kind:
    graph, data = _two_maps([4] * n, bundle=True)
    return Kind(graph, data, {"lower": [[4]] * n, "upper": [[4]] * n})


def uneven_bundles(n: int) -> Kind:
    sizes = [1 + i * i % 5 for i in range(n)]
    graph, data = _two_maps(sizes, bundle=True)
    rows = [[s] for s in sizes]
    return Kind(graph, data, {"lower": rows, "upper": rows})


def loops(n: int) -> Kind:
    model = lists(n)
    steps = [[1] * len(i.vertex["token"]) for i in model.data]
    return Kind(model.graph, model.data, {"reader": steps, "readout": [[1]] * n})


def vertices(n: int) -> Kind:
    model = trees(n)
    leaves = [len(i.inputs["word"]) for i in model.data]
    return Kind(
        model.graph,
        model.data,
        {
            "leaf": [[1] * k for k in leaves],
            "branch": [[1] * (k - 1) for k in leaves],
            "readout": [[1] * (2 * k - 1) for k in leaves],
        },
    )


def whole_loops(n: int) -> Kind:
    model = lists(n, run="whole")
    steps = [[len(i.vertex["token"])] for i in model.data]
    return Kind(model.graph, model.data, {"reader": steps, "readout": [[1]] * n})


def whole_loops_over_vertices(n: int) -> Kind:
    """Some trees are one leaf: the part of the loop has no row of them."""
    model = trees(n, run="whole")
    leaves = [len(i.inputs["word"]) for i in model.data]
    return Kind(
        model.graph,
        model.data,
        {
            "leaf": [[1] * k for k in leaves],
            "branch": [[k - 1] * (k > 1) for k in leaves],
            "readout": [[1] * (2 * k - 1) for k in leaves],
        },
    )


def message_passing(n: int) -> Kind:
    model = bundles(n, steps=3)
    sizes = [i.inputs["h"].shape[0] for i in model.data]
    return Kind(
        model.graph,
        model.data,
        {"step": [[s] * 3 for s in sizes], "readout": [[s] for s in sizes]},
    )


def whole_trees(n: int) -> Kind:
    torch.manual_seed(0)
    leaf, branch = TreeLSTMLeaf(4, 4, vocabulary=11).double(), TreeLSTMBranch(4).double()
    graph = gt.Graph(vertex=("parent", "slot", "label"))
    words = graph.input("word", shape=(), dtype=torch.int64, bundle=True)
    tree = WholeTree(leaf, branch)
    h = words.through(tree, name="tree", read=("parent", "slot"), inside=True)
    h.through(nn.Linear(4, 5).double(), name="readout").loss(gt.cross_entropy, "label")
    data, sizes = [], []
    for given in trees(n).data:
        size = len(given.vertex["parent"])
        words_of = torch.full((size,), -1)
        words_of[: len(given.inputs["word"])] = given.inputs["word"]
        data.append(gt.Instance({"word": words_of}, given.vertex))
        sizes.append([size])
    return Kind(graph, data, {"tree": sizes, "readout": sizes})


def minibatches(n: int) -> Kind:
    """Alone from end to end, with autograd's own graph kept."""
    torch.manual_seed(0)
    graph, generator = gt.Graph(), torch.Generator().manual_seed(1)
    x = graph.input("x", bundle=True, alone=True)
    for k in range(3):
        x = x.through(nn.Linear(2, 2).double(), name=f"stage {k}", keep="graph")
    x.loss(squares, alone=True)
    data = [
        gt.Instance({"x": torch.randn(4, 2, generator=generator, dtype=torch.float64)})
        for _ in range(n)
    ]
    return Kind(graph, data, {f"stage {k}": [[4]] * n for k in range(3)})


def early_exits(n: int) -> Kind:
    """Every third instance leaves before the second part, and the others go round once or twice."""
    torch.manual_seed(0)
    graph, generator = gt.Graph(value=("rounds",)), torch.Generator().manual_seed(1)
    first, deep = nn.Linear(2, 2).double(), Reader(3).double()
    readout = nn.Linear(4, 2).double()
    x = graph.input("x", step=0).through(first, name="first")
    more, done = x.where(lambda m: m.rounds > 0)
    done.loss(squares, name="near")
    loop = graph.loop(run="steps")
    loop.join(more.through(lambda x: torch.cat([x, x], 1), name="widen"))
    turned = loop.through(deep, name="deep", read="rounds").move(step=lambda m: m.step + 1)
    again, out = turned.where(lambda m: m.step < m.rounds)
    loop.join(again)
    out.through(readout, name="readout").loss(squares, name="far")
    rounds = [i % 3 for i in range(n)]
    data = [
        gt.Instance(
            {"x": torch.randn(1, 2, generator=generator, dtype=torch.float64)},
            value={"rounds": r},
        )
        for r in rounds
    ]
    return Kind(
        graph,
        data,
        {
            "first": [[1]] * n,
            "deep": [[1] * r for r in rounds],
            "readout": [[1] * (r > 0) for r in rounds],
        },
    )


KINDS: Mapping[str, Callable[[int], Kind]] = {
    "one row": one_row,
    "several rows": several_rows,
    "equal bundles": equal_bundles,
    "uneven bundles": uneven_bundles,
    "loops": loops,
    "vertices": vertices,
    "message passing": message_passing,
    "whole trees": whole_trees,
    "minibatches": minibatches,
    "early exits": early_exits,
}


WHOLE_LOOPS: Mapping[str, Callable[[int], Kind]] = {
    "loops": whole_loops,
    "vertices": whole_loops_over_vertices,
}
"""Loops that run whole: instances are their messages."""


class Steps(gt.AbstractInstrument):
    """Rows of each update, by part."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def on_updated(self, event: Updated) -> None:
        self.rows.setdefault(event.part, []).append(event.rows)

    def of(self, part: str) -> list[int]:
        return self.rows.get(part, [])


def cut(numbers: Sequence[int], n: int) -> list[int]:
    """Sums of each n of them, and of the rest; without those that are zero."""
    found = [int(np.sum(numbers[i : i + n])) for i in range(0, len(numbers), n)]
    return [f for f in found if f]
