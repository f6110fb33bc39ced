"""Loops that run whole and never end are told at once, those that are merely long go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.engine.schedule import Schedule
from geartrain.errors import EndlessLoopError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loop import planner
from geartrain.nodes.loop.charts import Chart
from geartrain.nodes.loop.repeats import LONG_AFTER, Repeats
from geartrain.parts.rules import Rules
from geartrain.runtime.simulated import Simulated
from geartrain.train.session import Session
from tests.rigs.passes import accumulate


@pytest.fixture(params=["in C", "turn by turn"])
def soon(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How a loop is planned; and rounds after which a small one is told."""
    if request.param == "in C":
        request.getfixturevalue("needs_kernels")
        monkeypatch.setattr(planner.Planner, "_look_for_an_end", lambda *_: None)
        return 1100
    monkeypatch.setattr(Chart, "_made", lambda *_: None)
    return LONG_AFTER + 600


def tree() -> Graph:
    torch.manual_seed(0)
    graph = Graph(vertex=("parent", "siblings"))
    nodes = graph.loop(name="nodes", run="whole")
    nodes.join(graph.input("x"))
    nodes.through(nn.Linear(2, 2), name="out").loss(lambda x: x.square().sum(1))
    up, root = nodes.where(lambda m: m.parent >= 0)
    up = up.group(by={"vertex": lambda m: m.parent}, size="siblings", how="sum")
    nodes.join(up.through(nn.Linear(2, 2), name="branch"))
    root.stop()
    return graph


def walk(loops: int = 1, behind: int = 0) -> Graph:
    """From vertex to parent, and all over again from where rows began; modules behind all that."""
    torch.manual_seed(0)
    graph = Graph(vertex=("parent",))
    rows = graph.input("x")
    for k in range(loops):
        steps = graph.loop(name=f"steps {k}", run="whole")
        steps.join(rows)
        more, rows = steps.through(nn.Linear(2, 2), name=f"cell {k}").where(lambda m: m.parent >= 0)
        steps.join(more.move(vertex=lambda m: m.parent))
        rows = rows.move(vertex=lambda m: m.size - 1)
    for k in range(behind):
        rows = rows.through(nn.Linear(2, 2), name=f"behind {k}").move(vertex=lambda m: m.vertex)
    rows.loss(lambda x: x.square().sum(1))
    return graph


def bush(*parent: int, siblings: tuple[int, ...] = (3, 3, 3, 1, 1), key: str) -> Instance:
    columns = {"parent": np.array(parent), "siblings": np.array(siblings)}
    return Instance({"x": (torch.ones(3, 2), [0, 1, 2])}, columns, key=key)


def way(*parent: int, key: str) -> Instance:
    return Instance({"x": (torch.ones(1, 2), [len(parent) - 1])}, {"parent": parent}, key=key)


def line(n: int) -> Instance:
    return way(*range(-1, n - 1), key=f"line of {n}")


def told(graph: Graph, data: list[Instance]) -> tuple[str, int]:
    """What is said, and how often rows have gone round."""
    with pytest.raises(EndlessLoopError) as caught:
        accumulate(graph, data)
    said = str(caught.value)
    times = re.search(r"gone round the loop of .* ([\d,]+) times, and come again and again", said)
    assert times is not None, said
    return said, int(times[1].replace(",", ""))


@pytest.mark.parametrize(
    "loop",
    [
        bush(3, 3, 3, 4, 3, key="wrong"),
        bush(3, 3, 3, 4, 4, key="wrong"),
        bush(3, 3, 3, 3, -1, key="wrong", siblings=(3, 3, 3, 1, 1)),
    ],
    ids=["two are each other's", "the root is its own", "one is its own"],
)
def test_a_tree_that_is_its_own_ancestor_is_told_at_once(loop, soon):
    """What waits at a module behind the loop grows meanwhile."""
    said, times = told(tree(), [bush(3, 3, 3, 4, -1, key="right"), loop])
    assert "rows of instance 1 (wrong) have" in said and "'branch'" in said
    assert "its own ancestor" in said and "Schedule(max_rounds=...)" in said
    assert times < soon


@pytest.mark.usefixtures("soon")
def test_who_goes_round_is_told_when_long_lists_have_ended():
    said, times = told(walk(), [line(1500), way(1, 2, 0, key="wrong"), line(30)])
    assert "instance 1 (wrong)" in said and times < 2 * LONG_AFTER


@pytest.mark.usefixtures("soon")
def test_long_lists_are_none_without_end_nor_are_loops_one_after_the_other(monkeypatch):
    monkeypatch.setattr(planner, "LONG_AFTER", 16)
    some = accumulate(walk(), [line(1100), line(2500)])
    assert some.gradients
    assert accumulate(walk(2), [line(1100), line(700), line(1)]).gradients


@pytest.mark.usefixtures("soon")
def test_loops_that_have_ended_while_others_go_on_behind_them_are_not_without_end(monkeypatch):
    """Nothing waits in them from one turn to the next, and nothing goes round."""
    monkeypatch.setattr(planner, "LONG_AFTER", 16)
    graph = walk(behind=5)
    for n in range(1018, 1027):
        assert accumulate(graph, [line(n)]).gradients


@pytest.mark.usefixtures("soon")
def test_a_cycle_longer_than_what_is_looked_through_at_first_is_told():
    said, _ = told(walk(), [way(*range(1, 1300), 0, key="wrong")])
    assert "instance 0 (wrong)" in said


def test_by_turns_a_user_who_says_how_often_is_believed(monkeypatch):
    """A function may draw numbers: it has an end that nothing of the columns tells."""
    monkeypatch.setattr(Chart, "_made", lambda *_: None)
    session = Session(
        walk(),
        rules=Rules(optimizer=partial(torch.optim.SGD, lr=0.1)),
        runtime=Simulated(1),
        schedule=Schedule(max_rounds=7000),
    )
    with pytest.raises(EndlessLoopError, match=r" 7,\d+ times, more than max_rounds=7,000"):
        session.fit([way(1, 2, 0, key="wrong")], epochs=1)


def looks(turns: Iterator[tuple[int, int]]) -> bool:
    """Whether turns are without end, of which each has a vertex, and so many rounds before it."""
    repeats = Repeats()
    for vertex, rounds in turns:
        repeats.turns += 1
        if repeats.look([[], [np.array([[0], [vertex]])]], rounds):
            return True
    return False


def test_what_comes_again_now_and_then_or_without_going_round_has_an_end():
    draw = np.random.default_rng(0).integers(0, 4, 9000)
    assert not looks((int(v), k) for k, v in enumerate(draw))
    assert not looks((7, 0) for _ in range(9000))
    assert not looks((k, k) for k in range(9000))
    assert looks((k % 5, k) for k in range(3000))
    assert not looks((k % 5 if k % 600 else 5, k) for k in range(500))
