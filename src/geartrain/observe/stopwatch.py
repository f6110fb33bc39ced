"""What firings take on this machine, as costs for the simulator.

    a run in threads, one worker ─► Stopwatch ─► Costs(nodes={...}) ─► Simulated(64, costs=...)

Firings are timed by node and direction; optimiser steps are part of the backward that brings them.
What lies between firings (admission, delivery, the controller) is spread over all of them, so that
the simulated run of one worker takes what the measured one did.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import final

from geartrain.engine.instrument import AbstractInstrument, EpochEnded, Fired, RunStarted
from geartrain.runtime.costs import Costs


@final
class Stopwatch(AbstractInstrument):
    """Times firings of a run with one worker, from the second epoch (or evaluation) on.

    The first warms caches up and is measured only where it is the only one. Fit without validation
    data, as the firings of an evaluation are not told apart.
    """

    wants_firings = True

    def __init__(self) -> None:
        self._spans: dict[str, list[float]] = {}  # name -> seconds, firings, rows
        self._seconds = 0.0
        self._entries = 0
        self._first: dict[str, list[float]] = {}
        self._first_s = 0.0

    def on_run_started(self, event: RunStarted) -> None:
        """Raises:
        ValueError: There are several workers: their firings overlap.
        """
        if event.workers != 1:
            raise ValueError(
                f"a Stopwatch times runs with one worker, not {event.workers}: firings of several "
                "disturb one another; measure with Threads(1)"
            )

    def on_fired(self, event: Fired) -> None:
        """Add it up."""
        name = re.sub(r"#\d+", "", event.node)
        if event.direction == "backward":
            name += " backward"
        span = self._spans.setdefault(name, [0.0, 0.0, 0.0])
        span[0] += event.end_s - event.start_s
        span[1] += 1
        span[2] += event.rows

    def on_epoch_ended(self, event: EpochEnded) -> None:
        """Forget the first epoch when the second comes."""
        if self._entries == 0:
            self._first = {name: list(span) for name, span in self._spans.items()}
            self._first_s = event.seconds
        self._entries += 1
        self._seconds += event.seconds

    def costs(self, links: Costs | None = None) -> Costs:
        """What was measured.

        Args:
            links: Latency and bandwidth are taken from it.

        Raises:
            ValueError: Nothing was measured.
        """
        if not self._entries:
            raise ValueError("a Stopwatch measures from an epoch of training on; fit first")
        spans, seconds = self._spans, self._seconds
        if self._entries > 1:
            spans = {
                name: [a - b for a, b in zip(span, self._first.get(name, [0.0] * 3), strict=True)]
                for name, span in spans.items()
            }
            seconds -= self._first_s
        busy = sum(span[0] for span in spans.values())
        scale = seconds / busy if busy > 0 else 1.0
        nodes = {name: (0.0, scale * span[0] / span[2]) for name, span in spans.items() if span[2]}
        return replace(links or Costs(), nodes=nodes, backward=0.0)
