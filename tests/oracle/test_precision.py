"""In bfloat16, losses and gradients of whole models are those of float64 but for rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.parts.rules import Flush, Rules
from tests.rigs.models import MODELS
from tests.rigs.passes import Order, accumulate, autograd
from tests.rigs.products import in_pairs

ORDERS = (Order(), Order(workers=3, jitter=0.9, seed=2, policy="random", max_rows=5))


@pytest.mark.both_ways
@in_pairs(name=[*MODELS], keep=["auto", "inputs", "graph"], order=ORDERS)
def test_gradients_in_bf16_are_those_of_float64_but_for_rounding(name, keep, order):
    model = MODELS[name](6, keep=keep)
    model.graph.check(model.shapes)
    total = model.total()
    want = autograd(total, model.modules)
    for module in model.modules.values():
        module.float()
    rules = Rules(optimizer=partial(torch.optim.SGD, lr=0.1), update_every=Flush())
    settings = replace(order.settings(), precision="bf16")
    engine = Engine(model.graph, make_parts(model.graph, rules), settings, order.workers)
    got = accumulate(model.graph, model.data, order, engine=engine)
    assert got.sums["loss"][0] == pytest.approx(float(total.detach()), rel=0.02)
    assert got.gradients.keys() == want.keys()
    for key, gradient in got.gradients.items():
        assert gradient.dtype == torch.float32
        error = float((gradient.double() - want[key]).norm() / want[key].norm())
        assert error < 0.05, f"{key}: {error}"
