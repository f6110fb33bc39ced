"""Instances of several updates go back in one firing, and each update gets what is its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from benchmarks.own.programs import PROGRAMS
from benchmarks.own.programs.program import AbstractProgram, Item
from geartrain.data.listreduce import generate
from geartrain.engine import cohorts
from geartrain.engine.portion import UpdatesWorth
from geartrain.engine.worker import WorkerState
from geartrain.errors import LeakError
from geartrain.nodes.apart import PutApart, RowsOfUpdates
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.loop import returning
from geartrain.parts.part import PartState
from geartrain.recipes import listreduce
from tests.rigs import turns
from tests.rigs.sessions import session_of
from tests.rigs.turns import CLASSES, WIDTH

N = 30


class Gated(nn.Module):
    """No kernel by hand: derived, or run again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(h))
        return gate * h + (1 - gate) * torch.tanh(self.new(h))


class Normed(nn.Module):
    """Its kernel adds up by itself what the norm's weights learn, and words that it skips."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH, padding_idx=0)
        self.norm, self.new = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, word: Tensor) -> Tensor:
        return h + torch.tanh(self.new(self.norm(h + self.words(word))))


class Noted(torch.optim.SGD):
    """Leaves the weights alone, and notes the gradient of each step."""

    def __init__(self, params: Any, found: list[list[Tensor]]) -> None:
        super().__init__(params, lr=0.0)
        self.found = found

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = self.param_groups[0]["params"]
        self.found.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
        )


CELLS: dict[str, type[nn.Module] | None] = {"by hand": None, "derived": Gated, "normed": Normed}


def graph_of(parts: nn.ModuleDict, keep: str | None) -> gt.Graph:
    of_cell = {} if keep is None else {"keep": keep}
    if isinstance(parts["cell"], Normed):
        of_cell["read"] = "label"
    return turns.graph_of(parts, **of_cell)


def expected(parts: nn.ModuleDict, some: list[gt.Instance], name: str) -> list[Tensor]:
    """The gradient of the sum of the losses of some instances."""
    total = turns.loss_of(parts, some, reads=isinstance(parts["cell"], Normed))
    return list(torch.autograd.grad(total, list(parts[name].parameters())))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Parts that were told of gradients of later updates, row by row."""
    found: set[str] = set()
    for name in ("received_for", "answered_for"):
        before = getattr(PartState, name)

        def tell(self: PartState, updates: Any, *args: Any, before: Any = before) -> None:
            if updates.any():
                found.add(self.name)
            before(self, updates, *args)

        monkeypatch.setattr(PartState, name, tell)
    return found


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
    parts = turns.model(CELLS[kind])
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
    fit = session.fit(turns.data(N), epochs=1)
    return {"parts": parts, "found": found, "fit": fit}


def require_own(made: dict[str, Any], n: int) -> None:
    """Every update of the cell is of its own instances; of the parts that each instance comes by
    once it is of so many as came first, and all of them are of all instances."""
    items, parts = turns.data(N), made["parts"]
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
    ("kind", "keep", "ahead"),
    [
        ("by hand", None, {"start", "cell", "readout"}),
        ("derived", "activations", {"start", "cell", "readout"}),
        ("normed", "activations", {"start", "cell", "readout"}),
        ("normed", "inputs", set()),  # autograd adds rows up, so all go by update
    ],
)
def test_each_update_gets_the_gradient_of_its_own_instances(kind, keep, ahead, n, told) -> None:
    require_own(train(kind, n, N, keep), n)
    assert set(told) >= ahead
    assert ("cell" in told) == ("cell" in ahead)


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
    assert deepest == UpdatesWorth().updates_apart - 1


def test_with_a_bound_on_staleness_no_update_is_ahead(advanced) -> None:
    parts = turns.model()
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
    record = session.fit(turns.data(N), epochs=1).history[0]
    assert not advanced["ahead"]
    assert all(len(each.histogram) <= 2 for each in record.staleness.values())


@pytest.mark.parametrize("in_order", [True, False])
def test_rows_that_went_round_come_back_update_after_update(in_order, monkeypatch) -> None:
    put: set[torch.Size] = set()
    before = PutApart.put

    def counted(self: PutApart, parameter: nn.Parameter, *args: Any) -> bool:
        put.add(parameter.shape)
        return before(self, parameter, *args)

    monkeypatch.setattr(PutApart, "put", counted)
    if not in_order:
        monkeypatch.setattr(cohorts, "_in_order", lambda *given: given)
    graph = listreduce.make_graph(WIDTH, whole=False)  # short ones come to the readout first
    for through in graph.throughs():
        through.keep = "activations"
    session = session_of(
        graph,
        rules=gt.Rules(update_every=gt.Instances(10), optimizer=torch.optim.SGD),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=N,
        ramp=gt.Ramp(over=0),
    )
    items = listreduce.instances_of(generate(N, 0, "train"), WIDTH)
    updates = session.fit(items, epochs=1).history[0].updates
    assert set(updates.values()) == {N // 10}
    of_readout = {torch.Size([10, WIDTH]), torch.Size([10])}
    assert put >= of_readout
    assert (put == of_readout) is in_order


@pytest.mark.parametrize("name", ["halting", "moe", "exits"])
def test_modules_taken_together_tell_updates_apart(name, told) -> None:
    require_own_of_program(name)
    assert told - ONCE


@pytest.mark.parametrize("name", ["exits", pytest.param("moe", marks=pytest.mark.slow)])
def test_rows_of_an_update_are_multiplied_where_they_lie_or_put_apart(
    name, needs_kernels, monkeypatch
) -> None:
    apart: Counter[bool] = Counter()
    before = RowsOfUpdates.by_update

    def by_update(self: RowsOfUpdates) -> Any:
        apart[lying] += 1
        return before(self)

    monkeypatch.setattr(RowsOfUpdates, "by_update", by_update)
    for lying in (True, False):  # by runs of rows however short, and by none
        monkeypatch.setattr(returning, "_SIDE_BY_SIDE", 0 if lying else N**9)
        require_own_of_program(name)
    assert not apart[True]
    assert apart[False]


def require_own_of_program(name: str) -> None:
    """Every update is of its own instances, where all are in flight at once."""
    torch.manual_seed(0)
    program = PROGRAMS[name](4).double()
    items, n = program.generate(48, seed=1), 12
    graph = program.graph()
    found: dict[str, tuple[nn.Module, list[list[Tensor]]]] = {}
    for through in graph.throughs():
        module = through.function
        if isinstance(module, nn.Module) and list(module.parameters()):
            through.keep = "activations"
            found[through.name] = module, []
            optimizer = partial(Noted, found=found[through.name][1])
            through.part = gt.Part(module, through.name, optimizer=optimizer)
    session = session_of(
        graph,
        rules=gt.Rules(update_every=gt.Instances(n), average="none", optimizer=torch.optim.SGD),
        runtime=gt.Threads(1, kernel_threads=1),
        max_active=len(items),
        ramp=gt.Ramp(over=0),
        shuffle=False,
    )
    session.fit([program.instance(item, torch.float64) for item in items], epochs=1)
    each = [gradient_of(program, items[k * n : (k + 1) * n]) for k in range(4)]
    updates = 0
    for part, (module, steps) in found.items():
        own = [[gradients[p] for p in module.parameters()] for gradients in each]
        if steps:
            require_close([sum(one) for one in zip(*steps, strict=True)], sum_of(own))
        if len(steps) == 4 and part not in ONCE:  # one without rows in an update takes no step
            updates += 4
            for gradients, expected_ones in zip(steps, own, strict=True):
                require_close(gradients, expected_ones)
    assert updates


ONCE = {"start", "readout", "first", "answer"}  # of their messages the first are the first update's


def gradient_of(program: AbstractProgram, items: Sequence[Item]) -> dict[nn.Parameter, Tensor]:
    weights = list(program.parameters())
    total = sum((program.plain(item) for item in items), torch.zeros((), dtype=torch.float64))
    found = torch.autograd.grad(total, weights, allow_unused=True)
    each = zip(weights, found, strict=True)
    return {p: torch.zeros_like(p) if g is None else g for p, g in each}


def sum_of(each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(some).sum(0) for some in zip(*each, strict=True)]


def require_close(found: Sequence[Any], expected: Sequence[Tensor]) -> None:
    for g, e in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(g), e, rtol=1e-9, atol=1e-12)


def test_a_gradient_that_no_update_has_taken_is_a_leak(monkeypatch) -> None:
    monkeypatch.setattr(PartState, "next_update", lambda self: False)
    with pytest.raises(LeakError, match="later updates"):
        train("by hand", 4, N)
