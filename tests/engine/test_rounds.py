"""Loops that data steer have a bound, which names the instance and the loop."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from geartrain.engine.controller import Ramp
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.rounds import Rounds
from geartrain.engine.settings import Settings
from geartrain.errors import DataError, EndlessLoopError, GraphError
from geartrain.frames.instance import Instance
from geartrain.graph.cycles import back_ports
from geartrain.graph.graph import Graph
from geartrain.parts.rules import Flush, Rules
from geartrain.runtime.base import AbstractRuntime, Feeder
from geartrain.runtime.simulated import Simulated
from geartrain.runtime.threads import Threads
from tests.rigs.passes import Quiet

RUNTIMES = {
    "simulated": lambda: Simulated(2, seed=1, jitter=0.5),
    "threads 1": lambda: Threads(1, kernel_threads=1),
    "threads 2": lambda: Threads(2, kernel_threads=1),
}


@pytest.fixture(params=RUNTIMES)
def runtime(request) -> AbstractRuntime:
    return RUNTIMES[request.param]()


def upwards(*modules: nn.Module) -> Graph:
    """Every row goes from its vertex to the parent of that, and so on."""
    torch.manual_seed(0)
    graph = Graph(vertex=("parent",))
    rows = graph.loop(name="rows", run="steps")
    rows.join(graph.input("x"))
    below, done = rows.where(lambda m: m.parent >= 0, name="has a parent")
    for k, module in enumerate(modules):
        below = below.through(module, name=f"cell {k}")
    rows.join(below.move(vertex=lambda m: m.parent, name="up"))
    done.loss(lambda x: x.square().sum(1))
    return graph


def chain_of(n: int, key: object = None) -> Instance:
    """One row at the far end of n vertices, which goes up n - 1 times."""
    return Instance({"x": (torch.ones(1, 2), [n - 1])}, {"parent": np.arange(n) - 1}, key=key)


def cycle(key: object = "line 7") -> Instance:
    return Instance({"x": (torch.ones(1, 2), [0])}, {"parent": np.array([1, 0])}, key=key)


def run(graph, data, runtime=None, train=True, max_active=4, **settings):
    runtime = runtime or Simulated(1)
    made = Settings(max_active=max_active, ramp=Ramp(over=0), **settings)
    parts = make_parts(graph, Rules(optimizer=partial(torch.optim.SGD, lr=0.1)))
    engine = Engine(graph, parts, made, runtime.workers)
    engine.begin(train=train)
    runtime.run(engine, Feeder(iter(data)), Quiet())
    engine.check_empty()
    return engine


@pytest.mark.parametrize("train", [True, False])
def test_a_cycle_in_data_ends_with_the_instance_the_loop_and_what_to_do(runtime, train):
    data = [chain_of(3, "line 6"), cycle("line 7"), chain_of(5, "line 8")]
    with pytest.raises(EndlessLoopError) as caught:
        run(upwards(nn.Linear(2, 2)), data, runtime, train, max_rounds=50)
    told = str(caught.value)
    assert re.search(r"instance 1 \(line 7\) have gone round the loop of", told)
    assert "'has a parent', 'cell 0', 'up'" in told
    assert re.search(r" 5\d times, more than max_rounds=50\.", told)
    assert "Schedule(max_rounds=...)" in told and "its own ancestor" in told


def test_by_itself_the_bound_is_generous_and_grows_with_the_instance():
    graph = upwards(nn.Linear(2, 2))
    engine = run(graph, [chain_of(3)])
    (port,) = engine.controller.rounds.ports
    rounds = Rounds(engine.wiring)
    slots = engine.wiring.arena.admit(engine.controller.packer.pack([chain_of(30)]), 0)
    rounds.admitted(slots)
    rounds.add([(port, slots.repeat(130_000))])
    with pytest.raises(EndlessLoopError, match=r"130,\d+ times, more than the 130,000 that it may"):
        rounds.add([(port, slots)] * 600)


@pytest.mark.parametrize(("most", "times"), [(None, 13_001), (200_000, 13_001), (None, 13_000)])
def test_who_goes_round_often_is_told_of_once_long_before_it_is_refused(most, times, caplog):
    """A tenth of what it may: 100,000, and 1,000 a vertex. Whoever has said how often knows."""
    engine = run(upwards(nn.Linear(2, 2)), [chain_of(3)])
    (port,) = engine.controller.rounds.ports
    rounds = Rounds(engine.wiring, most)
    data = [chain_of(30, "far"), chain_of(2, "near")]
    slots = engine.wiring.arena.admit(engine.controller.packer.pack(data), 0)
    rounds.admitted(slots)
    with caplog.at_level("WARNING", "geartrain.engine"):
        rounds.add([(port, slots[:1].repeat(times))])
        assert len(caplog.records) == (most is None and times > 13_000)
        rounds.add([(port, slots.repeat(20_000))])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (most is None)
    for each in said:
        assert "(far)" in each and "'cell 0'" in each and "Schedule(max_rounds=...)" in each


@pytest.mark.parametrize("n", [2, 17, 300])
def test_just_so_many_rounds_are_allowed_and_few_more_pass(runtime, n):
    graph, data = upwards(nn.Linear(2, 2)), [chain_of(n, k) for k in range(5)]
    assert run(graph, data, runtime, max_rounds=n - 1).controller.finished == 5
    with pytest.raises(EndlessLoopError) as caught:
        run(graph, [cycle()], runtime, max_rounds=n - 1)
    times = int(re.search(r" (\d+) times", str(caught.value))[1])  # type: ignore[index]
    assert n - 1 < times <= max(n, 9 * (n - 1) / 8)


def test_an_instance_answers_for_its_own_rounds_alone():
    """Slots are used again and again; who comes next starts at nothing."""
    data = [chain_of(40, k) for k in range(60)]
    assert run(upwards(nn.Linear(2, 2)), data, max_rounds=39).controller.finished == 60


@pytest.mark.parametrize("n", [64, 65, 150])
def test_rounds_of_any_number_of_instances_in_flight_are_counted(n):
    data = [chain_of(9, k) for k in range(n)]
    engine = run(upwards(nn.Linear(2, 2)), data, max_rounds=8, max_active=n)
    assert engine.controller.finished == n
    with pytest.raises(EndlessLoopError, match=rf"instance {n - 1} \(line 7\)"):
        run(upwards(nn.Linear(2, 2)), [*data[1:], cycle()], max_rounds=8, max_active=n)


def test_who_has_found_an_end_after_all_is_not_refused_later():
    """Counted late, together with rows of others: that instance is none any more."""
    engine = run(upwards(nn.Linear(2, 2)), [chain_of(3)], max_rounds=90)
    (port,) = engine.controller.rounds.ports
    rounds, arena = engine.controller.rounds, engine.wiring.arena
    slots = arena.admit(engine.controller.packer.pack([chain_of(3), chain_of(3)]), 0)
    rounds.admitted(slots)
    rounds.add([(port, slots[:1].repeat(10))] * 9)
    arena.release(slots[:1])
    rounds.add([(port, slots[:1])])  # of a firing that was under way
    rounds.add([(port, slots[1:].repeat(80))])
    with pytest.raises(EndlessLoopError, match=r"instance 1 .* 91 times"):
        rounds.add([(port, slots[1:].repeat(11))])


def test_all_rows_of_an_instance_count_together(runtime):
    many = Instance({"x": (torch.ones(30, 2), np.full(30, 4))}, {"parent": np.arange(5) - 1})
    assert run(upwards(nn.Linear(2, 2)), [many], runtime, max_rounds=120).controller.finished == 1
    with pytest.raises(EndlessLoopError, match=r" \d+ times, more than max_rounds=80"):
        run(upwards(nn.Linear(2, 2)), [many], runtime, max_rounds=80)


def test_a_loop_of_steps_alone_may_be_long_and_has_an_end(runtime):
    """No node is on it, so a row goes round within one firing."""
    assert run(upwards(), [chain_of(5000)], runtime).controller.finished == 1
    with pytest.raises(EndlessLoopError, match=r"instance 0 \(line 7\) .* 'has a parent', 'up'"):
        run(upwards(), [cycle()], runtime, max_rounds=3000)


def test_a_pass_begins_at_nothing():
    graph = upwards(nn.Linear(2, 2))
    parts = make_parts(graph, Rules(update_every=Flush()))
    engine = Engine(graph, parts, Settings(max_rounds=40))
    for _ in range(3):
        engine.begin(train=True)
        Simulated(1).run(engine, Feeder(iter([chain_of(40)])), Quiet())
    assert engine.controller.trained == 3


class Longer(nn.Module):
    """Each row twice as long as it came; what it reads keeps a dry run from seeing that."""

    def forward(self, x: Tensor, column: Tensor) -> Tensor:
        if column.device.type == "meta":
            raise TypeError("needs values: meta")
        return torch.cat([x, x], 1)


def test_a_row_that_grows_in_a_loop_ends_before_the_memory_does():
    """In training a store refuses rows of another shape; without, nobody would."""
    graph = Graph(vertex=("parent",))
    rows = graph.loop(name="rows", run="steps")
    rows.join(graph.input("x"))
    below, done = rows.where(lambda m: m.parent >= 0, name="has a parent")
    longer = below.through(Longer(), read="parent", name="longer")
    rows.join(longer.move(vertex=lambda m: m.parent, name="up"))
    done.loss(lambda x: x.square().sum(1))
    assert run(graph, [chain_of(12)], train=False).controller.finished == 1
    with pytest.raises(EndlessLoopError, match=r"'longer', 'up': one has 134,217,728 bytes, .* 16"):
        run(graph, [cycle()], train=False)


@pytest.mark.parametrize("runtime_of", RUNTIMES)
def test_a_number_of_copies_that_no_machine_could_make_names_its_instance(runtime_of):
    graph = Graph(vertex=("times",))
    copies = graph.input("x").flatmap("copy", count=lambda m: m.times, name="copies")
    copies.loss(lambda x: x.square().sum(1))
    data = [
        Instance({"x": torch.ones(2, 1)}, {"times": np.array([3, n])}, key=f"line {k}")
        for k, n in enumerate((4, 1 << 40))
    ]
    with pytest.raises(
        DataError, match=r"'copies': .*\(line 1\) asks for 1,099,511,627,776 copies"
    ):
        run(graph, data, RUNTIMES[runtime_of]())


def test_a_group_that_no_machine_could_hold_names_its_size():
    graph = Graph(vertex=("many",))
    groups = graph.input("x").group("instance", "many", how="sum", name="all")
    groups.loss(lambda x: x.square().sum(1))
    data = [Instance({"x": torch.ones(2, 1)}, {"many": np.full(2, 1 << 40)})]
    with pytest.raises(GraphError, match=r"'all': a group got size 1,099,511,627,776"):
        run(graph, data)


@given(st.dictionaries(st.tuples(st.integers(1, 7), st.integers(0, 2)), st.integers(1, 7)))
def test_without_the_ports_that_lead_back_no_graph_has_a_cycle(wires):
    readers = {port: (reader, 0) for port, reader in wires.items()}
    back = back_ports(readers)
    left = {(port[0], reader) for port, reader in wires.items() if port not in back}
    nodes = {n for pair in left for n in pair}
    while nodes:
        sources = {n for n in nodes if not any(r == n and s in nodes for s, r in left)}
        assert sources, f"a cycle is left in {left}"
        nodes -= sources


def test_graphs_without_loops_count_nothing():
    graph = Graph()
    graph.input("x").through(nn.Linear(2, 2)).loss(lambda x: x.square().sum(1))
    assert run(graph, [Instance({"x": torch.ones(2, 2)})]).controller.rounds.ports == frozenset()
