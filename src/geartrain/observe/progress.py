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
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO, final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from geartrain.engine.instrument import (
    AbstractInstrument,
    EpochEnded,
    PartStaleness,
    Progress,
    RunEnded,
    RunStarted,
)
from geartrain.observe.figures import count, duration, is_lower_better, measure, number, rate

_PLAIN_INTERVAL_S: Final = 10.0
_BAR_CELLS: Final = (4, 28)  # at least, at most
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
        self._screen = _Screen(sys.stderr if stream is None else stream, plain)
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
        line.append(
            f": {_some(event.workers, 'worker')}, "
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
            self._screen.paint(_progress_pieces(event), bar=_share(event))

    def on_epoch_ended(self, event: EpochEnded) -> None:
        """Leave a line for the epoch."""
        self._ledger.add(event)
        self._pass = None
        self._keep(_epoch_pieces(event, self._is_virtual))

    def on_run_ended(self, event: RunEnded) -> None:
        """Leave the summary."""
        self._pass = None
        style = _OUTCOME_STYLES[event.outcome]
        head = Text.assemble((event.outcome, style))
        head.append(
            f": {_some(self._ledger.epochs, 'epoch')}, {_some(event.instances, 'instance')}"
        )
        if event.train_seconds > 0:
            kind = "virtual training" if self._is_virtual else "training"
            head.append(f" in {duration(event.train_seconds)} of {kind}")
            head.append(f", {rate(event.instances / event.train_seconds)}")
        self._keep(head)
        if event.message:
            self._keep(_entry("because", event.message.strip().splitlines()[:1]))
        for title, items in self._ledger.summary():
            self._keep(_entry(title, items, self._screen.width))

    def _close_pass(self, event: Progress) -> None:
        """Nothing else tells the end of a pass outside of ``fit``: its line stays."""
        this_pass = (event.mode, event.epoch)
        if this_pass != self._closed_pass:
            self._closed_pass, self._pass = this_pass, None
            self._keep(_progress_pieces(event))

    def _keep(self, line: Text | Sequence[_Piece]) -> None:
        self._last_shown_s = self._clock()
        self._screen.keep(line)


@dataclass(slots=True)
class _Ledger:
    """What the closing summary needs to remember of the epochs."""

    epochs: int = 0
    best: dict[str, tuple[float, int]] = field(default_factory=dict)  # metric -> value, epoch
    updates: dict[str, int] = field(default_factory=dict)
    stalest: tuple[str, int, PartStaleness] | None = None

    def add(self, event: EpochEnded) -> None:
        self.epochs += 1
        for name, value in event.valid.items():
            if not math.isnan(value) and self._is_better(name, value):
                self.best[name] = (value, event.epoch)
        for part, steps in event.updates.items():
            self.updates[part] = self.updates.get(part, 0) + steps
        worst = _stalest(event.staleness)
        if worst is not None and (self.stalest is None or worst[1].mean > self.stalest[2].mean):
            self.stalest = (worst[0], event.epoch, worst[1])

    def summary(self) -> list[tuple[str, list[str]]]:
        """Titles, and what there is to say under each."""
        entries: list[tuple[str, list[str]]] = []
        if self.best:
            said = [f"{n} {measure(n, v)} (epoch {e})" for n, (v, e) in self.best.items()]
            entries.append(("best valid", said))
        if self.updates:
            said = [f"{part} {count(steps)}" for part, steps in self.updates.items()]
            entries.append(("updates", said))
        if self.stalest is not None:
            part, epoch, stale = self.stalest
            said = [f"{part}: mean {stale.mean:.2f}, at most {count(stale.max)} (epoch {epoch})"]
            entries.append(("most stale", said))
        return entries

    def _is_better(self, name: str, value: float) -> bool:
        if name not in self.best:
            return True
        before = self.best[name][0]
        return value < before if is_lower_better(name) else value > before


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a line: its wordings from the fullest to the shortest.

    ``yields[i]`` says when wording i gives way to i + 1 (the last one to nothing): the lowest
    number of all pieces first. Below ten nothing is lost but style.
    """

    wordings: tuple[Text, ...]
    yields: tuple[int, ...]
    is_bar: bool = False


_ESSENTIAL: Final = 1000


def _progress_pieces(event: Progress) -> list[_Piece]:
    title = {"train": "epoch", "evaluate": "valid", "predict": "predict"}[event.mode]
    if event.epoch == 0:
        head = Text(event.mode, "bold")
    else:
        head = Text.assemble((f"{title} ", "bold"), _of(event.epoch, event.epochs))
    done = count(event.finished) if event.total is None else _of(event.finished, event.total)
    pieces = [_Piece((head,), (_ESSENTIAL,))]
    if _share(event) is not None:
        pieces.append(_Piece((Text("━" * _BAR_CELLS[0]),), (45,), is_bar=True))
    pieces.append(_Piece((Text(done, "cyan"),), (60,)))
    pieces.append(_Piece((Text(f"{rate(event.instances_per_second):>7}"),), (40,)))
    if event.mode != "predict":
        pieces.append(_labelled("loss", f"{number(event.loss):>6}", 50))
        pieces.extend(_metric_pieces(event.metrics, "", 35))
    flight = (f"{event.active} in flight", f"{event.active} live")
    pieces.append(_Piece(tuple(Text(words, "dim") for words in flight), (2, 20)))
    if event.mode == "train" and math.isfinite(event.staleness):
        pieces.append(_labelled("stale", f"{event.staleness:.1f}", 25))
    return pieces


def _epoch_pieces(event: EpochEnded, is_virtual: bool) -> list[_Piece]:
    head = Text.assemble(("epoch ", "bold"), _of(event.epoch, event.epochs))
    pieces = [_Piece((head,), (_ESSENTIAL,)), _labelled("loss", number(event.loss), 40)]
    pieces.extend(_metric_pieces(event.metrics, "", 20))
    pieces.extend(_metric_pieces(event.valid, "valid ", 60, known=next(iter(event.metrics), "")))
    spent = duration(event.seconds)
    clocks = (f"{spent} (virtual)", spent) if is_virtual else (spent,)
    pieces.append(_Piece(tuple(Text(each) for each in clocks), (3, 45)[-len(clocks) :]))
    if event.seconds > 0:
        pieces.append(_Piece((Text(rate(event.instances / event.seconds)),), (30,)))
    worst = _stalest(event.staleness)
    if worst is not None:
        part, stale = worst
        words = (
            f"stale {part} {stale.mean:.1f} (max {stale.max})",
            f"stale {part} {stale.mean:.1f}",
            f"stale {stale.mean:.1f}",
        )
        pieces.append(_Piece(tuple(Text(each, "dim") for each in words), (4, 15, 25)))
    return pieces


def _metric_pieces(
    values: Mapping[str, float], prefix: str, yields: int, known: str = ""
) -> list[_Piece]:
    """The first metric stays longest; one that the line has named before may lose its name."""
    pieces = []
    for i, (name, value) in enumerate(values.items()):
        short = prefix.strip() if name == known else ""
        when = yields if i == 0 else 19 - min(i, 8)
        pieces.append(_labelled(f"{prefix}{name}", measure(name, value), when, short))
    return pieces


def _labelled(name: str, value: str, yields: int, short: str = "") -> _Piece:
    short = short or (name if cell_len(name) <= 14 else f"{name[:13]}…")
    return _Piece(
        (Text.assemble((f"{name} ", "dim"), value), Text.assemble((f"{short} ", "dim"), value)),
        (5, yields),
    )


def _fit(pieces: Sequence[_Piece], width: int) -> tuple[list[Text], int, int]:
    """Shorten pieces until they fit: what is left, where the bar is (or -1), the gap."""
    steps = sorted((when, i) for i, piece in enumerate(pieces) for when in piece.yields)
    level, gap = [0] * len(pieces), 2
    for when, i in steps:
        if when >= 10 and gap == 2 and _length(pieces, level, gap) > width:
            gap = 1
        if when == _ESSENTIAL or _length(pieces, level, gap) <= width:
            break
        level[i] += 1
    texts: list[Text] = []
    bar = -1
    for piece, at in zip(pieces, level, strict=True):
        if at < len(piece.wordings):
            bar = len(texts) if piece.is_bar else bar
            texts.append(piece.wordings[at])
    return texts, bar, gap


def _length(pieces: Sequence[_Piece], level: Sequence[int], gap: int) -> int:
    shown = [
        piece.wordings[at].cell_len
        for piece, at in zip(pieces, level, strict=True)
        if at < len(piece.wordings)
    ]
    return sum(shown) + gap * (len(shown) - 1)


@final
class _Screen:
    """Puts lines on a stream: painted in place, or to stay."""

    def __init__(self, stream: TextIO, plain: bool | None) -> None:
        is_terminal = stream.isatty()
        is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        self.is_plain = (not is_terminal or is_dumb) if plain is None else plain
        self._stream = stream
        self._console = Console(
            file=stream,
            force_terminal=not self.is_plain,
            no_color=True if self.is_plain else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._has_limit = is_terminal or not self.is_plain
        self._is_painted = False

    @property
    def width(self) -> int | None:
        """Cells to use, one less than there are, or None without a limit."""
        return max(1, self._console.width - 1) if self._has_limit else None

    def paint(self, pieces: Sequence[_Piece], bar: float | None) -> None:
        """Replace the painted line in one write, so that nothing flickers."""
        if self.is_plain:
            self.keep([piece for piece in pieces if not piece.is_bar])
            return
        # The cursor goes back to the margin: what others print then starts a line of its own.
        self._stream.write(f"\r{self._rendered(self._composed(pieces, bar))}\x1b[K\r")
        self._stream.flush()
        self._is_painted = True

    def keep(self, line: Text | Sequence[_Piece]) -> None:
        """Write a line that stays, over the painted one."""
        text = line if isinstance(line, Text) else self._composed(line, None)
        wipe = "\r\x1b[K" if self._is_painted else ""
        self._stream.write(f"{wipe}{self._rendered(text)}\n")
        self._stream.flush()
        self._is_painted = False

    def _composed(self, pieces: Sequence[_Piece], bar: float | None) -> Text:
        if bar is None:
            pieces = [piece for piece in pieces if not piece.is_bar]
        width = self.width
        texts, bar_at, gap = _fit(pieces, sys.maxsize if width is None else width)
        if bar is not None and bar_at >= 0 and width is not None:
            used = sum(text.cell_len for text in texts) + gap * (len(texts) - 1)
            cells = min(_BAR_CELLS[1], texts[bar_at].cell_len + width - used)
            texts[bar_at] = self._bar(bar, cells)
        return Text(" " * gap).join(texts)

    def _bar(self, share: float, cells: int) -> Text:
        full, empty = ("━", "─") if self._console.encoding.startswith("utf") else ("#", "-")
        filled = min(cells, int(share * cells))
        return Text.assemble((full * filled, "green"), (empty * (cells - filled), "dim"))

    def _rendered(self, text: Text) -> str:
        width = self.width
        if width is not None and text.cell_len > width:
            text = text.copy()
            text.truncate(width, overflow="ellipsis")
        if self.is_plain:
            return self._encodable(text.plain)
        with self._console.capture() as captured:
            self._console.print(text, end="", no_wrap=True, overflow="crop")
        return self._encodable(captured.get())

    def _encodable(self, text: str) -> str:
        encoding = self._console.encoding
        return text.encode(encoding, "replace").decode(encoding)


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
