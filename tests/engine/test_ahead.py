"""Instances of several updates go back in one firing, and each update gets what is its own."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.portion import UpdatesWorth
from geartrain.engine.worker import WorkerState
from geartrain.nodes.gradient import GradientSum
from tests.rigs.sessions import session_of

WIDTH, CLASSES, N = 4, 3, 30


class Gated(nn.Module):
    """No kernel by hand: derived, or run again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(h))
        return gate * h + (1 - gate) * torch.tanh(self.new(h))


class Noted(torch.optim.SGD):
    """Leaves the weights alone, and notes the gradient of each step."""

    def __init__(self, params: Any, found: list[list[Tensor]]) -> None:
        super().__init__(params, lr=0.0)
        self.found = found

    def step(self, closure: Any = None) -> None:
        weights = self.param_groups[0]["params"]
        self.found.append([p.grad.clone() for p in weights if p.grad is not None])


def cell(kind: str) -> nn.Module:
    if kind == "by hand":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return Gated()


def model(kind: str) -> nn.ModuleDict:
    torch.manual_seed(3)
    start = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    parts = {"start": start, "cell": cell(kind), "readout": nn.Linear(WIDTH, CLASSES)}
    return nn.ModuleDict(parts).double()


def graph_of(parts: nn.ModuleDict, keep: str | None) -> gt.Graph:
    graph = gt.Graph(value=("label", "turns"))
    states = graph.loop(name="states")
    states.join(graph.input("x", step=0).through(parts["start"], name="start"))
    more_of_it = {} if keep is None else {"keep": keep}
    stepped = states.through(parts["cell"], name="cell", **more_of_it)
    done, more = stepped.where(lambda m: m.step + 1 >= m.turns)
    states.join(more.move(step=lambda m: m.step + 1))
    done.through(parts["readout"], name="readout").loss(gt.cross_entropy, target="label")
    return graph


def data() -> list[gt.Instance]:
    draw = np.random.default_rng(0)
    return [
        gt.Instance(
            {"x": torch.from_numpy(draw.standard_normal((1, WIDTH)))},
            value={"label": int(draw.integers(CLASSES)), "turns": int(draw.integers(1, 5))},
        )
        for _ in range(N)
    ]


def expected(parts: nn.ModuleDict, some: list[gt.Instance], name: str) -> list[Tensor]:
    """The gradient of the sum of the losses of some instances, one after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for one in some:
        h = parts["start"](one.inputs["x"])
        for _ in range(int(one.value["turns"])):
            h = parts["cell"](h)
        label = torch.tensor([int(one.value["label"])])
        total = total + nn.functional.cross_entropy(parts["readout"](h), label)
    return list(torch.autograd.grad(total, list(parts[name].parameters())))


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something had been added for a later update."""
    counted: Counter[str] = Counter()
    before = GradientSum.next_update

    def next_update(self: GradientSum) -> None:
        counted["ahead"] += self.ahead
        before(self)

    monkeypatch.setattr(GradientSum, "next_update", next_update)
    return counted


def train(kind: str, n: int, in_flight: int, keep: str | None = None) -> dict[str, Any]:
    parts = model(kind)
    found: dict[str, list[list[Tensor]]] = {name: [] for name in parts}
    graph = graph_of(parts, keep)
    of_part = {name: partial(Noted, found=found[name]) for name in parts}
    for through in graph.throughs():
        through.part = gt.Part(through.function, through.name, optimizer=of_part[through.name])
    session = session_of(
        graph,
        rules=gt.Rules(update_every=gt.Instances(n), average="none", optimizer=torch.optim.SGD),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=in_flight,
        ramp=gt.Ramp(over=0),
        shuffle=False,
    )
    fit = session.fit(data(), epochs=1)
    return {"parts": parts, "found": found, "fit": fit}


def require_own(made: dict[str, Any], n: int) -> None:
    """Every update of the cell is of its own instances; of the parts that each instance comes by
    once it is of so many as came first, and all of them are of all instances."""
    items, parts = data(), made["parts"]
    for name, steps in made["found"].items():
        assert len(steps) == -(-N // n)
        every = [items[k * n : (k + 1) * n] for k in range(len(steps))]
        if name != "cell":
            steps, every = [[sum(each) for each in zip(*steps, strict=True)]], [items]
        for gradients, some in zip(steps, every, strict=True):
            for g, e in zip(gradients, expected(parts, some, name), strict=True):
                torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [4, 7])
@pytest.mark.parametrize(
    ("kind", "keep"), [("by hand", None), ("derived", "activations"), ("derived", "inputs")]
)
def test_each_update_gets_the_gradient_of_its_own_instances(kind, keep, n, advanced) -> None:
    require_own(train(kind, n, N, keep), n)
    assert advanced["ahead"] > 0


@pytest.mark.parametrize("kind", ["by hand", "derived"])
def test_rows_of_kernels_that_add_them_up_go_back_update_by_update(
    kind, advanced, monkeypatch
) -> None:
    monkeypatch.setattr(WorkerState, "_takes_ahead", lambda self, node: bool(node.part_names))
    require_own(train(kind, 4, N, "inputs" if kind == "derived" else None), 4)
    assert advanced["ahead"] > 0


def test_staleness_is_counted_when_the_update_is_the_present_one(advanced) -> None:
    made = train("by hand", 5, N)
    record = made["fit"].history[0].staleness
    # Of a firing the gradients of the k-th update are added when k steps have been taken.
    assert advanced["ahead"] > 0
    for name in made["parts"]:
        counts = record[name].histogram
        assert all(counts[:4]) and len(counts) <= 6


def test_gradients_of_no_more_than_some_updates_are_ahead(advanced, monkeypatch) -> None:
    deepest = 0
    before = GradientSum.next_update

    def next_update(self: GradientSum) -> None:
        nonlocal deepest
        self._sort_apart()
        deepest = max(deepest, len(self._ahead))
        before(self)

    monkeypatch.setattr(GradientSum, "next_update", next_update)
    train("by hand", 2, N)
    assert deepest == UpdatesWorth().ahead


def test_with_a_bound_on_staleness_no_update_is_ahead(advanced) -> None:
    parts = model("by hand")
    session = session_of(
        graph_of(parts, None),
        rules=gt.Rules(
            optimizer=partial(torch.optim.SGD, lr=0.1),
            update_every=gt.Instances(4),
            max_staleness=1,
        ),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=N,
        ramp=gt.Ramp(over=0),
    )
    record = session.fit(data(), epochs=1).history[0]
    assert not advanced["ahead"]
    assert all(len(each.histogram) <= 2 for each in record.staleness.values())
