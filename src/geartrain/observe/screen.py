"""Lines that fit: pieces that shorten or give way, painted in place or left to stay.

width 120   epoch 2/10  ━━━━━━━━━━────────  5120/8544  1,712/s  ...  64 in flight  stale 1.2
width  79   epoch 2/10 ━━── 5120/8544 1,712/s loss 0.8123 accuracy 80.7% 64 live stale 1.2
width  59   epoch 2/10 ━━━━━━━━━━─────── 5120/8544 1,712/s loss 0.8123
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TextIO, final

from rich.console import Console
from rich.text import Text

ESSENTIAL: Final = 1000  # a piece that never gives way
LEAST_BAR_CELLS: Final = 4
_MOST_BAR_CELLS: Final = 28


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a line: its wordings from the fullest to the shortest.

    ``yields[i]`` says when wording i gives way to i + 1 (the last one to nothing): the lowest
    number of all pieces first. Below ten nothing is lost but style.
    """

    wordings: tuple[Text, ...]
    yields: tuple[int, ...]
    is_bar: bool = False


@final
class Screen:
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

    def paint(self, pieces: Sequence[Piece], bar: float | None) -> None:
        """Replace the painted line in one write, so that nothing flickers."""
        if self.is_plain:
            self.keep([piece for piece in pieces if not piece.is_bar])
            return
        # The cursor goes back to the margin: what others print then starts a line of its own.
        self._stream.write(f"\r{self._rendered(self._composed(pieces, bar))}\x1b[K\r")
        self._stream.flush()
        self._is_painted = True

    def keep(self, line: Text | Sequence[Piece]) -> None:
        """Write a line that stays, over the painted one."""
        text = line if isinstance(line, Text) else self._composed(line, None)
        wipe = "\r\x1b[K" if self._is_painted else ""
        self._stream.write(f"{wipe}{self._rendered(text)}\n")
        self._stream.flush()
        self._is_painted = False

    def _composed(self, pieces: Sequence[Piece], bar: float | None) -> Text:
        if bar is None:
            pieces = [piece for piece in pieces if not piece.is_bar]
        width = self.width
        texts, bar_at, gap = _fit(pieces, sys.maxsize if width is None else width)
        if bar is not None and bar_at >= 0 and width is not None:
            used = sum(text.cell_len for text in texts) + gap * (len(texts) - 1)
            cells = min(_MOST_BAR_CELLS, texts[bar_at].cell_len + width - used)
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


def _fit(pieces: Sequence[Piece], width: int) -> tuple[list[Text], int, int]:
    """Shorten pieces until they fit: what is left, where the bar is (or -1), the gap."""
    steps = sorted((when, i) for i, piece in enumerate(pieces) for when in piece.yields)
    level, gap = [0] * len(pieces), 2
    for when, i in steps:
        if when >= 10 and gap == 2 and _length(pieces, level, gap) > width:
            gap = 1
        if when == ESSENTIAL or _length(pieces, level, gap) <= width:
            break
        level[i] += 1
    texts: list[Text] = []
    bar = -1
    for piece, at in zip(pieces, level, strict=True):
        if at < len(piece.wordings):
            bar = len(texts) if piece.is_bar else bar
            texts.append(piece.wordings[at])
    return texts, bar, gap


def _length(pieces: Sequence[Piece], level: Sequence[int], gap: int) -> int:
    shown = [
        piece.wordings[at].cell_len
        for piece, at in zip(pieces, level, strict=True)
        if at < len(piece.wordings)
    ]
    return sum(shown) + gap * (len(shown) - 1)
