"""Training does without torch's compiler, which torch would import: a second, and 70 MiB. Nor does
it import the library for symbols by which torch knows shapes: a third of a second, and 31 MiB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from geartrain.nodes.uncompiled import _kept_away_from, uncompiled
from geartrain.parts.optimizers import plainly_stepped
from tests.rigs.programs import Nursery, Program

KEPT = "__dynamo_disable"

PROGRAM = """
import sys
from functools import partial
import torch
from torch import nn
import geartrain as gt
from torch.optim import Optimizer
from geartrain.runtime.processes.forking import get_ready

class Odd(torch.optim.SGD):
    pass

class Map(nn.Module):  # what no kernel is derived of, by operators that torch has in Python
    def __init__(self):
        super().__init__()
        self.map, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5)
    def forward(self, x):
        y = self.drop(self.norm(self.map(x)).tanh() * x.exp())
        y.add_(x)
        return torch.where(y > 0, y, y.relu() + (x == 0) / 2)

def loaded(what, names=("torch._dynamo", "sympy")):
    for name in names:
        if name in sys.modules:
            print(name, what, flush=True)

torch.manual_seed(0)
loaded("a first session")
get_ready()
loaded("a server of workers")
rows = [gt.Instance({"x": torch.rand(3, 4)}, key=k) for k in range(3)]
KINDS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
         "Rprop", "SGD")
for kind in (*(getattr(torch.optim, name) for name in KINDS), Odd, gt.FusedAdam):
    graph = gt.Graph()
    graph.input("x").through(Map()).loss(lambda y: y.square().sum(1))
    rules = gt.Rules(optimizer=partial(kind, lr=0.01))
    session = gt.Session(graph, rules=rules, runtime=gt.Simulated())
    session.fit(rows, epochs=1)
    loaded(f"training by {kind}")
    session.save("checkpoint")
    session.load("checkpoint")
    loaded(f"a checkpoint of {kind}")
class Gated(nn.Module):  # a trace of its cell goes through operators that torch has in Python
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
    def forward(self, x):
        return self.cell(x, x.tanh())

graph = gt.Graph()
graph.input("x").through(Gated(), keep="activations").loss(lambda y: y.square().sum(1))
gt.Session(graph, runtime=gt.Simulated()).fit(rows, epochs=1)
loaded("a trace of a cell", ["torch._dynamo"])  # torch's cells write in place
print([name for name, f in vars(Optimizer).items() if hasattr(f, "KEPT")], flush=True)
torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
print("torch._dynamo" in sys.modules, flush=True)
""".replace("KEPT", KEPT)


def test_neither_is_imported_to_train_to_save_and_to_load(nursery: Nursery, tmp_path: Path) -> None:
    program = Program(nursery, tmp_path / "run", PROGRAM)
    assert program.line() == "[]"  # nothing that imported either, and torch is as it was
    assert program.line() == "True"  # an optimiser of somebody else's: torch's own way


def test_torch_is_as_it_was_whatever_is_raised_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    function = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.delattr(function, KEPT, raising=False)
    with pytest.raises(KeyError), uncompiled():
        with uncompiled():
            pass
        assert getattr(function, KEPT) is function
        raise KeyError
    assert not hasattr(function, KEPT)


def test_where_the_compiler_is_there_torch_keeps_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", object())
    function = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(function, KEPT, "torch's", raising=False)
    with uncompiled():
        assert getattr(function, KEPT) == "torch's"
    assert getattr(function, KEPT) == "torch's"


def test_a_step_that_autograd_is_to_follow_is_torchs() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    plainly_stepped(torch.optim.Adam([weight], lr=1.0))
    assert weight.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    followed = torch.optim.Adam([weight], lr=1.0, differentiable=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        plainly_stepped(followed)


def test_a_torch_of_other_names_imports_its_compiler_and_all_else_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._compile, "_disable_dynamo")
    assert _kept_away_from.__wrapped__() == ()
