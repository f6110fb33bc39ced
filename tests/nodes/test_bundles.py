"""Columns that are read beside bundles belong to the rows of the bundle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt


class _Adds(nn.Module):
    def forward(self, x: Tensor, column: Tensor) -> Tensor:
        return x + column[:, None]


@pytest.mark.parametrize("keep", ["inputs", "graph"])
def test_a_vertex_column_is_read_row_by_row_in_a_bundle_of_vertices(keep: str) -> None:
    graph = gt.Graph(vertex=("n",), value=("v",))
    x = graph.input("x", bundle=True)
    x.through(_Adds(), read="n", keep=keep).through(_Adds(), read="v", keep=keep).output()
    data = [
        gt.Instance({"x": torch.zeros(n, 1)}, {"n": np.arange(n) + 10 * n}, value={"v": 100})
        for n in (1, 3, 2)
    ]
    found = [y[:, 0].tolist() for y in gt.Session(graph).predict(data)]
    assert found == [[110.0], [130.0, 131.0, 132.0], [120.0, 121.0]]


def test_labels_of_the_samples_of_a_minibatch_are_their_own() -> None:
    graph = gt.Graph(vertex=("label",))
    seen: list[tuple[list[float], list[int]]] = []

    def criterion(prediction: Tensor, target: Tensor) -> Tensor:
        seen.append((prediction[:, 0].tolist(), target.tolist()))
        return prediction[:, 0] * 0

    graph.input("x", bundle=True).loss(criterion, "label")
    x = torch.arange(7.0)[:, None]
    data = [
        gt.Instance({"x": x[:4]}, {"label": [0, 1, 2, 3]}),
        gt.Instance({"x": x[4:]}, {"label": [4, 5, 6]}),
    ]
    session = gt.Session(graph)
    session.evaluate(data)  # the first time the graph is checked, which tries the criterion too
    seen.clear()
    session.evaluate(data)
    assert seen
    for values, labels in seen:
        assert values == labels


def test_rows_of_a_group_that_are_not_all_vertices_have_no_vertex_columns() -> None:
    graph = gt.Graph(vertex=("mark",))
    members = graph.input("x").group(by={"vertex": 0}, size=lambda m: m.size - 1, how="bundle")
    members.through(_Adds(), read="mark").output()
    x = (torch.zeros(3, 1), [1, 2, 3])
    data = [gt.Instance({"x": x}, {"mark": [7, 1, 2, 3]})]
    with pytest.raises(gt.GraphError, match=r"'_adds': bundles of .3. rows came"):
        gt.Session(graph).predict(data)


@pytest.mark.parametrize("alone", [True, False])
def test_minibatches_share_a_batch_unless_they_are_taken_alone(alone: bool) -> None:
    seen: list[int] = []

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[0])
            return x

    graph = gt.Graph()
    graph.input("x", bundle=True).through(Counts(), alone=alone).output()
    data = [gt.Instance({"x": torch.full((n, 1), float(n))}) for n in (2, 5, 4)]
    session = gt.Session(graph, runtime=gt.Simulated(1), max_active=3)
    session.predict(data)  # the first time the graph is checked, which runs the module too
    seen.clear()
    found = session.predict(data)
    assert [y[:, 0].tolist() for y in found] == [[2.0] * 2, [5.0] * 5, [4.0] * 4]
    assert seen == ([2, 5, 4] if alone else [11])


def test_every_minibatch_is_an_update_whether_taken_alone_or_together() -> None:
    class Weighs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def updates(alone: bool) -> int:
        graph = gt.Graph()
        scaled = graph.input("x", bundle=True).through(Weighs(), name="weighs", alone=alone)
        scaled.loss(lambda y: y[:, 0] ** 2)
        session = gt.Session(
            graph,
            rules=gt.Rules(update_every=gt.Instances(1)),
            runtime=gt.Simulated(1),
            max_active=4,
            ramp=gt.Ramp(over=0),
        )
        session.fit([gt.Instance({"x": torch.ones(5, 1)})] * 8, epochs=1)
        return session.parts["weighs"].version

    assert (updates(True), updates(False)) == (8, 8)
