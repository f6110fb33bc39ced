"""Ready shapes: losses and gradients of each parameter are those of plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import geartrain as gt
from geartrain.errors import DataError, WorkerError
from geartrain.nn import (
    GatedGraphCell,
    GatedSum,
    MessagePassing,
    Recurrent,
    Tree,
    TreeLSTMBranch,
    TreeLSTMLeaf,
    VertexChoice,
    choice_accuracy,
    choice_loss,
    first_states,
)
from tests.rigs.passes import (
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
)

ORDERS = (
    Order(),
    Order(workers=3, jitter=0.9, seed=2, policy="random", max_rows=5),
    Order("threads", 2, "random", 4),
)
H = 4


@pytest.fixture(params=ORDERS, ids=lambda order: f"{order.runtime}{order.workers}{order.policy}")
def order(request: pytest.FixtureRequest) -> Order:
    return request.param


def agree(
    graph: gt.Graph,
    data: Sequence[gt.Instance],
    plain: Callable[[gt.Instance], Tensor],
    modules: dict[str, nn.Module],
    order: Order,
) -> None:
    """Losses and gradients of the graph are those of ``plain``, summed over the data."""
    total = torch.stack([plain(instance) for instance in data]).sum()
    got = accumulate(graph, data, order)
    assert_same_loss(got, total)
    want = autograd(total, modules)
    assert all(bool(d.any()) for d in want.values())
    assert_same_gradients(got.gradients, want)


# --- lists


class Reader(nn.Module):
    """A recurrent cell with a state of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(7, 3), nn.LSTMCell(3, H)

    def forward(self, h: Tensor, c: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(self.words(token), (h, c))


def two_zeros(x: Tensor) -> tuple[Tensor, Tensor]:
    zeros = first_states(H, dtype=torch.float64)
    return zeros(x), zeros(x)


def hidden(h: Tensor, c: Tensor) -> Tensor:
    return h


def list_of(rng: np.random.Generator) -> gt.Instance:
    n = int(rng.integers(1, 6))
    return gt.Instance(
        {"start": (torch.zeros(1, 1), [0])},
        {"token": rng.integers(0, 7, n), "tag": rng.integers(0, 3, n)},
        value={"label": int(rng.integers(3))},
    )


@pytest.mark.parametrize("every", [False, True])
def test_a_recurrent_cell_reads_each_list_to_its_end(every: bool, order: Order) -> None:
    torch.manual_seed(0)
    reader, readout = Reader().double(), nn.Linear(H, 3).double()
    graph = gt.Graph(vertex=("token", "tag"), value=("label",))
    shape = Recurrent(reader, read="token", name="reader")
    start = graph.input("start").through(two_zeros)
    states = shape.every(start) if every else shape(start)
    states.through(hidden).through(readout, name="readout").loss(
        gt.cross_entropy, "tag" if every else "label"
    )

    def plain(given: gt.Instance) -> Tensor:
        h = c = torch.zeros(1, H, dtype=torch.float64)
        losses = []
        for token, tag in zip(given.vertex["token"], given.vertex["tag"], strict=True):
            h, c = reader(h, c, torch.tensor([token]))
            losses.append(F.cross_entropy(readout(h), torch.tensor([tag])))
        last = F.cross_entropy(readout(h), torch.tensor([given.value["label"]]))
        return torch.stack(losses).sum() if every else last

    rng = np.random.default_rng(0)
    data = [list_of(rng) for _ in range(9)]
    agree(graph, data, plain, {"reader": reader, "readout": readout}, order)


def test_first_states_are_zeros_of_the_width_and_type_asked_for() -> None:
    zeros = first_states(3, dtype=torch.float64)(torch.ones(5, 2))
    assert_close(zeros, torch.zeros(5, 3, dtype=torch.float64))


# --- trees


def bush(rng: np.random.Generator, most: int) -> gt.Instance:
    """A tree whose inner vertices have 2 to ``most`` children; leaves first, the root last."""
    leaves = int(rng.integers(1, 8)) if most > 2 else int(rng.integers(1, 6))
    parent, slot, siblings = [-1] * leaves, [0] * leaves, [1] * leaves
    roots = list(range(leaves))
    while len(roots) > 1:
        k = int(rng.integers(2, min(most, len(roots)) + 1))
        at = int(rng.integers(len(roots) - k + 1))
        for position, child in enumerate(roots[at : at + k]):
            parent[child], slot[child], siblings[child] = len(parent), position, k
        roots[at : at + k] = [len(parent)]
        parent.append(-1)
        slot.append(0)
        siblings.append(1)
    n = len(parent)
    return gt.Instance(
        {"word": (torch.from_numpy(rng.integers(0, 6, leaves)), np.arange(leaves))},
        {
            "parent": parent,
            "slot": slot,
            "siblings": siblings,
            "label": rng.integers(0, 3, n),
            "tag": rng.integers(0, 6, n),
        },
    )


def children_of(given: gt.Instance) -> dict[int, list[int]]:
    families: dict[int, list[int]] = {}
    parent, slot = given.vertex["parent"], given.vertex["slot"]
    for v in sorted(range(len(parent)), key=lambda v: slot[v]):
        if parent[v] >= 0:
            families.setdefault(parent[v], []).append(v)
    return families


def test_a_binary_tree_is_folded_from_its_leaves_to_its_root(order: Order) -> None:
    torch.manual_seed(1)
    leaf = TreeLSTMLeaf(H, H, vocabulary=6).double()
    branch, readout = TreeLSTMBranch(H).double(), nn.Linear(H, 3).double()
    graph = gt.Graph(vertex=("parent", "slot", "label"))
    vertices = Tree(branch, name="branch")(graph.input("word").through(leaf, name="leaf"))
    vertices.through(hidden).through(readout, name="readout").loss(gt.cross_entropy, "label")

    def plain(given: gt.Instance) -> Tensor:
        word, _ = given.inputs["word"]
        hs, cs = (list(x) for x in leaf(word))
        for _, (left, right) in sorted(children_of(given).items()):
            h, c = branch(
                torch.stack([hs[left], hs[right]])[None], torch.stack([cs[left], cs[right]])[None]
            )
            hs.append(h[0])
            cs.append(c[0])
        label = torch.as_tensor(given.vertex["label"])
        return F.cross_entropy(readout(torch.stack(hs)), label, reduction="sum")

    rng = np.random.default_rng(1)
    data = [bush(rng, 2) for _ in range(9)]
    agree(graph, data, plain, {"leaf": leaf, "branch": branch, "readout": readout}, order)


class Sum(nn.Module):
    """A parent from the sum of its children and its own tag."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.tags = nn.Linear(H, H), nn.Embedding(6, H)

    def forward(self, x: Tensor, tag: Tensor) -> Tensor:
        return torch.tanh(self.map(x) + self.tags(tag))


@pytest.mark.parametrize("how", [None, "mean"])
def test_a_column_says_how_many_children_there_are(how: str | None, order: Order) -> None:
    torch.manual_seed(2)
    leaf, branch, readout = nn.Embedding(6, H).double(), Sum().double(), nn.Linear(H, 3).double()
    graph = gt.Graph(vertex=("parent", "slot", "siblings", "label", "tag"))
    leaves = graph.input("word").through(leaf, name="leaf")
    vertices = Tree(branch, children="siblings", how=how, read="tag", name="branch")(leaves)
    vertices.through(readout, name="readout").loss(gt.cross_entropy, "label")

    def plain(given: gt.Instance) -> Tensor:
        word, _ = given.inputs["word"]
        states = list(leaf(word))
        for v, members in sorted(children_of(given).items()):
            family = torch.stack([states[k] for k in members])
            met = family.sum(0) if how is None else family.mean(0)
            states.append(branch(met[None], torch.tensor([given.vertex["tag"][v]]))[0])
        label = torch.as_tensor(given.vertex["label"])
        return F.cross_entropy(readout(torch.stack(states)), label, reduction="sum")

    rng = np.random.default_rng(2)
    data = [bush(rng, 4) for _ in range(9)]
    agree(graph, data, plain, {"leaf": leaf, "branch": branch, "readout": readout}, order)


# --- pieces that share weights


class Shared(nn.Module):
    """A piece with weights of its own and some that all pieces have."""

    def __init__(self, shared: nn.Linear, wide: int = H) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(wide, H, dtype=torch.float64)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return torch.tanh(self.shared(self.own(x.flatten(1))))


SHAPES: dict[str, Callable[[nn.Module, gt.Part], Callable[[gt.Stream], gt.Stream]]] = {
    "recurrent": lambda cell, part: Recurrent(cell, part=part, name="cell"),
    "tree": lambda cell, part: Tree(cell, children="siblings", part=part, name="cell"),
    "message passing": lambda cell, part: MessagePassing(cell, steps=2, part=part, name="cell"),
}


def folded(shape: str, cell: nn.Module, h: Tensor, given: gt.Instance) -> Tensor:
    """What a shape makes of first states, in plain PyTorch."""
    if shape == "message passing":
        return cell(cell(h))
    if shape == "recurrent":
        for _ in given.vertex["label"]:
            h = cell(h)
        return h
    states = list(h)
    for _, members in sorted(children_of(given).items()):
        states.append(cell(torch.stack([states[k] for k in members]).sum(0)[None])[0])
    return torch.stack(states)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_that_share_weights_are_one_part(shape: str, order: Order) -> None:
    torch.manual_seed(5)
    shared = nn.Linear(H, H, dtype=torch.float64)
    below, cell, readout = Shared(shared, 2), Shared(shared), Shared(shared)
    part = gt.Part(nn.ModuleList([below, cell, readout]), name="all")
    graph = gt.Graph(vertex=("parent", "slot", "siblings", "label"), edge=())
    start = graph.input("x", bundle=shape == "message passing")
    states = SHAPES[shape](cell, part)(start.through(below, part=part, name="below"))
    states.head(readout, gt.cross_entropy, "label", part=part, name="readout").stop()

    def plain(given: gt.Instance) -> Tensor:
        x = given.inputs["x"]
        h = folded(shape, cell, below(x[0] if isinstance(x, tuple) else x), given)
        label = torch.as_tensor(given.vertex["label"])[-len(h) :]
        return F.cross_entropy(readout(h), label, reduction="sum")

    rng = np.random.default_rng(5)
    data = [with_rows(bush(rng, 3), shape, rng) for _ in range(6)]
    agree(graph, data, plain, {"all": part.module}, order)


def with_rows(given: gt.Instance, shape: str, rng: np.random.Generator) -> gt.Instance:
    """The same with rows of numbers for words: at the leaves, at vertex 0, or at all vertices."""
    n = len(given.vertex["parent"])
    leaves = [v for v in range(n) if v not in children_of(given)]
    at = {"recurrent": [0], "tree": leaves, "message passing": list(range(n))}[shape]
    x = torch.from_numpy(rng.standard_normal((len(at), 2)))
    columns = {name: given.vertex[name] for name in ("parent", "slot", "siblings", "label")}
    return gt.Instance(
        {"x": x if shape == "message passing" else (x, at)},
        columns,
        edge={"source": [], "target": []},
    )


# --- graphs


def molecule(rng: np.random.Generator, types: int) -> gt.Instance:
    """A graph of 1 to 6 vertices; some have no edge, some edges run from a vertex to itself."""
    v, e = int(rng.integers(1, 7)), int(rng.integers(0, 9))
    edge = {"source": rng.integers(0, v, e), "target": rng.integers(0, v, e)}
    if types > 1:
        edge["type"] = rng.integers(0, types, e)
    x = torch.from_numpy(rng.standard_normal((v, H)))
    value = {"aim": float(rng.standard_normal()), "answer": int(rng.integers(v))}
    return gt.Instance({"x": x}, edge=edge, value=value)


def step_by_vertex(cell: GatedGraphCell, h: Tensor, given: gt.Instance) -> Tensor:
    """One step of a gated graph network, edge by edge."""
    heard = [torch.zeros(H, dtype=torch.float64) for _ in h]
    source, target = given.edge["source"], given.edge["target"]
    for e, (u, v) in enumerate(zip(source, target, strict=True)):
        kind = given.edge["type"][e] if cell.types > 1 else 0
        rows = slice(kind * H, kind * H + H)
        heard[v] = heard[v] + F.linear(h[u], cell.message.weight[rows])
        if cell.message.bias is not None:
            heard[v] = heard[v] + cell.message.bias[rows]
    return cell.update(torch.stack(heard), h)


@pytest.mark.parametrize(("types", "bias"), [(1, True), (3, True), (3, False)])
def test_a_gated_graph_network_passes_messages_along_typed_edges(
    types: int, bias: bool, order: Order
) -> None:
    torch.manual_seed(3)
    cell = GatedGraphCell(H, types, bias=bias).double()
    total = GatedSum(H, out=1).double()
    graph = gt.Graph(edge=("type",) if types > 1 else (), value=("aim",))
    vertices = MessagePassing(cell, steps=3, name="cell")(graph.input("x", bundle=True))
    vertices.through(total, name="total", inside=True, pool=True).loss(F.mse_loss, "aim")

    def plain(given: gt.Instance) -> Tensor:
        h = given.inputs["x"]
        for _ in range(3):
            h = step_by_vertex(cell, h, given)
        value = (torch.sigmoid(total.gate(h)) * total.value(h)).sum()
        return (value - given.value["aim"]) ** 2

    rng = np.random.default_rng(3)
    data = [molecule(rng, types) for _ in range(9)]
    agree(graph, data, plain, {"cell": cell, "total": total}, order)


class Both(nn.Module):
    """States and what they began as, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.map(x)), x


def test_a_gated_sum_weighs_vertices_by_features_too(order: Order) -> None:
    torch.manual_seed(4)
    both, total = Both().double(), GatedSum(H, features=H, out=3).double()
    graph = gt.Graph(edge=("type",), value=("answer",))
    vertices = graph.input("x", bundle=True).through(both, name="both")
    scores = vertices.through(total, name="total", inside=True, pool=True)
    scores.loss(gt.cross_entropy, lambda m: m.answer % 3)

    def plain(given: gt.Instance) -> Tensor:
        h, x = both(given.inputs["x"])
        score = (torch.sigmoid(total.gate(torch.cat([h, x], 1))) * total.value(h)).sum(0)
        return F.cross_entropy(score, torch.tensor(given.value["answer"] % 3))

    rng = np.random.default_rng(4)
    data = [molecule(rng, 2) for _ in range(9)]
    agree(graph, data, plain, {"both": both, "total": total}, order)


def test_no_step_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"steps=0.*1 or more"):
        MessagePassing(nn.Identity(), steps=0)


# --- the choice of a vertex


def choosing(bend: nn.Module, choice: VertexChoice) -> gt.Graph:
    graph = gt.Graph(edge=("type",), value=("answer",))
    bent = graph.input("x", bundle=True).through(bend, name="bend")
    bent.through(choice, name="choice", read="answer", inside=True, pool=True).loss(
        choice_loss, "answer", metrics={"accuracy": choice_accuracy}
    )
    return graph


def test_a_choice_is_a_softmax_over_the_vertices_of_each_graph_alone(order: Order) -> None:
    torch.manual_seed(5)
    bend, choice = nn.Sequential(nn.Linear(H, 3), nn.Tanh()).double(), VertexChoice(3).double()

    def score(x: Tensor) -> Tensor:
        return choice.score(bend(x))[:, 0]

    def plain(given: gt.Instance) -> Tensor:
        return F.cross_entropy(score(given.inputs["x"]), torch.tensor(given.value["answer"]))

    rng = np.random.default_rng(5)
    data = [molecule(rng, 2) for _ in range(12)]
    agree(choosing(bend, choice), data, plain, {"bend": bend, "choice": choice}, order)
    sums = one_pass(choosing(bend, choice), data, order, train=False).sums
    right = sum(int(score(i.inputs["x"]).argmax()) == i.value["answer"] for i in data)
    assert 0 < right < len(data)
    assert sums["accuracy"] == (right, len(data))


def test_large_scores_do_not_overflow_and_the_first_of_equal_ones_is_chosen() -> None:
    lengths = torch.tensor([3, 1, 2])
    inside = SimpleNamespace(lengths=lengths, segment=torch.tensor([0, 0, 0, 1, 2, 2]), edges={})
    scores = torch.tensor([1e4, -1e4, 1e4, -5.0, 7.0, 7.0], dtype=torch.float64)[:, None]
    answers = torch.tensor([2, 2, 2, 0, 1, 1])
    choice = VertexChoice(1).double()
    nn.init.ones_(choice.score.weight)
    losses, choices = choice(scores, answers, inside)
    half = torch.tensor(2.0, dtype=torch.float64).log()
    assert_close(losses, torch.stack([half, 0 * half, half]))
    assert choices.tolist() == [0, 0, 0]


@pytest.mark.parametrize("answer", [-1, 4])
def test_an_answer_that_is_no_vertex_is_refused(answer: int) -> None:
    instance = gt.Instance(
        {"x": torch.zeros(4, H)},
        edge={"source": [], "target": [], "type": []},
        value={"answer": answer},
    )
    with pytest.raises((DataError, WorkerError), match=rf"answer {answer} is no vertex.*0\.\.3"):
        one_pass(choosing(nn.Linear(H, 3), VertexChoice(3)), [instance])


# --- names


def test_nodes_of_a_shape_are_named_after_its_cell_and_two_shapes_fit_in_one_graph() -> None:
    graph = gt.Graph(vertex=("token",))
    first = Recurrent(nn.Identity(), name="down")(graph.input("start"))
    back = first.move(vertex=0)
    Recurrent(nn.Identity(), name="up")(Recurrent(nn.Identity())(back)).stop()
    names = {operator.name for operator in graph.operators}
    assert {"down", "down: loop", "down: again", "down: next vertex", "up: loop", "loop"} <= names
    graph.check()
