"""Whether memory stays as it is over many instances: resident size of program and workers.

    python -m benchmarks.processes.memory --instances 500000

Lists, all weights shared by two worker processes, in passes over the same data. A second is told
beside torch's own import, which is most of what a worker has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import geartrain as gt
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting

FIFTHS = 5
IMPORT = "import os, torch; print(open('/proc/self/status').read())"


def resident(status: str) -> dict[str, float]:
    """MiB that a process has, from /proc/PID/status.

    Returns:
        All of it, and of that what is its own, and what is in memory that others have, too.
    """
    found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    names = {"rss": "VmRSS", "own": "RssAnon", "common": "RssShmem"}
    return {name: round(int(found[key].split()[0]) / 1024, 1) for name, key in names.items()}


def look(pids: Sequence[int]) -> list[dict[str, float]]:
    """Of processes that live."""
    return [resident(Path(f"/proc/{pid}/status").read_text()) for pid in pids]


class Watch(threading.Thread):
    """Looks every few seconds; pids of workers are asked for, as they come with a pass."""

    def __init__(self, runtime: gt.Processes, every_s: float) -> None:
        super().__init__(daemon=True)
        self._runtime, self._every_s = runtime, every_s
        self._over = threading.Event()
        self.seen: list[list[dict[str, float]]] = []

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            workers = list(getattr(self._runtime, "pids", ()))
            if workers:
                self.seen.append(look([os.getpid(), *workers]))

    def stop(self) -> None:
        """No more looks."""
        self._over.set()
        self.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print a line a process: what it had after each fifth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, default=500_000, help="in all")
    parser.add_argument("--size", type=int, default=100_000, help="of the data")
    parser.add_argument("--every-s", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    told = parser.parse_args(arguments)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    bare = resident(done.stdout)
    recipe = find_recipe("listreduce")
    options = recipe.complete({"train_size": told.size, "valid_size": 100})
    epochs = -(-told.instances // told.size)
    task = recipe.build(
        Setting(seed=0, epochs=epochs, update_every=100, options=options, data=None)
    )
    runtime = gt.Processes(2, kernel_threads=1)
    session = gt.Session(
        task.graph,
        rules=task.rules,
        runtime=runtime,
        max_active=recipe.in_flight(options),
        **task.settings(2, gt.SharedWeights()),
    )
    watch = Watch(runtime, told.every_s)
    watch.start()
    session.fit(task.load("train"), epochs=epochs)
    watch.stop()
    runtime.close()
    seen = watch.seen
    names = ["program", *(f"worker {k}" for k in range(len(seen[-1]) - 1))]
    print(f"import torch alone: {bare['rss']} MiB resident, {bare['own']} of its own")
    print("after each fifth of the time, MiB resident (of its own, in common memory):")
    for k, name in enumerate(names):
        looks = (seen[min(n * len(seen) // FIFTHS, len(seen) - 1)][k] for n in range(1, FIFTHS + 1))
        print(f"{name}: " + ", ".join(f"{x['rss']} ({x['own']}, {x['common']})" for x in looks))
    if told.json:
        told.json.write_text(json.dumps({"torch": bare, "names": names, "seen": seen}))


if __name__ == "__main__":
    main()
