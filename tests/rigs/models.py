"""The models of the oracle: each as a graph and as plain PyTorch, with data to go with it.

lists    embedding, cell, loop over the tokens, loss at the end
trees    leaf and branch cell, group of two at the parent, loss at every vertex
edges    gated graph network, a message an edge: flatmap, route by type, group at the target
bundles  the same network, a message a graph
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.graph.region import Run
from geartrain.nodes.loss import accuracy, cross_entropy

H = 4


@dataclass
class Model:
    """A graph, what it is made of, and the same loss without it."""

    graph: Graph
    modules: Mapping[str, nn.Module]
    plain: Any
    data: list[Instance]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]

    def total(self, data: Sequence[Instance] | None = None) -> Tensor:
        return sum((self.plain(i) for i in (data or self.data)), torch.zeros(()))


class Reader(nn.Module):
    """One step of a plain recurrent network that reads a token."""

    def __init__(self, words: int, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, H, sparse=sparse)
        self.cell = nn.GRUCell(H, H)

    def forward(self, h: Tensor, token: Tensor) -> Tensor:
        return self.cell(self.words(token), h)


def lists(
    n: int = 12,
    keep: str = "auto",
    dtype: torch.dtype = torch.float64,
    sparse: bool = False,
    run: Run = "steps",
) -> Model:
    """A token a vertex; the state moves along them until the last."""
    torch.manual_seed(1)
    reader, readout = Reader(9, sparse).to(dtype), nn.Linear(H, 5).to(dtype)
    graph = Graph(vertex=("token",), value=("label",))
    state = graph.loop(run=run)
    state.join(graph.input("h"))
    read = state.through(reader, name="reader", read="token", keep=keep)
    more, done = read.where(lambda m: m.vertex < m.size - 1)
    state.join(more.move(vertex=lambda m: m.vertex + 1))
    done.through(readout, name="readout", keep=keep).loss(
        cross_entropy, target="label", metrics={"accuracy": accuracy}
    )

    def plain(given: Instance) -> Tensor:
        h = given.inputs["h"][0]
        for token in torch.from_numpy(given.vertex["token"]):
            h = reader(h, token[None])
        return F.cross_entropy(readout(h), torch.tensor([given.value["label"]]))

    rng = np.random.default_rng(1)
    data = [
        Instance(
            {"h": (torch.zeros(1, H, dtype=dtype), [0])},
            {"token": rng.integers(0, 9, int(rng.integers(1, 8)))},
            value={"label": int(rng.integers(5))},
        )
        for _ in range(n)
    ]
    return Model(graph, {"reader": reader, "readout": readout}, plain, data, {"h": ((H,), dtype)})


class Leaf(nn.Module):
    """A word to hidden and cell state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.map = nn.Embedding(11, H), nn.Linear(H, 2 * H)

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.map(self.words(word)).chunk(2, -1)
        return torch.tanh(h), c


class Branch(nn.Module):
    """Two children ``(n, 2, H)`` to their parent."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2 * H, 3 * H)

    def forward(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.map(h.flatten(1)).chunk(3, -1)
        cell = torch.sigmoid(i) * torch.tanh(u) + 0.5 * (c[:, 0] - c[:, 1])
        return torch.sigmoid(o) * torch.tanh(cell), cell


class HiddenOnly(nn.Module):
    """Reads the hidden state and leaves the cell's gradient zero."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.map = nn.Linear(H, out)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        return self.map(h)


def tree(rng: np.random.Generator, leaves: int) -> dict[str, np.ndarray]:
    """A random binary tree: leaves first, then inner vertices, the root last."""
    parent, slot = [-1] * (2 * leaves - 1), [0] * (2 * leaves - 1)
    roots, new = list(range(leaves)), leaves
    while len(roots) > 1:
        i = int(rng.integers(len(roots) - 1))
        a, b = roots[i], roots[i + 1]
        parent[a] = parent[b] = new
        slot[b] = 1
        roots[i : i + 2] = [new]
        new += 1
    return {
        "parent": np.array(parent),
        "slot": np.array(slot),
        "label": rng.integers(0, 5, 2 * leaves - 1),
    }


def trees(n: int = 12, keep: str = "auto", run: Run = "steps") -> Model:
    """Binary trees with a label at every vertex."""
    torch.manual_seed(2)
    leaf, branch, readout = Leaf().double(), Branch().double(), HiddenOnly(5).double()
    graph = Graph(vertex=("parent", "slot", "label"))
    nodes = graph.loop(name="nodes", run=run)
    nodes.join(graph.input("word").through(leaf, name="leaf", keep=keep))
    nodes.through(readout, name="readout", keep=keep).loss(cross_entropy, target="label")
    inner, root = nodes.where(lambda m: m.parent >= 0)
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
    nodes.join(pairs.through(branch, name="branch", keep=keep))
    root.stop()

    def plain(given: Instance) -> Tensor:
        word = given.inputs["word"]
        h, c = leaf(word)
        hs, cs = list(h), list(c)
        parent, slot = given.vertex["parent"], given.vertex["slot"]
        for v in range(len(word), len(parent)):
            kids = sorted(np.flatnonzero(parent == v), key=lambda k: slot[k])
            ch, cc = branch(
                torch.stack([hs[k] for k in kids])[None], torch.stack([cs[k] for k in kids])[None]
            )
            hs.append(ch[0])
            cs.append(cc[0])
        logits = readout(torch.stack(hs), torch.stack(cs))
        return F.cross_entropy(logits, torch.from_numpy(given.vertex["label"]), reduction="sum")

    rng = np.random.default_rng(2)
    data = []
    for _ in range(n):
        leaves = int(rng.integers(1, 7))
        words = torch.from_numpy(rng.integers(0, 11, leaves))
        data.append(Instance({"word": words}, tree(rng, leaves)))
    modules = {"leaf": leaf, "branch": branch, "readout": readout}
    return Model(graph, modules, plain, data, {"word": ((), torch.int64)})


class Typed(nn.Module):
    """What runs along edges: a linear map for each type."""

    def __init__(self, types: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(H, H) for _ in range(types))


class Step(nn.Module):
    """One step of a gated graph network on whole bundles."""

    def __init__(self, types: int) -> None:
        super().__init__()
        self.typed, self.cell = Typed(types), nn.GRUCell(H, H)

    def forward(self, h: Tensor, inside: Any) -> Tensor:
        source, target, kind = (inside.edges[c] for c in ("source", "target", "type"))
        total = torch.zeros_like(h)
        for k, each in enumerate(self.typed.maps):
            of = kind == k
            total = total.index_add(0, target[of], each(h[source[of]]))
        return self.cell(total, h)


class Readout(nn.Module):
    """A gated sum over each bundle, to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.map = nn.Linear(H, 3), nn.Linear(H, 3)

    def rows(self, h: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(h)) * self.map(h)

    def forward(self, h: Tensor, inside: Any) -> Tensor:
        rows = self.rows(h)
        total = rows.new_zeros(inside.lengths.numel(), 3)
        return total.index_add(0, inside.segment, rows).sum(1)


class Update(nn.Module):
    """The cell behind a concatenation of state and messages."""

    def __init__(self, cell: nn.GRUCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, both: Tensor) -> Tensor:
        return self.cell(both[:, H:], both[:, :H])


class Gate(nn.Module):
    """The readout of one vertex; the sum over the instance is a group's."""

    def __init__(self, readout: Readout) -> None:
        super().__init__()
        self.readout = readout

    def forward(self, h: Tensor) -> Tensor:
        return self.readout.rows(h)


def molecules(n: int, types: int) -> list[Instance]:
    rng = np.random.default_rng(3)
    data = []
    for _ in range(n):
        v = int(rng.integers(1, 6))
        m = int(rng.integers(0, 9))
        data.append(
            Instance(
                {"h": torch.from_numpy(rng.standard_normal((v, H)))},
                edge={
                    "source": rng.integers(0, v, m),
                    "target": rng.integers(0, v, m),
                    "type": rng.integers(0, types, m),
                },
                value={"aim": float(rng.standard_normal())},
            )
        )
    return data


def _plain_network(step: Step, readout: Readout, steps: int) -> Any:
    def plain(given: Instance) -> Tensor:
        h = given.inputs["h"]
        edges = list(zip(*(given.edge[c] for c in ("source", "target", "type")), strict=True))
        for _ in range(steps):
            into = [torch.zeros(H, dtype=torch.float64) for _ in h]
            for source, target, kind in edges:
                into[target] = into[target] + step.typed.maps[kind](h[source])
            h = step.cell(torch.stack(into), h)
        return (readout.rows(h).sum() - given.value["aim"]) ** 2

    return plain


def squared(y: Tensor, aim: Tensor) -> Tensor:
    return (y.reshape(y.shape[0], -1).sum(1) - aim) ** 2


def edges(
    n: int = 10, keep: str = "auto", types: int = 3, steps: int = 3, run: Run = "steps"
) -> Model:
    """The network with a message an edge; vertices without edges get a message of zeros."""
    torch.manual_seed(3)
    step, readout = Step(types).double(), Readout().double()
    update, gate = Update(step.cell), Gate(readout)
    graph = Graph(edge=("type",), value=("aim",))
    start = graph.input("h", step=0)
    state = graph.loop(name="state", run=run)
    state.join(start)
    ways = state.flatmap("edge").route(lambda m: m.type, types)
    sent = [
        way.through(step.typed.maps[k], name=f"type {k}", keep=keep) for k, way in enumerate(ways)
    ]
    arrived = graph.merge(*sent).move(vertex=lambda m: m.target)
    sums = arrived.group(("vertex", "step"), "in_degree", how="sum")
    some, alone = state.where(lambda m: m.in_degree > 0)
    nothing = alone.through(torch.zeros_like, name="nothing")
    messages = graph.merge(sums, nothing)
    some.stop()
    both = graph.concat(state, messages, on=("vertex", "step"))
    after = both.through(update, name="update", keep=keep).move(step=lambda m: m.step + 1)
    more, done = after.where(lambda m: m.step < steps)
    state.join(more)
    rows = done.through(gate, name="gate", keep=keep)
    rows.group("instance", "size", how="sum").loss(squared, target="aim")
    modules = {
        **{f"type {k}": step.typed.maps[k] for k in range(types)},
        "update": update,
        "gate": gate,
    }
    return Model(
        graph,
        modules,
        _plain_network(step, readout, steps),
        molecules(n, types),
        {"h": ((H,), torch.float64)},
    )


def bundles(
    n: int = 10, keep: str = "auto", types: int = 3, steps: int = 3, run: Run = "steps"
) -> Model:
    """The network with a message a graph and step."""
    torch.manual_seed(3)
    step, readout = Step(types).double(), Readout().double()
    graph = Graph(edge=("type",), value=("aim",))
    state = graph.loop(name="state", run=run)
    state.join(graph.input("h", bundle=True, step=0))
    after = state.through(step, name="step", inside=True, keep=keep)
    more, done = after.move(step=lambda m: m.step + 1).where(lambda m: m.step < steps)
    state.join(more)
    pooled = done.through(readout, name="readout", inside=True, pool=True, keep=keep)
    pooled.loss(squared, target="aim")
    return Model(
        graph,
        {"step": step, "readout": readout},
        _plain_network(step, readout, steps),
        molecules(n, types),
        {"h": ((H,), torch.float64)},
    )


MODELS = {"lists": lists, "trees": trees, "edges": edges, "bundles": bundles}
