"""Training while workers are killed and stopped at random, against the same without.

    PYTHONPATH=src python -m benchmarks.cluster.chaos neighbours --minutes 30 --faults 60
    PYTHONPATH=src python -m benchmarks.cluster.chaos pipeline --minutes 30 --faults 60

    neighbours   copies of the model, one a worker process, ``on_worker_death="go_on"``
    split        copies of a pipeline, each over two worker processes, the same
    pipeline     one model over all worker processes, ``on_worker_death="restore"`` and a state kept
                 every few seconds

Undisturbed and disturbed runs of equal length alternate, so that other work on the machine meets
both. A fault is a kill (SIGKILL), a stop that lasts until the library ends the worker (SIGSTOP), or
a pause (SIGSTOP, and SIGCONT after half a second to three). What is kept is the rate of instances
trained, of those that count: what is trained again counts once.

Nothing may be lost: every call of ``fit`` has trained the instances that it was given, letters add
up (the library raises if they do not), and after the end no process, socket file or file
descriptor is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import nn

import geartrain as gt
from benchmarks.peers.figures import machine
from geartrain.engine.instrument import AbstractInstrument, EpochEnded, Joined, Restored
from geartrain.runtime.processes.server import ForkServer

Way: TypeAlias = Literal["neighbours", "split", "pipeline"]
Fault: TypeAlias = Literal["kill", "stop", "pause"]
FAULTS: Final[tuple[Fault, ...]] = ("kill", "kill", "stop", "pause")
"""Drawn from, each as often as it stands here."""

GOALS: Final[dict[Way, float]] = {"neighbours": 0.95, "split": 0.95, "pipeline": 0.80}
LEFT_S: Final = 5.0  # at the end of a run without a fault, so that each has its effect
ROWS, WIDTH = 64, 256
KEEP_S: Final = 5.0


@final
@dataclass(slots=True)
class Run:
    """What came of one run.

    Args:
        seconds: By the clock, of all calls of ``fit``.
        instances: Trained.
        expected: That were to be.
        deaths, repeated: As ``Fit`` counts them.
        joined: Workers that took a dead one's place while others went on.
        faults: Of each kind, that were done.
        lost_s: Seconds of training that were gone back by.
        loss: Of the last epoch.
    """

    seconds: float = 0.0
    instances: int = 0
    expected: int = 0
    deaths: int = 0
    repeated: int = 0
    joined: int = 0
    lost_s: float = 0.0
    loss: float = float("nan")
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Instances a second."""
        return self.instances / self.seconds if self.seconds else 0.0


@final
class Seen(AbstractInstrument):
    """Counts who has died and come, into a run."""

    def __init__(self) -> None:
        self.run = Run()

    def on_restored(self, event: Restored) -> None:
        self.run.lost_s += event.seconds

    def on_joined(self, event: Joined) -> None:
        self.run.joined += 1

    def on_epoch_ended(self, event: EpochEnded) -> None:
        self.run.loss = event.loss


@final
class Faults:
    """Strikes worker processes at random moments, from a thread of its own.

    Args:
        pids: Of the workers now.
        seconds: Within which faults are done.
        n: How many.
        draw: Of moments, kinds and workers.
    """

    def __init__(
        self, pids: Callable[[], Sequence[int]], seconds: float, n: int, draw: random.Random
    ) -> None:
        self._pids, self._draw = pids, draw
        until = max(0.0, seconds - LEFT_S) if seconds > 3 * LEFT_S else 0.8 * seconds
        self._moments = sorted(draw.uniform(0.05 * until, until) for _ in range(n))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike, name="faults")
        self.done: Counter[str] = Counter()

    def __enter__(self) -> Faults:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _strike(self) -> None:
        began = time.monotonic()
        for moment in self._moments:
            if self._over.wait(max(0.0, began + moment - time.monotonic())):
                return
            while not (pids := self._pids()):
                if self._over.wait(0.01):
                    return
            self._do(self._draw.choice(FAULTS), self._draw.choice(list(pids)))

    def _do(self, fault: Fault, pid: int) -> None:
        with suppress(ProcessLookupError):  # it has just been ended
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            self.done[fault] += 1
            if fault == "pause":
                self._over.wait(self._draw.uniform(0.5, 3.0))
                os.kill(pid, signal.SIGCONT)


def model() -> gt.Graph:
    """Six maps of a minibatch; two or three parts of equal cost, wherever they are cut."""
    graph = gt.Graph(vertex=("label",))
    x = graph.input("x", shape=(WIDTH,))
    for k in range(6):
        width = 10 if k == 5 else WIDTH
        x = x.through(nn.Linear(WIDTH, width), name=f"map {k}")
        if k < 5:
            x = x.through(nn.ReLU(), name=f"relu {k}")
    x.loss(gt.cross_entropy, "label")
    return graph


def minibatches(n: int) -> list[gt.Instance]:
    """So many, each an instance."""
    drawn = torch.Generator().manual_seed(0)
    truth = torch.randn(WIDTH, 10, generator=drawn)
    found = []
    for k in range(n):
        x = torch.randn(ROWS, WIDTH, generator=drawn)
        found.append(gt.Instance({"x": x}, {"label": (x @ truth).argmax(1).numpy()}, key=k))
    return found


@final
class Bench:
    """A session of one way, with its workers.

    Args:
        way: How the model is spread.
        workers: Processes.
        seed: Of weights and order.
        instances: Of an epoch.
        keep_s: Seconds between two states that a pipeline goes back to.
    """

    def __init__(
        self, way: Way, workers: int, seed: int, instances: int, keep_s: float = KEEP_S
    ) -> None:
        torch.manual_seed(seed)
        self.way, self.data = way, minibatches(instances)
        self.runtime = gt.Processes(
            workers,
            kernel_threads=1,
            on_worker_death="restore" if way == "pipeline" else "go_on",
            most_deaths=1_000_000,
        )
        copies = workers if way == "neighbours" else workers // 2
        sharing = None
        if way != "pipeline":
            sharing = gt.Neighbours(copies=copies, exchange="weights", shards="pull")
        self.seen = Seen()
        span = workers if way == "pipeline" else workers // copies
        placed = {f"map {k}": k * span // 6 for k in range(6)} if span > 1 else {}
        self.session = gt.Session(
            model(),
            rules=gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=ROWS),
            runtime=self.runtime,
            sharing=sharing,
            schedule=gt.Schedule(placement=placed),
            max_active=4,
            seed=seed,
            instruments=[self.seen],
        )
        self._keep = gt.Keep(seconds=keep_s) if way == "pipeline" else None
        self._epochs = 0

    def epoch(self, n: int | None = None) -> gt.Fit:
        """Train one more epoch."""
        self._epochs += 1
        return self.session.fit(self.data[:n], epochs=self._epochs, keep=self._keep)

    def run(self, seconds: float, faults: int, draw: random.Random) -> Run:
        """Train for so long, or an epoch longer."""
        self.seen.run = run = Run()
        began = time.monotonic()
        with Faults(lambda: self.runtime.pids, seconds, faults, draw) as struck:
            while time.monotonic() - began < seconds:
                fit = self.epoch()
                run.instances += fit.instances
                run.expected += len(self.data)
                run.deaths += fit.deaths
                run.repeated += fit.repeated
        run.seconds = time.monotonic() - began
        run.faults = dict(struck.done)
        return run

    def close(self) -> list[str]:
        """End the workers; what is left of them."""
        pids = self.runtime.pids
        self.runtime.close()
        server = ForkServer.of_this_process()
        left = [f"process {pid}" for pid in pids if lives(pid)]
        return left + [f"file {path.name}" for path in server.folder.iterdir()]


def lives(pid: int) -> bool:
    """Whether it is a process that has not ended, be it that nobody has asked how."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return told.rpartition(")")[2].split()[0] not in ("Z", "X")


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_mib() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def chaos(
    way: Way,
    workers: int,
    seconds: float,
    faults: int,
    seed: int = 0,
    legs: int = 1,
    instances: int = 400,
    keep_s: float = KEEP_S,
) -> dict[str, Any]:
    """Undisturbed and disturbed runs in turn.

    Args:
        way, workers: As for ``Bench``.
        seconds: Of all disturbed runs together.
        faults: Of all of them together.
        seed: Of weights, order and faults.
        legs: Into so many runs each is cut.
        instances, keep_s: As for ``Bench``.

    Returns:
        What came of it, as JSON.
    """
    draw = random.Random(seed)
    bench = Bench(way, workers, seed, instances, keep_s)
    bench.epoch()  # workers, kernels and optimisers are there
    calm: list[Run] = []
    rough: list[Run] = []
    files, memory = open_files(), resident_mib()
    for leg in range(legs):
        n = faults * (leg + 1) // legs - faults * leg // legs
        calm.append(bench.run(seconds / legs, 0, draw))
        rough.append(bench.run(seconds / legs, n, draw))
        _say(leg, calm[-1], rough[-1])
    grown = {"open_files": open_files() - files, "resident_mib": resident_mib() - memory}
    left = bench.close()
    kept = [b.rate / a.rate for a, b in zip(calm, rough, strict=True)]
    runs = [*calm, *rough]
    return {
        "way": way,
        "workers": workers,
        "seconds": seconds,
        "keep_s": keep_s,
        "kept": statistics.mean(kept),
        "kept_each": kept,
        "goal": GOALS[way],
        "faults": sum(sum(r.faults.values()) for r in rough),
        "lost": sum(r.expected - r.instances for r in runs),
        "left": left,
        "grown": grown,
        "undisturbed": [asdict(r) | {"rate": r.rate} for r in calm],
        "disturbed": [asdict(r) | {"rate": r.rate} for r in rough],
    }


def _say(leg: int, calm: Run, rough: Run) -> None:
    print(
        f"leg {leg}: {calm.rate:.1f} instances/s undisturbed, {rough.rate:.1f} with "
        f"{sum(rough.faults.values())} faults {rough.faults}: kept {rough.rate / calm.rate:.1%}; "
        f"{rough.deaths} deaths, {rough.repeated} instances again, {rough.joined} newcomers",
        flush=True,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("way", choices=[*GOALS])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0, help="of disturbed training")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--legs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=float, default=KEEP_S, help="seconds; of a pipeline")
    parser.add_argument("--json", type=Path, default=None, help="where the result is written")
    given = parser.parse_args()
    found = chaos(
        *(given.way, given.workers, 60 * given.minutes, given.faults, given.seed, given.legs),
        keep_s=given.keep,
    )
    found["machine"] = machine()
    text = json.dumps(found, indent=1)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
