"""How many bundles one firing takes: about what an update wants, forward too."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.mailbox import AbstractPolicy, FullestFirst, RandomOrder, Sweeps
from geartrain.engine.parts import make_parts
from geartrain.engine.portion import UpdatesWorth
from geartrain.engine.settings import Settings
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.inside import Inside
from geartrain.nodes.loop.node import LoopNode
from geartrain.parts.rules import Flush, Instances, Messages, Rows, Rules, Trigger
from geartrain.runtime.simulated import Simulated
from geartrain.sharing.shared_weights import SharedWeights
from tests.rigs.passes import AT_ONCE, Quiet, one_pass
from tests.rigs.products import in_pairs

ROWS = 60  # of every bundle


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def graph(hidden: int = 80) -> Graph:
    made = Graph(run="steps")  # else one node computes all of it
    x = made.input("x", bundle=True).through(torch.sin, name="sine")
    h = x.through(nn.Linear(2, hidden), name="lower").through(torch.tanh, name="curve")
    h.through(nn.Linear(hidden, hidden), name="upper").loss(squares)
    return made


def instances(n: int) -> list[Instance]:
    generator = torch.Generator().manual_seed(0)
    return [Instance({"x": torch.randn(ROWS, 2, generator=generator)}) for _ in range(n)]


class Turned(nn.Module):
    """Looks inside bundles, so autograd's graph of a firing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Linear(2, 1100), nn.Linear(1100, 2))  # more than a light part

    def forward(self, h: Tensor, inside: Inside) -> Tensor:
        return torch.tanh(self.map(h)) / inside.lengths[inside.segment, None]


class Firings(Quiet):
    def __init__(self) -> None:
        self.seen: list[Firing] = []

    def fired(self, worker, firing, start_s, end_s):
        self.seen.append(firing)

    def most(self, node: str, *, forward: bool) -> int:
        return max(f.rows for f in self.seen if f.node == node and f.forward == forward)


def run(
    trigger: Trigger,
    policy: AbstractPolicy | None = None,
    hidden: int = 80,
    workers: int = 1,
    n: int = 300,
) -> tuple[Firings, Engine]:
    torch.manual_seed(0)
    made, watch = graph(hidden), Firings()
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=1e-4), update_every=trigger)
    settings = Settings(max_active=128, ramp=AT_ONCE, policy=lambda worker: policy or Sweeps())
    parts = make_parts(made, rules)
    sharing = SharedWeights().make(made, parts, workers)
    engine = Engine(made, parts, settings, workers, sharing=sharing)
    one_pass(made, instances(n), engine=engine, runtime=Simulated(workers), watch=watch)
    return watch, engine


@pytest.mark.parametrize("trigger", [Instances(20), Rows(20 * ROWS)])
def test_a_firing_takes_what_an_update_wants_and_little_grows_old(trigger):
    watch, engine = run(trigger)
    for node in ("sine", "lower", "curve"):
        assert watch.most(node, forward=True) == 20
    assert watch.most("upper", forward=True) == 20  # its loss is inside
    assert watch.most("lower", forward=False) == 20
    for part in engine.parts.values():
        assert part.version == 300 // 20
        assert len(part.histogram()) <= 2  # none older than one version


def test_a_firing_that_only_computes_takes_enough_rows_to_be_worth_it():
    watch, _ = run(Instances(2))
    assert watch.most("lower", forward=True) == -(-512 // ROWS)
    assert watch.most("lower", forward=False) == 4 * 2  # told apart, four updates


@pytest.mark.parametrize(("steppers", "updates"), [(1, 4), (2, 2), (3, 2), (4, 2), (5, 1), (9, 1)])
def test_workers_that_each_gather_updates_take_as_many_together_as_one_does(steppers, updates):
    """Else gradients would be so many times older; but two each, as firings of one are small."""
    _, engine = run(Instances(2))
    worker = engine.workers[0]
    node = next(n for n in engine.wiring.nodes.values() if n.part_names == ("upper",))
    part = worker.parts["upper"]
    part.steppers = steppers
    portion = UpdatesWorth()
    assert portion.together(node, 1.0, [part]) == updates
    assert portion.together(node, 1e6, [part]) == 1
    assert UpdatesWorth(updates_apart=1).together(node, 1.0, [part]) == 1


def test_where_rows_cost_next_to_nothing_it_takes_those_of_some_updates():
    watch, _ = run(Instances(4), hidden=5)
    assert watch.most("lower", forward=True) == 4 * 4
    assert watch.most("lower", forward=False) == 4 * 4


@pytest.mark.parametrize("n", [1, ROWS, 3 * ROWS + 1])
def test_an_update_of_rows_takes_as_many_bundles_as_have_them(n):
    """No bundle is cut: what the last one has too much counts for the next update."""
    watch, engine = run(Rows(n), n=120)
    assert watch.most("lower", forward=False) == -(-n // ROWS)
    assert {part.version for part in engine.parts.values()} == {min(120, 120 * ROWS // n)}


@pytest.mark.parametrize("trigger", [Messages(7), Instances(7), Rows(7 * ROWS)])
def test_an_update_has_what_it_wants_whatever_firings_take(trigger):
    """Firings of any size up to the portion; every update has all of seven bundles, and no more.

    Those of instances may take what several updates want, the others what one still lacks.
    """
    watch, _ = run(trigger, RandomOrder(0), hidden=5)
    firings = [f for f in watch.seen if f.node == "lower" and not f.forward]
    filled, pieces, most = 0, 0, 4 * 7 if isinstance(trigger, Instances) else 7
    for firing in firings:
        filled += firing.rows
        assert filled <= most
        taken = [s for s in firing.steps if s.part == "lower"]
        assert [s.rows for s in taken] == [7 * ROWS] * (filled // 7)
        filled %= 7
        pieces += filled > 0
    assert filled == 300 % 7
    assert pieces > 10  # updates came about in pieces


def test_what_waits_for_a_flush_goes_together():
    watch, _ = run(Flush())
    assert watch.most("lower", forward=True) == 128


@in_pairs(
    trigger=[Instances(7), Rows(100), Messages(3), Flush()],
    policy={"fullest": FullestFirst(), "random": RandomOrder(3), "sweeps": Sweeps(enough=4)},
    workers=[1, 3],
)
def test_every_policy_brings_all_of_them_through(trigger, policy, workers):
    watch, engine = run(trigger, policy, workers=workers, n=150)  # more than are in flight
    rows = sum(f.rows for f in watch.seen if f.node.startswith("lower") and not f.forward)
    assert rows == 150
    for part in engine.parts.values():
        assert np.sum(part.histogram()) == 150 * ROWS


def test_a_loop_that_keeps_graphs_takes_what_one_update_wants_and_nothing_runs_twice():
    """In flight are four updates; those of one go in together, and come back together."""
    made = Graph()
    state = made.loop(name="state")
    state.join(made.input("x", bundle=True, turn=0))
    more, done = (
        state.through(Turned(), name="turned", inside=True)
        .move(turn=lambda m: m.turn + 1)
        .where(lambda m: m.turn < 1 + m.instance % 3)
    )
    state.join(more)
    done.loss(squares)
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=1e-4), update_every=Instances(16))
    engine = Engine(made, make_parts(made, rules), Settings(max_active=64, ramp=AT_ONCE), 1)
    watch = Firings()
    one_pass(made, instances(96), engine=engine, runtime=Simulated(1), watch=watch)
    assert watch.most("state", forward=True) == 16
    (loop,) = (n for n in engine.wiring.nodes.values() if isinstance(n, LoopNode))
    assert loop.taping.used == 96 / 16
