"""Nodes one at a time: what they make of rows, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.errors import DataError, GraphError, NonFiniteError, WorkerError
from geartrain.frames.instance import Instance
from geartrain.frames.message import Backward, Forward
from geartrain.graph.graph import Graph
from geartrain.graph.wiring import wire
from geartrain.nodes.loss import Metric, cross_entropy
from tests.rigs.passes import AT_ONCE, Order, accumulate, one_pass


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def instance(n: int = 3, **vertex: Any) -> Instance:
    x = torch.arange(2.0 * n, dtype=torch.float64).reshape(n, 2) + 1
    columns = {"slot": np.arange(n), "kind": np.arange(n) % 2} | vertex
    return Instance({"x": x}, columns, key="line 1")


def graph() -> Graph:
    return Graph(vertex=("slot", "kind"))


def refused(made: Graph, words: str, data: Any = None, error: Any = GraphError) -> None:
    for order in (Order(), Order(max_rows=1)):
        with pytest.raises(error, match=words):
            one_pass(made, data or [instance()], order)


def seen(
    build: Any, data: Any = None, order: Order | None = None, edge: Any = None
) -> list[Tensor]:
    """What reaches an output behind the built stream, in order of vertices."""
    made = Graph(vertex=("slot", "kind"), edge=edge)
    build(made.input("x")).output("out")
    outcome = one_pass(made, data or [instance()], order or Order(), train=False, collect=True)
    return outcome.collected["out"]


@pytest.mark.parametrize("order", [Order(), Order(policy="random", max_rows=1, seed=3)], ids=str)
@pytest.mark.parametrize(
    ("how", "want"),
    [
        ("stack", [[1, 2], [3, 4], [5, 6]]),
        ("sum", [9, 12]),
        ("mean", [3, 4]),
        ("max", [5, 6]),
        ("bundle", [[1, 2], [3, 4], [5, 6]]),
    ],
)
def test_a_group_makes_one_row_of_its_members(how, want, order):
    ((serials, _, lengths, (y,)),) = seen(
        lambda x: x.group("instance", "size", order="slot", how=how), order=order
    )
    assert serials.tolist() == [0]
    assert y.squeeze(0).tolist() == want
    assert (None if lengths is None else lengths.tolist()) == ([3] if how == "bundle" else None)


def test_members_are_sorted_by_their_state_or_by_the_order_that_is_given():
    for order in (Order(policy="random", max_rows=1, seed=s) for s in range(5)):
        ((_, _, _, (y,)),) = seen(lambda x: x.group("instance", 3), order=order)
        assert y[0, :, 0].tolist() == [1, 3, 5]
        ((_, _, _, (y,)),) = seen(
            lambda x: x.group("instance", 3, order=lambda m: 2 - m.vertex), order=order
        )
        assert y[0, :, 0].tolist() == [5, 3, 1]


def test_equal_maxima_share_the_gradient():
    made = graph()
    x = made.input("x").through(torch.ones_like)
    x.group("instance", "size", how="max").loss(squares)
    assert accumulate(made, [instance()]).sums["loss"][0] == 2


def test_a_member_too_many_is_refused_with_key_and_remedy():
    made = graph()
    made.input("x").group("instance", 2, name="two").stop()
    with pytest.raises(GraphError) as caught:
        one_pass(made, [instance()])
    told = str(caught.value)
    assert "'two': a member of instance 0 (line 1) came for position 2" in told
    assert "the group has 2 positions" in told and "look at 'size' and 'order'" in told
    assert "0..1" in told and "counts the members of each group from 0" in told


def test_the_same_position_twice_is_refused():
    made = graph()
    made.input("x").group("instance", 4, order="kind", name="pairs").stop()
    refused(made, r"'pairs': a member of instance 0 \(line 1\) came for position 0")


def test_a_negative_position_is_refused():
    made = graph()
    made.input("x").group("instance", 3, order=lambda m: m.vertex - 1, name="g").stop()
    refused(made, r"'g': .* came for position -1")


def test_a_group_without_room_for_its_member_is_refused():
    made = graph()
    made.input("x").group("instance", "kind", name="none").stop()
    refused(made, "'none': a group got size 0 while a member is here")


@pytest.mark.parametrize("how", ["sum", "bundle"])
def test_members_that_say_different_sizes_are_refused_with_key_sizes_and_remedy(how):
    """Those of one batch, and one that finds its group half full."""
    made = graph()
    made.input("x").group("instance", lambda m: 3 + m.slot % 2, how=how, name="torn").stop()
    told = (
        r"'torn': members of instance 0 \(line 1\) say different sizes of their group: the first "
    )
    refused(made, told + "(3, another 4|4, another 3); let 'size' be the same for all members")


def test_stacks_that_are_read_together_have_one_size():
    made = graph()
    made.input("x").group(by={"kind_key": lambda m: m.kind}, size=_of_kind, name="stacks").stop()
    with pytest.raises(GraphError, match=r"'stacks': groups of . and of . members cannot be"):
        one_pass(made, [instance()])
    made = graph()
    grouped = made.input("x").group(by={"kind_key": lambda m: m.kind}, size=_of_kind, how="mean")
    grouped.loss(squares)
    one_pass(made, [instance()])


def _of_kind(m: Any) -> Any:
    return np.where(m.kind == 0, 2, 1)


def test_stacks_of_two_sizes_are_refused_whether_they_meet_or_not():
    made = Graph(vertex=("slot",))
    made.input("x").group("instance", "size", order="slot", name="stacks").stop()
    data = [Instance({"x": instance(n).inputs["x"]}, {"slot": np.arange(n)}) for n in (2, 2, 3)]
    for order in (Order(max_active=1), Order(), Order(policy="random", max_rows=1)):
        with pytest.raises(GraphError, match="'stacks': groups of 2 and of 3 members cannot be"):
            one_pass(made, data, order)


def test_ungroup_after_group_is_the_identity():
    for how in ("stack", "bundle"):
        ((_, vertices, _, (y,)),) = seen(
            lambda x, how=how: x.group("instance", 3, how=how).ungroup(index="vertex")
        )
        assert vertices.tolist() == [0, 1, 2]
        assert torch.equal(y, instance().inputs["x"])


def test_a_join_puts_columns_side_by_side_or_makes_a_longer_tuple():
    made = graph()
    x = made.input("x")
    made.concat(x, x.through(torch.neg), on="vertex").output("side")
    made.concat(x, x.through(torch.neg), on="vertex", how="tuple").output("pair")
    outcome = one_pass(made, [instance()], train=False, collect=True)
    given = instance().inputs["x"]
    assert torch.equal(outcome.collected["side"][0][3][0], torch.cat((given, -given), 1))
    pair = outcome.collected["pair"][0][3]
    assert torch.equal(pair[0], given) and torch.equal(pair[1], -given)


def test_the_same_key_twice_on_a_port_is_refused():
    made = graph()
    x = made.input("x")
    made.concat(x, x.through(torch.neg), on="instance", name="side").stop()
    refused(made, r"'side': two rows of port 0 have the key instance 0 \(line 1\)")


def test_bundles_that_are_joined_have_equally_many_rows():
    made = graph()
    x = made.input("x")
    all_rows = x.group("instance", "size", how="bundle")
    some, rest = x.where(lambda m: m.slot > 0)
    rest.stop()
    fewer = some.group("instance", lambda m: m.size - 1, how="bundle")
    made.concat(all_rows, fewer, on="instance", name="side").stop()
    refused(made, r"'side': bundles of \[2, 3\] rows meet under instance 0 \(line 1\)")


def test_bundles_are_joined_row_by_row():
    made = graph()
    x = made.input("x")
    one, other = (x.group("instance", "size", how="bundle") for _ in range(2))
    made.concat(one, other.through(torch.neg), on="instance").loss(squares)
    outcome = accumulate(made, [instance(2), instance(4)], Order(policy="random", max_rows=1))
    want = sum(2 * float(instance(n).inputs["x"].square().sum()) for n in (2, 4))
    assert outcome.sums["loss"] == (pytest.approx(want), 6)


@pytest.mark.parametrize("count", [lambda m: -m.slot, lambda m: m.slot / 2, lambda m: [1]])
def test_a_count_that_is_no_count_is_refused(count):
    made = graph()
    made.input("x").flatmap("copy", count=count, name="many").stop()
    with pytest.raises(GraphError, match=r"'many': its count gave .* for 3 rows; .* 0 or more"):
        one_pass(made, [instance()])


def test_a_flatmap_of_none_answers_zero_at_once():
    made = Graph(edge=())
    x = made.input("x").through(torch.nn.Linear(2, 2).double(), name="map")
    x.flatmap("edge").loss(squares)
    data = [Instance({"x": instance().inputs["x"]}, edge={"source": [], "target": []})]
    outcome = accumulate(made, data)
    assert outcome.sums == {} and outcome.gradients == {}
    assert outcome.parts["map"].counting.rows == 0


def test_a_flatmap_numbers_edges_and_copies():
    ((_, vertices, _, (y,)),) = seen(
        lambda x: x.flatmap("edge").move(vertex=lambda m: m.target),
        [
            Instance(
                {"x": instance().inputs["x"]},
                instance().vertex,
                {"source": [2, 0, 2], "target": [1, 2, 0]},
            )
        ],
        edge=(),
    )
    assert vertices.tolist() == [2, 1, 0] and y[:, 0].tolist() == [1, 5, 5]


@pytest.mark.parametrize("count", [lambda m: np.full(len(m), 3), 3, "kind"], ids=type)
@pytest.mark.parametrize("order", [Order(), Order(max_rows=1)], ids=str)
def test_copies_and_parts_are_numbered_inside_their_instance(order, count):
    """Of the second of two instances as well, whose vertices lie behind those of the first."""

    def build(index: str) -> Graph:
        made = Graph(vertex=("slot", "kind"), edge=())
        copies = made.input("x").flatmap(index, count=count, name="copies")
        parts = made.input("y").ungroup(index=index, name="parts")
        for name, stream in (("copies", copies), ("parts", parts)):
            stream.through(lambda x: x[:, :1], name=f"one of {name}").move(
                vertex=lambda m: getattr(m, index)
            ).output(f"of {name}")
        return made

    edge = {"source": [0, 1, 2], "target": [1, 2, 0]}
    data = [
        Instance(
            {"x": (torch.full((1, 2), k), [0]), "y": (torch.full((1, 3, 2), k), [0])},
            {"slot": [0, 0, 0], "kind": [3, 0, 0]},
            edge,
        )
        for k in (1.0, 2.0)
    ]
    for index in ("vertex", "edge"):
        outcome = one_pass(build(index), data, order, train=False, collect=True)
        for name in ("copies", "parts"):
            found: list[tuple[int, int, float]] = []
            batches: Any = outcome.collected[f"of {name}"]
            for serial, vertex, _, payload in batches:
                value = payload[0][:, 0].tolist()
                found += zip(serial.tolist(), vertex.tolist(), value, strict=True)
            want = [(i, v, i + 1.0) for i in range(2) for v in range(3)]
            assert sorted(found) == want


def test_more_copies_and_parts_than_there_are_vertices_are_refused():
    made = graph()
    made.input("x").flatmap("vertex", count=lambda m: m.slot + 2, name="copies").stop()
    refused(made, r"'copies': a row of instance 0 .line 1. becomes 4, one at each vertex, but the "
            r"instance has vertex 0..2")  # fmt: skip
    made = graph()
    made.input("x").group("instance", 3).through(
        lambda x: torch.cat([x, x], 1), name="six"
    ).ungroup(index="vertex", name="parts").stop()
    refused(made, r"'parts': a row of instance 0 .line 1. becomes 6, one at each vertex")


def test_a_split_refuses_other_widths_while_running():
    made = graph()
    for piece in made.input("x").split(1, 2, name="cut"):
        piece.stop()
    refused(made, r"'cut': a payload of 2 columns came, but the pieces \(1, 2\) add up to 3")


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda m: m.slot, r"'fork': its function chose port 0..2, but the route has 2 ways, 0..1"),
        (lambda m: -m.slot, r"'fork': its function chose port -2..0"),
        (lambda m: 0, r"'fork': its function returned shape \(\) for 3 rows"),
        (lambda m: m.payload[0], r"'fork': its function returned shape \(3, 2\)"),
    ],
)
def test_a_route_refuses_ports_that_it_has_not_and_shapes_that_are_no_column(choose, words):
    made = graph()
    for way in made.input("x").route(choose, 2, name="fork"):
        way.stop()
    with pytest.raises(GraphError, match=words):
        one_pass(made, [instance()])


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (lambda s: s.where(lambda m: m.payload[0][:, 0] > 0, name="fork"), "returned shape"),
        (lambda s: (s.move(k=lambda m: np.zeros(3, int), name="fork"),), "k became int64"),
    ],
)
def test_functions_of_bundles_answer_for_bundles_and_are_told_their_rows(verb, words):
    made = graph()
    for way in verb(made.input("x", bundle=True)):
        way.stop()
    told = rf"'fork': .*{words} \(3,\) for 1 bundles of 3 rows \(m.lengths says how many each has\)"
    with pytest.raises(GraphError, match=told):
        one_pass(made, [instance()])


def test_a_row_cannot_leave_its_instance():
    for target in (lambda m: m.slot + 1, lambda m: m.slot - 1):
        made = graph()
        made.input("x").move(vertex=target, name="on").stop()
        words = r"'on': a row of instance 0 \(line 1\) was moved to vertex (3|-1), .* 0..2; split"
        with pytest.raises(GraphError, match=words):
            one_pass(made, [instance()])


def test_a_column_gets_integers_one_a_row():
    for value in (lambda m: m.slot / 2, lambda m: m.slot[:1], lambda m: m.payload[0]):
        made = graph()
        made.input("x").move(step=value, name="on").stop()
        with pytest.raises(GraphError, match=r"'on': step became .* a state column is integers"):
            one_pass(made, [instance()])


def test_a_criterion_gives_one_loss_a_row():
    for criterion, came in (
        (lambda y: y.sum(), r"\(\)"),
        (lambda y: y, r"\(3, 2\)"),
        (lambda y: 1.0, "float"),
    ):
        made = graph()
        made.input("x").loss(criterion, name="far")
        words = rf"'far': the criterion returned {came} for 3 rows; .* reduction='none'"
        with pytest.raises(GraphError, match=words):
            one_pass(made, [instance()])
        with pytest.raises(GraphError, match=words):
            one_pass(made, [instance()], train=False)


def test_a_criterion_with_a_reduction_of_its_own_is_refused():
    made = graph()
    made.input("x").loss(torch.nn.MSELoss(), target="slot", name="far")
    with pytest.raises(GraphError, match="'far': MSELoss has reduction='mean'"):
        wire(made, lambda t: None)


@pytest.mark.parametrize("train", [True, False])
def test_a_class_out_of_range_names_the_instance(train):
    made = graph()
    made.input("x").loss(cross_entropy, target="slot", name="far")
    words = r"'far': instance 0 \(line 1\) has target 2, but the prediction has classes 0..1"
    with pytest.raises(DataError, match=words):
        one_pass(made, [instance()], train=train)


def test_torchs_own_losses_are_asked_for_one_loss_a_row():
    rows = instance().inputs["x"]
    label = torch.tensor([0, 1, 0])
    aim = rows.flip(1) / 3
    cases = [
        (F.cross_entropy, "kind", F.cross_entropy(rows, label, reduction="sum")),
        (F.mse_loss, lambda m: aim, F.mse_loss(rows, aim) * 3),
        (F.l1_loss, lambda m: aim, F.l1_loss(rows, aim) * 3),
        (F.nll_loss, "kind", F.nll_loss(rows, label, reduction="sum")),
    ]
    for criterion, target, want in cases:
        made = graph()
        made.input("x").loss(criterion, target=target)
        assert one_pass(made, [instance()]).sums["loss"] == (pytest.approx(float(want)), 3)


def test_a_metric_counts_the_rows_it_is_asked_for_and_refuses_nan():
    first = Metric(lambda y: y[:, 0], where=lambda m: m.kind == 0)
    made = graph()
    made.input("x").loss(squares, metrics={"first": first}, name="far")
    assert one_pass(made, [instance()]).sums["first"] == (6.0, 2)
    made = graph()
    bad = Metric(lambda y: torch.where(y[:, 0] == 5, torch.inf, y[:, 0]), first.where)
    made.input("x").loss(squares, metrics={"first": bad}, name="far")
    refused(made, r"'far': first is inf at a row of instance 0 \(line 1\)", error=NonFiniteError)


def test_weights_of_rows_scale_losses_and_gradients():
    made = graph()
    module = torch.nn.Linear(2, 1, bias=False).double()
    made.input("x").through(module, name="map").loss(squares, weight=lambda m: m.slot * 0.5)
    got = accumulate(made, [instance()])
    total = (squares(module(instance().inputs["x"])) * torch.arange(3) * 0.5).sum()
    (want,) = torch.autograd.grad(total, [module.weight])
    torch.testing.assert_close(got.gradients["map", "weight"], want)
    assert got.sums["loss"][0] == pytest.approx(float(total.detach()))


def test_a_module_that_loses_rows_is_refused_while_running():
    made = graph()
    made.input("x").through(lambda x: x[:1], name="one").stop()
    with pytest.raises(GraphError, match=r"'one': output 0 has shape \(1, 2\) for 3 rows"):
        one_pass(made, [instance()])


def test_bundles_that_do_not_hold_their_instance_have_no_edges():
    made = Graph(edge=())
    some, rest = made.input("x").where(lambda m: m.vertex > 0)
    rest.stop()
    bundle = some.group("instance", lambda m: m.size - 1, how="bundle")
    bundle.through(lambda x, inside: x + inside.edges["source"].sum(), inside=True).stop()
    data = [Instance({"x": instance().inputs["x"]}, edge={"source": [0], "target": [1]})]
    refused(made, r"bundles of \[2\] rows came where edges are asked for", data)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"vertex": {"slot": [0, 1, 2]}}, "vertex column 'kind' is missing; it has ['slot']"),
        (
            {"vertex": {"slot": [0, 1, 2], "kind": [0]}},
            "vertex column 'kind' has shape (1,), expected 3 entries",
        ),
        ({"vertex": {"slot": 1, "kind": 2}}, "vertex column 'slot'"),
        ({"vertex": {"slot": ["a"] * 3, "kind": [0] * 3}}, "'slot' holds <U1; give integers"),
        ({"edge": {}}, "edge column 'source' is missing; it has none"),
        ({"edge": {"source": [0], "target": [3]}}, "an edge has target 3"),
        ({"edge": {"source": [-1], "target": [0]}}, "an edge has source -1"),
        (
            {"edge": {"source": [0.5], "target": [0]}},
            "bad: edge column 'source' holds float64",
        ),
        ({"edge": {"source": [0, 1], "target": [0]}}, "edge column 'target' has shape (1,)"),
        ({"value": {}}, "value 'aim' is missing; it has none"),
        ({"inputs": {"x": [1.0]}}, "input 'x' is list; bring a tensor"),
        ({"inputs": {"x": (torch.zeros(2, 2), [0])}}, "2 rows and vertices of shape (1,)"),
        ({"inputs": {}}, "brings no row to any input"),
        ({"inputs": {"x": torch.zeros(3, 4)}}, "input 'x' has rows of torch.float32 (4,)"),
    ],
)
def test_an_instance_that_does_not_fit_is_refused_and_leaves_nothing_behind(broken, words):
    made = Graph(vertex=("slot", "kind"), edge=(), value=("aim",))
    made.input("x", shape=(2,), dtype=torch.float64).stop()
    good = {
        "inputs": instance().inputs,
        "vertex": instance().vertex,
        "edge": {"source": [], "target": []},
        "value": {"aim": 1.5},
    }
    engine = Engine(made, {}, Settings(ramp=AT_ONCE))
    engine.begin(train=True)
    arena = engine.wiring.arena
    free = (arena.vertices.ranges.free(), arena.edges.ranges.free(), len(arena._spare))
    with pytest.raises(DataError, match=re.escape(words)):
        engine.controller.admit([Instance(**good), Instance(**(good | broken), key="bad")])
    assert (arena.vertices.ranges.free(), arena.edges.ranges.free(), len(arena._spare)) == free
    assert engine.controller.active == arena.active == 0


def test_an_input_is_what_it_was_declared_to_be():
    made = Graph()
    made.input("x", shape=(2,), dtype=torch.float32).stop()
    for rows in (torch.zeros(3, 2).double(), torch.zeros(3, 1)):
        with pytest.raises(DataError, match=r"the input .* says torch.float32 .2,.") as caught:
            one_pass(made, [Instance({"x": rows})])
        assert str(rows.dtype) in str(caught.value)


def test_empty_lists_are_columns_of_any_type():
    """numpy calls them floats; an instance without edges may bring them first or later."""
    made = Graph(edge=("type", "length"))
    made.input("x").flatmap("edge").loss(squares, weight="length")
    some = {"source": [0], "target": [1], "type": [2], "length": [0.5]}
    none = {name: [] for name in some}
    x = instance().inputs["x"]
    for edges in ((some, none), (none, some), (none, none, some, none)):
        data = [Instance({"x": x}, edge=e) for e in edges]
        for most in (1, 4):
            assert one_pass(made, data, Order(max_active=most)).sums["loss"] == (2.5, 1)


def test_batches_are_taken_apart_without_copying():
    state = np.arange(6).reshape(2, 3)
    batch = Forward((torch.arange(6.0),), state, np.arange(3), np.array([1, 2, 3]))
    some = batch.take(np.array([2, 0]))
    assert some.payload[0] is batch.payload[0]
    assert some.index.tolist() == [3, 4, 5, 0] and some.lengths.tolist() == [3, 1]
    again = some.take(np.array([1]))
    assert again.index.tolist() == [0] and again.payload_rows() == 1
    answer = Backward(np.arange(3), (torch.arange(6.0),), np.array([1, 2, 3]))
    assert answer.take(np.array([1])).index.tolist() == [1, 2]


def test_a_size_that_raises_is_told_with_node_and_instance():
    made = graph()
    made.input("x").group("instance", lambda m: 1 // 0, name="sized").stop()
    words = r"ZeroDivisionError in node 'sized', forward .*instance 0 \(line 1\)"
    refused(made, words, error=WorkerError)
