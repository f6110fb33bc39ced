"""A loss inside the node before it: the same numbers as in two nodes, and in one firing.

A loss that ``placement`` names has a node of its own: so one graph runs both ways.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.errors import DataError, NonFiniteError, WorkerError
from geartrain.frames.instance import Instance
from geartrain.frames.message import Backward, Forward, join_gradient, join_payload
from geartrain.graph.graph import Graph
from geartrain.nn import GatedGraphCell, GatedSum
from geartrain.nodes.loss import Metric, accuracy, cross_entropy
from geartrain.nodes.readout import ReadoutNode
from geartrain.parts.rules import Flush, Instances, Part, Rules
from tests.rigs.passes import (
    ORDERS,
    Order,
    Quiet,
    accumulate,
    assert_same_gradients,
    autograd,
    one_pass,
    orders,
)

D, CLASSES = 3, 5
APART = {"loss": 0}


def squares(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 4), nn.GELU(), nn.Linear(4, CLASSES), nn.Tanh())


class Doubled(nn.Module):
    """Without a kernel that somebody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


HEADS = {
    "linear": (lambda: nn.Linear(D, CLASSES), "auto"),
    "without bias": (lambda: nn.Linear(D, CLASSES, bias=False), "activations"),
    "several layers": (mlp, "auto"),
    "derived": (Doubled, "activations"),
}


def data(n: int, dtype: torch.dtype = torch.float64) -> list[Instance]:
    rng = np.random.default_rng(3)
    made = []
    for _ in range(n):
        rows = int(rng.integers(1, 5))
        made.append(
            Instance(
                {"x": torch.from_numpy(rng.standard_normal((rows, D))).to(dtype)},
                {
                    "label": rng.integers(0, CLASSES, rows),
                    "share": rng.integers(0, 4, rows) / 2,
                },
            )
        )
    return made


def model(
    head: str = "linear", bundle: bool = False, dtype: torch.dtype = torch.float64, **rules: object
) -> tuple[Graph, dict[str, nn.Module]]:
    """A layer, and a readout with weighted losses behind it."""
    torch.manual_seed(0)
    make, keep = HEADS[head]
    body, last = nn.Linear(D, D).to(dtype), make().to(dtype)
    graph = Graph(vertex=("label", "share"), run="steps")  # else one node computes the body too
    x = graph.input("x", bundle=bundle).through(body, name="body")
    part = Part(last, keep=keep, **rules)  # type: ignore[arg-type]
    x.through(part, name="readout").loss(
        cross_entropy,
        target="label",
        weight="share",
        metrics={
            "accuracy": accuracy,
            "of class 0": Metric(accuracy, where=lambda m: m.label == 0),
        },
    )
    return graph, {"body": body, "readout": last}


def total(modules: dict[str, nn.Module], given_: list[Instance]) -> Tensor:
    parts = []
    for one in given_:
        y = modules["readout"](modules["body"](one.inputs["x"]))
        losses = F.cross_entropy(y, torch.from_numpy(one.vertex["label"]), reduction="none")
        parts.append((losses * torch.from_numpy(one.vertex["share"])).sum())
    return torch.stack(parts).sum()


class Firings(Quiet):
    def __init__(self) -> None:
        self.rows: Counter[tuple[str, bool]] = Counter()

    def fired(self, worker, firing, start_s, end_s):
        self.rows[firing.node, firing.forward] += firing.rows


@pytest.mark.parametrize("bundle", [False, True], ids=["rows", "bundles"])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_and_losses_are_those_of_autograd(head, bundle):
    """A head meets every order, half of them with rows and the other half with bundles."""
    graph, modules = model(head, bundle)
    given_ = data(6)
    want = total(modules, given_)
    gradients = autograd(want, modules)
    for order in ORDERS[([*HEADS].index(head) + bundle) % 2 :: 2]:
        got = accumulate(graph, given_, order)
        assert any(isinstance(n, ReadoutNode) for n in got.engine.wiring.nodes.values())
        assert got.sums["loss"][0] == pytest.approx(float(want.detach()), rel=1e-12)
        assert_same_gradients(got.gradients, gradients)


@settings(max_examples=6)
@given(n=st.integers(1, 12), order=orders())
def test_in_any_order_the_gradients_are_those_of_autograd(n, order):
    graph, modules = model("several layers")
    given_ = data(n)
    got = accumulate(graph, given_, order)
    assert_same_gradients(got.gradients, autograd(total(modules, given_), modules))


@pytest.mark.slow
@settings(max_examples=200)
@given(n=st.integers(1, 40), order=orders())
def test_in_very_many_orders_the_gradients_are_those_of_autograd(n, order):
    graph, modules = model("several layers")
    given_ = data(n)
    got = accumulate(graph, given_, order)
    assert_same_gradients(got.gradients, autograd(total(modules, given_), modules))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_one_in_flight_it_trains_as_two_nodes_do_to_the_bit(head, dtype):
    found = []
    for placement in ({}, APART):  # fused, and in two nodes
        graph, modules = model(head, dtype=dtype)
        rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.3), update_every=Instances(3))
        shares = [
            Instance(i.inputs, i.vertex | {"share": i.vertex["share"].astype(np.float32)})
            for i in data(30, dtype)
        ]
        got = one_pass(graph, shares, Order(max_active=1), rules=rules, placement=placement)
        weights = [p.detach() for m in modules.values() for p in m.parameters()]
        found.append((weights, got.sums, {n: p.version for n, p in got.parts.items()}))
    (weights, sums, versions), (others, *rest) = found
    assert [sums, versions] == rest and versions["readout"] > 5
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_one_firing_does_it_all_and_nothing_waits_or_grows_old():
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=4)
    given_ = data(40)
    rows = sum(len(i.vertex["label"]) for i in given_)
    for placement, there, back, apart in (({}, rows, 0, 0), (APART, rows, rows, rows)):
        watch = Firings()
        got = one_pass(model()[0], given_, rules=rules, watch=watch, placement=placement)
        assert watch.rows["readout", True] == there
        assert watch.rows["readout", False] == back
        assert watch.rows["loss", True] == apart
        histogram = got.parts["readout"].take_histogram()
        assert sum(histogram) == rows and (len(histogram) > 1) == bool(apart)
        assert sum(got.parts["body"].take_histogram()) == rows


def test_updates_have_the_size_that_was_asked_for():
    sizes = []

    class Steps(Quiet):
        def stepped(self, worker, step, now_s):
            if step.part == "readout":
                sizes.append(step.rows)

    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=4)
    one_pass(model()[0], data(60), Order(max_active=60), rules=rules, watch=Steps())
    assert len(sizes) > 10 and max(sizes) < 8


@pytest.mark.parametrize("average", ["rows", "instances", "none"])
def test_averages_are_those_of_two_nodes(average):
    found = []
    for placement in ({}, APART):
        graph, modules = model(average=average)
        rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush())
        got = one_pass(graph, data(9), rules=rules, placement=placement)
        for worker in got.engine.workers:
            worker.flush()
        found.append([p.detach() for p in modules["readout"].parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_a_frozen_part_passes_gradients_and_stays():
    graph, modules = model()
    before = [p.detach().clone() for m in modules.values() for p in m.parameters()]
    session = gt.Session(graph, rules=Rules(update_every=5), runtime=gt.Simulated(1))
    session.parts["readout"].frozen = True
    session.fit(data(20), epochs=1)
    after = [p.detach() for m in modules.values() for p in m.parameters()]
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [False, False, True, True]


def test_a_bound_on_staleness_never_holds_a_readout():
    graph, _ = model(max_staleness=0)
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=3)
    got = one_pass(graph, data(30), rules=rules)
    part = got.parts["readout"]
    assert part.version > 10 and not part.holding
    assert len(part.take_histogram()) == 1


def test_an_evaluation_counts_and_leaves_no_gradient():
    graph, modules = model()
    given_ = data(12)
    fused, apart = (
        one_pass(graph, given_, train=False, placement=placement) for placement in ({}, APART)
    )
    assert fused.sums.keys() == {"loss", "accuracy", "of class 0"}
    for name, (value, rows) in apart.sums.items():
        assert fused.sums[name] == (pytest.approx(value, rel=1e-12), rows)
    assert all(
        fused.parts["readout"].gradient.take(p) is None for p in modules["readout"].parameters()
    )


def test_a_prediction_finds_the_rows_under_the_name_of_the_loss():
    graph, modules = model()
    session = gt.Session(graph, runtime=gt.Simulated(2))
    given_ = data(6)
    for one, found in zip(given_, session.predict(given_), strict=True):
        want = modules["readout"](modules["body"](one.inputs["x"])).detach()
        assert torch.allclose(found, want, rtol=1e-12)


@pytest.mark.parametrize(
    "sharing", [gt.SharedWeights(), gt.PartCopies({"readout": 2})], ids=["shared", "copies"]
)
def test_shared_weights_and_copies_add_up_to_one_gradient(sharing):
    found = []
    for way, workers in ((gt.Alone(), 1), (sharing, 2)):
        graph, modules = model(average="none")
        rules = Rules(
            optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush(), average="none"
        )
        made = gt.Session(graph, rules=rules, runtime=gt.Simulated(workers), sharing=way)
        before = [p.detach().clone() for p in modules["body"].parameters()]
        made.fit(data(20), epochs=1)
        found.append(
            [p.detach() - b for p, b in zip(modules["body"].parameters(), before, strict=True)]
        )
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


def test_rows_in_bfloat16_train_as_in_two_nodes():
    found = []
    for placement in (None, APART):
        graph, modules = model("several layers", dtype=torch.float32)
        session = gt.Session(
            graph,
            rules=Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Instances(4)),
            runtime=gt.Simulated(1),
            compute=gt.Compute(precision="bf16"),
            max_active=1,
            schedule=gt.Schedule(placement=placement),
        )
        session.fit(data(16, torch.float32), epochs=1)
        found.append([p.detach() for m in modules.values() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def fused_in(graph: Graph, placement: dict[str, int] | None = None) -> set[str]:
    got = one_pass(graph, data(3), placement=placement)
    return {n.name for n in got.engine.wiring.nodes.values() if isinstance(n, ReadoutNode)}


@pytest.mark.parametrize("keep", ["auto", "activations", "inputs", "graph"])
def test_what_runs_again_or_keeps_a_graph_stays_two_nodes(keep):
    graph = Graph(vertex=("label", "share"))
    graph.input("x").through(nn.Linear(D, 2).double(), name="last", keep=keep).loss(squares)
    fuses = keep in ("auto", "activations")
    assert fused_in(graph) == ({"last"} if fuses else set())
    assert (f"[{keep}, fused with loss]" in str(graph)) == fuses
    assert fused_in(graph, {"loss": 0}) == set()


def test_a_stream_with_another_reader_or_another_source_stays_two_nodes():
    for end in ("output", "merge", "merge of one", "function"):
        graph = Graph(vertex=("label", "share"))
        x = graph.input("x")
        y = x.through(nn.Linear(D, 2).double(), name="last")
        if end == "output":
            y.output()
        elif end == "merge":
            y = graph.merge(y, x.through(nn.Linear(D, 2).double()))
        elif end == "merge of one":
            y = graph.merge(y)
        else:
            y = y.through(torch.tanh)
        y.loss(squares)
        assert fused_in(graph) == set()
        assert "fused" not in str(graph)


def test_columns_that_it_reads_and_tensors_that_it_does_not_take_get_their_gradients():
    torch.manual_seed(0)
    body, last = nn.Linear(D, D).double(), nn.Linear(D, 2).double()
    graph = Graph(vertex=("label", "share"))
    x = graph.input("x").through(body, name="body")
    both = graph.concat(x, x.through(torch.tanh), how="tuple", on=("instance", "vertex"))
    both.through(last, name="last", take=1).loss(squares)
    given_ = data(7)
    want = sum(squares(last(body(i.inputs["x"]).tanh())).sum() for i in given_)
    got = accumulate(graph, given_, Order(max_rows=2, reach=False))
    assert any(isinstance(n, ReadoutNode) for n in got.engine.wiring.nodes.values())
    assert_same_gradients(got.gradients, autograd(want, {"body": body, "last": last}))


def test_errors_name_the_loss_and_the_instance():
    graph, _ = model()
    bad = data(3)
    bad[1].vertex["label"][0] = CLASSES
    with pytest.raises(DataError, match=r"'loss': .*instance 1.* has target 5") as caught:
        one_pass(graph, bad)
    assert "'readout' with loss 'loss' of part 'readout', forward" in "".join(
        caught.value.__notes__
    )
    graph, modules = model()
    with torch.no_grad():
        modules["readout"].bias[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"'loss': loss is nan"):
        one_pass(graph, data(3))


def test_a_criterion_that_raises_is_told_with_both_names():
    def angry(y: Tensor) -> Tensor:
        raise ArithmeticError("seen enough")

    graph = Graph(vertex=("label", "share"))
    graph.input("x").through(nn.Linear(D, 2).double(), name="last").loss(angry, name="end")
    with pytest.raises(WorkerError, match=r"in node 'last' with loss 'end'.*seen enough"):
        one_pass(graph, data(3))


class KnowsItsGradient:
    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, y: Tensor, label: Tensor) -> Tensor:
        return (y - label[:, None]).square().sum(1)

    def with_gradient(self, y: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self(y, label), 2 * (y - label[:, None])


class SumsItsSquares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().sum(1)


@pytest.mark.parametrize("apart", [{}, APART], ids=["within", "apart"])
@pytest.mark.parametrize("weight", [None, "share"])
@pytest.mark.parametrize("kind", ["knows", "given"])
def test_gradients_without_autograd_are_those_of_autograd(kind, weight, apart):
    torch.manual_seed(0)
    knows = KnowsItsGradient()
    module = (nn.Linear(D, CLASSES) if kind == "knows" else SumsItsSquares()).double()
    graph = Graph(vertex=("label", "share"))
    stream = graph.input("x").through(module, name="readout")
    criterion = knows if kind == "knows" else lambda y, label: y
    stream.loss(criterion, target="label", weight=weight)
    given_ = data(9)
    parts = []
    for one in given_:
        label, share = (torch.from_numpy(one.vertex[n]) for n in ("label", "share"))
        losses = criterion(module(one.inputs["x"]), label)
        parts.append((losses if weight is None else losses * share).sum())
    want = torch.stack(parts).sum()
    gradients = autograd(want, {"readout": module})
    got = accumulate(graph, given_, placement=apart)
    assert got.sums["loss"][0] == pytest.approx(float(want.detach()), rel=1e-12)
    assert_same_gradients(got.gradients, gradients)
    assert bool(knows.asked) == (kind == "knows")


@pytest.mark.parametrize("pool", [False, True], ids=["rows", "pooled"])
def test_a_module_that_looks_inside_bundles_and_its_loss_are_one_node(pool):
    found = []
    for placement in ({}, APART):
        torch.manual_seed(0)
        body = nn.Linear(D, 4).double()
        last = (GatedSum(4, out=CLASSES) if pool else GatedGraphCell(4)).double()
        graph = Graph(vertex=("label",), edge=(), value=("kind",))
        states = graph.input("x", bundle=True).through(body, name="body")
        scores = states.through(last, name="readout", inside=True, pool=pool)
        scores.loss(cross_entropy, "kind" if pool else lambda m: m.label % 4)
        given_ = [
            Instance(
                i.inputs,
                {"label": i.vertex["label"]},
                {"source": np.arange(n - 1), "target": np.arange(1, n)},
                {"kind": k % CLASSES},
            )
            for k, i in enumerate(data(12))
            for n in (len(i.vertex["label"]),)
        ]
        for order in ORDERS[:1] if placement else ORDERS:
            got = accumulate(graph, given_, order, placement=placement)
            inside = [n for n in got.engine.wiring.nodes.values() if isinstance(n, ReadoutNode)]
            assert [n.bundled for n in inside] == [True] * (not placement)
            found.append((got.sums["loss"], got.gradients))
    for sums, gradients in found[1:]:
        assert sums == pytest.approx(found[0][0], rel=1e-12)
        assert_same_gradients(gradients, found[0][1])


@pytest.mark.parametrize("index", [None, np.array([4, 0, 5, 2, 2, 1, 3])])
@pytest.mark.parametrize("lengths", [None, np.array([2, 1, 0, 4])])
def test_a_batch_that_is_cut_is_what_its_rows_are(lengths, index):
    rows = 7 if lengths is None else 4
    payload = torch.arange(14.0).view(7, 2)
    forward = Forward(
        (payload,), np.arange(2 * rows).reshape(2, rows), np.arange(rows), lengths, index
    )
    backward = Backward(np.arange(rows), (payload, None), lengths, index)
    for n in (1, 3):
        for part, numbers in zip(forward.cut(n), (np.arange(n), np.arange(n, rows)), strict=True):
            twin = forward.take(numbers)
            assert np.array_equal(part.state, twin.state)
            assert np.array_equal(part.origin, twin.origin)
            assert torch.equal(join_payload([part])[0], join_payload([twin])[0])
        for part, numbers in zip(backward.cut(n), (np.arange(n), np.arange(n, rows)), strict=True):
            twin = backward.take(numbers)
            assert np.array_equal(part.rows, twin.rows)  # type: ignore[attr-defined]
            assert torch.equal(join_gradient([part])[0], join_gradient([twin])[0])
    first, rest = Backward(np.arange(5), None).cut(2)
    assert (len(first), len(rest), first.gradient, rest.gradient) == (2, 3, None, None)
