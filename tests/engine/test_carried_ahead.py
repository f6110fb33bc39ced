"""What others wait for is carried on before the parts of a worker step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.engine import Engine
from geartrain.engine.firing import Firing
from geartrain.engine.parts import make_parts
from geartrain.engine.router import Delivery
from geartrain.engine.settings import Settings
from geartrain.parts.part import PartState
from geartrain.runtime.base import Feeder

SGD = partial(torch.optim.SGD, lr=0.1)


def passed(*, ahead: bool, **rules: Any) -> tuple[list[Any], list[Any], Engine]:
    """One instance through two maps on a worker each.

    Returns:
        Of each call ahead the node, versions of both parts, batches for the other worker, and
        answers for the controller; of each firing its node, what it still has of these, and steps.
    """
    torch.manual_seed(0)
    graph = gt.Graph()
    x = graph.input("x").through(nn.Linear(2, 3), name="low").through(nn.Linear(3, 1), name="high")
    x.loss(lambda y: y.square().sum(1), name="loss")
    parts = make_parts(graph, gt.Rules(optimizer=SGD, update_every=gt.Rows(1), **rules))
    engine = Engine(graph, parts, Settings(), 2, {"low": 0, "high": 1})
    engine.begin(train=True, judge=True, collect=False)
    calls: list[Any] = []
    firings: list[Any] = []
    mail: list[tuple[int, Any]] = []
    sizes: list[int] = []

    def carry(firing: Firing) -> None:
        news = firing.outbox.take_news()
        versions = [part.version for part in engine.parts.values()]
        calls.append((firing.node, versions, len(firing.elsewhere), len(news.answered)))
        engine.controller.settle(news)
        mail.extend(firing.elsewhere)
        firing.elsewhere.clear()

    for worker in engine.workers:
        worker.ahead = carry if ahead else None
    out = Feeder(iter([gt.Instance({"x": torch.ones(1, 2)})])).admit(engine)
    assert out is not None
    mail += [(engine.homes.of_node[d.node], d) for d in out.deliveries]
    out.deliveries.clear()
    engine.controller.settle(out)
    while mail or any(worker.ready for worker in engine.workers):
        for to, delivery in mail:
            engine.workers[to].deliver(delivery)
        mail.clear()
        for worker in engine.workers:
            if worker.ready:
                firing = worker.fire()
                left = len(firing.elsewhere), len(firing.outbox.answered)
                firings.append((firing.node, firing.forward, left, len(firing.steps)))
                sizes.append(firing.nbytes)
                engine.controller.settle(firing.outbox)
                mail += firing.elsewhere
    assert sizes == [2 * 4, 3 * 4, 3 * 4]  # rows, rows, and the gradient that comes back
    return calls, firings, engine


def test_gradients_and_answers_go_before_the_step_and_once() -> None:
    calls, firings, engine = passed(ahead=True)
    assert calls == [("high", [0, 0], 1, 0), ("low", [0, 1], 0, 1)]
    assert firings == [
        ("low", True, (1, 0), 0),  # adds no gradient: nothing to be ahead of
        ("high", True, (0, 0), 1),
        ("low", False, (0, 0), 1),
    ]
    assert not engine.controller.active


def test_nothing_goes_ahead_where_nobody_carries_it_or_a_step_may_be_held() -> None:
    calls, firings, engine = passed(ahead=False)
    left = [("low", True, (1, 0), 0), ("high", True, (1, 0), 1), ("low", False, (0, 1), 1)]
    assert (calls, firings) == ([], left) and not engine.controller.active
    assert passed(ahead=True, max_staleness=4)[:2] == ([], left)


def test_firings_know_the_bytes_that_they_have_taken() -> None:
    """Rows that an index chooses count, and the others of the payload do not."""
    graph = gt.Graph()
    x = graph.input("x").through(nn.Linear(4, 2), name="map")
    x.loss(lambda y: y.square().sum(1))
    engine = Engine(graph, make_parts(graph, gt.Rules()), Settings(), 1)
    engine.begin(train=True, judge=True, collect=False)
    worker = engine.workers[0]
    out = Feeder(iter([gt.Instance({"x": torch.ones(6, 4)})])).admit(engine)
    assert out is not None
    (delivery,) = out.deliveries
    some = delivery.batch.take(np.array([0, 2, 5]))
    worker.deliver(Delivery(delivery.node, delivery.port, some))
    assert worker.fire().nbytes == 3 * 4 * 4


def test_a_firing_enters_the_guard_of_its_way(monkeypatch) -> None:
    entered: list[str] = []

    def noting(way: str) -> Any:
        @contextmanager
        def guard(self: PartState) -> Iterator[None]:
            entered.append(f"{self.name} {way}")
            yield

        return property(guard, lambda self, given: None)

    monkeypatch.setattr(PartState, "guard", noting("on"), raising=False)
    monkeypatch.setattr(PartState, "guard_back", noting("back"))
    passed(ahead=False)
    assert entered == ["low on", "high on", "low back"]  # a loss inside goes both ways at once
