"""Bundles read the columns of all their vertices, not of the first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geartrain.errors import GraphError
from geartrain.frames.instance import Instance
from geartrain.graph.graph import Graph
from geartrain.nodes.loss import Metric, accuracy, cross_entropy
from tests.rigs.passes import (
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
)


class Reads(nn.Module):
    """A map whose offset depends on a vertex column and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.kinds, self.turns = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Embedding(5, 4)

    def forward(self, x: Tensor, kind: Tensor, turn: Tensor) -> Tensor:
        return torch.tanh(self.map(x) + self.kinds(kind)) * self.turns(turn)


def minibatches(n: int) -> list[Instance]:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(n):
        k = int(rng.integers(1, 6))
        data.append(
            Instance(
                {"x": torch.from_numpy(rng.standard_normal((k, 3)))},
                {
                    "kind": rng.integers(0, 5, k),
                    "label": rng.integers(0, 4, k),
                    "weight": rng.random(k),
                },
                value={"turn": int(rng.integers(5))},
            )
        )
    return data


@pytest.mark.parametrize("keep", ["inputs", "graph"])
@pytest.mark.parametrize("order", [Order(), Order(policy="random", seed=1, max_rows=2)], ids=str)
def test_every_row_of_a_bundle_has_its_own_label_weight_and_columns(keep, order):
    torch.manual_seed(0)
    module = Reads().double()
    graph = Graph(vertex=("kind", "label", "weight"), value=("turn",))
    rows = graph.input("x", bundle=True)
    rows.through(module, name="map", keep=keep, read=("kind", "turn")).loss(
        cross_entropy, target="label", weight="weight", metrics={"right": Metric(accuracy)}
    )
    data, total, right = minibatches(8), torch.zeros(()), 0
    for given in data:
        column = {k: torch.from_numpy(v) for k, v in given.vertex.items()}
        turn = torch.full_like(column["kind"], given.value["turn"])
        y = module(given.inputs["x"], column["kind"], turn)
        each = F.cross_entropy(y, column["label"], reduction="none")
        total = total + (each * column["weight"]).sum()
        right += int((y.argmax(1) == column["label"]).sum())
    got = accumulate(graph, data, order)
    assert_same_loss(got, total)
    assert got.sums["right"][0] == right
    assert_same_gradients(got.gradients, autograd(total, {"map": module}))


def test_a_bundle_that_is_not_all_vertices_has_no_vertex_columns():
    graph = Graph(vertex=("kind", "label", "weight"), value=("turn",))
    some, rest = graph.input("x").where(lambda m: m.vertex > 0)
    rest.stop()
    some.group("instance", lambda m: m.size - 1, how="bundle").loss(cross_entropy, target="label")
    data = [i for i in minibatches(8) if len(i.vertex["kind"]) > 1]
    with pytest.raises(GraphError, match=r"vertex column .label. cannot"):
        one_pass(graph, data)
