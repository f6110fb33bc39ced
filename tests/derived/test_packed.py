"""Weights that a program has packed are packed again when they have changed, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.derived import auto
from geartrain.derived.derivation import derive
from geartrain.derived.fused import Routine
from geartrain.derived.operands import Operands
from geartrain.derived.program import Program
from geartrain.native.fused import Packing
from geartrain.native.steady import firing, this_pass
from geartrain.nn import Recurrent, TokenRNN

WIDTH = 5

pytestmark = pytest.mark.usefixtures("needs_kernels")


class Step(nn.Module):
    """A map, and a table behind a map of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.back = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + self.back(self.words(word)))


INPUTS = torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64).view(6, WIDTH), torch.arange(6) % 4


@pytest.fixture
def module() -> Step:
    torch.manual_seed(0)
    return Step().double()


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Packing]:
    """All that have been run."""
    found: list[Packing] = []

    def run(self: Packing, before: Any = Packing.run) -> None:
        found.append(self)
        before(self)

    monkeypatch.setattr(Packing, "run", run)
    return found


@pytest.fixture
def of_a_pass() -> Iterator[int]:
    """What follows is as in the firings of a worker in a pass."""
    firing.of_pass = 1
    yield 1
    firing.of_pass = 0


def program_of(module: Step) -> Program:
    return Program(derive(module, INPUTS), Operands(module))


def require_right(program: Program, module: Step) -> None:
    with torch.no_grad():
        (found,), _ = program.forward(INPUTS)
        torch.testing.assert_close(found, module(*INPUTS))


def packed(program: Program, module: Step, packings: list[Packing]) -> int:
    """How often a forward packs, which is right."""
    before = len(packings)
    require_right(program, module)
    return len(packings) - before


def stepped(module: Step) -> None:
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def counted(module: Step) -> None:
    module.words.weight.data.mul_(2)
    torch.autograd.graph.increment_version([module.words.weight])


def laid_elsewhere(module: Step) -> None:
    module.back.bias.data = module.back.bias.data * 2


def another_one(module: Step) -> None:
    module.inner.weight = nn.Parameter(module.inner.weight.detach() * 2)


@pytest.mark.usefixtures("of_a_pass")
@pytest.mark.parametrize("change", [stepped, counted, laid_elsewhere, another_one])
def test_a_weight_that_has_changed_is_packed_again(
    change: Callable[[Step], None], module: Step, packings: list[Packing]
) -> None:
    program = program_of(module)
    assert packed(program, module, packings) > 0
    assert packed(program, module, packings) == 0
    change(module)
    assert packed(program, module, packings) > 0
    assert packed(program, module, packings) == 0


def test_in_another_pass_and_outside_of_any_nobody_counts(
    module: Step, packings: list[Packing], of_a_pass: int
) -> None:
    program = program_of(module)
    require_right(program, module)
    for number in (of_a_pass + 1, 0, 0):
        firing.of_pass = number
        module.inner.weight.data.mul_(2)  # which torch does not count
        module.words.weight.data.mul_(2)
        assert packed(program, module, packings) > 0


@pytest.mark.usefixtures("of_a_pass")
def test_another_thread_has_packed_its_own(module: Step, packings: list[Packing]) -> None:
    program, found = program_of(module), []
    require_right(program, module)

    def work() -> None:
        firing.of_pass = 1
        found.append(packed(program, module, packings))

    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert found[0] > 0


@pytest.mark.usefixtures("of_a_pass")
def test_what_is_no_parameter_is_packed_each_time(module: Step, packings: list[Packing]) -> None:
    """A tensor that is computed may lie where another one lay."""
    weight = module.inner.weight.detach()
    del module.inner.weight
    module.inner.register_buffer("weight", weight)
    program = program_of(module)
    require_right(program, module)
    module.inner.weight.data.mul_(2)
    assert packed(program, module, packings) > 0


def lists(count: int, width: int) -> list[gt.Instance]:
    start = {"start": (torch.zeros(1, width), torch.zeros(1, dtype=torch.int64).numpy())}
    return [
        gt.Instance(
            start,
            vertex={"token": torch.tensor([k % 4] * 3).numpy()},
            value={"label": k % 2},
            key=str(k),
        )
        for k in range(count)
    ]


def network(width: int) -> gt.Graph:
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("token",), value=("label",))
    cell = TokenRNN(4, width, embedding_dim=width)
    ended = Recurrent(cell, read="token", name="cell", run="steps")(graph.input("start"))
    scores = ended.through(nn.Linear(width, 2), name="readout")
    scores.loss(gt.cross_entropy, "label")
    return graph


def test_a_fit_packs_once_a_step(packings: list[Packing], monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back, of the cell: three turns each, and one update of four lists."""
    of_pass: list[int] = []

    def call(self: Routine, *given: Any, before: Any = Routine.__call__) -> Any:
        of_pass.append(firing.of_pass)
        return before(self, *given)

    monkeypatch.setattr(Routine, "__call__", call)
    monkeypatch.setattr(auto, "FIRINGS", 3)
    monkeypatch.setattr(auto, "ROWS", 8)
    monkeypatch.setattr(auto, "compare", lambda *_: 0.5)
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=gt.Instances(4))
    session = gt.Session(network(WIDTH), rules=rules, runtime=gt.Threads(1), max_active=4, seed=0)
    passes = this_pass.number
    fit = session.fit(lists(64, WIDTH), epochs=2)
    updates = sum(epoch.updates["cell"] for epoch in fit.history)
    assert updates == 32
    assert len(of_pass) > 5 * updates
    assert len(packings) <= 3 * updates  # the table's map is packed by itself
    assert {*of_pass} == {passes + 1, passes + 2}
    assert firing.of_pass == 0
