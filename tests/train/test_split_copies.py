"""Copies of a pipeline, each over several workers: equal to copies that are not split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.runtime.base import AbstractRuntime
from geartrain.runtime.processes.processes import Processes
from geartrain.sharing.exchanges.nearest import NearestNeighbours
from geartrain.sharing.letters import Letter

SLOW = pytest.mark.slow
PARTS = ("a", "b", "c")
PLACED = gt.Schedule(placement={"a": 0, "b": 1, "c": 1})


@functools.cache
def four_processes() -> Processes:
    return Processes(4, kernel_threads=1)


SPLIT: dict[str, Callable[[], AbstractRuntime]] = {
    "simulated": lambda: gt.Simulated(4, seed=2, jitter=0.4, speeds=[1, 0.4, 2, 1]),
    "threads": lambda: gt.Threads(4, kernel_threads=1),
    "processes": four_processes,
}
IN_ROUNDS: dict[str, Callable[[], Any]] = {
    "lockstep": lambda: NearestNeighbours(lockstep=True),
    "d-psgd": lambda: "d-psgd",
    "all-reduce": lambda: "all-reduce",
    "diloco": lambda: gt.DiLoCo(2),
}


def data(n: int) -> list[gt.Instance]:
    drawn = torch.Generator().manual_seed(0)
    return [
        gt.Instance(
            {"x": torch.randn(3, 4, generator=drawn, dtype=torch.float64)},
            {"label": torch.randint(3, (3,), generator=drawn).numpy()},
            key=i,
        )
        for i in range(n)
    ]


def session(sharing: gt.Neighbours, runtime: AbstractRuntime, **given: Any) -> gt.Session:
    """Three linear parts in a row."""
    torch.manual_seed(0)
    graph = gt.Graph(vertex=("label",))
    x = graph.input("x", shape=(4,), dtype=torch.float64)
    x = x.through(nn.Linear(4, 6).double(), name="a").through(nn.Tanh(), name="tanh")
    x = x.through(nn.Linear(6, 6).double(), name="b")
    x.through(nn.Linear(6, 3).double(), name="c").loss(gt.cross_entropy, "label")
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=0.02), update_every=gt.Instances(1))
    return gt.Session(
        graph, rules=rules, runtime=runtime, sharing=sharing, **{"max_active": 1, **given}
    )


def weights(s: gt.Session) -> list[Tensor]:
    parts = (*s.trained_parts.values(), *s.parts.values())
    return [p.detach().clone() for part in parts for p in part.module.parameters()]


@pytest.mark.parametrize(
    ("runtime", "exchange"),
    [
        ("simulated", "lockstep"),
        ("simulated", "d-psgd"),
        ("simulated", "all-reduce"),
        ("simulated", "diloco"),
        ("threads", "lockstep"),
        ("processes", "lockstep"),
        pytest.param("threads", "d-psgd", marks=SLOW),
        pytest.param("threads", "all-reduce", marks=SLOW),
        pytest.param("processes", "d-psgd", marks=SLOW),
        pytest.param("processes", "all-reduce", marks=SLOW),
        pytest.param("processes", "diloco", marks=SLOW),
    ],
)
def test_copies_of_a_pipeline_come_to_the_bits_of_copies_that_are_not_split(runtime, exchange):
    found = []
    for made, schedule in ((gt.Simulated(2), None), (SPLIT[runtime](), PLACED)):
        sharing = gt.Neighbours(copies=2, exchange=IN_ROUNDS[exchange]())
        s = session(sharing, made, schedule=schedule, reading=gt.Reading(shuffle=False))
        s.fit(data(13), epochs=2)
        found.append(weights(s))
    assert all(x.equal(y) for x, y in zip(*found, strict=True))


def test_each_part_has_its_worker_and_writes_to_those_that_have_it_too():
    sharing = gt.Neighbours(copies=3, exchange="weights")
    s = session(sharing, gt.Simulated(6), schedule=PLACED, max_active=4)
    s.fit(data(30), epochs=1)
    engine = s.state.engine
    assert engine is not None
    homes = {n.name: engine.homes.of_node[i] for i, n in engine.wiring.nodes.items()}
    for k in range(3):
        suffix = f"#{k}" if k else ""
        assert [homes[f"{p}{suffix}"] - 2 * k for p in PARTS] == [0, 1, 1]
    seen = {(w, name) for w, worker in enumerate(engine.workers) for name in worker.parts}
    assert seen == {
        (2 * k + w, f"{p}#{k}") for k in range(3) for p, w in zip(PARTS, (0, 1, 1), strict=True)
    }
    for part in PARTS:
        for k in range(3):
            letter = Letter(part, 0, k, "offer", ())
            assert f"{part}#{k}" in engine.workers[engine.homes.of_letter(letter)].parts


@pytest.mark.parametrize("runtime", ["simulated", "threads", pytest.param("processes", marks=SLOW)])
@pytest.mark.parametrize(
    "exchange", ["weights", *(pytest.param(x, marks=SLOW) for x in ("gradients", "push-sum"))]
)
def test_copies_of_a_pipeline_train_at_any_number_in_flight(runtime, exchange):
    s = session(
        gt.Neighbours(copies=2, exchange=exchange, shards="pull"), SPLIT[runtime](), max_active=6
    )
    before = s.evaluate(data(40)).metrics["loss"]
    fit = s.fit(data(40), epochs=4)
    assert fit.instances == 160
    assert s.evaluate(data(40)).metrics["loss"] < before


def test_a_placement_of_copies_that_have_one_worker_each_is_refused():
    with pytest.raises(ValueError, match="do not go together"):
        session(gt.Neighbours(copies=2), gt.Simulated(3), schedule=PLACED)
    with pytest.raises(ValueError, match=r"worker 1; there are 0\.\.0|worker 2"):
        placed = gt.Schedule(placement={"a": 2})
        session(gt.Neighbours(copies=2), gt.Simulated(4), schedule=placed).fit(data(4), epochs=1)


def test_without_a_placement_parts_are_spread_by_their_size():
    s = session(gt.Neighbours(copies=2), gt.Simulated(5))
    s.fit(data(4), epochs=1)
    engine = s.state.engine
    assert engine is not None
    on = [{name[0] for name in worker.parts} for worker in engine.workers]
    assert on[0] | on[1] == {*PARTS} and on[0] and on[1]
    assert on[:2] == on[2:4] and not on[4]
