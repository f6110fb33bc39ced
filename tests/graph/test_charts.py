"""Plans that C makes of tables are those that the planner makes, row for row; what is not told by
where a row is alone is for the planner."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.engine import rounds
from geartrain.errors import EndlessLoopError, GraphError, StuckError
from geartrain.frames.instance import Instance
from geartrain.frames.message import IntArray
from geartrain.graph.graph import Graph
from geartrain.native import pool
from geartrain.native.plans import PlannedRows
from geartrain.nodes.loop import charts
from geartrain.nodes.loop.charts import Chart
from geartrain.nodes.loop.numbers import Numbers
from geartrain.nodes.loop.plan import LoopPlan, RowNumbers, joined
from geartrain.nodes.loop.planner import Planner
from tests.rigs.passes import Order, accumulate

KINDS = 4
COLUMNS = ("parent", "slot", "siblings", "pkind")


def trees(seed: int, count: int = 12) -> list[Instance]:
    """A vertex of kind 1 has two children, of another up to four; leaves bring a row."""
    draw, found = np.random.default_rng(seed), []
    torch.manual_seed(seed)
    for _ in range(count):
        parent, kind = [-1], [int(draw.integers(KINDS))]
        for v in range(40):
            if v == len(parent) or (v and len(parent) > 15):
                break
            many = 2 if kind[v] == 1 else int(draw.integers(0 if v else 1, 5))
            parent += [v] * many
            kind += draw.integers(0, KINDS, many).tolist()
        parents, kinds = np.array(parent), np.array(kind)
        children = np.bincount(parents[1:], minlength=parents.size)
        kinds[(kinds == 1) & (children != 2)] = 0
        columns = {
            "parent": parents,
            "slot": np.array([(parents[:v] == parents[v]).sum() for v in range(parents.size)]),
            "siblings": np.where(parents < 0, 1, children[parents]),
            "pkind": np.where(parents < 0, -1, kinds[parents]),
        }
        leaves = np.flatnonzero(children == 0)
        rows = torch.randn(leaves.size, 2, dtype=torch.float64)
        found.append(Instance({"x": (rows, leaves)}, columns))
    return found


def linear(n: int = 2) -> nn.Module:
    return nn.Linear(n, 2).double()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = linear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x.flatten(1))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = linear()

    def forward(self, x: torch.Tensor, inside) -> torch.Tensor:
        zeros = x.new_zeros(len(inside.lengths), 2)
        return zeros.index_add(0, inside.segment, self.map(x).tanh())


class Each(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = linear()

    def forward(self, x: torch.Tensor, inside) -> torch.Tensor:
        return self.map(x) * inside.lengths[inside.segment, None]


def typed(
    size: object = "siblings", below: Callable[[Any], object] = lambda m: m.slot % 2
) -> Graph:
    """Routes, groups of all kinds, a column that rows take with them, modules of one kin."""
    torch.manual_seed(3)
    graph = Graph(vertex=COLUMNS)
    nodes = graph.loop(name="nodes", run="whole")
    nodes.join(graph.input("x", seen=0).through(linear(), name="leaf"))
    one, two = nodes.route(below, 2)
    both = graph.merge(one.through(linear(), name="one"), two.through(linear(), name="two"))
    inner, root = both.where(lambda m: m.parent >= 0)
    root.through(linear(), name="out").loss(lambda x: x.square().sum(1))
    inner = inner.move(seen=lambda m: m.siblings)
    none, pair, whole, most = inner.route(lambda m: m.pkind, KINDS)
    up = {"vertex": lambda m: m.parent}
    pairs = pair.group(by=up, size=2, order="slot")
    nodes.join(none.group(by=up, size=size, how="sum").through(linear(), name="sum"))
    nodes.join(pairs.through(Two(), name="pair"))
    bundles = whole.group(by=up, size="seen", how="bundle")
    nodes.join(bundles.through(Whole(), name="whole", inside=True, pool=True))
    most = most.move(vertex=lambda m: m.parent).group(by="vertex", size="seen", how="max")
    nodes.join(most.through(linear(), name="most"))
    return graph


def walks(again: Callable[[Any], object]) -> Graph:
    """From vertex to vertex."""
    graph = Graph(vertex=COLUMNS)
    steps = graph.loop(name="steps", run="whole")
    steps.join(graph.input("x"))
    more, end = steps.through(linear(), name="cell").where(again)
    end.loss(lambda x: x.square().sum(1))
    steps.join(more.move(vertex=lambda m: (m.vertex + 1) % m.size))
    return graph


def alike(some: list[RowNumbers], others: list[RowNumbers]) -> bool:
    if not some or not others:
        return not some and not others
    one, other = joined(some), joined(others)
    same = one.numbers.tolist() == other.numbers.tolist()
    return same and one.state.tolist() == other.state.tolist()


def assert_same_plans(plan: LoopPlan, other: LoopPlan) -> None:
    for mine, its in zip(plan.calls, other.calls, strict=True):
        assert mine.stage is its.stage and mine.first == its.first
        assert alike([mine.rows], [its.rows])
        assert (mine.lengths is None) == (its.lengths is None)
        assert mine.lengths is None or mine.lengths.tolist() == its.lengths.tolist()
        one, two = mine.together, its.together
        assert (one is None) == (two is None)
        if one is not None:
            assert one.number == two.number and one.first == two.first and one.sizes == two.sizes
            assert list(one.stages) == list(two.stages) and alike([one.rows], [two.rows])
    for some, others in zip(plan.exits + plan.judged, other.exits + other.judged, strict=True):
        assert alike(some, others)
    assert plan.numbers.counts == other.numbers.counts
    for number, held in plan.numbers._grouped.items():
        grouped = other.numbers._grouped[number]
        assert [x.values.tolist() for x in held] == [x.values.tolist() for x in grouped]


def times(passed: list[tuple[tuple[int, int], IntArray]]) -> Counter[tuple[tuple[int, int], int]]:
    return Counter((port, slot) for port, slots in passed for slot in slots.tolist())


@pytest.fixture
def both(needs_kernels, monkeypatch) -> Iterator[Counter[str]]:
    """Every plan is made twice; how many by C, how many not, and calls that go together."""
    found, before = Counter[str](), Planner.finish

    def finish(self: Planner, plan: LoopPlan) -> None:
        stages, watch = self._stages, self.watch
        came = [(stage, list(stage.waiting[0]), stage.sent) for stage in stages]
        other = LoopPlan(copy.deepcopy(plan.numbers), list(plan.entered), plan.parts)
        other.exits, other.judged = [[] for _ in plan.exits], [[] for _ in plan.judged]
        passed = self._charted(plan)
        found["refused" if passed is None else "made"] += 1
        if passed is None:
            before(self, plan)
            return
        assert not any(stage.waiting[0] for stage in stages)
        found["together"] += sum(called.together is not None for called in plan.calls)
        for stage, rows, sent in came:
            stage.waiting[0], stage.sent = rows, sent
        chart, self._chart, self.watch = self._chart, None, None
        before(self, other)
        self._chart, self.watch = chart, watch
        assert_same_plans(plan, other)
        assert times(passed) == times(self._passed)

    monkeypatch.setattr(Planner, "finish", finish)
    yield found


@pytest.mark.parametrize("seed", range(3))
def test_what_c_plans_is_what_the_planner_plans(seed, both):
    outcome = accumulate(typed(), trees(seed))
    assert both["made"] and not both["refused"] and both["together"]
    assert outcome.gradients


def test_many_rows_are_planned_where_there_was_no_room_at_first(both):
    graph = walks(lambda m: m.vertex + 1 < m.size)
    accumulate(graph, trees(7, 60))
    assert both["made"] and not both["refused"]


def test_what_c_reckons_with_is_lent_once_and_what_it_says_has_no_more_room_than_it_takes(
    both, monkeypatch
):
    """It lies where rows of a turn will, and none of it is C's own in a later plan."""
    asked: list[list[int]] = []
    found: list[int] = []
    make = PlannedRows.make

    def made(self: PlannedRows, *given: Any) -> Any:
        room, before = self._between, pool.shared.nbytes()
        plan = make(self, *given)
        assert plan is not None
        words = plan[1]
        assert pool.shared.nbytes() - before <= words.nbytes + 64
        found.append(words.size)
        asked.append([room, self._between])
        last = plan[0][-1]
        assert last[4] < words.size <= self._words
        return plan

    monkeypatch.setattr(PlannedRows, "make", made)
    accumulate(walks(lambda m: m.vertex + 1 < m.size), trees(7, 60) * 4, Order(max_active=60))
    assert len(asked) >= 4 and asked[0][0] < asked[0][1]
    assert [room == more for room, more in asked[1:]].count(True) >= len(asked) - 2


def strict(m: Any) -> object:
    """A function that says nothing of a root, which never comes."""
    assert (m.parent >= 0).all()
    return m.siblings


@pytest.mark.parametrize(
    "size", [lambda m: m.seen, strict, lambda m: m.siblings // (m.parent >= 0)]
)
def test_what_functions_do_not_say_of_every_vertex_is_for_the_planner(size, both):
    found = accumulate(typed(size=size), trees(0)).gradients
    assert both["refused"] and not both["made"]
    for name, gradient in accumulate(typed(), trees(0)).gradients.items():
        assert torch.equal(found[name], gradient)
    assert both["made"]


def test_what_functions_say_by_chance_is_for_the_planner(both):
    draw = np.random.default_rng(5)
    accumulate(typed(below=lambda m: (draw.random(len(m)) < 0.02) + 0 * m.slot), trees(0, 60))
    assert both["refused"] and not both["made"]


def test_functions_are_asked_twice_until_they_are_believed(both):
    asked: list[int] = []
    graph = typed(below=lambda m: asked.append(len(m)) or m.slot % 2)
    many = trees(0, 300)
    accumulate(graph, many, Order(max_active=150))
    assert both["made"] and not both["refused"]
    vertices = sum(len(one.vertex["parent"]) for one in many[:150])
    assert asked.count(vertices) == 2 and vertices > charts._ASKED_TWICE


@pytest.mark.parametrize("below", [lambda m: (m.payload[0][:, 0] > 0).long(), lambda m: m.seen % 2])
def test_functions_that_read_what_rows_hold_are_for_the_planner(below, both):
    accumulate(typed(below=below), trees(0))
    assert both["refused"] and not both["made"]


def test_rows_that_stay_bundles_are_for_the_planner(both):
    torch.manual_seed(3)
    graph = Graph(vertex=COLUMNS)
    nodes = graph.loop(name="nodes", run="whole")
    nodes.join(graph.input("x"))
    inner, root = nodes.through(linear(), name="cell").where(lambda m: m.parent >= 0)
    root.loss(lambda x: x.square().sum(1))
    up = {"vertex": lambda m: m.parent}
    bundles = inner.group(by=up, size="siblings", how="bundle")
    each = bundles.through(Each(), name="each", inside=True)
    nodes.join(each.through(Whole(), name="whole", inside=True, pool=True))
    assert accumulate(graph, trees(0)).gradients
    assert both["refused"] and not both["made"]


def test_a_chart_that_refuses_again_and_again_is_not_asked_any_more(needs_kernels, monkeypatch):
    asked, planners, begin = [], [], Planner.begin
    monkeypatch.setattr(
        Planner, "begin", lambda self, *came: planners.append(self) or begin(self, *came)
    )
    accumulate(typed(), trees(0))
    chart = planners[0]._chart
    answers = [None, None, None, [], *[None] * 9]
    monkeypatch.setattr(Chart, "_made", lambda *_: asked.append(1) or answers[len(asked) - 1])
    assert [chart.plan(LoopPlan(Numbers(1))) for _ in answers] == [*answers[:4], *[None] * 9]
    assert len(asked) == 4 + charts._IN_VAIN


def test_who_goes_round_without_end_is_told(monkeypatch):
    monkeypatch.setattr(rounds, "ROUNDS", 1000)
    monkeypatch.setattr(rounds, "ROUNDS_EACH", 0)
    with pytest.raises(EndlessLoopError, match="rows of instance 0 have gone round the loop of"):
        accumulate(walks(lambda m: m.vertex >= 0), trees(0, 2))


@pytest.mark.parametrize("run", ["whole", "steps"])
@pytest.mark.parametrize("at", [0, 1], ids=["in one call", "in two"])
def test_members_that_say_different_sizes_are_refused_however_a_loop_runs(run, at):
    """Two leaves, or a leaf and a vertex that comes a turn later, below one root."""
    graph = Graph(vertex=("parent", "many"))
    nodes = graph.loop(name="nodes", run=run)
    nodes.join(graph.input("x"))
    inner, root = nodes.through(linear(), name="cell").where(lambda m: m.parent >= 0)
    root.loss(lambda x: x.square().sum(1))
    up = {"vertex": lambda m: m.parent}
    nodes.join(inner.group(by=up, size="many", how="sum", name="children"))
    parents, many = [([-1, 0, 0], [0, 2, 3]), ([-1, 0, 0, 2], [0, 2, 3, 1])][at]
    rows = torch.ones(2, 2, dtype=torch.float64), [1, len(parents) - 1]
    torn = Instance({"x": rows}, {"parent": parents, "many": many}, key="torn")
    told = (
        r"'children': members of instance 0 \(torn\), vertex=0 say different sizes of their group"
    )
    with pytest.raises(GraphError, match=f"{told}: the first 2, another 3; let 'size' be"):
        accumulate(graph, [torn])


def test_members_that_never_come_and_vertices_that_there_are_not_are_told_by_the_planner():
    with pytest.raises(StuckError, match="waits for members"):
        accumulate(typed(size=lambda m: m.siblings + (m.parent == 0)), trees(1))
    graph = Graph(vertex=COLUMNS)
    steps = graph.loop(name="steps", run="whole")
    steps.join(graph.input("x"))
    more, end = steps.through(linear(), name="cell").where(lambda m: m.vertex >= 0)
    end.loss(lambda x: x.square().sum(1))
    steps.join(more.move(vertex=lambda m: m.vertex + 1))
    with pytest.raises(GraphError, match="was moved to vertex"):
        accumulate(graph, trees(2, 2))
