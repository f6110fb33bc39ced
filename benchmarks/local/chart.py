"""The figure: how fast ways are on ideal parallel hardware, and what they compute for it.

left   validation loss against ideal parallel time        right   operations against ideal time
       a line for each of the main ways                           to a target, a point for each way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.local.figures import Reached, Standing, mean, pareto
from geartrain.observe.curves import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

LINES: Final = {
    "backprop": "black",
    "greedy": "tab:blue",
    "chunk2": "tab:cyan",
    "overlap": "tab:purple",
    "stash": "tab:orange",
    "spectrain": "tab:red",
    "deep stash": "0.6",
    "deep spectrain scaled": "tab:brown",
}
LEFT_OUT: Final = "deep"  # of the points, which are many


def draw(
    path: Path, found: Mapping[str, Mapping[str, Standing]], targets: Mapping[str, float]
) -> None:
    """Write the figure.

    Args:
        path: Of the PNG.
        found: Recipe to way to standing.
        targets: Recipe to the loss of its points.

    Raises:
        GeartrainError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    panels = figure.subplots(len(found), 2, squeeze=False)
    for (left, right), (recipe, ways) in zip(panels, found.items(), strict=True):
        _curves(left, recipe, ways)
        _points(right, recipe, ways, targets[recipe])
    figure.savefig(path)


def _curves(panel: Axes, recipe: str, ways: Mapping[str, Standing]) -> None:
    best = min(p["loss"] for p in _curve(ways["backprop"]))
    for way, color in LINES.items():
        if way in ways and ways[way].lines:
            points = _curve(ways[way])
            x = [p["virtual_s"] for p in points]
            panel.plot(x, [p["loss"] for p in points], color=color, marker=".", label=way)
    _log(panel.xaxis)
    panel.set_ylim(best - 0.05 * best, 1.6 * best)
    panel.set_xlabel("ideal parallel time, s")
    panel.set_ylabel("validation loss")
    panel.set_title(f"{recipe}: loss against time")
    panel.legend(frameon=False, fontsize=9)
    _tidy(panel)


def _points(panel: Axes, recipe: str, ways: Mapping[str, Standing], target: float) -> None:
    found: dict[str, Reached] = {}
    for way, standing in ways.items():
        if standing.lines and not way.startswith(LEFT_OUT):
            reached = standing.reached(target)
            if reached is not None:
                found[way] = reached
    front = sorted(pareto(found), key=lambda way: found[way].virtual_s)
    panel.step(
        [found[way].virtual_s for way in front],
        [found[way].operations / 1e9 for way in front],
        where="post",
        color="0.7",
        zorder=1,
    )
    for way, one in found.items():
        color = "tab:blue" if way in front else "0.4"
        panel.plot(one.virtual_s, one.operations / 1e9, "o", color=color, zorder=2)
    _label(panel, found, front)
    _log(panel.xaxis)
    _log(panel.yaxis)
    panel.set_xlabel("ideal parallel time, s")
    panel.set_ylabel("operations, 1e9")
    panel.set_title(f"{recipe}: to loss {target:g}")
    _tidy(panel)


def _label(panel: Axes, found: Mapping[str, Reached], front: Sequence[str]) -> None:
    """Names beside the points, on the side where there is room."""
    order = sorted(found, key=lambda way: found[way].operations)
    for number, way in enumerate(order):
        one = found[way]
        right = number % 2 == 0
        panel.annotate(
            way,
            (one.virtual_s, one.operations / 1e9),
            xytext=(5 if right else -5, 4),
            textcoords="offset points",
            ha="left" if right else "right",
            va="bottom",
            fontsize=8,
            fontweight="bold" if way in front else "normal",
        )
    panel.margins(x=0.25, y=0.1)


def _curve(standing: Standing) -> list[dict[str, float]]:
    """Means over the seeds, evaluation by evaluation."""
    curves = [line["curve"] for line in standing.lines]
    return [
        {name: mean([p[name] for p in points]) for name in ("virtual_s", "loss")}
        for points in zip(*curves, strict=True)
    ]


def _log(axis: Axis) -> None:
    """Powers of ten times 1, 2 and 5, in plain figures."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _tidy(panel: Axes) -> None:
    panel.grid(color="0.9", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
