"""A small run, told as events: three epochs of two parts on two workers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest

from geartrain.engine.instrument import (
    AbstractInstrument,
    EpochEnded,
    Exchanged,
    Fired,
    PartStaleness,
    Progress,
    Restored,
    RunEnded,
    RunStarted,
    Updated,
    Worked,
)

Event = (
    RunStarted | Fired | Updated | Progress | EpochEnded | Exchanged | Restored | Worked | RunEnded
)
VALID = (0.70, 0.82, 0.79)


def progress(
    finished: int = 50, *, epoch: int = 1, mode: str = "train", **other: object
) -> Progress:
    fields: dict[str, object] = {
        "mode": mode,
        "epoch": epoch,
        "epochs": 3,
        "finished": finished,
        "total": 100,
        "active": 8,
        "loss": 0.8123,
        "metrics": {"accuracy": 0.807},
        "instances_per_second": 1712.3,
        "staleness": 1.25,
        "time_s": epoch - 1 + finished / 100,
    }
    return Progress(**(fields | other))  # type: ignore[arg-type]


def epoch_ended(epoch: int, **other: object) -> EpochEnded:
    fields: dict[str, object] = {
        "epoch": epoch,
        "epochs": 3,
        "instances": 100,
        "seconds": 0.5,
        "loss": 1.0 / epoch,
        "metrics": {"accuracy": 0.6 + 0.1 * epoch},
        "valid": {"accuracy": VALID[epoch - 1], "loss": 0.5 + 0.1 * epoch},
        "staleness": {
            "leaf": PartStaleness(0.5, 1, (10, 10)),
            "branch": PartStaleness(1.5 + (epoch == 2), 4, (8, 4, 2, 1, 5)),
        },
        "updates": {"leaf": 40, "branch": 1200},
        "time_s": float(epoch),
    }
    return EpochEnded(**(fields | other))  # type: ignore[arg-type]


def run_events() -> Iterator[Event]:
    yield RunStarted("threads", 2, 8, 3, {"leaf": 0, "branch": 1}, "leaf <b>", "graph LR; a-->b")
    for epoch in (1, 2, 3):
        start = epoch - 1.0
        yield progress(0, epoch=epoch, loss=math.nan, metrics={})
        for i in range(10):
            at = start + i * 0.04
            yield Fired(0, "leaf", "leaf", "forward", 3 + i, at, at + 0.02)
            yield Fired(1, 'branch "b"', "branch", "backward", 16, at + 0.01, at + 0.03)
            yield Updated(1, "branch", 10 * epoch + i, 16, at + 0.03)
        yield progress(100, epoch=epoch)
        for i in range(5):
            at = start + 0.5 + i * 0.1
            yield Fired(0, "leaf", "leaf", "forward", 100, at, at + 0.08)
        yield epoch_ended(epoch)
    yield RunEnded("done", 300, 1.5, time_s=3.0)


def tell(instrument: AbstractInstrument, *events: Event) -> None:
    for event in events:
        heard = re.sub("(?<!^)([A-Z])", r"_\1", type(event).__name__).lower()
        getattr(instrument, f"on_{heard}")(event)


class Told:
    """The run and its pieces, for tests that cannot import this file."""

    run_events = staticmethod(run_events)
    progress = staticmethod(progress)
    epoch_ended = staticmethod(epoch_ended)
    tell = staticmethod(tell)


@pytest.fixture
def told() -> type[Told]:
    return Told


@pytest.fixture
def clock() -> Callable[[], float]:
    """A clock that stands still unless ``clock.now`` is set."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    return Clock()
