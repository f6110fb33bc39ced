"""A run on one page: ``runs/<name>/`` in, a self-contained HTML file out.

    config.json    what was asked for                       optional, any JSON
    metrics.jsonl  JsonLog: curves, epochs, staleness       required
    trace.json     PerfettoTrace: who did what, when        optional
    graph.mmd      the graph as Mermaid source              optional

The page loads nothing, runs nothing, and suits light and dark.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final, final

from geartrain.engine.instrument import (
    Chosen,
    EpochEnded,
    Exchanged,
    Progress,
    Restored,
    RunEnded,
    RunStarted,
    Worked,
)
from geartrain.errors import DataError
from geartrain.files import read_bytes
from geartrain.graph.drawing import Outline
from geartrain.observe.charts import (
    Bars,
    ChartLine,
    Span,
    bar_chart,
    colour_class,
    lane_chart,
    line_chart,
)
from geartrain.observe.copies import copies_section
from geartrain.observe.drawn import MOST_DRAWN, drawn_graph
from geartrain.observe.figures import (
    count,
    duration,
    epochs,
    is_lower_better,
    measure,
    number,
    rate,
)
from geartrain.observe.jsonlog import read_json_log
from geartrain.observe.page import page, section, table, wide
from geartrain.observe.restarts import chosen_section, restarts_section
from geartrain.observe.timeline import Timeline, batch_size_label, read_timeline
from geartrain.observe.workers import (
    WorkSums,
    portions_section,
    traffic_section,
    workers_section,
)
from geartrain.schema import Mismatch, parsed, read

_EVENTS: Final = (RunStarted, Chosen, Progress, Exchanged, Restored, Worked, EpochEnded, RunEnded)
_KINDS: Final = {kind.__name__: kind for kind in _EVENTS}
_MOST_BYTES: Final = 64 << 20  # of a file that is shown as it is
_STALENESS_BARS: Final = 24
_RUNNING_POINTS: Final = 400


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        run_folder: The run's folder; it must hold ``metrics.jsonl``.
        out: Where the page goes; ``report.html`` in the run's folder if None.

    Returns:
        The page's path.

    Raises:
        DataError: The folder or ``metrics.jsonl`` is missing, or one of the files is not what it
            should be; the message names file and line.
    """
    run_folder = Path(run_folder)
    history = _read_history(run_folder / "metrics.jsonl")
    trace = run_folder / "trace.json"
    timeline = read_timeline(trace) if trace.exists() else None
    work = WorkSums(history.worked)
    placed = history.chosen[-1] if history.chosen else history.start
    runtime = str(placed.get("runtime", ""))
    sections = [
        _summary(history),
        _curves(history),
        _epoch_table(history),
        _staleness(history),
        copies_section(history.exchanged),
        chosen_section(history.chosen),
        restarts_section(history.restored),
        workers_section(work, runtime),
        portions_section(work),
        traffic_section(work, int(placed.get("workers", 0)), runtime),
        _timeline(timeline, summed_up=bool(work.firings)),
        _graph(run_folder, history, work),
        _config(run_folder / "config.json"),
    ]
    out = run_folder / "report.html" if out is None else Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # In a file of its own first: what lies there may be a pipe, or a link to something else.
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_text(page(run_folder.resolve().name, sections), encoding="utf-8")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return out


@final
@dataclass(slots=True)
class _History:
    """What metrics.jsonl tells."""

    start: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    running: list[dict[str, Any]] = field(default_factory=list)  # Progress of training
    exchanged: list[dict[str, Any]] = field(default_factory=list)
    worked: list[dict[str, Any]] = field(default_factory=list)
    chosen: list[dict[str, Any]] = field(default_factory=list)
    restored: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        """Take the next event in.

        Raises:
            Mismatch: The event lacks a field, or one is of another type.
        """
        kind = _KINDS.get(event["event"]) if isinstance(event["event"], str) else None
        if kind is not None:
            read(kind, event, event["event"], more=True, nulls=True)
        match event["event"]:
            case "RunStarted":
                self.start, self.end = event, None
            case "Progress" if event["mode"] == "train" and event["total"]:
                while self.running and _place(self.running[-1]) >= _place(event):
                    self.running.pop()  # resumed: as below
                self.running.append(event)
            case "EpochEnded" | "Exchanged" | "Worked" as name:
                # A resumed run goes through its last epochs again: what it tells counts.
                by = {"EpochEnded": self.epochs, "Exchanged": self.exchanged, "Worked": self.worked}
                by[name][:] = [e for e in by[name] if e["epoch"] < event["epoch"]] + [event]
            case "Chosen" | "Restored" as name:
                (self.chosen if name == "Chosen" else self.restored).append(event)
            case "RunEnded":
                self.end = event

    def seconds(self) -> list[float]:
        """Training seconds at the end of each epoch, without validation."""
        sums, spent = [], 0.0
        for epoch in self.epochs:
            spent += epoch["seconds"]
            sums.append(spent)
        return sums

    def names(self, *keys: str) -> list[str]:
        """Names in the epochs' mappings of these keys, each once, in order."""
        found = (name for epoch in self.epochs for key in keys for name in epoch[key])
        return list(dict.fromkeys(found))


def _read_history(path: Path) -> _History:
    if not path.is_file():
        raise DataError(
            "the file is missing; expected the metrics of a run, as JsonLog writes them. "
            "Give the folder of a run, as in runs/<name>",
            path=path,
        )
    history = _History()
    try:
        for event in read_json_log(path):
            history.add(event)
    except Mismatch as error:
        raise DataError(
            f"the event {error}; expected the fields that JsonLog of this version writes. Remove "
            "the line, or use the version that wrote it",
            path=path,
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path=path) from error
    if len({len(event["copies"]) for event in history.exchanged}) > 1:
        raise DataError(
            "its events tell of different numbers of copies; expected those of one run",
            path=path,
        )
    return history


def _summary(history: _History) -> str:
    start, end = history.start, history.end
    spent = sum(epoch["seconds"] for epoch in history.epochs)
    instances = sum(epoch["instances"] for epoch in history.epochs)
    tiles = [("outcome", end["outcome"] if end else "not ended: killed, or still running")]
    if start:
        placed = history.chosen[-1] if history.chosen else start
        tiles.append(("runtime", f"{placed['runtime']}, {placed['workers']} workers"))
        tiles.append(("in flight at most", count(start["max_active"])))
        tiles.append(("epochs", f"{epochs(_trained(history))} of {start['epochs']}"))
    if history.restored:
        tiles.append(("deaths of workers", count(len(history.restored))))
    if spent > 0:
        virtual = " (virtual)" if start.get("runtime") == "simulated" else ""
        tiles.append(("training time", duration(spent) + virtual))
        tiles.append(("instances", count(instances)))
        tiles.append(("speed", rate(instances / spent)))
    for part in sorted(history.names("updates")):
        steps = sum(epoch["updates"].get(part, 0) for epoch in history.epochs)
        tiles.append((f"updates of {part}", count(steps)))
    tiles.extend(_best_valid(history))
    shown = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in tiles)
    told = f"<p class=message>{escape(end['message'])}</p>" if end and end["message"] else ""
    return f"<dl class=tiles>{shown}</dl>{told}"


def _trained(history: _History) -> float:
    """Epochs, the one that a target ended within as a fraction."""
    return float(history.epochs[-1]["epoch"]) if history.epochs else 0.0


def _best_valid(history: _History) -> Iterator[tuple[str, str]]:
    for name in history.names("valid"):
        known = [
            (epoch["valid"][name], epoch["epoch"])
            for epoch in history.epochs
            if epoch["valid"].get(name) is not None
        ]
        if known:
            pick = min if is_lower_better(name) else max
            value, epoch = pick(known, key=lambda pair: pair[0])
            yield f"best valid {name}", f"{measure(name, value)} (epoch {epochs(epoch)})"


def _curves(history: _History) -> str:
    names = [name for name in history.names("metrics", "valid") if name != "loss"]
    return section("Curves", "".join(_curve_pair(history, name) for name in ["loss", *names]))


def _curve_pair(history: _History, name: str) -> str:
    """A measure over epochs and over seconds."""
    done = [float(epoch["epoch"]) for epoch in history.epochs]
    train = [_value(epoch, name) for epoch in history.epochs]
    valid = [_float(epoch["valid"].get(name)) for epoch in history.epochs]
    finite = [v for v in train + valid if math.isfinite(v)]
    say = _share_ticks if finite and all("%" in measure(name, v) for v in finite) else number
    charts = []
    for x_label, xs in (("epochs", done), ("seconds of training", history.seconds())):
        curves = [
            ChartLine("train", list(zip(xs, train, strict=True)), 0),
            ChartLine("valid", list(zip(xs, valid, strict=True)), 1),
        ]
        curves = [c for c in curves if any(math.isfinite(y) for _, y in c.points)]
        if x_label == "epochs":
            curves[:0] = _running_curve(history, name)
        charts.append(line_chart(name, x_label, curves, say))
    return "".join(charts)


def _running_curve(history: _History, name: str) -> list[ChartLine]:
    """The mean so far within each pass: all there is of a run's first epoch."""
    points = [
        (event["epoch"] - 1 + event["finished"] / event["total"], _value(event, name))
        for event in history.running
    ]
    points = sorted(p for p in points if math.isfinite(p[1]))
    points = points[:: max(1, math.ceil(len(points) / _RUNNING_POINTS))]
    return [ChartLine("within the pass", points, 0, is_faint=True)] if len(points) > 1 else []


def _place(event: Mapping[str, Any]) -> tuple[int, int]:
    return event["epoch"], event["finished"]


def _value(event: Mapping[str, Any], name: str) -> float:
    return _float(event["loss"] if name == "loss" else event["metrics"].get(name))


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _share_ticks(value: float) -> str:
    return f"{100 * value:.4g}%"


def _epoch_table(history: _History) -> str:
    metrics, valid = history.names("metrics"), history.names("valid")
    head = ["epoch", "loss", *metrics, *(f"valid {name}" for name in valid)]
    head += ["seconds", "instances/s", "updates", "stalest part"]
    rows = []
    for epoch in history.epochs:
        row = [epochs(epoch["epoch"]), number(_float(epoch["loss"]))]
        row += [measure(name, _float(epoch["metrics"].get(name))) for name in metrics]
        row += [measure(name, _float(epoch["valid"].get(name))) for name in valid]
        spent = epoch["seconds"]
        row += [f"{spent:.2f}", rate(epoch["instances"] / spent if spent > 0 else math.nan)]
        row += [count(sum(epoch["updates"].values())), _stalest(epoch["staleness"])]
        rows.append(row)
    return section("Epochs", table(head, rows))


def _stalest(staleness: Mapping[str, Mapping[str, Any]]) -> str:
    if not staleness:
        return "-"
    part = max(staleness, key=lambda name: _ranked(staleness[name]["mean"]))
    stale = staleness[part]
    return f"{part}: {_float(stale['mean']):.2f}, at most {stale['max']}"


def _ranked(mean: float | None) -> float:
    return -1.0 if mean is None else mean


def _staleness(history: _History) -> str:
    charts = []
    for part in history.names("staleness"):
        sums: list[int] = []
        for epoch in history.epochs:
            counts = epoch["staleness"].get(part, {}).get("histogram", [])
            sums += [0] * (len(counts) - len(sums))
            for versions, rows in enumerate(counts):
                sums[versions] += rows
        charts.append(_staleness_chart(part, sums))
    note = (
        "<p>How many updates of a part lay between a row's forward and its backward, over all "
        "epochs.</p>"
    )
    return section("Staleness", "".join(charts), note)


def _staleness_chart(part: str, rows: Sequence[int]) -> str:
    total = sum(rows)
    if total == 0:
        return ""
    mean = sum(versions * n for versions, n in enumerate(rows)) / total
    wide = math.ceil(len(rows) / _STALENESS_BARS)
    starts = range(0, len(rows), wide)
    labels = [str(k) if wide == 1 else f"{k}\N{EN DASH}{k + wide - 1}" for k in starts]
    heights = [sum(rows[k : k + wide]) for k in starts]
    title = f"{part}: mean {mean:.2f}, {count(total)} rows"
    return bar_chart(title, "versions", labels, [Bars("rows", heights, 2)], (480, 200))


def _timeline(timeline: Timeline | None, *, summed_up: bool) -> str:
    """The trace; its sums only where the log has none, which are without validation."""
    if timeline is None or not timeline.nodes:
        return ""
    nodes = timeline.nodes_by_use()
    colour = {name: i for i, name in enumerate(nodes)}
    note = "<p>The trace reached its limit: what came later is missing here.</p>"
    parts = [note * timeline.is_cut, _node_legend(nodes)]
    parts.append(_gantt(timeline, colour))
    if not summed_up:
        parts += [_busy(timeline, colour), _node_table(timeline, nodes), _batch_sizes(timeline)]
    return section("Who did what, when", "".join(parts))


def _node_legend(nodes: Sequence[str]) -> str:
    keys = (
        f'<span><svg class=key viewBox="0 0 10 10"><rect class="{colour_class(i)}" width="10" '
        f'height="10"/></svg>{escape(name)}</span>'
        for i, name in enumerate(nodes)
    )
    return f"<p class=legend>{''.join(keys)}</p>"


def _gantt(timeline: Timeline, colour: Mapping[str, int]) -> str:
    firings, workers = timeline.recent, sorted(timeline.workers)
    start, end = min(f.start_s for f in firings), max(f.end_s for f in firings)
    lane = {worker: i for i, worker in enumerate(workers)}
    spans = [
        Span(
            lane[f.worker],
            (f.start_s - start) * 1e3,
            (f.end_s - start) * 1e3,
            colour[f.node],
            f"{f.node} {f.direction}, {count(f.rows)} rows, {(f.end_s - f.start_s) * 1e3:.3g} ms",
            is_pale=f.direction == "backward",
        )
        for f in firings
    ]
    title = (
        f"The last {(end - start) * 1e3:,.0f} ms of training, from {start:.3f} s on "
        "(backward is paler)"
    )
    limits = (0.0, (end - start) * 1e3)
    return wide(lane_chart(title, [f"worker {w}" for w in workers], spans, limits, " ms"))


def _busy(timeline: Timeline, colour: Mapping[str, int]) -> str:
    workers, whole = sorted(timeline.workers), timeline.span_s
    if whole <= 0:
        return ""
    spans, notes = [], []
    for lane, worker in enumerate(workers):
        at = 0.0
        for name in colour:
            share = 100 * timeline.busy_s.get((worker, name), 0.0) / whole
            if share > 0:
                tip = f"{name}: {share:.1f}% of the time"
                spans.append(Span(lane, at, at + share, colour[name], tip))
                at += share
        notes.append(f"{at:.1f}%")
    title = f"Share of {duration(whole)} in which each worker was busy"
    lanes = [f"worker {w}" for w in workers]
    return wide(lane_chart(title, lanes, spans, (0.0, 100.0), "%", notes))


def _node_table(timeline: Timeline, nodes: Iterable[str]) -> str:
    busy = sum(use.busy_s for use in timeline.nodes.values()) or math.nan
    rows = []
    for name in nodes:
        use = timeline.nodes[name]
        row = [name, count(use.firings), count(use.rows), f"{use.rows / use.firings:.1f}"]
        row += [duration(use.busy_s), f"{100 * use.busy_s / busy:.1f}%"]
        row.append(f"{use.busy_s * 1e6 / use.rows:.1f} µs" if use.rows else "-")
        rows.append(row)
    head = ["node", "firings", "rows", "rows/firing", "busy", "share of busy", "per row"]
    return table(head, rows)


def _batch_sizes(timeline: Timeline) -> str:
    bins = {k for sizes in timeline.batch_sizes.values() for k in sizes}
    ks = range(min(bins), max(bins) + 1)
    stacks = [
        Bars(f"{direction} firings", [timeline.batch_sizes[direction][k] for k in ks], i)
        for i, direction in enumerate(sorted(timeline.batch_sizes, reverse=True))
    ]
    labels = [batch_size_label(k) for k in ks]
    return bar_chart("Batch sizes", "rows in a firing", labels, stacks)


def _graph(run_folder: Path, history: _History, work: WorkSums) -> str:
    path = run_folder / "graph.mmd"
    source = _text(path) if path.exists() else ""
    outline = read(Outline, history.start.get("outline") or {}, "outline", more=True)
    homes = {name: {worker} for name, worker in (history.start.get("nodes") or {}).items()}
    parts = [drawn_graph(outline, homes | work.homes)]
    if len(outline.operators) > MOST_DRAWN:
        parts.append(f"<p>It has {count(len(outline.operators))} operators and is not drawn.</p>")
    if text := history.start.get("graph_text") or "":
        parts.append(f"<h3>Printed</h3><pre>{escape(text)}</pre>")
    if (source := source or history.start.get("graph_mermaid") or "").strip():
        parts.append(
            f"<details><summary>Mermaid source</summary><pre>{escape(source)}</pre></details>"
        )
    return section("Graph", "".join(parts))


def _config(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        config = parsed(_text(path), "it")
    except Mismatch as error:
        raise DataError(
            f"not JSON ({error}); expected the run's settings. Mend or delete it", path=path
        ) from error
    return section("Configuration", table(["setting", "value"], list(_flat("", config))))


def _text(path: Path) -> str:
    try:
        content = read_bytes(path, _MOST_BYTES, "this is not what geartrain wrote there")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path=path) from error
    return content.decode("utf-8", "replace")


def _flat(prefix: str, value: Any) -> Iterator[list[str]]:
    """Nested settings as dotted names."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), each)
    else:
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield [prefix, shown]
