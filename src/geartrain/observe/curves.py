"""A figure of systems side by side: a metric against seconds, and against epochs.

    metric │   ___---        metric │  ___---        a line: the median over the seeds
           │ _/  __--               │ _/ __-         a band: from the least to the most
           │/__--                   │/_--            dashed: the target
           └────────── s            └───────── epochs

Needs matplotlib, the extra ``plot``.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, final

from geartrain.errors import GeartrainError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by everybody, also in grey by their order; Okabe and Ito 2008.
_COLOURS: Final = (
    "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
)  # fmt: skip
_MARKS: Final = "osD^vPX"
_FEW: Final = 3  # epochs, below which their axis shows fractions
_FAR: Final = 6.0  # how many times slower than the fastest, for seconds to be drawn on a log scale

Point: TypeAlias = tuple[float, float, float]
"""Epochs and seconds so far and the metric, at an evaluation."""


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """A system.

    Args:
        name: In the legend.
        runs: One for each seed: its points, an evaluation each, from the first on.
    """

    name: str
    runs: Sequence[Sequence[Point]]


@final
@dataclass(frozen=True, slots=True)
class Band:
    """The runs of a system, evaluation by evaluation; as long as half of them went on."""

    epochs: Sequence[float]
    seconds: Sequence[float]
    middle: Sequence[float]
    least: Sequence[float]
    most: Sequence[float]


def require_matplotlib() -> None:
    """Refuse to promise a figure that cannot be drawn.

    Raises:
        GeartrainError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise GeartrainError(
            "the figure needs matplotlib, which is not installed: pip install 'geartrain[plot]', "
            "or leave out --out"
        )


def band_of(runs: Sequence[Sequence[Point]]) -> Band:
    """Median, least and most of the metric, medians of epochs and seconds, at each evaluation."""
    rows = []
    for at in range(max(map(len, runs))):
        there = [run[at] for run in runs if len(run) > at]
        if 2 * len(there) < len(runs):
            break
        epochs, seconds, values = zip(*there, strict=True)
        middles = [statistics.median(column) for column in (epochs, seconds, values)]
        rows.append((*middles, min(values), max(values)))
    return Band(*(list(column) for column in zip(*rows, strict=True)))


def draw_curves(
    path: Path, title: str, metric: str, target: float | None, curves: Sequence[Curve]
) -> None:
    """Write the figure.

    Args:
        path: Where; the suffix says in which format.
        title: Above it.
        metric: What the points hold.
        target: A dashed line, or None.
        curves: The systems, ours first: its line is the thickest.

    Raises:
        GeartrainError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bands = [(curve.name, band_of(curve.runs)) for curve in curves]
    for place, (name, band) in enumerate(bands):
        _draw(left, band.seconds, band, place, name)
        _draw(right, band.epochs, band, place, name)
    for axes in (left, right):
        if target is not None:
            axes.axhline(target, color="0.35", linewidth=1, linestyle="--", zorder=1)
        axes.grid(color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)  # else the target is hidden by a line of the grid at its height
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=10)
    if target is not None:
        left.annotate(
            f"target {target:g}", (0.01, target), xycoords=("axes fraction", "data"),
            xytext=(0, 3), textcoords="offset points", fontsize=9, color="0.35", zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )  # fmt: skip
    _scale_seconds(left, [band for _, band in bands])
    _scale_epochs(right, [band for _, band in bands])
    left.set_ylabel(f"{metric}, validation", fontsize=11)
    left.set_xlabel("seconds of training", fontsize=11)
    right.set_xlabel("epochs", fontsize=11)
    figure.suptitle(title, fontsize=12)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", fontsize=10,
        ncols=min(len(curves), 6), frameon=False,
    )  # fmt: skip
    figure.savefig(path)


def _draw(axes: Axes, x: Sequence[float], band: Band, place: int, name: str) -> None:
    colour = _COLOURS[place % len(_COLOURS)]
    first = place == 0
    axes.fill_between(x, band.least, band.most, color=colour, alpha=0.15, linewidth=0)
    axes.plot(
        x, band.middle, color=colour, label=name, marker=_MARKS[place % len(_MARKS)],
        markersize=5, linewidth=2.6 if first else 1.5, zorder=4 if first else 3,
    )  # fmt: skip


def _scale_epochs(axes: Axes, bands: Sequence[Band]) -> None:
    """Whole numbers, unless a system ends within the first few; from 0 if points are fractions."""
    from matplotlib.ticker import MaxNLocator

    whole = min(band.epochs[-1] for band in bands) >= _FEW
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=whole, steps=[1, 2, 2.5, 5, 10]))
    if any(band.epochs[0] < 1 for band in bands):
        axes.set_xlim(left=0)


def _scale_seconds(axes: Axes, bands: Sequence[Band]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    ends = [band.seconds[-1] for band in bands]
    if min(ends) > 0 and max(ends) > _FAR * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
