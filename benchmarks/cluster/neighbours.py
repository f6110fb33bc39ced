"""Copies of a model on hosts with slow links: neighbours beside all-reduce over the same links.

    sudo PYTHONPATH=src python -m benchmarks.cluster.neighbours --data DIR

    copies       2, 4 and 8, each on a host; the program of ours has one more host
    systems      copies.py: gt.Neighbours (pairs meet after each gradient; D-PSGD), and torch's
                 DistributedDataParallel over gloo; an exchange a step
    straggler    one host whose device takes four times as long

A line of JSON a run goes to results/neighbours.jsonl; ``--table`` prints what is there. Bytes are
those that a worker's host sends to other workers' hosts, by the relay's counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster.copies import DEVICE_MS, Work
from benchmarks.cluster.hosts import Hosts
from benchmarks.cluster.lines import Line, add_links, links, parser, run
from benchmarks.cluster.pipelines import SYSCTL, replies, start

PROGRAM: Final = (sys.executable, "-m", "benchmarks.cluster.copies")
SLOW: Final = 4.0
"""Times as long a step of the straggler takes."""


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


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: throughput, bytes and accuracy by copies; and what a straggler costs."""
    yield (
        "| copies | one way | Mbit/s | system | rows/s | times all-reduce | kB a worker and step "
        "| exchanges a step | accuracy | rows/s with a straggler | lost by it |"
    )
    yield "|" + "---|" * 11
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
            right = statistics.median(x["accuracy"] for x in mine)
            yield (
                f"| {key[0]} | {key[1] * 1e3:g} ms | {key[2] / 1e6:g} | {system} | {rate:,.0f} "
                f"| {'' if base is None else f'{rate / base:.2f}'} | {nbytes / 1e3:,.0f} | {shown} "
                f"| {right:.2%} | {'' if slow is None else f'{slow:,.0f}'} "
                f"| {'' if slow is None else f'{1 - slow / rate:.0%}'} |"
            )


def _middle(lines: Sequence[Line], system: str, slow: float) -> float | None:
    found = [x["rows_per_second"] for x in lines if x["system"] == system and x["slow"] == slow]
    return statistics.median(found) if found else None


def main(words: Sequence[str] | None = None) -> None:
    run(_arguments(words), _lines, table)


def _lines(given: argparse.Namespace) -> Iterator[Line]:
    for number, link, n in product(range(given.rounds), links(given), given.copies):
        for slow in (1.0, SLOW) if n == max(given.copies) else (1.0,):
            for system in given.systems:
                work = Work(
                    data=given.data,
                    hidden=given.hidden,
                    rate=given.rate,
                    steps=given.samples // (n * Work.batch),
                    exchange="weights" if system == "ddp" else system,
                )
                device_ms = [given.device_ms * (slow if k == 0 else 1.0) for k in range(n)]
                with Hosts(n + 1, link, sysctl=SYSCTL) as hosts:
                    line = trial(work, system, hosts, device_ms)
                yield {
                    "system": system,
                    "round": number,
                    "copies": n,
                    "slow": slow,
                    "latency_s": link.latency_s,
                    "bits_per_s": link.bits_per_s,
                    "device_ms": given.device_ms,
                    "work": asdict(work),
                    **line,
                }


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "neighbours")
    add_links(made, [5], [100])
    made.add_argument("--copies", type=int, nargs="+", default=[2, 4, 8])
    made.add_argument("--systems", nargs="+", default=["ddp", "weights"], help="or exchanges")
    made.add_argument("--samples", type=int, default=30_000, help="of all copies together")
    made.add_argument("--hidden", type=int, default=Work.hidden)
    made.add_argument("--rate", type=float, default=Work.rate)
    made.add_argument("--device-ms", type=float, default=30.0, help="of a step, slept")
    made.add_argument("--rounds", type=int, default=1)
    return made.parse_args(words)


if __name__ == "__main__":
    main()
