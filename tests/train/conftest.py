"""Small graphs and data for the tests of sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt


@dataclass
class Line:
    """Rows through two linear parts to a loss: ``x (n, 3) ─► first ─► second ─► classes``."""

    graph: gt.Graph
    first: nn.Linear
    second: nn.Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@dataclass
class Forest:
    """Binary trees over words: a sparse embedding, a branch in a loop, a readout of all nodes."""

    graph: gt.Graph
    word: nn.Embedding
    branch: nn.Linear
    readout: nn.Linear


@dataclass
class Recorder(gt.AbstractInstrument):
    """Every event in the order in which it came."""

    wants_firings = True
    events: list[Any] = field(default_factory=list)
    react: Callable[[Any], None] = lambda event: None

    def _note(self, event: Any) -> None:
        self.events.append(event)
        self.react(event)

    on_run_started = on_fired = on_updated = on_progress = on_epoch_ended = on_run_ended = _note

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


class Branch(nn.Module):
    """Two children ``(n, 2, d)`` to their parent ``(n, d)``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, children: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(children.flatten(1)))


@pytest.fixture
def make_line() -> Callable[..., Line]:
    def make(
        seed: int = 0, wrap: Callable[[str, nn.Module], Any] = lambda name, module: module
    ) -> Line:
        torch.manual_seed(seed)
        first, second = nn.Linear(3, 4), nn.Linear(4, 2)
        graph = gt.Graph(vertex=("label",))
        hidden = graph.input("x").through(wrap("first", first), name="first")
        logits = hidden.through(torch.tanh, name="tanh").through(
            wrap("second", second), name="second"
        )
        logits.loss(gt.cross_entropy, target="label", metrics={"accuracy": gt.accuracy})
        return Line(graph, first, second)

    return make


@pytest.fixture
def make_forest() -> Callable[..., Forest]:
    def make(seed: int = 0, *, sparse: bool = True) -> Forest:
        torch.manual_seed(seed)
        word, branch, readout = nn.Embedding(20, 4, sparse=sparse), nn.Linear(8, 4), nn.Linear(4, 3)
        graph = gt.Graph(vertex=("parent", "slot", "label"))
        nodes = graph.loop(name="nodes", run="steps")
        nodes.join(graph.input("word").through(word, name="embed"))
        nodes.through(readout, name="readout").loss(
            gt.cross_entropy, target="label", metrics={"accuracy": gt.accuracy}
        )
        inner, root = nodes.where(lambda m: m.parent >= 0)
        pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
        nodes.join(pairs.through(Branch(branch), name="branch"))
        root.stop()
        return Forest(graph, word, branch, readout)

    return make


@pytest.fixture
def make_rows() -> Callable[..., list[gt.Instance]]:
    def make(n: int, seed: int = 0, rows: int = 0) -> list[gt.Instance]:
        """Instances of 1 to 3 rows (or ``rows``) with labels that a line can learn."""
        rng = np.random.default_rng(seed)
        made = []
        for key in range(n):
            x = rng.standard_normal((rows or int(rng.integers(1, 4)), 3)).astype(np.float32)
            labels = (x.sum(1) > 0).astype(np.int64)
            made.append(gt.Instance({"x": torch.from_numpy(x)}, {"label": labels}, key=key))
        return made

    return make


@pytest.fixture
def make_trees() -> Callable[..., list[gt.Instance]]:
    def make(n: int, seed: int = 0) -> list[gt.Instance]:
        rng = np.random.default_rng(seed)
        return [_tree(rng, key) for key in range(n)]

    return make


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def weights_of() -> Callable[[Sequence[nn.Module]], list[torch.Tensor]]:
    def weights(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
        return [p.detach().clone() for m in modules for p in m.parameters()]

    return weights


def _tree(rng: np.random.Generator, key: int) -> gt.Instance:
    leaves = int(rng.integers(1, 6))
    n = 2 * leaves - 1
    parent, slot, roots = [-1] * n, [0] * n, list(range(leaves))
    for inner in range(leaves, n):
        i = int(rng.integers(len(roots) - 1))
        parent[roots[i]] = parent[roots[i + 1]] = inner
        slot[roots[i + 1]] = 1
        roots[i : i + 2] = [inner]
    words = torch.from_numpy(rng.integers(20, size=leaves))
    columns = {"parent": parent, "slot": slot, "label": rng.integers(3, size=n)}
    return gt.Instance({"word": words}, {k: np.array(v) for k, v in columns.items()}, key=key)
