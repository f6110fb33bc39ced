"""Graphs that are put together without a look through what their nodes are given."""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree

from geartrain.derived.derivation import derive
from geartrain.derived.ragged.derivation import derive_inside
from geartrain.derived.traces.unsearched import Unsearched, taken_apart
from geartrain.errors import GraphError


def test_nodes_are_those_of_torchs_graph() -> None:
    def made(graph: fx.Graph) -> tuple[str, list[list[str]]]:
        x = graph.placeholder("x")
        y = graph.call_function(torch.add, (x, x), {"alpha": 2})
        z = graph.node_copy(y, {x: y}.__getitem__)
        graph.output((graph.call_function(operator.neg, (z,)), [y]))
        return str(graph), [[user.name for user in node.users] for node in graph.nodes]

    assert made(Unsearched()) == made(fx.Graph())


def test_nothing_that_is_given_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[fx.Node] = []
    before = _pytree.tree_iter

    def tree_iter(tree: Any, *rest: Any) -> Any:
        searched.extend([tree] if isinstance(tree, fx.Node) else [])
        return before(tree, *rest)

    monkeypatch.setattr(_pytree, "tree_iter", tree_iter)
    derive(nn.GRUCell(3, 4), (torch.randn(2, 3), torch.randn(2, 4)))
    assert not searched


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Python collects no garbage meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _nodes() -> int:
    return sum([isinstance(x, fx.Node) for x in gc.get_objects()])


class _Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, inside: Any) -> torch.Tensor:
        y = torch.tanh(self.map(x))
        sums = y.new_zeros(inside.lengths.shape[0], 3).index_add(0, inside.segment, y)
        return sums / inside.lengths[:, None]


class _Looking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return y if y.sum() > 0 else -y


@pytest.mark.usefixtures("uncollected")
def test_no_node_stays_of_what_was_derived_until_python_collects_garbage() -> None:
    before = _nodes()
    derive(nn.GRUCell(3, 4), (torch.randn(2, 3), torch.randn(2, 4)))
    assert _nodes() == before


@pytest.mark.usefixtures("needs_kernels", "uncollected")
def test_nor_of_what_was_derived_inside_bundles() -> None:
    before = _nodes()
    derive_inside(_Mean(), (torch.randn(5, 3),), {}, pools=True)
    assert _nodes() == before


@pytest.mark.usefixtures("uncollected")
def test_nor_where_nothing_could_be_derived() -> None:
    before = _nodes()
    with pytest.raises(GraphError):
        derive(_Looking(), (torch.randn(2, 3),))
    assert _nodes() == before


def test_graphs_are_taken_apart_by_who_asked_last_and_others_are_left() -> None:
    def made() -> Unsearched:
        graph = Unsearched()
        graph.output((graph.placeholder("x"),))
        return graph

    before = made()
    with taken_apart():
        outer = made()
        with taken_apart():
            inner = made()
        assert vars(outer)
        assert not vars(inner)
    assert not vars(outer)
    after = made()
    assert len(before.nodes) == len(after.nodes) == 2
