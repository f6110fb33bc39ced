"""Every number that a public constructor takes is of its kind and in its range, or refused by name.

A row of ``ROWS`` is an argument; another test finds the arguments without a row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt


@dataclass(frozen=True)
class Kind:
    """Values that are taken, those that are of another type, and those that are out of range."""

    good: Sequence[Any]
    no_number: Sequence[Any]
    out: Sequence[Any]


def whole(least: int, most: int | None = None) -> Kind:
    beyond = [] if most is None else [most + 1]
    no_number = [least + 0.5, float(least + 1), "2", True, math.nan, [least]]
    return Kind([least, np.int64(least)], no_number, [least - 1, *beyond])


def number(good: float, *out: float) -> Kind:
    no_number = ["1", True, [good], 1j]
    return Kind([good, np.float32(good)], no_number, [*out, math.nan, math.inf, -math.inf])


POSITIVE, NOT_NEGATIVE, BELOW_ONE = number(0.25, 0, -0.5), number(0, -0.5), number(0, -0.1, 1, 1.5)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def pipeline(**given: Any) -> gt.Pipeline:
    return gt.Pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), **given)


def session(**given: Any) -> gt.Session:
    graph = gt.Graph()
    graph.input("x").through(nn.Linear(2, 2), name="it").loss(lambda x: x.square().sum(1))
    return gt.Session(graph, **given)


def fit(**given: Any) -> gt.Fit:
    data = [gt.Instance({"x": torch.ones(1, 2)})] * 4
    return session().fit(data, **{"epochs": 0} | given)


def loader() -> DataLoader[Any]:
    return DataLoader([(torch.ones(2), torch.ones(1))] * 4)  # type: ignore[arg-type]


Make = Callable[[Any], Any]
PARTS: dict[str, tuple[Make, Kind]] = {
    "Clip.norm": (lambda x: gt.Clip(norm=x), Kind([0.25, math.inf], ["5", [1.0]], [0, math.nan])),
    "Clip.value": (lambda x: gt.Clip(value=x), Kind([0.25, math.inf], ["5", [1.0]], [0, math.nan])),
    "Rows.n": (gt.Rows, whole(1, 2**53)),
    "Instances.n": (gt.Instances, whole(1, 2**53)),
    "Messages.n": (gt.Messages, whole(1, 2**53)),
    "Rules.update_every": (lambda x: gt.Rules(update_every=x), Kind([1], [1.5, "5", True], [0])),
    "Rules.max_staleness": (lambda x: gt.Rules(max_staleness=x), whole(0)),
    "Rules.window": (lambda x: gt.Rules(window=x), whole(1)),
    "Part.update_every": (
        lambda x: gt.Part(nn.Linear(1, 1), update_every=x),
        Kind([1], [1.5, "5", True], [0]),
    ),
    "Part.max_staleness": (lambda x: gt.Part(nn.Linear(1, 1), max_staleness=x), whole(0)),
    "Part.window": (lambda x: gt.Part(nn.Linear(1, 1), window=x), whole(1)),
    "AnnealedRate.over": (gt.AnnealedRate, whole(1)),
    "AnnealedRate.delay": (lambda x: gt.AnnealedRate(1, delay=x), NOT_NEGATIVE),
    "DelayCompensated.lambda_": (gt.DelayCompensated, NOT_NEGATIVE),
    "DelayCompensated.adaptive": (lambda x: gt.DelayCompensated(adaptive=x), BELOW_ONE),
    "GapAware.decay": (gt.GapAware, BELOW_ONE),
    "Corrected.decay": (gt.Corrected, BELOW_ONE),
    "Corrected.delay": (lambda x: gt.Corrected(delay=x), whole(0)),
    "Predicted.steps": (gt.Predicted, whole(0)),
    "Predicted.backward": (lambda x: gt.Predicted(backward=x), whole(0)),
    "LookAheadSGD.lr": (lambda x: gt.LookAheadSGD(weights(), lr=x), NOT_NEGATIVE),
    "LookAheadSGD.momentum": (lambda x: gt.LookAheadSGD(weights(), momentum=x), BELOW_ONE),
    "LookAheadSGD.weight_decay": (
        lambda x: gt.LookAheadSGD(weights(), weight_decay=x),
        NOT_NEGATIVE,
    ),
    "SpikeCompensatedSGD.lr": (lambda x: gt.SpikeCompensatedSGD(weights(), lr=x), NOT_NEGATIVE),
    "SpikeCompensatedSGD.momentum": (
        lambda x: gt.SpikeCompensatedSGD(weights(), momentum=x),
        BELOW_ONE,
    ),
    "SpikeCompensatedSGD.weight_decay": (
        lambda x: gt.SpikeCompensatedSGD(weights(), weight_decay=x),
        NOT_NEGATIVE,
    ),
    "SpikeCompensatedSGD.delay": (
        lambda x: gt.SpikeCompensatedSGD(weights(), delay=x),
        NOT_NEGATIVE,
    ),
    "Gear.period": (gt.Gear, Kind([1, "never", {0: 2}], [1.5, True], [0, "2"])),
    "Gear.replays": (lambda x: gt.Gear(replays=x), whole(0)),
    "Gear.buffer": (lambda x: gt.Gear(buffer=x), whole(1)),
    "Gear.max_age": (lambda x: gt.Gear(max_age=x), whole(0)),
    "DecoupledGreedy.buffer": (gt.DecoupledGreedy, whole(1)),
    "DecoupledGreedy.times": (lambda x: gt.DecoupledGreedy(times=x), whole(1)),
    "DecoupledGreedy.max_age": (lambda x: gt.DecoupledGreedy(max_age=x), whole(0)),
    "DecoupledGreedy.seed": (lambda x: gt.DecoupledGreedy(seed=x), whole(0)),
    "Chunked.chunks": (gt.Chunked, whole(1)),
    "Pipeline.parts": (lambda x: pipeline(parts=x), whole(1, 4)),
    "Pipeline.cuts": (lambda x: pipeline(cuts=[x]), whole(1, 3)),
    "Pipeline.slack": (lambda x: pipeline(parts=2, slack=x), whole(0)),
}
SHARING: dict[str, tuple[Make, Kind]] = {
    "Neighbours.copies": (lambda x: gt.Neighbours(copies=x), whole(1, 1024)),
    "Neighbours.when": (lambda x: gt.Neighbours(when=x), whole(1)),
    "Neighbours.restart_every": (lambda x: gt.Neighbours(restart_every=x), whole(1)),
    "Neighbours.least": (lambda x: gt.Neighbours(copies=3, least=x), whole(1, 3)),
    "PartCopies.copies": (gt.PartCopies, whole(1, 1024)),
    "PartCopies.copies of one": (lambda x: gt.PartCopies({"it": x}), whole(1, 1024)),
    "Average.every": (gt.Average, whole(1)),
    "Inbox.limit": (gt.Inbox, whole(1)),
    "Torus.rows": (gt.Torus, whole(1)),
    "Torus.columns": (lambda x: gt.Torus(columns=x), whole(1)),
    "NearestNeighbours.every": (gt.NearestNeighbours, whole(1)),
    "NearestNeighbours.scale": (lambda x: gt.NearestNeighbours(scale=x), NOT_NEGATIVE),
    "StalenessAware.every": (gt.StalenessAware, whole(1)),
    "StalenessAware.power": (lambda x: gt.StalenessAware(power=x), NOT_NEGATIVE),
    "CompensatedNeighbours.strength": (gt.CompensatedNeighbours, NOT_NEGATIVE),
    "CompensatedNeighbours.every": (lambda x: gt.CompensatedNeighbours(every=x), whole(1)),
    "CompensatedNeighbours.decay": (lambda x: gt.CompensatedNeighbours(decay=x), BELOW_ONE),
    "CompensatedNeighbours.eps": (lambda x: gt.CompensatedNeighbours(eps=x), POSITIVE),
    "PairAverage.every": (gt.PairAverage, whole(1)),
    "PairAverage.at_once": (lambda x: gt.PairAverage(at_once=x), whole(1)),
    "PairAverage.seed": (lambda x: gt.PairAverage(seed=x), whole(0)),
    "DecentralizedSGD.every": (lambda x: gt.DecentralizedSGD(every=x), whole(1)),
    "PushSum.every": (gt.PushSum, whole(1)),
    "PushSum.least": (lambda x: gt.PushSum(least=x), number(0.5, 0, -0.1, 0.6)),
    "PeriodicAverage.every": (gt.PeriodicAverage, whole(1)),
    "DiLoCo.every": (gt.DiLoCo, whole(1)),
    "DiLoCo.rate": (lambda x: gt.DiLoCo(rate=x), POSITIVE),
    "DiLoCo.momentum": (lambda x: gt.DiLoCo(momentum=x), BELOW_ONE),
    "ElasticAverage.alpha": (gt.ElasticAverage, BELOW_ONE),
    "ElasticAverage.every": (lambda x: gt.ElasticAverage(every=x), whole(1)),
    "DelayedNesterov.every": (gt.DelayedNesterov, whole(1)),
    "DelayedNesterov.rate": (lambda x: gt.DelayedNesterov(rate=x), POSITIVE),
    "DelayedNesterov.momentum": (lambda x: gt.DelayedNesterov(momentum=x), BELOW_ONE),
    "DelayedNesterov.buffer": (lambda x: gt.DelayedNesterov(buffer=x), whole(1)),
    "DelayedNesterov.speeds": (lambda x: gt.DelayedNesterov(speeds=[1.0, x]), POSITIVE),
}
RUNTIMES: dict[str, tuple[Make, Kind]] = {
    "Threads.workers": (gt.Threads, whole(1, 1024)),
    "Threads.kernel_threads": (lambda x: gt.Threads(kernel_threads=x), whole(1, 1024)),
    "Threads.patience_s": (lambda x: gt.Threads(patience_s=x), NOT_NEGATIVE),
    "Processes.workers": (gt.Processes, whole(1, 1024)),
    "Processes.kernel_threads": (lambda x: gt.Processes(kernel_threads=x), whole(1, 1024)),
    "Processes.patience_s": (lambda x: gt.Processes(patience_s=x), NOT_NEGATIVE),
    "Processes.most_deaths": (lambda x: gt.Processes(most_deaths=x), whole(1)),
    "Hosts.hosts": (gt.Hosts, Kind([1], [1.5, "here", True], [0, -1])),
    "Hosts.workers": (lambda x: gt.Hosts(2, workers=x), whole(1, 2)),
    "Hosts.kernel_threads": (lambda x: gt.Hosts(kernel_threads=x), whole(1, 1024)),
    "Hosts.patience_s": (lambda x: gt.Hosts(patience_s=x), NOT_NEGATIVE),
    "Hosts.most_deaths": (lambda x: gt.Hosts(most_deaths=x), whole(1)),
    "Hosts.wait_s": (lambda x: gt.Hosts(wait_s=x), NOT_NEGATIVE),
    "Host.workers": (lambda x: gt.Host("127.0.0.1", workers=x), whole(1)),
    "Ray.workers": (gt.Ray, whole(1, 1024)),
    "Ray.resources": (lambda x: gt.Ray(resources={"CPU": 1, "it": x}), NOT_NEGATIVE),
    "Ray.wait_s": (lambda x: gt.Ray(wait_s=x), NOT_NEGATIVE),
    "Ray.kernel_threads": (lambda x: gt.Ray(kernel_threads=x), whole(1, 1024)),
    "Ray.patience_s": (lambda x: gt.Ray(patience_s=x), NOT_NEGATIVE),
    "Ray.most_deaths": (lambda x: gt.Ray(most_deaths=x), whole(1)),
    "Simulated.workers": (gt.Simulated, whole(1, 1024)),
    "Simulated.seed": (lambda x: gt.Simulated(seed=x), whole(0)),
    "Simulated.speeds": (lambda x: gt.Simulated(2, speeds=[1.0, x]), POSITIVE),
    "Simulated.jitter": (lambda x: gt.Simulated(jitter=x), BELOW_ONE),
    "Simulated.parent": (lambda x: gt.Simulated(2, parent=x), whole(0, 2)),
    "Costs.nodes": (lambda x: gt.Costs(nodes={"it": (0.0, x)}), NOT_NEGATIVE),
    "Costs.bytes_per_s": (lambda x: gt.Costs(bytes_per_s=x), POSITIVE),
    "Costs.buffer_bytes": (
        lambda x: gt.Costs(buffer_bytes=x, shared=True),
        number(1, 0.5, 0, -1),
    ),
    "Pause.for_s": (
        lambda x: gt.Simulated(2, events=[gt.Pause(1, 0.0, x)]),
        NOT_NEGATIVE,
    ),
}
for name in ("firing_s", "row_s", "backward", "latency_s", "letter_s", "letter_byte_s"):
    RUNTIMES[f"Costs.{name}"] = (lambda x, name=name: gt.Costs(**{name: x}), NOT_NEGATIVE)
for name in ("message_s", "again_s"):
    RUNTIMES[f"Costs.{name}"] = (lambda x, name=name: gt.Costs(**{name: x}), NOT_NEGATIVE)
for event in (gt.Leave, gt.Join, gt.Die, lambda worker, at_s: gt.Pause(worker, at_s, 1.0)):
    word = getattr(event, "__name__", "").replace("<lambda>", "Pause")
    RUNTIMES[f"{word}.worker"] = (
        lambda x, event=event: gt.Simulated(2, events=[event(x, 0.0)]),
        whole(0, 1),
    )
    RUNTIMES[f"{word}.at_s"] = (
        lambda x, event=event: gt.Simulated(2, events=[event(1, x)]),
        NOT_NEGATIVE,
    )
TRAINING: dict[str, tuple[Make, Kind]] = {
    "Ramp.start": (gt.Ramp, whole(1)),
    "Ramp.over": (lambda x: gt.Ramp(over=x), whole(0)),
    "Synchronous.instances": (gt.Synchronous, whole(0)),
    "Sweeps.enough": (gt.Sweeps, whole(1)),
    "Schedule.max_rows": (lambda x: gt.Schedule(max_rows=x), whole(1)),
    "Schedule.max_rounds": (lambda x: gt.Schedule(max_rounds=x), whole(1)),
    "InFlight.rows": (lambda x: gt.InFlight(rows=x), whole(1)),
    "InFlight.max_staleness": (lambda x: gt.InFlight(max_staleness=x), NOT_NEGATIVE),
    "InFlight.max_bytes": (lambda x: gt.InFlight(max_bytes=x), whole(1)),
    "InFlight.most": (lambda x: gt.InFlight(most=x), whole(1, 2**20)),
    "Auto.workers": (lambda x: gt.Auto(workers=x), whole(1, 1024)),
    "Auto.max_staleness": (lambda x: gt.Auto(max_staleness=x), NOT_NEGATIVE),
    "Auto.cores": (lambda x: gt.Auto(cores=x), whole(1, 1024)),
    "Keep.every": (lambda x: gt.Keep(every=x), whole(1)),
    "Keep.seconds": (lambda x: gt.Keep(seconds=x), POSITIVE),
    "Target.value": (lambda x: gt.Target("loss", x), number(-0.5)),
    "Minibatches.batch": (lambda x: gt.Minibatches(torch.ones(4, 2), batch=x), whole(1)),
    "Minibatches.seed": (lambda x: gt.Minibatches(torch.ones(4, 2), batch=2, seed=x), whole(0)),
    "LoadedMinibatches.seed": (lambda x: gt.LoadedMinibatches(loader(), x), whole(0)),
    "Session.max_active": (lambda x: session(max_active=x), Kind([1], [], [2.5, "2", True, 0, -1])),
    "Session.seed": (lambda x: session(seed=x), whole(0, 2**63 - 1)),
    "fit.epochs": (lambda x: fit(epochs=x), whole(0)),
    "fit.keep_last": (lambda x: fit(keep_last=x, epochs=0), Kind([0], [1.5, "2", True], [-1])),
    "fit.checkpoint_every": (
        lambda x: fit(checkpoint_every=x),
        Kind([], [1.5, "2", True], [0, -1]),
    ),
    "fit.evaluate_every": (
        lambda x: fit(evaluate_every=x),
        Kind([], ["1", True], [0, -0.5, 1.5, math.nan]),
    ),
}
STREAMS: dict[str, tuple[Make, Kind]] = {
    "route.ways": (lambda x: gt.Graph().input("x").route(len, x), whole(1)),
    "flatmap.count": (
        lambda x: gt.Graph().input("x").flatmap("copy", count=x),
        Kind([1, "n", len], [1.5, True], [0, -1]),
    ),
    "group.size": (
        lambda x: gt.Graph().input("x").group("vertex", x),
        Kind([1, "n", len], [1.5, True], [0, -1]),
    ),
    "split.sizes": (lambda x: gt.Graph().input("x").split(2, x), whole(1)),
    "replay.times": (lambda x: gt.Graph().input("x").replay(times=x), whole(0)),
    "replay.buffer": (lambda x: gt.Graph().input("x").replay(buffer=x), whole(1)),
    "replay.max_age": (lambda x: gt.Graph().input("x").replay(max_age=x), whole(0)),
    "replay.seed": (lambda x: gt.Graph().input("x").replay(seed=x), whole(0)),
}
ROWS = PARTS | SHARING | RUNTIMES | TRAINING | STREAMS

OURS = {"Brought", "Evaluation", "Fit", "Flops", "Inside", "Letter", "Member", "Stream", "View"}
"""What the library makes, and a user reads."""

TORCHES = {"FusedAdagrad", "FusedAdam"}
"""Their arguments are checked by torch."""


def having(words: str) -> list[str]:
    """Rows that have such values."""
    return [name for name, (_, kind) in ROWS.items() if getattr(kind, words)]


@pytest.mark.parametrize("name", having("good"))
def test_a_number_that_fits_is_taken(name: str) -> None:
    make, kind = ROWS[name]
    for value in kind.good:
        make(value)


@pytest.mark.parametrize("name", having("no_number"))
def test_what_is_no_such_number_is_refused_by_name(name: str) -> None:
    make, kind = ROWS[name]
    for value in kind.no_number:
        with pytest.raises(TypeError, match=r"^\S.*: give ") as refused:
            make(value)
            pytest.fail(f"takes {value!r}")
        assert repr(value) in str(refused.value)


@pytest.mark.parametrize("name", having("out"))
def test_what_is_out_of_range_is_refused_by_name(name: str) -> None:
    make, kind = ROWS[name]
    for value in kind.out:
        with pytest.raises(ValueError, match=r"^\S.*([:;] give |; name hosts)") as refused:
            make(value)
            pytest.fail(f"takes {value!r}")
        assert str(value) in str(refused.value)


def test_every_number_of_a_public_name_has_a_row() -> None:
    """A new one is to be added to ``ROWS``, and to be checked."""
    found = set()
    for name, thing in vars(gt).items():
        if name in OURS | TORCHES or not inspect.isclass(thing) or inspect.isabstract(thing):
            continue
        if issubclass(thing, Exception) or name.startswith(("_", "Abstract")):
            continue
        for parameter in inspect.signature(thing).parameters.values():
            words = str(parameter.annotation).replace("'", "").split(" | ")
            if {"int", "float"} & set(words):
                found.add(f"{name}.{parameter.name}")
    assert len(found) > 90
    assert sorted(found - ROWS.keys()) == []
