"""Modules that feed one another up to their losses: one node computes them, there and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.parts import make_parts
from geartrain.errors import DataError, WorkerError
from geartrain.graph.owners import Owner
from geartrain.graph.wiring import wire
from geartrain.nodes.loss import Objective
from geartrain.nodes.stack import StackNode
from tests.rigs.passes import (
    ORDERS,
    Order,
    Outcome,
    Quiet,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
)
from tests.rigs.products import halved

WIDTH, CLASSES = 4, 3


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


def apart(mean: Tensor, spread: Tensor) -> Tensor:
    return (mean.square() + spread.exp() - spread).sum(1)


class Coder(nn.Module):
    """Makes two tensors; its kernel is derived, or it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = torch.tanh(self.map(x)).chunk(2, 1)
        return mean, spread


class Shifted(nn.Module):
    """Reads a column."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.map(x) * (1 + shift[:, None])


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second")}
    made |= {"scores": nn.Linear(WIDTH, CLASSES), "coder": Coder(), "shifted": Shifted()}
    made |= {"curved": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())}
    return {name: module.double() for name, module in made.items()}


def chain(made: dict[str, nn.Module], graph: gt.Graph) -> None:
    h = graph.input("x").through(made["first"], name="first").through(torch.tanh, name="curve")
    h = h.through(made["curved"], name="curved").through(made["scores"], name="scores")
    h.loss(gt.cross_entropy, "label", weight="weight", metrics={"right": gt.accuracy})


def plain_chain(made: dict[str, nn.Module], x: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    h = made["scores"](made["curved"](torch.tanh(made["first"](x))))
    return (nn.functional.cross_entropy(h, label, reduction="none") * weight).sum()


def heads(made: dict[str, nn.Module], graph: gt.Graph) -> None:
    h = graph.input("x").through(made["first"], name="first")
    h.through(made["scores"], name="scores").loss(gt.cross_entropy, "label", weight="weight")
    h.through(made["shifted"], name="shifted", read="label").loss(squared, name="size")
    h.loss(squared, name="own")


def plain_heads(made: dict[str, nn.Module], x: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    h = made["first"](x)
    losses = nn.functional.cross_entropy(made["scores"](h), label, reduction="none") * weight
    return losses.sum() + squared(made["shifted"](h, label)).sum() + squared(h).sum()


def coded(made: dict[str, nn.Module], graph: gt.Graph) -> None:
    """Rows meet before; a value is judged twice, read in part, and made one of."""
    x = graph.input("x")
    h = graph.merge(
        x.through(made["first"], name="first"), x.through(made["second"], name="second")
    )
    code = h.through(made["coder"], name="coder")
    code.loss(apart, name="code")
    code.loss(lambda mean, spread: (mean * spread).sum(1), name="product")
    code.through(made["curved"], name="curved", take=1).loss(squared, name="spread")
    drawn = code.through(lambda mean, spread: mean * spread, name="drawn")
    drawn.through(made["scores"], name="scores").loss(gt.cross_entropy, "label", weight="weight")


def plain_coded(made: dict[str, nn.Module], x: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for first in ("first", "second"):
        mean, spread = made["coder"](made[first](x))
        losses = made["scores"](mean * spread)
        losses = nn.functional.cross_entropy(losses, label, reduction="none") * weight
        total = total + losses.sum() + apart(mean, spread).sum() + (mean * spread).sum()
        total = total + squared(made["curved"](spread)).sum()
    return total


def ends(made: dict[str, nn.Module], graph: gt.Graph) -> None:
    """Rows are put out where they are judged too, from between, and in part; others stop."""
    h = graph.input("x").through(made["first"], name="first")
    h.output("hidden")
    code = h.through(made["coder"], name="coder")
    code.output("spread", take=1)
    code.through(lambda mean, spread: mean.exp() + spread, name="grown").stop()
    scores = code.through(lambda mean, spread: mean, name="mean")
    scores = scores.through(made["scores"], name="scores")
    scores.loss(gt.cross_entropy, "label", weight="weight")
    scores.output("scores out")


def plain_ends(made: dict[str, nn.Module], x: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    h = made["scores"](made["coder"](made["first"](x))[0])
    return (nn.functional.cross_entropy(h, label, reduction="none") * weight).sum()


Build = Callable[[dict[str, nn.Module], gt.Graph], None]
PROGRAMS: dict[str, tuple[Build, Callable[..., Tensor], set[str]]] = {
    "chain": (chain, plain_chain, {"first"}),
    "heads": (heads, plain_heads, {"first"}),
    "ends": (ends, plain_ends, {"first"}),
    "coded": (coded, plain_coded, {"first", "second", "x broadcast", "coder"}),
}
"""What is built, the same in plain PyTorch, and the nodes that there are."""


def graph_of(name: str, made: dict[str, nn.Module], run: Any = "auto") -> gt.Graph:
    graph = gt.Graph(value=("label", "weight"), run=run)
    PROGRAMS[name][0](made, graph)
    return graph


def points(n: int = 11) -> list[gt.Instance]:
    torch.manual_seed(1)
    return [
        gt.Instance(
            {"x": torch.randn(1, WIDTH, dtype=torch.float64)},
            value={"label": k % CLASSES, "weight": 1 + k % 2},
        )
        for k in range(n)
    ]


def total_of(name: str, made: dict[str, nn.Module], data: list[gt.Instance]) -> Tensor:
    x = torch.cat([each.inputs["x"] for each in data])
    label, weight = (torch.tensor([int(e.value[c]) for e in data]) for c in ("label", "weight"))
    return PROGRAMS[name][1](made, x, label, weight)


def stacks_of(engine: Engine) -> list[StackNode]:
    return [node for node in engine.wiring.nodes.values() if isinstance(node, StackNode)]


@halved(name=[*PROGRAMS], order=ORDERS)
def test_gradients_and_losses_are_those_of_plain_torch(name, order):
    made, data = modules(), points()
    want = total_of(name, made, data)
    got = accumulate(graph_of(name, made), data, order)
    assert_same_gradients(got.gradients, autograd(want, made))
    assert_same_loss(got, want)
    assert bool(stacks_of(got.engine)) == (order.workers == 1 and order.reach)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_node_does_the_work_of_all_of_them(name):
    engine = accumulate(graph_of(name, modules()), points()).engine
    assert {node.name for node in engine.wiring.nodes.values()} == PROGRAMS[name][2]
    assert set(engine.losses) == {
        end for node in stacks_of(engine) for end in node.ends if isinstance(end, Objective)
    }
    steps = accumulate(graph_of(name, modules(), "steps"), points()).engine
    assert not stacks_of(steps) and len(steps.losses) == len(engine.losses)


class Counted(Quiet):
    """Firings, by node."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def fired(self, worker: int, firing: Firing, start_s: float, end_s: float) -> None:
        self.rows.setdefault(firing.node, []).append(firing.rows)


def trained(
    name: str, in_flight: int, run: str, watch: Quiet | None = None
) -> tuple[Outcome, dict[str, nn.Module]]:
    """A pass over 48 instances, with an update for every four."""
    made = modules()
    graph = graph_of(name, made, run)
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.002), update_every=gt.Instances(4))
    order = Order(max_active=in_flight)
    engine = Engine(graph, make_parts(graph, rules), order.settings())
    return one_pass(graph, points(48), order, engine=engine, watch=watch), made


def assert_same_training(one: Any, other: Any) -> None:
    """The same updates of weights of the same age, and so the same weights."""
    for name, part in one[0].parts.items():
        twin = other[0].parts[name]
        assert part.version == twin.version > 0
        assert list(part.histogram()) == list(twin.histogram())
    for name, module in one[1].items():
        for x, y in zip(module.parameters(), other[1][name].parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_flight", [1, 4, 16])
@pytest.mark.parametrize("name", ["chain", "heads", "ends"])
def test_training_is_as_by_steps(name, in_flight):
    """Up to four updates at once are of one version by steps too, and told apart."""
    watch = Counted()
    mine, by_steps = trained(name, in_flight, "auto", watch), trained(name, in_flight, "steps")
    assert {part.version for part in mine[0].parts.values()} == {12}
    assert watch.rows == {"first": [in_flight] * (48 // in_flight)}
    if name == "chain" or in_flight <= 4:
        assert_same_training(mine, by_steps)
        return
    for part in mine[0].parts.values():  # a module of it runs again: by steps it cannot tell apart
        assert list(part.histogram()) == [12] * 4
    ages, rows = by_steps[0].parts["first"].peek_staleness()
    assert ages > 1.5 * rows


@pytest.mark.parametrize(
    "change",
    [
        {"update_every": gt.Rows(4)},
        {"update_every": gt.Messages(4)},
        {"max_staleness": 2},
        {"window": 8},
        {"view": gt.Stashed()},
    ],
    ids=str,
)
def test_each_is_a_node_where_rules_want_it(change):
    graph = graph_of("chain", modules())
    rules = gt.Rules(**({"update_every": gt.Instances(4)} | change))
    assert not stacks_of(Engine(graph, make_parts(graph, rules), Order().settings()))


def test_each_is_a_node_where_parts_step_at_other_times():
    made = modules()
    graph = gt.Graph(value=("label", "weight"))
    part = gt.Part(made["first"], "first", update_every=gt.Instances(8))
    h = graph.input("x").through(made["first"], name="first", part=part)
    h.through(made["second"], name="second").loss(squared)
    rules = gt.Rules(update_every=gt.Instances(4))
    assert not stacks_of(Engine(graph, make_parts(graph, rules), Order().settings()))


@pytest.mark.parametrize("keep", ["inputs", "activations"])
def test_what_runs_again_as_it_was_asked_to_is_a_node(keep):
    made = modules()
    graph = gt.Graph()
    h = graph.input("x").through(made["first"], name="first")
    h.through(made["second"], name="second", keep=keep).loss(squared)
    engine = accumulate(graph, [replace(each, value={}) for each in points()]).engine
    assert bool(stacks_of(engine)) == (keep == "activations")


@pytest.mark.parametrize("where", ["second", "loss"])
def test_what_is_placed_by_its_name_is_a_node(where):
    graph = gt.Graph()
    made = modules()
    h = graph.input("x").through(made["first"], name="first")
    h.through(torch.tanh, name="second").through(made["curved"], name="curved").loss(squared)
    engine = Engine(
        graph,
        make_parts(graph, gt.Rules(update_every=gt.Flush())),
        Order().settings(),
        1,
        {where: 0},
    )
    assert where in {node.name for node in engine.wiring.nodes.values()}
    assert not stacks_of(engine)


def test_bundles_go_there_and_back_too():
    made = modules()
    graph = gt.Graph()
    h = graph.input("x", bundle=True).through(made["first"], name="first")
    h.through(made["curved"], name="curved").loss(squared)
    torch.manual_seed(1)
    data = [gt.Instance({"x": torch.randn(1 + k % 3, WIDTH).double()}) for k in range(8)]
    got = accumulate(graph, data, Order(max_rows=3))
    x = torch.cat([each.inputs["x"] for each in data])
    want = squared(made["curved"](made["first"](x))).sum()
    assert_same_gradients(got.gradients, autograd(want, made))
    assert stacks_of(got.engine) and got.parts["first"].counting.rows == x.shape[0]


@pytest.mark.parametrize(
    "order", [Order(max_rows=4), pytest.param(Order("processes", 1), marks=pytest.mark.slow)]
)
def test_what_is_put_out_is_as_by_steps(order):
    data, found = points(), []
    for run in ("auto", "steps"):
        graph = graph_of("ends", modules(), run)
        got = one_pass(graph, data, order, train=False, collect=True)
        assert bool(stacks_of(got.engine)) == (run == "auto")
        found.append(got.collected)
    made = modules()
    h = made["first"](torch.cat([each.inputs["x"] for each in data]))
    mean, spread = made["coder"](h)
    want = {"hidden": h, "spread": spread, "scores out": made["scores"](mean)}
    for collected in found:
        assert set(collected) == set(want)
        for name, rows in want.items():
            serials = np.concatenate([each[0] for each in collected[name]])
            (put_out,) = zip(*[each[-1] for each in collected[name]], strict=True)
            assert sorted(serials) == list(range(len(data)))
            torch.testing.assert_close(torch.cat(put_out), rows[serials])


def test_nothing_is_kept_of_outputs_that_nobody_asks_for():
    got = accumulate(graph_of("ends", modules()), points())
    (node,) = stacks_of(got.engine)
    assert [end.collected for end in node.ends] == [None] * 4


@pytest.mark.parametrize("every", [4, 16])
def test_a_module_whose_rows_stop_does_not_step(every):
    """It is counted as by steps: its messages are answered, without a gradient."""
    found = []
    for run in ("auto", "steps"):
        made, graph = modules(), gt.Graph(run=run)
        h = graph.input("x").through(made["first"], name="first")
        h.through(made["second"], name="second").stop()
        h.loss(squared)
        rules = gt.Rules(update_every=gt.Instances(every))
        engine = Engine(graph, make_parts(graph, rules), Order(max_active=4).settings())
        got = one_pass(graph, [replace(each, value={}) for each in points(11)], engine=engine)
        assert bool(stacks_of(engine)) == (run == "auto")
        counted = {name: part.counting for name, part in got.parts.items()}
        found.append({n: (c.instances, c.messages, c.rows) for n, c in counted.items()})
        versions = {name: part.version for name, part in got.parts.items()}
        assert versions == {"first": 11 // every, "second": 0}
    assert found[0] == found[1]
    left = 11 % every
    assert found[0] == {"first": (left, left, left), "second": (left, left, 0)}


def test_what_nobody_judges_is_no_stack():
    graph = gt.Graph()
    h = graph.input("x").through(modules()["first"], name="first")
    h.through(torch.tanh, name="curve").output()
    assert "one firing" not in str(graph)


def test_what_is_put_out_one_message_at_a_time_is_a_node():
    for alone in (False, True):
        graph = gt.Graph()
        h = graph.input("x").through(modules()["first"], name="first")
        h.output(alone=alone)
        h.loss(squared)
        assert ("one firing" in str(graph)) != alone


@pytest.mark.parametrize("copies", [1, 2])
def test_it_is_named_as_its_first_module(copies):
    """What feeds it may be a broadcast, which says nothing to whoever reads figures by node."""
    made, graph = modules(), gt.Graph()
    x = graph.input("x")
    x.through(made["second"], name="second").loss(squared, name="size")
    x.through(made["first"], name="first").through(torch.tanh).loss(squared, name="own")
    wiring = wire(graph, lambda through: [Owner(through.function, None)] * copies)
    assert [node.name for node in wiring.nodes.values()] == ["second", "second#1"][:copies]
    assert "'second' runs with " in str(graph)


def test_an_evaluation_measures_the_same():
    made, data = modules(), points()
    got = one_pass(graph_of("chain", made), data, train=False)
    assert_same_loss(got, total_of("chain", made, data))
    assert got.sums["right"][1] == len(data)
    assert not any(part.gradient.holds for part in got.parts.values())


class Breaks(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.map, self.way, self.calls = nn.Linear(WIDTH, WIDTH).double(), way, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        if self.way == "backward" and y.requires_grad and y.shape[0] == 5:
            y.register_hook(lambda _: [][0])
        if self.way == "forward" and x.shape[0] == 5:
            raise KeyError("lost")
        return y


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_error_says_which_module_it_was(way):
    made, graph = modules(), gt.Graph()
    h = graph.input("x").through(made["first"], name="first")
    h.through(Breaks(way), name="breaks").through(made["second"], name="second").loss(squared)
    data = [replace(each, value={}) for each in points(5)]
    with pytest.raises(WorkerError, match=f"in node 'breaks' of part 'breaks', {way}, 5 rows"):
        accumulate(graph, data)


def test_an_error_of_a_loss_says_what_was_judged():
    made, data = modules(), points()
    data[3] = replace(data[3], value={"label": CLASSES, "weight": 1})
    with pytest.raises(DataError, match=r"'loss': .*instance 3.* has target 3") as caught:
        one_pass(graph_of("chain", made), data)
    told = "".join(caught.value.__notes__)
    assert "'scores' with loss 'loss' of part 'scores', forward, 11 rows" in told


def test_what_each_node_computes_is_asked_of_each():
    parts = make_parts(graph := graph_of("chain", modules()), gt.Rules(update_every=gt.Flush()))
    settings = replace(Order().settings(), meter=gt.FlopMeter())
    assert not stacks_of(Engine(graph, parts, settings))


def test_a_module_that_nobody_has_a_kernel_for_computes_its_loss_too():
    made, data = modules(), points()
    graph = gt.Graph(value=("label", "weight"))
    graph.input("x").through(made["coder"], name="coder").loss(apart)
    got = accumulate(graph, data)
    x = torch.cat([each.inputs["x"] for each in data])
    assert_same_gradients(got.gradients, autograd(apart(*made["coder"](x)).sum(), made))
    assert len(stacks_of(got.engine)) == 1


def test_the_printed_graph_says_what_runs_together():
    told = str(graph_of("heads", modules())).splitlines()[-1]
    assert told.strip() == (
        "on one worker, with updates of instances, 'first' runs with scores, loss, shifted, size, "
        "own, first broadcast, there and back in one firing"
    )
    assert "one firing" not in str(graph_of("heads", modules(), "steps"))


class Cut(nn.Module):
    """Lets no gradient through."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2


@pytest.mark.parametrize("ends", [Cut(), lambda x: x.argmax(1)], ids=["detached", "whole numbers"])
def test_rows_that_no_gradient_comes_back_for_are_not_counted(ends):
    """A part that is in front of such, and elsewhere too, learns from its other rows alone."""
    data, counted = [replace(each, value={}) for each in points(8)], []
    for run in ("auto", "steps"):
        made, graph = modules(), gt.Graph(run=run)
        h = graph.input("x").through(made["first"], name="first")
        h.through(ends, name="ends").loss(lambda y: y.double().reshape(len(y), -1).sum(1))
        h = graph.input("again").through(made["second"], name="second").through(torch.tanh)
        h.through(made["first"], name="again first").loss(squared, name="size")
        both = [replace(e, inputs=dict(e.inputs) | {"again": e.inputs["x"]}) for e in data]
        got = accumulate(graph, both)
        x = torch.cat([each.inputs["x"] for each in data])
        want = squared(made["first"](torch.tanh(made["second"](x)))).sum()
        assert_same_gradients(got.gradients, autograd(want, made))
        assert bool(stacks_of(got.engine)) == (run == "auto")
        first = got.parts["first"]
        counted.append((first.counting.rows, first.counting.messages, list(first.histogram())))
    assert counted[0] == counted[1] and counted[0][0] == len(data)
