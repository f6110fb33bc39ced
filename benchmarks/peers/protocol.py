"""How a benchmark and a system talk: a line of JSON to its stdin, a line of JSON from its stdout.

    main ─ {"task": ..., "system": {...}, "repeats": 1} ─► a process of its own ─► warm-up, passes
         ◄──── {"instances": 4000, "seconds": [1.31], "peak_mib": 512.0, ...} ────┘

Every system has a process for every round, so memory, thread pools and allocators of one cannot
help or harm another, and its interpreter may be another one. This file wants nothing but Python.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, final

Request: TypeAlias = dict[str, Any]


@final
@dataclass(frozen=True)
class Training:
    """A system that is ready to train.

    Args:
        instances: In a pass.
        passes: Trains a pass whenever it is asked for the next one, and gives its seconds; the
            first one warms up.
        versions: Of the packages that matter, by name.
        updates: Optimiser steps so far by part, warm-up included; None: it is not known.
    """

    instances: int
    passes: Iterator[float]
    versions: dict[str, str] = field(default_factory=dict)
    updates: Callable[[], dict[str, int]] | None = None


@final
@dataclass(frozen=True)
class Checked:
    """The loss of the first trees at weights that everybody sets alike: do systems agree?"""

    loss: float


def serve(answer: Callable[[Request], Training | Checked]) -> None:
    """Answer the one request of this process.

    What libraries print goes to stderr, as stdout is for the reply alone.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request: Request = json.loads(sys.stdin.readline())
    print(json.dumps(_reply(answer(request), request)), file=replies, flush=True)


def _reply(found: Training | Checked, request: Request) -> dict[str, Any]:
    if isinstance(found, Checked):
        return {"loss": found.loss}
    next(found.passes)
    forget_peak()
    neighbours = Neighbours()
    before = {} if found.updates is None else found.updates()
    seconds = [next(found.passes) for _ in range(request["repeats"])]
    after = {} if found.updates is None else found.updates()
    return {
        "instances": found.instances,
        "seconds": seconds,
        "updates": {part: (n - before[part]) / len(seconds) for part, n in after.items()},
        "peak_mib": peak_mib(),
        "others_cores": neighbours.cores(),
        "versions": found.versions,
    }


@final
class Neighbours:
    """How many cores all other programs have used since this was made, on average.

    A system with several threads that wait for one another loses far more to them than their share.
    """

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.monotonic(), _busy_s(), time.process_time()

    def cores(self) -> float | None:
        """None where the system does not tell."""
        busy, wall = _busy_s(), time.monotonic() - self._wall
        if busy is None or self._busy is None or not wall:
            return None
        others = busy - self._busy - (time.process_time() - self._own)
        return round(max(0.0, others / wall), 2)


def _busy_s() -> float | None:
    """Seconds that all cores together have been at work since the machine started."""
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, _, _, *interrupts = map(int, words[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def forget_peak() -> None:
    """Let the peak of resident memory begin anew, where the system can do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak is that of the whole process then


def peak_mib() -> float:
    """The most memory that was resident, in MiB, since ``forget_peak``."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024
