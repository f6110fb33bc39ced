"""The order of the graph: what feeds comes before what is fed, a loop is one place."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from geartrain.engine.engine import Engine, Settings, make_parts
from geartrain.engine.mailbox import AbstractPolicy, FullestFirst, Sweeps
from geartrain.engine.order import ranks
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nn import Tree, TreeLSTMBranch, TreeLSTMLeaf
from geartrain.parts.rules import Flush, Rules
from geartrain.runtime.simulated import Simulated
from tests.rigs.passes import AT_ONCE, Quiet, one_pass


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def places(made: Graph, lanes: int = 1) -> dict[str, tuple[int, int]]:
    settings = Settings(lanes=lanes > 1)
    wiring = Engine(made, make_parts(made, Rules()), settings, lanes).wiring
    return {wiring.nodes[i].name: at for i, at in ranks(wiring).items() if i in wiring.nodes}


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


def test_the_nodes_of_a_loop_stand_at_one_place():
    at = places(tree())
    loop = {at[n] for n in at if n.startswith("branch")}
    assert len(loop) == 1 and at["leaf"] not in loop


def test_copies_stand_where_their_original_does():
    at = places(tree(), lanes=2)
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


def firings(policy: type[AbstractPolicy], lanes: int) -> int:
    torch.manual_seed(0)
    made = tree()
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.0), update_every=Flush())
    settings = Settings(
        max_active=8 * lanes, ramp=AT_ONCE, policy=lambda worker: policy(), lanes=lanes > 1
    )
    engine, count = Engine(made, make_parts(made, rules), settings, lanes), Count()
    one_pass(made, lines(60), engine=engine, runtime=Simulated(lanes), watch=count)
    return count.firings


def test_sweeps_need_far_fewer_firings_than_the_fullest_first():
    assert firings(Sweeps, 1) < 0.7 * firings(FullestFirst, 1)
    assert firings(Sweeps, 2) < 0.8 * firings(FullestFirst, 2)
