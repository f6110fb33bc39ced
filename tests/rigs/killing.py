"""Signals to workers in the middle of training."""

from __future__ import annotations

import os
import signal
import time

from geartrain.engine.instrument import AbstractInstrument, Updated
from geartrain.runtime.hosts.hosts import Hosts
from geartrain.runtime.hosts.on_ray import Ray


class Killer(AbstractInstrument):
    """Sends a signal to a worker at these steps of a part."""

    def __init__(self, runtime: Hosts | Ray, at: set[int], number: int = signal.SIGKILL) -> None:
        self.runtime, self.at, self.number, self.steps = runtime, at, number, 0
        self.sent_s = 0.0

    def on_updated(self, event: Updated) -> None:
        self.steps += 1
        if self.steps in self.at:
            pids = self.runtime.pids
            os.kill(pids[self.steps % len(pids)], self.number)
            self.sent_s = time.monotonic()
