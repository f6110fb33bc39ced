"""Loops and sections that run whole with all that is near them, from the inputs to the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.errors import DataError, NonFiniteError
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.node import AbstractNode
from tests.rigs.passes import Order, Quiet, accumulate, assert_same_gradients, autograd, one_pass

WIDTH, CLASSES = 4, 3


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "cell")}
    made["readout"], made["side"] = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
    return {name: module.double() for name, module in made.items()}


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


def told(h: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return h, hidden


def program(
    made: dict[str, nn.Module],
    *,
    output: bool = False,
    update: Callable[[nn.Module, str], Any] = lambda module, name: None,
) -> gt.Graph:
    """A cell that is run ``steps`` times; its state is judged twice, and picked apart between."""
    graph = gt.Graph(value=("steps", "label", "weight"))
    again = graph.loop(name="again")
    x = graph.input("x", step=0)
    again.join(x.through(made["first"], name="first", part=update(made["first"], "first")))
    pair = again.through(made["cell"], name="cell").through(lambda h: (h, torch.tanh(h)), name="2")
    hidden = pair.through(lambda h, hidden: hidden, name="hidden")
    done, more = hidden.where(lambda m: m.step + 1 >= m.steps)
    again.join(more.move(step=lambda m: m.step + 1))
    scores = done.through(made["readout"], name="readout")
    scores.loss(
        gt.cross_entropy,
        target="label",
        weight="weight",
        metrics={"accuracy": gt.Metric(gt.accuracy)},
    )
    side = done.through(made["side"], name="side").through(nn.Identity(), name="as it is")
    side.loss(squared, name="size", label="size")
    if output:
        scores.output("scores")
    return graph


def points(n: int = 9, **changed: int) -> list[gt.Instance]:
    torch.manual_seed(1)
    found = []
    for k in range(n):
        value = {"steps": 1 + k % 4, "label": k % CLASSES, "weight": 1 + k % 2}
        x = torch.randn(1, WIDTH, dtype=torch.float64)
        found.append(gt.Instance({"x": x}, value=value | changed))
    return found


def plain(made: dict[str, nn.Module], data: list[gt.Instance]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for instance in data:
        h, value = made["first"](instance.inputs["x"]), instance.value
        for _ in range(int(value["steps"])):
            h = torch.tanh(made["cell"](h))
        label = torch.tensor([int(value["label"])])
        loss = nn.functional.cross_entropy(made["readout"](h), label) * int(value["weight"])
        total = total + loss + squared(made["side"](h)).sum()
    return total


def nodes_of(graph: gt.Graph, **settings: Any) -> list[AbstractNode]:
    workers, placement = settings.pop("workers", 1), settings.pop("placement", None)
    rules = settings.pop("rules", gt.Rules(update_every=gt.Flush()))
    parts = make_parts(graph, rules)
    engine = Engine(graph, parts, Settings(**settings), workers, placement)
    return list(engine.wiring.nodes.values())


def names(graph: gt.Graph, **settings: Any) -> set[str]:
    return {node.name for node in nodes_of(graph, **settings)}


ALL = {"again", "again door"}


@pytest.mark.parametrize("reach", [True, False])
@pytest.mark.parametrize("most", [4096, 2])
def test_gradients_losses_and_metrics_are_those_of_plain_torch(reach, most):
    made, data = modules(), points()
    want = plain(made, data)
    graph = program(made)
    assert (names(graph, reach=reach) == ALL) == reach
    got = accumulate(graph, data, Order(reach=reach, max_rows=most))
    total = sum(got.sums[name][0] for name in ("loss", "size"))
    assert total == pytest.approx(want.item(), rel=1e-12)
    assert got.sums["loss"][1] == got.sums["size"][1] == got.sums["accuracy"][1] == len(data)
    assert_same_gradients(got.gradients, autograd(want, made))


def test_instances_go_forward_and_back_in_one_firing():
    fired: list[tuple[str, int, bool]] = []

    class Seen(Quiet):
        def fired(self, worker: int, firing: Firing, start_s: float, end_s: float) -> None:
            fired.append((firing.node, firing.rows, firing.both))

    graph, rules = program(modules()), gt.Rules(update_every=gt.Instances(3))
    order = Order(max_active=3)
    got = one_pass(graph, points(9), order, rules=rules, watch=Seen())
    assert fired == [("again door", 3, False), ("again", 3, True)] * 3
    assert {part.version for part in got.parts.values()} == {3}


def test_what_is_collected_and_evaluated_is_the_same():
    data, found = points(), []
    for reach in (True, False):
        made = modules()
        got = one_pass(
            program(made, output=True), data, Order(reach=reach), train=False, collect=True
        )
        (rows,) = [sorted_rows(got.collected["scores"])]
        found.append((rows, got.sums))
    for name, sums in found[0][1].items():
        assert sums == pytest.approx(found[1][1][name])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)


def sorted_rows(collected: Any) -> Tensor:
    """Rows in the order of their instances."""
    serials = torch.cat([torch.from_numpy(each) for each, *_ in collected])
    rows = torch.cat([x for *_, (x,) in collected])
    return rows[serials.argsort()]


def test_an_output_beside_a_loss_is_answered_before_the_way_back():
    made, data = modules(), points()
    want = plain(made, data)
    graph = program(made, output=True)
    assert names(graph) == ALL | {"scores"}
    got = accumulate(graph, data, Order(max_rows=2))
    assert_same_gradients(got.gradients, autograd(want, made))


def test_losses_stay_nodes_where_they_are_placed_or_judge_one_at_a_time():
    made = modules()
    assert "size" in names(program(made), placement={"size": 0})
    graph = gt.Graph(value=("steps", "label", "weight"))
    again = graph.loop(name="again")
    again.join(graph.input("x", step=0).through(made["first"], name="first"))
    done, more = again.through(made["cell"], name="cell").where(lambda m: m.step + 1 >= m.steps)
    again.join(more.move(step=lambda m: m.step + 1))
    done.loss(squared, alone=True)
    assert names(graph) == ALL | {"loss"}


@pytest.mark.parametrize(
    "settings",
    [
        {"reach": False},
        {"workers": 2},
        {"rules": gt.Rules(update_every=3)},
        {"rules": gt.Rules(update_every=gt.Rows(3))},
        {"rules": gt.Rules(update_every=gt.Instances(3), window=8)},
        {"placement": {"2": 0}},
    ],
)
def test_each_operator_is_a_node_where_workers_or_parts_want_it(settings):
    assert "readout" in names(program(modules()), **settings)


def test_a_loop_by_steps_takes_nothing_with_it():
    graph = program(modules())
    graph.run = "steps"
    assert not any(isinstance(node, LoopNode) for node in nodes_of(graph))


class Mixed(nn.Module):
    """Rows of a bundle hear of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        total = x.new_zeros(len(inside.lengths), WIDTH).index_add(0, inside.segment, x)
        return torch.tanh(self.map(x + total[inside.segment]))


def test_nothing_reaches_into_a_part_of_a_loop_that_makes_its_rows_of_bundles():
    """Without the bundles, that loop would be all near the section beside it."""

    def beside(run: str) -> gt.Graph:
        torch.manual_seed(0)
        maps = iter([nn.Linear(WIDTH, WIDTH).double() for _ in range(4)])
        graph = gt.Graph(value=("steps",), run=run)
        members = graph.input("x", step=0).group(by="instance", size=lambda m: m.size, how="bundle")
        mixed = members.through(Mixed().double(), name="mixed", inside=True, keep="inputs")
        rows = mixed.ungroup(index="vertex")
        again = graph.loop(name="again")
        again.join(rows)
        step = again.through(next(maps), name="cell").move(step=lambda m: m.step + 1)
        done, more = step.where(lambda m: m.step >= m.steps)
        again.join(more)
        done.through(next(maps), name="last", keep="graph").loss(squared, name="size")
        first, other = rows.through(torch.sin, name="sin").where(lambda m: m.vertex % 2 == 0)
        ways = [some.through(next(maps), name=f"way {k}") for k, some in enumerate((first, other))]
        graph.merge(*ways).loss(squared, name="other size")
        return graph

    data = [
        gt.Instance({"x": torch.randn(n, WIDTH, dtype=torch.float64)}, value={"steps": 1 + n % 3})
        for n in (2, 1, 4, 3)
    ]
    found = names(beside("auto"))
    assert {"again", "again door"} <= found
    whole, steps = (accumulate(beside(run), data, Order(max_active=2)) for run in ("auto", "steps"))
    assert_same_gradients(whole.gradients, steps.gradients)


def trees(n: int = 6) -> list[gt.Instance]:
    """Two trees an instance: 0 and 1 become 2, 3 and 4 become 5; or each a leaf alone, 0 and 1."""
    rng, found = torch.Generator().manual_seed(2), []
    for k in range(n):
        parent = [2, 2, -1, 5, 5, -1] if k % 3 else [-1, -1]
        tree = [0, 0, 0, 1, 1, 1] if k % 3 else [0, 1]
        leaves = [0, 1, 3, 4] if k % 3 else [0, 1]
        x = torch.randn(len(leaves), WIDTH, dtype=torch.float64, generator=rng)
        found.append(gt.Instance({"x": (x, leaves)}, {"parent": parent, "tree": tree}))
    return found


def compared(run: Any = "auto", *, held: bool = False, elsewhere: bool = False) -> gt.Graph:
    """Roots, or all vertices, of two trees that a loop walks up, meet behind it."""
    torch.manual_seed(0)
    first, cell, last, other = (nn.Linear(WIDTH, WIDTH).double() for _ in range(4))
    graph = gt.Graph(vertex=("parent", "tree"), run=run)
    again = graph.loop(name="again")
    again.join(graph.input("x").through(first, name="first"))
    inner, root = again.where(lambda m: m.parent >= 0)
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, how="sum")
    again.join(pairs.through(cell, name="cell"))
    read = root.through(last, name="last")
    if not held:
        two = read.group(by="instance", size=2, order="tree", name="two")
        two.through(lambda two: two[:, 0] * torch.tanh(two[:, 1]), name="far").loss(squared)
        return graph
    read.stop()
    every = again.group(by={"vertex": 0}, size=lambda m: m.size, order="vertex", how="bundle")
    memory = every.hold(name="memory")
    start = memory.through(ends, name="start", inside=True, pool=True).move(turn=0)
    turns = graph.loop(name="turns")
    turns.join(start)
    if elsewhere:
        by_itself = start.through(other, name="other", keep="graph")
        by_itself.attend(memory, Heard(), name="hear too").loss(squared)
    step = turns.attend(memory, Heard(), name="hear").move(turn=lambda m: m.turn + 1)
    more, done = step.where(lambda m: m.turn < 2)
    turns.join(more)
    done.loss(squared)
    return graph


def ends(x: Tensor, inside: gt.Inside) -> Tensor:
    return x[inside.lengths.cumsum(0) - 1]


class Heard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        score = (memory @ h[:, :, None])[..., 0].masked_fill(~mask, -1e9)
        return torch.tanh(h + self.map((score.softmax(1)[:, None] @ memory)[:, 0]))


def test_a_loop_takes_the_section_behind_it_whose_rows_only_it_can_count():
    assert "section 'last' runs by steps, as how many rows enter it" in str(compared())
    assert ", unless it goes with others, as said below: last" in str(compared())
    assert names(compared()) == ALL
    assert {"last", "two", "far"} <= names(compared(), reach=False)
    whole, steps = (accumulate(compared(run), trees(), Order()) for run in ("auto", "steps"))
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])


@pytest.mark.parametrize("most", [4096, 2])
def test_loops_take_what_is_held_between_them_once_no_graph_of_autograds_is_lost(most):
    graph = compared(held=True)
    assert {"again", "turns", "memory"} <= names(graph)
    for through in graph.throughs():
        through.experience.chosen = "derived"
    assert names(graph) == ALL
    order = Order(max_rows=most)
    whole = accumulate(graph, trees(), order)
    steps = accumulate(compared("steps", held=True), trees(), order)
    assert_same_gradients(whole.gradients, steps.gradients)
    assert whole.sums["loss"] == pytest.approx(steps.sums["loss"])


def test_what_is_read_elsewhere_too_is_held_outside():
    whole, steps = (compared(run, held=True, elsewhere=True) for run in ("auto", "steps"))
    for through in whole.throughs():
        through.experience.chosen = "derived"
    assert {"memory", "hear too", "again", "turns"} <= names(whole)
    found = [accumulate(graph, trees(), Order()) for graph in (whole, steps)]
    assert_same_gradients(found[0].gradients, found[1].gradients)


def test_a_target_that_is_no_class_is_told_with_loss_and_instance():
    data = [*points(3), *points(1, label=7), *points(2)]
    with pytest.raises(DataError, match=r"'loss': instance 3 has target 7, .* 0..2"):
        one_pass(program(modules()), data)


def test_a_loss_that_is_not_finite_is_refused():
    made = modules()
    with torch.no_grad():
        made["readout"].bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="'loss'"):
        one_pass(program(made), points(3))


def test_runs_with_and_without_have_the_same_weights():
    found = []
    for reach in (True, False):
        made = modules()
        rules = gt.Rules(update_every=gt.Instances(4), optimizer=lambda p: torch.optim.SGD(p, 0.1))
        graph = program(made)
        parts = make_parts(graph, rules)
        order = Order(max_active=4, reach=reach)
        for _ in range(3):
            one_pass(graph, points(12), order, parts=parts)
        found.append([p.detach().clone() for m in made.values() for p in m.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("again", [True, False], ids=["loop", "layers"])
def test_what_looks_inside_bundles_that_are_ungrouped_goes_with_their_loss(again):
    def layers(run: str) -> gt.Graph:
        torch.manual_seed(0)
        graph = gt.Graph(value=("steps",), run=run)
        first, second = Mixed().double(), Mixed().double()
        x = graph.input("x", bundle=True, step=0)
        if again:
            rounds = graph.loop(name="rounds")
            rounds.join(x)
            step = rounds.through(first, name="first", inside=True).move(step=lambda m: m.step + 1)
            x, more = step.where(lambda m: m.step >= m.steps)
            rounds.join(more)
        else:
            x = x.through(first, name="first", inside=True)
            x = x.through(second, name="second", inside=True)
        rows = x.ungroup(index="vertex").through(nn.Linear(WIDTH, WIDTH).double(), name="last")
        rows.loss(squared, name="size")
        return graph

    data = [
        gt.Instance({"x": torch.randn(n, WIDTH, dtype=torch.float64)}, value={"steps": 1 + n % 3})
        for n in (2, 1, 4, 3)
    ]
    found = {name.removesuffix(" section") for name in names(layers("auto"))}
    assert not found & {"second", "last", "size"}
    orders = Order(max_active=2), Order(max_active=4), Order(policy="backward", max_rows=1)
    steps = accumulate(layers("steps"), data, orders[0])
    for order in orders:
        assert_same_gradients(accumulate(layers("auto"), data, order).gradients, steps.gradients)


class Pooled(nn.Module):
    """One row of each bundle: the mean of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inside: gt.Inside) -> Tensor:
        total = x.new_zeros(len(inside.lengths), WIDTH)
        return total.index_add(0, inside.segment, self.map(x)) / inside.lengths[:, None]


def two_tasks(run: str, *, bundles: bool) -> gt.Graph:
    """No loop, and no section: rows are judged, and then all of an instance."""
    torch.manual_seed(0)
    trunk, each, last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
    graph = gt.Graph(value=("steps",), run=run)
    h = graph.input("x", bundle=bundles).through(trunk, name="trunk")
    if bundles:
        h = h.through(Mixed().double(), name="mixed", inside=True)
        one = h.through(Pooled().double(), name="pooled", inside=True, pool=True)
    else:
        h.through(each, name="each").loss(squared, name="of each", label="of each")
        one = h.group(by="instance", size=lambda m: m.size, how="mean")
    one.through(last, name="last").loss(squared, name="of all", label="of all")
    return graph


def sets() -> list[gt.Instance]:
    torch.manual_seed(2)
    return [
        gt.Instance({"x": torch.randn(n, WIDTH, dtype=torch.float64)}, value={"steps": 1})
        for n in (2, 1, 4, 3)
    ]


@pytest.mark.parametrize("bundles", [True, False])
def test_modules_up_to_their_losses_are_one_firing_where_rows_meet(bundles):
    assert names(two_tasks("auto", bundles=bundles)) == {"trunk", "trunk door"}
    assert "'trunk' runs with " in str(two_tasks("auto", bundles=bundles))
    assert "trunk door" not in names(two_tasks("steps", bundles=bundles))
    data = sets()
    orders = Order(max_active=2), Order(max_active=4), Order(policy="backward", max_rows=1)
    steps = accumulate(two_tasks("steps", bundles=bundles), data, orders[0])
    for order in orders:
        whole = accumulate(two_tasks("auto", bundles=bundles), data, order)
        assert_same_gradients(whole.gradients, steps.gradients)
        assert whole.sums["of all"] == pytest.approx(steps.sums["of all"])


@pytest.mark.parametrize(
    "rules",
    [
        gt.Rules(update_every=gt.Instances(2), max_staleness=1),
        gt.Rules(update_every=gt.Rows(2)),
    ],
    ids=["ages are looked at", "rows are counted"],
)
def test_they_are_nodes_where_parts_want_it(rules):
    found = names(two_tasks("auto", bundles=False), rules=rules)
    assert found >= {"trunk", "each", "last"}
    assert "trunk door" not in found
