"""Throughput of a two-part pipeline against torch.distributed.pipelining and a plain loop.

    round 1   plain:1, plain:2, ours:2, processes:2, 1f1b:2, 1f1b:4, ...
    round 2   plain:2, ours:2, ...                    another one begins in every round

Schedules want at least as many microbatches as parts.

Every system has fresh processes for every round; ratios are within rounds. Equal minibatch, equal
cut, equal optimiser, one kernel thread a process or worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import geartrain as gt
from benchmarks.pipeline.systems import (
    OF_SEVERAL,
    Work,
    is_peer,
    kernel_threads_of,
    minibatches,
    network,
    requests,
)

Round = Mapping[str, Mapping[str, float]]


def measure(system: str, work: Work) -> dict[str, float]:
    """One run of one system; the last process tells rate and loss, CPU time is of all.

    Raises:
        RuntimeError: A process failed; its stderr is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        running = []
        for request in requests(system, work, store):
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.pipeline.systems"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(kernel_threads_of(system, work))},
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            process.stdin = None
            running.append(process)
        said = [process.communicate() for process in running]
        for process, (_, errors) in zip(running, said, strict=True):
            if process.returncode:
                raise RuntimeError(f"{system} ended with {process.returncode}:\n{errors[-2000:]}")
        replies: list[dict[str, float]] = [json.loads(out) for out, _ in said]
        return replies[-1] | {"cpu_ms_per_row": sum(r["cpu_ms_per_row"] for r in replies)}


def balanced(work: Work, parts: int) -> tuple[int, ...]:
    """Cuts by measured time, for all systems alike."""
    batches, tokens = minibatches(work)
    torch.set_num_threads(work.kernel_threads)
    return gt.Pipeline(network(work, tokens), parts=parts, by="time", sample=batches[0][0]).cuts


def run_rounds(systems: Sequence[str], work: Work, rounds: int) -> list[Round]:
    """Every system once a round, in turn."""
    found = []
    for k in range(rounds):
        at = k % len(systems)
        order = [*systems[at:], *systems[:at]]
        found.append({system: measure(system, work) for system in order})
        shown = {s: round(found[-1][s]["rows_per_second"], 1) for s in systems}
        print(f"round {k + 1}: {shown}", file=sys.stderr)
    return found


def best_peer(rounds: Sequence[Round]) -> str:
    """The peer's best schedule and number of microbatches, by its median."""
    peers = [system for system in rounds[0] if is_peer(system)]
    return max(peers, key=lambda s: statistics.median(r[s]["rows_per_second"] for r in rounds))


def table(rounds: Sequence[Round], systems: Sequence[str]) -> str:
    """Markdown: medians with least and most, and ratios to the best peer within rounds."""
    base = best_peer(rounds)
    lines = [
        f"| system | rows/s, median | min | max | times {base} (min to max) | CPU ms/row "
        "| mean loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for system in systems:
        rates = [r[system]["rows_per_second"] for r in rounds]
        ratios = [r[system]["rows_per_second"] / r[base]["rows_per_second"] for r in rounds]
        cpu, loss = (
            statistics.median(r[system][key] for r in rounds) for key in ("cpu_ms_per_row", "loss")
        )
        lines.append(
            f"| {system} | {statistics.median(rates):,.1f} | {min(rates):,.1f} | {max(rates):,.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {cpu:.2f} | {loss:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="data folder; without it tokens are drawn at random")
    parser.add_argument("--network", choices=["decoder", "residual", "perceptron"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    for name in ("dim", "blocks", "length", "batch", "steps", "warm_up"):
        default = getattr(Work, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.set_defaults(network="decoder")
    given = vars(parser.parse_args())
    rounds, in_flight = given.pop("rounds"), given.pop("in_flight")
    microbatches, schedules = given.pop("microbatches"), given.pop("schedules")
    systems = ["plain:1", "plain:2"]
    systems += [f"{name}:{n}" for name in ("ours", "processes") for n in in_flight]
    systems += [f"{name}:{m}" for name in schedules for m in microbatches]
    work = Work(**given)
    four = balanced(work, 4) if set(schedules) & set(OF_SEVERAL) else ()
    work = Work(**given, cuts=balanced(work, 2), four=four)
    print(f"cut before block {work.cuts[0]}", file=sys.stderr)
    print(table(run_rounds(systems, work, rounds), systems))


if __name__ == "__main__":
    main()
