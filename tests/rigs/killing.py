"""Signals to workers in the middle of training."""

from __future__ import annotations

import os
import signal
import time

from geartrain.engine.instrument import AbstractInstrument, Updated
from geartrain.runtime.hosts.hosts import Hosts
from geartrain.runtime.hosts.on_ray import Ray


class Killer(AbstractInstrument):
    """Sends a signal to a worker at these steps of a part.

    Args:
        runtime: Whose worker it is.
        at: Numbers of steps, from 1; the worker follows from the number.
        number: Of the signal.
        heard: Whether it waits until that worker has told of a step of its own.
    """

    def __init__(
        self,
        runtime: Hosts | Ray,
        at: set[int],
        number: int = signal.SIGKILL,
        *,
        heard: bool = False,
    ) -> None:
        self.runtime, self.at, self.number, self.heard = runtime, at, number, heard
        self.steps, self.sent_s = 0, 0.0
        self._due: int | None = None

    def on_updated(self, event: Updated) -> None:
        self.steps += 1
        pids = self.runtime.pids
        if self.steps in self.at:
            self._due = self.steps % len(pids)
        if self._due is not None and (event.worker == self._due or not self.heard):
            os.kill(pids[self._due], self.number)
            self._due = None
            self.sent_s = time.monotonic()
