"""Which method against late gradients pays: whole trainings of the pipelines, on a virtual clock.

    python -m benchmarks.cluster.late --data DIR

    parts       those of pipelines.py, on imagined hosts: a firing takes what it takes on the bench,
                links their latency, so gradients are as late as there
    methods     methods.py, each at every rate and momentum; ``plain``: nothing late. All have equal
                numbers of minibatches
    judged      mean of the last losses; unseen digits; minibatches and virtual seconds until the
                loss that plain training has after three quarters of its minibatches

Nothing is timed, so the machine may be busy. A line of JSON a training goes to results/late.jsonl.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

import torch

import geartrain as gt
from benchmarks.cluster.lines import Line, parser, run
from benchmarks.cluster.methods import METHODS
from benchmarks.cluster.pipelines import LONG_RISE, best_plain
from benchmarks.cluster.stages import SMOOTH, Work, first_to_reach, ours, plain

STAGE_S: Final = (0.016, 0.034)
"""Forward and backward of all parts together, for a minibatch: on the bench 50 ms."""


def simulated(parts: int, latency_s: float) -> gt.Simulated:
    """Hosts that take as long as those of the bench."""
    nodes = {"minibatch": (0.0, 0.0), "loss": (0.0, 0.0), "loss backward": (0.0, 0.0)}
    for k in range(parts):
        nodes[f"part {k}"] = (STAGE_S[0] / parts, 0.0)
        nodes[f"part {k} backward"] = (STAGE_S[1] / parts, 0.0)
    costs = gt.Costs(firing_s=0.0, row_s=0.0, nodes=nodes, backward=0.0, latency_s=latency_s)
    return gt.Simulated(parts, costs=costs)


def trained(work: Work, in_flight: int, method: str, latency_s: float) -> Line:
    """One training from beginning to end."""
    runtime = simulated(work.parts, latency_s)
    found = ours(work, f"async:{in_flight}", runtime, method)
    found.pop("rows_per_second")  # of this machine, not of the hosts
    found["losses"] = [round(loss, 5) for loss in found["losses"]]
    return {"system": f"async:{in_flight}", "latency_s": latency_s, **found}


def waiting_s(line: Line) -> float:
    """Seconds of a minibatch that goes alone."""
    there_and_back = 2 * (line["parts"] - 1) * line["latency_s"]
    return there_and_back + sum(STAGE_S)


def seconds_to(line: Line, minibatches: int) -> float:
    """Virtual seconds until so many minibatches are through."""
    whole = line["minibatches"]
    alone = round(METHODS[line["method"]].alone * whole)
    each = (line["seconds"] - alone * waiting_s(line)) / (whole - alone)
    return min(minibatches, alone) * waiting_s(line) + max(0, minibatches - alone) * each


Key = tuple[int, int, float, int, int]


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: of each method the rate and momentum that have the lowest loss at the end."""
    yield (
        "| wide | parts | one way | in flight | minibatches | method | rate, momentum | staleness "
        "| loss | unseen | to plain's loss at 3/4: samples | waiting takes as long, times |"
    )
    yield "|" + "---|" * 12
    late = [x for x in lines if x["system"] != "plain"]
    for key in sorted({_key(x) for x in late}):
        plain = best_plain(
            [x for x in lines if x["hidden"] == key[0] and math.isfinite(x["test_loss"])]
        )
        yield (
            f"| {key[0]} | | | | {plain['minibatches']} | plain | {plain['rate']:g}, "
            f"{plain['momentum']:g} | | {plain['last']:.4f} | {plain['test_loss']:.4f} | | |"
        )
        here = [x for x in late if _key(x) == key]
        rows = [_row(here, key, name, plain) for name in dict.fromkeys(x["method"] for x in here)]
        yield from (row for _, row in sorted(rows))


def _key(line: Line) -> Key:
    in_flight = int(line["system"].partition(":")[2])
    return line["hidden"], line["parts"], line["latency_s"], in_flight, line["minibatches"]


def _row(lines: Sequence[Line], key: Key, method: str, plain: Line) -> tuple[float, str]:
    mine = [x for x in lines if x["method"] == method]
    best = min(mine, key=last)
    reached = first_to_reach(best["losses"], plain["target"])
    took = "never | "
    if reached is not None:
        theirs = plain["until"] * waiting_s(best)
        took = f"{reached / plain['until']:.2f} times | {theirs / seconds_to(best, reached):.2f}"
    return last(best), (
        f"| {key[0]} | {key[1]} | {key[2] * 1e3:g} ms | {key[3]} | {key[4]} | {method} "
        f"| {best['rate']:g}, {best['momentum']:g} of {len(mine)} "
        f"| {max(best['staleness'].values()):.1f} | {last(best):.4f} | {best['test_loss']:.4f} "
        f"| {took} |"
    )


def last(line: Line) -> float:
    """Mean of the last losses; infinite if they are no numbers."""
    found = statistics.fmean(line["losses"][-SMOOTH:])
    return found if math.isfinite(found) else math.inf


def main(words: Sequence[str] | None = None) -> None:
    given = _arguments(words)
    torch.set_num_threads(1)
    run(given, _lines, table)


def _lines(given: argparse.Namespace) -> Iterator[Line]:
    for method in given.methods:
        for momentum in given.momenta:
            for rate in given.rates:
                rising = given.rising or (LONG_RISE if given.in_flight > 4 else Work.rising)
                work = Work(
                    data=given.data,
                    hidden=given.hidden,
                    parts=given.parts,
                    rate=rate,
                    momentum=momentum,
                    rising=Work.rising if method == "plain" else rising,
                    minibatches=given.minibatches,
                )
                about = {"method": method, **asdict(work), "data": work.data is not None}
                try:
                    if method == "plain":
                        yield {"system": "plain", **about, **plain(work)}
                        continue
                    yield about | trained(work, given.in_flight, method, given.latency_ms * 1e-3)
                except gt.NonFiniteError as error:
                    print(f"{method}, {rate}, {momentum}: {error}", file=sys.stderr)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "late")
    made.add_argument("--parts", type=int, default=2)
    made.add_argument("--latency-ms", type=float, default=50.0, help="one way")
    made.add_argument("--in-flight", type=int, default=7)
    made.add_argument("--methods", nargs="+", default=["plain", *METHODS])
    made.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    made.add_argument("--momenta", type=float, nargs="+", default=[0.9])
    made.add_argument("--rising", type=int, help="minibatches over which the rate rises")
    made.add_argument("--hidden", type=int, default=Work.hidden)
    made.add_argument("--minibatches", type=int, default=Work.minibatches)
    return made.parse_args(words)


if __name__ == "__main__":
    main()
