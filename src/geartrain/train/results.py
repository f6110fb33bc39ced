"""What training aims at and what comes of it: targets, results, the place in the data; as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, final

from geartrain.bounds import MOST_ACTIVE, MOST_WORKERS, require_number
from geartrain.engine.advice import Advice, Way
from geartrain.engine.instrument import (
    EpochEnded,
    PartStaleness,
)
from geartrain.errors import CheckpointError
from geartrain.kinds import require_kind, require_truth
from geartrain.schema import Count, Mismatch, NotNegative, Range, read


@final
@dataclass(frozen=True, slots=True)
class Target:
    """A value of a validation metric at which training stops.

    Args:
        metric: Its name, or ``loss``.
        value: The value.
        at_least: True: ``metric >= value``; False: ``metric <= value``.

    Raises:
        ValueError: The value is NaN or infinite.
        TypeError: It is no number.
    """

    metric: str
    value: float
    at_least: bool = True

    def __post_init__(self) -> None:
        require_kind("Target", str, "a metric's name, or 'loss'", metric=self.metric)
        require_truth("Target", at_least=self.at_least)
        what = f"Target({self.metric!r}, {self.value!r})"
        require_number(what, self.value, "the metric's value to stop at, such as 0.9")

    @staticmethod
    def parse(text: str) -> Target:
        """``all>=0.81`` or ``loss<=0.5``.

        Raises:
            ValueError: It is neither.
        """
        found = re.fullmatch(r"\s*(\w+)\s*(>=|<=)\s*([-+.\deE]+)\s*", text)
        try:
            value = math.nan if found is None else float(found[3])
        except ValueError:
            value = math.nan
        if found is None or not math.isfinite(value):
            raise ValueError(f"target {text!r:.80}: write METRIC>=VALUE or METRIC<=VALUE")
        return Target(found[1], value, found[2] == ">=")

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics are there.

        Raises:
            ValueError: There is no such metric.
        """
        if self.metric not in metrics:
            raise ValueError(f"target '{self.metric}': there is {sorted(metrics)}")
        value = metrics[self.metric]
        return value >= self.value if self.at_least else value <= self.value

    def better(self, a: float, b: float) -> bool:
        """Whether a is nearer to the target than b; anything is better than NaN."""
        if math.isnan(b):
            return not math.isnan(a)
        return a > b if self.at_least else a < b

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.at_least else '<='}{self.value:g}"


@final
@dataclass(frozen=True, slots=True)
class Reached:
    """The target, when it was reached; ``epochs`` is a fraction where that was within one."""

    metric: str
    value: float
    seconds: float
    epochs: float


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """A pass without training.

    Args:
        metrics: Means over the rows that have a loss; ``loss`` is among them.
        instances: How many.
        seconds: By the runtime's clock.
    """

    metrics: Mapping[str, float]
    instances: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """What ``fit`` did.

    Args:
        history: One entry an epoch, or more with ``evaluate_every``, each of what was trained since
            the one before it; those before a resumed checkpoint included.
        reached: The target, or None.
        instances: Trained in this call.
        train_seconds: In this call, without validation.
        skipped: Instances that were refused, with ``on_bad="skip"``.
        staleness: Of the last entry, by part.
        deaths: Of worker processes that this call went on after (``on_worker_death="restore"``).
        repeated: Instances that were trained again for it. They count once in ``instances``; the
            seconds of both times are in ``train_seconds``.
        unsaved: Checkpoints that were not written, as there was no room for them.
        is_saved: Whether the last one was, or none was asked for.
    """

    history: Sequence[EpochEnded]
    reached: Reached | None
    instances: int
    train_seconds: float
    skipped: int
    staleness: Mapping[str, PartStaleness] = field(default_factory=dict)
    deaths: int = 0
    repeated: int = 0
    unsaved: int = 0
    is_saved: bool = True

    @property
    def valid(self) -> Mapping[str, float]:
        """Metrics of the last validation."""
        return self.history[-1].valid if self.history else {}


@final
@dataclass(slots=True)
class Position:
    """Where in the training data a session stands; sums are since the history's last entry."""

    epoch: int = 1
    taken: int = 0
    entered: int = 0  # instances of this epoch that are in the history
    trained: int = 0
    epoch_seconds: float = 0.0
    train_seconds: float = 0.0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)
    history: list[EpochEnded] = field(default_factory=list)
    best: float | None = None
    best_of: str | None = None
    in_flight: int | None = None  # found by ``InFlight``
    plan: Advice | None = None  # found by ``Auto``


def staleness_of(histogram: Sequence[int]) -> PartStaleness:
    """Mean and maximum of a histogram of ages."""
    rows = sum(histogram)
    mean = sum(age * n for age, n in enumerate(histogram)) / rows if rows else 0.0
    return PartStaleness(mean, max(len(histogram) - 1, 0), tuple(histogram))


def epoch_to_json(event: EpochEnded) -> dict[str, Any]:
    """The event as JSON."""
    return {
        "epoch": event.epoch,
        "epochs": event.epochs,
        "instances": event.instances,
        "seconds": event.seconds,
        "loss": event.loss,
        "metrics": dict(event.metrics),
        "valid": dict(event.valid),
        "staleness": {name: list(p.histogram) for name, p in event.staleness.items()},
        "updates": dict(event.updates),
        "time_s": event.time_s,
    }


@final
@dataclass(frozen=True, slots=True)
class StoredEpoch:
    """An ``EpochEnded`` as JSON has it: of staleness the histograms alone."""

    epoch: NotNegative
    epochs: Count
    instances: Count
    seconds: NotNegative
    loss: float
    metrics: Mapping[str, float]
    valid: Mapping[str, float]
    staleness: Mapping[str, Sequence[Count]]
    updates: Mapping[str, Count]
    time_s: NotNegative


@final
@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A ``Advice`` as JSON has it."""

    runtime: Literal["threads", "processes"]
    workers: Annotated[int, Range(1, MOST_WORKERS)]
    kernel_threads: Annotated[int, Range(1, MOST_WORKERS)]
    way: Way
    part: str


def plan_to_json(plan: Advice | None) -> dict[str, Any] | None:
    """For a checkpoint."""
    names = [f.name for f in fields(StoredPlan)]
    return None if plan is None else {name: getattr(plan, name) for name in names}


@final
@dataclass(frozen=True, slots=True)
class StoredPosition:
    """A ``Position`` as JSON has it."""

    epoch: Annotated[int, Range(1)]
    taken: Count
    entered: Count
    trained: Count
    epoch_seconds: NotNegative
    train_seconds: NotNegative
    sums: Mapping[str, tuple[float, NotNegative]]
    updates: Mapping[str, Count]
    history: Sequence[StoredEpoch]
    best: float | None
    best_of: str | None
    in_flight: Annotated[int, Range(1, MOST_ACTIVE)] | None
    plan: StoredPlan | None

    def __post_init__(self) -> None:
        if self.entered > self.taken:
            raise Mismatch(f"{self.entered} instances are in the history, of {self.taken} taken")
        taken = sum(e.instances for e in self.history) + self.taken - self.entered
        if self.trained > taken:
            raise Mismatch(f"{self.trained} instances were trained, of {taken} taken")
        last = self.history[-1].epoch if self.history else 0.0
        if not self.epoch - 1 <= last < self.epoch:
            raise Mismatch(f"the history ends with epoch {last:g}, the epoch is {self.epoch}")


def epoch_from_json(document: Any) -> EpochEnded:
    """What ``epoch_to_json`` made of it.

    Raises:
        Mismatch: It is something else.
    """
    return _epoch(read(StoredEpoch, document, "epoch"))


def _epoch(stored: StoredEpoch) -> EpochEnded:
    given = {f.name: getattr(stored, f.name) for f in fields(StoredEpoch)}
    staleness = {name: staleness_of(h) for name, h in stored.staleness.items()}
    return EpochEnded(**{**given, "staleness": staleness})


def position_from_json(at: Any, path: Path | str) -> Position:
    """What a session wrote.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        if isinstance(at, Mapping):
            at = {"plan": None, **at}  # from before there was one
        stored = read(StoredPosition, at, "position")
    except Mismatch as error:
        raise CheckpointError(
            f"{path}: its position in the data is damaged ({error}); use another checkpoint of the "
            "run, or weights_only=True"
        ) from error
    given = {f.name: getattr(stored, f.name) for f in fields(StoredPosition)}
    plan = None if stored.plan is None else Advice(**asdict(stored.plan))
    history = [_epoch(each) for each in stored.history]
    return Position(**{**given, "history": history, "plan": plan})
