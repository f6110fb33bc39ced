"""Modules behind one that looks inside bundles: a part of one node, the same numbers as in two."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.parts import make_parts
from geartrain.engine.settings import Settings
from geartrain.nn import BundleSequential, TokenRNN, WholeList
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.kernel import bundle_kernel_of
from geartrain.nodes.payload import Recompute, RowNode
from geartrain.nodes.readout import ReadoutNode
from geartrain.nodes.remembering import Remembering
from tests.rigs.sessions import session_of

H, TOKENS, CLASSES = 5, 7, 3


def graph(module: nn.Module, keep: str = "auto") -> gt.Graph:
    made = gt.Graph(value=("label",))
    tokens = made.input("tokens", shape=(), dtype=torch.int64, bundle=True)
    scores = tokens.through(module, name="net", inside=True, pool=True, keep=keep)
    scores.loss(gt.cross_entropy, "label", metrics={"accuracy": gt.accuracy})
    return made


def modules() -> tuple[WholeList, nn.Module]:
    torch.manual_seed(0)
    cell = TokenRNN(TOKENS, H, "tanh", embedding_dim=4).double()
    return WholeList(cell), nn.Sequential(
        nn.Linear(H, 6), nn.Tanh(), nn.Linear(6, CLASSES)
    ).double()


def data() -> gt.Columns:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 7, 50)
    tokens = torch.from_numpy(draw.integers(0, TOKENS, int(lengths.sum())))
    labels = draw.integers(0, CLASSES, 50)
    return gt.Columns(lengths, {"tokens": tokens}, value={"label": labels}, called="list")


def trained(
    made: gt.Graph, net: nn.Module, **given: object
) -> tuple[dict[str, float], list[Tensor]]:
    sgd = partial(torch.optim.SGD, lr=0.1)
    rules = gt.Rules(optimizer=sgd, update_every=gt.Flush(), average="instances")
    session = session_of(made, rules=rules, max_active=16, ramp=gt.Ramp(over=0), **given)
    session.fit(data(), epochs=2)
    return session.evaluate(data()).metrics, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("given", [{}, {"placement": {"loss": 0}}], ids=["fused", "apart"])
@pytest.mark.parametrize("keep", ["auto", "inputs"])
def test_it_learns_what_two_nodes_learn(keep: str, given: dict[str, object]) -> None:
    whole, rows = modules()
    found = trained(graph(net := BundleSequential(whole, *rows), keep), net, **given)
    whole, rows = modules()
    apart = gt.Graph(value=("label",))
    tokens = apart.input("tokens", shape=(), dtype=torch.int64, bundle=True)
    states = tokens.through(whole, name="lists", inside=True, pool=True)
    scores = states.through(rows, name="rows")
    scores.loss(gt.cross_entropy, "label", metrics={"accuracy": gt.accuracy})
    expected = trained(apart, nn.Sequential(whole, *rows))
    assert_close(found, expected)


def test_gradients_are_those_of_autograd() -> None:
    whole, rows = modules()
    net = BundleSequential(whole, *rows)
    made, instances = graph(net), data()
    parts = make_parts(made, gt.Rules(update_every=gt.Flush()))
    engine = Engine(made, parts, Settings(max_active=8, ramp=gt.Ramp(over=0)))
    (node,) = engine.wiring.nodes.values()
    assert isinstance(node, ReadoutNode) and node.bundled
    total = torch.zeros((), dtype=torch.float64)
    for instance in instances:
        h = torch.zeros(1, H, dtype=torch.float64)
        for token in instance.inputs["tokens"]:
            h = whole.cell(h, token[None])
        label = torch.tensor([int(instance.value["label"])])
        total = total + nn.functional.cross_entropy(rows(h), label)
    wanted = torch.autograd.grad(total, list(net.parameters()))
    engine.begin(train=True)
    out = engine.controller.admit(instances[:8])
    rest = list(instances[8:])
    worker = engine.workers[0]
    while True:
        for delivery in out.deliveries:
            worker.deliver(delivery)
        while worker.ready:
            engine.controller.settle(worker.fire().outbox)
        if not rest:
            break
        out = engine.controller.admit(rest[:8])
        rest = rest[8:]
    engine.check_empty()
    for parameter, want in zip(net.parameters(), wanted, strict=True):
        have = parts["net"].gradient.take(parameter)
        assert have is not None
        assert_close(have, want)


@pytest.mark.parametrize(("keep", "kernel"), [("auto", Remembering), ("inputs", Recompute)])
def test_alone_it_runs_again_and_without_kernels_it_has_none(keep: Any, kernel: type) -> None:
    whole, rows = modules()
    made = gt.Graph()
    tokens = made.input("tokens", shape=(), dtype=torch.int64, bundle=True)
    net = BundleSequential(whole, rows)
    tokens.through(net, name="net", inside=True, pool=True, keep=keep).output("scores")
    (node, _) = Engine(made, make_parts(made, gt.Rules()), Settings()).wiring.nodes.values()
    assert isinstance(node, RowNode) and isinstance(node._kernel, kernel)
    assert bundle_kernel_of(net) is not None
    assert bundle_kernel_of(BundleSequential(whole, nn.LayerNorm(H), nn.Conv1d(1, 1, 1))) is None


def test_rows_may_be_answered_by_another_kernel_than_sent_them() -> None:
    whole, rows = modules()
    net = BundleSequential(whole, *rows)
    one, other = bundle_kernel_of(net), bundle_kernel_of(net)
    assert one is not None and other is not None
    lengths = torch.tensor([3, 1, 4])
    inside = gt.Inside(lengths, torch.arange(3).repeat_interleave(lengths), {})
    tokens, dy = torch.arange(8) % TOKENS, torch.randn(3, CLASSES, dtype=torch.float64)
    sums = [GradientSum(net.parameters()) for _ in range(2)]
    with torch.no_grad():
        _, residuals = one.forward((tokens,), inside)
        for kernel, into in zip((one, other), sums, strict=True):
            kernel.backward((dy,), residuals, None, into, inside)
    for parameter in net.parameters():
        assert_close(*[into.take(parameter) for into in sums])
