"""Modules of a loop that are called at one time, taken together where their kernels are alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.native import library
from geartrain.nodes.loop.node import LoopNode
from tests.rigs.passes import Order, accumulate, assert_same_gradients, autograd, one_pass

EXPERTS, WIDTH, TURNS = 3, 4, 4


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, EXPERTS)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.choose(h).softmax(1)


class Expert(nn.Module):
    """Those of a graph differ in a number, so each has a trace of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.map = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, worth: Tensor) -> Tensor:
        return h + worth[:, self.number : self.number + 1] * torch.tanh(self.map(h))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, pair: Tensor) -> Tensor:
        return torch.tanh(self.map(pair.flatten(1)))


def squared(x: Tensor) -> Tensor:
    return x.square().sum(1)


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made = {"router": Router(), **{f"expert {k}": Expert(k) for k in range(EXPERTS)}}
    made |= {f"pair {k}": Pair() for k in range(2)}
    return {name: module.double() for name, module in made.items()}


def choice(worth: Tensor, x: Tensor) -> Tensor:
    """As different rows choose, at random weights too."""
    return (worth.argmax(1) + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()) % EXPERTS


def routed(
    made: dict[str, nn.Module], keep: str, looks: bool = True, read: tuple[str, ...] = ()
) -> Graph:
    graph = Graph(value=("turns", "way"))
    rounds = graph.loop(name="rounds", run="whole")
    rounds.join(graph.input("x", turn=0))
    ways = rounds.through(made["router"], name="router", keep=keep).route(
        (lambda m: choice(m.payload[1], m.payload[0]))
        if looks
        else (lambda m: (m.way + m.turn) % EXPERTS),
        EXPERTS,
    )
    said = [
        way.through(made[f"expert {k}"], name=f"expert {k}", keep=keep, read=read)
        for k, way in enumerate(ways)
    ]
    stepped = graph.merge(*said).move(turn=lambda m: m.turn + 1)
    more, done = stepped.where(lambda m: m.turn < m.turns)
    rounds.join(more)
    done.loss(squared)
    return graph


def points(n: int) -> list[Instance]:
    torch.manual_seed(1)
    return [
        Instance(
            {"x": torch.randn(1, WIDTH, dtype=torch.float64)},
            value={"turns": 2 + k % TURNS, "way": k % EXPERTS},
        )
        for k in range(n)
    ]


def plain(made: dict[str, nn.Module], data: list[Instance], looks: bool = True) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for k, instance in enumerate(data):
        h = instance.inputs["x"]
        for turn in range(2 + k % TURNS):
            h, worth = made["router"](h)
            way = int(choice(worth, h)) if looks else (k % EXPERTS + turn) % EXPERTS
            h = made[f"expert {way}"](h, worth)
        total = total + squared(h).sum()
    return total


def in_c() -> bool:
    """Whether there are kernels in C: without them nothing is taken together."""
    return library.current() is not None


def loop_of(outcome) -> LoopNode:
    (found,) = (n for n in outcome.engine.wiring.nodes.values() if isinstance(n, LoopNode))
    return found


def learned(made: dict[str, nn.Module], total: Tensor, *names: str):
    return autograd(total, {name: made[name] for name in made if name.startswith(names)})


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("order", [Order(), Order(policy="backward", max_rows=1, max_active=7)])
def test_experts_that_are_taken_together_get_the_gradients_of_autograd(looks, order):
    made, data = modules(), points(9)
    want = learned(made, plain(made, data, looks), "router", "expert")
    got = accumulate(routed(made, "activations", looks), data, order)
    assert_same_gradients(got.gradients, want)
    assert order.max_rows == 1 or loop_of(got).together >= 2 * in_c()


class Normed(nn.Module):
    """An expert whose norm has weights: their gradients are added up over its rows alone."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.norm, self.map = number, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.norm.weight)

    def forward(self, h: Tensor, worth: Tensor) -> Tensor:
        return h + worth[:, self.number : self.number + 1] * torch.tanh(self.map(self.norm(h)))


def test_experts_with_norms_are_taken_together_and_each_norm_learns_of_its_rows():
    made, data = modules(), points(9)
    made |= {f"expert {k}": Normed(k).double() for k in range(EXPERTS)}
    want = learned(made, plain(made, data), "router", "expert")
    got = accumulate(routed(made, "activations"), data)
    assert_same_gradients(got.gradients, want)
    assert loop_of(got).together >= 2 * in_c()


class CountedExpert(nn.Module):
    """An expert that reads how often its rows have gone round."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.expert = Expert(number)

    def forward(self, h: Tensor, worth: Tensor, turn: Tensor | int) -> Tensor:
        times: Tensor = 2 + turn * torch.ones_like(worth[:, 0])
        return self.expert(h, worth / times[:, None])


def test_experts_that_read_a_column_are_taken_together_and_each_row_has_its_own():
    made, data = modules(), points(20)  # the first few try what the experts are
    made |= {f"expert {k}": CountedExpert(k).double() for k in range(EXPERTS)}
    total = torch.zeros((), dtype=torch.float64)
    for k, instance in enumerate(data):
        h = instance.inputs["x"]
        for turn in range(2 + k % TURNS):
            h, worth = made["router"](h)
            h = made[f"expert {int(choice(worth, h))}"](h, worth, turn)
        total = total + squared(h).sum()
    got = accumulate(routed(made, "activations", read=("turn",)), data)
    assert_same_gradients(got.gradients, learned(made, total, "router", "expert"))
    assert loop_of(got).together >= 2 * in_c()


def test_experts_that_run_again_are_called_each_by_itself():
    made, data = modules(), points(9)
    want = learned(made, plain(made, data), "router", "expert")
    got = accumulate(routed(made, "inputs"), data)
    assert_same_gradients(got.gradients, want)
    assert loop_of(got).together == 0


def test_an_expert_of_another_form_is_called_by_itself():
    made, data = modules(), points(9)
    deeper = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    made["expert 1"].map = deeper.double()
    want = learned(made, plain(made, data), "router", "expert")
    got = accumulate(routed(made, "activations"), data)
    assert_same_gradients(got.gradients, want)


def test_an_evaluation_takes_nothing_together_and_finds_the_same_loss():
    made, data = modules(), points(9)
    got = one_pass(routed(made, "activations"), data, train=False)
    assert got.sums["loss"][0] == pytest.approx(float(plain(made, data).detach()))
    assert loop_of(got).together == 0


def trees(made: dict[str, nn.Module]) -> Graph:
    graph = Graph(vertex=("parent", "slot", "kind"))
    nodes = graph.loop(name="nodes", run="whole")
    nodes.join(graph.input("x"))
    inner, root = nodes.where(lambda m: m.parent >= 0)
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
    for k, operands in enumerate(pairs.route(lambda m: m.kind, 2)):
        nodes.join(operands.through(made[f"pair {k}"], name=f"pair {k}", keep="activations"))
    root.loss(squared)
    return graph


def test_kinds_of_vertices_of_a_tree_get_the_gradients_of_autograd():
    made, data, total = modules(), [], torch.zeros((), dtype=torch.float64)
    kind = [0] * 8 + [0, 1, 1, 0, 0, 1, 1]
    parent = [8 + k // 2 for k in range(8)] + [12, 12, 13, 13, 14, 14, -1]
    torch.manual_seed(2)
    for _ in range(3):
        x = torch.randn(8, WIDTH, dtype=torch.float64)
        columns = {"parent": parent, "slot": [k % 2 for k in range(15)], "kind": kind}
        data.append(Instance({"x": (x, list(range(8)))}, columns))
        rows = list(x[:, None])
        for v in range(8, 15):
            below = torch.stack([rows[2 * (v - 8)], rows[2 * (v - 8) + 1]], 1)
            rows.append(made[f"pair {kind[v]}"](below))
        total = total + squared(rows[-1]).sum()
    got = accumulate(trees(made), data)
    assert_same_gradients(got.gradients, learned(made, total, "pair"))
    assert loop_of(got).together == in_c()  # at the second height; kinds are alone elsewhere
