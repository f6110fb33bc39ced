"""Copies of a model on hosts with slow links: neighbours beside all-reduce over the same links.

    sudo PYTHONPATH=src python -m benchmarks.cluster.neighbours --data DIR

    copies       2, 4 and 8, each on a host; the program of ours has one more host
    systems      copies.py: gt.Neighbours (pairs meet after each gradient; D-PSGD), and torch's
                 DistributedDataParallel over gloo; an exchange a step
    straggler    one host whose device takes four times as long
    rates        each system and number of copies has the best of some, chosen by another seed on
                 imagined hosts, by accuracy after as many samples

A line of JSON a run goes to results/neighbours.jsonl; ``--table`` prints what is there. Bytes are
those that a worker's host sends to other workers' hosts, by the relay's counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import geartrain as gt
from benchmarks.cluster import copies
from benchmarks.cluster.copies import DEVICE_MS, Work
from benchmarks.cluster.hosts import Hosts, Link
from benchmarks.cluster.lines import Line, add_links, links, parser, run
from benchmarks.cluster.pipelines import SYSCTL, replies, start

PROGRAM: Final = (sys.executable, "-m", "benchmarks.cluster.copies")
SLOW: Final = 4.0
"""Times as long a step of the straggler takes."""
RATES: Final = (0.01, 0.02, 0.03, 0.05, 0.09)
CHOOSING: Final = 0
"""The seed by which rates are chosen."""


def trial(work: Work, system: str, hosts: Hosts, device_ms: Sequence[float]) -> Line:
    """One run on the first hosts, one copy each; the last host has the program of ours."""
    n = len(device_ms)
    started = []
    with tempfile.TemporaryDirectory() as folder:
        request: Line = {"kind": system, "work": asdict(work), "copies": n}
        if system == "ddp":
            request["store"] = f"file://{Path(folder) / 'store'}"
            for k, ms in enumerate(device_ms):
                command = (*_environment(hosts[k], ms), *PROGRAM)
                started.append(start(command, request | {"rank": k}))
            [reply] = replies(started[::-1], system)  # the first rank replies for all
        else:
            request["hosts"] = [
                {"address": hosts[k].address, "command": _environment(hosts[k], ms)}
                for k, ms in enumerate(device_ms)
            ]
            request["address"] = hosts[n].address
            command = (*hosts[n].prefix, *PROGRAM)
            [reply] = replies([start(command, request)], system)
    sent = [sum(hosts.counts(a, b).nbytes for b in range(n) if b != a) for a in range(n)]
    return {**reply, "bytes_a_step": sum(sent) / n / work.steps, "late": hosts.late()}


def _environment(host: Any, ms: float) -> tuple[str, ...]:
    """What starts a command on a host whose device takes so long for a step."""
    return (*host.prefix, "env", f"{DEVICE_MS}={ms:g}", "GLOO_SOCKET_IFNAME=eth0")


def imagined(work: Work, system: str, n: int, link: Link, device_ms: float) -> float:
    """Accuracy after as many samples, on imagined hosts of whose work devices are all."""
    if system == "ddp":
        return copies.together(work, n)
    nodes = {"part 0": (device_ms * 1e-3, 0.0)}
    costs = gt.Costs(
        firing_s=0.0,
        row_s=0.0,
        nodes=nodes,
        latency_s=link.latency_s,
        bytes_per_s=link.bits_per_s / 8,
        shared=True,
    )
    return float(copies.ours(work, n, gt.Simulated(n, costs=costs, parent=n))["accuracy"])


@cache
def best_rate(
    work: Work, system: str, n: int, link: Link, device_ms: float, rates: tuple[float, ...]
) -> float:
    """Of some rates that with which accuracy is best; the seed is one that chooses."""
    if len(rates) == 1:
        return rates[0]
    at = replace(work, seed=CHOOSING)
    return max(rates, key=lambda r: imagined(replace(at, rate=r), system, n, link, device_ms))


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: throughput, bytes and accuracy by copies; and what a straggler costs."""
    yield (
        "| copies | one way | Mbit/s | system | rows/s | times all-reduce | kB a worker and step "
        "| exchanges a step | rate | accuracy | rows/s with a straggler | lost by it |"
    )
    yield "|" + "---|" * 12
    keys = sorted({(x["copies"], x["latency_s"], x["bits_per_s"]) for x in lines})
    for key in keys:
        here = [x for x in lines if (x["copies"], x["latency_s"], x["bits_per_s"]) == key]
        base = _middle(here, "ddp", 1.0)
        for system in dict.fromkeys(x["system"] for x in here):
            mine = [x for x in here if x["system"] == system and x["slow"] == 1.0]
            rate, slow = _middle(here, system, 1.0), _middle(here, system, SLOW)
            if not mine or rate is None:
                continue
            met = [x.get("meetings_per_gradient") for x in mine]
            shown = "1" if None in met else f"{statistics.median(map(float, met)):.2f}"
            nbytes = statistics.median(x["bytes_a_step"] for x in mine)
            right = [x["accuracy"] for x in mine]
            yield (
                f"| {key[0]} | {key[1] * 1e3:g} ms | {key[2] / 1e6:g} | {system} | {rate:,.0f} "
                f"| {'' if base is None else f'{rate / base:.2f}'} | {nbytes / 1e3:,.0f} | {shown} "
                f"| {', '.join(f'{r:g}' for r in sorted({x['work']['rate'] for x in mine}))} "
                f"| {statistics.median(right):.2%} ({min(right):.2%} to {max(right):.2%}) "
                f"| {'' if slow is None else f'{slow:,.0f}'} "
                f"| {'' if slow is None else f'{1 - slow / rate:.0%}'} |"
            )


def _middle(lines: Sequence[Line], system: str, slow: float) -> float | None:
    found = [x["rows_per_second"] for x in lines if x["system"] == system and x["slow"] == slow]
    return statistics.median(found) if found else None


def main(words: Sequence[str] | None = None) -> None:
    run(_arguments(words), _lines, table)


def _lines(given: argparse.Namespace) -> Iterator[Line]:
    for seed, link, n in product(given.seeds, links(given), given.copies):
        for slow in (1.0, SLOW) if n == max(given.copies) else (1.0,):
            for system in given.systems:
                work = Work(
                    data=given.data,
                    hidden=given.hidden,
                    steps=given.samples // (n * Work.batch),
                    exchange="weights" if system == "ddp" else system,
                )
                rate = best_rate(work, system, n, link, given.device_ms, (*given.rates,))
                work = replace(work, rate=rate, seed=seed)
                device_ms = [given.device_ms * (slow if k == 0 else 1.0) for k in range(n)]
                with Hosts(n + 1, link, sysctl=SYSCTL) as hosts:
                    line = trial(work, system, hosts, device_ms)
                yield {
                    "system": system,
                    "seed": seed,
                    "copies": n,
                    "slow": slow,
                    "latency_s": link.latency_s,
                    "bits_per_s": link.bits_per_s,
                    "device_ms": given.device_ms,
                    "work": asdict(work) | {"data": work.data is not None},
                    **line,
                }


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "neighbours")
    add_links(made, [5], [100])
    made.add_argument("--copies", type=int, nargs="+", default=[2, 4, 8])
    made.add_argument("--systems", nargs="+", default=["ddp", "weights:2"], help="or exchanges")
    made.add_argument("--samples", type=int, default=30_000, help="of all copies together")
    made.add_argument("--hidden", type=int, default=Work.hidden)
    made.add_argument("--rates", type=float, nargs="+", default=RATES, help="one: it is not chosen")
    made.add_argument("--device-ms", type=float, default=30.0, help="of a step, slept")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a round each")
    return made.parse_args(words)


if __name__ == "__main__":
    main()
