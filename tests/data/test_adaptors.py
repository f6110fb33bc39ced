"""Objects of other libraries become instances, or are refused by the name of what is wrong."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import geartrain as gt
from geartrain.data.adaptors import from_nested, from_networkx, from_pyg
from geartrain.errors import DataError
from geartrain.nn import GatedGraphCell, GatedSum, MessagePassing, Tree

ELEMENTS = {"C": 0, "O": 1, "H": 2}


def train(graph: gt.Graph, instance: gt.Instance) -> float:
    """The loss of the first of two epochs; it falls."""
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=gt.Instances(1))
    session = gt.Session(graph, rules=rules, runtime=gt.Simulated(1))
    first, second = (e.loss for e in session.fit([instance], epochs=2).history)
    assert second < first
    return first


# --- networkx


def water(kind: type = nx.Graph) -> nx.Graph:
    graph = kind(name="water", energy=-1.5)
    graph.add_node("o", element="O", x=[0.5, 1.0], charge=1)
    graph.add_node("h1", element="H", x=[0.0, 2.0], charge=0)
    graph.add_node("h2", element="H", x=[0.0, -2.0], charge=0)
    graph.add_edge("o", "h1", type=1, length=0.9)
    graph.add_edge("o", "h2", type=2, length=1.1)
    graph.add_edge("o", "o", type=0, length=0.0)
    return graph


read = partial(
    from_networkx,
    inputs=("x", "element"),
    vertex_columns="charge",
    edge_columns=("type", "length"),
    values="energy",
    classes={"element": ELEMENTS},
)


def test_an_edge_of_an_undirected_graph_runs_both_ways_and_one_to_itself_runs_once() -> None:
    instance = read(water())
    assert instance.key == "water"
    assert instance.edge["source"].tolist() == [0, 0, 0, 1, 2]
    assert instance.edge["target"].tolist() == [1, 2, 0, 0, 0]
    assert instance.edge["type"].tolist() == [1, 2, 0, 1, 2]
    assert instance.edge["length"].tolist() == [0.9, 1.1, 0.0, 0.9, 1.1]
    assert instance.value == {"energy": -1.5}
    assert instance.vertex["charge"].tolist() == [1, 0, 0]
    assert_close(instance.inputs["x"], torch.tensor([[0.5, 1.0], [0.0, 2.0], [0.0, -2.0]]))
    assert_close(instance.inputs["element"], torch.tensor([1, 2, 2]))


@pytest.mark.parametrize("kind", [nx.DiGraph, nx.MultiDiGraph])
def test_edges_of_a_directed_graph_stay_as_they_are(kind: type) -> None:
    instance = read(water(kind))
    ends = zip(instance.edge["source"].tolist(), instance.edge["target"].tolist(), strict=True)
    assert sorted(ends) == [(0, 0), (0, 1), (0, 2)]


def test_parallel_edges_all_count() -> None:
    graph = water(nx.MultiGraph)
    graph.add_edge("o", "h1", type=2, length=0.9)
    assert sorted(read(graph).edge["type"].tolist()) == [0, 1, 1, 2, 2, 2, 2]


def test_an_isolated_node_is_kept_unless_it_is_to_be_refused() -> None:
    graph = water()
    graph.add_node("he", element="H", x=[1.0, 1.0], charge=0)
    assert len(read(graph).vertex["charge"]) == 4
    with pytest.raises(DataError, match=r"graph water: 1 of 4 vertices have no edge, first 'he'"):
        read(graph, isolated="raise")
    read(water(), isolated="raise")
    with pytest.raises(ValueError, match="isolated='drop': give 'keep' or 'raise'"):
        read(graph, isolated="drop")


def test_a_graph_of_one_node_and_no_edge_brings_empty_columns() -> None:
    graph = nx.Graph()
    graph.add_node(0, element="H", x=[1.0, 1.0], charge=0)
    instance = from_networkx(graph, inputs="x", edge_columns="type")
    assert {name: len(column) for name, column in instance.edge.items()} == {
        "source": 0, "target": 0, "type": 0
    }  # fmt: skip
    assert instance.key is None


def test_a_networkx_graph_goes_through_message_passing() -> None:
    torch.manual_seed(0)
    cell, total = GatedGraphCell(2, 3), GatedSum(2)
    graph = gt.Graph(edge=("type",), value=("energy",))
    vertices = MessagePassing(cell, steps=2)(graph.input("x", bundle=True))
    vertices.through(total, inside=True, pool=True).loss(F.mse_loss, "energy")
    instance = read(water(), inputs="x")
    inside = SimpleNamespace(
        lengths=torch.tensor([3]),
        segment=torch.zeros(3, dtype=torch.int64),
        edges={name: torch.from_numpy(np.asarray(c)) for name, c in instance.edge.items()},
    )
    h = instance.inputs["x"]
    value = total(cell(cell(h, inside), inside), inside)
    assert train(graph, instance) == pytest.approx(float((value.detach() + 1.5) ** 2), rel=1e-5)


def without(node: str, attribute: str) -> nx.Graph:
    graph = water()
    del graph.nodes[node][attribute]
    return graph


def with_node(**attributes: object) -> nx.Graph:
    graph = water()
    graph.add_node("new", **{"element": "H", "x": [0.0, 0.0], "charge": 0} | attributes)
    return graph


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (nx.Graph(), "graph has no node; an instance has one or more"),
        (without("h2", "charge"), r"graph water: node 'h2' has no attribute 'charge'; it has el"),
        (with_node(charge="plus"), r"node 'new': 'charge' is 'plus', not a number; give classes="),
        (with_node(element="Xe"), r"node 'new': 'element' 'Xe' has no number; add it to classes"),
        (with_node(x=[1.0]), r"node 'new': 'x' has shape \(1,\), that of graph water: node 'o' is"),
        (with_node(x=[[1.0], [1.0, 2.0]]), r"'x' is \[\[1.0\], \[1.0, 2.0\]\], not a number"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(graph: nx.Graph, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(graph)


def test_a_class_must_have_an_integer() -> None:
    with pytest.raises(DataError, match=r"'element' 'O' has number 0.5; expected an integer"):
        read(water(), classes={"element": {"O": 0.5, "H": 1}})


# --- PyTorch Geometric


def pair(**other: object) -> SimpleNamespace:
    """Two vertices joined both ways; what ``torch_geometric.data.Data`` would hold."""
    given = {
        "x": torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "edge_attr": torch.tensor([[1], [0]]),
        "y": torch.tensor([2.5]),
    }
    return SimpleNamespace(**given | other)


def test_data_of_pytorch_geometric_keep_their_edges() -> None:
    instance = from_pyg(pair(), key=7)
    assert instance.edge["source"].tolist() == [0, 1]
    assert instance.edge["target"].tolist() == [1, 0]
    assert instance.edge["type"].tolist() == [1, 0]
    assert instance.value == {"y": 2.5}
    assert not instance.vertex
    assert instance.inputs["x"] is not None


@pytest.mark.parametrize(
    ("y", "of", "vertex", "value"),
    [
        (torch.tensor(3), None, None, 3),
        (torch.tensor([3]), None, None, 3),
        (torch.tensor([[1.0, 2.0]]), None, None, [1.0, 2.0]),
        (torch.tensor([4, 5]), None, [4, 5], None),
        (torch.tensor([True, False]), "vertex", [1, 0], None),
        (None, None, None, None),
    ],
)
def test_one_entry_of_y_is_the_graphs_and_more_are_the_vertices(
    y: Tensor | None, of: str | None, vertex: list | None, value: object
) -> None:
    instance = from_pyg(pair(y=y), target_of=of)
    assert (instance.vertex["y"].tolist() if instance.vertex else None) == vertex
    assert (instance.value["y"].tolist() if instance.value else None) == value


def test_what_data_do_not_have_is_left_out() -> None:
    instance = from_pyg(SimpleNamespace(x=torch.ones(3, 1), edge_index=torch.empty(2, 0)))
    assert set(instance.edge) == {"source", "target"}
    assert len(instance.edge["source"]) == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pair(x=None), r"data 7 has x None; expected a tensor with one row for each vertex"),
        (pair(x=torch.ones(0, 2)), r"has x torch.float32 \(0, 2\)"),
        (pair(edge_index=None), r"has edge_index None; expected integers \(2, E\)"),
        (pair(edge_index=torch.tensor([[0, 1, 0]])), r"edge_index torch.int64 \(1, 3\)"),
        (pair(edge_index=torch.tensor([[0, 1], [1, 2]])), r"edge 1 has target 2, but x has .*0..1"),
        (pair(edge_index=torch.tensor([[-1, 1], [1, 0]])), r"edge 0 has source -1"),
        (pair(edge_index=torch.ones(2, 2)), "edge_index holds float32; vertices are integers"),
        (pair(edge_attr=torch.ones(3)), r"edge_attr is float32 \(3,\); expected 2 .* each edge"),
        (pair(y=torch.ones(3)), r"y is float32 \(3,\); expected 2 .* each vertex"),
        (pair(batch=torch.zeros(2)), r"a batch of several graphs.*to_data_list\(\)"),
    ],
)
def test_data_that_do_not_fit_are_refused(data: SimpleNamespace, said: str) -> None:
    with pytest.raises(DataError, match=said):
        from_pyg(data, key=7)


def test_an_isolated_vertex_is_refused_by_its_number() -> None:
    data = pair(x=torch.ones(3, 2))
    assert len(from_pyg(data).inputs["x"]) == 3
    with pytest.raises(DataError, match="1 of 3 vertices have no edge, first 2"):
        from_pyg(data, isolated="raise")


# --- nested trees

WORDS = {"it": 0, "is": 1, "not": 2, "bad": 3}


class Node(list):
    """What ``nltk.Tree`` is: a list of its children, with a label."""

    def __init__(self, label: str, children: list) -> None:
        super().__init__(children)
        self._label = label

    def label(self) -> str:
        return self._label


NLTK = Node("3", [Node("2", ["it"]), Node("4", [Node("1", ["not"]), Node("0", ["bad"])])])
LISTS = ["3", ["2", "it"], ("4", ("1", "not"), ("0", "bad"))]


@pytest.mark.parametrize("tree", [NLTK, LISTS], ids=["nltk", "lists"])
def test_a_labelled_tree_is_numbered_children_first(tree: object) -> None:
    instance = from_nested(tree, words=WORDS, labels=int, children=2, key="line 3")
    word, leaf = instance.inputs["word"]
    assert word.tolist() == [0, 2, 3]
    assert leaf.tolist() == [0, 1, 2]
    assert instance.vertex["parent"].tolist() == [4, 3, 3, 4, -1]
    assert instance.vertex["slot"].tolist() == [0, 0, 1, 1, 0]
    assert instance.vertex["siblings"].tolist() == [2, 2, 2, 2, 1]
    assert instance.vertex["label"].tolist() == [2, 1, 0, 4, 3]
    assert instance.key == "line 3"


@pytest.mark.parametrize(
    ("tree", "parent", "slot"),
    [
        ("it", [-1], [0]),
        (["it"], [-1], [0]),
        (("it", "is", ("not", "bad")), [5, 5, 4, 4, 5, -1], [0, 1, 0, 1, 2, 0]),
        (("it", (("is", "so"),)), [5, 3, 3, 4, 5, -1], [0, 0, 1, 0, 1, 0]),
    ],
)
def test_every_item_of_an_unlabelled_tree_is_a_child(
    tree: object, parent: list[int], slot: list[int]
) -> None:
    columns = from_nested(tree, words=lambda word: WORDS.get(word, 9)).vertex
    assert "label" not in columns
    assert columns["parent"].tolist() == parent
    assert columns["slot"].tolist() == slot


def test_a_tree_of_thousands_of_levels_is_no_trouble() -> None:
    tree: object = "it"
    for _ in range(5000):
        tree = ("is", tree)
    instance = from_nested(tree, words=WORDS, children=2)
    assert len(instance.vertex["parent"]) == 10_001


def test_nested_lists_go_through_a_tree() -> None:
    torch.manual_seed(0)
    leaf, branch = nn.Embedding(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    readout = nn.Linear(3, 5)
    graph = gt.Graph(vertex=("parent", "slot", "siblings", "label"))
    vertices = Tree(branch, children="siblings")(graph.input("word").through(leaf))
    vertices.through(readout).loss(gt.cross_entropy, "label")
    it, no, bad = leaf(torch.tensor([0, 2, 3]))
    inner = branch(no + bad)
    states = torch.stack([it, no, bad, inner, branch(it + inner)])
    loss = F.cross_entropy(readout(states), torch.tensor([2, 1, 0, 4, 3]))
    instance = from_nested(LISTS, words=WORDS, labels=int)
    assert train(graph, instance) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("tree", "labels", "said"),
    [
        (("it", "so"), None, "tree 9: word 'so' has no number; add it to words"),
        (("x", ("2", "it"), ("2", "is")), int, "label 'x' has no number; add it to labels"),
        (("2", "it", ("2", "is")), int, r"leaf 'it' has no label; write \(label, 'it'\)"),
        (("it", ()), None, r"vertex \(\) has no child; expected words or inner vertices in it"),
        (("2", ("1",), ("2", "is")), int, r"vertex \('1',\) has no child.*behind the label"),
        (("it", "is", "bad"), None, "has 3 children, .*; expected 2. Binarise the tree"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(tree: object, labels: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        from_nested(tree, words=WORDS, labels=labels, children=2, key=9)
