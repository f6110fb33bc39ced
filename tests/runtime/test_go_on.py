"""``on_worker_death="go_on"``: copies of the model go on when the worker of another one dies."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.errors import WorkerDiedError
from geartrain.runtime.processes.processes import Processes
from geartrain.sharing.replicas import Replicas
from tests.rigs.left import living
from tests.rigs.told import Told, numbered

SLOW = pytest.mark.slow
BOUND = pytest.mark.timeout(120)


@cache
def lasting(workers: int = 3) -> Processes:
    """One for all tests: cheaper."""
    return Processes(workers, kernel_threads=1, on_worker_death="go_on", most_deaths=20)


class Fate(Told):
    """Strikes workers when so many updates have been seen, and keeps what it is told."""

    def __init__(self, runtime: Processes, at: dict[int, tuple[int, ...]], how: int) -> None:
        super().__init__()
        self.runtime, self.at, self.how, self.steps = runtime, dict(at), how, 0
        self.struck: list[int] = []

    def on_updated(self, event: Any) -> None:
        self.steps += 1
        for worker in self.at.pop(self.steps, ()):
            self.struck.append(self.runtime.pids[worker])
            os.kill(self.struck[-1], self.how)


def session(
    runtime: Processes,
    at: dict[int, tuple[int, ...]],
    how: int = signal.SIGKILL,
    copies: int = 3,
    between: nn.Module | None = None,
    **sharing: Any,
) -> tuple[gt.Session, Fate]:
    torch.manual_seed(0)
    graph = gt.Graph()
    x = graph.input("x", shape=(2,), dtype=torch.float64)
    x = x.through(nn.Linear(2, 3).double(), name="a").through(between or nn.Tanh(), name="between")
    x.through(nn.Linear(3, 1).double(), name="b").loss(lambda y: y.square().sum(1), name="loss")
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=0.01), update_every=4)
    fate = Fate(runtime, at, how)
    neighbours = gt.Neighbours(copies=copies, **{"exchange": "weights", **sharing})
    return gt.Session(
        graph, rules=rules, runtime=runtime, sharing=neighbours, max_active=4, instruments=[fate]
    ), fate


def check(s: gt.Session, fate: Fate, fit: gt.Fit, deaths: int, instances: int) -> None:
    """Nothing is lost, nothing counted twice but what is told, nothing left behind."""
    assert fit.deaths == deaths == len(fate.restored)
    assert fit.instances == instances == fate.total("instances")
    assert fit.repeated == sum(e.unfinished for e in fate.restored)
    assert fate.total("sent") == sum(fate.total(n) for n in ("applied", "dropped", "lost"))
    assert not living(tuple(fate.struck))
    sharing = s.state.sharing
    assert isinstance(sharing, Replicas)
    for part in s.trained_parts.values():
        assert all(bool(p.isfinite().all()) for p in part.module.parameters())


@BOUND
@pytest.mark.parametrize(
    "exchange",
    [
        "weights",
        *(pytest.param(x, marks=SLOW) for x in ("d-psgd", "push-sum", "gradients", "elastic")),
        *(pytest.param(x, marks=SLOW) for x in ("all-reduce", "average", "async-local-sgd")),
    ],
)
def test_others_go_on_and_a_newcomer_takes_the_place_of_one_that_was_killed(exchange):
    s, fate = session(lasting(), {40: (1,), 120: (0,), 200: (2,)}, exchange=exchange)
    fit = s.fit(numbered(180), epochs=3)  # 270 updates
    check(s, fate, fit, 3, 540)
    assert {e.source for e in fate.restored} == {"copies"}
    # Deaths may follow one another before a newcomer has begun: they join in any order.
    assert sorted(list(e.copies) for e in fate.joined) == [[0], [1], [2]]
    assert all(c.present and c.instances for c in fate.exchanged[-1].copies)
    assert len(living(lasting().pids)) == 3


@BOUND
@pytest.mark.slow
def test_one_that_is_stopped_is_ended_and_replaced():
    s, fate = session(lasting(), {60: (1,)}, signal.SIGSTOP)
    fit = s.fit(numbered(3000), epochs=1)
    check(s, fate, fit, 1, 3000)
    assert "stopped" in fate.restored[0].message


@BOUND
def test_two_that_die_at_once_leave_one_that_goes_on():
    s, fate = session(lasting(), {80: (0, 2)})
    fit = s.fit(numbered(300), epochs=1)
    check(s, fate, fit, 2, 300)
    assert sorted(k for e in fate.joined for k in e.copies) == [0, 2]


@BOUND
def test_where_too_few_are_left_the_call_goes_back_to_its_last_state():
    s, fate = session(lasting(), {80: (0,)}, least=3)
    fit = s.fit(numbered(300), epochs=1)
    assert fate.restored[0].source == "memory"
    assert (fit.deaths, fit.instances) == (1, 300)
    assert fit.repeated == fate.restored[0].repeated > 0


class Deadly(nn.Module):
    """Its process dies as it is made again in a worker, so many times."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.folder, self.parent = str(folder), os.getpid()
        for k in range(times):
            (folder / str(k)).touch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() == self.parent:
            return
        for each in sorted(Path(self.folder).iterdir()):
            with contextlib.suppress(FileNotFoundError):
                each.unlink()  # by one of them alone
                os.kill(os.getpid(), signal.SIGKILL)


@BOUND
def test_deaths_before_a_pass_has_begun_lose_nothing(tmp_path):
    s, fate = session(lasting(), {}, between=Deadly(tmp_path, 1))
    fit = s.fit(numbered(60), epochs=1)
    assert (fit.deaths, fit.repeated, fit.instances) == (1, 0, 60)
    assert {e.source for e in fate.restored} == {"copies"}


@BOUND
@pytest.mark.slow
def test_of_copies_that_are_pipelines_a_whole_one_is_replaced():
    s, fate = session(lasting(4), {80: (3,), 200: (0,)}, copies=2)
    fit = s.fit(numbered(300), epochs=2)
    check(s, fate, fit, 2, 600)
    assert sorted(list(e.copies) for e in fate.joined) == [[0], [1]]


@BOUND
@pytest.mark.slow
def test_without_copies_it_goes_back_as_with_restore():
    torch.manual_seed(0)
    graph = gt.Graph()
    x = graph.input("x", shape=(2,), dtype=torch.float64)
    x.through(nn.Linear(2, 1).double(), name="a").loss(lambda y: y.square().sum(1), name="loss")
    fate = Fate(lasting(), {20: (0,)}, signal.SIGKILL)
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=4)
    s = gt.Session(graph, rules=rules, runtime=lasting(), max_active=4, instruments=[fate])
    fit = s.fit(numbered(300), epochs=1)
    assert (fit.deaths, fit.instances) == (1, 300) and fate.restored[0].source == "memory"


@BOUND
@pytest.mark.slow
def test_after_too_many_deaths_the_next_is_raised():
    short = Processes(2, kernel_threads=1, on_worker_death="go_on", most_deaths=1)
    s, _ = session(short, {40: (0,), 120: (1,)}, copies=2)
    with pytest.raises(WorkerDiedError, match="died 2 times"):
        s.fit(numbered(2000), epochs=1)
    short.close()
