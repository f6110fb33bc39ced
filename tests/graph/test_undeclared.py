"""Columns that instances bring, and the graph knows by another name or as of another kind."""

from __future__ import annotations

import torch
from torch import nn

import geartrain as gt
from geartrain.graph.learning import remarks


def _graph() -> gt.Graph:
    graph = gt.Graph(vertex=("token",), value=("label",))
    graph.input("x").through(nn.Linear(3, 2), name="out").loss(gt.cross_entropy, target="label")
    return graph


def test_a_column_of_another_kind_is_told_where_it_belongs() -> None:
    like = gt.Instance({"x": torch.zeros(1, 3)}, {"token": [1], "label": [0]})
    (said,) = remarks(_graph(), like)
    assert "'label' as a vertex column" in said and "declares it as a value column" in said
    assert "Instance(..., value={'label': ...})" in said and "Graph(vertex=('label',))" in said


def test_a_column_with_a_name_close_to_one_is_told_that_one() -> None:
    like = gt.Instance({"x": torch.zeros(1, 3)}, {"tokens": [1]}, value={"label": 0})
    (said,) = remarks(_graph(), like)
    assert "vertex column 'tokens', which the graph does not declare" in said
    assert "it declares 'token'" in said


def test_nothing_is_said_of_what_is_declared_or_far_from_it() -> None:
    like = gt.Instance({"x": torch.zeros(1, 3)}, {"token": [1], "q": [2]}, value={"label": 0})
    assert list(remarks(_graph(), like)) == []
