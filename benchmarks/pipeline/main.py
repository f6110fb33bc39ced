"""Throughput of a two-part pipeline against torch.distributed.pipelining and a plain loop.

    round 1   plain:1, plain:2, ours:2, processes:2, 1f1b:2, 1f1b:4, ...
    round 2   plain:2, ours:2, ...                    another one begins in every round

Schedules want at least as many microbatches as parts.

All systems stay alive and train the same minibatches once a round; ratios are within rounds. Equal
minibatch, equal cut, equal optimiser, one kernel thread a process or worker. No wait is without a
bound: a system that says nothing for ``--patience`` seconds is ended, and told with what it said.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, NoReturn

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

PATIENCE_S: Final = 180.0
_END_S: Final = 10.0


class Running:
    """The processes of one system, warm.

    Args:
        system, work: What is trained by what.
        patience_s: The longest wait for an answer.

    Raises:
        RuntimeError: A process failed or did not answer in time; what it said is in the message.
    """

    def __init__(self, system: str, work: Work, patience_s: float) -> None:
        self._system, self._patience_s = system, patience_s
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._processes: list[subprocess.Popen[str]] = []
        self._said = [folder / "0", folder / "1"]
        # Ranks meet on the loopback, whatever this host is called.
        more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(kernel_threads_of(system, work))}
        try:
            asked = requests(system, work, f"file://{folder / 'store'}")
            for request, said in zip(asked, self._said, strict=False):
                with said.open("w") as errors:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.pipeline.systems"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env=os.environ | more,
                    )
                self._processes.append(process)
                self._say(process, json.dumps(request))
            self._hear()
        except BaseException:
            self.close()
            raise

    def measure(self) -> dict[str, float]:
        """One pass; the last process tells rate and loss, CPU time is of all."""
        for process in self._processes:
            self._say(process, "")
        replies = self._hear()
        return replies[-1] | {"cpu_ms_per_row": sum(r["cpu_ms_per_row"] for r in replies)}

    def _say(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # why it has ended is told below
            print(line, file=process.stdin, flush=True)

    def _hear(self) -> list[dict[str, float]]:
        """A line of each."""
        end = time.monotonic() + self._patience_s
        missing = {p.stdout: k for k, p in enumerate(self._processes) if p.stdout is not None}
        found: dict[int, dict[str, float]] = {}
        while missing:
            there, _, _ = select.select([*missing], [], [], max(0.0, end - time.monotonic()))
            if not there:
                self._refuse(min(missing.values()), f"said nothing for {self._patience_s:g} s")
            for stdout in there:
                k, line = missing.pop(stdout), stdout.readline()
                if not line:  # others would wait for it
                    self._refuse(k, "has ended")
                found[k] = json.loads(line)
        return [found[k] for k in sorted(found)]

    def _refuse(self, k: int, what: str) -> NoReturn:
        raise RuntimeError(f"{self._system} {what}:\n{self._said[k].read_text()[-2000:]}")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()


def measure(system: str, work: Work, patience_s: float = PATIENCE_S) -> dict[str, float]:
    """One pass of one system.

    Raises:
        RuntimeError: As of ``Running``.
    """
    with closing(Running(system, work, patience_s)) as running:
        return running.measure()


def balanced(work: Work, parts: int) -> tuple[int, ...]:
    """Cuts by measured time, for all systems alike."""
    batches, tokens = minibatches(work)
    torch.set_num_threads(work.kernel_threads)
    return gt.Pipeline(network(work, tokens), parts=parts, by="time", sample=batches[0][0]).cuts


def run_rounds(
    systems: Sequence[str], work: Work, rounds: int, patience_s: float = PATIENCE_S
) -> list[Round]:
    """Every system once a round, in turn; they get warm one after the other."""
    found: list[Round] = []
    with ExitStack() as stack:
        alive = {s: stack.enter_context(closing(Running(s, work, patience_s))) for s in systems}
        for k in range(rounds):
            at = k % len(systems)
            order = [*systems[at:], *systems[:at]]
            found.append({system: alive[system].measure() for system in order})
            _tell(k, systems, found)
    return found


def _tell(k: int, systems: Sequence[str], found: Sequence[Round]) -> None:
    shown = {s: round(found[-1][s]["rows_per_second"], 1) for s in systems}
    print(f"round {k + 1}: {shown}", file=sys.stderr, flush=True)


def best_peer(rounds: Sequence[Round]) -> str:
    """The peer's best schedule and number of microbatches, by its median."""
    peers = [system for system in rounds[0] if is_peer(system)]
    return max(peers, key=lambda s: statistics.median(r[s]["rows_per_second"] for r in rounds))


def table(rounds: Sequence[Round], systems: Sequence[str]) -> str:
    """Markdown: medians with least and most, and ratios to the best peer within rounds."""
    base = best_peer(rounds) if any(map(is_peer, systems)) else systems[0]
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
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="s; longest wait")
    parser.add_argument("--systems", nargs="+", help="instead of all that the others name")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    for name in ("dim", "blocks", "length", "batch", "steps", "warm_up"):
        default = getattr(Work, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.set_defaults(network="decoder")
    given = vars(parser.parse_args())
    rounds, in_flight = given.pop("rounds"), given.pop("in_flight")
    patience_s, named = given.pop("patience"), given.pop("systems")
    microbatches, schedules = given.pop("microbatches"), given.pop("schedules")
    systems = ["plain:1", "plain:2"]
    systems += [f"{name}:{n}" for name in ("ours", "processes") for n in in_flight]
    systems += [f"{name}:{m}" for name in schedules for m in microbatches]
    systems = named or systems
    work = Work(**given)
    for system in filter(is_peer, systems):
        if work.batch % int(system.partition(":")[2]):
            parser.error(f"{system}: {work.batch} rows do not fall into so many equal microbatches")
    four = balanced(work, 4) if {s.partition(":")[0] for s in systems} & {*OF_SEVERAL} else ()
    work = Work(**given, cuts=balanced(work, 2), four=four)
    print(f"cut before block {work.cuts[0]}", file=sys.stderr)
    print(table(run_rounds(systems, work, rounds, patience_s), systems))


if __name__ == "__main__":
    main()
