"""Payloads that are read where they lie: nobody may see them after they were written over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rig import Order, accumulate, assert_same_gradients, autograd, one_pass
from torch import Tensor, nn

from geartrain.errors import WorkerError
from geartrain.ir.graph import Graph
from geartrain.ir.instance import Instance

IMPATIENT = Order(policy="backward", max_rows=1, max_active=4)
"""Answers are taken before rows, a row at a time: stores are reused as early as can be."""


def square(x: Tensor) -> Tensor:
    return x.square()


def instances(n: int, rows: int) -> list[Instance]:
    rng = np.random.default_rng(0)
    return [
        Instance({"x": torch.from_numpy(rng.standard_normal((rows, 2)))}, {"at": np.arange(rows)})
        for _ in range(n)
    ]


def test_a_stack_that_is_detached_is_not_overwritten_before_it_is_read():
    torch.manual_seed(0)
    module = nn.Linear(2, 2).double()
    graph = Graph(vertex=("at",))
    pairs = graph.input("x").group("instance", 2, order="at").detach()
    pairs.through(module).loss(lambda y: y.square().flatten(1).sum(1))
    data = instances(30, 2)
    total = sum(module(i.inputs["x"]).square().sum() for i in data)
    got = accumulate(graph, data, IMPATIENT)
    assert_same_gradients(got.gradients, autograd(total, {"linear": module}))


def test_a_kept_graph_behind_a_function_that_returns_its_input_survives_later_rows():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
    graph = Graph()
    same = graph.input("x").through(square).through(nn.Identity())
    same.through(module, keep="graph", name="kept").loss(lambda y: y.square().sum(1))
    data = instances(10, 3)
    for order in (IMPATIENT, Order(policy="random", seed=4, max_rows=2)):
        total = sum(module(i.inputs["x"].square()).square().sum() for i in data)
        got = accumulate(graph, data, order)
        assert_same_gradients(got.gradients, autograd(total, {"kept": module}))


def test_rows_of_another_shape_are_not_stretched_over_those_that_came_before():
    """One feature a row stays one feature, also after rows with two."""
    seen = []

    def features(x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return x.sum(1)

    graph = Graph()
    graph.input("x", bundle=True).through(features).loss(lambda y: y.square())
    rng = np.random.default_rng(0)
    data = [Instance({"x": torch.from_numpy(rng.standard_normal((3, k)))}) for k in (2, 1, 2)]
    try:
        outcome = one_pass(graph, data, Order(max_active=1))
    except WorkerError as error:
        pytest.fail(f"refused without saying why: {error}")
    want = sum(float(i.inputs["x"].sum(1).square().sum()) for i in data)
    assert outcome.sums["loss"][0] == pytest.approx(want, rel=1e-12)
    assert {1, 2} == set(seen)
