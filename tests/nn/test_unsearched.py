"""Graphs that are put together without a look through what their nodes are given."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree

from geartrain.nn.derivation import derive
from geartrain.nn.unsearched import Unsearched


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
