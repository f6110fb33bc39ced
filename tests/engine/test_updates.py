"""The number asked for is what happens: how many updates there are, and of what."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from rig_updates import KINDS, Kind, Steps, cut

import geartrain as gt
from geartrain.runtime.base import AbstractRuntime

N = 50
SGD = partial(torch.optim.SGD, lr=1e-3)
ORDERS = {
    "simulated, 1 in flight": (1, lambda: gt.Simulated(1)),
    "simulated, 7 in flight": (7, lambda: gt.Simulated(1)),
    "simulated, 64 in flight": (64, lambda: gt.Simulated(1)),
    "3 simulated workers": (64, lambda: gt.Simulated(3, seed=1, jitter=0.7)),
    "threads, 7 in flight": (7, lambda: gt.Threads(2, kernel_threads=1)),
    "threads, 64 in flight": (64, lambda: gt.Threads(3, kernel_threads=1)),
}


def trained(
    kind: Kind, trigger: object, in_flight: int, runtime: AbstractRuntime, **more: object
) -> tuple[Steps, gt.Session, gt.Fit]:
    steps = Steps()
    session = gt.Session(
        kind.graph,
        rules=gt.Rules(optimizer=SGD, update_every=trigger),
        runtime=runtime,
        max_active=in_flight,
        ramp=gt.Ramp(over=0),
        shuffle=False,
        instruments=[steps],
        **more,
    )
    fit = session.fit(list(kind.data), epochs=1)
    for part, messages in kind.brings.items():
        assert sum(steps.of(part)) == sum(map(sum, messages))  # nothing is lost, or comes twice
        assert fit.history[0].updates.get(part, 0) == len(steps.of(part))
        assert sum(fit.history[0].staleness[part].histogram) == sum(steps.of(part))
    return steps, session, fit


@pytest.fixture(params=ORDERS)
def order(request) -> tuple[int, AbstractRuntime]:
    in_flight, make = ORDERS[request.param]
    return in_flight, make()


@pytest.mark.parametrize("n", [1, 8, 20])
@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_instances_is_of_that_many(name, n, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Instances(n), *order)
    for part, messages in kind.brings.items():
        rows = [sum(brought) for brought in messages]
        if name in ("uneven bundles", "whole trees"):  # they may overtake one another
            assert len(steps.of(part)) == -(-N // n)
        else:
            assert steps.of(part) == cut(rows, n)


@pytest.mark.parametrize("n", [1, 7, 50])
@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_rows_is_of_that_many_and_bundles_even_out(name, n, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Rows(n), *order)
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        total, largest = sum(sizes), max(sizes, default=0)
        *whole, last = steps.of(part)
        if largest == 1:
            assert steps.of(part) == cut(sizes, n)
        elif n == 1:
            assert len(steps.of(part)) == len(sizes)
        elif largest <= n:
            assert len(steps.of(part)) in (total // n, total // n + 1)
            ahead = np.cumsum(whole) - n * np.arange(1, len(whole) + 1)
            assert (ahead >= 0).all() and (ahead < largest).all()
            assert last < n + largest


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_messages_is_of_that_many(name, n, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Messages(n), *order)
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        assert len(steps.of(part)) == -(-len(sizes) // n)
        if len(set(sizes)) == 1:
            assert steps.of(part) == cut(sizes, n)


@pytest.mark.parametrize("name", KINDS)
def test_what_waits_for_the_flush_is_one_update(name, order):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, gt.Flush(), *order)
    assert all(len(steps.of(part)) == 1 for part in kind.brings)


LANES = [gt.Simulated(3, seed=2, jitter=0.5), gt.Threads(3, kernel_threads=1)]
IN_LANES = [name for name in KINDS if name != "minibatches"]  # which keep autograd's graph


@pytest.mark.parametrize("runtime", LANES, ids=repr)
@pytest.mark.parametrize("trigger", [gt.Instances(1), gt.Instances(8), gt.Messages(3), gt.Rows(20)])
@pytest.mark.parametrize("name", IN_LANES)
def test_lanes_make_as_many_updates_as_one_worker(name, trigger, runtime):
    kind = KINDS[name](N)
    steps, _, _ = trained(kind, trigger, 64, runtime, lanes=True)
    for part, messages in kind.brings.items():
        sizes = [rows for brought in messages for rows in brought]
        visits = [bool(brought) for brought in messages]
        total = {"rows": sum(sizes), "messages": len(sizes), "instances": N}[trigger.unit]
        if all(visits) or trigger.unit != "instances":
            assert len(steps.of(part)) in (total // trigger.n, -(-total // trigger.n))
