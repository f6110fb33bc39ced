"""Operators without a loop that run whole, where rows part or meet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.errors import StuckError, WorkerError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loop.node import LoopNode
from geartrain.parts.rules import Rules
from geartrain.parts.triggers import Rows
from tests.rigs.passes import Order, Quiet, accumulate, assert_same_gradients, autograd, one_pass

WIDTH, WAYS = 3, 3


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    names = [f"{layer}{k}" for layer in "ab" for k in range(WAYS)]
    made = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", *names, "last")}
    return {name: module.double() for name, module in made.items()}


def points(n: int = 7) -> list[Instance]:
    torch.manual_seed(1)
    return [
        Instance({"x": torch.randn(1 + k % 3, WIDTH, dtype=torch.float64)}, value={"n": 1 + k % 3})
        for k in range(n)
    ]


def routed(made: dict[str, nn.Module], run: str = "auto") -> Graph:
    """Two layers of experts, chosen by the payload, and a sum over the rows of an instance."""
    graph = Graph(value=("n",), run=run)  # type: ignore[arg-type]
    h = graph.input("x", k=0).through(made["first"], name="first")
    for layer in "ab":
        ways = h.route(lambda m: m.payload[0].argmax(1), WAYS, name=f"route {layer}")
        said = [w.through(made[f"{layer}{k}"], name=f"{layer}{k}") for k, w in enumerate(ways)]
        h = graph.merge(*said)
    summed = h.group(by="instance", size=lambda m: m.n, how="sum", name="sum")
    summed.through(made["last"], name="last").loss(squared)
    return graph


def plain(made: dict[str, nn.Module], data: list[Instance]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for instance in data:
        rows = []
        for x in instance.inputs["x"].split(1):
            h = made["first"](x)
            for layer in "ab":
                h = made[f"{layer}{int(h.argmax())}"](h)
            rows.append(h)
        total = total + squared(made["last"](torch.stack(rows).sum(0))).sum()
    return total


def sections_of(outcome) -> list[LoopNode]:
    return [n for n in outcome.engine.wiring.nodes.values() if isinstance(n, LoopNode)]


ORDERS = [Order(), Order(max_rows=1, max_active=4), Order(policy="random", seed=3, max_rows=2)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_gradients_of_a_section_that_runs_whole_are_those_of_autograd(order):
    made, data = modules(), points()
    got = accumulate(routed(made), data, order)
    assert_same_gradients(got.gradients, autograd(plain(made, data), made))
    (section,) = sections_of(got)
    assert section.name == "first section"
    assert order.max_rows is not None or section.calls <= 1 + 2 * WAYS


def test_a_graph_that_is_to_run_by_steps_does():
    made, data = modules(), points()
    got = accumulate(routed(made, "steps"), data)
    assert not sections_of(got)
    assert_same_gradients(got.gradients, autograd(plain(made, data), made))
    with pytest.raises(ValueError, match=r"Graph\(run='whole'\): give 'auto' or 'steps'"):
        Graph(run="whole")  # type: ignore[arg-type]


def test_loops_of_a_graph_that_is_to_run_by_steps_do_unless_they_say_otherwise():
    for run, whole in ((None, 0), ("whole", 1)):
        graph = Graph(value=("n",), run="steps")
        state = graph.loop(run=run)  # type: ignore[arg-type]
        state.join(graph.input("x", k=0))
        step = state.through(nn.Linear(WIDTH, WIDTH).double(), name="cell").move(
            k=lambda m: m.k + 1
        )
        more, done = step.where(lambda m: m.k < m.n)
        state.join(more)
        done.loss(squared)
        assert len(sections_of(accumulate(graph, points()))) == whole


def test_the_printed_graph_says_which_operators_run_whole():
    told = str(routed(modules()))
    assert "section 'first' runs whole, unless its parts count rows or have windows" in told
    assert "payload decides (route a, route b): first, route a, a0" in told
    section, _, reach = told.rpartition("section 'first'")[2].partition("\n")
    assert "last" not in section  # is computed with its loss
    assert reach == "  on one worker, with updates of instances, 'first' runs with last, loss"
    assert "section" not in str(routed(modules(), "steps"))


def test_a_section_of_parts_that_count_rows_runs_by_steps():
    graph, rules = routed(modules()), Rules(update_every=Rows(2))
    engine = Engine(graph, make_parts(graph, rules), Settings(), 1)
    assert not any(isinstance(n, LoopNode) for n in engine.wiring.nodes.values())


def test_members_that_never_come_to_a_section_are_told():
    data = [Instance(i.inputs, value={"n": 9}) for i in points()]
    with pytest.raises(StuckError, match=r"a section that runs whole has come .*\n  'sum' waits"):
        accumulate(routed(modules()), data)


def test_rows_that_only_pass_from_module_to_module_are_no_section():
    graph = Graph(value=("n",))
    x = graph.input("x").through(nn.Linear(WIDTH, WIDTH).double()).through(torch.tanh)
    x.move(k=lambda m: m.n).through(nn.Linear(WIDTH, 1).double()).loss(squared)
    assert "section" not in str(graph)


def test_what_waits_for_rows_that_a_section_has_sent_away_is_not_in_it():
    """One side is made by a node that cannot run whole; the join waits for both."""
    made, data = modules(), points()
    graph = Graph(value=("n",))
    x = graph.input("x", k=0)
    ways = x.through(made["first"], name="first").route(
        lambda m: m.payload[0].argmax(1), WAYS, name="route"
    )
    said = [w.through(made[f"a{k}"], name=f"a{k}") for k, w in enumerate(ways)]
    h = graph.merge(*said).group(by="instance", size=lambda m: m.n, how="sum", name="sum")
    kept = h.through(made["b0"], name="b0", keep="graph")
    joined = graph.concat(
        kept, h.through(made["b1"], name="b1"), on="k", how="tuple", name="joined"
    )
    both = joined.through(torch.add, name="both").through(made["b2"], name="b2")
    both.through(made["last"], name="last").loss(squared)
    total = torch.zeros((), dtype=torch.float64)
    for instance in data:
        y = made["first"](instance.inputs["x"])
        h = torch.stack([made[f"a{int(r.argmax())}"](r) for r in y]).sum(0)
        total = total + squared(made["last"](made["b2"](made["b0"](h) + made["b1"](h)))[None]).sum()
    got = accumulate(graph, data, Order(max_rows=2, max_active=5))
    assert_same_gradients(got.gradients, autograd(total, made))
    assert [s.name for s in sections_of(got)] == ["first section"]
    assert "section 'joined' runs by steps, as how many rows enter it is known to" in str(graph)


def test_an_error_in_a_section_names_the_module():
    def fails(x: Tensor) -> Tensor:
        if x.dtype is torch.float64 and bool((x > -1e9).all()) and x.shape[0] > 4:
            raise ArithmeticError("too many")
        return x

    graph = Graph(value=("n",))
    ways = graph.input("x").through(fails, name="fails").where(lambda m: m.n > 1)
    for k, way in enumerate(ways):
        way.through(nn.Linear(WIDTH, 1).double(), name=f"out {k}").loss(squared, name=f"loss {k}")
    with pytest.raises(WorkerError, match="ArithmeticError in node 'fails'"):
        accumulate(graph, points(9))


def ending(made: dict[str, nn.Module], run: str = "auto") -> Graph:
    """Some rows end between two modules, and others when they leave a loop."""
    graph = Graph(value=("n",), run=run)  # type: ignore[arg-type]
    h = graph.input("x", k=0).through(made["first"], name="first")
    on, off = h.where(lambda m: m.payload[0][:, 0] > 0, name="parts")
    off.stop(name="off")
    loop = graph.loop(name="loop")
    loop.join(on.through(made["a0"], name="a0"))
    turned = loop.through(made["b0"], name="b0")
    turned.through(made["last"], name="last").loss(squared)
    more, done = turned.move(k=lambda m: m.k + 1).where(lambda m: m.k < m.n)
    loop.join(more)
    done.stop(name="done")
    return graph


def ended(made: dict[str, nn.Module], data: list[Instance]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for k, instance in enumerate(data):
        for x in instance.inputs["x"].split(1):
            h = made["first"](x)
            if h[0, 0] <= 0:
                continue
            h = made["a0"](h)
            for _ in range(1 + k % 3):
                h = made["b0"](h)
                total = total + squared(made["last"](h)).sum()
    return total


@pytest.mark.parametrize("run", ["auto", "steps"])
@pytest.mark.parametrize("order", [*ORDERS, Order("threads", 2, max_active=3)], ids=str)
def test_rows_that_end_get_no_gradient_and_the_others_that_of_autograd(order, run):
    made, data = modules(), points()
    got = accumulate(ending(made, run), data, order)
    named = ("first", "a0", "b0", "last")
    assert_same_gradients(
        got.gradients, autograd(ended(made, data), {name: made[name] for name in named})
    )


def test_rows_end_in_what_runs_whole_and_nobody_answers_for_them():
    made, data, fired = modules(), points(), []

    class Seen(Quiet):
        def fired(self, worker, firing, start_s, end_s):
            fired.append(firing.node)

    one_pass(ending(made), data, Order(max_active=7), watch=Seen())
    assert [name for name in fired if not name.endswith("door")] == ["loop"]
