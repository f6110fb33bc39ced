"""A run's scalars for TensorBoard.

train/loss, train/<metric>             a point an epoch
valid/<metric>
staleness/<part>/mean, .../max
updates/<part>
speed/instances_per_second, speed/epoch_seconds
fractions/...                          the same within an epoch, by thousandths of epochs
running/<mode>/...                     within a pass, by instances, a few points a second
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, final

from geartrain.engine.instrument import (
    AbstractInstrument,
    EpochEnded,
    Progress,
    RunEnded,
    RunStarted,
)
from geartrain.errors import GeartrainError
from geartrain.observe.sidefile import give_up

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@final
class TensorBoard(AbstractInstrument):
    """Write scalars per epoch and progress; look at them with ``tensorboard --logdir FOLDER``.

    Points of an epoch stand at the epoch's number, those of evaluations within an epoch at
    thousandths of epochs, as a step is a whole number; those within a pass at the instances since
    the first epoch. What is not finite is left out. Where nothing can be written any more, that is
    said once, and the run goes on without it.

    Args:
        folder: Where TensorBoard's event files go; made if need be.

    Raises:
        GeartrainError: The package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = folder
        self._writer: SummaryWriter = _writer_class(folder)(str(folder))
        self._add: Callable[[str, float, int], None] = self._writer.add_scalar
        self._writes = True
        self._before = 0  # training instances in the epochs that have ended

    def on_run_started(self, event: RunStarted) -> None:
        """Count instances from zero."""
        self._before = 0

    def on_progress(self, event: Progress) -> None:
        """Loss, metrics, rate, instances in flight and staleness within the pass."""
        known = event.total is not None and event.epoch > 0
        before = (event.epoch - 1) * (event.total or 0) if known else self._before
        at = before + event.finished
        group = f"running/{event.mode}"
        self._scalar(f"{group}/loss", event.loss, at)
        self._scalar(f"{group}/instances_per_second", event.instances_per_second, at)
        self._scalar(f"{group}/in_flight", event.active, at)
        for name, value in event.metrics.items():
            self._scalar(f"{group}/{name}", value, at)
        if event.mode == "train":
            self._scalar(f"{group}/staleness", event.staleness, at)

    def on_epoch_ended(self, event: EpochEnded) -> None:
        """Everything that is known of the epoch, or of the part of one up to an evaluation."""
        self._before += event.instances
        within = event.epoch != round(event.epoch)
        at = round(1000 * event.epoch) if within else round(event.epoch)
        group = "fractions/" if within else ""
        for tag, value in _scalars(event).items():
            self._scalar(group + tag, value, at)
        self._try(self._writer.flush)

    def on_run_ended(self, event: RunEnded) -> None:
        """Close the file; a later run opens another one in the same folder."""
        self._try(self._writer.close)

    def _scalar(self, tag: str, value: float, at: int) -> None:
        if math.isfinite(value):
            self._try(lambda: self._add(tag, value, at))

    def _try(self, write: Callable[[], object]) -> None:
        if self._writes:
            try:
                write()
            except OSError as error:
                self._writes = False
                give_up(self._folder, error)


def _scalars(event: EpochEnded) -> dict[str, float]:
    found = {"train/loss": event.loss, "speed/epoch_seconds": event.seconds}
    found |= {f"train/{name}": value for name, value in event.metrics.items()}
    found |= {f"valid/{name}": value for name, value in event.valid.items()}
    for part, stale in event.staleness.items():
        found |= {f"staleness/{part}/mean": stale.mean, f"staleness/{part}/max": stale.max}
    found |= {f"updates/{part}": steps for part, steps in event.updates.items()}
    if event.seconds > 0:
        found["speed/instances_per_second"] = event.instances / event.seconds
    return found


def _writer_class(folder: Path | str) -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise GeartrainError(
            f"TensorBoard({str(folder)!r}): the package 'tensorboard' cannot be imported "
            f"({error}). Install it: pip install 'geartrain[tensorboard]'"
        ) from error
    return SummaryWriter
