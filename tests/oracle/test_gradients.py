"""Losses and gradients of whole models are those of plain PyTorch, in any order of deliveries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.models import MODELS, bundles, edges, lists, trees
from tests.rigs.passes import (
    ORDERS,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
    one_pass,
    orders,
)
from tests.rigs.products import halved


@pytest.mark.both_ways
@pytest.mark.parametrize("keep", ["inputs", "graph"])
@pytest.mark.parametrize("name", MODELS)
def test_whatever_is_kept_the_gradients_are_those_of_autograd(name, keep):
    model = MODELS[name](4, keep=keep)
    model.graph.check(model.shapes)
    total = model.total()
    want = autograd(total, model.modules)
    for order in ORDERS[::5]:
        got = accumulate(model.graph, model.data, order)
        assert_same_loss(got, total)
        assert_same_gradients(got.gradients, want)


@pytest.mark.both_ways
@halved(name=[*MODELS], order=ORDERS)
def test_in_every_order_the_gradients_are_those_of_autograd(name, order):
    model = MODELS[name](6)
    model.graph.check(model.shapes)
    total = model.total()
    got = accumulate(model.graph, model.data, order)
    assert_same_loss(got, total)
    assert_same_gradients(got.gradients, autograd(total, model.modules))


@pytest.mark.both_ways
@settings(max_examples=6)
@given(name=st.sampled_from(sorted(MODELS)), n=st.integers(1, 8), order=orders())
def test_in_any_order_the_gradients_are_those_of_autograd(name, n, order):
    model = MODELS[name](n)
    total = model.total()
    got = accumulate(model.graph, model.data, order)
    assert_same_loss(got, total)
    assert_same_gradients(got.gradients, autograd(total, model.modules))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=400)
@given(name=st.sampled_from(sorted(MODELS)), n=st.integers(1, 60), order=orders())
def test_in_very_many_orders_the_gradients_are_those_of_autograd(name, n, order):
    model = MODELS[name](n)
    got = accumulate(model.graph, model.data, order)
    assert_same_gradients(got.gradients, autograd(model.total(), model.modules))


def test_a_message_an_edge_and_a_message_a_graph_give_the_same_losses():
    one, other = edges(), bundles()
    a, b = (one_pass(m.graph, m.data, train=False).sums["loss"] for m in (one, other))
    assert a[1] == b[1] == len(one.data)
    assert a[0] == pytest.approx(b[0], rel=1e-12)


def test_a_sparse_embedding_collects_the_gradient_of_a_dense_one():
    dense, sparse = lists(), lists(sparse=True)
    for keep in ("inputs", "graph"):
        model = lists(sparse=True, keep=keep)
        got = accumulate(model.graph, model.data, ORDERS[2])
        assert_same_gradients(got.gradients, autograd(dense.total(), dense.modules))
    assert sparse.modules["reader"].words.sparse


def test_losses_and_metrics_of_an_evaluation_are_those_of_plain_pytorch():
    model = trees()
    outcome = one_pass(model.graph, model.data, train=False)
    rows = sum(len(i.vertex["label"]) for i in model.data)
    assert outcome.sums["loss"][1] == rows
    assert outcome.sums["loss"][0] == pytest.approx(float(model.total().detach()), rel=1e-12)
    assert all(p.gradient.take(q) is None for p in outcome.parts.values() for q in p.parameters)


def test_metrics_are_counted_over_the_rows_of_the_pass():
    model = lists()
    outcome = one_pass(model.graph, model.data)
    right = 0
    for given_ in model.data:
        h = given_.inputs["h"][0]
        for token in torch.from_numpy(given_.vertex["token"]):
            h = model.modules["reader"](h, token[None])
        right += int(model.modules["readout"](h).argmax()) == given_.value["label"]
    assert outcome.sums["accuracy"] == (right, len(model.data))
