"""The run on one line of the terminal, and what remains of it when it is over.

    threads: 4 workers, at most 64 in flight, 10 epochs
    epoch  1/10 loss 1.0312 accuracy 74.1% valid 78.9% 5.1 s 1,676/s stale 3.5
    epoch  2/10 ━━━━━━━━────── 5120/8544 1,712/s loss 0.8123 accuracy 80.7% 64 live
    ^ repainted in place

Where the stream is no terminal (a file, a pipe, ``TERM=dumb``) nothing is repainted: a plain line
about every ten seconds and one after each epoch. A line that does not fit gives up its least
important pieces; it never wraps. No thread repaints, and the cursor stays visible, so that a
killed run leaves the terminal as it was.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO, final

from rich.cells import cell_len
from rich.text import Text

from geartrain.engine.instrument import (
    AbstractInstrument,
    EpochEnded,
    Exchanged,
    PartStaleness,
    Progress,
    Restored,
    RunEnded,
    RunStarted,
)
from geartrain.observe.figures import (
    count,
    duration,
    epochs,
    is_lower_better,
    measure,
    number,
    rate,
)
from geartrain.observe.screen import ESSENTIAL, LEAST_BAR_CELLS, Piece, Screen

_PLAIN_INTERVAL_S: Final = 10.0
_OUTCOME_STYLES: Final = {
    "done": "bold green",
    "target reached": "bold green",
    "interrupted": "bold yellow",
    "failed": "bold red",
}


@final
class ProgressLine(AbstractInstrument):
    """Show how a run stands: a live line, a line for each epoch, a summary at the end.

    Args:
        stream: Where to write; standard error if None.
        plain: No repainting and no colour; None means: unless ``stream`` is a terminal that can.
        minimum_interval_s: Least wall-clock time between two repaints, in seconds.
        clock: Wall-clock seconds from any origin; it paces the repaints and is never shown.

    Raises:
        ValueError: ``minimum_interval_s`` is negative or NaN.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        plain: bool | None = None,
        minimum_interval_s: float = 0.2,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not minimum_interval_s >= 0:
            raise ValueError(
                f"minimum_interval_s is {minimum_interval_s}; expected seconds, 0 or more"
            )
        self._screen = Screen(sys.stderr if stream is None else stream, plain)
        self._interval_s = _PLAIN_INTERVAL_S if self._screen.is_plain else minimum_interval_s
        self._clock = clock
        self._last_shown_s = -math.inf if not self._screen.is_plain else clock()
        self._pass: tuple[str, int] | None = None  # mode and epoch of the live line
        self._closed_pass: tuple[str, int] | None = None
        self._is_virtual = False
        self._ledger = _Ledger()

    def on_run_started(self, event: RunStarted) -> None:
        """Name the runtime and its size."""
        self._is_virtual = event.runtime == "simulated"
        self._ledger = _Ledger()
        self._pass = self._closed_pass = None
        line = Text(event.runtime, "bold")
        shared = f", {event.sharing}" if event.sharing else ""
        line.append(
            f": {_some(event.workers, 'worker')}{shared}, "
            f"at most {count(event.max_active)} in flight, "
            f"{_some(event.epochs, 'epoch')}" + ("; virtual seconds" * self._is_virtual),
            "not bold",
        )
        self._keep(line)

    def on_progress(self, event: Progress) -> None:
        """Repaint the line, unless it was repainted a moment ago."""
        this_pass = (event.mode, event.epoch)
        ends_alone = event.epoch == 0 and event.total is not None and event.finished >= event.total
        if ends_alone:
            self._close_pass(event)
            return
        self._closed_pass = None
        now = self._clock()
        is_new = this_pass != self._pass and not self._screen.is_plain
        self._pass = this_pass
        if is_new or now - self._last_shown_s >= self._interval_s:
            self._last_shown_s = now
            pieces = _progress_pieces(event) + self._ledger.deaths_pieces()
            self._screen.paint(pieces, bar=_share(event))

    def on_epoch_ended(self, event: EpochEnded) -> None:
        """Leave a line for the epoch, or for the part of one up to an evaluation."""
        self._ledger.add(event)
        self._pass = None
        self._keep(_epoch_pieces(event, self._is_virtual))

    def on_restored(self, event: Restored) -> None:
        """Count it, for the line and the summary; the log tells the story."""
        self._ledger.deaths = event.deaths
        again = event.unfinished if event.source == "copies" else 0
        self._ledger.repeated += event.repeated + again
        self._ledger.lost_s += event.seconds
        self._pass = None

    def on_exchanged(self, event: Exchanged) -> None:
        """Count what copies of the model have said to one another, for the summary."""
        self._ledger.add_exchanged(event)

    def on_run_ended(self, event: RunEnded) -> None:
        """Leave the summary."""
        self._pass = None
        style = _OUTCOME_STYLES[event.outcome]
        head = Text.assemble((event.outcome, style))
        head.append(
            f": {epochs(self._ledger.epochs)} epoch{'s' * (self._ledger.epochs != 1)}, "
            f"{_some(event.instances, 'instance')}"
        )
        if event.train_seconds > 0:
            kind = "virtual training" if self._is_virtual else "training"
            head.append(f" in {duration(event.train_seconds)} of {kind}")
            head.append(f", {rate(event.instances / event.train_seconds)}")
        self._keep(head)
        if event.message.strip():
            first_line = " ".join(event.message.strip().splitlines()[0].split())
            self._keep(_entry("because", [first_line]))
        for title, items in self._ledger.summary():
            self._keep(_entry(title, items, self._screen.width))

    def _close_pass(self, event: Progress) -> None:
        """Nothing else tells the end of a pass outside of ``fit``: its line stays."""
        this_pass = (event.mode, event.epoch)
        if this_pass != self._closed_pass:
            self._closed_pass, self._pass = this_pass, None
            self._keep(_progress_pieces(event))

    def _keep(self, line: Text | Sequence[Piece]) -> None:
        self._last_shown_s = self._clock()
        self._screen.keep(line)


@dataclass(slots=True)
class _Ledger:
    """What the closing summary needs to remember of the epochs."""

    epochs: float = 0.0  # of this call
    at: float | None = None  # the last entry's
    best: dict[str, tuple[float, float]] = field(default_factory=dict)  # metric -> value, epoch
    updates: dict[str, int] = field(default_factory=dict)
    stalest: tuple[str, float, PartStaleness] | None = None
    exchanged: Exchanged | None = None  # the last
    letters: int = 0
    declined: int = 0
    rounds: int = 0
    meetings: float = 0.0  # of a part, in the mean
    deaths: int = 0  # of worker processes
    repeated: int = 0  # instances
    lost_s: float = 0.0

    def add(self, event: EpochEnded) -> None:
        began = math.ceil(event.epoch) - 1 if self.at is None else self.at
        self.epochs, self.at = self.epochs + event.epoch - began, event.epoch
        for name, value in event.valid.items():
            if not math.isnan(value) and self._is_better(name, value):
                self.best[name] = (value, event.epoch)
        for part, steps in event.updates.items():
            self.updates[part] = self.updates.get(part, 0) + steps
        worst = _stalest(event.staleness)
        if worst is not None and (self.stalest is None or worst[1].mean > self.stalest[2].mean):
            self.stalest = (worst[0], event.epoch, worst[1])

    def add_exchanged(self, event: Exchanged) -> None:
        self.exchanged = event
        for each in event.copies:
            self.letters, self.declined = self.letters + each.sent, self.declined + each.declined
            self.rounds += each.rounds
            self.meetings += each.meetings_per_round * each.rounds

    def summary(self) -> list[tuple[str, list[str]]]:
        """Titles, and what there is to say under each."""
        entries: list[tuple[str, list[str]]] = []
        if self.best:
            said = [f"{n} {measure(n, v)} (epoch {epochs(e)})" for n, (v, e) in self.best.items()]
            entries.append(("best valid", said))
        if self.updates:
            said = [f"{part}: {count(steps)}" for part, steps in self.updates.items()]
            entries.append(("updates", said))
        if self.stalest is not None:
            part, epoch, stale = self.stalest
            said = [
                f"{part}: mean {stale.mean:.2f}, at most {count(stale.max)} (epoch {epochs(epoch)})"
            ]
            entries.append(("most stale", said))
        if self.exchanged is not None:
            said = [
                f"{len(self.exchanged.copies)} by {self.exchanged.exchange}",
                f"{count(self.declined)} of {count(self.letters)} letters declined",
                f"{number(self.exchanged.distance)} apart",
            ]
            if self.rounds:
                said.append(f"{self.meetings / self.rounds:.2f} meetings a gradient")
            entries.append(("copies", said))
        if self.deaths:
            said = [
                f"{count(self.deaths)} worker process{'es' * (self.deaths != 1)}",
                f"{_some(self.repeated, 'instance')} trained again",
                f"{duration(self.lost_s)} lost",
            ]
            entries.append(("died", said))
        return entries

    def deaths_pieces(self) -> list[Piece]:
        """What the live line says of worker processes that have died: nothing, if none has."""
        if not self.deaths:
            return []
        long = f"{_some(self.deaths, 'death')}, {count(self.repeated)} again"
        words = (long, _some(self.deaths, "death"))
        return [Piece(tuple(Text(each, "yellow") for each in words), (6, 30))]

    def _is_better(self, name: str, value: float) -> bool:
        if name not in self.best:
            return True
        before = self.best[name][0]
        return value < before if is_lower_better(name) else value > before


def _progress_pieces(event: Progress) -> list[Piece]:
    title = {"train": "epoch", "evaluate": "valid", "predict": "predict"}[event.mode]
    if event.epoch == 0:
        head = Text(event.mode, "bold")
    else:
        head = Text.assemble((f"{title} ", "bold"), _of(event.epoch, event.epochs))
    done = count(event.finished) if event.total is None else _of(event.finished, event.total)
    pieces = [Piece((head,), (ESSENTIAL,))]
    if _share(event) is not None:
        pieces.append(Piece((Text(" " * LEAST_BAR_CELLS),), (45,), is_bar=True))
    pieces.append(Piece((Text(done, "cyan"),), (60,)))
    pieces.append(Piece((Text(f"{rate(event.instances_per_second):>7}"),), (40,)))
    if event.mode != "predict":
        pieces.append(_labelled("loss", f"{number(event.loss):>6}", 50))
        pieces.extend(_metric_pieces(event.metrics, "", 35))
    flight = (f"{event.active} in flight", f"{event.active} live")
    pieces.append(Piece(tuple(Text(words, "dim") for words in flight), (2, 20)))
    if event.mode == "train" and math.isfinite(event.staleness):
        pieces.append(_labelled("stale", f"{event.staleness:.1f}", 25))
    return pieces


def _epoch_pieces(event: EpochEnded, is_virtual: bool) -> list[Piece]:
    done = f"{epochs(event.epoch):>{len(str(event.epochs))}}/{event.epochs}"
    head = Text.assemble(("epoch ", "bold"), done)
    pieces = [Piece((head,), (ESSENTIAL,)), _labelled("loss", number(event.loss), 40)]
    pieces.extend(_metric_pieces(event.metrics, "", 20))
    pieces.extend(_metric_pieces(event.valid, "valid ", 60, known=next(iter(event.metrics), "")))
    spent = duration(event.seconds)
    clocks = (f"{spent} (virtual)", spent) if is_virtual else (spent,)
    pieces.append(Piece(tuple(Text(each) for each in clocks), (3, 45)[-len(clocks) :]))
    if event.seconds > 0:
        pieces.append(Piece((Text(rate(event.instances / event.seconds)),), (30,)))
    worst = _stalest(event.staleness)
    if worst is not None:
        part, stale = worst
        words = (
            f"stale {part}: {stale.mean:.1f} (max {stale.max})",
            f"stale {part}: {stale.mean:.1f}",
            f"stale {stale.mean:.1f}",
        )
        pieces.append(Piece(tuple(Text(each, "dim") for each in words), (4, 19, 25)))
    return pieces


def _metric_pieces(
    values: Mapping[str, float], prefix: str, yields: int, known: str = ""
) -> list[Piece]:
    """The first metric stays longest; one that the line has named before may lose its name."""
    pieces = []
    for i, (name, value) in enumerate(values.items()):
        short = prefix.strip() if name == known else ""
        when = yields if i == 0 else 19 - min(i, 8)
        pieces.append(_labelled(f"{prefix}{name}", measure(name, value), when, short))
    return pieces


def _labelled(name: str, value: str, yields: int, short: str = "") -> Piece:
    short = short or (name if cell_len(name) <= 14 else f"{name[:13]}…")
    return Piece(
        (Text.assemble((f"{name} ", "dim"), value), Text.assemble((f"{short} ", "dim"), value)),
        (5, yields),
    )


def _entry(title: str, items: Sequence[str], width: int | None = None) -> Text:
    """One line under the summary; items that do not fit are counted."""
    line = Text.assemble((f"  {title:<11}", "dim"))
    for i, item in enumerate(items):
        more = f", {len(items) - i} more"
        added = item if i == 0 else f", {item}"
        reserve = len(more) if i + 1 < len(items) else 0
        if i > 0 and width is not None and line.cell_len + cell_len(added) + reserve > width:
            line.append(more, "dim")
            break
        line.append(added)
    return line


def _share(event: Progress) -> float | None:
    return min(1.0, event.finished / event.total) if event.total else None


def _stalest(staleness: Mapping[str, PartStaleness]) -> tuple[str, PartStaleness] | None:
    known = [item for item in staleness.items() if math.isfinite(item[1].mean)]
    return max(known, key=lambda item: item[1].mean, default=None)


def _of(done: int, total: int) -> str:
    """``done/total``, as wide for every value of ``done``."""
    return f"{done:>{len(str(total))}}/{total}"


def _some(amount: int, noun: str) -> str:
    return f"{count(amount)} {noun}" + "s" * (amount != 1)
