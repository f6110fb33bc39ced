"""Which system is first at a loss: all tuned on a virtual clock, then raced over slow links.

    sudo PYTHONPATH=src python -m benchmarks.cluster.race tune --data DIR --parts 4 --latency-ms 50
    sudo PYTHONPATH=src python -m benchmarks.cluster.race run --data DIR --parts 4 --latency-ms 50
    PYTHONPATH=src python -m benchmarks.cluster.race imagine --data DIR --parts 4 --latency-ms 50

    tune   for parts and a link: as many trials for synchronous training as for asynchronous, of all
           settings (``OPTIONS``); two thirds are drawn, the others are neighbours of the best so
           far, and longer while none is there. Hosts are imagined, so the machine may be busy; a
           call goes on where one stopped
    run    both at their best, with other weights and minibatches than were tuned with. Synchronous
           systems have the losses of plain training (tests say so), so that is what they need of
           minibatches, and each is timed over the links for some seconds; asynchronous training
           goes from beginning to end over the links
    imagine  the race on the virtual clock alone
    target the mean loss of the last ``SMOOTH_ROWS`` digits, before their step, is as low

Devices sleep, as there are more parts than cores. A line of JSON a trial goes to
results/tuned.jsonl, a line a system and round to results/race.jsonl; ``--table`` prints what is
there.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, final

import torch

import geartrain as gt
from benchmarks.cluster import stages
from benchmarks.cluster.hosts import Hosts, Link
from benchmarks.cluster.lines import Line, add_links, links, parser, read
from benchmarks.cluster.lines import run as run_lines
from benchmarks.cluster.pipelines import PEERS, SYSCTL, ours, peers, steps_of
from benchmarks.cluster.stages import Work, first_to_reach

SMOOTH_ROWS: Final = 5_000
DEVICE_MS: Final = 48.0
"""That all devices together sleep for 100 rows."""
METHODS: Final = ("stashed", "predicted", "annealed", "pipemare", "spike", "compensated")
OPTIONS: Final[Mapping[str, Sequence[Any]]] = {
    "batch": (50, 100, 200, 400),
    "rows": (90_000, 120_000, 160_000, 240_000, 320_000, 480_000),
    "rate": (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6),
    "momentum": (0.0, 0.5, 0.8, 0.9),
    "rising": (0.05, 0.1, 0.2, 0.35),
    "fill": (0.25, 0.5, 0.75, 1.0),
    "method": METHODS,
}
"""Of settings, in an order; synchronous training has no ``fill`` and no ``method``."""
ASYNCHRONOUS: Final = ("fill", "method")
DRAWN: Final = 2 / 3
"""Of trials; the others are neighbours of the best."""
MICROBATCHES: Final = (1, 2, 4)


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """What is tuned.

    Args:
        batch: Rows of a minibatch.
        rows: Of a training; the learning rate falls to nothing over them.
        rate, momentum: Of SGD.
        rising: Share of the training in which the rate rises.
        fill: Rows in flight, as a share of those with which the slowest device is always busy; None
            for synchronous training.
        method: What is done about late gradients.
    """

    batch: int
    rows: int
    rate: float
    momentum: float
    rising: float
    fill: float | None = None
    method: str | None = None

    def work(self, data: str | None, parts: int, seed: int = 0) -> Work:
        """A training with these settings."""
        minibatches = self.rows // self.batch
        return Work(
            data=data,
            hidden=128,
            batch=self.batch,
            parts=parts,
            rate=self.rate,
            momentum=self.momentum,
            rising=max(1, round(self.rising * minibatches)),
            minibatches=minibatches,
            device_ms=DEVICE_MS * self.batch / 100,
            seed=seed,
        )

    def in_flight(self, parts: int, link: Link) -> int:
        """Minibatches; as many as parts at least."""
        device_s = DEVICE_MS * 1e-3 * self.batch / 100
        full = (device_s + travels_s(parts, link)) / (device_s / parts)
        return max(parts, round((self.fill or 0.0) * full))


def travels_s(parts: int, link: Link) -> float:
    """Seconds on links of a minibatch that goes alone, however small."""
    return 2 * (parts - 1) * link.latency_s


def drained_s(setting: Setting, parts: int, link: Link) -> float:
    """Seconds of a minibatch of a pipeline that is drained, in as many microbatches as pay.

    At least: nothing but devices and links, in the best order.
    """
    device_s = DEVICE_MS * 1e-3 * setting.batch / 100
    return travels_s(parts, link) + min(device_s / m * (1 + (m - 1) / parts) for m in MICROBATCHES)


def imagined(setting: Setting, parts: int, link: Link) -> gt.Simulated:
    """Hosts whose devices take as long as those of the race."""
    device_s = DEVICE_MS * 1e-3 * setting.batch / 100 / parts
    nodes = {"minibatch": (0.0, 0.0), "loss": (0.0, 0.0), "loss backward": (0.0, 0.0)}
    for k in range(parts):
        nodes[f"part {k}"] = (device_s / 3, 0.0)
        nodes[f"part {k} backward"] = (device_s * 2 / 3, 0.0)
    costs = gt.Costs(firing_s=0.0, row_s=0.0, nodes=nodes, backward=0.0, latency_s=link.latency_s)
    return gt.Simulated(parts, costs=costs)


def reached(losses: Sequence[float], batch: int, target: float) -> int | None:
    """Minibatches until the mean loss of so many rows is as low."""
    return first_to_reach(losses, target, SMOOTH_ROWS // batch)


def tried(
    setting: Setting, data: str | None, parts: int, link: Link, target: float, seed: int = 0
) -> Line:
    """One training on imagined hosts: seconds to the target, and the loss at the end."""
    work = setting.work(data, parts, seed)
    line: Line = {"seconds": None, "minibatches": None, "last": None}
    try:
        if setting.method is None:
            found = stages.plain(replace(work, device_ms=0.0))
            each_s = drained_s(setting, parts, link)
        else:
            runtime = imagined(setting, parts, link)
            system = f"async:{setting.in_flight(parts, link)}"
            found = stages.ours(replace(work, device_ms=0.0), system, runtime, setting.method)
            each_s = found["seconds"] / work.minibatches
    except gt.NonFiniteError:
        return line
    last = statistics.fmean(found["losses"][-SMOOTH_ROWS // setting.batch :])
    if math.isfinite(last):
        line["last"] = round(last, 5)
    line["minibatches"] = many = reached(found["losses"], setting.batch, target)
    if many is not None:
        line["seconds"] = many * each_s
    return line


def worth(line: Line) -> tuple[float, float]:
    """What is least is best: seconds, or the loss of one that has not come so far.

    One that was there for a moment, with minibatches that were easy, and not at its end, would not
    be there with others.
    """
    last = math.inf if line["last"] is None else line["last"]
    stays = line["seconds"] is not None and last <= line["target"]
    return (line["seconds"] if stays else math.inf), last


def next_setting(so_far: Sequence[Line], trials: int, *, late: bool) -> Setting:
    """What is to be tried after these trials of so many; the same each time."""
    draw = random.Random(f"{late} {len(so_far)}")
    names = [name for name in OPTIONS if late or name not in ASYNCHRONOUS]
    known = [line["setting"] for line in so_far]
    while True:
        if len(so_far) < DRAWN * trials:
            told = {name: draw.choice(OPTIONS[name]) for name in names}
        else:
            first = min(so_far, key=worth)
            told = dict(first["setting"])
            for name in draw.sample(names, draw.choice((1, 1, 2))):
                told[name] = _beside(name, told[name], draw)
            if math.isinf(worth(first)[0]):  # nobody is there yet
                longer = [rows for rows in OPTIONS["rows"] if rows > first["setting"]["rows"]]
                told["rows"] = (longer or [told["rows"]])[0]
        setting = Setting(**told)
        if asdict(setting) not in known:
            return setting


def _beside(name: str, value: Any, draw: random.Random) -> Any:
    options = OPTIONS[name]
    if name == "method":
        return draw.choice(options)
    k = options.index(value)
    return draw.choice(options[max(0, k - 1) : k] + options[k + 1 : k + 2])


def tuning(given: argparse.Namespace) -> Iterator[Line]:
    """The trials that are left, as many as the call may make."""
    left = given.most
    for parts, link, late in product(given.parts, links(given), (False, True)):
        about = _about(parts, link) | {"late": late, "target": given.target}
        so_far = [x for x in read(given.tuned) if about.items() <= x.items()]
        while len(so_far) < given.trials and left:
            setting = next_setting(so_far, given.trials, late=late)
            found = tried(setting, given.data, parts, link, given.target)
            so_far.append(about | {"setting": asdict(setting)} | found)
            yield so_far[-1]
            left -= 1


def best(lines: Sequence[Line], about: Line, *, late: bool) -> tuple[Setting, int]:
    """The best setting of tuning, and of how many; it is the same for links of all rates.

    The clock of tuning has no rates, so others would be the same trials once more.

    Raises:
        LookupError: None has come to the target.
    """
    wanted = {key: x for key, x in about.items() if key != "bits_per_s"} | {"late": late}
    mine = [x for x in lines if wanted.items() <= x.items()]
    found = min(mine, key=worth, default=None)
    if found is None or math.isinf(worth(found)[0]):
        raise LookupError(f"{about}, late {late}: tune first; no trial has reached the target")
    return Setting(**found["setting"]), len(mine)


def imagining(given: argparse.Namespace) -> Iterator[Line]:
    """What the race would be on the virtual clock, seed by seed."""
    tuned = read(given.tuned)
    for number in given.seeds:
        for parts, link, late in product(given.parts, links(given), (False, True)):
            about = _about(parts, link) | {"target": given.target}
            setting, _ = best(tuned, about, late=late)
            told = about | {"late": late, "seed": number, "setting": asdict(setting)}
            yield told | tried(setting, given.data, parts, link, given.target, number)


def racing(given: argparse.Namespace) -> Iterator[Line]:
    """All systems, round by round, each round with a seed of its own."""
    tuned = read(given.tuned)
    for number in given.seeds:
        for parts, link in product(given.parts, links(given)):
            about = _about(parts, link) | {"target": given.target}
            for late in (False, True):
                setting, trials = best(tuned, about, late=late)
                told = about | {"seed": number, "setting": asdict(setting), "trials": trials}
                for line in _raced(setting, parts, link, number, given):
                    yield told | line


def _raced(
    setting: Setting, parts: int, link: Link, seed: int, given: argparse.Namespace
) -> Iterator[Line]:
    """One of the two, over real links; a line a system."""
    work = setting.work(given.data, parts, seed)
    work = replace(work, steps=steps_of(work, link))
    lines: list[Line]
    with Hosts(parts, link, sysctl=SYSCTL) as hosts:
        if setting.method is None:
            found = stages.plain(replace(work, device_ms=0.0))
            drained = [(f"drained:{m}", "stashed", {}) for m in given.microbatches]
            lines = [*peers(work, hosts, PEERS[parts][: given.peers]), *ours(work, hosts, drained)]
        else:
            trial = (f"async:{setting.in_flight(parts, link)}", setting.method, {})
            lines = [found] = list(ours(work, hosts, [trial]))
        late = hosts.late()
    many = reached(found["losses"], setting.batch, given.target)
    for line in lines:
        yield {
            "system": line["system"],
            "rows_per_second": line["rows_per_second"],
            "staleness": line.get("staleness"),
            "minibatches": many,
            "seconds": None if many is None else many * work.batch / line["rows_per_second"],
            "test_loss": found["test_loss"],
            "test_accuracy": found["test_accuracy"],
            "packets_late": late,
        }


def _about(parts: int, link: Link) -> Line:
    return {"parts": parts, "latency_s": link.latency_s, "bits_per_s": link.bits_per_s}


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: a row for parts and a link, the best synchronous system of a seed beside ours."""
    yield (
        "| parts | one way | Mbit/s | loss | synchronous | rows/s | rows | seconds | unseen "
        "| asynchronous | rows/s | rows | seconds | unseen | times as soon, by seed |"
    )
    yield "|" + "---|" * 15
    keys = ("parts", "latency_s", "bits_per_s", "target")
    by: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        by.setdefault(tuple(line[key] for key in keys), []).append(line)
    for (parts, latency_s, bits, target), some in sorted(by.items()):
        ours_ = [x for x in some if x["setting"]["method"] is not None]
        theirs = [x for x in some if x["setting"]["method"] is None]
        if not ours_ or not theirs:
            continue
        seeds = dict.fromkeys(x["seed"] for x in theirs)
        theirs = [
            max((x for x in theirs if x["seed"] == seed), key=lambda x: x["rows_per_second"])
            for seed in seeds
        ]
        pairs = [(a, b) for a in theirs for b in ours_ if a["seed"] == b["seed"]]
        times = [_seconds(a) / _seconds(b) for a, b in pairs]
        yield (
            f"| {parts} | {latency_s * 1e3:g} ms | {bits / 1e6:g} | {target:g} "
            f"| {_told(theirs)} | {_told(ours_)} "
            f"| **{statistics.median(times):.2f}** ({', '.join(f'{x:.2f}' for x in times)}) |"
        )


def _seconds(line: Line) -> float:
    return math.inf if line["seconds"] is None else line["seconds"]


def _told(lines: Sequence[Line]) -> str:
    """System, settings, rows a second, rows and seconds to the target, loss of unseen digits."""
    setting = Setting(**lines[-1]["setting"])
    how = "" if setting.method is None else f", {setting.method}"
    names = sorted({line["system"] for line in lines})
    rates = statistics.median(x["rows_per_second"] for x in lines)
    rows = [_rows(x) for x in lines]
    seconds = [_seconds(x) for x in lines]
    return (
        f"{' or '.join(names)}{how}: {setting.batch} rows, rate {setting.rate:g}, momentum "
        f"{setting.momentum:g}, rising {setting.rising:.0%} of {setting.rows:,} | {rates:,.0f} "
        f"| {statistics.median(rows):,.0f} | {statistics.median(seconds):.1f} "
        f"({min(seconds):.1f} to {max(seconds):.1f}) "
        f"| {statistics.fmean(x['test_loss'] for x in lines):.3f}"
    )


def _rows(line: Line) -> float:
    many = line["minibatches"]
    return math.inf if many is None else many * line["setting"]["batch"]


def main(words: Sequence[str] | None = None) -> None:
    given = _arguments(words)
    torch.set_num_threads(1)
    if given.what == "tune":
        given.out = given.tuned
        run_lines(given, tuning, _tuned)
    elif given.what == "imagine":
        given.out = given.tuned.with_name("imagined.jsonl")
        run_lines(given, imagining, _imagined)
    else:
        run_lines(given, racing, table)


def _tuned(lines: Sequence[Line]) -> Iterator[str]:
    """The best of each, as far as it has been tuned."""
    keys = ("parts", "latency_s", "bits_per_s", "target", "late")
    by: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        by.setdefault(tuple(line[key] for key in keys), []).append(line)
    for key, some in sorted(by.items()):
        yield f"{key}: {len(some)} trials, best {min(some, key=worth)}"


def _imagined(lines: Sequence[Line]) -> Iterator[str]:
    """Rows and virtual seconds of both by seed, and how many times as soon the second one is."""
    yield "| parts | one way | seed | synchronous: rows, seconds | asynchronous | times as soon |"
    yield "|" + "---|" * 6
    for a in (x for x in lines if not x["late"]):
        for b in (x for x in lines if x["late"]):
            if all(a[key] == b[key] for key in ("parts", "latency_s", "bits_per_s", "seed")):
                yield (
                    f"| {a['parts']} | {a['latency_s'] * 1e3:g} ms | {a['seed']} "
                    f"| {_rows(a):,.0f}, {_seconds(a):.1f} | {_rows(b):,.0f}, {_seconds(b):.1f} "
                    f"| {_seconds(a) / _seconds(b):.2f} |"
                )


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "race")
    made.add_argument("what", choices=["tune", "imagine", "run"])
    add_links(made, [10, 50], [1000])
    made.add_argument("--parts", type=int, nargs="+", default=[2, 4])
    made.add_argument("--target", type=float, default=0.07)
    made.add_argument("--tuned", type=Path, default=Path(__file__).parent / "results/tuned.jsonl")
    made.add_argument("--trials", type=int, default=32, help="of each, for parts and a link")
    made.add_argument("--most", type=int, default=-1, help="trials that this call makes")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a round each")
    made.add_argument("--peers", type=int, default=None, help="of torch's schedules, the first")
    made.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES, help="drained")
    return made.parse_args(words)


if __name__ == "__main__":
    main()
