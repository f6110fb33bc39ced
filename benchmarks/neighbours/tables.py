"""Lines of the trials as Markdown tables and figures.

scale ─► bytes and throughput by copies      accuracy ─► by method and copies
stragglers ─► virtual seconds to a target    clock ─► virtual against wall-clock seconds
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from geartrain.observe.curves import require_matplotlib
from geartrain.observe.graphs import draw_topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line: TypeAlias = Mapping[str, Any]
Lines: TypeAlias = Mapping[str, Sequence[Line]]

TARGET: Final = 0.93
SYNCHRONOUS: Final = "all-reduce"
_COLOURS: Final = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def page_of(lines: Lines) -> Iterator[str]:
    """All tables for which there are lines."""
    for name, table in (
        ("Scale", scale_table(lines["scale"])),
        ("Rates", accuracy_table(_best(lines["rates"]))),
        ("Accuracy", accuracy_table(lines["accuracy"])),
        ("Photographs", accuracy_table(lines.get("cifar", []))),
        ("Stragglers", straggler_table(lines["stragglers"])),
        ("Meetings", meetings_table([*lines["accuracy"], *lines["stragglers"]])),
        ("Clock", clock_table(lines["clock"])),
    ):
        if table:
            yield from (f"{name}:", "", *table, "")


def scale_table(lines: Sequence[Line]) -> list[str]:
    """A row for each model, method and topology; a column for each number of copies."""
    if not lines:
        return []
    alone = {
        _model(line): line["instances"] / line["seconds"]
        for line in lines
        if line["method"] == "alone"
    }
    counts = sorted({line["copies"] for line in lines if line["method"] != "alone"})
    cells: dict[tuple[str, str, str], dict[int, Line]] = {}
    for line in lines:
        if line["method"] != "alone":
            topology = line["topology"] if line["method"] != SYNCHRONOUS else "-"
            row = cells.setdefault((_model(line), line["method"], topology), {})
            row[line["copies"]] = line
    head = ["minibatch", "method", "topology", "what", *(f"n={n}" for n in counts)]
    rows = []
    for (model, method, topology), row in cells.items():
        sent = [_megabytes(row.get(n)) for n in counts]
        rows.append([model, method, topology, "MB a worker and step", *sent])
        share = [
            f"{row[n]['instances'] / row[n]['seconds'] / n / alone[model]:.0%}" if n in row else "-"
            for n in counts
        ]
        rows.append([model, method, topology, "of linear", *share])
    return _markdown(head, rows)


def accuracy_table(lines: Sequence[Line]) -> list[str]:
    """Accuracy in the end by method and copies, beside that of synchronous training."""
    counts = sorted({line["copies"] for line in lines})
    methods = dict.fromkeys(line["method"] for line in lines)
    rows = []
    for method in methods:
        row = [method]
        for n in counts:
            ends, synchronous = ends_of(lines, method, n), ends_of(lines, SYNCHRONOUS, n)
            rate = {line["rate"] for line in lines if _is(line, method, n)}
            row += [spread(ends), _points(ends, synchronous), "/".join(f"{r:g}" for r in rate)]
            row.append(_distance(lines, method, n))
        rows.append(row)
    head = ["method"]
    for n in counts:
        head += [f"n={n}", "points", "rate", "distance"]
    return _markdown(head, rows) if rows else []


def straggler_table(lines: Sequence[Line]) -> list[str]:
    """Virtual seconds to the target with one copy at full and at lesser speed; else copy 0."""
    extra: dict[str, dict[int, float]] = {}
    rows = []
    for method, copy in dict.fromkeys((line["method"], line.get("slow_copy", 0)) for line in lines):
        times: dict[float, dict[int, float]] = {}
        for line in lines:
            same = line["slow"] == 1 or line.get("slow_copy", 0) == copy
            if line["method"] == method and same:
                times.setdefault(line["slow"], {})[line["seed"]] = seconds_to(line, TARGET)
        slow, name = min(times), f"{method}, copy {copy} slow" if copy else method
        seeds = sorted(times[slow].keys() & times.get(1.0, {}).keys())
        extra[name] = {seed: times[slow][seed] - times[1.0][seed] for seed in seeds}
        columns = times.get(1.0, {}), times[slow], extra[name]
        rows.append([name, *(_seconds(list(column.values())) for column in columns)])
    for row in rows:
        ratios = [
            extra[row[0]][seed] / extra[SYNCHRONOUS][seed]
            for seed in sorted(extra[row[0]].keys() & extra.get(SYNCHRONOUS, {}).keys())
        ]
        row.append(_numbers(ratios))
    head = ["method", "all equal", "one at a quarter", "extra", "extra / all-reduce's"]
    return _markdown(head, rows) if rows else []


def meetings_table(lines: Sequence[Line]) -> list[str]:
    """How often copies met, of the lines that say so; medians."""
    told = [x for x in lines if x["history"] and x["exchanged"].get("meetings_per_gradient")]
    kinds = dict.fromkeys((x["method"], x["copies"], x["slow"]) for x in told)
    rows = []
    for method, copies, slow in kinds:
        here = [
            x["exchanged"]
            for x in told
            if (x["method"], x["copies"], x["slow"]) == (method, copies, slow)
        ]

        def middle(values: Iterator[float]) -> float:
            return statistics.median(list(values))

        rows.append(
            [
                method,
                str(copies),
                "no" if slow == 1 else f"one at {slow:g}",
                f"{middle(x['meetings_per_gradient'] for x in here):.2f}",
                f"{middle(x['letters']['declined'] for x in here):.0f} of "
                f"{middle(x['letters']['sent'] for x in here):,.0f}",
                f"{middle(x['bytes_per_gradient'] for x in here) / 1e6:.2f}",
                f"{middle(x['distance'] for x in here):.2g}",
            ]
        )
    head = [
        "method",
        "copies",
        "slow",
        "meetings a copy and minibatch",
        "declined",
        "MB",
        "distance",
    ]
    return _markdown(head, rows) if rows else []


def clock_table(lines: Sequence[Line]) -> list[str]:
    """Virtual and wall-clock seconds of equal trials."""
    rows = []
    for method, copies in dict.fromkeys((line["method"], line["copies"]) for line in lines):
        here = [x for x in lines if (x["method"], x["copies"]) == (method, copies)]
        wall = [x["seconds"] for x in here if x["runtime"] == "threads"]
        virtual = [x["seconds"] for x in here if x["runtime"] == "simulated"]
        if wall and virtual:
            error = virtual[0] / statistics.median(wall) - 1
            rows.append([str(copies), method, _seconds(wall), _seconds(virtual), f"{error:+.0%}"])
    head = ["workers", "method", "threads", "virtual", "error"]
    return _markdown(head, rows) if rows else []


def _best(lines: Sequence[Line]) -> list[Line]:
    """Of each method and number of copies, the rate that ended best."""
    found: dict[tuple[str, int], Line] = {}
    for line in lines:
        if line["history"]:
            key = line["method"], line["copies"]
            found[key] = max(found.get(key, line), line, key=_end)
    return list(found.values())


def _end(line: Line) -> float:
    return float(line["history"][-1]["accuracy"])


def ends_of(lines: Sequence[Line], method: str, copies: int) -> list[float]:
    """Accuracies in the end, by seed; of a training that failed, nothing."""
    found = [x for x in lines if _is(x, method, copies) and x["history"]]
    ends = sorted(found, key=lambda x: x["seed"])
    return [x["history"][-1]["accuracy"] for x in ends]


def seconds_to(line: Line, target: float) -> float:
    """Virtual seconds to an accuracy, on a straight line between evaluations; infinite: never."""
    before = (0.0, 0.0)
    for entry in line["history"]:
        now = (entry["seconds"], entry["accuracy"])
        if now[1] >= target:
            share = (target - before[1]) / (now[1] - before[1])
            return float(before[0] + share * (now[0] - before[0]))
        before = now
    return math.inf


def spread(values: Sequence[float]) -> str:
    """Median, least and most of shares."""
    if not values:
        return "failed"
    middle = f"{statistics.median(values):.1%}"
    return f"{middle} ({min(values):.1%}..{max(values):.1%})" if len(values) > 1 else middle


def draw(folder: Path, lines: Lines) -> None:
    """Write topology.png and time.png (accuracy against virtual seconds).

    Raises:
        GeartrainError: matplotlib is not installed.
    """
    draw_topology(folder / "torus.png", "torus", 16, "16 copies on a torus")
    draw_topology(folder / "ring.png", "ring", 16, "16 copies on a ring")
    if lines["stragglers"]:
        _draw_time(folder / "time.png", lines["stragglers"])
    if lines["scale"]:
        _draw_scale(folder / "scale.png", lines["scale"])


def _draw_time(path: Path, lines: Sequence[Line]) -> None:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    speeds = sorted({line["slow"] for line in lines}, reverse=True)
    panels = figure.subplots(1, len(speeds), sharey=True, sharex=True, squeeze=False)[0]
    for panel, slow in zip(panels, speeds, strict=True):
        for number, method in enumerate(dict.fromkeys(line["method"] for line in lines)):
            runs = [x for x in lines if (x["method"], x["slow"]) == (method, slow)]
            _draw_runs(panel, runs, method, _COLOURS[number % len(_COLOURS)])
        panel.axhline(TARGET, color="0.5", linestyle="--", linewidth=1)
        panel.set_title("all equally fast" if slow == 1 else f"one at {slow:g} of the speed")
        panel.set_xlabel("virtual seconds")
    panels[0].set_ylabel("accuracy of the consensus")
    panels[0].set_ylim(0.8, 1.0)
    panels[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path)


def _draw_runs(panel: Axes, runs: Sequence[Line], method: str, colour: str) -> None:
    for k, run in enumerate(runs):
        x = [entry["seconds"] for entry in run["history"]]
        y = [entry["accuracy"] for entry in run["history"]]
        label = method if k == 0 else None
        panel.plot(x, y, color=colour, marker="o", markersize=3, linewidth=1.2, label=label)
    panel.grid(color="0.9", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_scale(path: Path, lines: Sequence[Line]) -> None:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    alone = {_model(x): x["instances"] / x["seconds"] for x in lines if x["method"] == "alone"}
    kinds = dict.fromkeys((_model(x), x["method"], x["topology"]) for x in lines)
    drawn = [kind for kind in kinds if kind[1] != "alone"]
    model = drawn[0][0]
    for number, (_, method, topology) in enumerate(kind for kind in drawn if kind[0] == model):
        mine = [
            x for x in lines if (_model(x), x["method"], x["topology"]) == (model, method, topology)
        ]
        mine.sort(key=lambda x: x["copies"])
        counts = [x["copies"] for x in mine]
        label = method if method == SYNCHRONOUS else f"{method}, {topology}"
        style = {"marker": "o", "color": _COLOURS[number % len(_COLOURS)], "label": label}
        sent = [x["exchanged"]["bytes_per_gradient"] / 1e6 for x in mine]
        left.plot(counts, sent, **style)
        share = [x["instances"] / x["seconds"] / x["copies"] / alone[model] for x in mine]
        right.plot(counts, share, **style)
    left.set_ylabel("MB a worker and minibatch")
    right.set_ylabel("throughput, share of linear")
    right.set_ylim(0, 1.05)
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlabel(f"copies ({model})")
        panel.grid(color="0.9", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    left.set_ylim(0, None)
    right.legend(
        frameon=False, loc="lower left"
    )  # below its curves; those of the left are all over
    figure.savefig(path)


def _is(line: Line, method: str, copies: int) -> bool:
    return bool(line["method"] == method and line["copies"] == copies)


def _model(line: Line) -> str:
    return f"{line['options']['batch']} images"


def _megabytes(line: Line | None) -> str:
    return "-" if line is None else f"{line['exchanged']['bytes_per_gradient'] / 1e6:.2f}"


def _points(ends: Sequence[float], synchronous: Sequence[float]) -> str:
    if not ends or not synchronous:
        return "-"
    return f"{100 * (statistics.median(ends) - statistics.median(synchronous)):+.1f}"


def _distance(lines: Sequence[Line], method: str, copies: int) -> str:
    found = [x["exchanged"]["distance"] for x in lines if _is(x, method, copies) and x["history"]]
    known = [value for value in found if value is not None]
    return f"{statistics.median(known):.2g}" if known else "-"


def _seconds(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values) or not finite:
        return f"not reached by {len(values) - len(finite)} of {len(values)}"
    return _numbers(finite) + " s"


def _numbers(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "-"
    middle = f"{statistics.median(finite):.2f}"
    return f"{middle} ({min(finite):.2f}..{max(finite):.2f})" if len(finite) > 1 else middle


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
