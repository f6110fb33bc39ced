"""One training by one way, and the line that is kept of it.

Trial ─► probe ─► Simulated with the costs that were counted ─► line of results/RECIPE.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, final

from benchmarks.local.methods import WAYS
from benchmarks.local.probe import Bill, Probe, probe, session_of
from geartrain.engine.engine import Engine
from geartrain.engine.instrument import AbstractInstrument, EpochEnded
from geartrain.errors import GeartrainError
from geartrain.recipes.recipe import Value
from geartrain.runtime.base import AbstractRuntime, Feeder, Watch
from geartrain.runtime.simulated import Simulated

Line = dict[str, Any]

_DIGITS: Final = 6


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all trials of a recipe have in common.

    Args:
        recipe: Its name.
        epochs: Of training.
        evaluations: In an epoch.
        valid: Minibatches to validate on.
        options: Of the recipe.
    """

    recipe: str
    epochs: int
    evaluations: int
    valid: int
    options: Mapping[str, Value]


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """A way and a seed."""

    way: str
    seed: int


TERMS: Final = {
    "cifar": Terms(
        recipe="cifar",
        epochs=2,
        evaluations=4,
        valid=32,
        options={"width": 16, "blocks": 4, "batch": 25, "train_size": 4000},
    ),
    "charlm": Terms(
        recipe="charlm",
        epochs=1,
        evaluations=8,
        valid=32,
        options={"dim": 64, "blocks": 4, "length": 64, "batch": 8, "train_size": 3200},
    ),
}


def key_of(line: Line) -> tuple[Any, ...]:
    """Equal for trials that were asked for the same."""
    return line["way"], line["seed"], repr(sorted(line["terms"].items()))


def asked(trial: Trial, terms: Terms) -> Line:
    """The first part of a line."""
    return {**asdict(trial), "terms": {**asdict(terms), "options": dict(terms.options)}}


def try_once(trial: Trial, terms: Terms) -> Line:
    """Probe and train; a training that fails is a line too."""
    try:
        return {**asked(trial, terms), "outcome": "done", **_train(trial, terms)}
    except (GeartrainError, ValueError) as error:
        return {**asked(trial, terms), "outcome": "failed", "reason": str(error).splitlines()[0]}


def _train(trial: Trial, terms: Terms) -> Line:
    way, costs = WAYS[trial.way], probed(trial.way, terms)
    curve, bill = _Curve(), Bill(costs.firings)
    session, task = session_of(
        way,
        terms.recipe,
        terms.options,
        bill,
        seed=trial.seed,
        epochs=terms.epochs,
        wrap=curve.timed,
        instruments=[curve],
    )
    train = task.load("train")
    session.fit(
        train,
        epochs=terms.epochs,
        valid=list(task.load("valid"))[: terms.valid],
        evaluate_every=1 / terms.evaluations,
    )
    return {
        "minibatches": terms.epochs * len(train),
        "curve": curve.points,
        "staleness": curve.staleness,
        "forward": costs.forward,
        "backward": costs.backward,
        "spared": costs.spared,
        "memory": list(costs.memory),
        "whole": costs.whole,
        "sent": [costs.sent_forward, costs.sent_backward],
    }


def probed(way: str, terms: Terms) -> Probe:
    """The way's probe; the same again in this process."""
    return _probed(way, terms.recipe, tuple(sorted(terms.options.items())))


@cache
def _probed(way: str, recipe: str, options: tuple[tuple[str, Value], ...]) -> Probe:
    return probe(WAYS[way], recipe, dict(options))


@final
class _Curve(AbstractInstrument):
    """Validation against minibatches, virtual seconds, seconds and processor seconds."""

    def __init__(self) -> None:
        self.points: list[Line] = []
        self.staleness: dict[str, float] = {}
        self._clock = _Clock()
        self._trained, self._virtual = 0, 0.0

    def timed(self, runtime: Simulated) -> AbstractRuntime:
        return _Timed(runtime, self._clock)

    def on_epoch_ended(self, event: EpochEnded) -> None:
        self._trained += event.instances
        self._virtual += event.seconds
        self.points.append(
            {
                "minibatches": self._trained,
                "virtual_s": _rounded(self._virtual),
                "wall_s": _rounded(self._clock.wall_s),
                "cpu_s": _rounded(self._clock.cpu_s),
                **{name: _rounded(value) for name, value in event.valid.items()},
            }
        )
        self.staleness = {n: _rounded(s.mean) for n, s in event.staleness.items()}


@final
@dataclass(slots=True)
class _Clock:
    wall_s: float = 0.0
    cpu_s: float = 0.0


@final
class _Timed(AbstractRuntime):
    """The simulator, and what its training takes here."""

    virtual = True

    def __init__(self, inner: Simulated, clock: _Clock) -> None:
        self._inner, self._clock = inner, clock
        self.name, self.workers = inner.name, inner.workers

    def run(self, engine: Engine, feeder: Feeder, watch: Watch) -> float:
        wall, cpu = time.perf_counter(), time.process_time()
        seconds = self._inner.run(engine, feeder, watch)
        if engine.controller.training:
            self._clock.wall_s += time.perf_counter() - wall
            self._clock.cpu_s += time.process_time() - cpu
        return seconds


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
