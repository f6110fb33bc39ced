"""The sections of a run's page on its workers: who worked, who waited, in what portions, what went
between them.

Worked events ─► WorkSums ─► a bar for each worker, a row for each node, a table of who sent to whom
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final, final

from geartrain.observe.charts import Span, colour_class, lane_chart
from geartrain.observe.figures import count, duration, size
from geartrain.observe.page import Html, section, table, wide
from geartrain.observe.timeline import batch_size_label

_WAYS: Final = ("forward", "backward", "exchange")
_COLOURS: Final = {"forward": 0, "backward": 1, "exchange": 4, "waiting": -1, "other": 9}
_MOST_LANES: Final = 64  # a page with more of them is not looked at
_LEAST: Final = 5e-4  # share of the time; what nobody spent more on is not shown
_BAR: Final = (150, 26)


@final
@dataclass(slots=True)
class NodeSums:
    """One node, one way, over the run."""

    workers: set[int] = field(default_factory=set)
    firings: int = 0
    rows: int = 0
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)


@final
class WorkSums:
    """What workers did over a run.

    Args:
        events: ``Worked``, as JsonLog writes them.

    Attributes:
        seconds: Of the passes of training.
        spent: Seconds by worker and what it did: forward, backward, exchange, waiting, other.
        firings: By worker.
        nodes: By node and way.
        links: Messages and bytes by sender and receiver.
        homes: Node name to the workers that have fired it.
    """

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.seconds = sum(float(event["seconds"]) for event in events)
        self.spent: dict[int, dict[str, float]] = {}
        self.firings: dict[int, int] = {}
        self.nodes: dict[tuple[str, str], NodeSums] = {}
        self.links: dict[tuple[int, int], tuple[int, int]] = {}
        self.homes: dict[str, set[int]] = {}
        for event in events:
            for w, waited in enumerate(event["waiting"]):
                self._spend(w, "waiting", float(waited))
            for node in event["nodes"]:
                self._add(node)
            for link in event["links"]:
                at = link["sender"], link["receiver"]
                messages, nbytes = self.links.get(at, (0, 0))
                self.links[at] = messages + link["messages"], nbytes + link["bytes"]
        for spent in self.spent.values():
            # Clocks of several processes and of a pass agree but for microseconds.
            spent["other"] = max(0.0, self.seconds - sum(spent.values()))

    def _spend(self, worker: int, what: str, seconds: float) -> None:
        spent = self.spent.setdefault(worker, {})
        spent[what] = spent.get(what, 0.0) + seconds

    def _add(self, node: Mapping[str, Any]) -> None:
        worker, name, way = node["worker"], node["node"], node["direction"]
        self._spend(worker, way, float(node["seconds"]))
        self.firings[worker] = self.firings.get(worker, 0) + node["firings"]
        self.homes.setdefault(name, set()).add(worker)
        sums = self.nodes.setdefault((name, way), NodeSums())
        sums.workers.add(worker)
        sums.firings += node["firings"]
        sums.rows += node["rows"]
        sums.seconds += float(node["seconds"])
        sums.sizes += [0] * (len(node["sizes"]) - len(sums.sizes))
        for k, firings in enumerate(node["sizes"]):
            sums.sizes[k] += firings

    def busy(self, worker: int) -> float:
        """Share of the time in which a worker was in firings."""
        spent = self.spent.get(worker, {})
        return _share(sum(spent.get(way, 0.0) for way in _WAYS), self.seconds)


def workers_section(work: WorkSums, runtime: str) -> str:
    """Who worked and who waited; nothing if nobody fired."""
    if not work.firings or not 0 < work.seconds < math.inf:
        return ""
    workers = sorted(work.spent)[:_MOST_LANES]
    least = _LEAST * work.seconds
    shown = [k for k in _COLOURS if any(work.spent[w].get(k, 0.0) >= least for w in workers)]
    spans, rows = [], []
    for lane, w in enumerate(workers):
        at, row = 0.0, [f"worker {w}", f"{100 * work.busy(w):.1f}%"]
        for what in shown:
            seconds = work.spent[w].get(what, 0.0)
            share = 100 * _share(seconds, work.seconds)
            tip = f"worker {w}, {what}: {share:.1f}%, {duration(seconds)}"
            if share:
                spans.append(Span(lane, at, at + share, _COLOURS[what], tip, what == "other"))
            row.append(f"{share:.1f}%")
            at += share
        rows.append([*row, count(work.firings.get(w, 0))])
    title = f"Shares of {duration(work.seconds)} of training, and how much of it was firings"
    notes = [f"{100 * work.busy(w):.1f}%" for w in workers]
    chart = lane_chart(title, [f"worker {w}" for w in workers], spans, (0.0, 100.0), "%", notes)
    keys = "".join(_key(what) for what in shown)
    head = ["worker", "busy", *shown, "firings"]
    note = f"<p>{escape(_WORDS)}{escape(_OF_RUNTIME.get(runtime, ''))}</p>"
    return section(
        "Who worked, who waited",
        f"<p class=legend>{keys}</p>{wide(chart)}{table(head, rows)}",
        note,
    )


_WORDS: Final = (
    "Of the passes of training, without validation and checkpoints. Forward and backward are "
    "firings (a loss that is inside of a firing forward is part of it, steps of optimisers of "
    "those backward); waiting: nothing was there to do; other: queues, messages, the controller, "
    "the beginning and the end of a pass."
)
_OF_RUNTIME: Final = {
    "threads": " Workers are threads of one interpreter, and a firing that waits for it counts as "
    "firing.",
    "simulated": " Seconds are virtual.",
}


def _key(what: str) -> str:
    look = colour_class(_COLOURS[what]) + " pale" * (what == "other")
    return (
        f'<span><svg class=key viewBox="0 0 10 10"><rect class="{look}" width="10" height="10"/>'
        f"</svg>{what}</span>"
    )


def portions_section(work: WorkSums) -> str:
    """Rows per firing of each node."""
    busiest = sorted(work.nodes.items(), key=lambda item: (-item[1].seconds, item[0]))
    busy = sum(sums.seconds for _, sums in busiest)
    rows = []
    for (name, way), sums in busiest:
        if not sums.firings:
            continue
        row = [name, way, ", ".join(map(str, sorted(sums.workers)[:_MOST_LANES]))]
        row += [count(sums.firings), count(sums.rows), f"{sums.rows / sums.firings:.1f}"]
        row += [Html(_histogram(f"{name} {way}", sums.sizes)), duration(sums.seconds)]
        row += [f"{100 * _share(sums.seconds, busy):.1f}%"]
        row.append(_per_row(sums.seconds / sums.rows) if sums.rows else "-")
        rows.append(row)
    head = ["node", "way", "workers", "firings", "rows", "rows/firing"]
    head += ["firings by their rows", "busy", "share of busy", "per row"]
    note = (
        "<p>A row is a message: a row of a batch, or a bundle. Bars: how many firings had 1, 2, 3 "
        "to 4, 5 to 8 rows and so on, all of them to one scale of each row of the table.</p>"
    )
    return section("Rows per firing", table(head, rows), note)


def _per_row(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _histogram(name: str, sizes: Sequence[int]) -> str:
    """Bars by size, as small as a line of a table."""
    used = [k for k, firings in enumerate(sizes) if firings]
    if not used:
        return "-"
    first, last, most = used[0], used[-1], max(sizes)
    widest, height = _BAR
    pitch = min(14.0, (widest - 2) / (last - first + 1))
    width = round(2 + pitch * (last - first + 1))
    told, bars = [], []
    for k in range(first, last + 1):
        label = f"{batch_size_label(k - 1)} rows: {count(sizes[k])} firings"
        told.append(label)
        tall = max(1.0, (height - 2) * sizes[k] / most) if sizes[k] else 0.0
        bars.append(
            f'<rect class="c2" x="{1 + (k - first) * pitch:.1f}" y="{height - tall:.1f}" '
            f'width="{max(1.0, pitch - 1.5):.1f}" height="{tall:.1f}">'
            f"<title>{escape(label)}</title></rect>"
        )
    label = escape(f"{name}: {'; '.join(told)}")
    ends = f"{batch_size_label(first - 1)} to {batch_size_label(last - 1)}"
    if first == last:
        ends = batch_size_label(first - 1)
    return (
        f'<small>{escape(ends)}</small> <svg class=small role="img" aria-label="{label}" '
        f'viewBox="0 0 {width} {height}" style="width:{width}px">{"".join(bars)}</svg>'
    )


def traffic_section(work: WorkSums, workers: int, runtime: str) -> str:
    """What went from process to process."""
    if not work.links:
        if not work.firings or len(work.spent) < 2:
            return ""
        what = "are simulated" if runtime == "simulated" else "have one memory"
        return section(
            "Between workers", f"<p>Workers {what}: batches pass without being copied.</p>"
        )
    ends = sorted({end for link in work.links for end in link})[:_MOST_LANES]
    most = max(nbytes for _, nbytes in work.links.values()) or 1
    rows = []
    for sender in ends:
        row = [_process(sender, workers)]
        for receiver in ends:
            messages, nbytes = work.links.get((sender, receiver), (0, 0))
            row.append(_amount(messages, nbytes, nbytes / most) if messages else "-")
        sent = [link for (a, _), link in work.links.items() if a == sender]
        row.append(size(sum(nbytes for _, nbytes in sent)))
        rows.append(row)
    rows.append(["all"] + [_received(work, end) for end in ends] + [_total(work)])
    head = ["from \\ to", *(_process(end, workers) for end in ends), "sent"]
    messages = sum(m for m, _ in work.links.values())
    nbytes = sum(b for _, b in work.links.values())
    per_second = f", {size(nbytes / work.seconds)} a second" if work.seconds > 0 else ""
    note = (
        f"<p>Bytes and messages on the wire in training, as the transport counts them: "
        f"{size(nbytes)} in {count(messages)} messages{per_second}. Between workers go batches of "
        "rows and of gradients (and weights, where these are shared); the program sends "
        "instances, and hears of firings and steps. Weights in shared memory do not travel.</p>"
    )
    return section("Between workers", table(head, rows), note)


def _process(number: int, workers: int) -> str:
    return "program" if number == workers else f"worker {number}"


def _amount(messages: int, nbytes: int, share: float) -> Html:
    """Coloured by how much it is of the most; the text says it as well."""
    strength = 8 + round(42 * share)
    style = f"background:color-mix(in srgb, #3b76af {strength}%, transparent)"
    per = f"{size(nbytes / messages)} each"
    return Html(
        f'<span class=heat style="{style}" title="{per}">{size(nbytes)}</span> '
        f"<small>{count(messages)} messages</small>"
    )


def _received(work: WorkSums, receiver: int) -> str:
    return size(sum(nbytes for (_, b), (_, nbytes) in work.links.items() if b == receiver))


def _total(work: WorkSums) -> str:
    return size(sum(nbytes for _, nbytes in work.links.values()))


def _share(part: float, whole: float) -> float:
    return part / whole if 0 < whole < math.inf and part < math.inf else 0.0
