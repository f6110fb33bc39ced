"""Bundles that are made, gone through and taken apart again in what runs whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph, Stream
from geartrain.native import library
from geartrain.nodes.inside import Inside
from geartrain.nodes.loop.node import LoopNode
from tests.rigs.passes import Order, accumulate, assert_same_gradients
from tests.rigs.products import in_pairs

WIDTH = 3


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


class Attend(nn.Module):
    """A mean of each bundle's rows, weighed by what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.value = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        weight = self.weigh(x).exp()
        n = len(inside.lengths)
        total = x.new_zeros(n, 1).index_add(0, inside.segment, weight)
        found = x.new_zeros(n, WIDTH).index_add(0, inside.segment, weight * self.value(x))
        return torch.tanh(found / total)


class Among(nn.Module):
    """Each row beside the sum of its bundle."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.all = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inside: Inside) -> Tensor:
        total = x.new_zeros(len(inside.lengths), WIDTH).index_add(0, inside.segment, x)
        return torch.tanh(self.own(x) + self.all(total)[inside.segment])


class Both(nn.Module):
    """Two tensors for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inside: Inside) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(x)), torch.tanh(self.other(x))


def second(x: Tensor, y: Tensor) -> Tensor:
    return y


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).double()


def tree(run: str) -> Graph:
    """Children meet as a bundle of any length; their parent attends to them."""
    graph = Graph(vertex=("parent", "siblings", "slot"))
    nodes = graph.loop(name="nodes", run=run)  # type: ignore[arg-type]
    nodes.join(graph.input("word").through(linear(), name="leaf"))
    inner, root = nodes.where(lambda m: m.parent >= 0)
    above = {"vertex": lambda m: m.parent}
    met = inner.group(by=above, size="siblings", order="slot", how="bundle", name="met")
    nodes.join(met.through(Attend().double(), name="attend", inside=True, pool=True))
    root.loss(squared)
    return graph


def trees() -> list[Instance]:
    torch.manual_seed(3)
    found = []
    for parents in ([-1], [-1, 0, 0, 0], [-1, 0, 0, 1, 1, 1, 2, 3], [-1, 0, 1, 2, 2]):
        parent = np.array(parents)
        size = parent.size
        children = np.bincount(parent[1:], minlength=size) if size > 1 else np.zeros(1, int)
        slot = np.array([int((parent[:v] == parent[v]).sum()) for v in range(size)])
        leaves = np.flatnonzero(children == 0)
        rows = torch.randn(leaves.size, WIDTH, dtype=torch.float64)
        columns = {"parent": parent, "siblings": children[parent], "slot": slot}
        found.append(Instance({"word": (rows, leaves)}, columns))
    return found


def attention(run: str) -> Graph:
    """What comes along edges is a bundle at each vertex, attended to in each of three rounds."""
    graph = Graph(edge=())
    rounds = graph.loop(name="rounds", run=run)  # type: ignore[arg-type]
    rounds.join(graph.input("h", step=0).through(linear(), name="embed"))
    going, done = rounds.where(lambda m: m.step < 3)
    sent = going.flatmap("edge").through(linear(), name="send")
    come = sent.move(vertex=lambda m: m.target)
    heard = come.group(by=("vertex", "step"), size="in_degree", how="bundle")
    new = heard.through(Attend().double(), name="attend", inside=True, pool=True)
    rounds.join(new.move(step=lambda m: m.step + 1))
    done.loss(squared)
    return graph


def graphs() -> list[Instance]:
    torch.manual_seed(3)
    found = []
    for size in (1, 4, 3, 6):
        v = np.arange(1, size)
        source, target = np.r_[v, v // 2, 0], np.r_[v // 2, v, 0]
        edge = {"source": source, "target": target}
        rows = torch.randn(size, WIDTH, dtype=torch.float64)
        found.append(Instance({"h": rows}, edge=edge))
    return found


def turns(make: Callable[[Stream], Stream], run: str) -> Graph:
    """Rows of an instance go round as often as it says; in each round they meet."""
    graph = Graph(value=("turns", "rows"))
    state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
    state.join(graph.input("x", turn=0).through(linear(), name="first"))
    step = state.through(linear(), name="cell").move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < m.turns)
    together = more.group(by="turn", size="rows", order="vertex", how="bundle", name="together")
    state.join(make(together))
    done.loss(squared)
    return graph


def sets() -> list[Instance]:
    torch.manual_seed(3)
    return [
        Instance(
            {"x": torch.randn(rows, WIDTH, dtype=torch.float64)},
            value={"turns": turns, "rows": rows},
        )
        for rows, turns in ((2, 1), (1, 2), (3, 3), (4, 2), (2, 3))
    ]


def among(together: Stream) -> Stream:
    return together.through(Among().double(), name="among", inside=True).ungroup(index="vertex")


def as_they_came(together: Stream) -> Stream:
    return together.ungroup(index="vertex")


def of_two(together: Stream) -> Stream:
    both = together.through(Both().double(), name="both", inside=True)
    return both.through(second, name="second").ungroup(index="vertex")


def let_go(together: Stream) -> Stream:
    both = together.through(Among().double(), name="among", inside=True)
    return both.detach().ungroup(index="vertex").through(linear(), name="after")


def met_again(together: Stream) -> Stream:
    """Bundles that went two ways come to one module, and so lie in one buffer."""
    odd, even = together.where(lambda m: m.turn % 2 == 1, name="odd")
    near = odd.through(Among().double(), name="near", inside=True)
    graph = together.graph
    return graph.merge(near, even, name="met").ungroup(index="vertex")


SHAPES: dict[str, tuple[Callable[[str], Graph], Callable[[], list[Instance]]]] = {
    "tree": (tree, trees),
    "attention": (attention, graphs),
    **{
        make.__name__: ((lambda run, make=make: turns(make, run)), sets)
        for make in (among, as_they_came, of_two, let_go, met_again)
    },
}


def loops_of(outcome: object) -> list[LoopNode]:
    nodes = outcome.engine.wiring.nodes.values()  # type: ignore[attr-defined]
    return [node for node in nodes if isinstance(node, LoopNode)]


@in_pairs(shape=[*SHAPES], reach=[True, False], most=[4096, 2])
def test_it_is_what_comes_of_it_by_steps(shape: str, reach: bool, most: int) -> None:
    build, data = SHAPES[shape]
    found = []
    for run in ("steps", "whole"):
        torch.manual_seed(5)
        order = Order(max_rows=most, reach=reach)
        found.append(accumulate(build(run), data(), order))
    steps, whole = found
    assert [len(loops_of(each)) for each in found] == [0, 1]
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])


@pytest.mark.parametrize("shape", SHAPES)
def test_columns_alone_decide(shape: str) -> None:
    assert "payload decides" not in str(SHAPES[shape][0]("auto"))


def test_a_vertex_hears_one_call_a_round() -> None:
    (loop,) = loops_of(accumulate(attention("whole"), graphs()))
    in_two = library.current() is not None  # what a vertex sends is computed once for its edges
    assert loop.calls == 1 + 3 * (2 + in_two)  # embed, then send and attend in each round


def test_bundles_may_leave_and_be_pooled_outside() -> None:
    def build(run: str) -> Graph:
        torch.manual_seed(5)
        graph = Graph(value=("turns", "rows"))
        state = graph.loop(name="state", run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", turn=0))
        step = state.through(linear(), name="cell").move(turn=lambda m: m.turn + 1)
        together = step.group(by="turn", size="rows", order="vertex", how="bundle")
        more, done = together.where(lambda m: m.turn < m.turns)
        among_ = more.through(Among().double(), name="among", inside=True)
        state.join(among_.ungroup(index="vertex"))
        done.through(Attend().double(), name="end", inside=True, pool=True).loss(squared)
        return graph

    for reach in (True, False):
        steps, whole = (
            accumulate(build(run), sets(), Order(reach=reach)) for run in ("steps", "whole")
        )
        assert len(loops_of(whole)) == 1
        assert_same_gradients(whole.gradients, steps.gradients)


def test_bundles_that_are_joined_keep_a_loop_by_steps() -> None:
    def joined(together: Stream) -> Stream:
        other = together.through(Among().double(), name="among", inside=True)
        both = together.graph.concat(together, other, on="turn", how="tuple", name="both")
        return both.through(second, name="second").ungroup(index="vertex")

    assert "runs by steps, as 'both' joins bundles" in str(turns(joined, "auto"))
    accumulate(turns(joined, "auto"), sets())
