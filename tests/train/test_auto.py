"""``runtime="auto"``: what is by hand stays, what is chosen is trained with, and is resumed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.advice import Advice, Machine, Sampled, Ways
from geartrain.engine.instrument import Chosen
from geartrain.train import auto

ONE = Advice(runtime="threads", workers=1, kernel_threads=1, why="one worker")
SHARED = Advice(runtime="processes", workers=2, kernel_threads=1, way="each", why="shared")
SPREAD = Advice(runtime="processes", workers=2, kernel_threads=1, why="spread")
COPIED = Advice(
    runtime="threads", workers=2, kernel_threads=1, way="copies", part="first", why="copied"
)


class Heard(gt.AbstractInstrument):
    def __init__(self):
        self.chosen: list[Chosen] = []

    def on_chosen(self, event):
        self.chosen.append(event)


@pytest.fixture
def advised(monkeypatch):
    """What ``advise`` was asked; it answers with ``plan``."""

    class Asked:
        plan, seen = ONE, None
        machine: Machine
        ways: Ways
        most: int

        def __call__(self, seen: Sampled, machine: Machine, ways: Ways, most: int, stale: float):
            self.seen, self.machine, self.ways, self.most = seen, machine, ways, most
            return self.plan

    asked = Asked()
    monkeypatch.setattr(auto, "advise", asked)
    return asked


TWO = gt.Auto(cores=2)


def session(make_line, **others):
    torch.manual_seed(0)
    heard = Heard()
    given = {"runtime": TWO, "max_active": 8, "instruments": [heard]} | others
    return gt.Session(make_line().graph, **given), heard


def close(it):
    if isinstance(it.runtime, gt.Processes):
        it.runtime.close()


def test_the_first_instances_are_measured_and_training_goes_on_by_the_plan(
    advised, make_line, make_rows
):
    advised.plan = SHARED
    made, heard = session(make_line)
    fit = made.fit(make_rows(200), epochs=2)
    assert fit.instances == 400 and [e.instances for e in fit.history] == [200, 200]
    assert isinstance(made.runtime, gt.Processes) and made.runtime.workers == 2
    assert made.state.sharing.name == "shared weights"
    seen = advised.seen
    assert (seen.instances, seen.max_active, seen.left) == (16, 8, 400 - 4 - 3 * 16)
    assert set(seen.shares) == {("first",), ("second",)}
    assert 0 < seen.firing_s <= seen.seconds
    (event,) = heard.chosen
    assert (event.runtime, event.workers, event.sharing) == ("processes", 2, "shared weights")
    assert event.why == "runtime='auto': shared"
    close(made)


def test_ways_are_told_with_what_each_worker_would_have_to_do(advised, make_line, make_rows):
    made, _ = session(make_line)
    made.fit(make_rows(200), epochs=1)
    loads = advised.ways.spread
    assert set(loads) == {2} and len(loads[2]) == 2
    assert advised.ways.shared is None and advised.machine == Machine(cores=2)


def test_a_sharing_or_a_placement_by_hand_stays(advised, make_line, make_rows):
    made, _ = session(make_line, sharing=gt.SharedWeights("all"))
    made.fit(make_rows(200), epochs=1)
    assert isinstance(advised.ways.spread, str) and "is given" in advised.ways.spread
    assert (advised.ways.shared, advised.ways.each, advised.ways.in_all) == (None, False, True)
    placed = gt.Schedule(placement={"first": 1, "second": 0})
    made, _ = session(make_line, schedule=placed)
    made.fit(make_rows(200), epochs=1)
    assert advised.ways.shared == "a placement is given"
    assert advised.ways.spread[2][1] > 0
    assert (made.runtime.name, made.runtime.workers) == ("processes", 2)  # whatever is advised
    close(made)
    made, heard = session(make_line, runtime=gt.Threads(2))
    made.fit(make_rows(200), epochs=1)
    assert (made.runtime.name, made.runtime.workers) == ("threads", 2)
    assert heard.chosen[0].why.startswith("placed by measured costs: worker 0 has '")


def test_a_graph_that_cannot_be_pickled_is_told_as_such(advised, make_rows):
    class Locked(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.lock = threading.Lock()

    graph = gt.Graph(vertex=("label",))
    graph.input("x").through(Locked(3, 4), name="first").loss(gt.cross_entropy, target="label")
    gt.Session(graph, runtime=TWO, max_active=8).fit(make_rows(200), epochs=1)
    assert advised.machine.processes is not None and "lock" in advised.machine.processes


def test_rules_that_forbid_shared_weights_are_told(advised, make_line, make_rows):
    made, _ = session(make_line, rules=gt.Rules(max_staleness=1))
    made.fit(make_rows(200), epochs=1)
    assert advised.ways.shared is not None and "max_staleness" in advised.ways.shared


def test_minibatches_that_are_drained_are_not_shared_out(advised, make_line, make_rows):
    made, _ = session(make_line, schedule=gt.Schedule(drain=True))
    made.fit(make_rows(200), epochs=1)
    assert isinstance(advised.ways.shared, str) and "drain=True" in advised.ways.shared
    assert isinstance(advised.ways.copied, str)
    assert set(advised.ways.spread) == {2}  # parts that are spread see whole minibatches


def test_one_core_measures_nothing(make_line, make_rows):
    made, heard = session(make_line, runtime=gt.Auto(cores=1))
    made.fit(make_rows(50), epochs=1)
    assert (made.runtime.name, made.runtime.workers) == ("threads", 1)
    assert [e.why for e in heard.chosen] == [
        "runtime='auto': one worker, as the machine has one core"
    ]


def test_copies_of_the_model_have_a_worker_each_from_the_first_instance_on(make_line):
    copies = gt.Neighbours(copies=2)
    made, _ = session(make_line, sharing=copies)
    assert made.state.choice is None
    assert (made.runtime.name, made.runtime.workers) == ("processes", 2)
    made, _ = session(make_line, sharing=copies, runtime=gt.Auto(cores=1))
    assert (made.runtime.name, made.runtime.workers) == ("threads", 1)


def test_a_bottleneck_gets_copies_and_a_resumed_run_has_them_without_measuring_again(
    advised, make_line, make_rows, tmp_path
):
    advised.plan = COPIED
    made, _ = session(make_line)
    made.fit(make_rows(200), epochs=1, folder=tmp_path)
    assert set(made.trained_parts) == {"first", "first#1", "second"}
    advised.plan, advised.seen = ONE, None
    again, heard = session(make_line)
    again.load(tmp_path / "latest.safetensors")
    assert set(again.trained_parts) == {"first", "first#1", "second"}
    again.fit(make_rows(200), epochs=2)
    assert advised.seen is None
    assert [e.why[:6] for e in heard.chosen] == ["placed"]


def test_a_checkpoint_that_does_not_fit_leaves_what_was_to_be_chosen(
    advised, make_line, make_rows, tmp_path
):
    advised.plan = COPIED
    made, _ = session(make_line)
    made.fit(make_rows(200), epochs=1, folder=tmp_path)
    other = gt.Graph(vertex=("label",))
    other.input("x").through(nn.Linear(3, 9), name="first").loss(gt.cross_entropy, target="label")
    again = gt.Session(other, runtime=TWO, max_active=8)
    with pytest.raises(gt.CheckpointError):
        again.load(tmp_path / "latest.safetensors")
    assert set(again.trained_parts) == {"first"} and again.parts["first"].copies == 1
    assert again.state.choice.measures
    again.fit(make_rows(30), epochs=1)


def test_what_is_trained_does_not_depend_on_where_it_is_measured(advised, make_line, make_rows):
    """One at a time and spread over processes: to the last bit what one worker trains."""
    advised.plan = SPREAD
    alone, _ = session(make_line, max_active=1, runtime=gt.Threads(1, kernel_threads=1))
    alone.fit(make_rows(120), epochs=1)
    chosen, _ = session(make_line, max_active=1)
    chosen.fit(make_rows(120), epochs=1)
    assert chosen.runtime.name == "processes"
    for a, b in zip(alone.graph.modules(), chosen.graph.modules(), strict=True):
        for x, y in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(x, y)
    close(chosen)


@pytest.mark.parametrize("given", [{"workers": 0}, {"cores": 0}, {"max_staleness": -1.0}])
def test_numbers_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        gt.Auto(**given)


def test_no_more_workers_than_wanted(advised, make_line, make_rows):
    made, _ = session(make_line, runtime=replace(gt.Auto(cores=8), workers=3))
    made.fit(make_rows(200), epochs=1)
    assert advised.most == 3 and set(advised.ways.spread) == {2, 3}
