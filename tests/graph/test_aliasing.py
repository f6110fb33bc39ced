"""Payloads that are read where they lie: nobody may see them after they were written over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.errors import WorkerError
from geartrain.frames.columns import Columns
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nn.cells import TokenRNN
from geartrain.whole.list.module import WholeList
from tests.rigs.passes import Order, accumulate, assert_same_gradients, autograd, one_pass

IMPATIENT = Order(policy="backward", max_rows=1, max_active=4)
"""Answers are taken before rows, a row at a time: stores are reused as early as can be."""


def square(x: Tensor) -> Tensor:
    return x.square()


def instances(n: int, rows: int) -> list[Instance]:
    rng = np.random.default_rng(0)
    return [
        Instance({"x": torch.from_numpy(rng.standard_normal((rows, 2)))}, {"at": np.arange(rows)})
        for _ in range(n)
    ]


def test_a_stack_that_is_detached_is_not_overwritten_before_it_is_read():
    torch.manual_seed(0)
    module = nn.Linear(2, 2).double()
    graph = Graph(vertex=("at",))
    pairs = graph.input("x").group("instance", 2, order="at").detach()
    pairs.through(module).loss(lambda y: y.square().flatten(1).sum(1))
    data = instances(30, 2)
    total = sum(module(i.inputs["x"]).square().sum() for i in data)
    got = accumulate(graph, data, IMPATIENT)
    assert_same_gradients(got.gradients, autograd(total, {"linear": module}))


def test_a_kept_graph_behind_a_function_that_returns_its_input_survives_later_rows():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
    graph = Graph()
    same = graph.input("x").through(square).through(nn.Identity())
    same.through(module, keep="graph", name="kept").loss(lambda y: y.square().sum(1))
    data = instances(10, 3)
    for order in (IMPATIENT, Order(policy="random", seed=4, max_rows=2)):
        total = sum(module(i.inputs["x"].square()).square().sum() for i in data)
        got = accumulate(graph, data, order)
        assert_same_gradients(got.gradients, autograd(total, {"kept": module}))


def test_rows_of_another_shape_are_not_stretched_over_those_that_came_before():
    """One feature a row stays one feature, also after rows with two."""
    seen = []

    def features(x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return x.sum(1)

    graph = Graph()
    graph.input("x", bundle=True).through(features).loss(lambda y: y.square())
    rng = np.random.default_rng(0)
    data = [Instance({"x": torch.from_numpy(rng.standard_normal((3, k)))}) for k in (2, 1, 2)]
    try:
        outcome = one_pass(graph, data, Order(max_active=1))
    except WorkerError as error:
        pytest.fail(f"refused without saying why: {error}")
    want = sum(float(i.inputs["x"].sum(1).square().sum()) for i in data)
    assert outcome.sums["loss"][0] == pytest.approx(want, rel=1e-12)
    assert {1, 2} == set(seen)


def numbered() -> Instance:
    """Two vertices, an edge each way; all of it integers of the user's."""
    return Instance(
        {"ids": (torch.tensor([3, 4]), np.array([1, 0]))},
        {"slot": np.array([5, 6])},
        {"source": np.array([0, 1]), "target": np.array([1, 0]), "type": np.array([7, 8])},
        {"aim": np.array(9)},
    )


def test_integers_of_an_instance_are_copied_when_it_is_packed():
    """What has been checked is what is read: the user may write over his own meanwhile."""
    graph = Graph(vertex=("slot",), edge=("type",), value=("aim",))
    graph.input("ids").stop()
    packer = Engine(graph, {}, Settings()).controller.packer
    one = numbered()
    packed = packer.pack([one])
    ids, places = one.inputs["ids"]
    ids.fill_(1 << 40)
    for column in (places, *one.vertex.values(), *one.edge.values(), *one.value.values()):
        column.fill(1 << 40)  # type: ignore[union-attr]
    fresh = packer.pack([numbered()])
    rows, twin = packed.inputs["ids"], fresh.inputs["ids"]
    assert rows.payload is not None and twin.payload is not None
    assert torch.equal(rows.payload, twin.payload) and np.array_equal(rows.at, twin.at)
    for kind in ("vertex", "edge", "value"):
        found, expected = getattr(packed, kind), getattr(fresh, kind)
        assert {n: c.tolist() for n, c in found.items()} == {
            n: c.tolist() for n, c in expected.items()
        }


def test_lengths_of_columns_are_copied():
    lengths, edge_lengths = np.array([2, 1]), np.array([1, 0])
    ends = {"source": np.array([0]), "target": np.array([1])}
    columns = Columns(lengths, {"ids": torch.arange(3)}, edge=ends, edge_lengths=edge_lengths)
    lengths[:], edge_lengths[:] = 1 << 40, 1 << 40
    assert columns.lengths.tolist() == [2, 1] and columns.edge_lengths.tolist() == [1, 0]


def test_rows_keep_their_shape_whatever_becomes_of_the_tensor_that_brought_them():
    graph = Graph()
    graph.input("x").stop()
    packer = Engine(graph, {}, Settings()).controller.packer
    x = torch.zeros(3, 2)
    packed = packer.pack([Instance({"x": x})])
    x.resize_(1, 2)
    assert packed.inputs["x"].payload is not None
    assert packed.inputs["x"].payload.shape == (3, 2)


def lists(tokens: Tensor, overwrite: Tensor) -> float:
    """The loss of one list whose tokens are written over on their way to the network."""

    def look(m: object) -> np.ndarray:
        overwrite.fill_(1 << 40)
        return np.ones(1, np.bool_)

    torch.manual_seed(0)
    graph = Graph()
    going, none = graph.input("tokens", bundle=True).where(look)
    none.stop()
    last = going.through(WholeList(TokenRNN(9, 4)), inside=True, pool=True)
    last.loss(lambda h: h.square().sum(1))
    data = [Instance({"tokens": tokens})]
    return one_pass(graph, data, Order(max_active=1)).sums["loss"][0]


def test_tokens_that_the_user_changes_in_flight_are_those_that_were_admitted():
    mine = torch.tensor([1, 8, 0, 3])
    assert lists(mine, overwrite=mine) == lists(torch.tensor([1, 8, 0, 3]), torch.zeros(1))


class Reusing(nn.Module):
    """Returns a table of its own as integers, and writes over it when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.made = torch.zeros(2, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta":
            return torch.zeros(len(x), dtype=torch.int64, device="meta")
        self.calls += 1
        return self.made.fill_(self.calls)


@pytest.mark.parametrize("keep", ["inputs", "graph"])
def test_integers_that_a_module_writes_over_when_it_runs_again_stay_what_they_were(keep):
    graph = Graph()
    graph.input("x", bundle=True).through(Reusing(), keep=keep).output()
    for through in graph.throughs():
        through.dry_run.settled = True  # what counts its calls has no answer of its own to a row
    data = [Instance({"x": torch.zeros(2, 1)}) for _ in range(4)]
    order = Order(policy="backward", max_rows=1, max_active=4)
    outcome = one_pass(graph, data, order, collect=True)
    (found,) = outcome.collected.values()
    assert sorted(x.tolist() for c in found for x in c[3][0].view(-1, 2)) == [
        [k, k] for k in (1, 2, 3, 4)
    ]


def test_classes_that_a_function_returns_are_the_loss_s_own():
    mine, given = torch.tensor([1, 0]), []

    def criterion(x: Tensor, classes: Tensor) -> Tensor:
        given.append(classes)
        return x[:, 0] * classes

    graph = Graph()
    graph.input("x", bundle=True).loss(criterion, target=lambda m: mine)
    one_pass(graph, [Instance({"x": torch.ones(2, 1)})], train=False)
    assert torch.equal(given[0], mine) and given[0].data_ptr() != mine.data_ptr()
