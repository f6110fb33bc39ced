"""An argument of a session that is no such thing is told by its name, with what it could be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.runtime.processes.parent import Parent
from tests.rigs.passes import processes

ONE = torch.ones(1, 2)


def graph() -> gt.Graph:
    made = gt.Graph()
    made.input("x").through(nn.Linear(2, 2), name="it").loss(lambda x: x.square().sum(1))
    return made


def rows(n: int = 3) -> list[gt.Instance]:
    return [gt.Instance({"x": torch.ones(1, 2)}) for _ in range(n)]


def seen(event: object) -> None:
    """No instrument."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rules": torch.optim.Adam}, r"rules=<class .*Adam'>: give gt.Rules\(optimizer"),
        ({"rules": gt.Rules}, r"rules=<class .*: give gt.Rules\(optimizer"),
        ({"runtime": 2}, r"runtime=2: give gt.Threads\(1\), gt.Processes\(2\)"),
        ({"runtime": "processes"}, r"runtime='processes': give .*'auto'"),
        ({"runtime": gt.Processes}, "runtime=<class .*Processes'>: give"),
        ({"schedule": gt.Ramp(over=0)}, r"schedule=Ramp.*: give gt.Schedule\(ramp"),
        ({"compute": "bf16"}, r"compute='bf16': give gt.Compute\(precision='bf16'\)"),
        ({"reading": list}, r"reading=<class 'list'>: give gt.Reading\(convert"),
        ({"seed": "x"}, "seed='x': give a whole number"),
        ({"seed": True}, "seed=True: give a whole number"),
        ({"instruments": seen}, "instruments=<function seen.*: give a list of instruments"),
        ({"instruments": [seen]}, "instruments=.*derives from gt.AbstractInstrument"),
    ],
)
def test_what_a_session_is_given_is_looked_at(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        gt.Session(graph(), **given)


def test_a_graph_is_wanted_and_not_a_pipeline() -> None:
    pipe = gt.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), parts=2)
    with pytest.raises(TypeError, match=r"graph=<.*Pipeline.*: give a gt.Graph.*pipe.graph"):
        gt.Session(pipe)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 2.5}, "epochs=2.5: give a whole number"),
        ({"epochs": "2"}, "epochs='2': give a whole number"),
        ({"epochs": 1, "until": "loss"}, r"until='loss': give gt.Target\("),
        ({"epochs": 1, "keep": 5}, r"keep=5: give gt.Keep\(every"),
        ({"epochs": 1, "folder": 3}, "folder=3: give a path"),
        ({"epochs": 1, "valid": 3}, "the data is a int; give instances: a list of them"),
    ],
)
def test_what_a_fit_is_given_is_looked_at(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        gt.Session(graph()).fit(rows(), **given)


def test_an_instance_is_no_data() -> None:
    session = gt.Session(graph())
    for call in (session.evaluate, session.predict, partial(session.fit, epochs=1)):
        with pytest.raises(TypeError, match="the data is a Instance; give instances: a list"):
            call(rows()[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gt.Schedule(ramp=5), r"Schedule\(ramp=5\): give a ramp, such as"),
        (lambda: gt.Schedule(policy=gt.BackwardFirst()), r"Schedule\(policy=<.*: give what makes"),
        (lambda: gt.Schedule(placement=["it"]), r"Schedule\(placement=\['it'\]\): give .* names"),
        (lambda: gt.Synchronous(5, then=3), r"Synchronous\(then=3\): give a ramp"),
        (lambda: gt.Reading(convert=3), r"Reading\(convert=3\): give a function"),
        (lambda: gt.PartCopies("it"), r"PartCopies\('it'\): give a whole number, .* by name"),
        (lambda: gt.PartCopies(2, "mean"), r"PartCopies\(mixer='mean'\): give a mixer"),
        (lambda: gt.NearestNeighbours(inbox=3), r"NearestNeighbours\(inbox=3\): give an inbox"),
    ],
)
def test_what_is_of_another_kind_is_told_where_it_is_given(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


def test_there_are_two_ways_with_bad_instances() -> None:
    with pytest.raises(ValueError, match=r"Reading\(on_bad='ignore'\): give 'raise' or 'skip'"):
        gt.Reading(on_bad="ignore")  # type: ignore[arg-type]


class Unmeasured:
    """Data that do not know their length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[gt.Instance]:
        return iter(rows(self.n))


@pytest.mark.parametrize(("valid", "trained"), [([], 0), (Unmeasured(0), 3)])
def test_validation_data_without_instances_are_refused(valid: Any, trained: int) -> None:
    """At once where their length is known, else as they are first gone through."""
    session = gt.Session(graph())
    with pytest.raises(gt.DataError, match=r"the validation data gave no instance.* leave valid="):
        session.fit(rows(), epochs=1, valid=valid)
    assert session.statistics()["trained"] == trained
    assert session.fit(rows(), epochs=1, valid=Unmeasured(2)).history[0].valid["loss"] > 0
    assert session.evaluate([]).instances == 0


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
def test_a_module_that_leaves_the_program_is_named(leave: type[BaseException]) -> None:
    def module(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "meta" and left:
            raise leave(4)
        return x

    left: list[bool] = []
    made = gt.Graph()
    made.input("x").through(nn.Linear(2, 2), name="it").through(module, name="out").loss(
        lambda x: x.square().sum(1)
    )
    session = gt.Session(made)
    session.fit(rows(), epochs=1)
    left.append(True)
    with pytest.raises(leave, match="4") as raised:
        session.fit(rows(), epochs=2)
    assert any(note.startswith("in node 'out', forward") for note in raised.value.__notes__)


@pytest.mark.parametrize("make", [torch.jit.script, partial(torch.jit.trace, example_inputs=ONE)])
@pytest.mark.parametrize("keep", ["auto", "graph"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_jitted_module_is_refused_with_what_to_give_instead(make: Any, keep: Any) -> None:
    made = gt.Graph()
    hidden = made.input("x").through(make(nn.Linear(2, 2)), name="it", keep=keep)
    hidden.loss(lambda x: x.square().sum(1))
    words = "'it': .*Jitted modules; give the module that it was scripted or traced from"
    with pytest.raises(gt.GraphError, match=words):
        gt.Session(made).fit(rows(), epochs=1)


def test_a_placement_has_numbers_of_workers() -> None:
    placed = gt.Schedule(placement={"it": 2})
    with pytest.raises(ValueError, match=r"placement puts 'it' on worker 2; there are 0\.\.1"):
        gt.Session(graph(), runtime=gt.Threads(2), schedule=placed).fit(rows(), epochs=1)


@pytest.mark.parametrize("make", [partial(gt.Threads, 1), partial(processes, 2)])
def test_parameters_that_are_others_than_the_optimiser_has_are_told(make) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    made = gt.Graph()
    made.input("x").through(module, name="it").loss(lambda x: x.square().sum(1))
    session = gt.Session(made, runtime=make())
    session.fit(rows(), epochs=1)
    before = module[0]
    module[0] = nn.Linear(2, 2)
    words = "part 'it': the parameters of Sequential are not .*: '0.weight', '0.bias' came. Write"
    with pytest.raises(gt.GraphError, match=words):
        session.fit(rows(), epochs=2)
    module[0] = before
    assert session.fit(rows(), epochs=2).history[-1].epoch == 2
    del module[0]
    with pytest.raises(gt.GraphError, match="part 'it': its module has no parameters"):
        session.fit(rows(), epochs=3)


def test_what_comes_to_a_graph_after_its_session_is_told() -> None:
    made = gt.Graph()
    hidden = made.input("x").through(nn.Linear(2, 2), name="it")
    hidden.loss(lambda x: x.square().sum(1))
    session = gt.Session(made)
    session.fit(rows(), epochs=1)
    hidden.through(nn.Linear(2, 2), name="late").loss(lambda x: x.square().sum(1), name="other")
    with pytest.raises(gt.GraphError, match="'late' came to the graph after its session was made"):
        session.fit(rows(), epochs=2)


def test_a_runtime_serves_one_pass_at_a_time(monkeypatch) -> None:
    """Two would write into one another's channels."""
    runtime, here, go_on = processes(2), threading.Event(), threading.Event()
    true = Parent.go

    def go(self: Parent) -> None:
        here.set()
        assert go_on.wait(60)
        true(self)

    monkeypatch.setattr(Parent, "go", go)
    first, losses = gt.Session(graph(), runtime=runtime), []
    thread = threading.Thread(target=lambda: losses.append(first.fit(rows(), epochs=1).history))
    thread.start()
    assert here.wait(60)
    try:
        with pytest.raises(gt.BusyError, match=r"runtime=Processes\(...\): its workers are in the"):
            gt.Session(graph(), runtime=runtime).fit(rows(), epochs=1)
    finally:
        go_on.set()
        thread.join(60)
    assert len(losses) == 1
    assert gt.Session(graph(), runtime=runtime).fit(rows(), epochs=1).instances == 3
