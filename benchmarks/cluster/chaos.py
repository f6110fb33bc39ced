"""Training while workers, hosts and links fail at random, against the same without.

    PYTHONPATH=src python -m benchmarks.cluster.chaos neighbours --hosts --minutes 30 --faults 60
    PYTHONPATH=src python -m benchmarks.cluster.chaos pipeline --hosts --minutes 30 --faults 60

    neighbours   copies of the model, one a worker process, ``on_worker_death="go_on"``
    split        copies of a pipeline, each over two worker processes, the same
    pipeline     one model over all worker processes, ``on_worker_death="restore"`` and a state kept
                 every few seconds

Workers are processes of this host, or, with ``--hosts``, each on a host of its own in a namespace,
with spare hosts and one for this program. Undisturbed and disturbed runs alternate, so that other
work on the machine meets both. What the faults are is said in ``faults.py``. What is kept is the
rate of instances trained, of those that count: what is trained again counts once.

With ``--device-ms`` each map sleeps for a device's compute and is small, so that more workers than
cores do not wait for one another.

Nothing may be lost: every call of ``fit`` has trained the instances that it was given, letters add
up (the library raises if they do not), and after the end no process, socket file or file
descriptor is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import nn

import geartrain as gt
from benchmarks.cluster import faults
from benchmarks.cluster import hosts as namespaces
from benchmarks.cluster.faults import AbstractGround, Faults, ManyHosts, OneHost, addresses
from benchmarks.cluster.hosts import Hosts, Link
from benchmarks.cluster.pipelines import SYSCTL
from benchmarks.cluster.stages import Timed
from benchmarks.peers.figures import machine
from geartrain.engine.instrument import AbstractInstrument, EpochEnded, Joined, Restored
from geartrain.runtime.processes.server import ForkServer

Way: TypeAlias = Literal["neighbours", "split", "pipeline"]
GOALS: Final[dict[Way, float]] = {"neighbours": 0.95, "split": 0.95, "pipeline": 0.80}
ROWS, WIDTH = 64, 256
FLYING: Final = 2
"""Minibatches in flight of a copy on one worker, so that the next one is there."""
SMALL_ROWS, SMALL_WIDTH = 16, 32
"""Where devices are made of sleep."""
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
@dataclass(frozen=True)
class Work:
    """What is trained, and on what.

    Args:
        way: How the model is spread.
        workers: How many.
        seed: Of weights, order and faults.
        instances: Of an epoch.
        keep_s: Seconds between two states that a pipeline goes back to.
        device_ms: Milliseconds that devices sleep for a minibatch, all parts together; 0: none do.
        hosts: Each worker has a host, of such links; None: all are on this one.
        spare: Hosts more than workers.
    """

    way: Way
    workers: int = 4
    seed: int = 0
    instances: int = 400
    keep_s: float = KEEP_S
    device_ms: float = 0.0
    hosts: Link | None = None
    spare: int = 1

    @property
    def rows(self) -> int:
        """Of a minibatch."""
        return SMALL_ROWS if self.device_ms else ROWS

    @property
    def width(self) -> int:
        return SMALL_WIDTH if self.device_ms else WIDTH

    @property
    def span(self) -> int:
        """Workers of a copy."""
        return {"neighbours": 1, "split": 2, "pipeline": self.workers}[self.way]

    @property
    def maps(self) -> int:
        """Of the model, as many on each worker of a copy."""
        return max(6, 2 * self.span)


def model(work: Work) -> nn.Sequential:
    """Maps of a minibatch; parts of equal cost, wherever they are cut."""
    blocks: list[nn.Module] = []
    for k in range(work.maps):
        last = k == work.maps - 1
        blocks.append(nn.Linear(work.width, 10 if last else work.width))
        if work.device_ms:
            blocks.append(Timed(work.device_ms * 1e-3 / work.maps / work.rows))
        elif not last:
            blocks.append(nn.ReLU())
    return nn.Sequential(*blocks)


def minibatches(work: Work) -> list[gt.Instance]:
    """An epoch of them, each an instance."""
    drawn = torch.Generator().manual_seed(0)
    truth = torch.randn(work.width, 10, generator=drawn)
    x = torch.randn(work.instances, work.rows, work.width, generator=drawn)
    return [gt.minibatch(each, (each @ truth).argmax(1)) for each in x]


@final
class Bench:
    """A session of one way, with its workers and what may be struck of them.

    Args:
        work: What is trained, and on what.
    """

    def __init__(self, work: Work) -> None:
        torch.manual_seed(work.seed)
        self.work, self.data = work, minibatches(work)
        self._stack = ExitStack()
        self._hosts: Hosts | None = None
        self.runtime: gt.Processes | gt.Hosts
        self.ground: AbstractGround
        death = "restore" if work.way == "pipeline" else "go_on"
        if work.hosts is None:
            self.runtime = gt.Processes(
                work.workers, kernel_threads=1, on_worker_death=death, most_deaths=1_000_000
            )
            self.ground = OneHost(lambda: self.runtime.pids)
        else:
            self._hosts = self._stack.enter_context(
                Hosts(work.workers + work.spare + 1, work.hosts, sysctl=SYSCTL)
            )
            self._stack.enter_context(self._hosts[-1].inside())
            self.ground = ground = ManyHosts(self._hosts, lambda: self.runtime.pids)
            self._stack.callback(ground.close)
            self.runtime = gt.Hosts(
                [gt.Host(address, command) for address, command in addresses(self._hosts)],
                work.workers,
                kernel_threads=1,
                address=self._hosts[-1].address,
                on_worker_death=death,
                most_deaths=1_000_000,
            )
        sharing = None
        if work.way != "pipeline":
            copies = work.workers // work.span
            sharing = gt.Neighbours(copies=copies, exchange="weights", shards="pull")
        self.seen = Seen()
        pipe = gt.Pipeline(
            model(work),
            cuts=[2 * (k * work.maps // work.span) for k in range(1, work.span)],
            slack=max(0, FLYING - work.span),
        )
        settings = pipe.settings(work.span)
        if work.span == 1:  # a copy of the graph is where its worker is
            settings["schedule"] = gt.Schedule()
        self.session = gt.Session(
            pipe.graph,
            rules=pipe.rules(partial(torch.optim.SGD, lr=0.01), update_every=gt.Messages(1)),
            runtime=self.runtime,
            sharing=sharing,
            seed=work.seed,
            instruments=[self.seen],
            **settings,
        )
        self._keep = gt.Keep(seconds=work.keep_s) if work.way == "pipeline" else None
        self._epochs = 0

    def epoch(self, n: int | None = None) -> gt.Fit:
        """Train one more epoch."""
        self._epochs += 1
        return self.session.fit(self.data[:n], epochs=self._epochs, keep=self._keep)

    def run(self, seconds: float, faults: int, draw: random.Random) -> Run:
        """Train for so long, or an epoch longer."""
        self.seen.run = run = Run()
        began = time.monotonic()
        with Faults(self.ground, seconds, faults, draw) as struck:
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
        left = [f"process {pid}" for pid in pids if lives(pid)] + self.ground.left()
        if self._hosts is None:
            folder = ForkServer.of_this_process().folder
            left += [f"file {path.name}" for path in folder.iterdir()]
        self._stack.close()
        return left + [f"namespace {name}" for name in namespaces.left()]


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
    work: Work, seconds: float, faults: int, legs: int = 1, calm: float = 1.0
) -> dict[str, Any]:
    """Undisturbed and disturbed runs in turn.

    Args:
        work: What is trained, and on what.
        seconds: Of all disturbed runs together.
        faults: Of all of them together.
        legs: Into so many runs each is cut.
        calm: How long undisturbed runs are, in those of disturbed ones.

    Returns:
        What came of it, as JSON.
    """
    draw = random.Random(work.seed)
    bench = Bench(work)
    bench.epoch(10 * work.workers)  # workers, kernels and optimisers are there
    still: list[Run] = []
    rough: list[Run] = []
    files, memory = open_files(), resident_mib()
    for leg in range(legs):
        n = faults * (leg + 1) // legs - faults * leg // legs
        still.append(bench.run(calm * seconds / legs, 0, draw))
        rough.append(bench.run(seconds / legs, n, draw))
        _say(leg, still[-1], rough[-1])
    grown = {"open_files": open_files() - files, "resident_mib": resident_mib() - memory}
    left = bench.close()
    kept = [b.rate / a.rate for a, b in zip(still, rough, strict=True)]
    runs = [*still, *rough]
    return {
        **asdict(work),
        "seconds": seconds,
        "calm": calm,
        "kept": statistics.mean(kept),
        "kept_each": kept,
        "goal": GOALS[work.way],
        "faults": sum(sum(r.faults.values()) for r in rough),
        "lost": sum(r.expected - r.instances for r in runs),
        "left": left,
        "grown": grown,
        "undisturbed": [asdict(r) | {"rate": r.rate} for r in still],
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
    parser.add_argument("--calm", type=float, default=1.0, help="of undisturbed training, as above")
    parser.add_argument("--instances", type=int, default=400, help="of an epoch")
    parser.add_argument("--device-ms", type=float, default=0.0, help="slept, for a minibatch")
    parser.add_argument("--hosts", action="store_true", help="in namespaces, one for each worker")
    parser.add_argument("--spare", type=int, default=1, help="hosts more than workers")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="one way, between hosts")
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--tell", action="store_true", help="each fault, and what the library says")
    given = parser.parse_args()
    if given.tell:
        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger(faults.__name__).setLevel(logging.INFO)
    work = Work(
        way=given.way,
        workers=given.workers,
        seed=given.seed,
        instances=given.instances,
        keep_s=given.keep,
        device_ms=given.device_ms,
        hosts=Link(given.latency_ms * 1e-3, given.mbit * 1e6) if given.hosts else None,
        spare=given.spare,
    )
    found = chaos(work, 60 * given.minutes, given.faults, given.legs, given.calm)
    found["machine"] = machine()
    text = json.dumps(found, indent=1)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    from benchmarks.cluster import chaos as program

    program.main()  # of the module that workers import; what is of this one goes by value
