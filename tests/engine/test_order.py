"""The order of the graph: what feeds comes before what is fed, a loop is a stretch of its own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from geartrain.engine import order
from geartrain.engine.engine import Engine
from geartrain.engine.mailbox import AbstractPolicy, FullestFirst, Sweeps
from geartrain.engine.order import Standing, standings
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nn import Tree, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.parts.rules import Flush, Rules
from geartrain.parts.triggers import Rows as OfRows
from geartrain.runtime.simulated import Simulated
from geartrain.sharing.shared_weights import SharedWeights
from tests.rigs.passes import AT_ONCE, Quiet, one_pass


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def standing(made: Graph, workers: int = 1) -> dict[str, tuple[Standing, Standing]]:
    parts = make_parts(made, Rules())
    sharing = SharedWeights().make(made, parts, workers)
    wiring = Engine(made, parts, Settings(), workers, sharing=sharing).wiring
    return {wiring.nodes[i].name: at for i, at in standings(wiring).items() if i in wiring.nodes}


def places(made: Graph, workers: int = 1) -> dict[str, tuple[int, int]]:
    return {name: (a.place, b.place) for name, (a, b) in standing(made, workers).items()}


def tree() -> Graph:
    made = Graph(vertex=("parent", "slot"))
    leaves = made.input("word").through(TreeLSTMLeaf(3, 4, vocabulary=5), name="leaf")
    nodes = Tree(TreeLSTMBranch(4), name="branch")(leaves)
    nodes.through(torch.nn.Linear(4, 2), name="readout", take=0).loss(squares)
    return made


def test_rows_go_up_and_answers_come_back_in_the_opposite_order():
    at = places(tree())
    there = [at[n][0] for n in ("leaf", "branch", "readout")]  # the loss is computed in it
    back = [at[n][1] for n in ("readout", "branch", "leaf")]
    assert there == sorted(set(there)) and back == sorted(set(back))
    assert max(there) < min(back)


def test_the_nodes_of_a_loop_stand_in_a_row_and_know_it_there_and_back():
    at = standing(tree())
    inside = [name for name in at if name.startswith("branch")]
    assert len(inside) > 1
    for way in (0, 1):
        (loop,) = {at[name][way].loops for name in inside}
        ((first, last),) = loop
        found = {name for name in at if first <= at[name][way].place <= last}
        assert found == set(inside) and at["leaf"][way].loops == ()


def nested() -> Graph:
    """Rounds of an outer loop, in each of which rows go round an inner one."""
    made = Graph(value=("turns",))
    outer = made.loop(name="outer", run="steps")
    outer.join(made.input("x", turn=0, step=0))
    inner = made.loop(name="inner", run="steps")
    inner.join(outer.through(torch.nn.Linear(2, 2), name="before"))
    inside = inner.through(torch.nn.Linear(2, 2), name="inside").move(step=lambda m: m.step + 1)
    left, stay = inside.where(lambda m: m.step >= m.turns)
    inner.join(stay)
    behind = left.through(torch.nn.Linear(2, 2), name="behind").move(
        turn=lambda m: m.turn + 1, step=0
    )
    done, again = behind.where(lambda m: m.turn >= m.turns)
    outer.join(again)
    done.through(torch.nn.Linear(2, 2), name="readout", keep="inputs").loss(squares)
    return made


def test_a_loop_in_a_loop_is_a_stretch_of_the_outer_ones():
    at = standing(nested())
    order = ["before", "inside", "behind", "readout"]
    assert sorted(order, key=lambda name: at[name][0].place) == order
    assert sorted(order, key=lambda name: -at[name][1].place) == order
    for way in (0, 1):
        within = {name: at[name][way].loops for name in order}
        assert [len(within[name]) for name in order] == [1, 2, 1, 0]
        (inner, outer) = within["inside"]
        assert within["before"] == within["behind"] == (outer,)
        assert outer[0] <= inner[0] <= inner[1] <= outer[1] and inner != outer


def test_copies_stand_where_their_original_does():
    at = places(tree(), workers=2)
    assert at["branch#1"] == at["branch"] and at["leaf#1"] == at["leaf"]


def test_branches_that_meet_stand_before_their_meeting():
    made = Graph()
    x = made.input("x")
    one = x.through(torch.nn.Linear(2, 2), name="one")
    other = x.through(torch.sin, name="other").through(torch.cos, name="behind")
    made.concat(one, other, on="vertex", name="both").loss(squares)
    at = places(made)
    assert at["other"][0] < at["behind"][0] < at["both"][0] < at["loss"][0]
    assert at["one"][0] < at["both"][0]


def lines(n: int) -> list[Instance]:
    """Trees that are lines, of two to seven leaves: each inner vertex has a leaf and a vertex."""
    found = []
    for i in range(n):
        leaves = 2 + i % 6
        inner = np.arange(leaves, 2 * leaves - 1)
        parent = np.concatenate([inner[:1], inner, inner[1:], [-1]])
        slot = np.concatenate([[0], np.ones(leaves - 1), np.zeros(leaves - 1)]).astype(np.int64)
        word = (torch.arange(leaves) % 5, np.arange(leaves))
        found.append(Instance({"word": word}, vertex={"parent": parent, "slot": slot}))
    return found


class Count(Quiet):
    def __init__(self) -> None:
        self.firings = 0

    def fired(self, worker, firing, start_s, end_s):
        self.firings += 1


def firings(policy: type[AbstractPolicy], workers: int) -> int:
    torch.manual_seed(0)
    made = tree()
    rules = Rules(
        optimizer=partial(torch.optim.SGD, lr=0.0), update_every=OfRows(10**6)
    )  # so that loops go by steps
    settings = Settings(max_active=8 * workers, ramp=AT_ONCE, policy=lambda worker: policy())
    parts = make_parts(made, rules)
    sharing = SharedWeights().make(made, parts, workers)
    engine, count = Engine(made, parts, settings, workers, sharing=sharing), Count()
    one_pass(made, lines(60), engine=engine, runtime=Simulated(workers), watch=count)
    return count.firings


def test_sweeps_need_far_fewer_firings_than_the_fullest_first():
    assert firings(Sweeps, 1) < 0.7 * firings(FullestFirst, 1)
    assert firings(Sweeps, 2) < 0.8 * firings(FullestFirst, 2)


def routed(n: int) -> Graph:
    """Rows that go round a loop; a route parts them in each round, by what they hold."""
    made = Graph(value=("turns",))
    rounds = made.loop(name="rounds", run="steps")
    rounds.join(made.input("x", step=0))
    ways = rounds.route(lambda m: (m.payload[0][:, 0] > 0).long(), n)
    said = [way.through(torch.nn.Linear(2, 2), name=f"way {k}") for k, way in enumerate(ways)]
    met = made.merge(*said).through(torch.nn.Linear(2, 2), name="met")
    done, more = met.move(step=lambda m: m.step + 1).where(lambda m: m.step >= m.turns)
    rounds.join(more)
    done.loss(squares)
    return made


class Rows(Quiet):
    """How many rows each firing of a node had, there and back."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.there: list[int] = []
        self.back: list[int] = []

    def fired(self, worker, firing, start_s, end_s):
        if firing.node == self.node:
            (self.there if firing.forward else self.back).append(firing.rows)


def test_rows_that_a_route_has_parted_in_a_loop_are_together_again_where_they_meet():
    torch.manual_seed(0)
    made, rows = routed(2), Rows("met")
    data = [Instance({"x": torch.randn(1, 2)}, value={"turns": 3}, key=i) for i in range(32)]
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.0), update_every=Flush())
    settings = Settings(max_active=16, ramp=AT_ONCE)
    engine = Engine(made, make_parts(made, rules), settings)
    one_pass(made, data, engine=engine, runtime=Simulated(), watch=rows)
    assert rows.there == rows.back == [16] * 6


def test_a_firing_leaves_no_few_rows_behind_to_make_their_number_a_round_one():
    """A hundred are one firing, there and back; of more than one may take, some stay anyway."""
    for most, want in ((4096, [100]), (80, [64, 36])):
        torch.manual_seed(0)
        made, rows = Graph(run="steps"), Rows("map")
        made.input("x").through(torch.nn.Linear(2, 2), name="map").through(torch.sin).loss(squares)
        rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.0), update_every=Flush())
        settings = Settings(max_active=100, ramp=AT_ONCE, max_rows=most)
        engine = Engine(made, make_parts(made, rules), settings)
        data = [Instance({"x": torch.randn(1, 2)}, key=i) for i in range(100)]
        one_pass(made, data, engine=engine, runtime=Simulated(), watch=rows)
        assert rows.there == want and rows.back == want


def test_engines_of_one_graph_find_their_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tree()
    first = standing(made)
    monkeypatch.setattr(order, "components", None)  # it cannot be found again
    assert standing(made) == first
