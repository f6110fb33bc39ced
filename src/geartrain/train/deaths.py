"""Going on after the death of a worker process: from which state, how often, what is repeated.

evaluation, prediction   nothing has changed by it: it is done again
training                 back to the last checkpoint of the call (``restart``); what came after
                         it is repeated
copies of the model      the others go on; what was in flight in those that are gone is repeated
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, final

from geartrain.engine.instrument import AbstractInstrument, Restored
from geartrain.errors import WorkerDiedError
from geartrain.train.observer import tell

log = logging.getLogger("geartrain.train")

COPIES: Final = "copies"
"""Where training goes on from that goes back nowhere."""

_REMEDY: Final = (
    "find out what ends them (memory, a module that crashes), or allow more: "
    "the runtime's most_deaths=...; the weights are those of the last steps: load a "
    "checkpoint to go back"
)


@final
class Deaths:
    """Deaths of worker processes during one call, and what was repeated after them.

    Args:
        most: After so many a call goes on; 0: after none.

    Attributes:
        repeated: Instances that had been trained, and were trained again.
        seconds: Of training that was lost.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._told: list[str] = []
        self._depth = 0
        self.repeated = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._told)

    @contextmanager
    def of_one_call(self) -> Iterator[None]:
        """Count from nothing, unless this is a call inside of another one."""
        if not self._depth:
            self._told, self.repeated, self.seconds = [], 0, 0.0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def count(self, death: WorkerDiedError) -> None:
        """Count one that the call is to go on after.

        Raises:
            WorkerDiedError: The call is not to: this one, or the story of all if they are too many.
        """
        if not self.most:
            raise death
        if len(self) == self.most:
            told = [*self._told, death.how]
            story = "; ".join(f"{k}: {how}" for k, how in enumerate(told, start=1))
            raise WorkerDiedError(
                f"worker processes have died {len(told)} times in this call, and "
                f"most_deaths={self.most}: {story}. Now {_REMEDY}",
                worker=death.worker,
            ) from death
        self._told.append(death.how)


def tell_restored(instruments: Sequence[AbstractInstrument], event: Restored) -> None:
    """Say to log and instruments that a call goes on after a death."""
    what = "it is begun again"
    if event.source == COPIES:
        what = f"the other copies go on; {event.unfinished:,} instances in flight are fed again"
    elif event.mode == "train":
        what = (
            f"training goes on from {event.source}, {event.taken:,} instances into epoch "
            f"{event.epoch}: {event.repeated:,} that were trained since are trained again, and "
            f"{event.unfinished:,} that were in flight"
        )
    log.warning(
        "%s; death %d of at most %d in this call; in %s: %s",
        *(event.message, event.deaths, event.most, event.mode, what),
    )
    tell(instruments, "on_restored", event)
