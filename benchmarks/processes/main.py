"""Two worker processes against one worker, on the recipes; throughput and CPU seconds.

    python -m benchmarks.processes.main mnist listreduce --rounds 3

    one      one worker, one kernel thread          what a core does
    kernels  one worker, two kernel threads         what plain PyTorch does with two cores
    threads  two workers as threads, one kernel thread each
    two      two worker processes, one kernel thread each
    hosts    the same with no memory in common: control by tcp on loopback, rows by socket files
    tcp      the same, rows too by tcp, encrypted
    plain    likewise, not encrypted
    ray      as hosts, started by Ray (where it is installed)
    four, eight   as many worker processes: more than there are cores
    auto     what the library chooses after its first instances, in the pass that is to get warm
    apart    two programs that know nothing of one another, each as one: what two cores give

Each system of each round is a fresh process that trains a short pass to get warm, and then one that
counts; another system begins in every round, and ratios are within rounds. Programs that are no
pipelines share the weights among workers, each of which has as many instances in flight as one
worker has (``--in-flight all``: both together); pipelines have their parts spread. With
``--in-flight spread`` all have; ``--in-flight "copies of 'PART'"`` gives each worker a copy of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import geartrain as gt
from geartrain.recipes import find_recipe
from geartrain.recipes.recipe import Setting
from geartrain.sharing.sharing import AbstractSharing
from geartrain.train.auto import meet_every

SYSTEMS: Mapping[str, Callable[[], Any]] = {
    "one": lambda: gt.Threads(1, kernel_threads=1),
    "kernels": lambda: gt.Threads(1, kernel_threads=2),
    "threads": lambda: gt.Threads(2, kernel_threads=1),
    "two": lambda: gt.Processes(2, kernel_threads=1),
    "hosts": lambda: gt.Hosts(2, kernel_threads=1),
    "tcp": lambda: gt.Hosts(2, kernel_threads=1, socket_files=False),
    "plain": lambda: gt.Hosts(2, kernel_threads=1, plain=True),
    "ray": lambda: gt.Ray(2, kernel_threads=1),
    "apart": lambda: gt.Threads(1, kernel_threads=1),
    "four": lambda: gt.Processes(4, kernel_threads=1),
    "eight": lambda: gt.Processes(8, kernel_threads=1),
    "auto": lambda: gt.Auto(),
}
USUAL = ("one", "kernels", "threads", "two", "apart")
"""Systems that are measured if none is named."""


_WARM = "warm"


class Case:
    """A recipe as it is measured.

    Args:
        recipe: Name.
        instances: Of the pass that counts.
        options: Of the recipe.
        shares: Whether workers share the weights; else parts are spread over them.
    """

    def __init__(self, recipe: str, instances: int, shares: bool, **options: float) -> None:
        self.recipe, self.instances, self.shares, self.options = recipe, instances, shares, options


LEVEL: Final = 523
"""Width with which the second map of digits costs what the first costs: three products of it are as
much as the first map's two, as nobody asks for the gradient of images."""

CASES: Mapping[str, Case] = {
    "mnist": Case("mnist", 600, False),
    "mnist, level": Case("mnist", 600, False, second=LEVEL),
    "charlm": Case("charlm", 60, False),
    "cifar": Case("cifar", 60, False),
    "shapes": Case("shapes", 80, False),
    "shapes in eight": Case("shapes", 80, False, parts=8),
    "sentiment by vertex": Case("sentiment", 2000, True, whole=0),
    "lists by step": Case("listreduce", 20_000, True, whole=0),
    "sentiment": Case("sentiment", 4000, True, whole=1),
    "qm9": Case("qm9", 4000, True),
}


def sharing_of(case: Case, how: str, workers: int, max_active: int) -> AbstractSharing | None:
    """How so many workers share the weights of a case; None: parts are spread over them.

    Args:
        case: It.
        how: ``each`` and ``all``, as of ``SharedWeights`` where the case shares weights;
            ``spread``; or ``copies of 'part'``.
        workers: How many.
        max_active: Instances in flight.
    """
    if workers < 2:
        return None
    if how.startswith(COPIES):
        part = how.removeprefix(COPIES).strip("'")
        return gt.PartCopies({part: workers}, gt.Average(meet_every(max_active)))
    if how not in ("all", "each") or not case.shares:
        return None
    return gt.SharedWeights("all" if how == "all" else "each")


COPIES = "copies of "


def session_of(
    name: str,
    system: str,
    max_active: int | None,
    scale: float,
    in_flight: str = "each",
    *,
    passes: int = 2,
    instruments: Sequence[gt.AbstractInstrument] = (),
) -> tuple[gt.Session, Sequence[gt.Instance]]:
    """One system on one case, and what a pass of it trains."""
    case = CASES[name]
    recipe = find_recipe(case.recipe)
    options = recipe.complete(dict(case.options))
    torch.manual_seed(0)
    setting = Setting(
        seed=0,
        epochs=passes,
        update_every=recipe.update_size(options),
        options=options,
        data=Path(os.environ["GEARTRAIN_DATA"]) if os.environ.get("GEARTRAIN_DATA") else None,
    )
    task = recipe.build(setting)
    runtime = SYSTEMS[system]()
    chosen = isinstance(runtime, gt.Auto)
    workers = 1 if chosen else runtime.workers
    most = max_active or recipe.in_flight(options)
    session = gt.Session(
        task.graph,
        rules=task.rules,
        runtime=runtime,
        max_active=most,
        seed=0,
        instruments=instruments,
        **task.settings(workers, sharing_of(case, in_flight, workers, most), chosen=chosen),
    )
    return session, task.load("train")[: max(1, int(case.instances * scale))]


def measure(
    name: str,
    system: str,
    max_active: int | None,
    scale: float,
    in_flight: str = "each",
) -> dict[str, Any]:
    """One system on one case, in this process."""
    session, train = session_of(name, system, max_active, scale, in_flight)
    n = len(train)
    session.fit(train, epochs=1)
    runtime = session.runtime
    if system == "apart":
        print(_WARM, flush=True)
        sys.stdin.readline()
    pids = [os.getpid(), *getattr(runtime, "pids", ())]
    before, began = [cpu_s(pid) for pid in pids], time.perf_counter()
    fit = session.fit(train, epochs=2)
    wall = time.perf_counter() - began
    used = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
    last = fit.history[-1]
    if close := getattr(runtime, "close", None):
        close()
    return {
        "instances_per_second": last.instances / last.seconds,
        "whole_fit": n / wall,
        "cpu_s": [round(x, 2) for x in used],
        "instances": n,
        "runtime": f"{runtime.name} {runtime.workers}",
        "loss": last.loss,
        "staleness": {part: round(age.mean, 2) for part, age in last.staleness.items()},
    }


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has had, user's and system's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def elsewhere(
    name: str, system: str, max_active: int | None, scale: float, in_flight: str
) -> dict[str, Any]:
    """The same in a fresh process.

    Raises:
        RuntimeError: It failed; what it printed is in the message.
    """
    asked = json.dumps([name, system, max_active, scale, in_flight])
    kernel_threads = "2" if system == "kernels" else "1"
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes.main", "--one", asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": kernel_threads},
        )
        for _ in range(2 if system == "apart" else 1)
    ]
    if system == "apart":  # both begin when both are warm
        for program in programs:
            assert program.stdout is not None
            if program.stdout.readline().strip() != _WARM:
                break
    told: list[dict[str, Any]] = []
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
    for program in programs:
        said, errors = program.communicate()
        if program.returncode:
            raise RuntimeError(f"{name}, {system}:\n{errors[-2000:]}")
        told.append(json.loads(said.splitlines()[-1]))
    rates = [each["instances_per_second"] for each in told]
    cpu = [seconds for each in told for seconds in each["cpu_s"]]
    instances = sum(each["instances"] for each in told)
    return told[0] | {"instances_per_second": sum(rates), "cpu_s": cpu, "instances": instances}


def cpu_us(told: Mapping[str, Any]) -> float:
    """CPU microseconds of all processes of a system, an instance."""
    return 1e6 * sum(told["cpu_s"]) / float(told["instances"])


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="all, if none is named")
    parser.add_argument("--systems", default=",".join(USUAL))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-active", type=int, default=None)
    parser.add_argument("--scale", type=float, default=1.0, help="of the instances")
    parser.add_argument("--in-flight", default="each", help="of SharedWeights, or as above")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.one:
        print(json.dumps(measure(*json.loads(told.one))))
        return
    systems = told.systems.split(",")
    for name in told.cases or CASES:
        rounds: list[dict[str, Any]] = []
        for k in range(told.rounds):
            order = systems[k % len(systems) :] + systems[: k % len(systems)]
            asked = told.max_active, told.scale, told.in_flight
            rounds.append({s: elsewhere(name, s, *asked) for s in order})
        if told.json:
            print(json.dumps({"case": name, "rounds": rounds}), flush=True)
            continue
        print(name, flush=True)
        for system in systems:
            rate = [r[system]["instances_per_second"] for r in rounds]
            last = rounds[-1][system]
            line = f"  {system:8} {statistics.median(rate):9.1f}/s"
            base = "one" if "one" in systems else systems[0]
            ratios = [
                x / r[base]["instances_per_second"] for x, r in zip(rate, rounds, strict=True)
            ]
            line += f"  x {base} {spread(ratios)}"
            used = [cpu_us(r[system]) / cpu_us(r[base]) for r in rounds]
            each = statistics.median(cpu_us(r[system]) for r in rounds)
            line += f"  CPU us an instance {each:.0f}, x {base} {spread(used)}"
            print(
                f"{line}  {last['runtime']}  CPU s {last['cpu_s']}  staleness {last['staleness']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
