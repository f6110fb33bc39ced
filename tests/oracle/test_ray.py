"""Losses and gradients on workers that Ray starts are those of plain PyTorch."""

from __future__ import annotations

import pytest

from tests.rigs.models import MODELS
from tests.rigs.on_ray import RAY
from tests.rigs.passes import (
    Order,
    accumulate,
    assert_same_gradients,
    assert_same_loss,
    autograd,
)

pytestmark = [*RAY]


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_those_of_autograd(name):
    model = MODELS[name](6)
    model.graph.check(model.shapes)
    total = model.total()
    got = accumulate(model.graph, model.data, Order("ray", 2, "random", 7, max_active=7))
    assert_same_loss(got, total)
    assert_same_gradients(got.gradients, autograd(total, model.modules))
