"""Instances in columns: what reads them one by one and what packs them see the same."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.settings import Settings
from geartrain.errors import DataError
from geartrain.frames.packed import Packed
from geartrain.frames.packer import Packer
from geartrain.train.source import Source
from tests.rigs.sessions import session_of

N = 40


def columns(n: int = N) -> gt.Columns:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 5, n)
    total = int(lengths.sum())
    return gt.Columns(
        lengths,
        {"x": torch.from_numpy(draw.normal(size=(total, 2))), "word": torch.arange(total)},
        vertex={"slot": draw.integers(0, 9, total).astype(np.int32)},
        value={"aim": draw.normal(size=n), "label": draw.integers(0, 3, n)},
        called="line",
    )


def packer(*inputs: str, vertex: tuple[str, ...] = ("slot",)) -> Packer:
    graph = gt.Graph(vertex=vertex, value=("aim", "label"))
    for name in inputs or ("x", "word"):
        graph.input(name, bundle=name == "word").stop()
    return Engine(graph, {}, Settings()).controller.packer


def same(one: Packed, other: Packed) -> None:
    assert one.keys.tolist() == other.keys.tolist()
    for name in ("sizes", "edge_sizes", "counts", "vertex_ends", "edge_ends"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    for kind in ("vertex", "edge", "value"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        assert mine.keys() == theirs.keys()
        for name, column in mine.items():
            assert column.dtype == theirs[name].dtype or not column.size
            assert np.array_equal(column, theirs[name])
    assert one.inputs.keys() == other.inputs.keys()
    for name, rows in one.inputs.items():
        twin = other.inputs[name]
        assert np.array_equal(rows.lengths, twin.lengths)
        assert np.array_equal(rows.at, twin.at)
        assert np.array_equal(rows.ends, twin.ends)
        assert isinstance(rows.payload, Tensor) and isinstance(twin.payload, Tensor)
        assert torch.equal(rows.payload, twin.payload)


@pytest.mark.parametrize("places", [[3], [5, 0, 39, 7, 7], list(range(N))])
def test_packed_at_once_they_are_what_they_are_one_by_one(places: list[int]) -> None:
    data = columns()
    packed = packer().pack_columns(data, np.array(places))
    same(packed, packer().pack([data[i] for i in places]))
    same(packed.part(0, 1), packer().pack([data[places[0]]]))


def graphs(n: int = N, **change: object) -> gt.Columns:
    """Some of them without edges; edges in no order."""
    draw = np.random.default_rng(1)
    lengths, edge_lengths = draw.integers(1, 6, n), draw.integers(0, 7, n)
    ends = [draw.integers(0, size, k) for size, k in zip(lengths, edge_lengths, strict=True)]
    edge = {
        "source": np.concatenate(ends),
        "target": np.concatenate([e[::-1] for e in ends]),
        "kind": draw.integers(0, 3, int(edge_lengths.sum())).astype(np.int32),
        "width": draw.normal(size=int(edge_lengths.sum())),
    }
    x = torch.arange(int(lengths.sum()))
    told = {"edge": edge, "edge_lengths": edge_lengths, "called": lambda i: ("graph", i), **change}
    return gt.Columns(lengths, {"x": x}, **told)  # type: ignore[arg-type]


def graph_packer() -> Packer:
    graph = gt.Graph(edge=("kind", "width"))
    graph.input("x", bundle=True).stop()
    return Engine(graph, {}, Settings()).controller.packer


@pytest.mark.parametrize("places", [[3], [5, 0, 39, 7, 7], list(range(N))])
def test_edges_are_packed_as_those_of_instances(places: list[int]) -> None:
    data = graphs()
    assert data[3].key == ("graph", 3)
    packed = graph_packer().pack_columns(data, np.array(places))
    same(packed, graph_packer().pack([data[i] for i in places]))
    same(packed.part(0, 1), graph_packer().pack([data[places[0]]]))


def test_edges_that_lead_out_of_their_instance_are_refused() -> None:
    data = graphs()
    data.edge["target"][int(data.edge_starts[5])] = 6
    assert data.edge_lengths[5] > 0
    with pytest.raises(DataError, match="edge column 'target' leads out of its instance"):
        graph_packer().pack_columns(data, np.arange(N))
    with pytest.raises(DataError, match=r"\('graph', 5\): an edge has target 6"):
        graph_packer().pack([data[5]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"edge_lengths": [-1] * N}, r"edge_lengths has -1; give one for each instance"),
        ({"edge_lengths": [1]}, r"'edge_lengths' has shape \(1,\), and there are 40 instances"),
        ({"edge_lengths": None}, r"'source' has shape .* and there are 0 edges"),
    ],
)
def test_numbers_of_edges_that_do_not_fit_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        graphs(**change)


def test_they_are_read_as_a_list() -> None:
    data = columns()
    assert len(data) == N
    assert [i.key for i in data[2:4]] == ["line 2", "line 3"]
    assert data[-1].key == "line 39"
    with pytest.raises(IndexError):
        data[N]
    assert len(list(data)) == N
    total = sum(len(i.vertex["slot"]) for i in data)
    assert total == int(data.lengths.sum())


def test_the_order_is_that_of_a_list() -> None:
    data = columns()
    orders = [
        [i.key for i in Source(d, shuffle=True, seed=4).epoch(2, start=7)]
        for d in (data, list(data))
    ]
    assert orders[0] == orders[1]
    shards = [[i.key for i in Source(d, shuffle=True).shard(1, 1, 3)] for d in (data, list(data))]
    assert shards[0] == shards[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lengths": [2, 0]}, r"the least 0; give one for each instance, 1 or more"),
        ({"lengths": [[2]]}, r"lengths of shape \(1, 1\)"),
        ({"inputs": {"x": torch.zeros(4, 2)}}, r"'x' has shape \(4, 2\), and there are 3 vertices"),
        ({"vertex": {"slot": [1, 2]}}, r"'slot' has shape \(2,\), and there are 3 vertices"),
        ({"value": {"aim": [1.0]}}, r"'aim' has shape \(1,\), and there are 2 instances"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, object], said: str) -> None:
    right = {"lengths": [2, 1], "inputs": {"x": torch.zeros(3, 2)}}
    with pytest.raises(DataError, match=said):
        gt.Columns(**{**right, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("which", [packer("x"), packer(vertex=("slot", "parent"))])
def test_columns_of_another_graph_are_refused(which: Packer) -> None:
    with pytest.raises(DataError, match="missing, or unknown to the graph"):
        which.pack_columns(columns(), np.arange(3))


def trained(data: object, **given: object) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    graph = gt.Graph(value=("label",))
    line = nn.Linear(2, 3)
    graph.input("x").through(line, name="line").loss(gt.cross_entropy, "label")
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=8)
    session = session_of(graph, rules=rules, max_active=8, **given)  # type: ignore[arg-type]
    fit = session.fit(data, epochs=2)  # type: ignore[arg-type]
    return [p.detach().clone() for p in line.parameters()], fit.skipped


def labelled(*, broken: bool = False) -> gt.Columns:
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 4, 60)
    x = torch.from_numpy(draw.normal(size=(int(lengths.sum()), 2))).float()
    if broken:
        x[int(lengths[:7].sum())] = torch.nan
    return gt.Columns(lengths, {"x": x}, value={"label": draw.integers(0, 3, 60)}, called="row")


def test_training_on_them_is_training_on_a_list() -> None:
    assert all(map(torch.equal, trained(labelled())[0], trained(list(labelled()))[0]))


def test_an_instance_that_is_refused_is_named_or_skipped() -> None:
    with pytest.raises(DataError, match=r"row 7.*'x' holds NaN or infinity"):
        trained(labelled(broken=True))
    assert trained(labelled(broken=True), on_bad="skip")[1] == 2  # once an epoch
