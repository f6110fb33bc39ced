"""What the simulator foresees for slow links, beside what the bench measures on them.

    sudo PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.cluster.forecasts --data DIR

    record     once for each number of parts or copies, workers on one host without links: seconds
               of firings, and of a message, in the second epoch: in the first one data are read
    forecast   the same session on imagined hosts, with those costs and a link's latency and rate
    measure    the same session on hosts with such links (hosts.py), which is recorded, too: what is
               foreseen with its own costs tells links from a machine that was busier then

Devices sleep, so that what is compared is waiting and links, and as many parts and copies as one
likes run on few cores; for how long they sleep says how much of the cores all need together, which
each line has. A line of JSON a case goes to results/forecasts.jsonl; ``--table`` prints
what is there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, final

import torch

import geartrain as gt
from benchmarks.cluster import copies, stages
from benchmarks.cluster.hosts import Hosts, Link
from benchmarks.cluster.lines import Busy, Line, add_links, links, parser, run
from benchmarks.cluster.neighbours import trial
from benchmarks.cluster.pipelines import SYSCTL, few_in_flight
from geartrain.engine.instrument import AbstractInstrument, Fired
from geartrain.observe.jsonlog import JsonLog, read_json_log
from geartrain.observe.recorded import recorded
from geartrain.runtime.base import AbstractRuntime

PAYLOAD: Final = 1448 / 1500
"""Of what a link carries; the rest is headers of IP and TCP."""
DRAINED: Final = ("drained:1", "drained:4")
_EPOCHS: Final = 2
"""Of a recording."""


@final
@dataclass(frozen=True, slots=True)
class Costs:
    """What a recording says.

    Args:
        nodes: Seconds a firing and a row, by node.
        message_s: Of a message between two programs, besides links.
        throughput: Rows a second of what was recorded.
    """

    nodes: Mapping[str, tuple[float, float]]
    message_s: float
    throughput: float

    def on(self, link: Link) -> gt.Costs:
        """With the latency and the rate of a link."""
        return gt.Costs(
            nodes=self.nodes,
            backward=0.0,
            latency_s=link.latency_s,
            bytes_per_s=PAYLOAD * link.bits_per_s / 8,
            message_s=self.message_s,
            shared=True,
            buffer_bytes=link.room,
            collective="star",
        )


@final
class Losses(AbstractInstrument):
    """When losses were computed, by the runtime's clock."""

    wants_firings = True

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_fired(self, event: Fired) -> None:
        if event.node.partition("#")[0] == "loss" and event.direction == "forward":
            self.times.append(event.end_s)


def record_parts(work: stages.Work) -> dict[str, Costs]:
    """Costs of as many parts as there are: of whole minibatches, and of pieces, by system."""
    with closing(gt.Hosts(work.parts, kernel_threads=1)) as runtime:
        found = {s: _recorded_parts(work, s, runtime) for s in ("async:1", *DRAINED[1:])}
    # Alone, a minibatch is at a worker or on its way: to each next part and back, and to and from
    # the program that admits.
    events, reply = found["async:1"]
    *_, worked = (event for event in events if event["event"] == "Worked")
    busy_s = worked["seconds"] * work.parts - sum(worked["waiting"])
    way_s = work.batch / reply["rows_per_second"] - busy_s / work.minibatches
    message_s = max(0.0, way_s) / (2 * work.parts)
    return {
        system: Costs(recorded(events).nodes, message_s, reply["rows_per_second"])
        for system, (events, reply) in found.items()
    }


def _recorded_parts(
    work: stages.Work, system: str, runtime: AbstractRuntime
) -> tuple[Sequence[Mapping[str, Any]], Line]:
    return _logged(lambda log: stages.ours(work, system, runtime, "stashed", [log], _EPOCHS))


def record_copies(work: copies.Work, n: int) -> Costs:
    """Costs of as many copies as there will be: more than cores get less of these."""
    with closing(gt.Hosts(n, kernel_threads=1)) as runtime:
        events, reply = _recorded_copies(work, n, runtime)
    return Costs(recorded(events).nodes, 0.0, reply["rows_per_second"])


def _recorded_copies(
    work: copies.Work, n: int, runtime: AbstractRuntime
) -> tuple[Sequence[Mapping[str, Any]], Line]:
    return _logged(lambda log: copies.ours(work, n, runtime, [log], _EPOCHS))


def _logged(run: Any) -> tuple[Sequence[Mapping[str, Any]], Line]:
    """The events of a run, and its reply."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        reply = run(JsonLog(path))
        return read_json_log(path), reply


def foreseen_parts(work: stages.Work, system: str, link: Link, costs: Costs) -> float:
    """Rows a second of parts on imagined hosts; the program is on the first of them."""
    losses = Losses()
    runtime = gt.Simulated(work.parts, costs=costs.on(link), parent=0)
    stages.ours(work, system, runtime, "stashed", [losses])
    name, _, number = system.partition(":")
    rows = work.batch // int(number) if name == "drained" else work.batch
    a = work.warm_up * work.batch // rows - 1
    times = losses.times
    return (len(times) - 1 - a) * rows / (times[-1] - times[a])


def foreseen_copies(work: copies.Work, n: int, link: Link, costs: Costs) -> float:
    """Rows a second of copies on imagined hosts; the program has one more."""
    losses = Losses()
    copies.ours(work, n, gt.Simulated(n, costs=costs.on(link), parent=n), [losses])
    times = sorted(losses.times)
    began = len(times) // 10
    return (len(times) - 1 - began) * work.batch / (times[-1] - times[began])


def foreseen_all_reduce(work: copies.Work, n: int, link: Link, costs: Costs) -> float:
    """Rows a second of gloo's all-reduce, where each step around the ring is asked for first."""
    losses = Losses()
    asked = replace(costs.on(link), latency_s=2 * link.latency_s, collective="ring")
    copies.ours(replace(work, exchange="all-reduce"), n, gt.Simulated(n, costs=asked), [losses])
    times = sorted(losses.times)
    began = len(times) // 10
    return (len(times) - 1 - began) * work.batch / (times[-1] - times[began])


def all_reduced(
    work: copies.Work, n: int, over: Sequence[Link], device_ms: float
) -> Iterator[Line]:
    """``DistributedDataParallel`` over each kind of link, by costs of copies on one host."""
    costs = _recorded_here(work, n, device_ms)
    for link in over:
        with Hosts(n + 1, link, sysctl=SYSCTL) as hosts, Busy() as busy:
            measured = trial(work, "ddp", hosts, [device_ms] * n)
            late = hosts.late()
        yield {
            "case": f"{n} copies, DDP over gloo",
            "measured": measured["rows_per_second"],
            "foreseen": foreseen_all_reduce(work, n, link, costs),
            "late": late,
            "busy": busy.share,
            "device_ms": device_ms,
            **_about(link, costs),
        }


def _recorded_here(work: copies.Work, n: int, device_ms: float) -> Costs:
    """As ``record_copies``, on devices that take so long."""
    os.environ[copies.DEVICE_MS] = f"{device_ms:g}"  # of workers that this process starts
    try:
        return record_copies(work, n)
    finally:
        del os.environ[copies.DEVICE_MS]  # in what is foreseen nobody sleeps


def pipelines(work: stages.Work, over: Sequence[Link]) -> Iterator[Line]:
    """Parts over each kind of link; the program is on the first host."""
    with Hosts(work.parts, sysctl=SYSCTL) as hosts, hosts[0].inside():
        recordings = record_parts(work)
        there = [gt.Host(host.address, command=host.prefix) for host in hosts]
        address = hosts[0].address
        with closing(gt.Hosts(there, address=address, kernel_threads=1)) as runtime:
            for link in over:
                hosts.become(link)
                systems = (f"async:{work.parts}", f"async:{few_in_flight(work, link)}", *DRAINED)
                for system in dict.fromkeys(systems):
                    costs = recordings.get(system, recordings["async:1"])
                    with Busy() as busy:
                        events, reply = _recorded_parts(work, system, runtime)
                    own = replace(costs, nodes=recorded(events).nodes)
                    yield {
                        "case": f"{work.parts} parts, {system}",
                        "measured": reply["rows_per_second"],
                        "foreseen": foreseen_parts(work, system, link, costs),
                        "by_own": foreseen_parts(work, system, link, own),
                        "late": hosts.late(),
                        "busy": busy.share,
                        "device_ms": work.device_ms,
                        **_about(link, costs),
                    }


def neighbouring(
    work: copies.Work, n: int, over: Sequence[Link], device_ms: float
) -> Iterator[Line]:
    """Copies over each kind of link; the program has a host of its own."""
    slept = f"{copies.DEVICE_MS}={device_ms:g}"
    with Hosts(n + 1, sysctl=SYSCTL) as hosts, hosts[n].inside():
        costs = _recorded_here(work, n, device_ms)
        there = [gt.Host(h.address, command=(*h.prefix, "env", slept)) for h in hosts[:n]]
        address = hosts[n].address
        with closing(gt.Hosts(there, address=address, kernel_threads=1)) as runtime:
            for link in over:
                hosts.become(link)
                with Busy() as busy:
                    events, reply = _recorded_copies(work, n, runtime)
                own = replace(costs, nodes=recorded(events).nodes)
                yield {
                    "case": f"{n} copies, {work.exchange}",
                    "measured": reply["rows_per_second"],
                    "foreseen": foreseen_copies(work, n, link, costs),
                    "by_own": foreseen_copies(work, n, link, own),
                    "exchanges": reply["meetings_per_gradient"],
                    "late": hosts.late(),
                    "busy": busy.share,
                    "device_ms": device_ms,
                    **_about(link, costs),
                }


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: a row a case."""
    yield (
        "| case | one way | Mbit/s | measured, rows/s | foreseen | foreseen to measured "
        "| with its own costs | cores busy |"
    )
    yield "|" + "---|" * 8
    by: dict[tuple[str, float, float], list[Line]] = {}
    for x in lines:
        by.setdefault((x["case"], x["latency_s"], x["bits_per_s"]), []).append(x)
    within = {"foreseen": 0, "by_own": 0}
    for (case, latency_s, bits), some in by.items():
        real = statistics.median(x["measured"] for x in some)
        told = statistics.median(x["foreseen"] for x in some)
        ratios = {
            of: statistics.median(x[of] / x["measured"] for x in some)
            for of in within
            if of in some[0]
        }
        for of, ratio in ratios.items():
            within[of] += abs(ratio - 1) <= 0.15
        yield (
            f"| {case} | {latency_s * 1e3:g} ms | {bits / 1e6:g} | {real:,.0f} | {told:,.0f} "
            f"| {ratios['foreseen']:.2f} | "
            + (f"{ratios['by_own']:.2f} " if "by_own" in ratios else "")
            + (f"| {max(x['busy'] for x in some):.0%} |" if "busy" in some[0] else "| |")
        )
    yield (
        f"\n{within['foreseen']} of {len(by)} within 15 %; {within['by_own']} with their own costs."
    )


def main(words: Sequence[str] | None = None) -> None:
    given = _arguments(words)
    torch.set_num_threads(1)
    run(given, _lines, table)


def _about(link: Link, costs: Costs) -> Line:
    return {
        "latency_s": link.latency_s,
        "bits_per_s": link.bits_per_s,
        "message_s": costs.message_s,
        "recorded": costs.throughput,
    }


def _lines(given: argparse.Namespace) -> Iterator[Line]:
    part = stages.Work(
        data=given.data,
        hidden=128,
        device_ms=given.part_ms,
        rate=0.001,
        minibatches=given.minibatches,
        steps=given.minibatches // 3,
    )
    copy = copies.Work(data=given.data, steps=given.steps)
    for number in range(given.rounds):
        for parts in given.parts:
            for line in pipelines(replace(part, parts=parts), links(given)):
                yield line | {"round": number}
        for n, exchange in product(given.copies, given.exchanges):
            at = replace(copy, exchange="weights" if exchange == "ddp" else exchange)
            measured = all_reduced if exchange == "ddp" else neighbouring
            for line in measured(at, n, links(given), given.copy_ms):
                yield line | {"round": number}


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "forecasts")
    add_links(made, [1, 10, 50], [1000, 100])
    made.add_argument("--parts", type=int, nargs="*", default=[2, 4])
    made.add_argument("--copies", type=int, nargs="*", default=[2, 4, 8])
    made.add_argument("--exchanges", nargs="+", default=["weights"], help="ddp: torch's")
    made.add_argument("--part-ms", type=float, default=24.0, help="slept, for a minibatch")
    made.add_argument("--copy-ms", type=float, default=160.0, help="slept, for a copy's step")
    made.add_argument("--minibatches", type=int, default=90, help="of parts")
    made.add_argument("--steps", type=int, default=60, help="of each copy")
    made.add_argument("--rounds", type=int, default=1)
    return made.parse_args(words)


if __name__ == "__main__":
    from benchmarks.cluster import forecasts

    forecasts.main()  # of the module that workers import
