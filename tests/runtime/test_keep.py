"""``fit(keep=...)``: what a death costs is what was trained since a state was kept; full disks."""

from __future__ import annotations

import os
import resource
import signal
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.engine.instrument import AbstractInstrument, Restored
from geartrain.runtime.processes.processes import Processes
from geartrain.train.checkpoint import read_checkpoint

SLOW = pytest.mark.slow
BOUND = pytest.mark.timeout(120)


@cache
def restoring() -> Processes:
    return Processes(2, kernel_threads=1, on_worker_death="restore", most_deaths=4)


@cache
def raising() -> Processes:
    return Processes(2, kernel_threads=1)


class Killer(AbstractInstrument):
    """Kills a worker at a step of the first part."""

    def __init__(self, at: int, how: int = signal.SIGKILL) -> None:
        self.at, self.how, self.steps = at, how, 0
        self.restored: list[Restored] = []

    def on_updated(self, event: Any) -> None:
        self.steps += event.part == "a"
        if self.steps == self.at and event.part == "a":
            os.kill(restoring().pids[1], self.how)

    def on_restored(self, event: Restored) -> None:
        self.restored.append(event)


def session(runtime: Processes, *instruments: AbstractInstrument) -> gt.Session:
    """Two parts on two workers, one instance in flight: the same to the last bit each time."""
    torch.manual_seed(0)
    graph = gt.Graph()
    x = graph.input("x").through(nn.Linear(2, 3), name="a").through(nn.Tanh(), name="tanh")
    x.through(nn.Linear(3, 1), name="b").loss(lambda y: y.square().sum(1), name="loss")
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=1e-2), update_every=3)
    placed = gt.Schedule(placement={"a": 0, "b": 1})
    return gt.Session(
        *(graph,),
        rules=rules,
        runtime=runtime,
        schedule=placed,
        max_active=1,
        instruments=instruments,
    )


def data(n: int) -> list[gt.Instance]:
    drawn = torch.Generator().manual_seed(0)
    return [gt.Instance({"x": torch.randn(2, 2, generator=drawn)}, key=i) for i in range(n)]


def weights(s: gt.Session) -> list[torch.Tensor]:
    return [p.detach().clone() for part in s.parts.values() for p in part.module.parameters()]


@BOUND
@pytest.mark.parametrize("where", ["memory", pytest.param("folder", marks=SLOW)])
def test_a_death_costs_what_was_trained_since_a_state_was_kept(where, tmp_path):
    folder = tmp_path / "kept" if where == "folder" else None
    killer = Killer(at=50)  # some 70 instances into the epoch
    s = session(restoring(), killer)
    fit = s.fit(data(90), epochs=1, keep=gt.Keep(every=20, folder=folder))
    assert (fit.deaths, fit.instances) == (1, 90)
    (death,) = killer.restored
    assert death.taken == 60 and 0 < fit.repeated == death.repeated <= 20
    if folder is not None:
        assert death.source == str(folder / "kept.safetensors")
        assert list(folder.iterdir()) == []
    whole = session(restoring())
    assert whole.fit(data(90), epochs=1, keep=gt.Keep(every=20)).deaths == 0
    assert all(x.equal(y) for x, y in zip(weights(s), weights(whole), strict=True))


@BOUND
@SLOW
def test_states_are_kept_by_the_clock_of_training():
    s = session(restoring(), killer := Killer(at=400))
    fit = s.fit(data(800), epochs=1, keep=gt.Keep(seconds=0.3))
    assert (fit.deaths, fit.instances) == (1, 800)
    assert killer.restored[0].taken > 0 and fit.repeated < 600


@BOUND
@SLOW
def test_one_that_is_stopped_costs_no_more():
    s = session(restoring(), killer := Killer(at=50, how=signal.SIGSTOP))
    fit = s.fit(data(90), epochs=1, keep=gt.Keep(every=20))
    assert (fit.deaths, fit.instances) == (1, 90) and fit.repeated <= 20
    assert "stopped" in killer.restored[0].message


class Full(AbstractInstrument):
    """No file may grow beyond some bytes, as on a full disk, from this checkpoint to that one."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self.path, self.first, self.last, self.epochs = path, first, last, 0
        self.before: bytes = b""
        self._was = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_epoch_ended(self, event: Any) -> None:
        self.epochs += 1
        if self.epochs == self.first:
            self.before = self.path.read_bytes()
            resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, self._was[1]))
        elif self.epochs == self.last:
            self.free()

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._was)


@BOUND
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_no_run(tmp_path, caplog):
    path = tmp_path / "latest.safetensors"
    full = Full(path, 1, 4)
    s = session(raising(), full)
    try:
        fit = s.fit(data(12), epochs=4, folder=tmp_path, keep_last=2)
        assert fit.unsaved == 3 and fit.instances == 48
        assert path.read_bytes() == full.before  # whole, and of the first epoch
        assert read_checkpoint(path).document["position"]["trained"] == 12
    finally:
        full.free()
    said = [r.getMessage() for r in caplog.records if "goes on without" in r.getMessage()]
    assert len(said) == 1 and "File too large" in said[0]  # of three
    assert all(not p.name.startswith(".") for p in tmp_path.iterdir())
    fit = s.fit(data(12), epochs=5, folder=tmp_path)
    assert fit.unsaved == 0
    assert read_checkpoint(path).document["position"]["trained"] == 60


@BOUND
@SLOW
def test_where_a_state_cannot_be_kept_the_one_before_is_gone_back_to(tmp_path):
    class Stop(AbstractInstrument):
        """Until the death: new workers want memory, which is a file to the system."""

        def __init__(self) -> None:
            self.was, self.over = resource.getrlimit(resource.RLIMIT_FSIZE), False

        def on_updated(self, event: Any) -> None:
            kept = tmp_path / "kept.safetensors"
            if kept.exists() and not self.over:
                resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, self.was[1]))

        def on_restored(self, event: Restored) -> None:
            self.over = True
            resource.setrlimit(resource.RLIMIT_FSIZE, self.was)

    killer, stop = Killer(at=50), Stop()
    s = session(restoring(), killer, stop)
    try:
        fit = s.fit(data(90), epochs=1, keep=gt.Keep(every=20, folder=tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, stop.was)
    assert (fit.deaths, fit.instances) == (1, 90) and fit.unsaved > 0
    assert killer.restored[0].taken == 20 and fit.repeated > 40


@pytest.mark.parametrize(
    ("given", "said"),
    [({}, "give every="), ({"every": 0}, "every=0"), ({"seconds": 0.0}, "seconds=0.0")],
)
def test_what_cannot_be_kept_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        gt.Keep(**given)


def test_keeping_where_nobody_goes_back_is_refused():
    with pytest.raises(ValueError, match=r"goes on after no death.*on_worker_death='restore'"):
        session(raising()).fit(data(2), epochs=1, keep=gt.Keep(every=1))
