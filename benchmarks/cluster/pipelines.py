"""Pipelines of parts on hosts with slow links: asynchronous, drained, and torch's schedules.

    sudo PYTHONPATH=src python -m benchmarks.cluster.pipelines --data DIR --parts 2 --latency-ms 10

    link      for every number of parts, latency (one way) and rate, hosts of their own
    systems   stages.py: each has the same parts on the same hosts; synchronous ones are timed for
              some seconds, asynchronous ones train from beginning to end
    losses    synchronous ones have those of plain training, which is run once, without hosts

A line of JSON a system and round goes to results/pipelines.jsonl; ``--table`` prints what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster.hosts import Host, Hosts, Link
from benchmarks.cluster.lines import Line, add_links, links, parser
from benchmarks.cluster.lines import run as run_lines
from benchmarks.cluster.stages import SMOOTH, Work, first_to_reach

PROGRAM: Final = (sys.executable, "-m", "benchmarks.cluster.stages")
TIMED_S: Final = 3.0
"""Of a synchronous system, about."""
FEWEST: Final = 10
MOST: Final = 60
"""Minibatches that are timed of it, at least and at most."""
PEERS: Final = {
    2: ("gpipe:1", "gpipe:2", "gpipe:4", "1f1b:2", "1f1b:4", "interleaved:2"),
    4: ("gpipe:1", "gpipe:4", "1f1b:4", "1f1b:10"),
}
"""By parts; 1F1B wants as many microbatches as parts, interleaving twice as many parts."""
DRAINED: Final = ("drained:1", "drained:2", "drained:4")
RATES: Final = (0.01, 0.03, 0.1)
"""Of plain training; the best loss of digits that it has not seen decides."""

SYSCTL: Final = {
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_slow_start_after_idle": "0",
}
"""Of all systems' hosts. BBR paces by what it has measured, so that a burst takes most of a round
trip to go out; and without the second a window is small again after each pause."""

SHORT_FLIGHT: Final = 4
LONG_RISE: Final = 400
"""Minibatches over which the rate rises where more than ``SHORT_FLIGHT`` are in flight."""
MOST_IN_FLIGHT: Final = 24

Trial = tuple[str, str, Line]
"""A system, its view, and what else of ``Work`` is its own."""


def run(request: Line, host: Host | None) -> subprocess.Popen[str]:
    """Start a program of stages.py, on a host or here; what it is asked goes to its stdin."""
    network = () if host is None else (*host.prefix, "env", "GLOO_SOCKET_IFNAME=eth0")
    return start((*network, *PROGRAM), request)


def start(command: Sequence[str], request: Line) -> subprocess.Popen[str]:
    """Start a program that finds the modules that this one finds, and give it its request."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request))
    process.stdin.close()
    return process


def replies(processes: Sequence[subprocess.Popen[str]], what: str) -> Iterator[Line]:
    """What the last of the processes replies, as it comes; all have ended afterwards.

    Raises:
        RuntimeError: One of them failed.
    """
    last = processes[-1].stdout
    assert last is not None
    yield from map(json.loads, last)
    codes = [process.wait() for process in processes]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    if any(codes):
        raise RuntimeError(f"{what}: processes ended with {codes}; see what they said")


def plain(work: Work, rates: Sequence[float]) -> list[Line]:
    """Plain training at each rate, one after the other."""
    found = []
    for rate in rates:
        at = replace(work, rate=rate)
        asked = asdict(replace(at, device_ms=0.0))  # nobody takes the time of it
        request = {"kind": "plain", "work": asked, "systems": ["plain"]}
        [reply] = replies([run(request, None)], "plain")
        told = asdict(at) | {"data": at.data is not None}  # not where it lies
        found.append({"system": "plain", "work": told, **reply})
    return found


def peers(work: Work, hosts: Hosts, systems: Sequence[str]) -> Iterator[Line]:
    """Torch's schedules, all in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"kind": "peer", "work": asdict(work), "systems": [*systems]}
        store = f"file://{Path(folder) / 'store'}"
        ranks = [run(request | {"rank": host.number, "store": store}, host) for host in hosts]
        for system, reply in zip(systems, replies(ranks, "torch"), strict=True):
            yield {"system": system, **reply}


def ours(work: Work, hosts: Hosts, trials: Sequence[Trial]) -> Iterator[Line]:
    """Our systems, on the same workers; the program is on the first host."""
    there = [{"address": host.address, "command": host.prefix} for host in hosts]
    request = {"kind": "ours", "work": asdict(work), "systems": [*trials], "hosts": there}
    request["address"] = hosts[0].address
    found = replies([run(request, hosts[0])], "ours")
    for (system, view, changed), reply in zip(trials, found, strict=True):
        yield {"system": system, "view": view, **changed, **reply}


def steps_of(work: Work, link: Link) -> int:
    """Minibatches that take about as long as is to be timed."""
    travels = 2 * (work.parts - 1) * link.latency_s
    content = work.batch * work.hidden * 4 * 8 / link.bits_per_s
    computes = 0.03 + work.device_ms * 1e-3
    return max(FEWEST, min(MOST, round(TIMED_S / (travels + 2 * content + computes))))


def few_in_flight(work: Work, link: Link) -> int:
    """Minibatches in flight with which the goals for throughput are in reach, and no more."""
    if link.latency_s >= 0.050:
        return max(7, work.parts)
    return max(3, work.parts) if link.latency_s >= 0.010 else work.parts


def many_in_flight(work: Work, link: Link) -> int:
    """About as many as fill the way there and back."""
    travels = 2 * (work.parts - 1) * link.latency_s
    content = work.batch * work.hidden * 4 * 8 / link.bits_per_s
    slowest = max(0.015, content, work.device_ms * 1e-3 / work.parts)
    return min(MOST_IN_FLIGHT, work.parts + 1 + round(travels / slowest))


def trials_of(work: Work, link: Link, given: argparse.Namespace) -> list[Trial]:
    """Few in flight: trained from beginning to end, at each length. Many: timed alone."""
    found: list[Trial] = [(system, "stashed", {}) for system in given.drained]
    few = given.in_flight or [few_in_flight(work, link)]
    for n in few:
        rising = LONG_RISE if n > SHORT_FLIGHT else work.rising
        for view in given.views:
            for rate in given.async_rates:
                for long in given.lengths:
                    changed = {"rate": rate, "momentum": given.momentum, "rising": rising}
                    changed["minibatches"] = round(long * work.minibatches)
                    found.append((f"async:{n}", view, changed))
    if not given.in_flight and (n := many_in_flight(work, link)) > max(few):
        changed = {"rate": 0.001, "rising": work.rising, "minibatches": 5 * work.steps}
        found.append((f"async:{n}", given.views[0], changed))
    return found


def cell(work: Work, link: Link, given: argparse.Namespace) -> Iterator[Line]:
    """All systems on one kind of link."""
    timed = replace(work, steps=steps_of(work, link))
    for kind in given.kinds:
        with Hosts(work.parts, link, sysctl=given.sysctl) as hosts:
            if kind == "peer":
                lines = peers(timed, hosts, given.peers or PEERS[work.parts])
            else:
                lines = ours(timed, hosts, trials_of(timed, link, given))
            for line in lines:
                yield line | {"late": hosts.late()}


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: a row an asynchronous system of each kind of link, beside the best synchronous."""
    if not any(line["system"] == "plain" for line in lines):
        return
    best = best_plain(lines)
    yield (
        "| parts | one way | Mbit/s | best synchronous | rows/s | drained, ours | asynchronous "
        "| rows/s | times | loss, beside plain | unseen | to loss "
        f"{best['target']:.3f}: samples | seconds, times |"
    )
    yield "|" + "---|" * 13
    for key in sorted({_key(line) for line in lines if "parts" in line}):
        here = [line for line in lines if "parts" in line and _key(line) == key]
        yield from _rows(here, key, best)


def best_plain(lines: Sequence[Line]) -> Line:
    """The plain training with the least loss of unseen digits, and the loss to be reached.

    The target is what plain training has after three quarters of its minibatches.
    """
    found = min((x for x in lines if x["system"] == "plain"), key=lambda x: x["test_loss"])
    until = 3 * len(found["losses"]) // 4
    target = statistics.fmean(found["losses"][until - SMOOTH : until])
    return found | {
        "target": target,
        "last": statistics.fmean(found["losses"][-SMOOTH:]),
        "until": first_to_reach(found["losses"], target),
    }


def _key(line: Line) -> tuple[int, float, float]:
    return line["parts"], line["latency_s"], line["bits_per_s"]


def _rows(lines: Sequence[Line], key: tuple[int, float, float], best: Line) -> Iterator[str]:
    batch = best["work"]["batch"]
    by: dict[str, list[Line]] = {}
    for line in lines:
        name = line["system"]
        if name.startswith("async"):
            name += f" {line['view']}, {line['minibatches']}"
            if "rate" in line:
                momentum = line.get("momentum", Work.momentum)  # early lines had this one
                name += f", rate {line['rate']:g}, momentum {momentum:g}"
        by.setdefault(name, []).append(line)
    rates = {name: [x["rows_per_second"] for x in some] for name, some in by.items()}
    middle = {name: statistics.median(found) for name, found in rates.items()}
    synchronous = [name for name in by if not name.startswith("async")]
    first = max(synchronous, key=lambda name: middle[name])
    own = max((n for n in by if n.startswith("drained")), key=lambda n: middle[n], default="")
    for name, some in by.items():
        if not name.startswith("async"):
            continue
        ratios = [a / b for a, b in zip(rates[name], rates[first], strict=False)]
        last = statistics.fmean(statistics.fmean(x["losses"][-SMOOTH:]) for x in some)
        trained = some[0]["minibatches"] >= len(best["losses"])
        reached = [first_to_reach(x["losses"], best["target"]) for x in some]
        unseen = statistics.fmean(x["test_loss"] for x in some)
        took = "never | "
        if None not in reached:
            many = statistics.median(n for n in reached if n is not None)
            seconds = many * batch / middle[name]
            theirs = best["until"] * batch / middle[first]
            took = f"{many / best['until']:.2f} times | {seconds:.1f}, {theirs / seconds:.2f} times"
        yield (
            f"| {key[0]} | {key[1] * 1e3:g} ms | {key[2] / 1e6:g} | {first} | {middle[first]:,.0f} "
            f"| {f'{own}: {middle[own]:,.0f}' if own else ''} | {name} | {middle[name]:,.0f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            + (
                f"| {last:.4f}, {best['last']:.4f} | {unseen:.4f}, {best['test_loss']:.4f} "
                f"| {took} |"
                if trained
                else "| | | | |"
            )
        )


def main(words: Sequence[str] | None = None) -> None:
    run_lines(_arguments(words), _lines, table)


def _lines(given: argparse.Namespace) -> Iterator[Line]:
    work = Work(
        data=given.data,
        hidden=given.hidden,
        batch=given.batch,
        minibatches=given.minibatches,
        device_ms=given.device_ms,
    )
    if "plain" in given.kinds:
        yield from plain(work, given.rates)
    given.kinds = [kind for kind in given.kinds if kind != "plain"]
    for number, parts, link in product(range(given.rounds), given.parts, links(given)):
        about: Mapping[str, Any] = {
            "round": number,
            "parts": parts,
            "latency_s": link.latency_s,
            "bits_per_s": link.bits_per_s,
        }
        at = replace(work, parts=parts, rate=given.rates[0])
        yield from (line | about for line in cell(at, link, given))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "pipelines")
    add_links(made, [1, 10, 50], [1000, 100])
    made.add_argument("--parts", type=int, nargs="+", default=[2, 4])
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--kinds", nargs="+", default=["plain", "peer", "ours"])
    made.add_argument("--peers", nargs="*", help="by the parts if not given")
    made.add_argument("--drained", nargs="*", default=DRAINED)
    made.add_argument("--in-flight", type=int, nargs="+", help="by the link if not given")
    made.add_argument("--views", nargs="+", default=["predicted"])
    made.add_argument("--rates", type=float, nargs="+", default=RATES, help="of plain training")
    made.add_argument("--async-rates", type=float, nargs="+", default=[0.03])
    made.add_argument(
        "--momentum", type=float, default=Work.momentum, help="of asynchronous trainings"
    )
    made.add_argument(
        "--lengths", type=float, nargs="+", default=[1.0, 2.0], help="of asynchronous trainings"
    )
    made.add_argument(
        "--sysctl", type=json.loads, default=SYSCTL, help="of the hosts' kernels, as JSON"
    )
    made.add_argument("--hidden", type=int, default=Work.hidden)
    made.add_argument("--device-ms", type=float, default=0.0, help="slept, for a minibatch")
    made.add_argument("--batch", type=int, default=Work.batch)
    made.add_argument("--minibatches", type=int, default=Work.minibatches)
    return made.parse_args(words)


if __name__ == "__main__":
    main()
