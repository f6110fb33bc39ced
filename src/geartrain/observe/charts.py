"""Small charts as SVG text: curves, bars, shares, Gantt. Numbers in, a string out.

Colours are classes, ``c0`` to ``c9`` (and ``cx`` for the rest), that the page defines for light
and dark. Nothing is fetched and nothing runs; the browser shows an exact value under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

COLOURS: Final = 10
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 38  # margins
_LANE: Final = 26


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line through points; points that are not finite are left out."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar for each label, stacked on the ``Bars`` before."""

    name: str
    heights: Sequence[float]
    colour: int


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of a lane, in the chart's unit."""

    lane: int
    start: float
    end: float
    colour: int
    title: str
    is_pale: bool = False


def colour_class(index: int) -> str:
    """The CSS class of a colour; beyond the last all are alike, and -1 is for what is empty."""
    if index == -1:
        return "empty"
    return f"c{index}" if 0 <= index < COLOURS else "cx"


def line_chart(
    title: str,
    x_label: str,
    curves: Sequence[ChartLine],
    say: Callable[[float], str] = "{:.4g}".format,
    size: tuple[int, int] = (480, 250),
) -> str:
    """Curves over one x axis; ``say`` words a y value."""
    drawn = [
        (curve, [p for p in curve.points if math.isfinite(p[0]) and math.isfinite(p[1])])
        for curve in curves
    ]
    every = [p for _, points in drawn for p in points]
    if not every:
        return ""
    (x0, x1), (y0, y1) = _range([p[0] for p in every]), _range([p[1] for p in every])
    x, y = _scale(x0, x1, _LEFT, size[0] - _RIGHT), _scale(y0, y1, size[1] - _BOTTOM, _TOP)
    body = [
        _grid(size, x, y, (x0, x1), (y0, y1), say),
        _legend([(c.name, c.colour, c.is_faint) for c in curves]),
    ]
    for curve, points in drawn:
        body.append(_polyline(curve, points, x, y, say))
    body.append(_axis_title(x_label, size))
    return _svg(title, size, body)


def bar_chart(
    title: str,
    x_label: str,
    labels: Sequence[str],
    stacks: Sequence[Bars],
    size: tuple[int, int] = (480, 250),
) -> str:
    """Stacked bars over labels."""
    totals = [sum(column) for column in zip(*(bars.heights for bars in stacks), strict=True)]
    if not totals or max(totals) <= 0:
        return ""
    y1 = _ticks(0, max(totals))[-1]
    y = _scale(0, y1, size[1] - _BOTTOM, _TOP)
    pitch = (size[0] - _LEFT - _RIGHT) / len(labels)
    body = [_grid(size, None, y, None, (0, y1), "{:,.6g}".format)]
    body.append(_legend([(each.name, each.colour, False) for each in stacks if len(stacks) > 1]))
    below = [0.0] * len(labels)
    for bars in stacks:
        for i, height in enumerate(bars.heights):
            tip = f"{labels[i]}: {height:,.6g} {bars.name}"
            left, top = _LEFT + (i + 0.08) * pitch, y(below[i] + height)
            body.append(_rect(left, top, pitch * 0.84, y(below[i]) - top, bars.colour, tip))
            below[i] += height
    every = max(1, math.ceil(max(map(len, labels)) * 7 * len(labels) / (size[0] - _LEFT - _RIGHT)))
    for i in range(0, len(labels), every):
        where = _LEFT + (i + 0.5) * pitch
        body.append(_text(where, size[1] - _BOTTOM + 15, labels[i], "middle"))
    body.append(_axis_title(x_label, size))
    return _svg(title, size, body)


def lane_chart(
    title: str,
    lanes: Sequence[str],
    spans: Sequence[Span],
    limits: tuple[float, float],
    unit: str,
    notes: Sequence[str] = (),
    width: int = 980,
) -> str:
    """Spans on a lane each for its name: a Gantt chart, or shares of a whole.

    ``notes`` stand at the right end of the lanes.
    """
    if not lanes or limits[1] <= limits[0]:
        return ""
    left = 24 + 7 * min(24, max(map(len, lanes)))
    right = 60 if notes else _RIGHT
    bottom = 10 + _LANE * len(lanes)
    x = _scale(*limits, left, width - right)
    body = []
    for tick in _ticks(*limits):
        if limits[0] <= tick <= limits[1]:
            at = x(tick)
            body.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="6" y2="{bottom}"/>')
            body.append(_text(at, bottom + 16, f"{tick:.6g}{unit}", "middle"))
    for i, lane in enumerate(lanes):
        middle = 10 + (i + 0.5) * _LANE + 4
        body.append(_text(left - 8, middle, lane if len(lane) <= 24 else lane[:23] + "…", "end"))
        if notes:
            body.append(_text(width - 4, middle, notes[i], "end"))
    for span in spans:
        start, end = max(span.start, limits[0]), min(span.end, limits[1])
        long = max(0.4, x(end) - x(start))
        top = 10 + span.lane * _LANE + 3
        body.append(_rect(x(start), top, long, _LANE - 6, span.colour, span.title, span.is_pale))
    return _svg(title, (width, bottom + 24), body)


def _grid(
    size: tuple[int, int],
    x: Callable[[float], float] | None,
    y: Callable[[float], float],
    x_range: tuple[float, float] | None,
    y_range: tuple[float, float],
    say: Callable[[float], str],
) -> str:
    parts = []
    for tick in _ticks(*y_range):
        if y_range[0] <= tick <= y_range[1]:
            at = y(tick)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{size[0] - _RIGHT}" '
                f'y1="{at:.1f}" y2="{at:.1f}"/>'
            )
            parts.append(_text(_LEFT - 6, at + 4, say(tick), "end"))
    if x is not None and x_range is not None:
        for tick in _ticks(*x_range):
            if x_range[0] <= tick <= x_range[1]:
                parts.append(_text(x(tick), size[1] - _BOTTOM + 15, f"{tick:,.6g}", "middle"))
    return "".join(parts)


def _polyline(
    curve: ChartLine,
    points: Sequence[tuple[float, float]],
    x: Callable[[float], float],
    y: Callable[[float], float],
    say: Callable[[float], str],
) -> str:
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    faint = " faint" if curve.is_faint else ""
    line = f'<polyline class="curve {colour_class(curve.colour)}{faint}" points="{path}"/>'
    if curve.is_faint:
        return line
    dots = (
        f'<circle class="{colour_class(curve.colour)}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6">'
        f"<title>{escape(curve.name)}: {escape(say(b))} at {a:,.6g}</title></circle>"
        for a, b in points
    )
    return line + "".join(dots)


def _legend(entries: Sequence[tuple[str, int, bool]]) -> str:
    parts, at = [], float(_LEFT)
    for name, colour, is_faint in entries:
        look = colour_class(colour) + " pale" * is_faint
        parts.append(f'<rect class="{look}" x="{at:.1f}" y="11" width="10" height="10"/>')
        parts.append(_text(at + 14, 20, name, "start"))
        at += 32 + 6.6 * len(name)
    return "".join(parts)


def _axis_title(text: str, size: tuple[int, int]) -> str:
    return _text((_LEFT + size[0] - _RIGHT) / 2, size[1] - 5, text, "middle")


def _rect(
    x: float, y: float, width: float, height: float, colour: int, title: str, is_pale: bool = False
) -> str:
    pale = " pale" if is_pale else ""
    return (
        f'<rect class="{colour_class(colour)}{pale}" x="{x:.2f}" y="{y:.1f}" '
        f'width="{width:.2f}" height="{max(0.0, height):.1f}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, size: tuple[int, int], body: Sequence[str]) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg role="img" '
        f'aria-label="{escape(title)}" viewBox="0 0 {size[0]} {size[1]}">{"".join(body)}</svg>'
        "</figure>"
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The values' range with a little air, never empty."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        air = abs(low) * 0.1 or 1.0
    else:
        air = (high - low) * 0.04
    return low - air, high + air


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers; the last one is not below ``high``."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
